"""The console examples of the pages are real: `python tests/recipes/test_docs.py` writes their output."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megakit import plan, pretrain
from megakit.config.compose import compose
from megakit.config.shrink import shrink
from megakit.config.typed import to_yaml
from megakit.planner.plan import make_plan

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/recipes.md"
PAGES = [PAGE, ROOT / "docs/plan.md", ROOT / "docs/models.md"]
EXAMPLE = re.compile(r"^```console\n\$ python -m megakit\.(\w+) (.*)\n((?s:.*?))^```$", re.MULTILINE)
COMMANDS = {"pretrain": pretrain.main, "plan": plan.main}


def output(name: str, arguments: str) -> str:
    """What the command prints, without trailing blanks."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        COMMANDS[name](shlex.split(arguments))
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


EXAMPLES = [example for page in PAGES for example in EXAMPLE.findall(page.read_text(encoding="utf-8"))]


def test_there_are_examples():
    assert [name for name, *_ in EXAMPLES] == ["pretrain"] * 5 + ["plan"] * 2 + ["pretrain"]


@pytest.mark.parametrize(("name", "arguments", "shown"), EXAMPLES)
def test_the_output_shown_is_what_the_command_prints(name: str, arguments: str, shown: str):
    assert shown == output(name, arguments)


def test_the_recipe_of_ones_own_composes(tmp_path: Path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text(text)
    cfg = compose(["+recipe=mine"], str(tmp_path))
    given = yaml.safe_load(text)
    assert (cfg.cluster.nodes, cfg.cluster.name, cfg.data.path) == (given["cluster"]["nodes"], "h200", given["data"]["path"])


def test_the_indented_commands_compose(tmp_path):
    commands = re.findall(r"^    python -m megakit\.pretrain (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    shrunk, longer, short = (shlex.split(command) for command in commands)
    assert compose(short).train.steps == 500
    small = shrink(compose(shrunk))
    assert longer[:2] == ["--config-file", f"{small.run.dir}/config.yaml"]
    (tmp_path / "config.yaml").write_text(to_yaml(small), encoding="utf-8")
    cfg = compose(longer[2:], config_file=str(tmp_path / "config.yaml"))
    assert (cfg.train.steps, cfg.train.global_batch_size, cfg.run.dir) == (400, 8, "runs/longer")


def dry_runs() -> list[str]:
    """The overrides of every command of the pages that prints a plan, each once."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in [*sorted(PAGE.parent.glob("*.md")), ROOT / "README.md"])
    commands = re.findall(r"^[ $]*python -m megakit\.pretrain (.*)$", pages.replace("\\\n", " "), re.MULTILINE)
    return list(dict.fromkeys(c.split(" #")[0] for c in commands if "run.dry_run=true" in c))


@pytest.mark.parametrize("command", dry_runs())
def test_every_dry_run_of_the_pages_has_a_plan(command: str):
    notes = make_plan(compose(shlex.split(command))).notes
    assert not any("a GPU has" in note for note in notes) or "demo" in command, notes


SHOWN = [
    "interleaved_1f1b", "zb_h1", "zb_v", "layers_per_stage", "stage_balance=cost", "recompute_layers", "initial_loss_scale",
    "grad_dtype=bf16", "lr_scaling", "optim.schedule=wsd", "optim.name=sgd", "isolate_documents", "cp_comm_type=all_gather",
    "rope_scaling=llama3", "rope_scaling=yarn", "zero_group", "parallel.zero=3", "rampup_batch_size",
    "model=mistral", "qwen3_8b",
]  # fmt: skip


@pytest.mark.parametrize("feature", SHOWN)
def test_the_pages_show_a_run_of_each_feature(feature: str):
    assert any(feature in command for command in dry_runs())


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = EXAMPLE.sub(lambda m: f"```console\n$ python -m megakit.{m[1]} {m[2]}\n{output(m[1], m[2])}```", old)
        page.write_text(new, encoding="utf-8")
