"""A Hugging Face tokenizer.json: the ids of `tokenizers`, the special tokens of the files beside it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megakit.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from megakit.errors import Refused
from tests.data.corpus import NASTY, made_up_text
from tests.data.tokenizer.made import ENDS, byte_level, folder

CONFIG = {"eos_token": "<|endoftext|>", "pad_token": {"content": "<|im_end|>"}}


@pytest.mark.parametrize("style", ["gpt2", "llama3", "qwen", "smollm2"])
def test_ids_and_text_of_the_library(tmp_path: Path, style: str) -> None:
    made = byte_level(style)
    ours = load_tokenizer(folder(tmp_path, made, tokenizer_config=CONFIG))
    texts = [*NASTY, *made_up_text(30, seed=1), "a <|endoftext|> b<|im_start|>"]
    wanted = [made.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ours.encode(text) for text in texts] == wanted
    ids, lengths = ours.encode_batch(texts)
    assert lengths.tolist() == [len(one) for one in wanted]
    assert ids.tolist() == [token for one in wanted for token in one]
    for text in texts[:-1]:
        assert ours.decode(ours.encode(text)) == text
    assert (ours.kind, ours.vocab_size) == ("tokenizers", max(made.get_vocab().values()) + 1)


def test_a_special_token_spelled_in_a_text_is_that_token(tmp_path: Path) -> None:
    """As in transformers; what a decode gives back leaves it out."""
    made = byte_level("gpt2")
    ours = load_tokenizer(folder(tmp_path, made, tokenizer_config=CONFIG))
    ids = ours.encode("the <|endoftext|>of")
    assert ids == PreTrainedTokenizerFast(tokenizer_object=made).encode("the <|endoftext|>of", add_special_tokens=False)
    assert ours.eod in ids and ours.decode(ids) == "the of"


def test_nothing_is_added_cut_or_padded(tmp_path: Path) -> None:
    made = byte_level("gpt2")
    plain = made.encode("the of and to in a is").ids
    end = made.token_to_id("<|endoftext|>")
    made.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)])
    made.enable_truncation(3)
    made.enable_padding(length=50)
    assert load_tokenizer(folder(tmp_path, made)).encode("the of and to in a is") == plain


def test_special_ids_from_the_files_beside(tmp_path: Path) -> None:
    made = byte_level("gpt2")
    end, start, stop = (made.token_to_id(name) for name in ENDS)
    named = load_tokenizer(folder(tmp_path / "config", made, tokenizer_config={**CONFIG, "bos_token": None}))
    assert (named.bos, named.eos, named.unk, named.pad, named.eod) == (None, end, None, stop, end)
    mapped = folder(tmp_path / "map", made, special_tokens_map={"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    found = load_tokenizer(mapped / "tokenizer.json")
    assert (found.bos, found.eos, found.pad, found.eod) == (start, stop, None, stop)
    by_id = load_tokenizer(folder(tmp_path / "model", made, config={"eos_token_id": [stop, end], "bos_token_id": start}))
    assert (by_id.bos, by_id.eos, by_id.eod) == (start, stop, stop)
    alone = load_tokenizer(folder(tmp_path / "alone", made))
    assert (alone.bos, alone.eos, alone.pad, alone.eod) == (None, None, None, end)


def test_saved_by_transformers(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level("llama3"), bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.path == str(tmp_path / "tokenizer.json")
    wanted = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert ours.fingerprint == tokenizer_fingerprint(tmp_path) == wanted


def test_refusals(tmp_path: Path) -> None:
    made = byte_level("gpt2")
    with pytest.raises(Refused, match=r"name eos_token '</s>', which it doesn't hold"):
        load_tokenizer(folder(tmp_path / "other", made, tokenizer_config={"eos_token": "</s>"}))
    with pytest.raises(Refused, match="no token to end documents with: name its eos_token"):
        load_tokenizer(folder(tmp_path / "none", byte_level("gpt2", specials=["<|im_start|>"])))
    with pytest.raises(Refused, match=r"eos_token_id 999, which it doesn't hold"):
        load_tokenizer(folder(tmp_path / "ids", made, config={"eos_token_id": 999}))
    broken = folder(tmp_path / "broken", made)
    (broken / "tokenizer_config.json").write_text("{")
    with pytest.raises(Refused, match=r"tokenizer_config\.json can't be read"):
        load_tokenizer(broken)
    for content in ('{"model": 1}', "{", "{}"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(Refused, match=r"is not a tokenizer\.json"):
            load_tokenizer(tmp_path)
    made.model.dropout = 0.1
    with pytest.raises(Refused, match=r"a dropout of 0\.1"):
        load_tokenizer(folder(tmp_path / "dropout", made))
    ours = load_tokenizer(folder(tmp_path / "plain", byte_level("gpt2")))
    with pytest.raises(Refused, match=r"lone surrogate U\+D800"):
        ours.encode("a\ud800")
    with pytest.raises(Refused, match="is outside the"):
        ours.decode([ours.vocab_size])


def test_the_library_is_optional_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    path = folder(tmp_path, byte_level("gpt2"))
    code = (
        "import sys; from megakit.data.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(path)!r});"
        "print([m for m in ('torch', 'transformers', 'sentencepiece', 'tiktoken', 'gigatoken') if m in sys.modules])"
    )
    assert json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)) == []
    code = f"import sys; sys.modules['tokenizers'] = None; from megakit.data.tokenizer import *; load_tokenizer({str(path)!r})"
    gone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs the package tokenizers, which is not installed: pip install 'megakit[tokenizers]'" in gone.stderr
