"""The console examples of docs/recipes.md are real: `python tests/recipes/test_docs.py` writes their output."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megakit import pretrain
from megakit.config.compose import compose

PAGE = Path(__file__).parent.parent.parent / "docs/recipes.md"
EXAMPLE = re.compile(r"^```console\n\$ python -m megakit\.pretrain (.*)\n((?s:.*?))^```$", re.MULTILINE)


def output(command: str) -> str:
    """What the command prints, without trailing blanks."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        pretrain.main(shlex.split(command))
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


EXAMPLES = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))


def test_there_are_examples():
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_the_output_shown_is_what_the_command_prints(command: str, shown: str):
    assert shown == output(command)


def test_the_recipe_of_ones_own_composes(tmp_path: Path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text(text)
    cfg = compose(["+recipe=mine"], str(tmp_path))
    given = yaml.safe_load(text)
    assert (cfg.cluster.nodes, cfg.cluster.name, cfg.data.path) == (given["cluster"]["nodes"], "h200", given["data"]["path"])


def test_the_short_run_composes():
    (command,) = re.findall(r"^    python -m megakit\.pretrain (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert compose(shlex.split(command)).train.steps == 500


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    renewed = EXAMPLE.sub(lambda m: f"```console\n$ python -m megakit.pretrain {m[1]}\n{output(m[1])}```", page)
    PAGE.write_text(renewed, encoding="utf-8")
