"""A small tokenizer that starts at once: no fast encoder takes a unigram model. tests/tools has one that they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece

from tests.data.corpus import plain_text


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("tokenizer") / "unigram"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in plain_text(300) for line in text.split("\n") if line),
        model_prefix=str(prefix),
        model_type="unigram",
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")
