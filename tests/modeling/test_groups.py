"""Parameter groups: patterns of names, what muon takes, and patterns that fit nothing."""

from __future__ import annotations

import pytest

from megakit.errors import Refused
from megakit.modeling.groups import check_patterns
from megakit.modeling.layout import model_params
from megakit.planner.plan import make_plan
from tests.config.tiny import tiny

LEARNED = ["model.position_embedding=learned", "model.rotary_base=1e4"]


def groups(*overrides: str):
    return {name: spec.group for name, spec in model_params(tiny(*overrides)).items()}


def test_muon_takes_the_matrices_between_embedding_and_head():
    found = groups("optim.name=muon", *LEARNED, "model.add_bias_linear=true", "model.num_layers=1")
    assert [n for n, g in found.items() if g.algorithm == "muon"] == [
        f"layers.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    assert {g.algorithm for g in found.values()} == {"muon", "adamw"}
    assert {g.algorithm for g in groups("optim.name=sgd").values()} == {"sgd"}


def test_the_last_pattern_that_fits_holds():
    found = groups("optim.lr_mult={layers.*: 0.5, layers.2.*: 3, *norm*: 4}", "optim.wd_mult={*: 0.5, output.*: 0}")
    assert found["layers.0.mlp.up.weight"] == ("adamw", 0.5, 0.5)
    assert found["layers.2.mlp.up.weight"] == ("adamw", 3.0, 0.5)
    assert found["layers.2.mlp_norm.weight"] == ("adamw", 4.0, 0.0), "a norm has no weight decay"
    assert found["output.weight"] == ("adamw", 1.0, 0.0)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lr_mult={layer.*: 0.5}", ["optim.lr_mult: layer.* fits no parameter", "did you mean layers."]),
        ("optim.lr_mult={layers.4.*: 0.5}", ["layers.4.*"]),
        ("optim.lr_mult={embeding.word.weight: 2}", ["did you mean embedding.word.weight"]),
        ("optim.wd_mult={layers.9.*: 0}", ["optim.wd_mult: layers.9.*"]),
        (
            "optim.lr_mult={layers.0.*: 0.5, layers.*: 2}",
            ["optim.lr_mult: layers.0.* changes nothing", "(layers.* has layers.0."],
        ),
        ("optim.wd_mult={layers.0.*: 0.5, layers.*.weight: 2}", ["optim.wd_mult: layers.0.* changes nothing"]),
        ("optim.wd_mult={*norm*: 2}", ["optim.wd_mult: *norm* fits only norms and biases", "layers.0.attention_norm.weight"]),
    ],
)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_pattern_that_changes_nothing_is_refused_before_anything_starts(override, says, pp):
    with pytest.raises(Refused) as caught:
        make_plan(tiny(override, f"parallel.pp={pp}"))
    assert [s for s in says if s not in str(caught.value)] == [], caught.value


def test_a_pattern_of_another_stage_is_fine():
    cfg = tiny("optim.lr_mult={output.*: 0.5, embedding.*: 0.1}", "parallel.pp=2")
    check_patterns(cfg.optim, model_params(cfg).values())
