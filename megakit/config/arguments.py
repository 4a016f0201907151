"""The command line that all commands share: overrides, --config-dir, --config-file, --help, and options of their own."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megakit.errors import EXIT_DONE, Refused, Stop, stop_line


class Option(NamedTuple):
    """An option of a command."""

    name: str
    """--report"""
    value: str | None
    """What it takes, as FILE; None: it is given or not."""
    meaning: str


COMMON = (
    Option("--config-dir", "DIR", "read also your own DIR/recipe/NAME.yaml, DIR/model/NAME.yaml, ..."),
    Option("--config-file", "FILE", "run a whole configuration, such as config.yaml of a run folder, in place of a recipe"),
)


class Help(NamedTuple):
    """What --help says of a command."""

    usage: str
    purpose: str
    exit_codes: str
    options: Sequence[Option] = ()
    """Of its own."""


@dataclass
class Arguments:
    """What was given."""

    overrides: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    """By option; "" for one that takes no value."""
    help: bool = False
    words: list[str] = field(default_factory=list)
    """The command line as it was given."""

    @property
    def config_dir(self) -> str | None:
        return self.values.get("--config-dir")

    @property
    def config_file(self) -> str | None:
        return self.values.get("--config-file")


def parse(argv: Sequence[str], options: Sequence[Option] = ()) -> Arguments:
    """Options and overrides in any order. Raises Refused."""
    known = {option.name: option for option in (*COMMON, *options)}
    out, words = Arguments(words=list(argv)), list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            out.help = True
        elif name in known:
            out.values[name] = _value(known[name], equals, value, words)
        elif word.startswith("-"):
            there = ", ".join(["--help", *known])
            raise Refused(f"{word} is not an option: there are {there}; keys are given as KEY=VALUE")
        else:
            out.overrides.append(word)
    return out


def _value(option: Option, equals: str, value: str, words: list[str]) -> str:
    if option.value is None:
        if equals:
            raise Refused(f"{option.name}={value}: {option.name} takes no value: use {option.name}")
        return ""
    if not equals and not words:
        raise Refused(f"{option.name} has no value: use {option.name} {option.value}")
    return value if equals else words.pop(0)


def command(help: Help, run: Callable[[Arguments], int], argv: Sequence[str] | None = None) -> int:
    """The exit code of a command: what `run` makes of its arguments (None: the process's), or of --help, which prints a page.

    Why it was refused or stopped goes to standard error in one line.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else argv, help.options)
        if not args.help:
            code = run(args)
            sys.stdout.flush()  # here, where a reader that has left is noticed
            return code
        from megakit.config.terminal import print_help

        print_help(help, args.overrides, args.config_dir)
        return EXIT_DONE
    except Stop as stop:
        print(stop_line(stop.code, str(stop)), file=sys.stderr)
        return stop.code
    except BrokenPipeError:
        return output_cut_off()


def whole_number(text: str) -> int:
    """The type of an argparse option that is a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


class Terminated(SystemExit):
    """SIGTERM came: raised so that leaving cleans up, as Ctrl-C does."""


def clean_up_on_sigterm() -> None:
    """From now on SIGTERM raises Terminated, with the exit code that belongs to it."""

    def terminate(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    signal.signal(signal.SIGTERM, terminate)


def output_cut_off() -> int:
    """Where printing raised BrokenPipeError: nobody reads any more (`| head`), so no more is printed; the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
