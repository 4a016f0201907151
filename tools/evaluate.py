"""Score a checkpoint with lm-evaluation-harness: its own command, which knows --model megakit here.

    python tools/evaluate.py --model_args path=runs/demo/checkpoints/step_00000300 --tasks lambada_openai --batch_size 16

path is a training step, a folder of weights or a Hugging Face folder. Further model_args: dtype, device, tokenizer,
add_bos_token, max_gen_toks (docs/generate.md). All other options are lm_eval's. Needs pip install 'megakit[eval]'.
"""

from __future__ import annotations

import sys

from megakit.errors import EXIT_DONE, EXIT_REFUSED, Stop


def main(argv: list[str] | None = None) -> int:
    """Run lm_eval; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        return EXIT_DONE
    try:
        from lm_eval.__main__ import cli_evaluate

        from megakit.inference import harness

        harness.register()
    except ImportError as e:
        print(f"evaluate: lm-evaluation-harness can't be imported ({e}): pip install 'megakit[eval]'", file=sys.stderr)
        return EXIT_REFUSED
    if args[0] != "run":
        args.insert(0, "run")
    if "--model" not in args:
        args[1:1] = ["--model", "megakit"]
    sys.argv = ["lm_eval", *args]
    try:
        cli_evaluate()
    except Stop as e:
        print(f"evaluate: {e}", file=sys.stderr)
        return e.code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
