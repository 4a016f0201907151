"""The built library: found, checked and called. It is loaded at the first use, never built here."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from megakit.ops.folder import NAMES, folder

ABI_VERSION = 2
"""MEGAKIT_ABI_VERSION of csrc/include/megakit/abi.h."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}

_SIGNATURES = {
    "mk_norm_forward": "pppppppplifi",
    "mk_norm_backward": "ppppppppppliii",
    "mk_rope": "pppplii" + "llll" + "iii",
    "mk_swiglu_forward": "pplii",
    "mk_swiglu_backward": "ppplii",
    "mk_gelu_forward": "ppplii" + "i",
    "mk_gelu_backward": "pppppp" + "liiii",
    "mk_loss_forward": "ppp" + "liili",
    "mk_loss_backward": "ppppp" + "liill" + "flfi",
    "mk_softmax_forward": "ppp" + "liiifii",
    "mk_softmax_backward": "ppp" + "lifi",
    "mk_dropout": "ppp" + "lfui",
    "mk_adamw": "pi" + "dddddd" + "i",
    "mk_square_sum": "pp" + "li",
}
"""The parameters of each function but the last, the stream: pointer, int, int64, uint64, float, double."""

NO_KERNEL_IMAGE = 209
"""cudaErrorNoKernelImageForDevice: the library has no code for this GPU."""

_REFUSALS = {-1: "a dtype that the kernel doesn't have", -2: "a size or an alignment that the kernel doesn't have"}


class Missing(Exception):
    """There is no usable library; the message says why and what to do."""


@functools.cache
def load(device_type: str) -> ctypes.CDLL:
    """The library for tensors on that type of device. Raises Missing."""
    if device_type not in NAMES:
        raise Missing(f"there are no kernels for {device_type} devices")
    path = folder() / NAMES[device_type]
    cure = f"run python -m megakit.ops.build {'cuda' if device_type == 'cuda' else 'emulated'}"
    if not path.is_file():
        raise Missing(f"there is no {path}: {cure}")
    cure += " --force"  # a damaged file may still say that it is up to date
    try:
        if _cut_off(path):
            raise Missing(f"{path} is cut off: {cure}")
        library = ctypes.CDLL(str(path))
        found = library.megakit_abi_version()
        if found != ABI_VERSION:
            raise Missing(f"{path} has interface {found}, this megakit needs {ABI_VERSION}: {cure}")
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [*(_TYPES[t] for t in types), ctypes.c_void_p], ctypes.c_int
        library.megakit_error.argtypes, library.megakit_error.restype = [ctypes.c_int], ctypes.c_char_p
    except (OSError, AttributeError) as e:
        raise Missing(f"{path} can't be loaded ({e}): {cure}") from e
    return library


def _cut_off(path: Path) -> bool:
    """An ELF file that ends before its table of sections, which linkers put last: to load it could end the process by SIGBUS."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return False  # the loader knows what to say
    (offset,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return path.stat().st_size < offset + size * count


def call(name: str, device: torch.device, *args: Any) -> None:
    """Call `name` on the current stream of `device`; a tensor stands for its pointer, None for a null one.

    Raises RuntimeError if the kernel refuses the call or can't be started.
    """
    cuda, library = device.type == "cuda", load(device.type)
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.cuda.device(device) if cuda else nullcontext():
        stream = torch.cuda.current_stream(device).cuda_stream if cuda else None
        status = getattr(library, name)(*values, stream)
    if status:
        shapes = ", ".join(f"{list(a.shape)} {str(a.dtype).removeprefix('torch.')}" for a in args if isinstance(a, torch.Tensor))
        raise RuntimeError(f"{name}: {_REFUSALS.get(status) or _cuda_error(library, status)}; on {device}: {shapes}")


def _cuda_error(library: ctypes.CDLL, status: int) -> str:
    cure = {NO_KERNEL_IMAGE: "build for it: python -m megakit.ops.build --arch"}.get(
        status, "an earlier kernel's error may show here, CUDA_LAUNCH_BLOCKING=1 tells whose it is"
    )
    return f"CUDA error {status}, {library.megakit_error(status).decode()} ({cure})"


def dtype_code(x: torch.Tensor) -> int:
    """Raises RuntimeError for a dtype without kernels."""
    if x.dtype not in DTYPES:
        raise RuntimeError(f"no kernel for {x.dtype}: use one of {', '.join(map(str, DTYPES))}")
    return DTYPES[x.dtype]


def needs(name: str, t: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raises RuntimeError unless t, where there is one, is what the kernel takes: it would read or write beside it."""
    if t is not None and (t.shape != torch.Size(shape) or t.dtype != dtype or t.device != device):
        is_, wanted = (f"{list(s)} of {d} on {where}" for s, d, where in ((t.shape, t.dtype, t.device), (shape, dtype, device)))
        raise RuntimeError(f"{name} is {is_}, and the kernel takes {wanted}: pass it so")


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of the emulation a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


_NAMESPACE = torch.library.Library("megakit", "DEF")
F = TypeVar("F", bound=Callable[..., Any])


def operator(schema: str) -> Callable[[F], F]:
    """Define torch.ops.megakit.NAME, on CPU and CUDA tensors by this function."""

    def register(function: F) -> F:
        _NAMESPACE.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _NAMESPACE.impl(schema.split("(")[0], function, key)
        return function

    return register


def fake(name: str) -> Callable[[F], F]:
    """What the operator makes of fake tensors: shapes and dtypes only."""
    return torch.library.register_fake(f"megakit::{name}", lib=_NAMESPACE)


def gradient(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """The operator's backward pass, as torch.library.register_autograd takes it."""
    torch.library.register_autograd(f"megakit::{name}", backward, setup_context=setup_context, lib=_NAMESPACE)


def no_second_gradient(name: str) -> None:
    """Differentiating the operator's backward pass, as after create_graph=True, raises RuntimeError."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"megakit::{name} has first gradients only: use torch's operator where a second one is needed")

    gradient(f"{name}_backward", refuse, lambda ctx, inputs, output: None)
