"""Merge, split, describe and verify indexed corpora (PREFIX.bin, .idx and .json, as tools/preprocess_data.py makes them).

    python tools/dataset.py merge    --input a b c --output-prefix abc     # or a folder: all corpora in it
    python tools/dataset.py split    --input abc --output-prefix part --shares 98,2
    python tools/dataset.py describe --input abc --tokenizer my.model
    python tools/dataset.py verify   --input abc

Exit code 0: done; 2: refused or something is wrong, in one line; 74: storage failed; 130 or 143: interrupted. Nothing stands
under a final name before it is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Optional

from megakit.config.arguments import Terminated, clean_up_on_sigterm, output_cut_off, whole_number
from megakit.config.progress import bytes_bar
from megakit.errors import Refused, Stop

if TYPE_CHECKING:
    from megakit.data.describe_files import Description
    from megakit.data.indexed import IndexedFile
    from megakit.data.tokenizer import Tokenizer

_BAR = 40  # columns of the longest bar


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()  # here, where a reader that has left is noticed
    except Stop as e:
        print(f"dataset: {e}", file=sys.stderr)
        return e.code
    except (KeyboardInterrupt, Terminated) as e:
        print("dataset: interrupted, nothing is written", file=sys.stderr)
        return int(e.code or 0) if isinstance(e, Terminated) else 128 + signal.SIGINT
    except BrokenPipeError:
        return output_cut_off()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="merge|split|describe|verify")

    def command(name: str, run: Callable[[argparse.Namespace], None], what: str, several: bool) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=what)
        sub.set_defaults(run=run)
        many = {"nargs": "+", "metavar": "PREFIX|FOLDER"} if several else {"metavar": "PREFIX"}
        sub.add_argument("--input", required=True, help="prefixes; of a folder, all in it by name" if several else None, **many)
        return sub

    one = command("merge", _merge, "one corpus of all documents of several, in their order", several=True)
    _writes(one)
    one.add_argument("--no-sidecar", action="store_true", help="don't compare tokenizers, and write no PREFIX.json")

    one = command("split", _split, "corpora PREFIX-0, PREFIX-1, ... of the documents of one, in their order", several=False)
    _writes(one)
    how = one.add_mutually_exclusive_group(required=True)
    how.add_argument("--shares", metavar="98,2", help="parts by shares of the tokens, cut at the nearest document")
    how.add_argument("--documents", type=whole_number, metavar="N", help="parts of N documents")
    how.add_argument("--tokens", type=whole_number, metavar="N", help="parts of about N tokens, cut at the nearest document")

    one = command("describe", _describe, "counts, lengths of documents, use of token ids, a text", several=True)
    one.add_argument("--tokenizer", metavar="FILE", help="decode with it")
    one.add_argument("--document", type=int, default=0, metavar="N", help="the document that is shown (default: 0)")
    one.add_argument("--json", action="store_true", help="JSON, in place of text")

    one = command("verify", _verify, "check every offset and every token", several=True)
    one.add_argument("--vocab-size", type=whole_number, metavar="N", help="ids must be below it (default: as the .json says)")
    one.add_argument("--write-checksums", action="store_true", help="write PREFIX.sha256, which verify compares from then on")
    return parser


def _writes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and .json")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")


def _prefixes(inputs: Sequence[str]) -> list[str]:
    """Folders replaced by the corpora in them, sorted by name."""
    out = []
    for one in inputs:
        if not os.path.isdir(one):
            out.append(one)
            continue
        there = sorted(os.path.join(one, name[: -len(".idx")]) for name in os.listdir(one) if name.endswith(".idx"))
        if not there:
            raise Refused(f"--input {one} is a folder without any .idx: give prefixes, or a folder of indexed corpora")
        out += there
    return out


def _size_of(prefixes: Sequence[str]) -> int:
    return sum(os.path.getsize(f"{one}.bin") for one in prefixes if os.path.isfile(f"{one}.bin"))


def _merge(args: argparse.Namespace) -> None:
    from megakit.data.rewrite import merge

    prefixes = _prefixes(args.input)
    started = time.monotonic()
    with bytes_bar(_size_of(prefixes)) as progress:
        made = merge(prefixes, args.output_prefix, sidecar=not args.no_sidecar, overwrite=args.overwrite, progress=progress)
    _say_made(made)
    seconds = time.monotonic() - started
    size = _size_of(prefixes) / 1e6
    print(f"merged {len(prefixes)} corpora, {size:,.1f} MB in {seconds:.1f} s, {size / seconds:,.1f} MB/s")


def _split(args: argparse.Namespace) -> None:
    from megakit.data import rewrite
    from megakit.data.indexed import IndexedFile
    from megakit.data.split import cut

    file = IndexedFile(args.input)
    if args.shares is not None:
        bounds = [0, *(end for _, end in cut(file, _shares(args.shares)))]
    elif args.documents is not None:
        bounds = rewrite.bounds_by_documents(file, args.documents)
    else:
        bounds = rewrite.bounds_by_tokens(file, args.tokens)
    with bytes_bar(_size_of([args.input])) as progress:
        for made in rewrite.split(file, bounds, args.output_prefix, overwrite=args.overwrite, progress=progress):
            _say_made(IndexedFile(made))


def _shares(text: str) -> list[float]:
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) < 2 or not all(0 < part < float("inf") for part in parts):
        raise Refused(f"--shares {text}: give two or more numbers above 0, as in 98,2")
    return [part / sum(parts) for part in parts]


def _say_made(file: IndexedFile) -> None:
    print(f"{file.bin_path}: {file.tokens:,} {file.dtype.name} tokens in {file.documents:,} documents")


def _verify(args: argparse.Namespace) -> None:
    from megakit.data.verify_files import verify

    prefixes = _prefixes(args.input)
    with bytes_bar(_size_of(prefixes)) as progress:
        for prefix in prefixes:
            found = verify(prefix, vocab_size=args.vocab_size, write_checksums=args.write_checksums, progress=progress)
            bound = "ids below 0 only: no vocabulary is known" if found.vocab_size is None else f"below {found.vocab_size:,}"
            ends = "" if found.ends is None else f", {found.ends} at the end of each document"
            sums = {"checked": ", checksums as written", "written": ", checksums written", "none": ""}[found.checksums]
            print(
                f"{prefix}: in order: {found.tokens:,} tokens in {found.documents:,} documents, ids up to {found.max_token_id:,}"
                f" ({bound}){ends}{sums}"
            )


def _describe(args: argparse.Namespace) -> None:
    from megakit.data.describe_files import describe
    from megakit.data.indexed import IndexedFile
    from megakit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    prefixes = _prefixes(args.input)
    with bytes_bar(_size_of(prefixes)) as progress:
        told = [describe(IndexedFile(prefix), tokenizer, args.document, progress) for prefix in prefixes]
    if args.json:
        print(json.dumps([asdict(one) for one in told], indent=1))
        return
    for one in told:
        _print(one, tokenizer)


def _print(told: Description, tokenizer: Optional[Tokenizer]) -> None:
    sidecar, lengths, ids = told.sidecar, told.lengths, told.ids
    print(f"{told.path}: {told.tokens:,} {told.dtype} tokens in {told.documents:,} documents")
    if told.sequences != told.documents:
        print(f"  {told.sequences:,} sequences")
    if sidecar:
        ends = "no end token" if sidecar.eod is None else f"{sidecar.eod} ends each document"
        print(f"  tokenizer {sidecar.tokenizer[:12]} of {sidecar.vocab_size:,} pieces, {ends}")
    else:
        print("  no sidecar: tokenizer not known")
    if lengths:
        shares = ", ".join(f"{q} {'over 2^20' if n is None else format(n, ',')}" for q, n in lengths.quantiles.items())
        print(f"  tokens of a document: {lengths.shortest:,} to {lengths.longest:,}, mean {lengths.mean:,.1f}; {shares}")
        most = max(one.documents for one in lengths.bins)
        for one in lengths.bins:
            bar = "#" * max(1, round(_BAR * one.documents / most))
            of_all = f"{one.documents / told.documents:6.1%} {one.tokens / max(told.tokens, 1):6.1%}"
            print(f"  {f'{one.low:,}-{one.high:,}':>21} {one.documents:>13,} {of_all} of tokens  {bar}")
    if ids.counted:
        which = "all tokens" if ids.whole else f"{ids.counted:,} tokens in spans over the whole"
        print(f"  ids {ids.low:,} to {ids.high:,}, {ids.distinct:,} different, {ids.entropy_bits:.2f} bits a token ({which})")
        pieces = {i: f" {tokenizer.decode([i])!r}" if tokenizer else "" for i, _ in ids.frequent}
        print("  most frequent:", ", ".join(f"{i}{pieces[i]} {count / ids.counted:.1%}" for i, count in ids.frequent))
        shown = " ".join(map(str, told.first_ids)) if told.text is None else repr(told.text)
        print(f"  document {told.document}: {shown}")


if __name__ == "__main__":
    clean_up_on_sigterm()
    sys.exit(main())
