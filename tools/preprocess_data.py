"""Text to indexed tokens: PREFIX.bin and PREFIX.idx as Megatron-LM writes them, and PREFIX.json.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer-model my.model --output-prefix data/corpus --workers 8

Inputs are files, folders (all below them), globs and URLs. .jsonl, .ndjson and .json files have one document a line, .parquet
files one a row, in the key or column of --json-keys; .txt, .text, .md and .rst files are one document each. All but Parquet
may be packed with gzip (.gz) or zstd (.zst).

The same command goes on where it was after it was stopped or killed. Exit code 0: written; 1: a worker failed or was killed;
2: refused, with one line that says why; 74: no room for the output; 130 or 143: interrupted. Then nothing stands under a final
name.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from megakit.config.arguments import Terminated, clean_up_on_sigterm, output_cut_off, whole_number
from megakit.errors import Refused, Stop

if TYPE_CHECKING:
    from megakit.data.preprocess.job import Summary


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit code."""
    args = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        summary = _run(args)
    except Stop as e:
        _say(str(e))
        return e.code
    except KeyboardInterrupt:
        _say(_interrupted(args.output_prefix))
        return 128 + signal.SIGINT
    except Terminated as e:
        _say(_interrupted(args.output_prefix))
        return int(e.code or 0)
    from megakit.data.preprocess.progress import print_summary

    try:
        print_summary(summary, time.monotonic() - started)
        sys.stdout.flush()
    except BrokenPipeError:
        output_cut_off()
    return 0  # whoever reads the summary


def _run(args: argparse.Namespace) -> Summary:
    from megakit.data.preprocess.job import Options, preprocess
    from megakit.data.preprocess.progress import shown

    if args.tokenizer_type:
        _check_tokenizer_type(args.tokenizer_type, args.tokenizer_model)
    options = Options(
        keys=tuple(args.json_keys),
        workers=args.workers,
        append_eod=args.append_eod,
        skip_bad=args.skip_bad,
        overwrite=args.overwrite,
        limit=args.max_record_mib << 20,
    )
    with shown(args.log_interval) as progress:
        return preprocess(args.input, args.tokenizer_model, args.output_prefix, options, progress, _say)


def _check_tokenizer_type(name: str, path: str) -> None:
    from megakit.data.preprocess.megatron_options import tokenizer_type_problem
    from megakit.data.tokenizer import load_tokenizer

    problem = tokenizer_type_problem(name, load_tokenizer(path).kind)
    if problem:
        raise Refused(problem)


def _interrupted(prefix: str) -> str:
    from megakit.data.preprocess.journal import done_of

    done = done_of(prefix)
    if done is None:
        return "interrupted, nothing is written"
    return f"interrupted; the same command goes on from {done / 1e6:,.1f} MB of input ({prefix}.partial)"


def _say(line: str) -> None:
    print(f"preprocess_data: {line}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="INPUT", help="files, folders, globs or URLs, in this order")
    parser.add_argument(
        "--tokenizer-model",
        required=True,
        metavar="FILE",
        help="sentencepiece .model, Hugging Face tokenizer.json, or tiktoken ranks: the file tells which",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin, PREFIX.idx, PREFIX.json; PREFIX_KEY.bin and so on for several keys",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns of the text, each for its own output (default: text)",
    )
    parser.add_argument(
        "--workers", type=whole_number, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (default: all cores)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the tokenizer's end-of-document token (default: yes)",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="skip and count a record without a text (default: stop and name its line)"
    )
    parser.add_argument(
        "--max-record-mib",
        type=whole_number,
        default=64,
        metavar="N",
        help="a longer line, file or text is a bad record: bounds memory (default: 64)",
    )
    parser.add_argument(
        "--log-interval",
        type=whole_number,
        metavar="N",
        help="a line every N documents (default: every 30 s; on a terminal a bar)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an output that is there, and another command's unfinished one"
    )
    parser.add_argument("--tokenizer-type", metavar="NAME", help="not needed; refused if the file is of another kind")
    _add_megatron_options(parser)
    return parser


def _add_megatron_options(parser: argparse.ArgumentParser) -> None:
    from megakit.data.preprocess.megatron_options import FLAGS, NO_EFFECT, REFUSED

    class NoEffect(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Optional[str] = None) -> None:
            _say(f"{option} has no effect: {NO_EFFECT[option or '']}")

    class NotHere(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Optional[str] = None) -> None:
            parser.exit(2, f"preprocess_data: {option} is not an option here: {REFUSED[option or '']}\n")

    for option in (*NO_EFFECT, *REFUSED):
        action = NoEffect if option in NO_EFFECT else NotHere
        parser.add_argument(option, nargs=0 if option in FLAGS else None, action=action, help=argparse.SUPPRESS)


if __name__ == "__main__":
    clean_up_on_sigterm()
    sys.exit(main())
