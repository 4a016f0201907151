from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Four nodes, up."""
    if why := missing():
        pytest.skip(why)
    folder: Path = tmp_path_factory.mktemp("slurm")
    cluster = Cluster(folder, nodes=4)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
