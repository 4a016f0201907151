"""The cure of a refusal cures: none is refused in turn, or only for another reason, whose own cure ends it."""

from __future__ import annotations

import re

import pytest
import yaml

from megakit.config import rules
from megakit.config.compose import compose
from megakit.config.cures import Broken, tried
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.modeling.layout import model_stages
from megakit.parallel.grid import Grid
from megakit.planner.table import check_blocks

RECIPES = [
    ["+recipe=demo"],
    ["+recipe=gpt2_124m"],
    ["+recipe=llama7b"],
    ["+recipe=llama7b", "parallel.cp=4"],
    ["+recipe=llama13b"],
    ["+recipe=llama70b"],
    ["+recipe=llama70b", "cluster.nodes=16"],
    ["+recipe=llama70b", "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=5"],
]
CHANGES = {
    "parallel.tp": (1, 2, 3, 4, 5, 7, 8, 12, 16, 64),
    "parallel.pp": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40, 64, 96),
    "parallel.cp": (1, 2, 3, 5, 7, 8, 16, 64),
    "parallel.dp": (1, 2, 3, 7, 16, 33, 100, 512),
    "parallel.virtual_stages": (1, 2, 3, 5, 7, 10, 40),
    "parallel.zero": (0, 1, 2, 3),
    "parallel.zero_group": (1, 2, 3, 8, 64),
    "parallel.zero3_reduce": ("step",),
    "parallel.recompute": ("none", "selective", "full"),
    "parallel.recompute_layers": (1, 100),
    "parallel.schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"),
    "parallel.stage_balance": ("cost",),
    "parallel.sequence_parallel": (True, False),
    "model.hidden_size": (100, 1000, 8190),
    "model.num_attention_heads": (5, 12, 30, 33),
    "model.num_query_groups": (3, 5, 12),
    "model.num_layers": (1, 7, 33),
    "train.micro_batch_size": (1, 2, 3, 7, 16, 2000),
    "train.global_batch_size": (1, 2, 7, 30, 100, 1000, 1023, 4096),
    "train.seq_len": (1, 3, 100, 1023, 4097, 8192),
    "train.grad_dtype": ("bf16",),
    "cluster.nodes": (1, 3, 7, 16, 100),
    "cluster.gpus_per_node": (1, 3, 6, 72),
}
CHAIN = 3
"""Refusals that a user may meet one after another."""
CURE = re.compile(r"([a-z_]+(?:\.[a-z0-9_]+)+)=([^\s,:()]+)((?: or [^\s,:()=]+(?=$|[ ,]))*)")


def cures(text: str) -> list[dict]:
    """Each alternative that is written as KEY=VALUE ...; KEY=A or B are two."""
    out = []
    for alternative in re.split(r", or |: use |: ", text)[1:]:
        if pairs := CURE.findall(alternative):
            out.append({key: yaml.safe_load(value) for key, value, _ in pairs})
            key, _, more = pairs[-1]
            out += [{key: yaml.safe_load(value)} for value in more.split(" or ") if value]
    return out


def refusal(cfg) -> str | None:
    """What a plan of the recipe would be refused for."""
    try:
        rules.check(cfg)
        cfg = rules.resolve(cfg, rules.planned_world(cfg))
        model_stages(cfg)
        check_blocks(cfg, Grid.of(cfg.parallel))
    except Refused as why:
        return str(why)
    return None


@pytest.mark.parametrize("recipe", RECIPES, ids=" ".join)
def test_each_cure_cures(recipe):
    base = compose(recipe, checked=False)
    refused = 0
    for key, values in CHANGES.items():
        for value in values:
            cfg = replace(base, {key: value})
            why = refusal(cfg)
            if why is None:
                continue
            refused += 1
            assert cures(why), why
            for cure in cures(why):
                _follow(cfg, why, cure)
    assert refused > 20


def _follow(cfg, why: str, cure: dict) -> None:
    story, changed = [why], set()
    for _ in range(CHAIN):
        assert not changed & cure.keys(), ("a cure takes back an earlier one", story)
        changed |= cure.keys()
        cfg = replace(cfg, cure)
        after = refusal(cfg)
        if after is None:
            return
        assert after not in story, story
        story.append(after)
        cure = cures(after)[0]
    raise AssertionError(story)


def test_a_grid_that_does_not_divide_the_cluster_is_told_what_does():
    cfg = compose(["+recipe=llama70b", "cluster.nodes=16", "parallel.pp=7"], checked=False)
    with pytest.raises(
        Refused, match=r"pp 7 x tp 8 = 56 ranks do not divide .* 128 GPUs: use cluster.nodes=14 or 28, or parallel.pp=8"
    ):
        rules.check(cfg)


def test_cures_that_do_not_work_are_not_named():
    cfg = compose(["+recipe=llama7b"])
    broken = Broken("a = 1 is wrong", [{"parallel.zero": 9}, {"parallel.zero": 2}], [{"train.steps": -1}])
    assert str(tried(broken, cfg, rules.check)) == "a = 1 is wrong: use parallel.zero=2"
    assert "--search" in str(tried(Broken("b", [{"parallel.zero": 9}]), cfg, rules.check))


def test_a_second_fault_is_named_with_the_cure_of_the_first():
    with pytest.raises(Refused) as why:
        compose(["+recipe=llama13b", "optim.name=sgd", "model.num_query_groups=32"])
    assert "use model.num_query_groups=40; what is refused then: optim.eps = 1e-05 changes nothing" in str(why.value)


@pytest.mark.parametrize(
    ("keys", "cures"),
    [
        (["+recipe=llama13b", "parallel.recompute_layers=100"], "parallel.recompute_layers=null"),
        (
            ["+recipe=gpt2_124m", "parallel.zero_group=5"],
            "parallel.zero_group=null, or parallel.zero=1 parallel.zero_group=4",
        ),
    ],
)
def test_a_cure_that_another_size_forbids_is_not_named(keys, cures):
    with pytest.raises(Refused) as why:
        compose(keys)
    assert str(why.value).endswith(f": use {cures}")
