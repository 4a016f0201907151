"""Output for people: a console of a sensible width, and the page that --help prints."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from megakit.config import keys
from megakit.config.arguments import COMMON, Help
from megakit.config.compose import group_files, recipe_summaries, user_folder
from megakit.config.keys import MISSING, Key, schema_keys, show
from megakit.errors import Refused

PIPED_WIDTH = 100
"""Columns where the output is not a terminal."""

MOST_USED = (
    "parallel.tp",
    "parallel.pp",
    "parallel.dp",
    "parallel.zero",
    "parallel.sequence_parallel",
    "parallel.recompute",
    "train.steps",
    "train.tokens",
    "train.micro_batch_size",
    "train.global_batch_size",
    "train.seq_len",
    "train.precision",
    "train.eval_interval",
    "optim.lr",
    "optim.warmup_steps",
    "optim.schedule",
    "data.path",
    "data.tokenizer",
    "data.mock",
    "checkpoint.interval_steps",
    "checkpoint.keep",
    "checkpoint.resume",
    "checkpoint.init_from",
    "log.wandb",
    "launch.device",
    "cluster.nodes",
    "run.name",
    "run.dir",
    "run.dry_run",
    "run.shrink",
)


def console() -> Console:
    """Standard output, wide enough for tables when it is not a terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def as_text(what: RenderableType) -> str:
    """Without colours, as wide as output that is not a terminal."""
    out = Console(highlight=False, width=PIPED_WIDTH, file=io.StringIO())
    out.print(what)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]


def columns_table() -> Table:
    """Empty, for columns under their names."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def facts_table() -> Table:
    """Empty, for rows of a name and what is to say of it."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    return table


def print_help(help: Help, topics: list[str], config_dir: str | None = None) -> None:
    """The recipes and the most used keys; with `topics` (group or key names), all keys that contain one of them."""
    out = console()
    if topics:
        chosen = [k for k in schema_keys().values() if any(topic in k.name for topic in topics)]
        if not chosen:
            raise Refused(
                f"--help {' '.join(topics)}: no key has that in its name; the groups are {', '.join(keys.group_docs())}"
            )
        out.print(_keys(chosen))
        return
    out.print(f"[bold]{escape(help.usage)}[/]\n", soft_wrap=True)
    out.print(f"{help.purpose}\n")
    out.print(_recipes(recipe_summaries(config_dir)))
    out.print(_keys(schema_keys()[name] for name in MOST_USED))
    files = group_files(user_folder(config_dir))
    parts = "; ".join(f"[cyan]{group}=[/]{' | '.join(names)}" for group, names in files.items() if group != "recipe")
    out.print(f"Exchange a part of the recipe: {parts}\n")
    options = facts_table()
    for option, meaning in (
        *((f"{o.name} {o.value or ''}", o.meaning) for o in (*help.options, *COMMON)),
        ("--help GROUP", "all keys of a group: " + ", ".join(g for g in keys.group_docs() if "." not in g)),
        ("exit codes", help.exit_codes),
    ):
        options.add_row(option, meaning)
    out.print(options)


def _recipes(summaries: dict[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("recipe", style="cyan", no_wrap=True)
    table.add_column("what it trains")
    for name, summary in summaries.items():
        table.add_row(f"+recipe={name}", escape(summary))
    return table


def _keys(chosen: Iterable[Key]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("default", overflow="fold", max_width=16)
    table.add_column("meaning")
    for key in chosen:
        default = "(required)" if key.default == MISSING else show(key.default)
        table.add_row(key.name, escape(default), escape(key.doc))
    return table
