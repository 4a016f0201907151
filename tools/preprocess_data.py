"""Text to indexed tokens: .jsonl and .txt files to PREFIX.bin, PREFIX.idx (as Megatron-LM writes them) and PREFIX.json.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer my.model --output-prefix data/corpus --workers 8

A .jsonl file has one document a line, in --json-key; a .txt file is one document. Exit code 0: written; 2: refused, with one
line that says why, and no output; 130 or 143: interrupted, and no output.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

from megakit.errors import Stop

_LINE_EVERY_S = 30.0


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit code."""
    args = _parser().parse_args(argv)
    from megakit.data.preprocess.job import preprocess

    started = time.monotonic()
    total = sum(os.path.getsize(path) for path in args.input if os.path.isfile(path))
    try:
        with progress_of(total) as progress:
            counts, sidecar = preprocess(
                args.input,
                args.tokenizer,
                args.output_prefix,
                json_key=args.json_key,
                workers=args.workers,
                append_eod=args.append_eod,
                skip_bad=args.on_bad_record == "skip",
                overwrite=args.overwrite,
                progress=progress,
            )
    except Stop as e:
        print(f"preprocess_data: {e}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        print("preprocess_data: interrupted, nothing is written", file=sys.stderr)
        return 128 + signal.SIGINT
    seconds = time.monotonic() - started
    print_table(counts)
    print(
        f"{args.output_prefix}.bin: {sidecar.tokens:,} {sidecar.dtype} tokens in {sidecar.documents:,} documents; "
        f"{total / 1e6:,.1f} MB in {seconds:.1f} s, {total / 1e6 / seconds:,.1f} MB/s"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".jsonl or .txt files, in this order")
    parser.add_argument("--tokenizer", required=True, metavar="X.model", help="sentencepiece model")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text in a .jsonl record (default: text)")
    parser.add_argument(
        "--workers", type=_positive, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (default: all cores)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the tokenizer's </s> (default: yes)",
    )
    parser.add_argument(
        "--on-bad-record",
        choices=["fail", "skip"],
        default="fail",
        help="a record without a text: stop and name its line, or skip and count it (default: fail)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _raise_exit(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


@contextmanager
def progress_of(total: int) -> Iterator[Callable[[int], None]]:
    """A bar with MB/s on a terminal, a line every 30 s elsewhere, both on stderr; gives the function to tell bytes to."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda size: bar.advance(task, size)
        return
    started = shown = time.monotonic()
    done = 0

    def tell(size: int) -> None:
        nonlocal done, shown
        done += size
        now = time.monotonic()
        if now - shown >= _LINE_EVERY_S:
            shown = now
            rate = done / 1e6 / (now - started)
            print(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate:.1f} MB/s", file=sys.stderr, flush=True)

    yield tell


def print_table(counts: Any) -> None:
    """What became of every record, on stdout; the rows add up to the records read."""
    from megakit.data.preprocess.records import REASONS

    rows = [("documents", counts.documents, "")]
    rows += [(reason, counts.reasons[reason], meaning) for reason, meaning in REASONS.items()]
    rows.append(("records read", counts.records, "lines of .jsonl files, and .txt files"))
    for name, count, meaning in rows:
        print(f"{name:<13}{count:>15,}  {meaning}".rstrip())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _raise_exit)  # so that leaving cleans up, as Ctrl-C does
    sys.exit(main())
