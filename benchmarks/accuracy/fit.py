"""Fitting the constants of a chip to runs: soft-L1 on the logarithm of predicted over measured time, log-normal priors.

Each constant is pulled towards what micro-benchmarks of the chip show; each program gets one factor, pulled towards 1, and
each of its releases one, pulled towards 1 harder. The solver is Gauss-Newton with reweighting, on numeric derivatives: the
model is nearly a product of powers near the priors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.accuracy.rows import Run
from megakit.planner.hardware import Fitted
from megakit.planner.timing import estimate

NAMES = tuple(f.name for f in dataclasses.fields(Fitted))
SCALE = 0.04
"""Errors beyond this share count by their size, not by their square."""
STEP = 0.02
RELEASES = 0.016
"""Standard deviation of the logarithm of a release's factor: equal runs of successive releases scatter by so much."""

Prior = tuple[float, float]
"""Median, and the standard deviation of the logarithm."""

SHARED: dict[str, Prior] = {
    "elementwise": (1.3, 0.25),
    "cast": (2.0, 0.3),
    "fp8_layer_us": (100.0, 0.5),
    "tp_exposed": (0.4, 0.4),
    "nvlink": (0.77, 0.12),
    "network": (0.8, 0.15),
    "straggler": (0.0035, 0.4),
}
PRIORS: dict[str, dict[str, Prior]] = {
    "a100": {**SHARED, "gemm": (0.84, 0.06), "gemm_fp8": (0.84, 0.01), "attention": (0.55, 0.15)},
    "h100": {**SHARED, "gemm": (0.74, 0.06), "gemm_fp8": (0.70, 0.08), "attention": (0.60, 0.15)},
    "b200": {**SHARED, "gemm": (0.72, 0.06), "gemm_fp8": (0.68, 0.08), "attention": (0.50, 0.15)},
    "b300": {**SHARED, "gemm": (0.75, 0.08), "gemm_fp8": (0.74, 0.10), "attention": (0.55, 0.15)},
}
"""By chip: large cuBLAS products, cuDNN or flash attention, STREAM-like copies, nccl-tests."""


@dataclass(frozen=True)
class Constants:
    """Of one chip and of the programs that ran on it."""

    fitted: dict[str, float]
    factors: dict[str, float]
    """Of programs and of their releases, by Run.names; a run's own is their product."""

    def factor(self, run: Run) -> float:
        return math.prod(self.factors.get(name, 1.0) for name in run.names)


def predicted(run: Run, fitted: Fitted, factor: float) -> float:
    """Tokens/s and GPU."""
    w = replace(run.workload, stack=replace(run.workload.stack, factor=factor))
    return estimate(w, replace(run.gpu, fitted=fitted)).tokens_per_s_per_gpu


def errors(runs: Sequence[Run], constants: Constants) -> np.ndarray:
    """log(predicted time / measured time)."""
    fitted = Fitted(**constants.fitted)
    return np.array([-math.log(predicted(r, fitted, constants.factor(r)) / r.tokens_per_s) for r in runs], dtype=float)


class Problem:
    """The runs of one chip."""

    def __init__(self, chip: str, runs: Sequence[Run]):
        self.runs, self.priors = list(runs), PRIORS[chip]
        programs = {r.names[0]: r.source.spread for r in self.runs}
        releases = {name: RELEASES for r in self.runs for name in r.names[1:]}
        self.factors = [*sorted(programs), *sorted(releases)]
        spreads = [{**programs, **releases}[name] for name in self.factors]
        self.mean = np.array([math.log(self.priors[n][0]) for n in NAMES] + [0.0] * len(spreads))
        self.sd = np.array([self.priors[n][1] for n in NAMES] + spreads)
        self.x = self.mean.copy()

    def constants(self, x: np.ndarray) -> Constants:
        values = np.exp(x)
        shares = ("gemm", "gemm_fp8", "attention", "tp_exposed", "nvlink", "network")
        fitted = {n: float(min(v, 1.0) if n in shares else v) for n, v in zip(NAMES, values)}
        return Constants(fitted, {s: float(v) for s, v in zip(self.factors, values[len(NAMES) :])})

    def linearise(self) -> tuple[np.ndarray, np.ndarray]:
        """Errors at x and their derivatives."""
        e = errors(self.runs, self.constants(self.x))
        jacobian = np.zeros((len(self.runs), len(self.x)))
        for i in range(len(NAMES)):
            moved = self.x.copy()
            moved[i] += STEP
            jacobian[:, i] = (errors(self.runs, self.constants(moved)) - e) / STEP
        moved = self.x.copy()
        moved[len(NAMES) : len(NAMES) + len({r.names[0] for r in self.runs})] += STEP
        slope = (errors(self.runs, self.constants(moved)) - e) / STEP
        for i, run in enumerate(self.runs):  # its factors are multiplied: the slope of one is that of each
            for name in run.names:
                jacobian[i, len(NAMES) + self.factors.index(name)] = slope[i]
        return e, jacobian

    def solve(self, e: np.ndarray, jacobian: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """The best x of the linear model with the runs that are kept."""
        e, jacobian, x = e[keep], jacobian[keep], self.x.copy()
        for _ in range(30):
            r = (e + jacobian @ (x - self.x)) / SCALE
            weight = 1.0 / (SCALE**2 * np.sqrt(1.0 + r**2))
            prior = 1.0 / self.sd**2
            left = (jacobian * weight[:, None]).T @ jacobian + np.diag(prior)
            right = (jacobian * weight[:, None]).T @ (jacobian @ self.x - e) + prior * self.mean
            x = np.linalg.solve(left, right)
        return x

    def fit(self, rounds: int = 4) -> Constants:
        """Moves x to the optimum."""
        every = np.ones(len(self.runs), dtype=bool)
        for _ in range(rounds):
            self.x = self.solve(*self.linearise(), every)
        return self.constants(self.x)

    def held_out(self) -> np.ndarray:
        """The error of each run with the constants that the other models' runs give (fit first)."""
        out = np.zeros(len(self.runs))
        e, jacobian = self.linearise()
        for model in sorted({r.model for r in self.runs}):
            left_out = np.array([r.model == model for r in self.runs])
            constants = self.constants(self.solve(e, jacobian, ~left_out))
            judged = [r for r, o in zip(self.runs, left_out) if o]
            out[left_out] = errors(judged, constants)
        return out
