"""What is reported of a step and of an evaluation: the fields of a line in metrics.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of the whole job."""

    kind: ClassVar[str] = "train"

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the tokens of the global batch, before the update."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    consumed_samples: int
    """Over all ranks, since step 0."""
    consumed_tokens: int
    step_time_s: float
    """Training only: no evaluation, no saving, no waiting for data."""
    tokens_per_s: float
    """Of the whole job."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    """Model FLOPs utilisation, 0 to 1; None where the device's peak is not known."""
    loss_scale: float | None
    """None where the loss isn't scaled."""
    skipped: bool
    """The update was left out: loss or gradient was not finite."""
    peak_memory_gib: float
    """Of the writing rank, so far."""
    data_wait_s: float
    """Waiting for the batch, before step_time_s began."""


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation on held-out samples."""

    kind: ClassVar[str] = "eval"

    step: int
    """Steps done before it."""
    loss: float
    """Mean over the tokens."""
    perplexity: float
    """exp(loss)"""
    consumed_samples: int
    """For training, as in StepRecord: both kinds share their axes."""
    consumed_tokens: int
    eval_time_s: float
    samples: int
    """Samples evaluated on."""


Record = StepRecord | EvalRecord


def to_line(kind: str, fields: dict[str, Any]) -> str:
    """One line of JSON, with its newline. NaN and infinities, which JSON has not, become null, and `nonfinite` says true."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    odd = any(clean[k] is None and fields[k] is not None for k in fields)
    return json.dumps({"kind": kind, **clean, **({"nonfinite": True} if odd else {})}, allow_nan=False) + "\n"


def record_line(record: Record) -> str:
    """The record as a line of metrics.jsonl."""
    return to_line(record.kind, asdict(record))


def scalars(record: Record) -> dict[str, float]:
    """What trackers plot: `train/loss` and so on, without the fields that are unknown or the axis itself."""
    values = {k: v for k, v in asdict(record).items() if v is not None and k != "step"}
    return {f"{record.kind}/{name}": float(value) for name, value in values.items()}
