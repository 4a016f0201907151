"""The whole job: input files to PREFIX.bin, PREFIX.idx and PREFIX.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Optional

from megakit.data.preprocess.pool import encode_blocks
from megakit.data.preprocess.records import BAD, Block, check_inputs, plan_blocks
from megakit.data.preprocess.worker import Result, Task
from megakit.data.sidecar import Sidecar
from megakit.data.tokenizer import load_tokenizer
from megakit.data.writer import IndexedWriter, check_free
from megakit.errors import Refused


@dataclass
class Counts:
    """What became of every record: `documents` and the sum of `reasons` are `records`."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        """Count one block."""
        self.records += result.records
        self.documents += len(result.lengths)
        self.tokens += len(result.ids)
        self.reasons.update(result.reasons)


def preprocess(
    inputs: Sequence[str],
    tokenizer_path: str,
    prefix: str,
    *,
    json_key: str = "text",
    workers: int = 1,
    append_eod: bool = True,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Optional[Callable[[int], None]] = None,
) -> tuple[Counts, Sidecar]:
    """Encode `inputs` (.jsonl, .txt) in order; the same bytes for any number of workers.

    `progress` is called with the bytes of input done since the call before. Refused for an input, tokenizer or output that
    can't be used, and for the first bad record unless `skip_bad`; then no file stands under a final name.
    """
    check_free(prefix, overwrite)
    tokenizer = load_tokenizer(tokenizer_path)
    total = check_inputs(inputs)
    blocks = list(plan_blocks(inputs))
    workers = max(1, min(workers, len(blocks)))
    task = Task(tokenizer=tokenizer_path, json_key=json_key, append_eod=append_eod, skip_bad=skip_bad)
    counts = Counts()
    lines_before: Counter[str] = Counter()
    writer = IndexedWriter(
        prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        eod=tokenizer.eod if append_eod else None,
        overwrite=overwrite,
    )
    with writer, closing(encode_blocks(blocks, task, workers)) as encoded:
        for block, result in encoded:
            if result.bad is not None:
                raise Refused(bad_record(block, result.bad, lines_before[block.paths[0]], json_key))
            lines_before[block.paths[0]] += result.records
            writer.add(result.ids, result.lengths)
            counts.add(result)
            if progress is not None:
                progress(block.end - block.start)
        if not counts.documents:
            raise Refused(f"no document in {total:,} bytes of input ({counts.records} records): nothing is written")
        return counts, writer.finish()


def bad_record(block: Block, bad: tuple[int, str], lines_before: int, json_key: str) -> str:
    """One line on the first bad record of a block, `bad` = (its number in the block, reason)."""
    number, reason = bad
    if block.lines:
        what = f' "{json_key}"' if reason == "missing" else ""
        where = f"{block.paths[0]} line {lines_before + number + 1}"
    else:
        what, where = "", block.paths[number]
    return f"{where}: {BAD[reason]}{what}; correct it, or skip and count such records with --on-bad-record skip"
