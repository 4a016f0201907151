"""What a recipe's data section may be, and what is refused before the first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.data.build import build_streams
from megakit.data.tokenizer import tokenizer_fingerprint
from megakit.data.train_tokenizer import train, write_model
from megakit.errors import Refused
from tests.data.corpus import plain_text, recipe, write_corpus
from tests.data.test_indexed import by_hand


def refused(words: str, path: list[Path] | None = None, **keys: Any) -> None:
    with pytest.raises(Refused, match=words) as e:
        build_streams(recipe(path, **keys))
    assert "\n" not in str(e.value)


def test_no_data() -> None:
    refused("data.path is empty")


def test_truncated_file(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [100])
    os.truncate(tmp_path / "a.bin", 198)
    refused(r"a\.bin has 198 bytes, .* 200", [tmp_path / "a"])


def test_data_of_another_tokenizer(tmp_path: Path, model_path: Path) -> None:
    """Two tokenizers of the same size: only the fingerprint tells them apart."""
    other = tmp_path / "other.model"
    write_model(str(other), train(iter(plain_text(300, seed=9)), 400))
    write_corpus(tmp_path / "a", [100], vocab=400, tokenizer=tokenizer_fingerprint(model_path))
    keys = {"model__vocab_size": 400}
    refused(rf"made with tokenizer .* data\.tokenizer={other}", [tmp_path / "a"], data__tokenizer=str(other), **keys)
    refused("can't be read", [tmp_path / "a"], data__tokenizer=str(tmp_path / "none"), **keys)
    assert build_streams(recipe([tmp_path / "a"], data__tokenizer=str(model_path), **keys))[0].samples == 12
    assert build_streams(recipe([tmp_path / "a"], **keys))[0].samples == 12


def test_validation_data_of_another_tokenizer(tmp_path: Path, model_path: Path) -> None:
    write_corpus(tmp_path / "a", [100], tokenizer=tokenizer_fingerprint(model_path))
    write_corpus(tmp_path / "b", [100], tokenizer="0" * 64)
    keys: dict[str, Any] = {"data__tokenizer": str(model_path), "data__valid_path": [str(tmp_path / "b")]}
    refused("b was made with tokenizer 000000000000", [tmp_path / "a"], train__eval_interval=1, **keys)


def test_ids_beyond_the_model(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [100], vocab=121)
    refused(r"vocabulary of 121, model\.vocab_size is 101: set model\.vocab_size=121", [tmp_path / "a"])
    # a plain Megatron corpus: every token is looked at
    by_hand(tmp_path / "b", [[1] * 50, [2] * 30 + [120] + [3] * 9])
    refused(r"b\.bin holds token id 120, model\.vocab_size is 101", [tmp_path / "b"])
    assert build_streams(recipe([tmp_path / "b"], model__vocab_size=121))[0].samples == 11
    by_hand(tmp_path / "c", [[1] * 50 + [-3]], code=4, letter="i", size=4)
    refused("token id -3", [tmp_path / "c"])


def test_damaged_token_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """Behind a sidecar nothing is scanned: the batch that holds a bad id is refused, and the place is named."""
    write_corpus(tmp_path / "a", [100])
    with open(tmp_path / "a.bin", "r+b") as f:
        f.seek(2 * 37)
        f.write(b"\xff\xff")
    stream, _ = build_streams(recipe([tmp_path / "a"]))
    assert stream.read(np.array([0, 3, 5])).shape == (3, 9)
    with pytest.raises(Refused, match=r"a\.bin: token 37 is 65535, model\.vocab_size is 101"):
        stream.read(np.array([0, 4]))


def test_fewer_samples_than_a_batch(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [3 * 8 + 1])
    refused(r"3 samples of train\.seq_len=8, fewer than one train\.global_batch_size=4", [tmp_path / "a"])
    build_streams(recipe([tmp_path / "a"], train__global_batch_size=3))


def test_parts_too_small_for_a_sample(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [90, 8])
    refused(
        r"validation part of .*a by data\.split=99,1: 8 tokens in 1 of 2 documents, .*seq_len \+ 1 = 9",
        [tmp_path / "a"],
        data__split="99,1",
        train__eval_interval=1,
    )
    assert build_streams(recipe([tmp_path / "a"], data__split="99,1"))[1] is None
    write_corpus(tmp_path / "b", [8, 90])
    refused(r"training part of .*b by data\.split=1,99: 8 tokens", [tmp_path / "b"], data__split="1,99")
    write_corpus(tmp_path / "c", [8])
    refused(r"training part of .*c by data\.split=1: 8 tokens", [tmp_path / "c"])
    for split in ("1", "1,0", "1,0,1"):
        refused("gives validation no share", [tmp_path / "a"], data__split=split, train__eval_interval=1)


def test_split_is_between_whole_documents(tmp_path: Path) -> None:
    tokens = write_corpus(tmp_path / "a", [100] * 10)
    train_stream, valid = build_streams(recipe([tmp_path / "a"], data__split="8,1,1", train__eval_interval=1))
    assert valid is not None
    assert (train_stream.samples, valid.samples) == (99, 12)
    assert train_stream.read(np.array([98]))[0].tolist() == tokens[98 * 8 : 98 * 8 + 9].tolist()
    assert valid.read(np.array([0, 11])).tolist() == [tokens[800:809].tolist(), tokens[888:897].tolist()]


def test_separate_validation_files(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [100], seed=1)
    tokens = write_corpus(tmp_path / "b", [100], seed=2)
    keys: dict[str, Any] = {"data__valid_path": [str(tmp_path / "b")], "data__split": "99,1"}
    train_stream, valid = build_streams(recipe([tmp_path / "a"], train__eval_interval=1, **keys))
    assert valid is not None and (train_stream.samples, valid.samples) == (12, 12)
    assert valid.read(np.array([1]))[0].tolist() == tokens[8:17].tolist()
    assert build_streams(recipe([tmp_path / "a"], **keys))[1] is None
    os.symlink(tmp_path / "a.bin", tmp_path / "same.bin")
    os.symlink(tmp_path / "a.idx", tmp_path / "same.idx")
    refused("same is in data.path and in data.valid_path", [tmp_path / "a"], data__valid_path=[str(tmp_path / "same")])


def test_validation_is_the_same_for_every_seed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [100] * 10)
    keys: dict[str, Any] = {"data__split": "1,1", "train__eval_interval": 1}
    a, b = (build_streams(recipe([tmp_path / "a"], train__seed=seed, **keys)) for seed in (1, 2))
    assert a[1] is not None and b[1] is not None
    assert np.array_equal(a[1].ids(0, 60), b[1].ids(0, 60))
    assert not np.array_equal(a[0].ids(0, 60), b[0].ids(0, 60))


def test_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_corpus(tmp_path / name, [100])
    paths = [tmp_path / "a", tmp_path / "b"]
    refused(r"data\.weights has 1 numbers, data\.path has 2", paths, data__weights=[1.0])
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        refused(rf"data\.weights holds {bad}", paths, data__weights=[1.0, bad])
    refused("a share of", paths, data__weights=[1.0, 1e-9])
