"""docs/config.md is what the schema says."""

from __future__ import annotations

from megakit.config.keys import schema_keys
from tools import make_config_docs


def test_the_page_is_current():
    assert make_config_docs.PATH.read_text(encoding="utf-8") == make_config_docs.render(), "run python tools/make_config_docs.py"


def test_every_key_has_a_row():
    rows = [line for line in make_config_docs.render().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(schema_keys())
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)


def test_check_reports(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(make_config_docs, "PATH", tmp_path / "docs/config.md")
    assert make_config_docs.main(["--check"]) == 1
    assert make_config_docs.main([]) == 0
    assert make_config_docs.main(["--check"]) == 0
    assert make_config_docs.main(["--chek"]) == 2
