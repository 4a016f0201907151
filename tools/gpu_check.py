"""The kernels of csrc/ on a GPU: are they right, and how near do they come to a plain copy's bandwidth?

    python -m megakit.ops.build && python tools/gpu_check.py [--out benchmarks/results] [--quick]

Each kernel at the shapes of a layer of Llama 7B (sequence 4096, micro-batch 4), in bf16: its error beside float64, and its
GB/s (bytes that it must move over its time) beside torch's operators, the same under torch.compile, and a copy measured in
the same run. A JSON file with date and device is written. Exit code 1 if a result is wrong. --quick, or a machine without a
GPU, takes small shapes and the emulation: it shows that the script works, its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megakit.errors import Refused
from megakit.ops.activation import gelu, swiglu
from megakit.ops.backends import CSRC
from megakit.ops.dropout import dropout_add
from megakit.ops.fused.library import Missing, load
from megakit.ops.loss import loss_gradient_, loss_stats
from megakit.ops.norm import add_norm, norm
from megakit.ops.optimizer import AdamShard, adamw_, square_sum
from megakit.ops.rope import rotate
from megakit.ops.softmax import softmax

TOLERANCE = 6e-3
"""Norm of the error over the norm of the result: a few roundings of bf16."""
BUDGET_S = 240
"""Cases that would begin later are left out, and named."""

Run = Callable[..., Any]


@dataclass
class Case:
    """A forward pass, and a backward pass where `grads` is not empty."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    ours: Run
    theirs: Run
    """torch's operators, for the time and, in float64, for the values."""
    forward_bytes: int
    backward_bytes: int = 0
    random: bool = False
    """The two draw other numbers: only the time is compared."""
    compiles: bool = True
    """torch's operators are more than one kernel."""


@dataclass
class Row:
    """Of one pass."""

    name: str
    error: float | None
    gb_s: float
    share_of_copy: float
    eager_gb_s: float
    compiled_gb_s: float | None


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    """bf16, made one after the other: they fill much of a small GPU."""
    seq, batch, h, f, heads, v = (8, 2, 64, 96, 4, 512) if small else (4096, 4, 4096, 11008, 32, 32000)
    n = seq * batch
    row, wide = 2 * n * h, 2 * n * f

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    x, r, w, b = rand(seq, batch, h), rand(seq, batch, h), rand(h), rand(h)
    yield Case(
        "RMSNorm",
        (x, w),
        lambda x, w: norm(x, w, None, 1e-5, CSRC),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        2 * row,
        3 * row,
    )
    yield Case(
        "LayerNorm",
        (x, w, b),
        lambda x, w, b: norm(x, w, b, 1e-5, CSRC),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        2 * row,
        3 * row,
    )
    yield Case(
        "RMSNorm of a sum",
        (x, r, w),
        lambda x, r, w: add_norm(x, r, w, None, 1e-5, CSRC),
        lambda x, r, w: (F.rms_norm(x + r, w.shape, w, 1e-5), x + r),
        4 * row,
        4 * row,
    )
    qk = rand(seq, batch, 2 * heads, h // heads)
    angle = torch.outer(torch.arange(seq, device=device), 1e4 ** -torch.linspace(0, 1, h // heads // 2, device=device))
    table = angle.cos()[:, None, None], angle.sin()[:, None, None]
    yield Case("rotary", (qk,), lambda x: rotate(x, table, backend=CSRC), lambda x: rotate(x, table), 4 * row, 4 * row)
    g = rand(seq, batch, 2 * f)
    yield Case("SwiGLU", (g,), lambda x: swiglu(x, CSRC), lambda x: F.silu(x[..., :f]) * x[..., f:], 3 * wide, 5 * wide)
    u, ub = rand(seq, batch, f), rand(f)
    yield Case(
        "GELU with a bias",
        (u, ub),
        lambda x, b: gelu(x, b, True, CSRC),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        2 * wide,
        3 * wide,
    )
    del g, u
    z = (3 * rand(n // 4, v)).detach()
    labels = torch.randint(v, (n // 4,), device=device)
    one = torch.ones((), device=device)
    keys: dict[str, Any] = {"cols": v, "first": 0, "ignore": -100, "vocab": v, "smoothing": 0.0, "z_loss": 0.0}

    def whole_loss(z: torch.Tensor) -> torch.Tensor:
        top, exps, *_ = loss_stats(z, labels, v, 0, CSRC)
        return loss_gradient_(z, top, exps, one, labels, **keys, backend=CSRC)

    def plain_loss(z: torch.Tensor) -> torch.Tensor:
        return torch.softmax(z.to(torch.promote_types(z.dtype, torch.float32)), -1) - F.one_hot(labels, v)

    yield Case("cross entropy, both passes", (z,), whole_loss, plain_loss, 3 * z.nbytes)
    scores = rand(1, 2, 16, 64) if small else rand(batch, 2, seq, seq)
    yield Case(
        "causal softmax",
        (scores,),
        lambda x: softmax(x, 0.1, True, None, CSRC),
        lambda x: softmax(x, 0.1, True),
        3 * scores.nbytes // 2,  # half of the scores is not read
        3 * scores.nbytes,
    )
    yield Case(
        "dropout and add",
        (x, r),
        lambda x, r: dropout_add(x, r, 0.1, 7),
        lambda x, r: r + F.dropout(x, 0.1),
        3 * row,
        2 * row,
        True,
    )


def flat_cases(device: torch.device, small: bool) -> Iterator[Case]:
    """Of the optimizer, fp32, without a backward pass."""
    n = 5000 if small else 1 << 27
    w, m, g = (torch.randn(n, device=device) for _ in range(3))
    v = torch.rand(n, device=device)
    yield Case("squared norm", (g,), lambda x: square_sum(x, CSRC), square_sum, 4 * n, compiles=False)

    def ours(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        adamw_([AdamShard(w, m, v, g, None, 1e-2, 0.1)], 3, (0.9, 0.95), 1e-8)
        return w

    def theirs(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        step = [torch.full((), 2.0, device=device)]  # it is counted up
        numbers: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_([w], [g], [m], [v], [], step, **numbers, amsgrad=False, maximize=False)
        return w

    yield Case("AdamW", (w, m, v, g), ours, theirs, 28 * n, compiles=False)


class Clock:
    """Seconds of a call: median of several, the caches flushed before each on a GPU."""

    def __init__(self, device: torch.device, small: bool):
        self.device, self.repeats = device, 2 if small else 15
        self._flush = torch.empty(1 if small else 1 << 28, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], Any]) -> float:
        run()
        return statistics.median(self._once(run) for _ in range(self.repeats))

    def _once(self, run: Callable[[], Any]) -> float:
        self._flush.zero_()
        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def copy_ceiling(device: torch.device, clock: Clock, small: bool) -> float:
    """GB/s of a copy, read and written bytes counted."""
    x = torch.zeros(1 << (12 if small else 30), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / clock(lambda: y.copy_(x)) / 1e9


def results(
    run: Run, inputs: tuple[torch.Tensor, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor], Callable[[], Any] | None]:
    """What it returns, the gradients for a random one, alike for both, and the backward pass alone, to be timed."""
    out = run(*inputs)
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    wanted = [t for t in inputs if t.requires_grad]
    if not wanted:
        return outs, [], None
    seed = torch.Generator(outs[0].device).manual_seed(1)
    given = [torch.randn(o.shape, generator=seed, device=o.device).bfloat16().to(o.dtype) for o in outs]

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outs, wanted, given, retain_graph=True)

    return outs, list(backward()), backward


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest over the tensors; NaN counts as infinite."""
    each = [((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item() for a, b in zip(got, want)]
    return max((e if e == e else float("inf") for e in each), default=0.0)


def rows(case: Case, clock: Clock, ceiling: float, compiles: bool) -> Iterator[Row]:
    """One for each pass."""
    mine, my_grads, my_backward = results(
        case.ours, tuple(t.clone().detach().requires_grad_(t.requires_grad) for t in case.inputs)
    )
    exact = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in case.inputs)
    want, want_grads, _ = results(case.theirs, exact)
    forward_error = None if case.random else error(mine, want)
    backward_error = None if case.random else error(my_grads, want_grads)
    del exact, want, want_grads
    _, _, their_backward = results(case.theirs, case.inputs)
    compiled = torch.compile(case.theirs) if compiles else None
    compiled_backward = results(compiled, case.inputs)[2] if compiled else None

    def row(name: str, worst: float | None, size: int, ours: Any, theirs: Any, quick: Any) -> Row:
        speed = size / clock(ours) / 1e9
        fast = size / clock(quick) / 1e9 if quick else None
        return Row(name, worst, speed, speed / ceiling, size / clock(theirs) / 1e9, fast)

    inputs = case.inputs
    with torch.no_grad():
        quick = (lambda: compiled(*inputs)) if compiled else None
        yield row(case.name, forward_error, case.forward_bytes, lambda: case.ours(*inputs), lambda: case.theirs(*inputs), quick)
    if case.backward_bytes:
        yield row(f"{case.name}, backward", backward_error, case.backward_bytes, my_backward, their_backward, compiled_backward)


def check(device: torch.device, small: bool) -> dict[str, Any]:
    """All cases that there is time for."""
    started, torch_name = time.monotonic(), torch.__version__
    torch.manual_seed(0)
    clock = Clock(device, small)
    ceiling = copy_ceiling(device, clock, small)
    found: list[Row] = []
    left: list[str] = []
    for case in itertools.chain(flat_cases(device, small), cases(device, small)):
        if time.monotonic() - started > BUDGET_S:
            left.append(case.name)
            continue
        for row in rows(case, clock, ceiling, compiles=case.compiles and device.type == "cuda"):
            found.append(row)
            print(_line(row), flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, emulated",
        "torch": torch_name,
        "small": small,
        "copy_gb_s": ceiling,
        "kernels": [asdict(row) for row in found],
        "wrong": [row.name for row in found if row.error is not None and not row.error < TOLERANCE],
        "left_out": left,
    }


def _line(row: Row) -> str:
    wrong = "" if row.error is None else f"  error {row.error:.1e}"
    compiled = "" if row.compiled_gb_s is None else f"  compiled {row.compiled_gb_s:7.1f}"
    return (
        f"{row.name:30s} {row.gb_s:7.1f} GB/s = {row.share_of_copy:4.0%} of a copy  eager {row.eager_gb_s:7.1f}{compiled}{wrong}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        try:
            load(device.type)
        except Missing as e:
            raise Refused(str(e)) from e
        found = check(device, args.quick or device.type == "cpu")
    except Refused as e:
        print(f"megakit: {e}", file=sys.stderr)
        return e.code
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"kernels-{found['device'].replace(', ', '-').replace(' ', '-').lower()}-{found['date']}.json"
    (args.out / name).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{args.out / name}: wrong: {', '.join(found['wrong']) or 'none'}; left out: {', '.join(found['left_out']) or 'none'}")
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
