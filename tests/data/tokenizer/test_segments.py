"""Encoding by segments gives sentencepiece's own ids, or is not offered."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import sentencepiece

from megakit.data.tokenizer import segments
from megakit.data.tokenizer.segments import SegmentEncoder
from tests.data.corpus import NASTY, made_up_text, plain_text

LOCAL = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
}


def lines() -> Iterator[str]:
    yield from (line for text in plain_text(300) for line in text.split("\n") if line)
    yield from ["of the people by the people"] * 200


def loaded(**options: Any) -> tuple[sentencepiece.SentencePieceProcessor, bytes]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(),
        model_writer=model,
        vocab_size=370,
        num_threads=1,
        minloglevel=2,
        **{**LOCAL, **options},
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), model.getvalue()


def check(pieces: sentencepiece.SentencePieceProcessor, encoder: SegmentEncoder, texts: list[str]) -> None:
    ids, lengths = encoder.encode_batch(texts)
    wanted = [pieces.encode(text) for text in texts]
    assert lengths.tolist() == [len(one) for one in wanted]
    assert ids.tolist() == [token for one in wanted for token in one]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": True},
        {"allow_whitespace_only_pieces": True, "split_digits": True},
        {"split_by_unicode_script": False, "split_by_number": False},
        {"user_defined_symbols": ["of", "<x>", "\u2581\u2581", "日本"]},
    ],
)
def test_same_ids_as_sentencepiece(options: dict[str, Any]) -> None:
    pieces, model = loaded(**options)
    encoder = SegmentEncoder.build(pieces, model)
    assert encoder is not None
    check(pieces, encoder, [*NASTY, *made_up_text(300, seed=1)])
    check(pieces, encoder, made_up_text(100, seed=2))


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"treat_whitespace_as_suffix": True},
        {"split_by_whitespace": False},
        {"user_defined_symbols": ["of the"]},
        {"user_defined_symbols": ["of\nthe"]},
    ],
)
def test_not_offered_where_ids_could_differ(options: dict[str, Any]) -> None:
    assert SegmentEncoder.build(*loaded(**options)) is None


def test_very_long_texts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_SPAN", 50)
    pieces, model = loaded(add_dummy_prefix=True)
    encoder = SegmentEncoder.build(pieces, model)
    assert encoder is not None
    long = " ".join(made_up_text(30, seed=4))
    one_line = long.replace("\n", " ")
    check(pieces, encoder, ["the", long, "", one_line, "of", "x" * 200, "y " + "\n" * 120])


def test_table_is_emptied_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_SEGMENTS", 20)
    pieces, model = loaded()
    encoder = SegmentEncoder.build(pieces, model)
    assert encoder is not None
    for seed in range(5):
        check(pieces, encoder, made_up_text(10, seed=seed))
    assert len(encoder._table) < 300
