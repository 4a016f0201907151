"""Text from a checkpoint: a training step, a folder of weights or a Hugging Face folder.

    python tools/generate.py --checkpoint runs/demo/checkpoints/step_00000300 --prompt "My fellow citizens" --max-new-tokens 60

One process, on one GPU or on the CPU. A single prompt's text comes as it is made; of several prompts each whole text, in
order, with an empty line behind it.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megakit.config.arguments import output_cut_off
from megakit.errors import EXIT_DONE, Refused, Stop
from megakit.redact import printable

if TYPE_CHECKING:
    from megakit.inference.load import LanguageModel
    from megakit.inference.sampling import Sampling

NEW_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit code."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except Stop as e:
        print(f"generate: {e}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        print("\ngenerate: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return output_cut_off()
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="step_NNNNNNNN, weights, or Hugging Face")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="a prompt in each line")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"{NEW_TOKENS}, or as many as the model's context has room for"
    )
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token (0.8)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="the likeliest tokens that make up P (1: all)")
    parser.add_argument("--top-k", type=int, metavar="K", help="the K likeliest tokens (all)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same text (0)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="B", help="prompts at a time (16)")
    parser.add_argument("--device", metavar="cpu|cuda", help="cuda where there is a GPU")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="bf16 on a GPU, else fp32")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="in place of the checkpoint's own")
    parser.add_argument(
        "--bos", action=argparse.BooleanOptionalAction, help="begin prompts with the bos token (as the tokenizer's files say)"
    )
    return parser


def _run(args: argparse.Namespace) -> None:
    texts = _prompts(args)
    if args.batch_size < 1:
        raise Refused(f"--batch-size {args.batch_size} must be 1 or more")
    from megakit.inference.load import load
    from megakit.inference.sampling import Sampling

    how = Sampling(args.temperature, args.top_k, args.top_p)
    model = load(args.checkpoint, args.device, args.dtype, args.tokenizer, args.bos)
    print(f"{args.checkpoint}: {model.description}", file=sys.stderr)
    prompts = [model.encode(text) for text in texts]
    count = args.max_new_tokens
    if count is None:
        count = max(1, min(NEW_TOKENS, model.decoder.context - max(map(len, prompts))))
    from megakit.inference.generator import check_room

    check_room(model.decoder.context, prompts, count)
    started, made = time.perf_counter(), 0
    for at in range(0, len(texts), args.batch_size):
        here = slice(at, at + args.batch_size)
        seeds = [args.seed + i for i in range(len(texts))[here]]
        made += _write(model, texts[here], prompts[here], count, how, seeds, alone=len(texts) == 1)
    seconds = time.perf_counter() - started
    read = sum(map(len, prompts))
    print(f"{read:,} tokens read, {made:,} made in {seconds:.2f} s: {made / seconds:,.1f} tokens/s", file=sys.stderr)


def _prompts(args: argparse.Namespace) -> list[str]:
    texts = list(args.prompt)
    if args.prompt_file is not None:
        try:
            texts += args.prompt_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            why = f"--prompt-file {args.prompt_file} can't be read ({e})"
            raise Refused(f"{why}: give a text file, a prompt in each line") from None
    if not texts:
        raise Refused("there is no prompt: give --prompt TEXT or --prompt-file FILE")
    return texts


def _write(
    model: LanguageModel,
    texts: list[str],
    prompts: list[list[int]],
    count: int,
    how: Sampling,
    seeds: list[int],
    alone: bool,
) -> int:
    """Print a batch -> tokens that were made. alone: as they come."""
    from megakit.inference.generator import generate
    from megakit.inference.text import TextStream

    streams = [TextStream(model.tokenizer, prompt) for prompt in prompts]
    made = 0
    if alone:
        _print(texts[0])
    for step in generate(model.decoder, prompts, count, how, model.ends, seeds, model.known):
        for stream, token in zip(streams, step):
            if token is not None:
                made += 1
                new = stream.add(token)
                if alone:
                    _print(new)
    for text, stream in zip(texts, streams):
        end = stream.end()
        _print(f"{end}\n" if alone else f"{text}{stream.text}\n\n")
    return made


def _print(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)  # the words may be anybody's
    sys.stdout.flush()


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character that a model makes
    sys.exit(main())
