"""The traffic ledger against the record of a real step: messages and bytes of every operation on every group, exactly."""

from __future__ import annotations

import pytest

from megakit.config import rules
from megakit.config.schema import Config
from megakit.parallel.grid import Grid
from megakit.planner.traffic import VOTES, Traffic, by_operation, links, step_traffic
from tests.tiny import tiny
from tests.train.features import FEATURES, ZERO3, Feature, config, layouts, world
from tests.train.parity import micro_batches, warmed_up

Counts = dict[tuple[str, str], tuple[int, int]]


def recorded(cfg: Config) -> tuple[Counts, Counts]:
    """(operation, group) -> (messages, bytes) of the second step on this rank: as it was recorded, as it is planned."""
    e = warmed_up(cfg)
    e.train_step(micro_batches(e, 1), 0.01, votes=(0.0,) * VOTES)
    e.settle()
    state = e.state
    dp = state.index("dp_shard") if cfg.parallel.zero else 0
    planned = step_traffic(cfg, state.grid, state.index("pp"), dp, state.index("tp"))
    return e.comm.totals(), by_operation(planned)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_every_message_of_a_step_is_planned(pools, feature: Feature):
    """On the feature's largest layout of at most 4 ranks; the record of 8 needs no more of the plan."""
    layout = [name for name in layouts(feature) if world(name) <= 4][-1]
    cfg = rules.resolve(config(feature, layout), world(layout))
    for counted, planned in pools(world(layout)).run(recorded, cfg):
        assert counted == planned
    assert world(layout) == 1 or counted


@pytest.mark.parametrize(
    "keys",
    [
        {"dp": 2, "zero": 1, "train__precision": "bf16"},
        {"dp": 2, "zero": 2, "train__precision": "bf16", "train__grad_dtype": "bf16"},
        {**ZERO3, "dp": 4, "zero_group": 2, "train__precision": "bf16"},
        {"tp": 2, "dp": 2, "sequence_parallel": True, "recompute": "full", "recompute_layers": 1, "train__label_smoothing": 0.1},
        {"tp": 2, "cp": 2, "recompute": "selective", "cp_comm_type": "all_gather"},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb_h1", "model__tie_embeddings": True},
        {"pp": 4, "layers_per_stage": [1, 2, 2, 3], "model__num_layers": 8, "model__tie_embeddings": True},
    ],
    ids=lambda k: " ".join(f"{a.split('__')[-1]} {v}" for a, v in k.items()),
)
def test_precision_and_uneven_stages_are_planned(pools, keys):
    cfg = tiny(**{k if "__" in k else f"parallel__{k}": v for k, v in keys.items()}, train__global_batch_size=8)
    cfg = rules.resolve(cfg, rules.planned_world(cfg))
    p = cfg.parallel
    for counted, planned in pools(p.dp * p.pp * p.cp * p.tp).run(recorded, cfg):
        assert counted == planned and counted


def test_what_leaves_a_rank():
    def sent(op: str, ranks: int) -> float:
        return Traffic("", op, "dp_cp", ranks, 3, 100).sent

    assert sent("all_reduce", 4) == 3 * 150 and sent("all_gather", 4) == sent("reduce_scatter", 4) == 3 * 75
    assert sent("send", 4) == sent("shift", 4) == 300 and sent("recv", 4) == 0


def test_tensor_parallel_stays_in_the_node_and_the_pipeline_leaves_it():
    grid = Grid(dp=2, pp=2, tp=8)
    assert links(grid, 8, rank=0) == {
        "tp": "nvlink", "cp": "nvlink", "pp": "network", "embed": "network", "dp_cp": "network", "dp_shard": "network",
        "dp_replicate": "nvlink", "world": "network",
    }  # fmt: skip
    assert links(Grid(dp=2, pp=2, tp=2), 8, rank=0)["pp"] == "nvlink"
    assert set(links(grid, None, rank=0).values()) == {"unknown"}


def test_hybrid_sharding_gathers_inside_a_group_only():
    """The groups are neighbours on dp, so that a group can be a node."""
    grid = Grid(dp=8, tp=2, zero_group=4)
    assert grid.members(0, "dp_shard") == [0, 2, 4, 6] and grid.members(0, "dp_replicate") == [0, 8]
    assert grid.members(11, "dp_shard") == [9, 11, 13, 15] and grid.members(11, "dp_replicate") == [3, 11]
    assert Grid(dp=2, cp=2, pp=2).members(0, "dp_cp") == [0, 1, 4, 5]
