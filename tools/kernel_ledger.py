"""The ledger of the kernels, csrc/LEDGER.md: what can be known of them without a GPU.

    python tools/kernel_ledger.py [--check]

Of the compiler (nvcc and ptxas for sm_90a): registers, spills, shared memory, occupancy, width of the accesses to global
memory. Of the emulation: bytes moved at training shapes, over the least possible. --check: exit code 1 if the page is not
what would be written.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megakit.errors import Refused
from megakit.ops import build
from megakit.ops.folder import SOURCES
from megakit.ops.fused.norm import backward_blocks

PATH = SOURCES / "LEDGER.md"
ARCHITECTURE = "90a"


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel's template."""

    name: str
    """Demangled: norm_forward<bf16, 8, 256, 16, false>."""
    threads: int
    registers: int
    spilled: int
    """Bytes, stores and loads."""
    shared: int
    """Bytes."""
    wide: int
    """Accesses to global memory of 16 bytes, in the code."""
    accesses: int

    @property
    def occupancy(self) -> float:
        """Threads of a multiprocessor that this kernel can fill, of 2,048.

        Compute capability 9.0 (CUDA's cuda_occupancy.h): 65,536 registers, given to warps by 256 and to 4 partitions alike; 64
        warps; 32 blocks; 228 KiB of shared memory, of which each block takes 1 KiB more than it asks for.
        """
        warps = self.threads // 32
        each = -(-self.registers * 32 // 256) * 256
        by_registers = 65536 // each // 4 * 4 // warps
        by_shared = 233472 // (-(-self.shared // 128) * 128 + 1024)
        return min(by_registers, 64 // warps, 32, by_shared) * warps / 64


@dataclass(frozen=True)
class Moved:
    """Bytes of one call."""

    name: str
    shape: str
    least: int
    """Each input read once, each output written once."""
    bus: int
    """Of different sectors of 32 bytes read, and written: what must cross the memory bus."""
    issued: int
    """As the threads ask: what is read again comes from a cache."""
    sectors: float
    """Sectors that the warps' accesses touch, over how few could hold the bytes."""


def compiled() -> list[Kernel]:
    """Every instance. Raises Refused without nvcc and ptxas."""
    nvcc = build.cuda().compiler
    ptxas = shutil.which("ptxas", path=str(Path(nvcc).resolve().parent)) or shutil.which("ptxas")
    if ptxas is None:
        raise Refused("no ptxas beside nvcc or in PATH: install the CUDA toolkit")
    with tempfile.TemporaryDirectory() as aside, ThreadPoolExecutor(2) as pool:
        units = pool.map(lambda path: _unit(nvcc, ptxas, path, Path(aside)), sorted(SOURCES.glob("kernels/*.cu")))
        return sorted({kernel for unit in units for kernel in unit}, key=lambda k: k.name)  # headers' kernels are in several


def _unit(nvcc: str, ptxas: str, source: Path, aside: Path) -> list[Kernel]:
    ptx = aside / f"{source.stem}.ptx"
    subprocess.run([nvcc, "-std=c++17", "-O3", "-ptx", f"-arch=compute_{ARCHITECTURE}", str(source), "-o", str(ptx)], check=True)
    command = [ptxas, "-v", f"-arch=sm_{ARCHITECTURE}", str(ptx), "-o", str(aside / f"{source.stem}.cubin")]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)", words, re.S
    )
    names = _demangled([name for name, *_ in found])
    bodies = {m[1]: m[2] for m in re.finditer(r"\.entry (\w+)\((.*?\n)\}\n", ptx.read_text(), re.S)}
    out = []
    for (mangled, stores, loads, registers, rest), name in zip(found, names):
        body = bodies[mangled]
        threads = re.search(r"\.maxntid (\d+)", body)
        shared = re.search(r"(\d+) bytes smem", rest)
        accesses = re.findall(r"\b(?:ld|st)\.global((?:\.\w+)*)", body)
        wide = sum(bool(re.search(r"v4\.[bfu]32|v2\.[bfu]64", a)) for a in accesses)
        assert threads, f"{name} has no launch bounds"
        out.append(
            Kernel(
                name,
                int(threads[1]),
                int(registers),
                int(stores) + int(loads),
                int(shared[1]) if shared else 0,
                wide,
                len(accesses),
            )
        )
    return out


def _demangled(names: list[str]) -> list[str]:
    words = subprocess.run(["c++filt", *names], check=True, capture_output=True, text=True).stdout if names else ""
    short = [re.sub(r"\(anonymous namespace\)::|mk::|^void ", "", line) for line in words.splitlines()]
    return [re.sub(r"\((?!bool).*", "", s).replace("__nv_bfloat16", "bf16").replace("__half", "half").strip() for s in short]


class Emulation:
    """The emulated library, counting."""

    def __init__(self, folder: Path):
        target = build.emulated()
        build.build(target, folder)
        self.library = ctypes.CDLL(str(folder / target.name))

    def moved(self, name: str, shape: str, least: int, *calls: tuple) -> Moved:
        """Of (function, arguments); a list of ctypes or numbers and Buffers."""
        self.library.simt_count_traffic()
        for function, *args in calls:
            status = getattr(self.library, function)(*map(_argument, args), None)
            assert status == 0, f"{function}: {status}"
        n = (ctypes.c_long * 9)()
        self.library.simt_traffic(n)
        return Moved(name, shape, least, n[3] + n[4], n[1] + n[2], n[7] / n[8])


class Buffer:
    """Zeros, at an address that is a multiple of 256, as torch's allocator gives."""

    def __init__(self, size: int):
        self._memory = ctypes.create_string_buffer(size + 256)
        self.at = -(-ctypes.addressof(self._memory) // 256) * 256


class Shards(ctypes.Structure):
    """MegakitShard."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "wmvgc"),
        ("n", ctypes.c_int64),
        ("lr", ctypes.c_float),
        ("d", ctypes.c_float),
    )


def _argument(value: object) -> object:
    if isinstance(value, Buffer):
        return ctypes.c_void_p(value.at)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)  # an int parameter takes its low half
    return value


BF16 = 1


def traffic(e: Emulation) -> list[Moved]:
    """At the widths of Llama 7B in bf16, with fewer rows."""
    return [*_norms(e), *_rope(e), *_activations(e), *_scores(e), *_flat(e)]


def _norms(e: Emulation) -> Iterator[Moved]:
    """As many rows for each persistent block as it gets of 16,384 on 132 multiprocessors."""
    blocks, h, most = 3, 4096, 405
    a, b, c, d = (Buffer(2 * most * h) for _ in range(4))
    w, s, m, dw, db, part = (Buffer(n) for n in (2 * h, 4 * most, 4 * most, 2 * h, 2 * h, 8 * blocks * h))
    for kind, mean, bias, weights in (("RMSNorm", None, None, 1), ("LayerNorm", m, db, 2)):
        for of, added, sums in (("", None, 0), (" of a sum", d, 1)):
            rows = blocks * (16384 // backward_blocks(132, 16384, h, 2, weights == 2, bool(sums)))
            assert rows <= most
            shape, row = f"{rows} x {h}", 2 * rows * h
            few, to = weights * (2 * h + 4 * rows), c if added else None
            call = ("mk_norm_forward", a, to, mean, s, b, added, w, bias, rows, h, 1e-5, BF16)
            yield e.moved(f"{kind}{of}, forward", shape, (2 + 2 * sums) * row + few, call)
            back = ("mk_norm_backward", a, dw, bias, part, b, added, c, w, mean, s, rows, h, blocks, BF16)
            yield e.moved(f"{kind}{of}, backward", shape, (3 + sums) * row + few + 2 * h, back)


def _rope(e: Emulation) -> Iterator[Moved]:
    tokens, heads, dim, groups = 64, 64, 128, 96
    q, table = Buffer(2 * tokens * groups * dim), Buffer(2 * tokens * dim)
    least = 4 * tokens * heads * dim + 2 * tokens * dim  # the same buffer is cos and sin
    call = ("mk_rope", q, q, table, table, tokens, heads, dim, groups * dim, groups * dim, 1, 0, 0, 0, BF16)
    yield e.moved("rotary, in place", f"{tokens} x {heads} of {groups} x {dim}", least, call)


def _activations(e: Emulation) -> Iterator[Moved]:
    rows, f = 32, 11008
    x, y, dx, bias = (Buffer(n * rows * f) for n in (4, 2, 4, 2))
    n, shape = rows * f, f"{rows} x {f}"
    yield e.moved("SwiGLU, forward", shape, 6 * n, ("mk_swiglu_forward", y, x, rows, f, BF16))
    yield e.moved("SwiGLU, backward", shape, 10 * n, ("mk_swiglu_backward", dx, y, x, rows, f, BF16))
    yield e.moved("GELU, forward", shape, 4 * n + 2 * f, ("mk_gelu_forward", y, x, bias, rows, f, 1, BF16))
    rows, f, blocks = 248, 4096, 2  # 124 rows per block, as for the norms
    x, y, dx = (Buffer(2 * rows * f) for _ in range(3))
    dbias, part = Buffer(2 * f), Buffer(4 * blocks * f)
    back = ("mk_gelu_backward", dx, dbias, part, y, x, bias, rows, f, blocks, 1, BF16)
    yield e.moved("GELU, backward", f"{rows} x {f}", 6 * rows * f + 4 * f, back)


def _scores(e: Emulation) -> Iterator[Moved]:
    rows, v = 16, 32000
    z, stats, ids, grad = (Buffer(n) for n in (2 * rows * v, 16 * rows, 8 * rows, 4))
    call = ("mk_loss_forward", stats, z, ids, rows, v, v, 0, BF16)
    yield e.moved("cross entropy, forward", f"{rows} x {v}", 2 * rows * v + 24 * rows, call)
    back = ("mk_loss_backward", z, stats, stats, grad, ids, rows, v, v, 0, -100, 0.0, v, 0.0, BF16)
    yield e.moved("cross entropy, backward in place", f"{rows} x {v}", 4 * rows * v + 12 * rows, back)
    rows, keys = 32, 4096
    x, y, dx = (Buffer(2 * rows * keys) for _ in range(3))
    n, shape = rows * keys, f"{rows} x {keys}"
    yield e.moved("softmax, forward", shape, 4 * n, ("mk_softmax_forward", y, x, None, 1, 1, rows, keys, 1.0, 0, BF16))
    yield e.moved("softmax, backward", shape, 6 * n, ("mk_softmax_backward", dx, y, x, rows, keys, 1.0, BF16))


def _flat(e: Emulation) -> Iterator[Moved]:
    n = 1 << 18
    x, y, r = (Buffer(2 * n) for _ in range(3))
    yield e.moved("dropout and add", f"{n:,}", 6 * n, ("mk_dropout", y, x, r, n, 0.1, 7, BF16))
    flat = [Buffer(4 * n) for _ in range(4)]
    shard = Shards(*(t.at for t in flat), x.at, n, 0.1, 0.01)
    numbers = map(ctypes.c_double, (0.9, 0.95, 1e-8, 0.1, 0.05, 1.0))
    yield e.moved("AdamW", f"{n:,}", 30 * n, ("mk_adamw", ctypes.byref(shard), 1, *numbers, BF16))
    yield e.moved("squared norm", f"{n:,}", 4 * n + 64, ("mk_square_sum", Buffer(64), flat[0], n, 8))


HEAD = """# Ledger of the kernels

Made by `python tools/kernel_ledger.py`; a test holds it to the sources. Nothing here was measured on a GPU.

## Bytes

Each call at the widths of Llama 7B in bf16. Least: every input read once, every output written once. Bus: the bytes of
different 32-byte sectors that are read and written, so with the partial sums of a backward pass. Issued: as the threads ask;
what is read again, as the weights of a norm by every row, comes from a cache. Sectors: those that warps touch, over the
fewest that hold the bytes (1: every access is coalesced). Counted in the emulation.

| call | shape | least, bytes | bus / least | issued / least | sectors |
|---|---|---|---|---|---|
"""

CODE = """
## Code

nvcc {version}, sm_{architecture}. {count} instances, {spills}, at most {registers} registers. Wide: accesses to global
memory of 16 bytes, of all in the code; the others are statistics, labels, masks, partial sums and the ends of flat buffers.
Occupancy is what registers and shared memory allow; persistent kernels start fewer blocks. Template arguments: dtype,
elements per access, threads, elements per thread, then what is in csrc/kernels. Left out: instances of half, which are as
those of bf16, and those with accesses of single elements, for odd widths.

| kernel | threads | registers | shared, bytes | occupancy | wide |
|---|---|---|---|---|---|
"""


def of_training(kernel: Kernel) -> bool:
    """An instance that a run with ordinary widths meets: not half, not of single elements."""
    single = re.search(r"<\w+, 1\b|<(?:\w+, )?false>", kernel.name)
    return "half" not in kernel.name and not (single and kernel.name.split("<")[0] != "column_sum")


def render(kernels: list[Kernel], moved: list[Moved]) -> str:
    """The page."""
    lines = [
        f"| {m.name} | {m.shape} | {m.least:,} | {m.bus / m.least:.3f} | {m.issued / m.least:.2f} | {m.sectors:.2f} |"
        for m in moved
    ]
    found = re.search(r"release ([\d.]+)", build.cuda().version)
    spilled = [k.name for k in kernels if k.spilled]
    code = CODE.format(
        version=found[1] if found else "?",
        architecture=ARCHITECTURE,
        count=len(kernels),
        spills=f"{len(spilled)} with spills: {', '.join(spilled)}" if spilled else "none spills registers",
        registers=max(k.registers for k in kernels),
    )
    rows = [
        f"| `{k.name}` | {k.threads} | {k.registers} | {k.shared} | {k.occupancy:.0%} | {k.wide} / {k.accesses} |"
        for k in kernels
        if of_training(k)
    ]
    return HEAD + "\n".join(lines) + "\n" + code + "\n".join(rows) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            page = render(compiled(), traffic(Emulation(Path(folder))))
    except Refused as e:
        print(f"megakit: {e}", file=sys.stderr)
        return e.code
    if args.check:
        return int(not PATH.is_file() or PATH.read_text() != page)
    PATH.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
