"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_CONFIG_HOME"] = os.devnull  # speeds that were measured on this machine are no matter here

from megakit.ops import build
from tests.ops import emulation

os.environ["MEGAKIT_KERNELS"] = str(emulation.FOLDER)  # before a worker starts
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


@pytest.fixture(scope="session")
def kernels() -> None:
    """The emulated kernels are where this process and the workers look for them."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels can't be emulated")
    build.build(build.emulated(), emulation.FOLDER)
