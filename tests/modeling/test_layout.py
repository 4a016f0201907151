"""Which layers and parameters a rank holds: CF2's table, in full; every element once; where gradients are partial."""

from __future__ import annotations

import itertools
import math

import pytest

from megakit.errors import Refused
from megakit.modeling.layout import parameter_count, split_layers, stage_params
from tests.tiny import tiny


@pytest.mark.parametrize(("layers", "stages"), list(itertools.product(range(1, 13), range(1, 5))))
def test_the_stages_hold_each_layer_once_and_in_order_or_the_split_is_refused(layers, stages):
    if layers < stages:
        with pytest.raises(Refused, match=rf"num_layers = {layers} is less than .* = {stages}: use at most {layers} stages$"):
            split_layers(layers, stages)
        return
    split = split_layers(layers, stages)
    assert [i for stage in split for i in stage.layers] == list(range(layers))
    sizes = [len(stage.layers) for stage in split]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1
    assert [stage.first for stage in split] == [True] + [False] * (stages - 1)
    assert [stage.last for stage in split] == [False] * (stages - 1) + [True]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(5, 2, [3, 2]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (9, 4, [2, 3, 2, 2]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2])],
)
def test_the_remainder_goes_to_the_middle_stages_first(layers, stages, sizes):
    assert [len(stage.layers) for stage in split_layers(layers, stages)] == sizes


def test_a_given_split_is_followed_or_refused():
    assert [stage.layers for stage in split_layers(8, 4, [1, 2, 2, 3])] == [range(1), range(1, 3), range(3, 5), range(5, 8)]
    with pytest.raises(Refused, match=r"has 2 entries, parallel.pp x parallel.virtual_stages = 3"):
        split_layers(8, 3, [4, 4])
    for given in ([4, 3], [5, 4], [8, 0], [9, -1]):
        with pytest.raises(Refused, match=rf"= \[{given[0]}, {given[1]}\] adds up to {sum(given)}, model.num_layers = 8"):
            split_layers(8, 2, given)


GRIDS = [(tp, pp, sp) for tp, pp, sp in itertools.product((1, 2), (1, 2, 4), (False, True)) if tp > 1 or not sp]


def ranks(cfg, tp, pp):
    for stage in split_layers(cfg.model.num_layers, pp):
        for tp_rank in range(tp):
            yield stage, tp_rank, stage_params(cfg, stage, tp, tp_rank)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("tp", "pp", "sp"), GRIDS)
def test_every_element_has_one_owner(family, tp, pp, sp):
    cfg = tiny(family, parallel__tp=tp, parallel__pp=pp, parallel__sequence_parallel=sp)
    owned = 0
    for _, _, params in ranks(cfg, tp, pp):
        owned += sum(math.prod(box.size) for p in params.values() if p.owner for box in p.shard.boxes)
    assert owned == parameter_count(cfg)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("tp", "pp", "sp"), GRIDS)
def test_gradients_are_partial_where_activations_are_sharded_and_where_weights_are_tied(family, tp, pp, sp):
    cfg = tiny(family, parallel__tp=tp, parallel__pp=pp, parallel__sequence_parallel=sp)
    for stage, _, params in ranks(cfg, tp, pp):
        for name, p in params.items():
            replicated = p.shard.local == p.shard.shape and "word" not in name and name != "output.weight"
            expected = ("tp",) if sp and replicated else ()
            if name == "embedding.word.weight" and cfg.model.tie_embeddings and pp > 1:
                expected = ("embed",)
            assert p.late == expected, name
            tied_here = cfg.model.tie_embeddings and name == "embedding.word.weight" and pp == 1
            assert p.uses == 1 + tied_here, name
            assert p.decay == ("norm" not in name and not name.endswith("bias")), name
        assert ("embedding.word.weight" in params) == (stage.first or (stage.last and cfg.model.tie_embeddings))
        assert ("output.weight" in params) == (stage.last and not cfg.model.tie_embeddings)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_initial_values(family):
    """Of a matrix init_method_std, of a sub-layer's output projection std / sqrt(2 L), norms 1, biases 0."""
    cfg = tiny(family, model__init_method_std=0.02)
    ((_, _, params),) = ranks(cfg, 1, 1)
    for name, p in params.items():
        if name.endswith("bias"):
            assert p.init == "zeros", name
        elif "norm" in name:
            assert p.init == "ones", name
        else:
            deep = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert p.init == pytest.approx(0.02 / math.sqrt(2 * 4) if deep else 0.02), name


def test_published_parameter_counts():
    llama = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_attention_heads": 32,
        "num_query_groups": 32,
        "ffn_hidden_size": 11008,
    }
    assert parameter_count(tiny("llama", **{f"model__{k}": v for k, v in llama.items()})) == 6_738_415_616
    gpt2 = {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_layers": 12,
        "num_attention_heads": 12,
        "num_query_groups": 12,
        "ffn_hidden_size": 3072,
        "max_position_embeddings": 1024,
    }
    assert parameter_count(tiny("gpt2", **{f"model__{k}": v for k, v in gpt2.items()})) == 124_439_808
