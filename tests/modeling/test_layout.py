"""Which layers and parameters a rank holds: CF2's table, in full; every element once; where gradients are partial."""

from __future__ import annotations

import itertools
import math

import pytest

from megakit.errors import Refused
from megakit.modeling.balance import balanced, head_cost, layer_cost
from megakit.modeling.layout import model_stages, padded_vocabulary, parameter_count, rank_stages, split_layers, stage_params
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


def test_virtual_stages_are_cut_evenly_or_as_given_or_by_cost():
    def of(**keys):
        return model_stages(tiny(**{"model__num_layers": 8, "parallel__pp": 2, **keys}))

    chunks = {"parallel__schedule": "interleaved_1f1b", "parallel__virtual_stages": 2}
    assert [list(s.layers) for s in of(**chunks)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(
        Refused,
        match=r"num_layers = 8 can't be cut evenly into .* = 2 x 3 = 6 stages: use .*virtual_stages=4, or .*=cost, or",
    ):
        of(**{**chunks, "parallel__virtual_stages": 3})
    with pytest.raises(Refused, match=r"8 is less than .* = 10: use .*parallel.virtual_stages=4"):
        of(**{**chunks, "parallel__virtual_stages": 5})
    given = of(**{**chunks, "parallel__virtual_stages": 3}, parallel__layers_per_stage=[2, 2, 1, 1, 1, 1])
    assert [len(s.layers) for s in given] == [2, 2, 1, 1, 1, 1]
    v_shape = tiny(model__num_layers=8, parallel__pp=2, parallel__schedule="zb_v", parallel__virtual_stages=2)
    assert [[s.index for s in rank_stages(v_shape, r)] for r in (0, 1)] == [[0, 3], [1, 2]]


def test_stages_balanced_by_cost_give_the_loss_room():
    """A vocabulary that costs as much as three layers takes about three from its stage."""
    m = tiny(model__num_layers=16, model__hidden_size=1024, model__ffn_hidden_size=2816).model
    m.vocab_size = 2 * m.vocab_size
    while head_cost(m) < 3 * layer_cost(m, 2048):
        m.vocab_size += 1000
    layers = balanced(m, 2048, 4)
    assert layers == [5, 5, 5, 1]
    cost = [n * layer_cost(m, 2048) + head_cost(m) * (s == 3) for s, n in enumerate(layers)]
    even = 4 * layer_cost(m, 2048) + head_cost(m)
    assert max(cost) < 0.75 * even
    m.vocab_size = 64  # and where the head costs nothing, the split is even
    assert balanced(m, 2048, 4) == [4, 4, 4, 4]
    with pytest.raises(Refused, match="num_layers = 16 is less than"):
        balanced(m, 2048, 17)


@pytest.mark.parametrize(("schedule", "together"), [("zb_v", True), ("interleaved_1f1b", False)])
def test_tied_embeddings_are_one_parameter_where_the_first_and_the_last_stage_share_a_rank(schedule, together):
    cfg = tiny("gpt2", parallel__pp=2, parallel__schedule=schedule, parallel__virtual_stages=2)
    held = [
        [(rank, spec.uses, spec.late, spec.owner) for name, spec in stage_params(cfg, stage, 1, 0).items() if "word" in name]
        for rank in (0, 1)
        for stage in rank_stages(cfg, rank)
    ]
    if together:
        assert held == [[(0, 2, (), True)], [], [], []]
    else:
        assert held == [[(0, 1, ("embed",), True)], [], [], [(1, 1, ("embed",), False)]]


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


@pytest.mark.parametrize(("tp", "pp", "sp"), GRIDS)
def test_norms_of_heads_are_partial_over_tp_always(tp, pp, sp):
    """Each rank norms its own heads, sequence parallel or not; a width of their own reaches all of attention's shapes."""
    keys = {"model__qk_layernorm": True, "model__kv_channels": 10, "model__add_qkv_bias": True}
    cfg = tiny(parallel__tp=tp, parallel__pp=pp, parallel__sequence_parallel=sp, **keys)
    owned = 0
    for _, rank, params in ranks(cfg, tp, pp):
        owned += sum(math.prod(box.size) for p in params.values() if p.owner for box in p.shard.boxes)
        for name, p in params.items():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                assert p.shard.shape == p.shard.local == (10,) and p.late == (("tp",) if tp > 1 else ())
                assert p.replicated and p.owner == (rank == 0) and p.init == "ones" and not p.decay
            if name.endswith("attention.qkv.bias"):
                assert p.shard.shape == (120,) and p.shard.local == (120 // tp,) and p.late == () and not p.decay
            if name.endswith("attention.out.weight"):
                assert p.shard.shape == (64, 80)
    plain = parameter_count(tiny())
    assert owned == parameter_count(cfg) == plain + 4 * (2 * 10 + 120 + 64 * (120 - 96) + 64 * (80 - 64))


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


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_padded_vocabulary_is_what_all_ranks_hold_of_the_head(tp):
    cfg = tiny()
    (stage,) = split_layers(cfg.model.num_layers, 1)
    held = [stage_params(cfg, stage, tp, rank)["output.weight"].shard for rank in range(tp)]
    assert padded_vocabulary(cfg.model, tp) == sum(shard.local[0] for shard in held) >= cfg.model.vocab_size
