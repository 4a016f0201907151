"""The whole job: inputs to PREFIX.bin, PREFIX.idx and PREFIX.json, of every key."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Optional

from megakit.data.preprocess.blocks import BLOCK_BYTES, Block, plan_blocks, where
from megakit.data.preprocess.inputs import Inputs, find_inputs
from megakit.data.preprocess.journal import Counts, Journal, State, differences, done_of
from megakit.data.preprocess.pool import Pool
from megakit.data.preprocess.records import BAD, DEFAULT_LIMIT
from megakit.data.preprocess.sample import sample_texts
from megakit.data.preprocess.worker import BadRecord, Result, Task
from megakit.data.sidecar import Sidecar, read_sidecar
from megakit.data.tokenizer import Tokenizer, load_tokenizer
from megakit.data.tokenizer.fast import EncoderDiffers, choose_encoder
from megakit.data.writer import IndexedWriter, Written, check_apart, check_free, publish, unfinished
from megakit.errors import Refused, StorageFailed

_COMMIT_SHARE = 50  # a commit comes no sooner than so many times what the last one took: 2% of the time
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class Options:
    """What a job does, apart from where it reads and writes."""

    keys: tuple[str, ...] = ("text",)
    workers: int = 1
    append_eod: bool = True
    skip_bad: bool = False
    overwrite: bool = False
    limit: int = DEFAULT_LIMIT
    """Bytes of the longest record that is read."""
    block_bytes: int = BLOCK_BYTES
    commit_every_s: float = 1.0
    """Seconds between two records of how far the job is, at least."""


@dataclass(frozen=True)
class Progress:
    """How far a job is, whichever run did it."""

    done: int
    """Bytes of input."""
    total: int
    documents: int
    tokens: int

    @classmethod
    def of(cls, state: State, total: int) -> Progress:
        """The documents and tokens of all keys together."""
        return cls(state.done, total, sum(one.documents for one in state.counts), sum(one.tokens for one in state.counts))


@dataclass(frozen=True)
class Summary:
    """What a job did. A list has one entry for each key."""

    counts: list[Counts]
    outputs: list[str]
    """Prefixes of the files."""
    sidecars: list[Sidecar]
    encoder: str
    why: str
    inputs: Inputs
    resumed_at: int
    """Bytes of input that earlier runs had done."""


def output_prefixes(prefix: str, keys: Sequence[str]) -> list[str]:
    """PREFIX of one key; PREFIX_KEY of each of several. Refused for keys that can't be told apart or name no file."""
    if len(set(keys)) < len(keys):
        raise Refused(f"--json-keys {' '.join(keys)}: a key is given twice")
    if len(keys) == 1:
        return [prefix]
    odd = [key for key in keys if not key or os.sep in key or "\0" in key]
    if odd:
        raise Refused(f"--json-keys: {odd[0]!r} is part of a file's name when several keys are given; give it alone")
    return [f"{prefix}_{key}" for key in keys]


def preprocess(
    inputs: Sequence[str],
    tokenizer_path: str,
    prefix: str,
    options: Options = Options(),
    progress: Callable[[Progress], None] = lambda _: None,
    notice: Callable[[str], None] = lambda _: None,
) -> Summary:
    """Encode `inputs` in order; the same bytes for any number of workers, block size, and number of runs it took.

    An unfinished job of the same inputs and options is taken up where it was. Refused for an input, tokenizer or output
    that can't be used, and for the first bad record unless `skip_bad`; then no file stands under a final name.
    `progress` is told after each block, `notice` a line that the user should know from the start.
    """
    outputs = output_prefixes(prefix, options.keys)
    tokenizer = load_tokenizer(tokenizer_path)
    found = find_inputs(inputs)
    if found.others:
        notice(f"{found.others:,} files of the input folders are left out: their names end otherwise, or they are hidden")
    if done_of(prefix) is None:
        for output in outputs:
            check_free(output, options.overwrite)
    check_apart(outputs, [*(source.path for source in found.sources if not source.remote), tokenizer.path])
    journal = Journal(prefix)
    try:
        job = _Job(found, tokenizer, tokenizer_path, outputs, options, journal, progress, notice)
        try:
            return job.run()
        except EncoderDiffers as e:  # what is written may hold ids that are not the reference's
            notice(str(e))
            journal.begin_anew()
            return job.run(reference="a fast encoder gave other ids")
    finally:
        journal.close()


class _Job:
    def __init__(
        self,
        inputs: Inputs,
        tokenizer: Tokenizer,
        tokenizer_path: str,
        outputs: list[str],
        options: Options,
        journal: Journal,
        progress: Callable[[Progress], None],
        notice: Callable[[str], None],
    ):
        self.inputs, self.tokenizer, self.outputs, self.options = inputs, tokenizer, outputs, options
        self.journal, self.progress, self.notice = journal, progress, notice
        self.task = Task(tokenizer_path, options.keys, options.append_eod, options.skip_bad, options.limit)
        self.identity: dict[str, Any] = {
            "--json-keys": list(options.keys),
            "--append-eod": options.append_eod,
            "--max-record-mib": options.limit / 2**20,
            "tokenizer": tokenizer.fingerprint,
            "end token": tokenizer.eod,  # which files beside a tokenizer.json may name
            "bytes of input": inputs.size,
            "input files": len(inputs.sources),
            "fingerprint of the input": inputs.fingerprint(),
        }

    def run(self, reference: str = "") -> Summary:
        """From the journal's place to the end. `reference`: why the reference's own encoder must be used."""
        state = self._recorded()
        if state is not None and state.complete:
            return self._publish(state, state.done)
        for output in self.outputs:
            check_free(output, self.options.overwrite)
        with Pool(self._workers(), self.task) as pool, ExitStack() as opened:
            if state is None:
                self.journal.begin_anew()
                state = self._fresh(reference)
            elif state.done:
                self.notice(f"going on from {state.done / 1e6:,.1f} of {self.inputs.size / 1e6:,.1f} MB ({self.journal.folder})")
            resumed_at = state.done
            writers = [
                opened.enter_context(
                    IndexedWriter(
                        output,
                        vocab_size=self.tokenizer.vocab_size,
                        tokenizer=self.tokenizer.fingerprint,
                        eod=self.tokenizer.eod if self.options.append_eod else None,
                        overwrite=self.options.overwrite,
                        aside=self.journal.aside(output),
                        resume=written,
                    )
                )
                for output, written in zip(self.outputs, state.written)
            ]
            try:
                state = self._encode(pool, writers, state)
            except StorageFailed as e:
                done = done_of(self.journal.folder.removesuffix(".partial"))
                kept = "nothing is kept" if done is None else f"the same command goes on from {done / 1e6:,.1f} MB of input"
                raise StorageFailed(f"{e}; make room: {kept}") from e
            return self._publish(state, resumed_at)

    def _recorded(self) -> Optional[State]:
        state = self.journal.read()
        if state is None:
            return None
        other = differences(state, self.identity, self.options.skip_bad)
        if not other:
            state.skip_bad = self.options.skip_bad
            return state
        if self.options.overwrite:
            return None
        raise Refused(
            f"{self.journal.folder} holds the unfinished output of another command ({other[0]}):"
            " give that command to go on with it, or --overwrite to begin anew"
        )

    def _fresh(self, reference: str) -> State:
        if reference:
            name, why = self.tokenizer.kind, reference
        else:
            sample = sample_texts(self.inputs.sources, self.options.keys, self.options.limit)
            choice = choose_encoder(self.tokenizer, sample)
            name, why = choice.encoder, choice.reason
        keys = self.options.keys
        return State(self.identity, self.options.skip_bad, name, why, [Counts() for _ in keys], [Written() for _ in keys])

    def _workers(self) -> int:
        blocks = sum(1 + source.size // self.options.block_bytes for source in self.inputs.sources)
        return max(1, min(self.options.workers, blocks))

    def _encode(self, pool: Pool, writers: list[IndexedWriter], state: State) -> State:
        """Write all blocks behind `state` and complete the files; returns the state at the end."""
        sources, options = self.inputs.sources, self.options
        blocks = plan_blocks(sources, options.keys, state.place, options.block_bytes, options.limit)
        clock = _CommitClock(options.commit_every_s)
        try:
            self.progress(Progress.of(state, self.inputs.size))
            for block, result in pool.encode(blocks, state.encoder):
                if block.source != state.place.source:
                    state = copy.copy(state)
                    state.before = 0
                if result.bad is not None:
                    place = where(sources, block, result.bad.number, state.before)
                    raise Refused(bad_record(place, result.bad, options.limit))
                state = self._written(writers, state, block, result)
                self.progress(Progress.of(state, self.inputs.size))
                if clock.due():
                    self._commit(writers, state)
                    clock.committed()
        except EncoderDiffers:
            raise
        except BaseException:
            if state.done:
                with contextlib.suppress(StorageFailed):  # the last commit stands
                    self._commit(writers, state)
            raise
        for key, counts in zip(options.keys, state.counts):
            if not counts.documents:
                self.journal.begin_anew()
                what = f' with a "{key}"' if len(options.keys) > 1 else ""
                skipped = "".join(f", {count:,} {reason}" for reason, count in sorted(counts.reasons.items()))
                raise Refused(
                    f"no document{what} in {self.inputs.size:,} bytes of input ({counts.records:,} records{skipped}): nothing is"
                    " written; correct --input or --json-keys"
                )
        for writer in writers:
            writer.complete()
        state = copy.copy(state)
        state.complete = True
        self.journal.write(state)
        return state

    def _written(self, writers: list[IndexedWriter], state: State, block: Block, result: Result) -> State:
        """Write one block. The state before it stays as it is: an interrupt may come at any moment."""
        new = copy.copy(state)
        new.counts = copy.deepcopy(state.counts)
        for writer, counts, encoded in zip(writers, new.counts, result.keys):
            writer.add(encoded.ids, encoded.lengths)
            counts.records += result.records
            counts.documents += len(encoded.lengths)
            counts.tokens += len(encoded.ids)
            counts.text_bytes += encoded.text_bytes
            for reason, count in encoded.reasons.items():
                counts.reasons[reason] = counts.reasons.get(reason, 0) + count
        new.written = [Written(writer.documents, writer.tokens, writer.max_token_id) for writer in writers]
        new.before = state.before + result.records if block.behind.source == block.source else 0
        new.place, new.done = block.behind, block.done
        return new

    def _commit(self, writers: list[IndexedWriter], state: State) -> None:
        for writer in writers:
            writer.sync()
        self.journal.write(state)

    def _publish(self, state: State, resumed_at: int) -> Summary:
        for output in self.outputs:
            publish(output, unfinished(self.journal.aside(output)))
        self.journal.begin_anew()
        sidecars = [sidecar for output in self.outputs if (sidecar := read_sidecar(output)) is not None]
        return Summary(state.counts, self.outputs, sidecars, state.encoder, state.why, self.inputs, resumed_at)


class _CommitClock:
    """When to write down how far the job is: rarely enough to cost little."""

    def __init__(self, least_s: float):
        self._least_s = least_s
        self._next = time.monotonic() + least_s
        self._asked = 0.0

    def due(self) -> bool:
        self._asked = time.monotonic()
        return self._asked >= self._next

    def committed(self) -> None:
        now = time.monotonic()
        wait = max(self._least_s, _COMMIT_SHARE * (now - self._asked)) if self._least_s else 0.0
        self._next = now + min(wait, _LONGEST_WAIT_S)


def bad_record(place: str, bad: BadRecord, limit: int) -> str:
    """One line on a bad record that stops the job."""
    what = {"missing": f' "{bad.key}"', "toolong": f" {limit / 2**20:g}"}.get(bad.reason, "")
    cure = "raise it" if bad.reason == "toolong" else "correct it"
    return f"{place}: {BAD[bad.reason]}{what}; {cure}, or skip and count such records with --skip-bad"
