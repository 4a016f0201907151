"""python -m megakit.data show +recipe=NAME step=1000: which documents a step reads, and which steps read a document.

Nothing is trained and torch is not imported. Exit codes: 0 shown, 2 refused.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from megakit.config.arguments import Arguments, Help, Option, command
from megakit.errors import EXIT_DONE, Refused

HELP = Help(
    "python -m megakit.data show (+recipe=NAME | run=FOLDER) (step=N | step=N..M | document=PREFIX:D) [rank=R] [KEY=VALUE ...]",
    "Show which documents a step reads: their text, file and place, and the ranks that read them; rank=R shows what one rank"
    " reads. With document=PREFIX:D show which steps read document D (from 0) of a file. run=FOLDER is a run folder: its"
    " config.yaml and the steps that it has recorded.",
    exit_codes="0 shown, 2 refused",
    options=(
        Option("--full", None, "the whole text of each document's part, in place of its beginning"),
        Option("--json", None, "JSON, in place of text"),
    ),
)
OWN = ("step", "rank", "document", "run")
_ASKED = "give step=N, step=N..M or document=PREFIX:D"


def run(args: Arguments) -> int:
    """Everything but --help and the reporting of refusals; returns the exit code."""
    if args.overrides[:1] != ["show"]:
        raise Refused(f"{' '.join(args.overrides[:1]) or 'no command'}: there is one, show: python -m megakit.data show ...")
    own, overrides = _sorted(args.overrides[1:])
    if ("step" in own) == ("document" in own):
        raise Refused(f"{'step= and document= are both given' if own.get('step') else 'nothing is asked for'}: {_ASKED}")
    from megakit.data import show_text
    from megakit.data.show import open_run

    full, as_json = "--full" in args.values, "--json" in args.values
    rank = _number(own["rank"], "rank") if "rank" in own else None
    if "document" in own:
        prefix, document = _document(own["document"])
        if rank is not None or full:
            raise Refused(f"document={own['document']} takes no {'--full' if full else 'rank='}: leave it out")
    opened = open_run(overrides, args.config_dir, args.config_file, Path(own["run"]) if "run" in own else None)
    if "document" in own:
        if as_json:
            sys.stdout.write(show_text.readers_json(opened, prefix, document))
        else:
            show_text.print_readers(opened, prefix, document)
        return EXIT_DONE
    steps = _steps(own["step"])
    opened.check(steps, rank)  # before anything is printed
    if as_json:
        sys.stdout.write(show_text.steps_json(opened, steps, rank, full))
    else:
        show_text.print_steps(opened, steps, rank, full)
    return EXIT_DONE


def _sorted(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """What is asked, by name, and the overrides of the recipe."""
    own: dict[str, str] = {}
    overrides = []
    for word in words:
        name, equals, value = word.partition("=")
        if name not in OWN:
            overrides.append(word)
        elif not value:
            raise Refused(f"{word}: give it a value, as in {name}{equals or '='}...")
        elif name in own:
            raise Refused(f"{name}={own[name]} and {word} are both given: give one")
        else:
            own[name] = value
    return own, overrides


def _number(text: str, name: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise Refused(f"{name}={text} is no whole number: give one, as in {name}=3")
    return int(text)


def _steps(text: str) -> range:
    first, dots, last = text.partition("..")
    steps = range(_number(first, "step"), _number(last if dots else first, "step") + 1)
    if not steps:
        raise Refused(f"step={text} ends before it begins: give the smaller number first")
    return steps


def _document(text: str) -> tuple[str, int]:
    prefix, colon, number = text.rpartition(":")
    if not colon or not prefix:
        raise Refused(f"document={text}: give the file's prefix and the document's number, as in document=data/demo/train:17")
    return prefix, _number(number, "document")


def main(argv: list[str] | None = None) -> int:
    """Run, and say in one line why it was refused."""
    return command(HELP, run, argv)


if __name__ == "__main__":
    sys.exit(main())
