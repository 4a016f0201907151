"""The kernels under sanitizers, and with a fault planted at every barrier and at every bound: each must be found.

A driver (csrc/tests/drive.cc) calls them on buffers of exact size: bounds are found by the address sanitizer or by the
driver's own checks, barriers by the thread sanitizer, for which the emulator's barriers order memory and nothing else does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megakit.ops import build
from megakit.ops.folder import SOURCES

FAMILIES = sorted(path.stem for path in SOURCES.glob("kernels/*.cu") if path.stem != "abi")
OF_HEADER = "norm"
"""The family that uses everything of the headers."""


def sites(macro: str) -> list[tuple[str, str]]:
    """(family, file:line) of each place where a fault can be planted."""
    found = []
    for path in sorted([*SOURCES.glob("kernels/*.cu"), *SOURCES.glob("include/megakit/*.h")]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(rf"\b{macro}\(", line) and not line.lstrip().startswith(("#define", "//")):
                found.append((path.stem if path.suffix == ".cu" else OF_HEADER, f"{path.name}:{number}"))
    return found


BARRIERS, BOUNDS = sites("MK_SYNC"), sites("MK_WITHIN")


def driver(kind: str, folder: Path) -> Path:
    flags = {"address": ("address,undefined", "SIMT_ASAN"), "thread": ("thread", "SIMT_TSAN")}
    sanitizer, macro = flags[kind]
    base = build.emulated()
    target = build.Target(
        f"drive_{kind}",
        base.compiler,
        base.version,
        (*(f for f in base.flags if f != "-O2"), "-O1", "-g1", "-DMEGAKIT_MUTANTS", f"-D{macro}"),
        (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"),
        (),
        (*base.host, "tests/drive.cc"),
        ("tests/drive.cc",),
    )
    build.build(target, folder)
    return folder / target.name


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels can't be emulated")
    folder = tmp_path_factory.mktemp("sanitizers")
    return {kind: driver(kind, folder) for kind in ("address", "thread")}


def drive(driver: Path, *words: str) -> subprocess.CompletedProcess:
    env = {
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
        "TSAN_OPTIONS": "exitcode=66:halt_on_error=1",
        "UBSAN_OPTIONS": "exitcode=66",
    }
    # thread sanitizer needs a fixed memory layout on kernels with much randomisation
    command = [*(["setarch", "-R"] if shutil.which("setarch") else []), str(driver), *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize("kind", ["address", "thread"])
@pytest.mark.parametrize("family", FAMILIES)
def test_clean(drivers, kind, family):
    # the race detector looks at what orders two accesses, not at which came first: one order is enough
    for order in ("0", "1", "2") if kind == "address" else ("2",):
        done = drive(drivers[kind], family, order)
        assert done.returncode == 0, done.stderr[-3000:]


def test_there_are_faults_to_plant():
    """Each kernel has a bound, each shared array a barrier."""
    kernels = [
        (p.stem, n) for p in SOURCES.glob("kernels/*.cu") for n in re.findall(r"__global__.*? void (\w+)\(", p.read_text())
    ]
    assert len(kernels) >= 13 and len(BOUNDS) >= 30 and len(BARRIERS) == 3
    for family, name in kernels:
        text = (SOURCES / f"kernels/{family}.cu").read_text()
        body = text[text.index(f" {name}(") :].split("\n}\n")[0]
        assert "MK_WITHIN" in body, f"{name} has no bound"
        assert "__syncthreads" not in body
        plain = re.findall(r"(?:if|for) \([^\n]*< (?:cols|rows|keys|stride|seen|s\.size)\b[^\n]*", body)
        assert not plain, f"{name} has bounds that are no MK_WITHIN: {plain}"


@pytest.mark.parametrize(("family", "site"), BARRIERS, ids=[s for _, s in BARRIERS])
def test_a_missing_barrier_is_found(drivers, family, site):
    done = drive(drivers["thread"], family, "0", site)
    assert done.returncode == 66 and "data race" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize(("family", "site"), BOUNDS, ids=[s for _, s in BOUNDS])
def test_a_bound_that_is_one_too_far_is_found(drivers, family, site):
    done = drive(drivers["address"], family, "0", site)
    found = (done.returncode == 66 and "AddressSanitizer" in done.stderr) or (done.returncode == 3 and "drive:" in done.stderr)
    assert found, f"exit code {done.returncode}: {done.stderr[-2000:]}"
