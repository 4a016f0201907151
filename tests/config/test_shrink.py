"""run.shrink keeps what makes a recipe what it is, and cuts the rest."""

from __future__ import annotations

import math

import pytest

from megakit.config import rules
from megakit.config.batch import BatchSize, lr_factor
from megakit.config.compose import compose, group_files
from megakit.config.schema import ClusterConfig, Config
from megakit.config.shrink import parameter_names, shrink
from megakit.modeling.layout import model_params, parameter_count, split_layers
from megakit.planner.plan import make_plan
from tests.config.tiny import tiny

RECIPES = group_files()["recipe"]

KEPT = [
    ("model", "family normalization norm_epsilon activation position_embedding rotary_base add_bias_linear tie_embeddings"
              " hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by"),
    ("parallel", "zero sequence_parallel schedule virtual_stages recompute"),
    ("train", "seed precision label_smoothing z_loss max_skipped_steps"),
    ("optim", "name lr min_lr lr_scaling schedule wsd_decay_style weight_decay beta1 beta2 eps"
              " momentum nesterov ns_steps clip_grad"),
    ("checkpoint", "keep"),
    ("ops", "backend"),
]  # fmt: skip


def micro_batches(cfg: Config) -> int:
    return cfg.train.global_batch_size // (cfg.train.micro_batch_size * (cfg.parallel.dp or 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_structure_of_every_recipe_is_kept(recipe: str):
    cfg = compose([f"+recipe={recipe}"])
    small, full = shrink(cfg), rules.resolve(cfg, rules.planned_world(cfg))
    for group, names in KEPT:
        for name in names.split():
            assert getattr(getattr(small, group), name) == getattr(getattr(cfg, group), name), name
    for axis in ("dp", "pp", "cp", "tp"):
        assert getattr(small.parallel, axis) == min(2, getattr(full.parallel, axis))
    ratio = cfg.model.num_attention_heads // cfg.model.num_query_groups
    assert small.model.num_attention_heads == ratio * small.model.num_query_groups
    pad = cfg.parallel.tp * cfg.model.make_vocab_size_divisible_by
    small_pad = small.parallel.tp * small.model.make_vocab_size_divisible_by
    assert bool(cfg.model.vocab_size % pad) == bool(small.model.vocab_size % small_pad)
    assert min(2, micro_batches(small)) == min(2, micro_batches(full))
    assert (small.optim.warmup_steps > 0) == (cfg.optim.warmup_steps > 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_becomes_small_and_needs_nothing(recipe: str):
    small = shrink(compose([f"+recipe={recipe}"]))
    assert parameter_count(small) < 1_500_000
    assert small.train.global_batch_size * small.train.seq_len <= 2048
    assert rules.total_steps(small) == 4
    assert small.train.eval_interval == 3 and small.checkpoint.interval_steps == 2
    assert small.data.mock and not small.data.path and small.data.tokenizer is None
    assert small.launch.device == "cpu" and small.cluster == ClusterConfig()
    assert small.log.wandb == "disabled" and not small.log.tensorboard
    assert small.run.name == f"{recipe}-shrunk" and not small.run.shrink
    assert small.run.dir == ("runs/demo-shrunk" if recipe == "demo" else None)
    assert rules.planned_world(small) <= 8


def test_shrinking_twice_changes_only_the_name():
    once = shrink(compose(["+recipe=llama70b"]))
    twice = shrink(once)
    twice.run.name = once.run.name
    assert twice == once


@pytest.mark.parametrize(
    ("given", "pp", "expected"),
    [
        ("[1,2,2,3]", 4, [1, 2]),
        ("[3,2,2,1]", 4, [2, 1]),
        ("[1,3,3,1]", 4, [1, 2]),
        ("[2,2,2,2]", 4, [2, 2]),
        ("[5,3]", 2, [2, 1]),
    ],
)
def test_uneven_stages_stay_uneven(given: str, pp: int, expected: list[int]):
    small = shrink(tiny("model.num_layers=8", f"parallel.pp={pp}", f"parallel.layers_per_stage={given}"))
    assert small.parallel.layers_per_stage == expected and small.model.num_layers == sum(expected)


def test_a_remainder_of_layers_stays_a_remainder():
    small = shrink(tiny("model.num_layers=30", "parallel.pp=4"))
    assert len({len(s.layers) for s in split_layers(small.model.num_layers, small.parallel.pp)}) == 2
    assert shrink(tiny("model.num_layers=1")).model.num_layers == 1


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "expected"),
    [
        (8, 8, 1, (4, 4)),
        (8, 8, 4, (4, 4)),
        (3, 3, 1, (3, 3)),
        (6, 6, 2, (4, 4)),
        (8, 4, 1, (4, 2)),
        (64, 8, 8, (16, 2)),
        (8, 1, 1, (8, 1)),
        (9, 3, 3, (6, 2)),
        (128, 4, 4, (32, 2)),  # 32 query heads a group are cut to 16
    ],
)
def test_heads_and_groups(heads: int, groups: int, tp: int, expected: tuple[int, int]):
    small = shrink(
        tiny(
            f"model.num_attention_heads={heads}",
            f"model.num_query_groups={groups}",
            f"model.hidden_size={heads * 64}",
            f"parallel.tp={tp}",
            "model.ffn_hidden_size=1152",
        )
    )
    assert (small.model.num_attention_heads, small.model.num_query_groups) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.schedule=wsd", "train.steps=1000"],
        ["optim.schedule=wsd", "train.steps=1000", "optim.wsd_decay_steps=100", "optim.warmup_steps=10"],
        ["optim.schedule=constant", "optim.warmup_steps=9"],
        ["optim.schedule=linear", "optim.decay_steps=5", "optim.warmup_steps=2"],
        ["optim.decay_steps=20"],
        ["train.steps=1"],
        ["train.steps=2", "optim.warmup_steps=1", "optim.schedule=wsd", "optim.decay_steps=20"],
        ["train.steps=null", "train.tokens=1_000_000"],
        ["optim.schedule=wsd", "train.steps=1000", "optim.wsd_decay_style=minus_sqrt"],
    ],
)
def test_schedules_still_fit(overrides: list[str]):
    cfg = tiny(*overrides)
    small = shrink(cfg)
    steps = rules.total_steps(small)
    assert steps == min(4, rules.total_steps(cfg))
    ends = cfg.optim.decay_steps
    if ends is not None and steps == 4:
        assert ((small.optim.decay_steps or math.inf) < steps) == (ends < rules.total_steps(cfg))


@pytest.mark.parametrize(
    ("dp", "cp", "group", "expected"),
    [(8, 1, 4, (4, 1, 2)), (4, 2, 2, (2, 2, 2)), (4, 4, 8, (2, 2, 2)), (1, 8, 2, (1, 4, 2)), (4, 1, 4, (2, 1, 2))],
)
def test_hybrid_sharding_keeps_two_groups(dp: int, cp: int, group: int, expected: tuple[int, int, int]):
    p = shrink(tiny("parallel.zero=2", "train.micro_batch_size=1", *(f"parallel.{k}={v}" for k, v in
                    (("dp", dp), ("cp", cp), ("zero_group", group))))).parallel  # fmt: skip
    assert (p.dp, p.cp, p.zero_group) == expected


def test_a_starved_pipeline_stays_starved_and_accumulation_stays():
    base = ["model.num_layers=8", "parallel.pp=8", "train.micro_batch_size=4"]
    assert micro_batches(shrink(tiny(*base, "train.global_batch_size=16"))) == 1
    assert micro_batches(shrink(tiny(*base, "train.global_batch_size=64"))) == 4
    assert micro_batches(shrink(tiny("train.micro_batch_size=4", "train.global_batch_size=4"))) == 1


@pytest.mark.parametrize("ramp", ["[16,16,1000]", "[32,32,64]", "[32,16,64]"])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_rampup_stays_one_and_is_passed_at_the_save(ramp: str, micro_batch_size: int):
    keys = ["parallel.dp=4", f"train.micro_batch_size={micro_batch_size}", "train.global_batch_size=64"]
    small = shrink(tiny(*keys, f"train.rampup_batch_size={ramp}", "optim.lr_scaling=linear", "optim.base_batch_size=32"))
    sizes = [size for size, n in BatchSize.of(small.train).runs() for _ in range(n or 2)]
    assert sizes == [small.train.global_batch_size // 2] * 2 + [small.train.global_batch_size] * 2
    assert lr_factor(small) == 2.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("embedding.*: 0.1, layers.29.*: 0.5, layers.0.*: 3", {"embedding.*": 0.1, "layers.1.*": 0.5, "layers.0.*": 3.0}),
        ("layers.2?.*: 0.5", {"layers.1.*": 0.5}),
        ("layers.*5.mlp.*: 0.5", {"layers.1.mlp.*": 0.5}),
        ("layers.2?*: 0.5", {"layers.1.*": 0.5}),
        ("layers.5.*: 0.5, layers.6.*: 2, layers.7.*: 1", {"layers.1.*": 2.0}),  # three that become one
        ("layers.29.*: 0.5, layers.1*: 2", {"layers.1*": 2.0}),  # the first would never hold
        ("layers.*: 0.5, layers.29.*: 1", {"layers.*": 0.5, "layers.1.*": 1.0}),
    ],
)
def test_patterns_of_layers_that_are_cut_off_move_to_the_last(given: str, expected: dict[str, float]):
    cfg = tiny("model.num_layers=30", "optim.lr_mult={" + given + "}")
    make_plan(cfg)
    small = shrink(cfg)
    assert small.optim.lr_mult == expected and list(small.optim.lr_mult) == list(expected)
    make_plan(small)


@pytest.mark.parametrize("recipe", RECIPES)
def test_names_of_parameters_are_those_of_the_model(recipe: str):
    cfg = shrink(compose([f"+recipe={recipe}"]))
    assert sorted(parameter_names(cfg.model)) == sorted(model_params(cfg))


def test_a_project_of_wandb_is_no_longer_needed():
    assert shrink(tiny("log.wandb=offline", "log.wandb_project=x")).log == tiny("log.interval=1").log


def test_a_small_run_tells_prometheus_nothing():
    keys = ["log.prometheus=true", "log.prometheus_address=0.0.0.0", "log.prometheus_port=1", "log.prometheus_targets=null"]
    assert shrink(tiny(*keys)).log == tiny("log.interval=1").log


def test_what_a_recipe_leaves_out_stays_out():
    small = shrink(tiny("train.seq_len=7", "model.vocab_size=50", "parallel.dp=1"))
    assert (small.train.seq_len, small.model.vocab_size, small.train.eval_interval, small.optim.warmup_steps) == (6, 50, 0, 0)


def test_paths_of_the_run_are_left_alone():
    small = shrink(tiny("run.dir=/tmp/x/", "checkpoint.dir=/tmp/x/c", "checkpoint.resume=7"))
    assert (small.run.dir, small.checkpoint.dir, small.checkpoint.resume) == ("/tmp/x-shrunk", None, "auto")


@pytest.mark.parametrize(("cp", "seq_len", "expected"), [(4, 4096, 64), (3, 54, 52), (5, 10, 8), (1, 10, 10)])
def test_a_context_parallel_recipe_keeps_its_cut_and_its_exchange(cp: int, seq_len: int, expected: int):
    gathered = ["parallel.cp_comm_type=all_gather"] if cp > 1 else []
    small = shrink(tiny(f"parallel.cp={cp}", f"train.seq_len={seq_len}", "data.isolate_documents=true", *gathered))
    assert (small.parallel.cp, small.train.seq_len) == (min(cp, 2), expected)
    assert small.data.isolate_documents and (small.parallel.cp_comm_type == "all_gather") == (cp > 1)


def test_the_scaling_of_rope_is_kept_in_proportion():
    scaled = ["model.rope_scaling=yarn", "model.rope_factor=4", "model.rope_original_max_position_embeddings=8192"]
    small = shrink(tiny(*scaled, "model.max_position_embeddings=32768", "train.seq_len=32768"))
    m = small.model
    assert (m.rope_scaling, m.rope_factor, m.max_position_embeddings, m.rope_original_max_position_embeddings) == (
        "yarn",
        4,
        64,
        16,
    )
