"""From a recipe's `data` section to the streams of training and validation; every check on the files is made here."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Optional

from megakit.config.batch import BatchSize
from megakit.config.rules import total_steps
from megakit.config.schema import Config
from megakit.data import packed_index
from megakit.data.built_once import Tell, built_once
from megakit.data.indexed import IndexedFile, open_all
from megakit.data.mock import MockSource
from megakit.data.packed import PackedSource
from megakit.data.source import DocumentSource, FileSource
from megakit.data.split import cut, parse_split
from megakit.data.stream import SampleStream, Source
from megakit.data.tokenizer import tokenizer_fingerprint
from megakit.errors import Refused

VALIDATION_SEED = 0x5EED  # whatever train.seed is: evaluations of different runs see the same samples


def build_streams(cfg: Config, tell: Optional[Tell] = None) -> tuple[SampleStream, Optional[SampleStream]]:
    """Training stream, and the validation stream or None if train.eval_interval is 0. `tell` hears what is waited for.

    Raises Refused in one line if files are missing, unfinished, damaged, made with another tokenizer or too small.
    """
    train, valid = _mock_streams(cfg) if cfg.data.mock else _file_streams(cfg, tell)
    batch = cfg.train.global_batch_size
    if train.samples < batch:
        raise Refused(
            f"the training data has {train.samples} samples of train.seq_len={cfg.train.seq_len}, fewer than one "
            f"train.global_batch_size={batch}: give more data, a shorter sequence or a smaller batch"
        )
    if cfg.data.max_epochs is not None:
        _check_epochs(train, BatchSize.of(cfg.train).samples_of(total_steps(cfg)), cfg.data.max_epochs)
    return train, valid


def _check_epochs(train: SampleStream, samples: int, most: float) -> None:
    epochs = train.epochs(samples)
    worst = int(epochs.argmax())
    if epochs[worst] > most:
        raise Refused(
            f"{train.sources[worst].name} is gone through {epochs[worst]:.3g} times by the run's {samples:,} samples, "
            f"data.max_epochs = {most:g}: give it a smaller weight or more data, or train for fewer steps"
        )


def _mock_streams(cfg: Config) -> tuple[SampleStream, Optional[SampleStream]]:
    if cfg.data.path or cfg.data.valid_path:
        raise Refused(f"data.mock=true and data.path={cfg.data.path + cfg.data.valid_path}: mock tokens or files, not both")

    def stream(kind: str, number: int, seed: int) -> SampleStream:
        source = MockSource(
            samples=cfg.data.mock_samples,
            seq_len=cfg.train.seq_len,
            vocab_size=cfg.model.vocab_size,
            seed=cfg.train.seed,
            stream=number,
        )
        return SampleStream(kind, [source], None, seed=seed, seq_len=cfg.train.seq_len)

    valid = stream("validation", 1, VALIDATION_SEED) if cfg.train.eval_interval > 0 else None
    return stream("training", 0, cfg.train.seed), valid


def _file_streams(cfg: Config, tell: Optional[Tell]) -> tuple[SampleStream, Optional[SampleStream]]:
    if not cfg.data.path:
        raise Refused("data.path is empty: give the prefix of indexed data (tools/preprocess_data.py), or data.mock=true")
    weights = _check_weights(cfg)
    evaluates = cfg.train.eval_interval > 0
    files = _open(cfg, cfg.data.path)

    def source(file: IndexedFile, documents: tuple[int, int], kind: str, where: str) -> DocumentSource:
        return _source(cfg, file, documents, kind, where, tell)

    valid: Optional[SampleStream] = None
    if cfg.data.valid_path:
        _check_disjoint(cfg)
        train_sources = [source(file, (0, file.documents), "training", "data.path") for file in files]
        if evaluates:
            others = _open(cfg, cfg.data.valid_path)
            valid_sources = [source(file, (0, file.documents), "validation", "data.valid_path") for file in others]
            valid = _stream(cfg, "validation", valid_sources, None, VALIDATION_SEED)
    else:
        shares = parse_split(cfg.data.split)
        if evaluates and (len(shares) < 2 or shares[1] == 0):
            raise Refused(
                f"train.eval_interval={cfg.train.eval_interval}, but data.split={cfg.data.split} gives validation no share: "
                "give it one, or data.valid_path, or train.eval_interval=0"
            )
        parts = [cut(file, shares) for file in files]
        where = f"data.split={cfg.data.split}"
        train_sources = [source(file, part[0], "training", where) for file, part in zip(files, parts)]
        if evaluates:
            valid_sources = [source(file, part[1], "validation", where) for file, part in zip(files, parts)]
            valid = _stream(cfg, "validation", valid_sources, weights, VALIDATION_SEED)
    return _stream(cfg, "training", train_sources, weights, cfg.train.seed), valid


def _stream(cfg: Config, kind: str, sources: list[DocumentSource], weights: Optional[list[float]], seed: int) -> SampleStream:
    drawn: list[Source] = list(sources)
    return SampleStream(kind, drawn, weights, seed=seed, seq_len=cfg.train.seq_len)


def _source(
    cfg: Config, file: IndexedFile, documents: tuple[int, int], kind: str, where: str, tell: Optional[Tell]
) -> DocumentSource:
    seq_len, vocab_size = cfg.train.seq_len, cfg.model.vocab_size
    source: DocumentSource
    if cfg.data.packing == "best_fit":
        cache = Path(cfg.data.cache_dir) if cfg.data.cache_dir else Path(file.prefix).parent / "cache"
        folder = built_once(
            cache / packed_index.index_name(file, documents, seq_len),
            lambda aside, share: packed_index.build(file, documents, seq_len, aside, share),
            patience_s=cfg.launch.timeout_s,
            tell=tell,
        )
        source = PackedSource(file, documents, folder, seq_len=seq_len, vocab_size=vocab_size)
    else:
        source = FileSource(file, documents, seq_len=seq_len, vocab_size=vocab_size)
    if source.samples < 1:
        raise Refused(
            f"{kind} part of {file.prefix} by {where}: {source.tokens} tokens in {documents[1] - documents[0]} of "
            f"{file.documents} documents, one sample takes train.seq_len + 1 = {cfg.train.seq_len + 1}: give more data, "
            f"another data.split or a shorter sequence{', or train.eval_interval=0' if kind == 'validation' else ''}"
        )
    if file.sidecar is None:
        source.notes.append("no sidecar: tokenizer not checked")
    return source


def _open(cfg: Config, prefixes: list[str]) -> list[IndexedFile]:
    """Open and check the corpora; what a sidecar would tell is scanned where there is none."""
    fingerprint = tokenizer_fingerprint(cfg.data.tokenizer) if cfg.data.tokenizer else None
    files = open_all(prefixes)
    for file in files:
        _check_tokenizer(cfg, file, fingerprint)
    return files


def _check_tokenizer(cfg: Config, file: IndexedFile, fingerprint: Optional[str]) -> None:
    vocab = cfg.model.vocab_size
    if file.sidecar is None:
        scan = file.scan_ids()
        if scan.low < 0 or scan.high >= vocab:
            bad = scan.low if scan.low < 0 else scan.high
            raise Refused(
                f"{file.bin_path} holds token id {bad}, model.vocab_size is {vocab}: "
                "the data was made with another tokenizer; set model.vocab_size to its vocabulary"
            )
        return
    if fingerprint is not None and file.sidecar.tokenizer != fingerprint:
        raise Refused(
            f"{file.prefix} was made with tokenizer {file.sidecar.tokenizer[:12]} ({file.sidecar.vocab_size} pieces), "
            f"data.tokenizer={cfg.data.tokenizer} is {fingerprint[:12]}: give the one it was made with, or make the data again"
        )
    largest = max(file.sidecar.max_token_id, file.sidecar.vocab_size - 1)
    if largest >= vocab:
        raise Refused(
            f"{file.prefix} has token ids up to {file.sidecar.max_token_id} of a vocabulary of {file.sidecar.vocab_size}, "
            f"model.vocab_size is {vocab}: set model.vocab_size={file.sidecar.vocab_size} or more"
        )


def _check_weights(cfg: Config) -> Optional[list[float]]:
    weights = cfg.data.weights
    if weights is None:
        return None
    if len(weights) != len(cfg.data.path):
        raise Refused(
            f"data.weights has {len(weights)} numbers, data.path has {len(cfg.data.path)} paths: give one for each path"
        )
    bad = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if bad:
        raise Refused(f"data.weights holds {bad[0]}, a weight is a finite number above 0: correct it or leave its path out")
    return list(weights)


def _check_disjoint(cfg: Config) -> None:
    train = {os.path.realpath(f"{path}.bin") for path in cfg.data.path}
    for path in cfg.data.valid_path:
        if os.path.realpath(f"{path}.bin") in train:
            raise Refused(f"{path} is in data.path and in data.valid_path: validate on data that is not trained on")
