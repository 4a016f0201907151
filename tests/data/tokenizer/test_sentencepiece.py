from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import sentencepiece

from megakit.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from megakit.errors import Refused
from tests.data.corpus import NASTY, made_up_text, plain_text


@pytest.mark.parametrize("text", NASTY)
def test_text_comes_back(model_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(model_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_text_comes_back(model_path: Path) -> None:
    tokenizer = load_tokenizer(model_path)
    text = "\n".join(plain_text(50, seed=3))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids(model_path: Path) -> None:
    tokenizer = load_tokenizer(model_path)
    assert (tokenizer.vocab_size, tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (400, 0, 1, 2, None)
    assert tokenizer.eod == 2
    assert tokenizer.decode([2]) == ""
    # written out in a text, the name of a control piece is only text; unseen characters are bytes
    assert tokenizer.eod not in tokenizer.encode("the </s>")
    assert tokenizer.unk not in tokenizer.encode("\u0416\U0001f9e0")


def test_fingerprint_is_the_files_sha256(model_path: Path) -> None:
    wanted = hashlib.sha256(model_path.read_bytes()).hexdigest()
    assert load_tokenizer(model_path).fingerprint == tokenizer_fingerprint(model_path) == wanted


def test_batch_gives_the_ids_of_each_text(model_path: Path) -> None:
    tokenizer = load_tokenizer(model_path)
    texts = [*NASTY, *made_up_text(40, seed=5)]
    ids, lengths = tokenizer.encode_batch(texts)
    each = [tokenizer.encode(text) for text in texts]
    assert lengths.tolist() == [len(one) for one in each]
    assert ids.tolist() == [token for one in each for token in one]
    assert [len(part) for part in tokenizer.encode_batch([])] == [0, 0]


def test_lone_surrogate_is_refused(model_path: Path) -> None:
    with pytest.raises(Refused, match=r"character 4 .* U\+D800"):
        load_tokenizer(model_path).encode("the \ud800")


def test_folder_with_a_model(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_path.read_bytes())
    found = load_tokenizer(tmp_path)
    assert (found.kind, found.path, found.vocab_size) == ("sentencepiece", str(tmp_path / "tokenizer.model"), 400)
    assert found.fingerprint == tokenizer_fingerprint(tmp_path) == tokenizer_fingerprint(model_path)


def test_foreign_id_is_refused(model_path: Path) -> None:
    for token in (400, -1):
        with pytest.raises(Refused, match=rf"{token} is outside the 400 pieces"):
            load_tokenizer(model_path).decode([5, token])


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="can't be read"):
        load_tokenizer(tmp_path / "none.model")
    with pytest.raises(Refused, match=r"folder .* holds none of tokenizer\.json, tokenizer\.model, \*\.tiktoken"):
        load_tokenizer(tmp_path)
    for content in (b"", b"\x0a", b"\xff" * 100):
        broken = tmp_path / "broken.model"
        broken.write_bytes(content)
        with pytest.raises(Refused, match=r"broken\.model, \d+ bytes, is not a sentencepiece model") as e:
            load_tokenizer(broken)
        assert "\n" not in str(e.value)


def test_model_without_an_end_is_refused(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(plain_text(50)),
        model_prefix=str(tmp_path / "no_end"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(Refused, match="no end-of-sentence piece"):
        load_tokenizer(tmp_path / "no_end.model")
