"""Whole files, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakit.files import stays_inside, write_whole
from tests.limits import file_size_limit


def test_replaces_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "é\n")
    write_whole(str(tmp_path / "a"), b"\x00")
    assert (tmp_path / "a").read_bytes() == b"\x00"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_name_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole("a", "é")
    assert Path("a").read_text(encoding="utf-8") == "é"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    with file_size_limit(4096), pytest.raises(OSError):
        write_whole(tmp_path / "a", b"x" * 5000)
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["", ".", "..", "/x", "//x", "a/../b", "a\0b", "\ud800", "x" * 5000, None, 1, b"x"])
def test_names_that_lead_elsewhere_or_nowhere(name: object) -> None:
    assert not stays_inside(name)


@pytest.mark.parametrize("name", ["x", "a/b.c", "..x", "a..b", "é"])
def test_names_of_files_of_the_folder(name: str) -> None:
    assert stays_inside(name)
