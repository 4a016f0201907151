"""Parquet: the column of the text, by row groups, large ones in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megakit.data.preprocess import columns
from megakit.data.preprocess.blocks import Place, plan_blocks
from megakit.data.preprocess.columns import RowGroups, Rows
from megakit.data.preprocess.inputs import Source, find_inputs
from megakit.data.preprocess.job import Options, preprocess
from megakit.data.preprocess.records import DEFAULT_LIMIT, text_of
from megakit.data.tokenizer import load_tokenizer
from megakit.errors import Refused
from tests.data.corpus import plain_text
from tests.data.preprocess.test_job import files, run, write_jsonl

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402 (needs the check above)


def write(path: Path, table: dict[str, Any], **options: Any) -> Source:
    parquet.write_table(pyarrow.table(table), path, **options)
    (source,) = find_inputs([str(path)]).sources
    return source


def texts_of(source: Source, block_bytes: int, start: int = 0) -> list[str]:
    found = []
    for block in plan_blocks([source], ("text",), Place(0, start), block_bytes):
        found += [text_of(record, "text")[0] for record in block.work.records(("text",), DEFAULT_LIMIT)]
    return found


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"])
def test_every_type_of_text(tmp_path: Path, kind: str) -> None:
    texts = [f"{i} é" for i in range(10)]
    column = pyarrow.array(texts)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    source = write(tmp_path / "a.parquet", {"n": list(range(10)), "text": column}, row_group_size=3)
    assert texts_of(source, 1 << 20) == texts


@pytest.mark.parametrize("group_bytes", [0, 1000, 1 << 20])
def test_groups_of_any_size_from_any_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int) -> None:
    """Groups too large for a worker are read in parts; a job may go on from any row."""
    monkeypatch.setattr(columns, "GROUP_BYTES", group_bytes)
    texts = [f"{i} " + "ab" * i for i in range(60)]
    source = write(tmp_path / "a.parquet", {"text": texts}, row_group_size=20, use_dictionary=False)
    kinds = set()
    for block_bytes in (1, 100, 1 << 20):
        blocks = list(plan_blocks([source], ("text",), Place(), block_bytes))
        kinds |= {type(block.work) for block in blocks}
        assert blocks[-1].done == source.size
        for start in (0, 1, 19, 20, 21, 59, 60):
            assert texts_of(source, block_bytes, start) == texts[start:]
    assert kinds == {0: {Rows}, 1000: {Rows, RowGroups}, 1 << 20: {RowGroups}}[group_bytes]


def test_small_groups_share_a_block(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", {"text": plain_text(40)}, row_group_size=1)
    (block,) = plan_blocks([source], ("text",))
    assert isinstance(block.work, RowGroups) and len(block.work.groups) == 40


def test_same_tokens_as_from_lines(tmp_path: Path, model_path: Path) -> None:
    texts = [text for text in plain_text(60) if text.strip()]
    write(tmp_path / "a.parquet", {"id": list(range(len(texts))), "text": texts}, row_group_size=7)
    write_jsonl(tmp_path / "a.jsonl", texts)
    run(tmp_path / "a.jsonl", model_path, tmp_path / "lines")
    for workers in (1, 2):
        run(tmp_path / "a.parquet", model_path, tmp_path / f"rows{workers}", workers=workers, block_bytes=2000)
        assert files(tmp_path / f"rows{workers}") == files(tmp_path / "lines")


@pytest.mark.parametrize("workers", [1, 2])
def test_odd_rows_are_counted(tmp_path: Path, model_path: Path, workers: int) -> None:
    """Case DA1 as rows: lines that are blank or no JSON have no counterpart."""
    bad = pyarrow.array([b"", b"a b", b"   ", None, b"\xff", b"c d"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(Refused, match=r"a\.parquet row 4: the text is null; correct it"):
        run(tmp_path / "a.parquet", model_path, tmp_path / "out", workers=workers)
    counts = run(tmp_path / "a.parquet", model_path, tmp_path / "out", workers=workers, skip_bad=True)
    assert (counts.documents, counts.records, counts.reasons) == (2, 6, {"empty": 2, "null": 1, "badutf8": 1})
    tokenizer = load_tokenizer(model_path)
    from megakit.data.indexed import IndexedFile

    file = IndexedFile(str(tmp_path / "out"))
    assert [tokenizer.decode(file.document(i).tolist()) for i in range(2)] == ["a b", "c d"]


@pytest.mark.parametrize("table,words", [({"txt": ["the"]}, "row 1: no such key"), ({"text": [5]}, "row 1: .* not a string")])
def test_other_columns(tmp_path: Path, model_path: Path, table: dict[str, Any], words: str) -> None:
    write(tmp_path / "a.parquet", table)
    with pytest.raises(Refused, match=words):
        run(tmp_path / "a.parquet", model_path, tmp_path / "out")
    write(tmp_path / "b.parquet", {"text": ["of"]})
    inputs = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    (counts,) = preprocess(inputs, str(model_path), str(tmp_path / "out"), Options(skip_bad=True)).counts
    assert (counts.documents, sum(counts.reasons.values())) == (1, 1)


def test_two_columns_of_one_name(tmp_path: Path, model_path: Path) -> None:
    columns_of = [pyarrow.array(["the"]), pyarrow.array(["of"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns_of, names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(Refused, match=r"a\.parquet has 2 columns named text: "):
        run(tmp_path / "a.parquet", model_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1" + bytes(100) + b"PAR1"])
def test_no_parquet(tmp_path: Path, model_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(Refused, match=r"a\.parquet can't be read as Parquet: ") as e:
        run(tmp_path / "a.parquet", model_path, tmp_path / "out")
    assert "\n" not in str(e.value)


def test_a_damaged_group(tmp_path: Path, model_path: Path) -> None:
    source = write(tmp_path / "a.parquet", {"text": plain_text(200)}, row_group_size=100)
    data = bytearray(Path(source.path).read_bytes())
    data[len(data) // 2 : len(data) // 2 + 50] = bytes(50)
    Path(source.path).write_bytes(data)
    with pytest.raises(Refused, match=r"a\.parquet can't be read as Parquet: "):
        run(tmp_path / "a.parquet", model_path, tmp_path / "out")
