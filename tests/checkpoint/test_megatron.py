"""Checkpoints of Megatron-LM: the same logits as the model that they were made of, from any of its layouts."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from megakit.checkpoint.megatron import model_of, open_megatron
from megakit.checkpoint.weights import open_weights
from megakit.errors import Refused
from megakit.inference.compare import by_megakit, compare
from tests.checkpoint import hf_models
from tests.checkpoint.hf_models import convert
from tests.checkpoint.megatron_made import args_of, write_ranks, write_torch_dist
from tests.model_zoo.test_on_transformers import make
from tools.convert_ckpt import main

TOKENS = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(3))


def llama(**options):
    return hf_models.llama(layers=4, **options)[0]


def same_logits(source, model):
    """By our decoder, and by transformers after an export."""
    with torch.no_grad():
        torch.testing.assert_close(by_megakit(source, TOKENS), model(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tp", "pp", "vpp", "old"), [(1, 1, 1, False), (2, 2, 1, False), (2, 2, 2, False), (2, 2, 1, True)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_files_of_ranks(tmp_path, family, tp, pp, vpp, old):
    model = llama() if family == "llama" else hf_models.gpt2(layers=4)[0]
    same_logits(open_megatron(write_ranks(model, tmp_path / "in", tp, pp, vpp, old), 101, None), model)


@pytest.mark.parametrize(("heads", "groups", "tp"), [(8, 2, 2), (6, 2, 2), (8, 4, 4), (8, 8, 2), (8, 1, 1)])
def test_every_shape_of_heads(tmp_path, heads, groups, tp):
    """CV1: a wrong order of the fused rows shows at these."""
    model = llama(heads=heads, kv=groups)
    same_logits(open_megatron(write_ranks(model, tmp_path / "in", tp), 101, None), model)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_torch_dist(tmp_path, stacked, tie):
    """Layers in one tensor, and each by itself with gate and up apart; the iteration's folder and the one above."""
    model = llama(tie=tie)
    write_torch_dist(model, tmp_path / "in", stacked)
    for folder in (tmp_path / "in", tmp_path / "in" / "iter_0000010"):
        same_logits(open_megatron(folder, 101, None), model)


def test_torch_dist_of_gpt2_in_bf16(tmp_path):
    """To Hugging Face without a detour, every byte."""
    model, _ = hf_models.gpt2(dtype=torch.bfloat16)
    source = open_megatron(write_torch_dist(model, tmp_path / "in"), 101, None)
    out = convert(source, "hf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in model.state_dict().items():
        assert hf_models.same_bytes(tensor, again.state_dict()[name]), name


def test_the_command(tmp_path, capsys):
    """Into a folder of weights, compared by the forward pass in Megatron's layout."""
    model = llama()
    write_ranks(model, tmp_path / "in", tp=2, pp=2)
    command = ["--from", "megatron", "--to", "megakit", "--verify", str(tmp_path / "in"), str(tmp_path / "out")]
    assert main(command) == 2
    assert "the embedding has 128 rows, padding among them" in capsys.readouterr().err
    assert main([*command, "--vocab-size", "101"]) == 0
    said = capsys.readouterr().out
    assert "by a forward pass in Megatron's layout" in said and "by megakit; 1 x 32 random tokens" in said
    same_logits(open_weights(tmp_path / "out"), model)
    assert open_weights(tmp_path / "out").manifest["source"]["kind"] == "megatron"
    assert main(["--to", "megakit", "--vocab-size", "200", str(tmp_path / "in"), str(tmp_path / "two")]) == 2
    assert "said to be 200, the embedding has 128 rows" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["rows", "gate", "columns"])
def test_verify_notices_a_wrong_merge(tmp_path, wrong, monkeypatch):
    """The check is no echo of the conversion: queries, keys and values left in their groups, gate and up of each rank left
    together, and ranks in another order."""
    from megakit.checkpoint import megatron
    from megakit.errors import Stop

    model = llama(kv=4)
    folder = write_ranks(model, tmp_path / "in", tp=2)
    compare(open_megatron(folder, 101, None), convert(open_megatron(folder, 101, None), "megakit", tmp_path / "right"))
    if wrong == "rows":
        monkeypatch.setattr(megatron, "_ungrouped", lambda qkv, model: qkv)
    elif wrong == "gate":
        monkeypatch.setattr(megatron, "_gated", lambda args: False)
    else:
        merge = megatron._merge
        turned = lambda parts, name, gated: merge(parts[:: -1 if "fc2" in name else 1], name, gated)  # noqa: E731
        monkeypatch.setattr(megatron, "_merge", turned)
    source = open_megatron(folder, 101, None)
    with pytest.raises(Stop, match="differ: largest difference"):
        compare(source, convert(source, "megakit", tmp_path / "wrong"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 8}, "num_experts = 8"),
        ({"rotary_percent": 0.5}, "rotary_percent = 0.5"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type = alibi"),
        ({"rotary_interleaved": True}, "rotary_interleaved = True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p = True"),
        ({"qk_l2_norm": True}, "qk_l2_norm = True"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value = 7.0"),
        ({"hidden_size": None}, "has hidden_size = None in its args: it must be a whole number"),
        ({"num_query_groups": 3}, "gives model.num_attention_heads = 8, which model.num_query_groups = 3 doesn't divide"),
        ({"norm_epsilon": "1e-5"}, "gives model.norm_epsilon = '1e-5', which is no float"),
        ({"ffn_hidden_size": 180}, r"layers\.0\.mlp\.up\.weight here is \[352, 64\], its args make it \[360, 64\]"),
        ({"add_qkv_bias": True}, r"nothing for layers\.0\.attention\.qkv\.bias"),
        ({"num_layers": 3}, r"has layers\.3\.\S+, which its args don't ask for"),
        ({"tensor_model_parallel_size": 2}, "has the files of 1 ranks, its args say tensor_model_parallel_size = 2"),
    ],
)
def test_what_is_not_ours(tmp_path, changes, said):
    folder = write_ranks(llama(), tmp_path / "in")
    path = folder / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    vars(state["args"]).update(changes)
    torch.save(state, path)
    with pytest.raises(Refused, match=said):
        open_megatron(folder, 101, None)


@pytest.mark.parametrize("what", ["rank", "iteration", "version", "cut", "backend", "common", "index"])
def test_damaged_folders(tmp_path, what):
    dist = what in ("backend", "common", "index")
    folder = (write_torch_dist if dist else write_ranks)(llama(), tmp_path / "in", **({} if dist else {"tp": 2}))
    here = folder / "iter_0000010"
    file = here / "mp_rank_01" / "model_optim_rng.pt"
    if what == "rank":
        shutil.rmtree(here / "mp_rank_00")
    elif what == "iteration":
        (folder / "latest_checkpointed_iteration.txt").write_text("20")
    elif what == "version":
        first = here / "mp_rank_00" / "model_optim_rng.pt"
        torch.save({**torch.load(first, weights_only=False), "checkpoint_version": 1.0}, first)
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif what == "backend":
        (here / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))
    elif what == "common":
        (here / "common.pt").unlink()
    else:
        (here / ".metadata").write_bytes(b"nothing")
    said = {
        "rank": "no model_optim_rng.pt of tensor rank 0, stage 0 of 2 x 1",
        "iteration": "iter_0000020 is not there",
        "version": "has checkpoint_version 1.0",
        "cut": "mp_rank_01/model_optim_rng.pt can't be read",
        "backend": "is stored by fsdp_dtensor: save it with --ckpt-format torch_dist",
        "common": "common.pt is missing",
        "index": ".metadata is no index",
    }
    with pytest.raises(Refused) as caught:
        open_megatron(folder, 101, None)
    assert said[what] in str(caught.value)


def test_arguments(tmp_path):
    """What transformers calls the same."""
    args = args_of(llama(), use_rope_scaling=True, rope_scaling_factor=4.0, window_size=(15, 0), hidden_dropout=0.0)
    model = model_of(args, 101, tmp_path)
    assert (model.rope_scaling, model.rope_factor, model.rope_original_max_position_embeddings) == ("llama3", 4.0, 8192)
    assert model.window_size == 16 and model.hidden_dropout == 0.0 and model.num_query_groups == 2
    exact = argparse.Namespace(**{**vars(args_of(hf_models.gpt2()[0])), "bias_gelu_fusion": False})
    assert model_of(exact, 101, tmp_path).activation == "gelu"
    assert model_of(args_of(hf_models.gpt2()[0]), 101, tmp_path).activation == "gelu_tanh"
    assert model_of(args_of(hf_models.gpt2()[0]), 101, tmp_path).family == "gpt2"
    assert model_of(args_of(llama()), 101, tmp_path).family == "llama"


@pytest.mark.parametrize(("name", "window"), [("qwen2", (10, 0)), ("qwen3", None)])
def test_families(tmp_path, name, window):
    """Biases of queries, keys and values, and a window of 11 tokens; norms of queries and keys, and heads of their own width."""
    model, cfg = make(tmp_path / "hf", name, 8, 2)
    ranks = write_ranks(model, tmp_path / "ranks", tp=2, pp=2, window_size=window)
    for folder in (ranks, write_torch_dist(model, tmp_path / "dist", window_size=window)):
        source = open_megatron(folder, 101, None)
        assert source.model.family == cfg.model.family == name
        same_logits(source, model)
        compare(source, convert(source, "hf", folder / "out"))
