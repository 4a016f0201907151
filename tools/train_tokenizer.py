"""Train a tokenizer: a sentencepiece byte-pair .model that gives back every text exactly, spaces and newlines included.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 32000 --output data/my

writes data/my.model. <unk> is 0, <s> 1, </s> 2 (it ends documents), the 256 bytes 3 to 258. The same text gives the same file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Optional

from megakit.config.arguments import whole_number
from megakit.errors import Stop


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit code."""
    args = _parser().parse_args(argv)
    from megakit.data.train_tokenizer import check_new, texts_of, train, write_model

    path = f"{args.output}.model"
    started = time.monotonic()
    try:
        check_new(path, args.overwrite)
        texts = texts_of(args.input, tuple(args.json_keys), args.skip_bad, args.max_record_mib << 20)
        model = train(texts, args.vocab_size, max_lines=args.max_lines, character_coverage=args.character_coverage)
        write_model(path, model)
    except Stop as e:
        print(f"train_tokenizer: {e}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        print("train_tokenizer: interrupted, nothing is written", file=sys.stderr)
        return 130
    print(f"{path}: {args.vocab_size:,} pieces, trained in {time.monotonic() - started:.1f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="INPUT",
        help="files, folders, globs or URLs, as preprocess_data.py takes them",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text in a JSONL record, or Parquet columns"
    )
    parser.add_argument(
        "--vocab-size", type=whole_number, required=True, metavar="N", help="pieces, the 3 control and 256 byte pieces included"
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.model")
    parser.add_argument(
        "--max-lines",
        type=whole_number,
        metavar="N",
        help="train on N lines drawn evenly (default: all; they must fit in memory)",
    )
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.99995,
        metavar="SHARE",
        help="share of the text's characters that get a piece of their own; the rest is bytes (default: 0.99995)",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="go on at a record without a text (default: stop and name its line)"
    )
    parser.add_argument(
        "--max-record-mib",
        type=whole_number,
        default=64,
        metavar="N",
        help="a longer line, file or text is a bad record: bounds memory (default: 64)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
