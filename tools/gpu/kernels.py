"""Of each kernel: is it right, and how fast is it beside others and beside a copy?"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tools.gpu.cases import LLAMA_7B, MIDDLE, ODD, TINY, Case, Run, attention_cases, cases, flat_cases

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}
"""Norm of the error over the norm of the result: a few roundings."""

Row = dict[str, Any]


def numerics(device: torch.device, small: bool) -> Iterator[Row]:
    """Each kernel beside float64: {name, dtype, sizes, error, tolerance, wrong}, one for each pass."""
    torch.manual_seed(0)
    for sizes in (TINY,) if small else (ODD, MIDDLE):
        for dtype in TOLERANCE:
            made = itertools.chain(cases(device, sizes, dtype), attention_cases(device, sizes, dtype))
            for case in itertools.chain(flat_cases(device, sizes), made) if dtype == torch.float32 else made:
                word, shape = str(dtype).removeprefix("torch."), f"{sizes.seq} x {sizes.batch} x {sizes.hidden}"
                for name, worst in _errors(case):
                    allowed = TOLERANCE[dtype] * case.slack
                    verdict = {"error": worst, "tolerance": allowed, "wrong": not worst < allowed}
                    yield {"name": name, "dtype": word, "sizes": shape, **verdict}


def drive(device: torch.device) -> None:
    """Each kernel once, on odd sizes, for a sanitizer to judge.

    PYTORCH_NO_CUDA_MEMORY_CACHING must be set, or it sees no ends of buffers.
    """
    torch.manual_seed(0)
    sizes = TINY if device.type == "cpu" else ODD
    for dtype in TOLERANCE:
        for case in itertools.chain(flat_cases(device, sizes), cases(device, sizes, dtype)):
            passes(case.ours, _copies(case))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(device: torch.device, small: bool, deadline: float) -> Iterator[Row]:
    """GB/s of each kernel: least bytes over the time of ours, torch's, Liger's and what torch.compile makes of torch's.

    First {copy_gb_s}. torch.compile takes seconds for each: it comes last, as far as there is time (`time.monotonic`).
    """
    torch.manual_seed(0)
    clock, sizes = Clock(device, small), TINY if small else LLAMA_7B
    ceiling = copy_ceiling(device, clock, small)
    yield {"copy_gb_s": ceiling}

    def all_cases() -> Iterator[Case]:
        return itertools.chain(flat_cases(device, sizes), cases(device, sizes))

    for case in all_cases():
        timed = {"csrc": _times(case.ours, case, clock), "eager": _times(case.theirs, case, clock)}
        if case.liger:
            try:
                timed["liger"] = _times(case.liger, case, clock)
            except Exception as e:  # another release, another signature: ours are measured all the same
                yield {"failed": f"Liger-Kernel's {case.name}: {_line(e)}"}
        for i, (name, size) in enumerate(_passes(case)):
            found = {who: size / seconds[i] / 1e9 for who, seconds in timed.items() if i < len(seconds)}
            yield {"name": name, "gb_s": found, "share_of_copy": found["csrc"] / ceiling}
    if device.type != "cuda":
        return
    for case in all_cases():
        if not case.compiles:
            continue
        if time.monotonic() > deadline:
            yield {"left_out": f"torch.compile of {case.name}"}
            continue
        try:
            seconds = _times(torch.compile(case.theirs), case, clock)
        except Exception as e:
            yield {"failed": f"torch.compile of {case.name}: {_line(e)}"}
            continue
        for (name, size), took in zip(_passes(case), seconds):
            yield {"name": name, "gb_s": {"compile": size / took / 1e9}}


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


def passes(run: Run, inputs: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor], Callable[[], Any] | None]:
    """What it returns, the gradients for a random one, alike for all, and the backward pass alone, to be timed."""
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


def _errors(case: Case) -> Iterator[tuple[str, float]]:
    if case.random:
        return
    mine, my_grads, _ = passes(case.ours, _copies(case))
    exact = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in case.inputs)
    want, want_grads, _ = passes(case.theirs, exact)
    yield case.name, error(mine, want)
    if my_grads:
        yield f"{case.name}, backward", error(my_grads, want_grads)


def _copies(case: Case) -> tuple[torch.Tensor, ...]:
    """Some operators write into their inputs."""
    return tuple(t.clone().detach().requires_grad_(t.requires_grad) for t in case.inputs)


def _passes(case: Case) -> list[tuple[str, int]]:
    """Name and least bytes of each."""
    forward = (case.name, case.forward_bytes)
    return [forward, (f"{case.name}, backward", case.backward_bytes)] if case.backward_bytes else [forward]


def _times(run: Run, case: Case, clock: Clock) -> list[float]:
    """Seconds of each pass."""
    backward = passes(run, case.inputs)[2] if case.backward_bytes else None
    behind = [clock(backward)] if backward else []
    with torch.no_grad():
        return [clock(lambda: run(*case.inputs)), *behind]


def _line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
