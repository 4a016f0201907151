"""The torch.library side of the kernels: schemas, fake tensors, gradients, torch.compile, and what they refuse."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from torch.library import opcheck

from megakit.ops.activation import gelu, swiglu
from megakit.ops.dropout import dropout_add
from megakit.ops.folder import SOURCES
from megakit.ops.fused import library, optimizer
from megakit.ops.loss import loss_stats
from megakit.ops.norm import add_norm, norm
from megakit.ops.rope import rotate, rotate_
from megakit.ops.softmax import softmax
from tests.ops.emulation import FOLDER

OPS = torch.ops.megakit


def rand(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def calls():
    """(operator, arguments) of each, as it is used."""
    table = torch.randn(5, 1, 1, 4), torch.randn(5, 1, 1, 4)
    weight, bias = rand(24), rand(24)
    mean, rstd = torch.randn(3), torch.rand(3)
    flat = [rand(7, grad=False) for _ in range(2)]
    yield OPS.norm, (rand(3, 24), weight, None, 1e-5)
    yield OPS.norm, (rand(3, 24, dtype=torch.bfloat16), *(t.detach().bfloat16().requires_grad_() for t in (weight, bias)), 1e-5)
    yield OPS.add_norm, (rand(3, 24), rand(3, 24), weight, bias, 1e-5)
    yield OPS.norm_backward, (*(t.detach() for t in (rand(3, 24), rand(3, 24), rand(3, 24), weight)), mean, rstd, True)
    yield OPS.rope, (rand(3, 2, 3, 8), *table, 2, False, False)
    yield OPS.rope_, (rand(3, 2, 3, 8, grad=False), *table, 2, 0, True, False)
    yield OPS.swiglu, (rand(2, 3, 24),)
    yield OPS.swiglu_backward, (rand(3, 12, grad=False), rand(3, 24, grad=False))
    yield OPS.gelu, (rand(3, 24), bias, True)
    yield OPS.gelu, (rand(3, 24), None, False)
    yield OPS.gelu_backward, (rand(3, 24, grad=False), rand(3, 24, grad=False), bias.detach(), True)
    yield OPS.softmax, (rand(2, 2, 3, 8), torch.rand(2, 1, 3, 8) < 0.5, 0.3, True)
    yield OPS.softmax_backward, (rand(2, 2, 3, 8, grad=False), rand(2, 2, 3, 8, grad=False), 0.3)
    yield OPS.dropout_add, (rand(24), rand(24), 0.3, 5)
    yield OPS.loss_stats, (rand(3, 8, grad=False), torch.tensor([1, 2, 3]), 7, 0)
    labels = torch.tensor([1, 2, 3])
    one = torch.tensor(1.0)
    yield OPS.loss_gradient_, (rand(3, 8, grad=False), torch.ones(3), torch.ones(3), one, labels, 7, 0, -100, 7, 0.1, 0.0)
    moments = [t.abs() for t in flat]
    yield OPS.adamw_, (flat, flat[::-1], moments, flat, [], [0.1, 0.2], [0.0, 0.0], 0.9, 0.95, 1e-8, 0.1, 0.05, 1.0)
    yield OPS.square_sum, (rand(9, grad=False),)


CALLS = [str(operator) for operator, _ in calls()]


@pytest.mark.parametrize("index", range(len(CALLS)), ids=CALLS)
def test_opcheck(emulated, index):
    torch.manual_seed(0)
    operator, args = list(calls())[index]
    opcheck(operator.default, args)


def test_every_operator_is_checked():
    defined = {name.split("::")[1] for name in (s.name for s in torch._C._jit_get_all_schemas()) if name.startswith("megakit::")}
    assert defined and defined == {name.split(".")[1] for name in CALLS}


CASES = {
    "rms norm": (lambda x, w: norm(x, w, None, 1e-5, "csrc"), [(3, 10), (10,)]),
    "layer norm": (lambda x, w, b: norm(x, w, b, 1e-5, "csrc"), [(3, 10), (10,), (10,)]),
    "add and norm": (lambda x, r, w: add_norm(x, r, w, None, 1e-5, "csrc"), [(3, 10), (3, 10), (10,)]),
    "rope": (lambda x: rotate(x, (torch.ones(2, 3), torch.ones(2, 3)), 0, True, "csrc"), [(2, 1, 2, 6)]),
    "rope in place": (lambda x: rotate_(x * 1.0, 1, 6, (torch.ones(2, 3), torch.ones(2, 3))), [(2, 1, 12)]),
    "swiglu": (lambda x: swiglu(x, "csrc"), [(3, 10)]),
    "gelu": (lambda x, b: gelu(x, b, False, "csrc"), [(3, 5), (5,)]),
    "gelu by tanh": (lambda x, b: gelu(x, b, True, "csrc"), [(3, 5), (5,)]),
    "softmax": (lambda x: softmax(x, 0.7, True, None, "csrc"), [(1, 2, 3, 4)]),
    "dropout": (lambda x, r: dropout_add(x, r, 0.4, 9), [(11,), (11,)]),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck(emulated, name):
    """In fp32, so with wide steps: it finds a wrong formula; test_kernels.py holds them to float64."""
    torch.manual_seed(0)
    function, shapes = CASES[name]
    inputs = [rand(*shape) for shape in shapes]
    assert torch.autograd.gradcheck(function, inputs, eps=1e-2, atol=5e-3, rtol=5e-3, nondet_tol=1e-6)


LINEAR = {"rope", "dropout"}
"""Their backward passes are the operators themselves, which have gradients."""


@pytest.mark.parametrize("name", list(CASES))
def test_a_second_gradient_is_right_or_refused(emulated, name):
    function, shapes = CASES[name]
    inputs = [rand(*shape) for shape in shapes]
    out = function(*inputs)
    total = sum(o.square().sum() for o in (out if isinstance(out, tuple) else (out,)))
    first = torch.autograd.grad(total, inputs, create_graph=True)
    if name in LINEAR:
        jacobian = torch.autograd.functional.jacobian(function, tuple(inputs))[0].reshape(-1, inputs[0].numel())
        want = 2 * (jacobian.T @ jacobian).sum(0)  # of |J x + ...|^2, whose gradient is 2 J^T (J x + ...)
        (second,) = torch.autograd.grad(first[0].sum(), inputs[0])
        assert want.any()
        torch.testing.assert_close(second.flatten(), want)
        return
    with pytest.raises(RuntimeError, match=r"first gradients only|once_differentiable"):
        sum(f.sum() for f in first).backward()


@pytest.mark.parametrize("name", [n for n in CASES if n != "rope in place"])
def test_compiles_whole(emulated, name):
    """torch.compile(fullgraph=True), forward and backward, gives what eager gives."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    function, shapes = CASES[name]
    inputs = [rand(*shape) for shape in shapes]

    def total(*args):
        out = function(*args)
        return sum((o * o).sum() for o in (out if isinstance(out, tuple) else (out,)))

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(total(*inputs), inputs)):
        torch.testing.assert_close(got, want)


def test_what_a_kernel_does_not_have_is_left_to_torch(emulated):
    """float64, mixed dtypes, rows too long."""
    for x, w in [
        (rand(2, 8, dtype=torch.float64), rand(8, dtype=torch.float64)),
        (rand(2, 8, dtype=torch.bfloat16), rand(8)),
        (rand(1, 4097), rand(4097)),
        (rand(1, 16392), rand(16392)),
        (rand(0, 8), rand(8)),
    ]:
        assert torch.equal(norm(x, w, None, 1e-5, "csrc"), norm(x, w, None, 1e-5, "torch"))


def test_a_kernel_refuses_what_it_does_not_have(emulated):
    for operator, args, words in [
        (OPS.norm, (torch.zeros(1, 4097), torch.ones(4097), None, 1e-5), "mk_norm_forward: a size"),
        (OPS.swiglu, (torch.zeros(2, 4, dtype=torch.float64),), "no kernel for torch.float64"),
        (OPS.rope, (torch.zeros(1, 1, 1, 4), torch.ones(1, 2).bfloat16(), torch.ones(1, 2), 0, False, False), "float32"),
        (OPS.dropout_add, (torch.zeros(4), None, 1.0, 3), "mk_dropout: a size"),
        (OPS.square_sum, (torch.zeros(4, dtype=torch.bfloat16),), "float32"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            operator(*args)


def unfit():
    """(operator, arguments) with one argument that the kernel would read, or write, beside."""
    x, row, labels = torch.zeros(4, 64), torch.ones(64), torch.zeros(4, dtype=torch.int64)
    four, one, statistics = torch.ones(4), torch.tensor(1.0), (torch.ones(0), torch.ones(4))
    flat, numbers = [torch.zeros(8)], (0.9, 0.95, 1e-8, 0.1, 0.05, 1.0)
    yield "weight", OPS.norm, (x, row[:32], None, 1e-5)
    yield "weight", OPS.norm, (x, row.bfloat16(), None, 1e-5)
    yield "bias", OPS.norm, (x, row, row[:3], 1e-5)
    yield "residual", OPS.add_norm, (x, row, row, None, 1e-5)
    yield "dy", OPS.norm_backward, (x[:2], None, x, row, *statistics, False)
    yield "dsum", OPS.norm_backward, (x, x.half(), x, row, *statistics, False)
    yield "mean", OPS.norm_backward, (x, None, x, row, *statistics, True)
    yield "rstd", OPS.norm_backward, (x, None, x, row, torch.ones(0), torch.ones(9), False)
    yield "columns", OPS.swiglu, (x[:, :63],)
    yield "dy", OPS.swiglu_backward, (x[:2, :32], x)
    yield "bias", OPS.gelu, (x, row[:32], False)
    yield "bias", OPS.gelu_backward, (x, x, row.half(), False)
    yield "residual", OPS.dropout_add, (x, row, 0.1, 3)
    yield "dy", OPS.softmax_backward, (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 4, 8), 1.0)
    yield "labels", OPS.loss_stats, (x, labels.int(), 64, 0)
    yield "labels", OPS.loss_stats, (x, torch.zeros(40, dtype=torch.int64), 64, 0)
    end = (64, 0, -100, 64, 0.0, 0.0)
    yield "top", OPS.loss_gradient_, (x.clone(), four[:2], four, one, labels, *end)
    yield "exps", OPS.loss_gradient_, (x.clone(), four, four.double(), one, labels, *end)
    yield "grad", OPS.loss_gradient_, (x.clone(), four, four, one.double(), labels, *end)
    yield "shard", OPS.adamw_, (flat, flat, flat, [torch.zeros(4)], [], [0.1], [0.0], *numbers)
    yield "float64", OPS.adamw_, (flat, flat, flat, flat, [torch.zeros(8).double()], [0.1], [0.0], *numbers)
    mixed = [torch.zeros(8).bfloat16(), torch.zeros(8)]
    yield "shard", OPS.adamw_, (flat * 2, flat * 2, flat * 2, flat * 2, mixed, [0.1] * 2, [0.0] * 2, *numbers)


@pytest.mark.parametrize("index", range(len(list(unfit()))), ids=[f"{o.__name__} {name}" for name, o, _ in unfit()])
def test_an_operator_refuses_what_its_kernel_would_read_beside(emulated, index):
    name, operator, args = list(unfit())[index]
    with pytest.raises(RuntimeError, match=name):
        operator(*args)


def test_an_operator_refuses_a_tensor_that_is_elsewhere():
    library.needs("weight", None, (2,), torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"weight is \[2\] of torch.float32 on meta, and the kernel takes .* on cpu"):
        library.needs("weight", torch.ones(2, device="meta"), (2,), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("shape, swap", [((1, 6, 2, 8), (0, 1)), ((6, 1, 2, 8), (0, 1)), ((1, 1, 6, 8), (0, 2))])
def test_rope_of_one_sample_or_one_token_of_any_stride(emulated, shape, swap):
    """A dim of size 1 has any stride, and is without gaps all the same."""
    x = torch.randn(shape).transpose(*swap)
    table = torch.randn(6, 1, 1, 4), torch.randn(6, 1, 1, 4)
    expected = rotate(x, table)
    torch.testing.assert_close(OPS.rope(x, *table, 0, False, False), expected)
    OPS.rope_(x, *table, x.shape[2], 0, False, False)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("width", [33, 64])  # accesses of one element and of four
def test_a_nan_is_not_lost(emulated, width):
    """The maximum passes over it: its row's sum must not."""
    z, labels = torch.randn(3, width), torch.tensor([9, 9, 9])
    z[1, 4:8] = float("nan")
    for got, expected in zip(loss_stats(z, labels, width, 0, "csrc")[1:], loss_stats(z, labels, width, 0)[1:]):
        torch.testing.assert_close(got, expected, equal_nan=True)
    got, expected = (softmax(z[None, None], backend=b) for b in ("csrc", "torch"))
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9999])
def test_a_library_that_is_cut_off_is_missing(emulated, tmp_path, share):
    """As a copy leaves it when a disk is full. The loader maps it, and the process would end by SIGBUS: so, in another one."""
    whole = (FOLDER / "libmegakit_emulated.so").read_bytes()
    (tmp_path / "libmegakit_emulated.so").write_bytes(whole[: int(share * len(whole))])
    code = "from megakit.ops.fused.library import load; load('cpu')"
    environment = {**os.environ, "MEGAKIT_KERNELS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Missing" in done.stderr and "is cut off" in done.stderr, done


def test_a_new_seed_compiles_nothing_new(emulated):
    """Every call has its own: torch would give up after eight."""
    torch._dynamo.reset()
    x, graphs = torch.randn(64, requires_grad=True), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, seed: dropout_add(x, None, 0.5, seed), fullgraph=True, backend=graphs)
    for seed in (3, 2**40, 2**62 + 1, *range(100, 110)):
        got, expected = compiled(x, seed), dropout_add(x, None, 0.5, seed)
        assert torch.equal(got, expected)
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
    assert graphs.frame_count == 2  # one for the first seed, one for all others


def test_a_new_offset_compiles_nothing_new(emulated):
    """Of a rotation: each piece of a sequence begins elsewhere."""
    torch._dynamo.reset()
    x, table = torch.randn(2, 1, 2, 8, requires_grad=True), (torch.randn(40, 1, 1, 4), torch.randn(40, 1, 1, 4))
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, offset: rotate(x, table, offset, False, "csrc"), fullgraph=True, backend=graphs)
    for offset in range(5, 20):
        got, expected = compiled(x, offset), rotate(x, table, offset, False, "csrc")
        assert torch.equal(got, expected)
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
    assert graphs.frame_count == 2  # one for the first offset, one for all others


class _Fails:
    """A library whose kernels can't be started on this GPU."""

    def __init__(self, status: int, words: bytes):
        self.mk_swiglu_forward = lambda *args: status
        self.megakit_error = lambda error: {status: words}[error]


def test_a_cuda_error_is_named(monkeypatch):
    """In one line with the operator and what it was called with."""
    for status, words, cure in (
        (209, "no kernel image is available for execution on the device", "megakit.ops.build --arch"),
        (700, "an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"),
    ):
        failing = _Fails(status, words.encode())
        monkeypatch.setattr(library, "load", lambda device, failing=failing: failing)
        with pytest.raises(RuntimeError) as caught:
            OPS.swiglu(torch.zeros(2, 3, 8, dtype=torch.bfloat16))
        said = str(caught.value)
        assert said.startswith(f"mk_swiglu_forward: CUDA error {status}, {words} (") and cure in said and "\n" not in said
        assert said.endswith("on cpu: [2, 3, 4] bfloat16, [2, 3, 8] bfloat16")


def test_the_library_knows_what_cuda_calls_an_error(tmp_path):
    """The source of megakit_error, by nvcc: no GPU is needed to ask."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    out = tmp_path / "abi.so"
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "--cudart", "static", str(SOURCES / "kernels/abi.cu"), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    function = ctypes.CDLL(str(out)).megakit_error
    function.restype = ctypes.c_char_p
    assert function(209) == b"no kernel image is available for execution on the device" and function(2) == b"out of memory"


C_TYPES = {"int": "i", "int64_t": "l", "uint64_t": "u", "float": "f", "double": "d"}


def test_signatures_are_those_of_the_header():
    """Each parameter of abi.h, by its letter; the last is the stream."""
    header = re.sub(r"/\*.*?\*/", "", (SOURCES / "include/megakit/abi.h").read_text(), flags=re.S)
    found = {}
    for name, parameters in re.findall(r"int (mk_\w+)\((.*?)\);", header, re.S):
        types = [re.sub(r"\w+$", "", " ".join(p.split())).replace("const ", "").strip() for p in parameters.split(",")]
        assert types[-1] == "void*"
        found[name] = "".join("p" if "*" in t else C_TYPES[t] for t in types[:-1])
    assert found == library._SIGNATURES
    assert f"#define MEGAKIT_ABI_VERSION {library.ABI_VERSION}\n" in header
    assert f"#define MEGAKIT_SHARDS {optimizer.SHARDS}\n" in header


def test_the_struct_is_that_of_the_header():
    header = (SOURCES / "include/megakit/abi.h").read_text()
    body = re.search(r"typedef struct \{(.*?)\} MegakitShard;", header, re.S)[1]
    fields = re.findall(r"(\w+)(\*?) (\w+);", body)
    kinds = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
    assert [(name, ctypes.c_void_p if star else kinds[t]) for t, star, name in fields] == list(optimizer._Shard._fields_)


def test_without_a_usable_library_operators_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAKIT_KERNELS", str(tmp_path))
    library.load.cache_clear()
    with pytest.raises(library.Missing, match=r"there is no .*run python -m megakit.ops.build emulated"):
        OPS.swiglu(torch.zeros(2, 4))
    (tmp_path / "libmegakit_emulated.so").write_bytes(b"not a library")
    with pytest.raises(library.Missing, match=r"can't be loaded.*emulated --force"):
        library.load("cpu")
    with pytest.raises(library.Missing, match="no kernels for mps"):
        library.load("mps")
    library.load.cache_clear()
