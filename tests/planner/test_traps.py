"""Each known trap is told of the run that falls into it, and of no other."""

from __future__ import annotations

import pytest

from megakit.config.compose import compose
from megakit.planner.plan import make_plan

GOOD = ["+recipe=llama7b"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["parallel.pp=8", "parallel.tp=1", "train.global_batch_size=64", "train.micro_batch_size=1"], "of the step idle: use"),
        (["parallel.tp=8"], "tensor parallel communication is"),
        (["parallel.zero=3", "train.global_batch_size=2048"], "gathers the weights in each of"),
        (["parallel.recompute=full"], "parallel.recompute = full takes"),
        (["model.ffn_hidden_size=11000"], "model.ffn_hidden_size / tp = 11000 is no multiple of 64"),
        (["model.vocab_size=32001", "model.make_vocab_size_divisible_by=20000"], "of the vocabulary's rows are padding"),
        (["parallel.pp=4", "train.global_batch_size=16"], "starve"),
        (["parallel.cp=16", "train.global_batch_size=64"], "context parallel communication is"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_a_trap_is_told(keys: list[str], says: str):
    notes = make_plan(compose([*GOOD, *keys])).notes
    assert any(says in note for note in notes), notes
    assert not any(says in note for note in make_plan(compose(GOOD)).notes)


def test_the_cures_of_a_bubble_fill_it():
    keys = ["parallel.pp=8", "train.micro_batch_size=1", "train.global_batch_size=64"]
    plan = make_plan(compose([*GOOD, *keys]))
    (note,) = [n for n in plan.notes if "idle" in n]
    batch = int(note.split("train.global_batch_size >= ")[1].split(",")[0])
    better = make_plan(compose([*GOOD, *keys[:2], f"train.global_batch_size={batch}"])).estimate.step
    assert better.bubble / better.seconds < 0.1


@pytest.mark.parametrize(
    "keys",
    [
        ["+recipe=llama70b", "cluster.nodes=1024"],
        ["+recipe=llama70b", "cluster.nodes=512", "train.micro_batch_size=2"],
        ["+recipe=llama7b", "parallel.pp=4", "parallel.schedule=zb_v", "parallel.virtual_stages=2"],
        ["+recipe=gpt2_124m", "cluster.nodes=4", "parallel.pp=4"],
    ],
    ids=" ".join,
)
def test_each_cure_of_a_bubble_ends_it(keys: list[str]):
    (note,) = [n for n in make_plan(compose(keys)).notes if "idle" in n]
    cures = note.partition(": use ")[2].split(", or ")
    assert cures.pop() == "fewer stages" and cures
    for cure in cures:
        better = make_plan(compose([*keys, *cure.replace(" >= ", "=").split()]))
        assert not any("idle" in n or "starve" in n for n in better.notes), cure


def test_a_rack_on_nvlink_is_no_network():
    rack = ["+recipe=llama7b", "cluster=local", "cluster.name=gb200", "cluster.nodes=18", "cluster.gpus_per_node=4",
            "train.global_batch_size=1152", "parallel.tp=8", "parallel.allow_tp_across_nodes=true"]  # fmt: skip
    plan = make_plan(compose(rack))
    assert plan.links["tp"] == "nvlink" and not any("crosses nodes" in note for note in plan.notes)
    assert any("crosses nodes" in n for n in make_plan(compose([*rack, "cluster.name=h100"])).notes)
