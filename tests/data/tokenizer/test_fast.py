"""Fast encoders give the ids of the reference library, or are not used, and the reason is told."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, normalizers, pre_tokenizers

from megakit.data.tokenizer import Tokenizer, fast, giga, load_tokenizer
from megakit.data.tokenizer.encoder import Encoder, EncoderDiffers, ReferenceEncoder, SegmentsEncoder, Unsupported
from megakit.data.tokenizer.fast import Choice, build_encoder, choose_encoder, first_difference
from megakit.data.tokenizer.giga import GigatokenEncoder
from megakit.data.tokenizer.giga_ways import cut_at_numbers
from megakit.data.tokenizer.new_characters import has_new_character
from tests.data.corpus import made_up_text, plain_text
from tests.data.tokenizer.made import byte_level, folder, rank_file
from tests.data.tokenizer.odd_texts import odd_texts

SAMPLE = [text.rstrip() for text in made_up_text(40, seed=21)]


def trained(path: Path, **options: Any) -> Path:
    """A small sentencepiece model: byte-pair encoding with byte fallback, sentencepiece's defaults in all else."""
    model = io.BytesIO()
    given = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 400, **options}
    lines = (line for text in plain_text(200) for line in text.split("\n") if line)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, num_threads=1, minloglevel=2, **given)
    path.write_bytes(model.getvalue())
    return path


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def llama2(path: Path) -> Path:
    """A byte-pair model with byte fallback as a tokenizer.json in the manner of Llama-2."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained(path / "spm.model", **IDENTITY)))
    from megakit.data.tokenizer.spm_json import convert

    content = json.loads(convert(model.serialized_model_proto()).content)
    for name in ("<unk>", "<s>", "</s>"):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"].append({"id": content["model"]["vocab"][name], "content": name, **flags})
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def without_bytes(path: Path) -> Path:
    """SmolLM2's split, and a vocabulary that lacks bytes, as its own does."""
    content = json.loads(byte_level("smollm2").to_str())
    used = {part for merge in content["model"]["merges"] for part in (merge if isinstance(merge, list) else merge.split(" "))}
    for char in "Ąþñ?":
        if char not in used:
            del content["model"]["vocab"][char]
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "speeches-like": lambda d: trained(d / "a.model", add_dummy_prefix=False, split_digits=True, **IDENTITY),
    "llama2-like": lambda d: trained(d / "a.model", **IDENTITY),
    "nfkc": lambda d: trained(d / "a.model"),
    "user-defined": lambda d: trained(d / "a.model", user_defined_symbols=["[REF]", "<x>", "\u2581\u2581"], **IDENTITY),
    "gpt2.json": lambda d: folder(d, byte_level("gpt2")),
    "llama3.json": lambda d: folder(d, byte_level("llama3")),
    "qwen.json": lambda d: folder(d, byte_level("qwen")),
    "smollm2.json": without_bytes,
    "llama2.json": llama2,
    "gpt2.tiktoken": lambda d: rank_file(d / "a.tiktoken", 50_256),
    "cl100k.tiktoken": lambda d: rank_file(d / "a.tiktoken", 100_256),
    "llama3.tiktoken": lambda d: rank_file(d / "a.tiktoken", 128_000),
    "o200k.tiktoken": lambda d: rank_file(d / "a.tiktoken", 199_998),
}


def check(encoder: Encoder, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    ids, lengths = encoder.encode_batch(texts)
    assert ids.dtype == np.int32 and lengths.dtype == np.int64
    wanted = [tokenizer.encode(text) for text in texts]
    assert lengths.tolist() == [len(one) for one in wanted]
    assert ids.tolist() == [token for one in wanted for token in one]


@pytest.mark.parametrize("kind", MAKERS)
def test_ids_of_the_reference(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(MAKERS[kind](tmp_path))
    encoder = GigatokenEncoder(tokenizer)
    check(encoder, tokenizer, ["", *odd_texts(1200, seed=1), "", *made_up_text(60, seed=2), ""])
    assert encoder.encode_batch([])[0].tolist() == []
    # runs of spaces, a user-defined piece there, are in most of these texts
    assert choose_encoder(tokenizer, SAMPLE).encoder == ("segments" if kind == "user-defined" else "gigatoken")


@pytest.mark.parametrize(
    "kind,text",
    [
        ("gpt2.json", "\u088f't"),  # a letter of Unicode 17
        ("gpt2.tiktoken", "\u088f't"),
        ("qwen.json", "\u0822\u1abf"),  # marks whose order differs between versions of Unicode
        ("llama3.tiktoken", "the \n\t"),
        ("nfkc", "e\u0301\u0302"),
        ("user-defined", "a[REF]"),
        ("smollm2.json", "\x04"),  # a byte that the vocabulary lacks
    ],
)
def test_what_it_would_get_wrong_is_kept_from_it(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = load_tokenizer(MAKERS[kind](tmp_path))
    encoder = GigatokenEncoder(tokenizer)
    check(encoder, tokenizer, [text, "the of", f"{text} the {text}", "of"])
    alone = gigatoken.Tokenizer(tokenizer.path) if kind == "qwen.json" else encoder._gigatoken
    assert alone.encode(text).tolist() != tokenizer.encode(text), "no longer needed?"


def test_a_mark_behind_a_special_token(tmp_path: Path) -> None:
    """NFC would join U+0338 to the `>` in front of it."""
    tokenizer = load_tokenizer(folder(tmp_path, byte_level("qwen")))
    text = "a<|im_end|>\u0338b"
    assert unicodedata.normalize("NFC", text) != text
    check(GigatokenEncoder(tokenizer), tokenizer, [text])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2.json", "smollm2.json", "llama3.json", "qwen.json", "o200k.tiktoken", "llama2-like"])
def test_every_character(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(MAKERS[kind](tmp_path))
    encoder = GigatokenEncoder(tokenizer)
    points = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    for start in range(0, len(points), 50_000):
        texts = [f"a{c}b {c}1{c} {c}{c}.{c}\n{c} x'{c} {c}'s" for c in points[start : start + 50_000]]
        assert first_difference(encoder, tokenizer, texts) is None


def test_new_characters() -> None:
    for text in ("", "plain", "é 日本 \U0001f600 \U0001f469\u200d", "\ue000\U0010ffff", "x" * 100 + "ß"):
        assert not has_new_character(text)
    for char in "\u088f\u1acf\ua7ce\U000105c0\U00031350":
        assert has_new_character(char) and has_new_character(f"the \U0001f600 {char} end")
    # what this Python knows no character for, but a library may, is new; what it has known for long is not
    for point in range(0x3400):
        if unicodedata.category(chr(point)) == "Lo" and unicodedata.ucd_3_2_0.category(chr(point)) == "Lo":
            assert not has_new_character(chr(point))


class Wrong(ReferenceEncoder):
    """The reference, but for texts with a certain character."""

    hidden = ""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self.name = "wrong"

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = super().encode_batch(texts)
        ends = np.cumsum(lengths)
        for i, text in enumerate(texts):
            if "\u2603" in text or (self.hidden and self.hidden in text):
                ids[ends[i] - 1] += 1
        return ids, lengths


def test_an_encoder_that_differs_on_the_sample_is_not_chosen(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(model_path)
    monkeypatch.setattr(fast, "FAST", {"wrong": Wrong})
    assert choose_encoder(tokenizer, SAMPLE) == Choice(
        "wrong", f"the ids of sentencepiece on {sum(map(len, fast.draw(SAMPLE))):,} characters of the input"
    )
    many = ["the of and " * 200] * 2000
    found = choose_encoder(tokenizer, [*many, "of \u2603 of", *many])  # one text among four thousand
    assert found.encoder == "sentencepiece"
    assert found.reason == "wrong: other ids for the text that begins 'of \u2603 of'"


@pytest.mark.parametrize("hidden", ["\u1abf", "WE'LL", "\t\n  ", "<0x41>"])
def test_awkward_texts_are_tried_whatever_the_sample(model_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setattr(fast, "FAST", {"wrong": Wrong})
    monkeypatch.setattr(Wrong, "hidden", hidden)
    assert choose_encoder(load_tokenizer(model_path), ["the of and"]).encoder == "sentencepiece"


def test_added_tokens_are_tried_whatever_the_sample(tmp_path: Path) -> None:
    """gigatoken makes this one of a part of a word too."""
    made = byte_level("gpt2")
    made.add_tokens([AddedToken("state", single_word=True)])
    tokenizer = load_tokenizer(folder(tmp_path, made))
    choice = choose_encoder(tokenizer, SAMPLE)
    assert choice.encoder == "tokenizers" and "other ids for the text that begins 'xstatey" in choice.reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_no_failure_of_the_library(model_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Rust makes errors and panics of a KeyboardInterrupt: the interrupt would be lost, and the slow way chosen."""

    def interrupted(self: Any, texts: list[str]) -> Any:
        try:
            os.kill(os.getpid(), number)
            return np.zeros(0, np.int32), np.zeros(len(texts), np.int64)
        except KeyboardInterrupt as e:
            raise RuntimeError("a panic") from e

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    encoder = GigatokenEncoder(load_tokenizer(model_path))
    monkeypatch.setattr(GigatokenEncoder, "_encode_whole", interrupted)
    before = signal.signal(number, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            encoder.encode_batch(["the"])
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_numbers_are_cut_as_the_library_cuts_them() -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    for text in ["a1b23", "12", "", "x", "٣٤½①Ⅷ一二", "a\U0001d7ce\U0001d7cf9b\U0001f600", *odd_texts(300, seed=4)]:
        if not has_new_character(text):
            assert [part for part in cut_at_numbers(text) if part] == [part for part, _ in digits.pre_tokenize_str(text)]


def test_control_pieces_are_not_made_of_their_parts(tmp_path: Path) -> None:
    """This model has the pieces `</s` and `>`, and `</s>` with the end's id."""
    lines = iter(["x</s y</s z</s w> v> a</s b"] * 50)
    model = io.BytesIO()
    options = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 275, "minloglevel": 2, "num_threads": 1, **IDENTITY}
    options["split_by_unicode_script"] = False
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    (tmp_path / "a.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path / "a.model")
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert {"</s", ">"} <= {pieces.id_to_piece(i) for i in range(275)}
    assert tokenizer.eos not in tokenizer.encode("x</s>")
    check(GigatokenEncoder(tokenizer), tokenizer, ["x</s>", "</s> y<unk><s>"])


def test_an_encoder_that_differs_later_is_found(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(model_path)
    monkeypatch.setattr(fast, "FAST", {"wrong": Wrong})
    encoder = build_encoder(tokenizer, "wrong")
    good, bad = ["the of and"] * 500, ["the of \u2603"] * 500
    for _ in range(5):
        check(encoder, tokenizer, good)
    assert isinstance(encoder, fast.CheckedEncoder)
    assert encoder._checked >= fast.CHECKED_SHARE * encoder._seen > encoder._checked - 20
    with pytest.raises(EncoderDiffers, match=r"wrong gives other ids than sentencepiece for the text that begins 'the of ☃'"):
        encoder.encode_batch(bad)


def test_a_sample_holds_the_awkward_texts() -> None:
    awkward = ["x" * 40_000, "日" * 90, "a\t\r \u00a0b" * 30, "\x01\x02\x03" * 20]
    drawn = fast.draw([*(["plain words here "] * 30_000), *awkward])
    assert {text[: fast._LONGEST] for text in awkward} <= set(drawn)
    assert 300_000 <= sum(map(len, drawn)) < 340_000
    assert fast.draw([]) == [] and fast.draw(["a"]) == ["a"]


def test_without_gigatoken(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = load_tokenizer(model_path)
    found = choose_encoder(tokenizer, SAMPLE)
    assert found.encoder == "segments"
    assert found.reason.startswith("gigatoken: it is not installed: pip install 'megakit[tokenizers]'; the ids of sentencepiece")
    check(build_encoder(tokenizer, "segments"), tokenizer, odd_texts(200, seed=3))
    assert choose_encoder(load_tokenizer(folder(tmp_path, byte_level("gpt2"))), SAMPLE) == Choice(
        "tokenizers", "gigatoken: it is not installed: pip install 'megakit[tokenizers]'"
    )
    with pytest.raises(EncoderDiffers, match=r"gigatoken can't encode with .*: it is not installed"):
        build_encoder(tokenizer, "gigatoken")
    with pytest.raises(EncoderDiffers, match="there is no encoder other"):
        build_encoder(tokenizer, "other")
    assert isinstance(build_encoder(tokenizer, "sentencepiece"), ReferenceEncoder)


def test_what_no_fast_way_takes(tmp_path: Path) -> None:
    unigram = load_tokenizer(trained(tmp_path / "u.model", model_type="unigram", vocab_size=340))
    assert choose_encoder(unigram, SAMPLE) == Choice(
        "sentencepiece",
        "gigatoken: it is for byte-pair models with byte fallback;"
        " segments: a piece of the model may reach over the end of a word",
    )
    made = byte_level("gpt2")
    made.normalizer = normalizers.Lowercase()
    lower = load_tokenizer(folder(tmp_path, made))
    assert choose_encoder(lower, SAMPLE).reason == "gigatoken: its normaliser Lowercase is not the reference's"
    with pytest.raises(Unsupported, match="they are for sentencepiece models"):
        SegmentsEncoder(lower)


def test_left_to_the_reference_too_often(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, byte_level("gpt2")))
    assert choose_encoder(tokenizer, ["the \u088f of"] * 50).reason == "gigatoken: 100% of the input would go to tokenizers"


def test_it_is_built_anew_when_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giga, "_MIN_TEXT", 1000)
    monkeypatch.setattr(giga, "_MAX_GROWTH", -(1 << 40))
    tokenizer = load_tokenizer(folder(tmp_path, byte_level("gpt2")))
    encoder = GigatokenEncoder(tokenizer)
    before = encoder._gigatoken
    check(encoder, tokenizer, ["the of"] * 100)
    assert encoder._gigatoken is before
    check(encoder, tokenizer, ["the of"] * 200)
    check(encoder, tokenizer, ["the of"])
    assert encoder._gigatoken is not before


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_it_starts_no_thread(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, byte_level("llama3")))
    encoder = GigatokenEncoder(tokenizer)
    encoder.encode_batch(["the of"])
    before = len(os.listdir("/proc/self/task"))
    encoder.encode_batch(["the of and to in"] * 20_000)
    assert len(os.listdir("/proc/self/task")) == before
