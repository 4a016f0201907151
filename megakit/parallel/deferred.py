"""Weight gradients put off: what zero-bubble schedules fill their gaps with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from megakit.parallel.tensor import GradSink

Write = Callable[[torch.Tensor], object]


class DeferredGrads:
    """A sink in front of another: passes contributions on at once, or under `until(key)` keeps them for `run(key)`.

    What is kept is the way to a contribution, not the contribution: its operands, sharded where they can be gathered again.
    """

    def __init__(self, sink: GradSink):
        self._sink = sink
        self._key: Hashable | None = None
        self._kept: dict[Hashable, list[tuple[torch.Tensor, Write]]] = defaultdict(list)

    @property
    def deferring(self) -> bool:
        """A contribution that is added now will be made later."""
        return self._key is not None

    @property
    def waiting(self) -> list[Hashable]:
        """Keys whose contributions are kept."""
        return list(self._kept)

    def add(self, param: torch.Tensor, write: Write) -> None:
        if self._key is None:
            self._sink.add(param, write)
        else:
            self._kept[self._key].append((param, write))

    @contextmanager
    def until(self, key: Hashable) -> Iterator[None]:
        """Keep the contributions that arrive inside."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def run(self, key: Hashable) -> None:
        """Make the contributions kept under `key`, in the order in which they came."""
        for param, write in self._kept.pop(key, ()):
            self._sink.add(param, write)
