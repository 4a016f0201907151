"""The plan command: quick, without torch, and what it prints is the plan's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megakit import plan
from megakit.config.compose import compose
from megakit.planner.plan import make_plan

REPO = Path(__file__).parent.parent
LLAMA = ["+recipe=llama70b", "cluster=h100", "cluster.nodes=16"]

PROBE = """
import sys
from megakit.plan import main
code = main(sys.argv[1:])
heavy = {"torch", "numpy", "sentencepiece", "safetensors"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    ("args", "code"), [(LLAMA, 0), ([*LLAMA, "--json"], 0), (["--help"], 0), (["+recipe=demo", "parallel.tp=3"], 2)]
)
def test_needs_no_torch(args: list[str], code: int):
    done = subprocess.run([sys.executable, "-c", PROBE, *args], capture_output=True, text=True, cwd=REPO, timeout=60)
    assert done.returncode == code, done.stderr


def test_prints_memory_traffic_time_and_cost(capsys):
    assert plan.main([*LLAMA, "cluster.gpu_hour_price=2"]) == 0
    text = capsys.readouterr().out
    made = make_plan(compose([*LLAMA, "cluster.gpu_hour_price=2"]))
    assert made.estimate is not None and made.estimate.cost == 2 * made.estimate.gpu_hours
    assert (
        f"{made.estimate.step.tokens_per_s_per_gpu:,.0f} tokens/s per GPU" in text and f"cost {made.estimate.cost:,.0f}" in text
    )
    sent = sum(t.sent for t in made.stages[0].traffic if t.axis == "tp")
    assert f"{sent / 1e9:,.2f}" in text and "nvlink" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_parts_of_a_step_add_up():
    made = make_plan(compose(LLAMA)).estimate
    assert made is not None
    step = made.step
    parts = [step.gemm, step.attention, step.memory, *step.exposed.values(), step.bubble, step.optimizer, step.stragglers]
    assert sum(parts) == pytest.approx(step.seconds)


def test_explains_each_line(capsys):
    assert plan.main([*LLAMA, "--explain"]) == 0
    text = capsys.readouterr().out
    stage = make_plan(compose(LLAMA)).stages[0]
    for name in [*(line.name for line in stage.states), *(kept.name for kept in stage.activations[0])]:
        assert name in text
    assert "10 x 4096 x 1 x 10 x 128 x 2 B" in text and max(map(len, text.splitlines())) <= 100


def test_json_is_the_plan(capsys):
    assert plan.main([*LLAMA, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["stages"][0]["traffic"][0]["group"] == "tp" and data["estimate"]["step"]["seconds"] > 0


def test_no_speed_is_guessed_for_a_machine_that_is_not_known(capsys):
    assert plan.main(["+recipe=demo"]) == 0
    assert "Time: not estimated, the speed of cluster.name = local is not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["+recipe=demo", "--jsn"], "--jsn is not an option: there are --help, --config-dir"),
        (["+recipe=demo", "--json=1"], "--json takes no value"),
        (["+recipe=nope"], "there is no recipe nope"),
    ],
)
def test_refusals_are_one_line(args: list[str], says: str, capsys):
    assert plan.main(args) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_page_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "x.html").mkdir()
    assert plan.main([*LLAMA, "--report", str(tmp_path / "x.html")]) == 2
    err = capsys.readouterr().err
    assert "can't be written: Is a directory" in err and err.count("\n") == 1


def test_a_short_run_takes_seconds(capsys):
    assert plan.main(["+recipe=demo", "cluster=h100"]) == 0
    text = capsys.readouterr().out
    assert " seconds for 614,400 tokens; 0.00" in text


@pytest.mark.parametrize(
    ("keys", "says"),
    [(["cluster.nodes=3"], "train.global_batch_size"), (["cluster.nodes=2", "parallel.pp=3"], "cluster.nodes = 2")],
)
def test_a_search_also_helps_where_the_recipes_own_grid_is_refused(keys: list[str], says: str, capsys):
    assert plan.main(["+recipe=llama7b", *keys]) == 2
    capsys.readouterr()
    assert plan.main(["+recipe=llama7b", *keys, "--search"]) == 0
    out, err = capsys.readouterr()
    assert "the recipe's own grid is refused" in err and says in err and err.count("\n") == 1
    assert "Grids for" in out and "Plan of llama7b" in out


def test_a_recipe_that_no_grid_can_run_is_refused_by_its_fault(capsys):
    assert plan.main(["+recipe=llama7b", "model.hidden_size=4097", "--search"]) == 2
    assert "model.hidden_size = 4097" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--search"]], ids=" ".join)
def test_a_node_that_the_recipe_leaves_open_is_the_documented_one(options, capsys):
    """With four nodes of an H100's eight GPUs the plan is that of the recipe, which says so."""
    keys = ["+recipe=llama7b", "train.global_batch_size=64", *options]
    assert plan.main(keys) == 0
    given = capsys.readouterr().out
    assert plan.main([*keys, "cluster.gpus_per_node=null", "cluster.gpu_memory_gib=null"]) == 0
    out, said = capsys.readouterr()
    assert out == given and "dp 32 x pp 1 x tp 1 = 32 ranks on 4 x 8 h100" in out
    assert said == "megakit: cluster.gpus_per_node is null: planned for nodes of 8 GPUs, as h100 has\n"


def test_a_node_that_is_left_open_is_checked_too(capsys):
    keys = ["+recipe=llama70b", "cluster=local", "cluster.name=gb200", "cluster.nodes=64"]
    assert plan.main(keys) == 2
    assert "parallel.tp = 8 does not fit the nodes of cluster.gpus_per_node = 4" in capsys.readouterr().err
    more = ["cluster=local", "cluster.name=h100", "cluster.nodes=1", "parallel.dp=2"]  # than one node has
    assert plan.main([*keys[:1], *more]) == 0
    assert "dp 2 x pp 8 x tp 8 = 128 ranks" in capsys.readouterr().out


def test_a_recipe_is_planned_once_for_a_search_too(monkeypatch, capsys):
    made = []
    monkeypatch.setattr("megakit.planner.plan.make_plan", lambda cfg: made.append(make_plan(cfg)) or made[-1])
    assert plan.main(["+recipe=llama7b", "cluster.nodes=1", "--search", "--json"]) == 0
    assert len(made) == 1 and json.loads(capsys.readouterr().out)["grid"] == made[0].grid


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("checkpoint.async=true", "checkpoint.async = true is not built yet: use false"),
        ("cluster.nodes=0", "cluster.nodes = 0 must be at least 1"),
        ("model.num_attention_heads=30", "model.hidden_size = 4096 is not divisible by model.num_attention_heads = 30"),
    ],
)
def test_a_search_refuses_what_no_grid_can_use(key, says, capsys):
    assert plan.main(["+recipe=llama7b", key, "--search"]) == 2
    assert says in capsys.readouterr().err
