"""Preprocessing one document at a time: the algorithm of Megatron-LM's tools/preprocess_data.py, to compare with.

    python benchmarks/per_document.py INPUT.jsonl MODEL PREFIX --workers 2

A pool of workers takes the file's lines 32 at a time and in order; each line is parsed, its text encoded by one call of the
reference library (sentencepiece for a .model, tokenizers for a .json), and the ids return as a list, which the parent turns
into an array and appends. Megatron's own start-up, several seconds of imports, is left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the plain command finds this clone from anywhere

from megakit.data.writer import token_dtype, write_index

_worker: dict[str, Any] = {}


def reference(model: str) -> tuple[Callable[[str], list[int]], int, int]:
    """One document's encoder, the id that ends documents, and the vocabulary's size."""
    if model.endswith(".json"):
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(model)
        eod = tokenizer.token_to_id("<|endoftext|>")
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, eod, tokenizer.get_vocab_size()
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=model)
    return lambda text: pieces.encode(text, out_type=int), pieces.eos_id(), pieces.vocab_size()


def load(model: str) -> None:
    """Make this process a worker."""
    _worker["encode"], _worker["eod"], _ = reference(model)


def encode(line: str) -> tuple[list[int], int]:
    """The ids of one line's text, and the characters of the line."""
    ids = _worker["encode"](json.loads(line)["text"])
    if ids:
        ids.append(_worker["eod"])
    return ids, len(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("model")
    parser.add_argument("prefix")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    dtype = token_dtype(reference(args.model)[2])
    lengths = []
    with (
        open(args.input, encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(args.workers, load, (args.model,)) as pool,
        open(f"{args.prefix}.bin", "wb") as output,
    ):
        for ids, _ in pool.imap(encode, lines, 32):
            output.write(np.array(ids, dtype).tobytes())
            lengths.append(len(ids))
    write_index(f"{args.prefix}.idx", dtype, np.array(lengths))


if __name__ == "__main__":
    main()
