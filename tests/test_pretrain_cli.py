"""The command: help, dry run and refusals are quick, need no torch, and have the documented form and exit codes."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from megakit import errors, pretrain
from megakit.config.compose import compose, recipe_summaries
from megakit.config.keys import schema_keys
from megakit.config.schema import Config
from megakit.config.terminal import MOST_USED
from megakit.config.typed import to_yaml
from megakit.planner.plan import make_plan

REPO = Path(__file__).parent.parent

PROBE = """
import sys
from megakit.pretrain import main
code = main(sys.argv[1:])
heavy = {"torch", "numpy", "sentencepiece", "safetensors"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def megakit(*args: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megakit.pretrain", *args], capture_output=True, text=True, cwd=cwd, timeout=60)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["+recipe=llama70b", "run.dry_run=true"], 0),
        (["+recipe=llama70b", "run.dry_run=true", "run.shrink=true"], 0),
        (["+recipe=demo", "+train.lrr=5"], 2),
        (["+recipe=demo", "parallel.tp=3"], 2),
        ([], 2),
    ],
)
def test_needs_no_torch(args: list[str], code: int):
    done = subprocess.run([sys.executable, "-c", PROBE, *args], capture_output=True, text=True, cwd=REPO, timeout=60)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["+recipe=demo", "+train.lrr=5"], "train.lrr is not a recipe key: did you mean optim.lr?"),
        (["+recipe=demo", "train.steps=[1"], "can't be read"),
        (["+recipe=llama8b"], "did you mean llama3_8b?"),
        (["+recipe=demo", "--dry-run"], "--dry-run is not an option"),
        (["+recipe=demo", "--config-dir"], "--config-dir has no value"),
        (["+recipe=demo", "--config-dir=/nope"], "--config-dir = /nope is not a folder"),
        (["--config-file", "/nope"], "--config-file = /nope can't be read"),
        (["--help", "zzzz"], "no key has that in its name"),
        (
            ["+recipe=demo", "model.num_layers=3", "parallel.pp=4"],
            "model.num_layers = 3 is less than parallel.pp x parallel.virtual_stages = 4",
        ),
        (["+recipe=demo", "model.num_layers=3", "parallel.pp=4", "run.shrink=true"], "model.num_layers = 3 is less"),
        (
            ["+recipe=demo", "train.micro_batch_size=4", "train.global_batch_size=10"],
            "train.global_batch_size = 10 is not divisible",
        ),
    ],
)
def test_a_refusal_is_one_line_on_stderr_and_code_2(args: list[str], says: str, capfd):
    assert pretrain.main(args) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("megakit: refused: ") and says in err


def test_the_command_itself_refuses_and_prints():
    refused = megakit("+recipe=demo", "optim.lr=nan")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "megakit: refused: optim.lr = nan is not a finite number\n"
    planned = megakit("+recipe=demo", "run.dry_run=true")
    assert (planned.returncode, planned.stderr) == (0, "")
    assert "10,030,464 parameters" in planned.stdout


def test_help_lists_recipes_and_the_most_used_keys(capfd):
    assert pretrain.main(["--help"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    for name, summary in recipe_summaries().items():
        assert f"+recipe={name} {summary[:30]}" in out
    for name in MOST_USED:
        assert f"{name} " in out and schema_keys()[name].doc[:15] in out
    assert "cluster=a100_80g | b200 | h100 | h200 | local" in out and "exit codes" in out


def test_help_of_a_group_lists_all_its_keys(capfd):
    assert pretrain.main(["--help", "optim"]) == 0
    out = capfd.readouterr().out
    assert all(name in out for name in schema_keys() if name.startswith("optim."))
    assert "train.steps" not in out


def test_help_lists_recipes_of_ones_own(tmp_path: Path, capfd):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text("# @package _global_\n# My very own\ndefaults:\n  - demo\n")
    assert pretrain.main(["--help", "--config-dir", str(tmp_path)]) == 0
    assert "+recipe=mine" in (out := capfd.readouterr().out) and "My very own" in out
    assert pretrain.main([f"--config-dir={tmp_path}", "+recipe=mine", "run.dry_run=true"]) == 0


def test_output_in_a_pipe_fits_100_columns(capfd):
    for args in (["--help"], ["+recipe=llama70b", "run.dry_run=true"]):
        assert pretrain.main(args) == 0
        out = capfd.readouterr().out
        assert max(map(len, out.splitlines())) <= 100 and "\x1b" not in out


def test_dry_run_needs_no_data_and_leaves_nothing_behind(tmp_path: Path):
    done = megakit("+recipe=llama7b", "run.dry_run=true", "data.path=[]", "data.weights=null", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def launched(monkeypatch):
    """What reaches megakit.launch.start.launch, in `seen`; `result` is what it returns or raises."""
    record = types.SimpleNamespace(seen=[], result=0)

    def launch(cfg: Config, argv: list[str], announce: object) -> int:
        record.seen.append((cfg, argv))
        if isinstance(record.result, Exception):
            raise record.result
        return record.result

    monkeypatch.setattr("megakit.launch.start.launch", launch)
    return record


def test_a_run_is_launched_with_the_configuration_and_the_command_line(launched):
    launched.result = 75
    args = ["+recipe=demo", "train.steps=3"]
    assert pretrain.main(args) == 75
    assert launched.seen == [(compose(args), args)]


def test_shrink_is_launched_small(launched):
    assert pretrain.main(["+recipe=llama70b", "run.shrink=true"]) == 0
    ((cfg, _),) = launched.seen
    assert cfg.model.num_layers == 4 and make_plan(cfg).world == 8


def test_a_configuration_file_is_launched(launched, tmp_path: Path):
    cfg = compose(["+recipe=llama70b"])
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    assert pretrain.main(["--config-file", str(tmp_path / "config.yaml")]) == 0
    assert launched.seen[0][0] == cfg


@pytest.mark.parametrize(
    ("stop", "label"),
    [
        (errors.Refused, "refused"),
        (errors.Stop, "failed"),
        (errors.NotFinite, "stopped"),
        (errors.StorageFailed, "stopped"),
        (errors.AskedToStop, "stopped"),
    ],
)
def test_every_end_on_purpose_is_one_line_and_its_code(launched, capfd, stop: type[errors.Stop], label: str):
    launched.result = stop("first\nsecond")
    assert pretrain.main(["+recipe=demo"]) == stop.code
    assert capfd.readouterr().err == f"megakit: {label}: first second\n"


def test_a_fault_of_the_program_keeps_its_traceback(launched):
    launched.result = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        pretrain.main(["+recipe=demo"])


def test_ranks_that_do_not_fit_the_recipe_are_refused(monkeypatch, capfd):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    assert pretrain.main(["+recipe=demo", "parallel.pp=2"]) == 2
    out = capfd.readouterr()
    assert "3 ranks can't be divided by pp 2 x tp 1 = 2" in out.err and out.out == ""
    assert pretrain.main(["+recipe=demo", "parallel.pp=2", "run.dry_run=true"]) == 0


def test_a_local_recipe_is_planned_for_the_gpus_that_are_here(monkeypatch, capfd):
    monkeypatch.setattr("megakit.launch.devices.visible_gpus", lambda env: 4)
    assert pretrain.main(["+recipe=demo", "run.dry_run=true"]) == 0
    assert "dp 4 x pp 1 x tp 1 = 4 ranks" in capfd.readouterr().out
    monkeypatch.setattr("megakit.launch.devices.visible_gpus", lambda env: 3)
    assert pretrain.main(["+recipe=demo", "run.dry_run=true"]) == 0  # a batch of 8 is not cut in 3
    assert "dp 2 x pp 1 x tp 1 = 2 ranks" in capfd.readouterr().out
    assert pretrain.main(["+recipe=demo", "run.dry_run=true", "launch.device=cpu"]) == 0
    assert "dp 1 x pp 1 x tp 1 = 1 rank" in capfd.readouterr().out
    assert pretrain.main(["+recipe=demo", "run.dry_run=true", "parallel.pp=3"]) == 0
    assert "dp 1 x pp 3 x tp 1 = 3 ranks" in capfd.readouterr().out
