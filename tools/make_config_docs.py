"""docs/config.md from the schema: python tools/make_config_docs.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from megakit.config.keys import MISSING, Key, group_docs, schema_keys, show
from megakit.config.ranges import CHOICES, RANGES

PATH = Path(__file__).resolve().parent.parent / "docs/config.md"

HEAD = """# Configuration keys

Made by `python tools/make_config_docs.py` from `megakit/config/schema.py`; a test keeps it current.

Every key may stand in a recipe file (`recipes/`, or a folder of yours given with `--config-dir`) and on the command line, as
`KEY=VALUE`, with or without a leading `+`. Text is taken as it is written; lists are written `[a, b]`; `null` means no value;
`~KEY` takes a recipe's value out, so that the default holds. Unknown keys, wrong types, numbers that are out of range or not
finite, and combinations that can't work are refused in one line with exit code 2, before anything starts.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for group, doc in group_docs().items():
        parts.append(f"\n## {group}\n\n{doc}\n\n| Key | Type | Default | Allowed | Meaning |\n| --- | --- | --- | --- | --- |\n")
        parts += [_row(key) for key in schema_keys().values() if key.group == group]
    return "".join(parts)


def _row(key: Key) -> str:
    default = "**required**" if key.default == MISSING else f"`{show(key.default)}`"
    allowed = [str(RANGES[key.name])] if key.name in RANGES else []
    allowed += [f"`{word}`" for word in CHOICES.get(key.name, ())]
    cells = (f"`{key.name}`", key.type_name, default, ", ".join(allowed), key.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(argv: list[str]) -> int:
    """Write the page, or with --check say whether it is current."""
    if argv not in ([], ["--check"]):
        print(f"{' '.join(argv)}: the only option is --check", file=sys.stderr)
        return 2
    text = render()
    if argv:
        current = PATH.exists() and PATH.read_text(encoding="utf-8") == text
        print(f"{PATH.name} is {'current' if current else 'not current: run python tools/make_config_docs.py'}")
        return 0 if current else 1
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
