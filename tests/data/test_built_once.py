"""One process makes it, the others wait; whoever ends before it is done is followed by another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megakit.data import built_once as module
from megakit.data.built_once import built_once
from megakit.errors import Refused, Stop, StorageFailed

CONTEXT = multiprocessing.get_context("fork")


def slowly(folder: Path, tell: Any) -> None:
    """Two files, and who made them."""
    (folder / "one").write_text(str(os.getpid()))
    tell("50%")
    time.sleep(0.4)
    (folder / "two").write_text("2")


def ask(target: Path, results: Any, build: Any = slowly) -> None:
    try:
        made = built_once(target, build, patience_s=20)
        results.put((made / "one").read_text() + (made / "two").read_text())
    except Stop as stop:
        results.put(str(stop))


def start(count: int, target: Path, build: Any = slowly) -> tuple[list[Any], Any]:
    results = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=ask, args=(target, results, build)) for _ in range(count)]
    for process in processes:
        process.start()
    return processes, results


def test_one_of_many_makes_it(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "index"
    processes, results = start(5, target)
    answers = {results.get(timeout=20) for _ in processes}
    for process in processes:
        process.join()
    assert len(answers) == 1, "all read what the same one made"
    assert [path.name for path in target.parent.iterdir()] == ["index"], "nothing else is left"
    assert built_once(target, lambda *_: pytest.fail("it is there"), patience_s=1) == target


def test_another_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    target = tmp_path / "index"

    def for_ever(folder: Path, tell: Any) -> None:
        (folder / "one").write_text("never complete")
        tell("1%")
        time.sleep(60)

    (maker,), _ = start(1, target, for_ever)
    while not list(tmp_path.glob("index.tmp-*/one")):
        time.sleep(0.01)
    others, results = start(2, target)
    time.sleep(0.3)
    assert not target.exists()
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()
    answers = {results.get(timeout=20) for _ in others}
    assert len(answers) == 1 and "never" not in answers.pop()
    for process in others:
        process.join()


def test_who_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "index"
    monkeypatch.setattr(module, "_TOLD_S", 0.1)

    def hangs(folder: Path, tell: Any) -> None:
        tell("7%")
        time.sleep(60)

    (maker,), _ = start(1, target, hangs)
    while not (tmp_path / "index.lock").exists() or b"7%" not in (tmp_path / "index.lock").read_bytes():
        time.sleep(0.01)
    told: list[str] = []
    with pytest.raises(Stop, match=rf"index is being made by \S+ pid {maker.pid}, 7%.* without progress for 0.5 s"):
        built_once(target, slowly, patience_s=0.5, tell=told.append)
    assert told and f"pid {maker.pid}, 7%" in told[0]
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()


def test_progress_is_waited_for(tmp_path: Path) -> None:
    """Longer than the patience, but never without progress for so long."""
    target = tmp_path / "index"

    def steady(folder: Path, tell: Any) -> None:
        for i in range(12):
            tell(f"{i}")
            time.sleep(0.1)

    (maker,), _ = start(1, target, steady)
    while not (tmp_path / "index.lock").exists():
        time.sleep(0.01)
    assert built_once(target, slowly, patience_s=0.6) == target
    maker.join()


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", none)
    processes, results = start(3, tmp_path / "index")
    found = [results.get(timeout=20) for _ in processes]
    assert found == [(tmp_path / "index" / "one").read_text() + "2"] * 3  # the first one's stays, the others take it
    for process in processes:
        process.join()
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["one", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path, tell: Any) -> None:
        (folder / "one").write_text("1")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageFailed, match="No space left on device; nothing was kept"):
        built_once(tmp_path / "index", full, patience_s=1)
    assert [path.name for path in tmp_path.iterdir()] == ["index.lock"]
    assert built_once(tmp_path / "index", slowly, patience_s=1).is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"data\.cache_dir that can be written"):
        built_once(tmp_path / "file" / "index", slowly, patience_s=1)


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "index.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(Refused, match=r"index can't be made"):
        built_once(tmp_path / "index", lambda folder, tell: None, patience_s=1)
    assert (tmp_path / "precious").read_text() == "mine"
