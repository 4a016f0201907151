"""Weights between Hugging Face, megakit and Megatron-LM; and a look into any of them.

    python tools/convert_ckpt.py --from hf --to megakit Llama-3.1-8B weights
    python tools/convert_ckpt.py --from megakit --to hf runs/demo/checkpoints/step_00000300 exported --dtype bf16
    python tools/convert_ckpt.py --from megatron --to megakit checkpoints/gpt weights --vocab-size 50257 --verify
    python tools/convert_ckpt.py inspect runs/demo/checkpoints

SRC is a Hugging Face folder, a step_NNNNNNNN folder of a run, a folder of weights made by --to megakit, or a checkpoint folder
of Megatron-LM; --from is found from its files when left out. DST is a new folder, which appears when it is complete. What
--to megakit makes starts a run by checkpoint.init_from=DST, as a Hugging Face folder does.

One process, no GPU, little memory: tensors pass in pieces. Exit code 2, with one line, where something is refused; 1 where
--verify finds a difference; 74 where the disk is too small.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megakit.config.arguments import Terminated, clean_up_on_sigterm, output_cut_off
from megakit.config.progress import bytes_bar
from megakit.errors import EXIT_DONE, Refused, Stop

if TYPE_CHECKING:
    from megakit.checkpoint.weights import WeightsSource

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    given = sys.argv[1:] if argv is None else argv
    try:
        if given[:1] == ["inspect"]:
            _inspect(inspect_parser().parse_args(given[1:]))
        else:
            _convert(convert_parser().parse_args(given))
        sys.stdout.flush()  # here, where a reader that has left is noticed
    except Stop as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT)
    except BrokenPipeError:
        return output_cut_off()
    except Terminated:
        return _stopped(signal.SIGTERM)
    return EXIT_DONE


def _stopped(number: int) -> int:
    print(f"error: stopped by {signal.Signals(number).name}: nothing is left of it", file=sys.stderr)
    return 128 + number


def convert_parser() -> argparse.ArgumentParser:
    """The options of a conversion."""
    parser = argparse.ArgumentParser(
        prog="convert_ckpt.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="a folder with weights")
    parser.add_argument("target", metavar="DST", type=Path, help="a new folder")
    parser.add_argument("--from", dest="kind", choices=["hf", "megakit", "megatron"], help="of SRC (found from its files)")
    parser.add_argument("--to", required=True, choices=["megakit", "hf"], help="of DST")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights (as they are in SRC)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file, as 500MB or 5GB (5GB)")
    parser.add_argument("--tokenizer", metavar="FILE", help="the tokenizer to put with it, or none (the one SRC has or names)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="true vocabulary, of a SRC of Megatron-LM, which pads it")
    parser.add_argument("--sizes-only", action="store_true", help="don't compare the checksums of a SRC of megakit")
    parser.add_argument("--verify", action="store_true", help="compare the logits of SRC and DST on random tokens")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest difference of logits that --verify allows")
    return parser


def inspect_parser() -> argparse.ArgumentParser:
    """The options of `inspect`."""
    parser = argparse.ArgumentParser(
        prog="convert_ckpt.py inspect",
        description="what is in a checkpoint, a folder of them, a folder of weights, or a Hugging Face folder",
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--sizes-only", action="store_true", help="don't read the files to compare their checksums")
    return parser


def _inspect(args: argparse.Namespace) -> None:
    from megakit.checkpoint.inspect import show

    show(args.path, args.sizes_only)


def _convert(args: argparse.Namespace) -> None:
    shard_bytes = _bytes(args.max_shard_size)
    if args.tolerance is not None and not args.tolerance >= 0:
        raise Refused(f"--tolerance {args.tolerance} must be 0 or more")
    if args.tolerance is not None and not args.verify:
        raise Refused("--tolerance belongs to --verify: add it")

    from megakit.checkpoint.convert import NAMES, Target, plan, write
    from megakit.checkpoint.weights import DTYPES

    source = _source(args)
    dtype = DTYPES[args.dtype] if args.dtype else None
    target = Target(args.to, args.target, dtype, shard_bytes, args.tokenizer)
    planned, started = plan(source, target), time.monotonic()
    check = _verification(args, source) if args.verify else None
    with bytes_bar(planned.nbytes, "writing") as progress:
        write(source, target, planned, not args.sizes_only, check, progress)
    what = f"{args.to}, {source.model.family}, {NAMES[planned.dtype]}"
    size = f"{planned.nbytes / 1e6:,.1f} MB in {len(planned.names)} file(s)"
    print(f"{args.source} written to {args.target}: {what}, {size}, {time.monotonic() - started:.1f} s")


def _source(args: argparse.Namespace) -> WeightsSource:
    from megakit.checkpoint.weights import kind_of, open_weights

    kind = kind_of(args.source)
    if args.kind is not None and args.kind != kind:
        raise Refused(f"--from {args.kind}, but {args.source} is of {kind}: leave --from out, or give the right folder")
    if args.vocab_size is not None and kind != "megatron":
        raise Refused(f"--vocab-size {args.vocab_size} is for a SRC of Megatron-LM, {args.source} is of {kind}: leave it out")
    if kind == "megatron":
        from megakit.checkpoint.megatron import open_megatron

        return open_megatron(args.source, args.vocab_size, args.tokenizer)
    return open_weights(args.source)


def _verification(args: argparse.Namespace, source: WeightsSource) -> Callable[[Path], None]:
    """Compares the finished folder with SRC, and prints what was found."""
    from megakit.inference.compare import check_memory, compare

    check_memory(source)
    return lambda written: print(f"verified: {compare(source, written, args.tolerance)}")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS or float(match[1]) == 0:
        raise Refused(f"--max-shard-size {text} is no size: write it as 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


if __name__ == "__main__":
    clean_up_on_sigterm()
    sys.exit(main())
