"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_CONFIG_HOME"] = os.devnull  # speeds that were measured on this machine are no matter here

from tests.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """`pools(world).run(fn, ...)`: fn on every rank of a persistent gloo world of that size."""
    made: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        if world not in made:
            made[world] = Pool(world)
        return made[world]

    yield get
    for pool in made.values():
        pool.close()
