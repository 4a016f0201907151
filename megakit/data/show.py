"""What a step of a run reads, and which steps read a document: worked out from the recipe, nothing is trained.

`python -m megakit.data show` is its command; show_text.py prints what is found here. The positions, the order and the parts of
the documents are asked of the very objects that the training loop reads with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np

from megakit.config.batch import BatchSize
from megakit.config.compose import compose
from megakit.config.rules import model_ranks, planned_world, resolve, total_steps
from megakit.config.schema import Config
from megakit.data.build import build_streams
from megakit.data.source import DocumentSource, Piece
from megakit.data.steps import Steps, recorded
from megakit.data.stream import SampleStream
from megakit.data.tokenizer import Tokenizer, load_tokenizer
from megakit.errors import Refused

SHORT = 64  # tokens of a piece that are decoded when its whole text isn't asked for


@dataclass(frozen=True)
class Text:
    """A piece of a document in a sample, and what it says; `document` None: made-up tokens, of no file."""

    piece: Optional[Piece]
    ids: list[int]
    text: Optional[str]
    """None without a tokenizer."""
    whole: bool
    """Not only its beginning."""


@dataclass(frozen=True)
class Place:
    """Where one sample is read."""

    step: int
    position: int
    """In the global order: the samples consumed before it."""
    epoch: int
    """Of its source, from 0."""
    id: int
    """As samples.jsonl has it."""
    sample: int
    """Its number in the source."""
    source: str
    """Prefix of the file."""
    dp: int
    ranks: range
    """The ranks of that data-parallel index: each of them reads it."""
    micro_batch: int
    """Of the step, on its data-parallel index, from 0."""


@dataclass(frozen=True)
class Sample:
    """One sample of a step and its content."""

    place: Place
    texts: list[Text]
    ends: int
    """Labels that are the first token of another document: left out of the loss with data.eod_mask_loss."""


@dataclass
class Run:
    """A recipe, or a run folder, with its data opened."""

    cfg: Config
    stream: SampleStream
    steps: Steps
    tokenizer: Optional[Tokenizer]
    notes: list[str] = field(default_factory=list)

    def check(self, steps: range, rank: Optional[int]) -> None:
        """Refused unless the run has these steps and this rank."""
        for end in (steps.start, steps.stop - 1):
            self.steps.positions(end)
        world = model_ranks(self.cfg) * (self.cfg.parallel.dp or 1)
        if rank is not None and not 0 <= rank < world:
            raise Refused(f"rank={rank}: the run has ranks 0 to {world - 1}: give one of them")

    def places(self, step: int, rank: Optional[int] = None) -> list[Place]:
        """The samples of a step in their order; those that one rank reads."""
        positions = self.steps.positions(step)
        ids = self.stream.ids(positions.start, len(positions))
        found = [self._place(step, positions, position, int(one)) for position, one in zip(positions, ids)]
        return [place for place in found if rank is None or rank in place.ranks]

    def samples(self, step: int, rank: Optional[int] = None, full: bool = False) -> Iterator[Sample]:
        """The samples of a step with their text."""
        for place in self.places(step, rank):
            tokens = self.stream.read(np.array([place.id]))[0]
            source = self.stream.sources[self.stream.place(place.id)[0]]
            if isinstance(source, DocumentSource):
                pieces = source.pieces(place.sample)
                ends = np.cumsum([piece.tokens for piece in pieces])
                texts = [self._text(piece, tokens[end - piece.tokens : end], full) for piece, end in zip(pieces, ends)]
            else:
                texts = [self._text(None, tokens, full)]
            yield Sample(place, texts, len(texts) - 1)

    def readers(self, prefix: str, document: int) -> Iterator[tuple[Place, Piece]]:
        """Where the samples that hold a part of a document are read, in the order of training, and which part."""
        number, source = self._source(prefix)
        file = source.file
        if not 0 <= document < file.documents:
            raise Refused(f"document={prefix}:{document}: {prefix} has documents 0 to {file.documents - 1}: give one of them")
        if not source.documents[0] <= document < source.documents[1]:
            raise Refused(
                f"document={prefix}:{document}: training reads documents {source.documents[0]} to {source.documents[1] - 1} of"
                f" {prefix} (data.split = {self.cfg.data.split}): no step reads this one; it is for validation or left out"
            )
        total = self.steps.samples
        found = [
            (int(position), sample)
            for sample in source.samples_with(document)
            for position in self.stream.positions_of(self.stream.sample_id(number, sample), total)
        ]
        for position, sample in sorted(found):
            step = self.steps.step_of(position)
            if step is None:  # before the first recorded step
                continue
            place = self._place(step, self.steps.positions(step), position, self.stream.sample_id(number, sample))
            yield place, next(piece for piece in source.pieces(sample) if piece.document == document)

    def _source(self, prefix: str) -> tuple[int, DocumentSource]:
        for number, source in enumerate(self.stream.sources):
            if isinstance(source, DocumentSource) and os.path.realpath(source.name) == os.path.realpath(prefix):
                return number, source
        there = ", ".join(source.name for source in self.stream.sources)
        raise Refused(f"document={prefix}:...: the run is trained on {there}: give one of these before the colon")

    def _place(self, step: int, positions: range, position: int, sample_id: int) -> Place:
        number, sample = self.stream.place(sample_id)
        each = len(positions) // (self.cfg.parallel.dp or 1)
        dp, row = divmod(position - positions.start, each)
        model = model_ranks(self.cfg)
        return Place(
            step=step,
            position=position,
            epoch=int(self.stream.epoch_of(position)),
            id=sample_id,
            sample=sample,
            source=self.stream.sources[number].name,
            dp=dp,
            ranks=range(dp * model, (dp + 1) * model),
            micro_batch=row // self.cfg.train.micro_batch_size,
        )

    def _text(self, piece: Optional[Piece], tokens: np.ndarray, full: bool) -> Text:
        ids = (tokens if full else tokens[:SHORT]).tolist()
        return Text(piece, ids, self.tokenizer.decode(ids) if self.tokenizer else None, len(ids) == len(tokens))


def open_run(overrides: list[str], config_dir: Optional[str], config_file: Optional[str], run: Optional[Path]) -> Run:
    """The run that a recipe or a run folder describes. Refused in one line if either can't be read."""
    if run is not None:
        if config_file is not None:
            raise Refused(f"run={run} and --config-file = {config_file} are both given: a run folder has its own; give one")
        config_file = str(run / "config.yaml")
        if not os.path.isfile(config_file):
            raise Refused(f"run={run}: there is no {config_file}: give the folder of a run")
    cfg = compose(overrides, config_dir, config_file)
    notes = []
    if cfg.parallel.dp is None:
        cfg = resolve(cfg, planned_world(cfg))
        notes.append(f"parallel.dp is null: ranks are those of parallel.dp={cfg.parallel.dp}")
    size, total = BatchSize.of(cfg.train), total_steps(cfg)
    steps = Steps(size, total) if run is None else recorded(run, size, total, cfg.train.seq_len)
    if run is not None and (others := sorted(run.glob("config.yaml.*"))):
        notes.append(f"the run was started with other configurations before ({others[0].name}): steps before that may differ")
    stream, _ = build_streams(cfg)
    tokenizer = load_tokenizer(cfg.data.tokenizer) if cfg.data.tokenizer and not cfg.data.mock else None
    return Run(cfg, stream, steps, tokenizer, notes)
