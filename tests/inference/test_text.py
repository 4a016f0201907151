"""Text that comes token by token is the tokenizer's own text of all of them."""

from __future__ import annotations

import pytest

from megakit.data.tokenizer import Tokenizer, load_tokenizer
from megakit.inference.text import UNFINISHED, TextStream
from tests.data.corpus import NASTY, made_up_text, plain_text
from tests.data.tokenizer import made


@pytest.fixture(params=["sentencepiece", "sentencepiece with a space in front", "qwen", "llama3"])
def tokenizer(request, tmp_path) -> Tokenizer:
    if not request.param.startswith("sentencepiece"):
        return load_tokenizer(made.folder(tmp_path, made.byte_level(request.param)))
    import io

    import sentencepiece

    model, path = io.BytesIO(), tmp_path / "tokenizer.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(plain_text(300)),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix="space" in request.param,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return load_tokenizer(path)


def test_joined_it_is_the_whole_text(tokenizer):
    """Behind prompts of any length."""
    for n, text in enumerate([t for t in (*NASTY, *made_up_text(20, seed=9)) if len(t) > 4 and "\x00" not in t]):
        cut = (3, len(text) // 2)[n % 2]
        prompt = tokenizer.encode(text[:cut])
        ids = [*prompt, *tokenizer.encode(text[cut:])]
        stream = TextStream(tokenizer, prompt)
        parts = [stream.add(token) for token in ids[len(prompt) :]]
        expected = tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
        assert "".join([*parts, stream.end()]) == stream.text == expected


def test_a_character_is_given_whole(tokenizer):
    """It may be several tokens; what never becomes one is U+FFFD in the end."""
    stream, ids = TextStream(tokenizer, tokenizer.encode("the")), tokenizer.encode(" the \U0001f9e0")
    parts = [stream.add(token) for token in ids]
    assert len(ids) > 3 and not any(UNFINISHED in part for part in parts) and parts[-1] == "\U0001f9e0"
    stream.add(ids[-2])
    assert stream.end() and UNFINISHED in stream.text


def test_a_long_text_takes_as_long_per_token(tokenizer, monkeypatch):
    """Only the last tokens are decoded again."""
    lengths: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    stream = TextStream(tokenizer, list(range(50)))
    for token in tokenizer.encode(" the of and" * 50):
        stream.add(token)
    assert max(lengths) <= 12
