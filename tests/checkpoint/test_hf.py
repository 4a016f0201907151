"""Weights from Hugging Face folders and back, against transformers."""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megakit.checkpoint.torch_files import load_lazy
from megakit.checkpoint.weights import open_weights
from megakit.errors import Refused
from megakit.modeling.layout import model_params
from tests.checkpoint import hf_models, layouts
from tests.checkpoint.hf_models import convert, files, same_bytes, source_of, whole, write

SHAPES = [(8, 2), (6, 2), (8, 4), (8, 8), (8, 1)]
"""CV1: the known wrong layouts are invisible at (4, 2), (16, 4) and (64, 8)."""
MODELS = {"llama": hf_models.llama, "gpt2": hf_models.gpt2}


def round_trip(source_folder, out, cfg, dtype, tp=1, shard=10**9):
    """In by the boxes of `tp` ranks, out by transformers' names."""
    source = open_weights(source_folder)
    source.check_model(cfg.model)
    tensors = whole(source, cfg, tp)
    convert(source_of(tensors, cfg, out.with_suffix(".ours")), "hf", out, dtype=dtype, max_shard_bytes=shard)
    return tensors


@pytest.mark.parametrize(("heads", "kv", "tp"), [(h, kv, tp) for h, kv in SHAPES for tp in (1, 2) if kv % tp == 0])
def test_llama_round_trip(tmp_path, heads, kv, tp):
    """CV1: every byte comes back, and fused tensors are q | k | v and gate | up."""
    model, cfg = hf_models.llama(heads, kv, dtype=torch.bfloat16)
    ours = round_trip(write(model, tmp_path / "in"), tmp_path / "out", cfg, torch.bfloat16, tp)
    before, after = files(tmp_path / "in"), files(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert same_bytes(tensor, after[name]), name
    theirs = model.state_dict()
    attention = "model.layers.1.self_attn"
    fused = torch.cat([theirs[f"{attention}.{x}_proj.weight"] for x in "qkv"]).float()
    assert torch.equal(ours["layers.1.attention.qkv.weight"], fused)
    mlp = torch.cat([theirs[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up")]).float()
    assert torch.equal(ours["layers.1.mlp.up.weight"], mlp)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tie", [True, False])
def test_gpt2_round_trip(tmp_path, tie, tp):
    model, cfg = hf_models.gpt2(tie)
    ours = round_trip(write(model, tmp_path / "in"), tmp_path / "out", cfg, torch.float32, tp)
    before, after = files(tmp_path / "in"), files(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert same_bytes(tensor, after[name]), name
    theirs = model.state_dict()
    for layer in range(3):
        for name, hf in (("attention.qkv", "attn.c_attn"), ("attention.out", "attn.c_proj"), ("mlp.down", "mlp.c_proj")):
            assert torch.equal(ours[f"layers.{layer}.{name}.weight"], theirs[f"transformer.h.{layer}.{hf}.weight"].T)
            assert torch.equal(ours[f"layers.{layer}.{name}.bias"], theirs[f"transformer.h.{layer}.{hf}.bias"])


@pytest.mark.parametrize(("family", "tie"), [("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)])
def test_transformers_loads_the_export(tmp_path, family, tie):
    """The same logits, with no weight newly made or left over."""
    model, cfg = MODELS[family](tie=tie)
    round_trip(write(model, tmp_path / "in"), tmp_path / "out", cfg, torch.float32)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(again) is type(model) and again.config.tie_word_embeddings == tie and again.dtype == torch.float32
    ids = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_rope_scaling_goes_both_ways(tmp_path):
    """transformers computes the same from our config.json as from its own."""
    fields = {"rope_factor": 2.0, "rope_original_max_position_embeddings": 16, "rope_beta_fast": 2.0}
    model, cfg = hf_models.llama(rope=dict(hf_models.YARN), rotary_base=10.0, rope_scaling="yarn", **fields)
    round_trip(write(model, tmp_path / "in"), tmp_path / "out", cfg, torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(Refused, match=r"holds another model \(model.rope_scaling: yarn there, none in the recipe"):
        open_weights(tmp_path / "in").check_model(hf_models.llama(rotary_base=10.0)[1].model)


def test_tied(tmp_path):
    """CV4: no lm_head in, none out, and the configuration says so; one that older folders hold anyway does no harm."""
    model, cfg = hf_models.llama(tie=True)
    write(model, tmp_path / "in")
    assert "lm_head.weight" not in files(tmp_path / "in")
    round_trip(tmp_path / "in", tmp_path / "out", cfg, torch.float32)
    assert "lm_head.weight" not in files(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    first, second = whole(open_weights(tmp_path / "in"), cfg, 1), whole(open_weights(tmp_path / "out"), cfg, 1)
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    tensors = files(tmp_path / "in")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "in" / "model.safetensors")
    open_weights(tmp_path / "in")
    other = torch.randn(101, 64) * 0.1
    save_file({**tensors, "lm_head.weight": other}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    assert torch.equal(theirs.lm_head.weight, other)  # transformers doesn't tie it then
    with pytest.raises(Refused, match=r"lm_head\.weight, which is another tensor than the embedding, and .* tie_word_embeddings"):
        open_weights(tmp_path / "in")


def test_untied(tmp_path):
    """CV4: the head is another tensor than the embedding and survives; without it nothing is silently tied."""
    model, cfg = hf_models.llama()
    write(model, tmp_path / "in")
    ours = round_trip(tmp_path / "in", tmp_path / "out", cfg, torch.float32)
    assert not torch.equal(ours["output.weight"], ours["embedding.word.weight"])
    assert torch.equal(files(tmp_path / "out")["lm_head.weight"], model.lm_head.weight)
    tensors = files(tmp_path / "in")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(Refused, match=r"has no tensor lm_head\.weight, .*not tied to the embedding"):
        open_weights(tmp_path / "in")


@pytest.mark.parametrize("tp", [1, 2])
def test_vocabulary_padding_does_not_leak(tmp_path, tp):
    """CV5: 101 rows, whatever the ranks pad to."""
    model, cfg = hf_models.llama()
    assert cfg.model.make_vocab_size_divisible_by == 128
    ours = round_trip(write(model, tmp_path / "in"), tmp_path / "out", cfg, torch.bfloat16, tp)
    assert not any(t.isnan().any() for t in ours.values())
    out = files(tmp_path / "out")
    assert out["lm_head.weight"].shape == out["model.embed_tokens.weight"].shape == (101, 64)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 101


def test_any_box(tmp_path):
    """Boxes that cross the borders of q, k, v and of gate and up, parts of rows, and single elements."""
    dice = random.Random(5)
    for family in ("llama", "gpt2"):
        model, cfg = MODELS[family]()
        source = open_weights(write(model, tmp_path / family))
        for name, tensor in whole(source, cfg, 1).items():
            for _ in range(10):
                start = tuple(dice.randrange(n) for n in tensor.shape)
                size = tuple(dice.randint(0, n - s) for s, n in zip(start, tensor.shape))
                box = source.read(name, start, size)
                assert box.dtype == torch.float32 and box.is_contiguous()
                assert torch.equal(box, tensor[tuple(slice(s, s + n) for s, n in zip(start, size))]), (name, start, size)
    with pytest.raises(ValueError, match="not inside"):
        source.read("final_norm.weight", (1,), (40,))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path, stored):
    model, _ = hf_models.llama(dtype=stored)
    source = open_weights(write(model, tmp_path / "in"))
    assert source.dtype == stored
    assert same_bytes(source.read("output.weight", (0, 0), (101, 64)), model.lm_head.weight.detach())


def test_folders_of_the_bare_model(tmp_path):
    """As the original GPT-2's: names without the prefix, and the causal mask as a buffer."""
    model, cfg = hf_models.gpt2()
    full = whole(open_weights(write(model, tmp_path / "full")), cfg, 1)
    write(model.transformer, tmp_path / "bare")
    path = tmp_path / "bare" / "model.safetensors"
    tensors = {**load_file(path), "h.0.attn.bias": torch.ones(1, 1, 34, 34), "h.1.attn.masked_bias": torch.ones(1)}
    assert "wte.weight" in tensors
    save_file(tensors, path)
    bare = whole(open_weights(tmp_path / "bare"), cfg, 1)
    assert all(torch.equal(full[n], bare[n]) for n in full)


def exported(tmp_path, dtype=torch.bfloat16, limit=100_000):
    model, cfg = hf_models.llama(dtype=dtype)
    round_trip(write(model, tmp_path / "in"), tmp_path / "out", cfg, dtype, shard=limit)
    return tmp_path / "out", cfg


def test_shards(tmp_path):
    """CV6: each tensor in one shard, the index tells the truth, and the dtype is the one that is stated."""
    out, _ = exported(tmp_path)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) >= 3
    assert [p.name for p in shards] == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = files(out)  # fails on a name in two files
    assert tensors.keys() == files(tmp_path / "in").keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in tensors.values())
    for path in shards:
        held = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in held)
        assert sum(t.nbytes for t in held.values()) <= 100_000
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert all(torch.equal(t, files(tmp_path / "in")[n]) for n, t in files(out).items())
    open_weights(out)


def test_a_tensor_larger_than_a_shard(tmp_path):
    out, _ = exported(tmp_path, limit=1)
    assert len(list(out.glob("*.safetensors"))) == len(files(out)) == len(files(tmp_path / "in"))


def test_one_shard_has_no_index(tmp_path):
    out, _ = exported(tmp_path, torch.float32, 10**9)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "float32" and config["bos_token_id"] is None and config["eos_token_id"] is None


def damaged(out, what):
    second = sorted(out.glob("*.safetensors"))[1]
    index = out / "model.safetensors.index.json"
    if what == "missing shard":
        second.unlink()
    if what == "truncated shard":
        os.truncate(second, second.stat().st_size - 10)
    if what == "empty shard":
        second.write_bytes(b"")
    if what == "tensor not where the index says":
        save_file({"other": torch.zeros(1)}, second)
    if what == "tensor in no shard":
        entries = json.loads(index.read_text())
        last = out / entries["weight_map"].pop("model.norm.weight")
        held = load_file(last)
        del held["model.norm.weight"]
        save_file(held, last)
        index.write_text(json.dumps(entries))
    if what in ("wrong shape", "wrong dtype", "surplus"):
        entries = json.loads(index.read_text())
        path = out / entries["weight_map"]["model.embed_tokens.weight"]
        held = load_file(path)
        if what == "surplus":
            held["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        else:
            rows, dtype = (103, torch.bfloat16) if what == "wrong shape" else (101, torch.int8)
            held["model.embed_tokens.weight"] = torch.zeros(rows, 64, dtype=dtype)
        save_file(held, path)
    if what == "overlap":
        raw = second.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        first, last = sorted(name for name in entries if "mlp.gate_proj" in name or "mlp.up_proj" in name)[:2]
        entries[first]["data_offsets"] = entries[last]["data_offsets"]
        text = json.dumps(entries).encode()
        second.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    if what == "index of numbers":
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": 1, "lm_head.weight": "x"}}))
    if what == "no index":
        index.unlink()
    if what == "broken index":
        index.write_text(index.read_text()[:-20])
    if what == "ids of words":
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, "</s>"]}))
    if what == "no config":
        (out / "config.json").unlink()
    return second.name


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing shard", "{second} is missing, and model.safetensors.index.json lists it"),
        ("truncated shard", "{second} can't be read"),
        ("empty shard", "{second} can't be read"),
        ("tensor not where the index says", "is in {second}, which doesn't have it"),
        ("tensor in no shard", "has no tensor model.norm.weight"),
        ("wrong shape", "model.embed_tokens.weight is [103, 64], config.json makes it [101, 64]"),
        ("wrong dtype", "model.embed_tokens.weight has dtype I8"),
        ("surplus", "has model.layers.0.self_attn.q_proj.bias, for which a LlamaForCausalLM has no place"),
        ("overlap", "{second} can't be read as safetensors (model.layers."),
        ("index of numbers", "has no weight_map of tensors to files"),
        ("no index", "has neither model.safetensors nor model.safetensors.index.json"),
        ("broken index", "model.safetensors.index.json is not JSON"),
        ("ids of words", "config.json has eos_token_id = [2, '</s>']: it must be a whole number"),
        ("no config", "config.json can't be read: No such file"),
    ],
)
def test_damaged_folders(tmp_path, what, said):
    """CV6: found before anything is read or trained, by name."""
    out, _ = exported(tmp_path)
    open_weights(out)
    second = damaged(out, what)
    with pytest.raises(Refused) as caught:
        open_weights(out)
    assert said.format(second=second) in str(caught.value) and "\n" not in str(caught.value)


def test_another_model_than_the_recipe(tmp_path):
    model, cfg = hf_models.llama()
    write(model, tmp_path / "in")
    cfg.model.num_layers, cfg.model.rotary_base, cfg.model.hidden_dropout = 3, 1e4, 0.1
    with pytest.raises(Refused) as caught:
        open_weights(tmp_path / "in").check_model(cfg.model)
    said = str(caught.value)
    assert "(model.num_layers: 2 there, 3 in the recipe, model.rotary_base: 500000.0 there, 10000.0 in the recipe)" in said
    with pytest.raises(Refused, match=r"model.family: llama there, gpt2 in the recipe"):
        open_weights(tmp_path / "in").check_model(layouts.gpt2().model)
    with pytest.raises(Refused, match="there is no folder"):
        open_weights(tmp_path / "nowhere")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(Refused, match="model_type = mamba, megakit reads llama, mistral, qwen2, qwen3 and gpt2"):
        open_weights(tmp_path / "in")


def test_pickled_folders(tmp_path):
    """The same bytes as from safetensors. What a pickle would run stays unrun."""
    model, _ = hf_models.llama(dtype=torch.bfloat16)
    write(model, tmp_path / "in")
    state = model.state_dict()
    shutil.copytree(tmp_path / "in", tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    ours, theirs = open_weights(tmp_path / "old").tensors, open_weights(tmp_path / "in").tensors
    assert ours.keys() == theirs.keys() and all(same_bytes(ours[n].read(), theirs[n].read()) for n in ours)
    first, second = dict(list(state.items())[:5]), dict(list(state.items())[5:])
    (tmp_path / "old" / "pytorch_model.bin").unlink()
    for name, part in (("a.bin", first), ("b.bin", second)):
        torch.save(part, tmp_path / "old" / name)
    where = {"weight_map": {**dict.fromkeys(first, "a.bin"), **dict.fromkeys(second, "b.bin")}}
    (tmp_path / "old" / "pytorch_model.bin.index.json").write_text(json.dumps(where))
    sharded = open_weights(tmp_path / "old").tensors
    assert all(same_bytes(sharded[n].read(), theirs[n].read()) for n in ours)
    (tmp_path / "old" / "pytorch_model.bin.index.json").unlink()
    torch.save({**state, "model.norm.weight": Runs(tmp_path / "ran")}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(Refused, match=r"pytorch_model\.bin: model\.norm\.weight is no tensor"):
        open_weights(tmp_path / "old")
    assert not (tmp_path / "ran").exists()
    torch.save({**state, "lm_head.weight": torch.ones(64).expand(101, 64)}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(Refused, match=r"lm_head\.weight is stored with odd strides"):
        open_weights(tmp_path / "old")


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'a'\ntR(S'b'\ntR.",  # calls what is no function here
        b"\x82\x01.",  # an extension that nobody registered
        b"(lK\x01K\x02s.",  # an item of an empty list
        b"garbage",
    ],
)
def test_broken_pickles(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", content)
    with pytest.raises(Refused, match=r"x\.bin can't be read as a file of torch\.save"):
        load_lazy(tmp_path / "x.bin")


def test_a_storage_that_is_cut_short(tmp_path):
    """Nothing is read of the storage behind it."""
    torch.save({"a": torch.zeros(400), "b": torch.ones(400)}, tmp_path / "whole.bin")
    with zipfile.ZipFile(tmp_path / "whole.bin") as whole, zipfile.ZipFile(tmp_path / "cut.bin", "w") as cut:
        for name in whole.namelist():
            cut.writestr(name, whole.read(name)[: 100 if name.endswith("data/0") else None])
    with pytest.raises(Refused, match=r"a tensor \[400\] ends at byte 1600 of a storage of 100"):
        load_lazy(tmp_path / "cut.bin")


class Runs:
    """Pickled as a call that makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_nothing_is_half_written(tmp_path):
    """Neither over an existing folder, nor when the weights end in the middle, nor of a model that can't be stated."""
    cfg = layouts.llama()
    tensors = {name: layouts.full(name, p.shard.shape) for name, p in model_params(cfg).items()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    source = source_of(tensors, cfg, tmp_path / "ours")
    with pytest.raises(Refused, match="is there already"):
        convert(source, "hf", tmp_path / "mine")
    other = layouts.llama(normalization="layernorm")
    with pytest.raises(Refused, match=r"no LlamaForCausalLM \(model\.normalization = layernorm, .* means rmsnorm\)"):
        convert(source_of(tensors, other, tmp_path / "other"), "hf", tmp_path / "out")
    os.truncate(tmp_path / "ours", 300_000)
    with pytest.raises(Refused, match=r"ours ends in the middle of a tensor"):
        convert(source, "hf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "other", "ours"]
