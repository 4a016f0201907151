"""Batches for one data-parallel rank, read ahead by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Optional, Union

import numpy as np

from megakit.config.batch import BatchSize
from megakit.data.stream import SampleStream
from megakit.errors import Refused


@dataclass(frozen=True)
class Batch:
    """One optimizer step's samples, as seen by one data-parallel rank with n = batch size // dp rows."""

    ids: np.ndarray
    """Sample ids of this rank's rows, int64 [n]."""
    all_ids: np.ndarray
    """Sample ids of the whole global batch, int64 [n * dp]; the same on every rank."""
    tokens: np.ndarray
    """int64 [n, seq_len + 1]."""
    documents: Optional[np.ndarray] = None
    """int32 [n, seq_len + 1], which document of the sample each token is in; None where they weren't asked for."""


class Loader:
    """Endless iterator of batches from position `start` (consumed samples), which is all that a resume needs.

    The batch at position p holds the global positions [p, p + size.at(p)); rank d of dp has its rows [d * n, (d + 1) * n).
    With `documents` a batch has them too. `prefetch` batches are read ahead; 0 reads in the caller's thread. An error while
    reading is raised by the next() that would have returned that batch, and by every one after it. Close it, or use it as
    a context manager.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        dp: int,
        dp_rank: int,
        size: BatchSize,
        start: int,
        prefetch: int,
        documents: bool = False,
    ):
        if size.divisor % dp:
            raise Refused(f"train.global_batch_size={size.final} can't be divided among {dp} data-parallel ranks")
        if not 0 <= dp_rank < dp or start < 0 or prefetch < 0:
            raise ValueError(f"dp_rank {dp_rank} of {dp}, start {start}, prefetch {prefetch}")
        self._stream, self._size, self._dp, self._dp_rank, self._documents = stream, size, dp, dp_rank, documents
        self._error: Optional[BaseException] = None
        self.position = start
        """Global position of the next batch that next() returns."""
        self._stopped = threading.Event()
        self._thread: Optional[threading.Thread] = None
        if prefetch:
            self._queue: queue.Queue[Union[Batch, BaseException]] = queue.Queue(maxsize=prefetch)
            self._thread = threading.Thread(target=self._fill, args=(start,), name="megakit-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stopped.is_set():
            raise RuntimeError("the loader is closed")
        if self._error is not None:
            raise self._error
        item = self._queue.get() if self._thread is not None else self._read(self.position)
        if isinstance(item, BaseException):
            self._error = item
            raise item
        self.position += len(item.all_ids)
        return item

    def close(self) -> None:
        """Stop reading and wait for the thread; may be called more than once."""
        self._stopped.set()
        if self._thread is None:
            return
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()  # a full queue would keep the thread waiting
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        self.close()

    def _read(self, position: int) -> Batch:
        all_ids = self._stream.ids(position, self._size.at(position))
        n = len(all_ids) // self._dp
        ids = all_ids[self._dp_rank * n : (self._dp_rank + 1) * n]
        return Batch(ids, all_ids, self._stream.read(ids), self._stream.documents_of(ids) if self._documents else None)

    def _fill(self, position: int) -> None:
        while not self._stopped.is_set():
            item: Union[Batch, BaseException]
            try:
                item = self._read(position)
            except BaseException as e:
                item = e
            self._queue.put(item)
            if isinstance(item, BaseException):
                return
            position += len(item.all_ids)
