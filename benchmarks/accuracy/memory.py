"""Predicted peak memory of published runs, without any fit, where the plan can be made for them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accuracy.rows import Row, Unjudged, model_of, number, prepared, workload_of
from megakit.config.schema import Config, ParallelConfig, TrainConfig
from megakit.errors import Refused
from megakit.planner.memory import MEGATRON_2021, TRANSFORMER_ENGINE, peaks
from megakit.planner.widths import GIB
from megakit.planner.workload import Workload

EXACT = ("SimuMax",)
"""Groups with peaks of allocated bytes; the others are of the whole process, or of an allocator that was full."""


@dataclass(frozen=True)
class Memory:
    """A run whose memory was printed."""

    row: Row
    workload: Workload
    predicted_gib: float
    measured_gib: float
    group: str

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_gib / self.measured_gib - 1


def memories(rows: list[Row]) -> tuple[list[Memory], list[tuple[Row, str]]]:
    """(runs that can be predicted, the others that printed their memory, with the reason)."""
    good, bad = [], []
    for row in rows:
        if not row.get("mem_gb") or row["mem_gb"] == "OOM":
            continue
        try:
            good.append(memory_of(row))
        except (Unjudged, Refused, ValueError, ArithmeticError) as fault:
            bad.append((row, str(fault)))
    return good, bad


def by_group(found: list[Memory]) -> dict[str, dict[str, float]]:
    """Group -> rows, mean and largest absolute error, the lowest and the highest prediction, in per cent."""
    out = {}
    for name in sorted({m.group for m in found}):
        errors = [100 * m.error for m in found if m.group == name]
        out[name] = {"rows": len(errors), **spread(errors), "exact": float(name in EXACT)}
    return out


def spread(errors: list[float]) -> dict[str, float]:
    """Mean and largest absolute error, the lowest and the highest."""
    sizes = [abs(e) for e in errors]
    return {"mean": sum(sizes) / len(sizes), "max": max(sizes), "lowest": min(errors), "highest": max(errors)}


def memory_of(row: Row) -> Memory:
    """Raises Unjudged or Refused with the reason."""
    row, source = prepared(row)
    w = workload_of(row, source)
    steady = min(w.micro_batches, 2 * w.pp)  # more are not in flight
    zero = 1 if w.zero == 3 and w.zero_group == 1 else w.zero
    cfg = Config(
        model=model_of(row),
        parallel=ParallelConfig(
            tp=w.tp,
            pp=w.pp,
            cp=w.cp,
            dp=w.dp,
            zero=zero,
            zero_group=w.zero_group if w.zero_group < w.dp * w.cp else None,
            sequence_parallel=w.sequence_parallel,
            schedule=w.schedule,
            virtual_stages=w.virtual_stages,
            layers_per_stage=list(w.stage_layers),
            recompute={"alternate": "selective"}.get(w.recompute, w.recompute),
            recompute_layers=w.recompute_layers,
        ),
        train=TrainConfig(
            micro_batch_size=w.micro_batch_size,
            global_batch_size=w.micro_batch_size * steady * w.dp,
            seq_len=w.seq,
            precision={"fp8": "bf16"}.get(w.precision, w.precision),
            grad_dtype="bf16" if w.gradient_bytes == 2 else "fp32",
        ),
    )
    worst = max(peaks(cfg, TRANSFORMER_ENGINE if w.stack.flash else MEGATRON_2021), key=lambda x: x.total)
    return Memory(row, w, worst.total / GIB, number(row, "mem_gb"), source.group)
