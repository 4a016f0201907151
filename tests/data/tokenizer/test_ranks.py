"""A tiktoken rank file: the ids of `tiktoken` with the published split and special tokens."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public as published
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from megakit.data.tokenizer import Tokenizer as Ours
from megakit.data.tokenizer import load_tokenizer
from megakit.errors import Refused
from tests.data.corpus import NASTY, made_up_text
from tests.data.tokenizer.made import rank_file

TEXTS = [
    *NASTY,
    *made_up_text(30, seed=2),
    "WE'LL don't 1234567 x_y\r\n\r\n  end/\n",
    "a <|endoftext|><|begin_of_text|> b",
    "x" * 3000 + " " * 3000 + "\n" * 500,
]


def check(ours: Ours, wanted: list[list[int]]) -> None:
    assert [ours.encode(text) for text in TEXTS] == wanted
    ids, lengths = ours.encode_batch(TEXTS)
    assert lengths.tolist() == [len(one) for one in wanted]
    assert ids.tolist() == [token for one in wanted for token in one]
    assert [ours.decode(one) for one in wanted] == TEXTS


@pytest.mark.parametrize("name,count", [("r50k_base", 50_256), ("cl100k_base", 100_256), ("o200k_base", 199_998)])
def test_openai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    path = rank_file(tmp_path / "some.tiktoken", count)
    ours = load_tokenizer(path)
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(bytes.split, path.read_bytes().splitlines())}
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: ranks)
    theirs = tiktoken.Encoding(**getattr(published, name)())
    check(ours, [theirs.encode_ordinary(text) for text in TEXTS])
    assert (ours.kind, ours.vocab_size, ours.eod, ours.eos) == ("tiktoken", theirs.n_vocab, theirs.eot_token, theirs.eot_token)
    assert ours.bos == (50_256 if count == 50_256 else None)


def test_llama3(tmp_path: Path) -> None:
    """Its file is called tokenizer.model too."""
    path = rank_file(tmp_path / "tokenizer.model", 128_000)
    ours = load_tokenizer(tmp_path)
    theirs: Tokenizer = converted(path)
    check(ours, [theirs.encode(text).ids for text in TEXTS])
    assert (ours.vocab_size, ours.bos, ours.eos, ours.eod, ours.pad) == (128_256, 128_000, 128_001, 128_001, None)
    special: dict[str, int] = ours.scheme.special  # type: ignore[attr-defined]
    assert len(special) == 256 and sorted(special.values()) == list(range(128_000, 128_256))
    assert (special["<|start_header_id|>"], special["<|eot_id|>"]) == (128_006, 128_009)
    assert (special["<|reserved_special_token_3|>"], special["<|reserved_special_token_4|>"]) == (128_005, 128_008)
    assert special["<|reserved_special_token_250|>"] == 128_255
    assert ours.decode([128_000, *ours.encode("the"), 128_255]) == "the"
    with pytest.raises(Refused, match=r"lone surrogate U\+DC00"):
        ours.encode("the \udc00")


def converted(path: Path) -> Any:
    """transformers' reading of a rank file, whose split pattern is Llama-3's unless told otherwise."""
    return TikTokenConverter(vocab_file=str(path), extra_special_tokens=[]).converted()


def test_refusals(tmp_path: Path) -> None:
    lines = rank_file(tmp_path / "a.tiktoken", 300).read_bytes().splitlines(keepends=True)
    with pytest.raises(Refused, match=r"has 300 ranks, and how its text is split is known for 50,256 \(GPT-2\)"):
        load_tokenizer(tmp_path / "a.tiktoken")
    for damage, message in {
        b"!? 5\n": "line 6: it is no base64 word and number",
        b"IQ== 9\n": "line 6: rank 9 stands where 5 should",
        b"AA== 5\n": "line 6: its word is there twice",
        b"\n": "line 6: it is no base64 word and number",
    }.items():
        (tmp_path / "a.tiktoken").write_bytes(b"".join([*lines[:5], damage, *lines[6:]]))
        with pytest.raises(Refused, match=message):
            load_tokenizer(tmp_path / "a.tiktoken")
    (tmp_path / "b.tiktoken").write_bytes(b"".join(lines))
    with pytest.raises(Refused, match=r"holds 2 files \*\.tiktoken: give the path of one"):
        load_tokenizer(tmp_path)
