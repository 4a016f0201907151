"""TensorBoard events in the run folder."""

from __future__ import annotations

from pathlib import Path

from megakit.observe.record import Record, scalars


class TensorBoard:
    """Scalars by step. Points after `start_step`, of a part of the run that is done again, are hidden."""

    def __init__(self, folder: Path, start_step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeError("log.tensorboard = true needs the package tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=30)

    def record(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self, ok: bool) -> None:
        self._writer.close()
