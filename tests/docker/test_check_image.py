"""docker/check_image.py: each of its faults is found, on stand-ins; and nothing else is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PATH = Path(__file__).parents[2] / "docker/check_image.py"
spec = importlib.util.spec_from_file_location("check_image", PATH)
assert spec is not None and spec.loader is not None
check_image = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_image)


@pytest.fixture
def lib(tmp_path: Path, monkeypatch) -> Path:
    """A folder with packages of ours, and a base beside it with torch and numpy; those that find_spec finds."""
    for name in (*(f"lib/{n}" for n in check_image.OURS), "base/torch", "base/numpy"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()

    def find(name: str):
        places = [tmp_path / top / name for top in ("lib", "base") if (tmp_path / top / name).is_dir()]
        if not places:
            return None
        return SimpleNamespace(origin=str(places[0] / "__init__.py"), submodule_search_locations=[str(places[0])])

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return tmp_path / "lib"


def test_packages_where_they_belong_pass(lib: Path):
    assert list(check_image.packages(lib)) == []


def test_a_package_of_the_bases_that_has_our_name_is_found(lib: Path):
    (lib / "tools").rename(lib.parent / "base/tools")
    assert [f.split(",")[0] for f in check_image.packages(lib)] == [f"tools comes from {lib.parent}/base/tools"]


def test_torch_in_our_folder_or_nowhere_is_found(lib: Path):
    (lib.parent / "base/torch").rename(lib / "torch")
    (lib.parent / "base/numpy/__init__.py").unlink()
    (lib.parent / "base/numpy").rmdir()
    assert [f.split(":")[0] for f in check_image.packages(lib)] == [
        f"torch comes from {lib}, not from the base",
        "numpy is missing",
    ]


@pytest.fixture
def metadata(monkeypatch) -> dict:
    """name: (version, requirements) of what is "installed"."""
    installed: dict[str, tuple[str, list[str]]] = {
        "megakit": (
            "0.1.0",
            ["torch>=2.11", "rich>=13", "wandb>=0.19; extra == 'log'", "lm-eval; extra == 'eval'", "tomli; python_version < '3'"],
        ),
        "torch": ("2.13.0a0+8145d630e8.nv26.6.54250401", ["not-looked-at==1"]),
        "rich": ("14.0.0", ["pygments>=2.13"]),
        "pygments": ("2.21.0", []),
        "wandb": ("0.31.0", []),
    }

    def version(name: str) -> str:
        if name not in installed:
            raise check_image.importlib.metadata.PackageNotFoundError(name)
        return installed[name][0]

    monkeypatch.setattr(check_image.importlib.metadata, "version", version)
    monkeypatch.setattr(check_image.importlib.metadata, "requires", lambda name: installed[name][1])
    return installed


def test_a_later_pre_release_of_torch_will_do(metadata):
    assert list(check_image.requirements()) == []


def test_a_pre_release_of_the_oldest_torch_will_not(metadata):
    metadata["torch"] = ("2.11.0a0+eb65b36914", [])
    assert [f.split(":")[0] for f in check_image.requirements()] == [
        "megakit needs torch>=2.11, and torch 2.11.0a0+eb65b36914 is found"
    ]


def test_what_a_dependency_needs_is_found_missing(metadata):
    del metadata["pygments"]
    assert list(check_image.requirements()) == ["rich needs pygments>=2.13, which is missing: make image-lock"]


def test_a_library_that_is_missing_or_broken_is_found(tmp_path: Path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise OSError('no libcuda')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(check_image.libraries(["json"], gpu=True)) == []
    assert [f.split(":")[0] for f in check_image.libraries(["nothing_of_this_name"], gpu=False)] == [
        "nothing_of_this_name is missing"
    ]
    assert list(check_image.libraries(["broken_library"], gpu=False)) == [], "without a GPU it is only found"
    assert list(check_image.libraries(["broken_library"], gpu=True)) == ["broken_library can't be imported: OSError: no libcuda"]


def test_kernels_that_are_not_there_are_found(kernels, tmp_path: Path, monkeypatch):
    from megakit.ops.fused import library

    assert list(check_image.kernels(["emulated"], gpu=False)) == [] == list(check_image.kernels([], gpu=False))
    library.load.cache_clear()
    monkeypatch.setenv("MEGAKIT_KERNELS", str(tmp_path))
    try:
        assert [f.split(":")[0] for f in check_image.kernels(["cuda", "emulated"], gpu=False)] == ["kernels", "kernels"]
    finally:
        library.load.cache_clear()


def test_a_folder_that_cant_be_written_is_found(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(check_image.writable()) == []
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert [f"can't write to {tmp_path}/nowhere" in f for f in check_image.writable()] == [True]


def test_a_plan_that_fails_is_found(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    assert list(check_image.plan()) == ["-m megakit.plan +recipe=llama7b ends with 1: "]


def test_all_faults_are_told_and_end_it_with_1(monkeypatch, capsys):
    def breaks():
        raise KeyError("x")
        yield

    for name in ("packages", "kernels"):
        monkeypatch.setattr(check_image, name, lambda *_: iter(()))
    for name in ("writable", "plan"):
        monkeypatch.setattr(check_image, name, lambda: iter(()))
    monkeypatch.setattr(check_image, "requirements", breaks)
    assert check_image.main(["--require", "nothing_of_this_name"]) == 1
    told = capsys.readouterr()
    assert (
        told.err.splitlines()[0] == "fault: KeyError: 'x'"
        and "nothing_of_this_name is missing" in told.err
        and "2 faults" in told.out
    )
    monkeypatch.setattr(check_image, "requirements", lambda: iter(()))
    assert check_image.main(["--require"]) == 0 and "all is there" in capsys.readouterr().out
