"""Every shipped recipe composes, is complete from end to end, follows the documented practice, and can be exchanged in parts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from megakit.config.compose import RECIPES, compose, group_files, recipe_summaries
from megakit.config.rules import resolve, total_steps
from megakit.modeling.layout import parameter_count
from megakit.planner.plan import make_plan
from megakit.planner.widths import GIB

NAMES = group_files()["recipe"]

PARAMETERS = {
    "demo": 10_030_464,
    "gpt2_124m": 124_439_808,
    "smollm2_135m": 134_515_008,
    "llama7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
    "llama13b": 13_015_864_320,
    "llama70b": 68_976_648_192,
}
GRIDS = {  # dp, pp, tp, zero
    "gpt2_124m": (8, 1, 1, 0),
    "smollm2_135m": (64, 1, 1, 0),
    "llama7b": (32, 1, 1, 1),
    "llama3_8b": (512, 1, 1, 2),
    "qwen3_8b": (512, 1, 1, 1),
    "llama13b": (16, 4, 1, 1),
    "llama70b": (8, 8, 8, 1),
}


def test_the_recipes_are_those_promised():
    assert set(NAMES) == set(PARAMETERS)


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str):
    assert parameter_count(compose([f"+recipe={name}"])) == PARAMETERS[name]


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name: str):
    plan = make_plan(compose([f"+recipe={name}"]))
    assert (plan.grid["dp"], plan.grid["pp"], plan.grid["tp"], plan.zero) == GRIDS[name]
    assert plan.nodes is not None and plan.world == plan.nodes * 8 and plan.notes == []
    assert max(s.state_bytes for s in plan.stages) < 0.6 * 79 * GIB  # leaves room for activations


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_describes_the_run_end_to_end(name: str):
    cfg = compose([f"+recipe={name}"])
    assert cfg.run.name == name and cfg.run.dir == ("runs/demo" if name == "demo" else None)
    assert cfg.data.path and cfg.data.tokenizer and not Path(cfg.data.path[0]).is_absolute()
    assert cfg.train.eval_interval and cfg.checkpoint.interval_steps and cfg.checkpoint.resume == "auto"
    stretched_later = name in ("qwen3_8b", "smollm2_135m")
    assert cfg.train.seq_len == cfg.model.max_position_embeddings or stretched_later
    assert cfg.train.precision == ("fp32" if name == "demo" else "bf16"), "the demo also runs where bf16 has no instructions"
    assert 0 < cfg.optim.warmup_steps < total_steps(cfg)
    assert cfg.optim.schedule == ("wsd" if name == "smollm2_135m" else "cosine")
    raw = yaml.safe_load((RECIPES / f"recipe/{name}.yaml").read_text())
    assert raw["launch"]["slurm"]["time_limit"] == cfg.launch.slurm.time_limit  # its own, and not read as a number


@pytest.mark.parametrize("name", ["llama7b", "llama13b", "llama70b"])
def test_llama_2_as_published(name: str):
    cfg = compose([f"+recipe={name}"])
    assert cfg.optim.lr == (1.5e-4 if name == "llama70b" else 3e-4) and cfg.optim.min_lr == pytest.approx(cfg.optim.lr / 10)
    assert (cfg.optim.beta1, cfg.optim.beta2, cfg.optim.eps, cfg.optim.weight_decay) == (0.9, 0.95, 1e-5, 0.1)
    assert cfg.train.global_batch_size * cfg.train.seq_len == 2**22 and cfg.train.tokens == 2 * 10**12
    assert cfg.log.wandb == "offline" and cfg.log.tensorboard


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_demo_fits_any_usual_machine(world: int):
    cfg = compose(["+recipe=demo"])
    assert resolve(cfg, world).parallel.dp == world
    assert cfg.launch.device == "auto" and cfg.cluster.gpus_per_node is None


def test_the_demo_can_be_cut_short():
    assert compose(["+recipe=demo", "train.steps=3"]).train.steps == 3


def test_the_grid_follows_an_override():
    cfg = compose(["+recipe=llama7b", "parallel.tp=4", "train.micro_batch_size=2"])
    plan = make_plan(cfg)
    assert (plan.grid["dp"], plan.grid["tp"], plan.micro_batches) == (8, 4, 64)


@pytest.mark.parametrize("cluster", [c for c in group_files()["cluster"] if c != "local"])
@pytest.mark.parametrize("name", GRIDS)
def test_every_large_recipe_runs_on_every_cluster(name: str, cluster: str):
    cfg = compose([f"+recipe={name}", f"cluster={cluster}"])
    assert cfg.cluster.name == cluster and not any("a GPU has" in note for note in make_plan(cfg).notes)


def test_clusters_say_all_that_a_planner_needs():
    for name in group_files()["cluster"]:
        given = set(yaml.safe_load((RECIPES / f"cluster/{name}.yaml").read_text()))
        if name != "local":
            assert given == {
                "name", "gpus_per_node", "gpu_memory_gib", "peak_bf16_tflops", "peak_fp32_tflops", "memory_bandwidth_tb_s",
                "nvlink_gb_s", "network_gb_s",
            }  # fmt: skip


def test_every_part_is_in_the_root_and_composes_alone():
    root = yaml.safe_load((RECIPES / "config.yaml").read_text())["defaults"]
    listed = {next(iter(entry)) for entry in root if isinstance(entry, dict)}
    assert listed == set(group_files()) - {"recipe"}
    for group, names in group_files().items():
        for name in names if group not in ("recipe", "data") else []:
            compose(["+recipe=llama70b", "cluster.nodes=8", f"{group}={name}", *_fit(group, name)])


def _fit(group: str, name: str) -> list[str]:
    """What has to be changed with a part, so that the rest of llama70b fits it."""
    if group == "model":
        m = yaml.safe_load((RECIPES / f"model/{name}.yaml").read_text())
        cut = math.gcd(8, m["num_attention_heads"], m["num_query_groups"], m["ffn_hidden_size"])
        short = [f"train.seq_len={min(4096, m['max_position_embeddings'])}"]
        return [f"parallel.tp={cut}", f"parallel.sequence_parallel={cut > 1}", "parallel.pp=4", *short]
    return ["cluster.nodes=64", "parallel.dp=8"] if name == "local" else []


def test_summaries_are_one_line_each():
    for name, summary in recipe_summaries().items():
        assert 20 < len(summary) < 120, name


def test_the_recipes_are_in_the_wheel():
    """setuptools takes recipes/ because it is a package, and the yaml files by package-data."""
    root = RECIPES.parent
    text = (root / "pyproject.toml").read_text()
    assert (RECIPES / "__init__.py").exists() and '"recipes*"' in text and 'recipes = ["**/*.yaml"]' in text
