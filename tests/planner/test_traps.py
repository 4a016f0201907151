"""Each known trap is told of the run that falls into it, and of no other."""

from __future__ import annotations

import re

import pytest

from megakit.config.compose import compose
from megakit.planner.plan import make_plan

GOOD = ["+recipe=llama7b"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["parallel.pp=8", "parallel.tp=1", "train.global_batch_size=64", "train.micro_batch_size=1"],
         "16 micro-batches on 8 stages leave "),
        (["parallel.tp=8"], "% of the step, parallel.tp = 8: use parallel.tp=1 ("),
        (["parallel.tp=16", "parallel.allow_tp_across_nodes=true"],
         "parallel.tp = 16 crosses nodes of 8 GPUs, its traffic takes the network: tensor parallel communication is"),
        (["parallel.zero=3", "train.global_batch_size=2048"],
         "gathers the weights in each of 64 micro-batches, accumulation doesn't make its traffic less: use "),
        (["parallel.recompute=full"], "of the step: use parallel.recompute=none ("),
        (["parallel.cp=16", "train.global_batch_size=64"], "% of the step: use parallel.cp="),
        (["parallel.zero=3", "parallel.zero_group=32", "cluster.network_gb_s=3"],
         "of the step: use parallel.zero_group=8, which shards inside a node, or train.global_batch_size=2048 or more"),
        (["cluster.name=a100_80g", "train.precision=fp8"],
         "has no tensor cores for it, a run is refused: use train.precision=bf16"),
        (["cluster.name=v100"], "train.precision = bf16: a V100 SXM2 32 GB has no tensor cores for it: use train.precision=fp16"),
        (["cluster.nodes=128"],
         "% of the step: use parallel.bucket_size=1024000000 ("),
        (["parallel.pp=4", "train.global_batch_size=16"], "2 micro-batches starve 4 pipeline stages: use"),
        (["model.ffn_hidden_size=11000"],
         "model.ffn_hidden_size = 11000 is no multiple of 64, its matrix products leave tensor cores idle: use"
         " model.ffn_hidden_size=10944 or 11008"),
        (["model.ffn_hidden_size=11000", "parallel.tp=2"],
         "model.ffn_hidden_size = 11000 / parallel.tp 2 = 5500 is no multiple of 64, its matrix products leave tensor cores idle:"
         " use model.ffn_hidden_size=10880 or 11008"),
        (["model.hidden_size=4000", "model.num_attention_heads=20", "model.num_query_groups=20"],
         "model.hidden_size = 4000 is no multiple of 64, its matrix products leave tensor cores idle: use"
         " model.hidden_size=3840 or 4160"),
        (["model.hidden_size=3840", "model.num_attention_heads=64", "model.num_query_groups=1"],
         "a head is 60 wide, no multiple of 8: fused attention doesn't take it, or pads it: use a width of 56 or 64, as"
         " model.num_attention_heads=60 has"),
        (["model.vocab_size=32001", "model.make_vocab_size_divisible_by=20000"],
         "20% of the vocabulary's rows are padding (model.vocab_size = 32001, parallel.tp = 1,"
         " model.make_vocab_size_divisible_by = 20000): use model.make_vocab_size_divisible_by=128"),
        (["model.vocab_size=50257", "model.make_vocab_size_divisible_by=1"],
         "vocabulary rows / tp = 50257 are no multiple of 64 with model.make_vocab_size_divisible_by = 1, its matrix products"
         " leave tensor cores idle: use model.make_vocab_size_divisible_by=128"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)  # fmt: skip
def test_a_trap_is_told(keys: list[str], says: str):
    notes = make_plan(compose([*GOOD, *keys])).notes
    assert any(says in note for note in notes), notes
    assert not any(says in note for note in make_plan(compose(GOOD)).notes)


@pytest.mark.parametrize(
    "keys",
    [
        ["+recipe=llama7b", "parallel.tp=8"],
        ["+recipe=llama7b", "parallel.tp=16", "parallel.allow_tp_across_nodes=true"],
        ["+recipe=llama7b", "parallel.recompute=full", "parallel.dp=16"],
        ["+recipe=llama70b", "parallel.recompute=full"],
        ["+recipe=llama7b", "parallel.cp=8"],
        ["+recipe=llama7b", "parallel.zero=3"],
    ],
    ids=" ".join,
)
def test_a_faster_grid_is_as_fast_as_told_and_fits(keys: list[str]):
    before = make_plan(compose(keys))
    (note,) = [n for n in before.notes if "faster)" in n]
    cure, gain = re.search(r": use ([^()]*) \((\d+)% faster\)", note).groups()
    after = make_plan(compose([*keys, *cure.split()]))
    assert after.world == before.world and not any("a GPU has" in n for n in after.notes)
    assert before.estimate.step.seconds / after.estimate.step.seconds - 1 == pytest.approx(int(gain) / 100, abs=0.0051)
    assert not any("faster)" in n and n.split(" is ")[0] == note.split(" is ")[0] for n in after.notes), after.notes


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
    assert cures
    before = make_plan(compose(keys)).estimate.step.seconds
    for cure in cures:
        cure, faster, _ = cure.partition(" (")
        better = make_plan(compose([*keys, *cure.replace(" >= ", "=").split()]))
        assert bool(faster) == ("parallel.pp=" in cure)
        if faster:
            assert better.estimate.step.seconds < before
        else:
            assert not any("idle" in n or "starve" in n for n in better.notes), cure


def test_a_rack_on_nvlink_is_no_network():
    rack = ["+recipe=llama7b", "cluster=local", "cluster.name=gb200", "cluster.nodes=18", "cluster.gpus_per_node=4",
            "train.global_batch_size=1152", "parallel.tp=8", "parallel.allow_tp_across_nodes=true"]  # fmt: skip
    plan = make_plan(compose(rack))
    assert plan.links["tp"] == "nvlink" and not any("crosses nodes" in note for note in plan.notes)
    assert any("crosses nodes" in n for n in make_plan(compose([*rack, "cluster.name=h100"])).notes)
