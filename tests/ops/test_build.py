"""Building the kernels: refusals, two builds at once, what is up to date, and what a run says of what it found."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megakit.config.schema import OpsConfig
from megakit.errors import Refused
from megakit.ops import build
from megakit.ops.backends import Backends, choose
from megakit.ops.folder import NAMES, SOURCES
from megakit.ops.fused import library

ROOT = Path(build.__file__).parents[2]
ALL = Backends(*["csrc"] * 6)


def small(tmp_path, monkeypatch, code='extern "C" int megakit_abi_version() { return %d; }', version=library.ABI_VERSION):
    """Sources that compile in no time."""
    (tmp_path / "csrc/kernels").mkdir(parents=True, exist_ok=True)
    hash_ = 'extern "C" const char* megakit_source_hash() { return MEGAKIT_SOURCE_HASH; }\n'
    (tmp_path / "csrc/kernels/one.cu").write_text(hash_ + (code % version if "%d" in code else code))
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    return build.Target(NAMES["cpu"], build.host_compiler(), "v", ("-fPIC",))


@pytest.fixture
def gxx():
    if shutil.which("g++") is None:
        pytest.skip("no g++")


def test_what_is_up_to_date_is_left_alone(gxx, tmp_path, monkeypatch):
    target, out = small(tmp_path, monkeypatch), tmp_path / "lib"
    assert build.build(target, out)
    first = (out / target.name).stat().st_ino
    assert not build.build(target, out) and (out / target.name).stat().st_ino == first
    assert build.build(target, out, force=True) and (out / target.name).stat().st_ino != first
    small(tmp_path, monkeypatch, version=99)
    assert build.build(target, out)
    assert ctypes.CDLL(str(out / target.name)).megakit_abi_version() == 99
    assert os.listdir(out) == [target.name], "nothing is left behind"


def test_a_compiler_that_fails_leaves_what_was_there(gxx, tmp_path, monkeypatch, capfd):
    target, out = small(tmp_path, monkeypatch), tmp_path / "lib"
    build.build(target, out)
    before = (out / target.name).read_bytes()
    small(tmp_path, monkeypatch, "this is no C++")
    with pytest.raises(Refused, match=r"g\+\+ failed with exit code 1 on .*one.cu: its words are above"):
        build.build(target, out)
    assert "error" in capfd.readouterr().err
    assert os.listdir(out) == [target.name] and (out / target.name).read_bytes() == before


def test_two_builds_at_once_both_succeed(gxx, tmp_path):
    """Two processes; whoever loads the file at any time has a whole one."""
    code = (
        "import sys; from pathlib import Path; from megakit.ops import build\n"
        "build.SOURCES = Path(sys.argv[1]); target = build.Target('lib.so', 'g++', 'v', ('-fPIC',))\n"
        "print(build.build(target, Path(sys.argv[2]), force=True))"
    )
    (tmp_path / "csrc/kernels").mkdir(parents=True)
    for i in range(3):
        (tmp_path / f"csrc/kernels/k{i}.cu").write_text(f'extern "C" int k{i}() {{ return {i}; }}')
    command = [sys.executable, "-c", code, str(tmp_path / "csrc"), str(tmp_path / "lib")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    for process in both:
        assert process.communicate(timeout=120)[0] == "True\n" and process.returncode == 0
    assert os.listdir(tmp_path / "lib") == ["lib.so"]
    assert ctypes.CDLL(str(tmp_path / "lib/lib.so")).k2() == 2


def tool(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def refusal(capsys, *arguments):
    assert build.main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_refusals_are_one_line_with_the_cure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert "no nvcc in PATH: install the CUDA toolkit" in refusal(capsys)
    assert "no C++ compiler g++ in PATH: install g++" in refusal(capsys, "emulated")
    assert "cudda is not one of cuda, emulated" in refusal(capsys, "cudda")
    monkeypatch.setenv("CXX", "clang-99")
    assert "clang-99" in refusal(capsys, "emulated")
    tool(tmp_path / "nvcc", "echo sm_75")
    assert "knows none of sm_80, sm_90a, sm_100, only sm_75" in refusal(capsys)
    (tmp_path / "nvcc").unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert f"no nvcc in CUDA_HOME = {tmp_path / 'none'}, nor in PATH: install" in refusal(capsys)


def test_no_sources_and_no_place_to_write(gxx, tmp_path, monkeypatch):
    target = small(tmp_path, monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"can't be written .* another folder by --out"):
        build.build(target, tmp_path / "file")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "nothing")
    with pytest.raises(Refused, match=r"no sources in .*: build in a checkout"):
        build.build(target, tmp_path / "lib")


def test_gpus_that_the_compiler_knows(tmp_path, monkeypatch):
    """sm_90a is made by a compiler that lists sm_90; sm_100 is left out by one that doesn't know it."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    tool(tmp_path / "bin/nvcc", 'if [ "$1" = --version ]; then echo 12.0; else echo sm_80; echo sm_90; fi')
    flags = " ".join(build.cuda().flags)
    assert "arch=compute_80,code=sm_80 " in flags and "arch=compute_90a,code=sm_90a " in flags and "100" not in flags
    assert flags.endswith("code=compute_80")


def test_a_wrong_cuda_home_falls_back_to_the_path(tmp_path, monkeypatch, capsys):
    tool(tmp_path / "nvcc", "echo sm_80")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert build.cuda().compiler == str(tmp_path / "nvcc")
    assert f"no nvcc in CUDA_HOME = /nowhere: using {tmp_path / 'nvcc'}, found in PATH" in capsys.readouterr().err


def test_nothing_is_built_at_import():
    code = "import megakit.ops.norm, megakit.ops.rope, megakit.modeling.decoder, os; os.listdir"
    env = {**os.environ, "PATH": "/nonexistent", "MEGAKIT_KERNELS": "/nonexistent"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=env, timeout=120)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where libraries are looked for: empty."""
    monkeypatch.setenv("MEGAKIT_KERNELS", str(tmp_path))
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_what_a_run_is_told(folder, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose(OpsConfig(), cpu) == (Backends(), "")
    assert choose(OpsConfig(backend="torch"), cuda) == (Backends(), "")
    for cfg, device, name in [
        (OpsConfig(), cuda, "cuda"),
        (OpsConfig("csrc"), cpu, "emulated"),
        (OpsConfig(norm="csrc"), cpu, "emulated"),
    ]:
        chosen, words = choose(cfg, device)
        assert chosen == Backends()
        assert words.startswith("NOTE: torch's operators are used") and words.endswith(f"python -m megakit.ops.build {name}")
    monkeypatch.setattr("megakit.ops.backends.load", lambda device_type: None)
    assert choose(OpsConfig(), cuda) == (
        ALL,
        "operators: csrc: norm, rope, activation, loss, dropout_add, adamw; torch: attention",
    )
    chosen, words = choose(OpsConfig("csrc", loss="torch"), cpu)
    assert chosen == Backends("csrc", "csrc", "csrc", "torch", "csrc", "csrc")
    assert words.startswith("operators: csrc: norm, rope, activation, dropout_add, adamw; torch: loss, attention (emulated")
    assert choose(OpsConfig("torch", norm="csrc"), cuda)[0] == Backends(norm="csrc")


def test_a_library_of_another_interface_is_not_used(gxx, folder, tmp_path_factory, monkeypatch):
    target = small(tmp_path_factory.mktemp("src"), monkeypatch, version=99)
    build.build(target, folder)
    chosen, words = choose(OpsConfig("csrc"), torch.device("cpu"))
    assert chosen == Backends() and f"has interface 99, this megakit needs {library.ABI_VERSION}" in words


def test_the_sources_are_there():
    assert (SOURCES / "kernels").is_dir()


def test_a_rebuild_by_nvcc_is_the_same_file(tmp_path, monkeypatch):
    """nvcc names temporary files by its process: they must not be in the library, nor what a linker makes of them."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    small(tmp_path, monkeypatch, 'static __global__ void one() {}\nextern "C" void two() { one<<<1, 1>>>(); }')
    target = build.cuda(build.ARCHITECTURES[:1])
    for out in ("a", "b"):
        build.build(target, tmp_path / out)
    assert (tmp_path / "a" / target.name).read_bytes() == (tmp_path / "b" / target.name).read_bytes()
