from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece

from megakit.data import train_tokenizer
from megakit.data.train_tokenizer import check_new, texts_of, train, write_model
from megakit.errors import Refused, StorageFailed
from tests.data.corpus import NASTY, plain_text


def test_same_text_gives_the_same_bytes() -> None:
    texts = plain_text(200)
    assert train(iter(texts), 350) == train(iter(texts), 350)
    assert train(iter(texts), 350) != train(iter(plain_text(200, seed=1)), 350)


def test_model_gives_back_text_and_allows_fast_encoders(tmp_path: Path) -> None:
    from megakit.data.tokenizer import load_tokenizer
    from megakit.data.tokenizer.fast import FAST

    write_model(str(tmp_path / "a.model"), train(iter(plain_text(200)), 350))
    tokenizer = load_tokenizer(tmp_path / "a.model")
    assert tokenizer.vocab_size == 350
    assert [build(tokenizer).name for build in FAST.values()] == ["gigatoken", "segments"]
    for text in [*NASTY, *plain_text(50, seed=2)]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_lines_and_odd_characters_are_trained_on() -> None:
    """A line over sentencepiece's default limit, with tabs and zero bytes, is the only one with these words."""
    long = "\tzebra\x00 quagga" * 20_000
    model = sentencepiece.SentencePieceProcessor(model_proto=train(iter([*plain_text(50), long]), 330))
    assert "\u2581quagga" in [model.id_to_piece(i) for i in range(330)]


def test_every_digit_stands_alone() -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=train(iter(["1234 the 1234 of"] * 50), 270))
    assert list(model.encode("1234", out_type=str)) == ["1", "2", "3", "4"]


def test_lines_are_drawn_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = train_tokenizer._draw(iter(str(i) for i in range(10_000)), 500)
    numbers = sorted(map(int, drawn))
    assert len(set(numbers)) == 500
    assert drawn == train_tokenizer._draw(iter(str(i) for i in range(10_000)), 500)
    for tenth in range(10):
        assert 25 <= sum(tenth * 1000 <= n < tenth * 1000 + 1000 for n in numbers) <= 80
    assert train_tokenizer._draw(iter(["a", "b"]), 5) == ["a", "b"]
    with pytest.raises(Refused, match="Vocabulary size too high"):
        train(iter(plain_text(200)), 350, max_lines=2)


def test_what_cannot_be_trained() -> None:
    for texts, size, words in (
        (["the of"], 400, r"vocabulary of 400 pieces .* too high"),
        (["the of"], 200, r"vocabulary of 200 pieces .* smaller than required"),
        ([], 400, "there is no text"),
    ):
        with pytest.raises(Refused, match=words) as e:
            train(iter(texts), size)
        assert "\n" not in str(e.value)
    with pytest.raises(Refused, match=r"coverage of 1\.5"):
        train(iter(["the"]), 300, character_coverage=1.5)


def test_texts_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"t": "three"}\n\n{"t": ""}\n{"u": 1}\n')
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    assert list(texts_of(paths, ("t",), skip_bad=True)) == ["one\ntwo", "three"]
    with pytest.raises(Refused, match=r'b\.jsonl line 4: no such key "t"'):
        list(texts_of(paths, ("t",), skip_bad=False))
    # also through sentencepiece, which reads the texts in its own code
    with pytest.raises(Refused, match=r'^\S*b\.jsonl line 4: no such key "t"'):
        train(texts_of(paths, ("t",), skip_bad=False), 300)


def test_line_numbers_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = train_tokenizer.plan_blocks
    monkeypatch.setattr(train_tokenizer, "plan_blocks", lambda sources, keys: plan(sources, keys, block_bytes=50))
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n' * 30 + ("{" if name == "b" else ""))
    with pytest.raises(Refused, match=r"b\.jsonl line 31: not a JSON object"):
        list(texts_of([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], ("text",), skip_bad=False))


def test_model_file_is_written_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.model"
    write_model(str(path), b"one")
    check_new(str(path), overwrite=True)
    with pytest.raises(Refused, match=r"a\.model is there already"):
        check_new(str(path), overwrite=False)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_tokenizer.os, "fsync", full)
    with pytest.raises(StorageFailed, match="No space left"):
        write_model(str(path), b"two")
    assert path.read_bytes() == b"one"
    assert [p.name for p in path.parent.iterdir()] == ["a.model"]
