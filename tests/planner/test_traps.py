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
