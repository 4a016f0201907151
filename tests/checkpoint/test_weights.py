"""Folders of weights: there and back bit for bit, with the files beside them; what is refused; and nothing half-written."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig

from megakit.checkpoint import convert as conversion
from megakit.checkpoint import manifest as manifests
from megakit.checkpoint import safetensors_files, side_files
from megakit.checkpoint.weights import open_weights
from megakit.errors import Refused, StorageFailed
from megakit.files import sha256_file
from tests.checkpoint import hf_models
from tests.checkpoint.hf_models import convert, files, same_bytes, write

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODELS = {"llama": hf_models.llama, "gpt2": hf_models.gpt2}


def with_tokenizer(folder):
    """A tokenizer.json as transformers saves it, two ends of a text, and a chat template."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "<end>", "<pad>", "a", "b"])}
    library = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}))
    GenerationConfig(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=4, temperature=0.6, do_sample=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(tmp_path, family, dtype):
    """Every byte, in the dtype that it had, in shards, with each file of the tokenizer."""
    model, _ = MODELS[family](dtype=DTYPES[dtype])
    start = with_tokenizer(write(model, tmp_path / "in", "100KB"))
    ours = convert(open_weights(start), "megakit", tmp_path / "ours", max_shard_bytes=100_000)
    assert len(list(ours.glob("*.safetensors"))) > 1
    back = convert(open_weights(ours), "hf", tmp_path / "back", max_shard_bytes=100_000)
    before, after = files(start), files(back)
    assert before.keys() == after.keys()
    assert all(same_bytes(tensor, after[name]) for name, tensor in before.items())
    beside = {p.name for p in start.iterdir()} - {"config.json", *(p.name for p in start.glob("model*"))}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= beside
    assert all((start / name).read_bytes() == (back / name).read_bytes() for name in beside)
    theirs, config = (json.loads((folder / "config.json").read_text()) for folder in (start, back))
    assert config["dtype"] == dtype
    keys = theirs.keys() & config.keys() - {"dtype", "torch_dtype", "n_inner"}  # null: four times n_embd
    assert {key: config[key] for key in keys} == {key: theirs[key] for key in keys}
    assert config["eos_token_id"] == [2, 3] and config["bos_token_id"] == 1 and config["pad_token_id"] == 4
    assert AutoTokenizer.from_pretrained(back)("a b a").input_ids == AutoTokenizer.from_pretrained(start)("a b a").input_ids


def test_mixed_dtypes_stay(tmp_path):
    """Norms in fp32 beside matrices in bf16, as some folders have them."""
    model, _ = hf_models.llama(dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    start = write(model, tmp_path / "in")
    assert {t.dtype for t in files(start).values()} == {torch.float32, torch.bfloat16}
    back = convert(open_weights(convert(open_weights(start), "megakit", tmp_path / "ours")), "hf", tmp_path / "back")
    assert all(same_bytes(tensor, files(back)[name]) for name, tensor in files(start).items())
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_to_another_dtype(tmp_path, stored, dtype):
    """As torch rounds it."""
    model, _ = hf_models.llama(dtype=stored)
    ours = convert(open_weights(write(model, tmp_path / "in")), "megakit", tmp_path / "ours")
    narrow = open_weights(convert(open_weights(ours), "megakit", tmp_path / "narrow", dtype=dtype))
    assert narrow.dtype == dtype and narrow.manifest["dtype"] == conversion.NAMES[dtype]
    head = narrow.tensors["output.weight"].read()
    assert same_bytes(head, model.lm_head.weight.detach().to(dtype))


def test_a_tokenizer_without_a_deciding_file(tmp_path):
    """GPT-2's is vocab.json and merges.txt; templates may stand in a folder of their own."""
    model, _ = hf_models.gpt2()
    start = write(model, tmp_path / "in")
    names = ("vocab.json", "merges.txt", "tokenizer_config.json", "additional_chat_templates/tools.jinja")
    (start / "additional_chat_templates").mkdir()
    for name in names:
        (start / name).write_text(f"{{}} of {name}")
    ours = convert(open_weights(start), "megakit", tmp_path / "ours")
    manifests.verify(ours, deep=True)
    back = convert(open_weights(ours), "hf", tmp_path / "back")
    for folder in (ours, back, convert(open_weights(start), "hf", tmp_path / "straight")):
        assert all((folder / name).read_bytes() == (start / name).read_bytes() for name in names)


@pytest.mark.parametrize(("value", "dtype"), [(7e4, torch.float16), (3.4e38, torch.bfloat16)])
def test_a_number_too_large_for_the_dtype(tmp_path, value, dtype):
    """Refused by its name, never written as infinity; infinities that were there stay."""
    model, _ = hf_models.llama()
    with torch.no_grad():
        model.model.norm.weight[3] = float("inf")
        source = open_weights(write(model, tmp_path / "in"))
        convert(source, "megakit", tmp_path / "same", dtype=dtype)
        model.model.layers[1].mlp.down_proj.weight[5, 7] = value
    source = open_weights(write(model, tmp_path / "large"))
    with pytest.raises(Refused, match=r"layers\.1\.mlp\.down\.weight has (70000|3\.4e\+38) in row 0 or after it"):
        convert(source, "megakit", tmp_path / "out", dtype=dtype)
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]


def weights(tmp_path):
    model, _ = hf_models.llama()
    start = with_tokenizer(write(model, tmp_path / "in"))
    return convert(open_weights(start), "megakit", tmp_path / "ours", max_shard_bytes=100_000)


def test_the_manifest_tells_what_is_there(tmp_path):
    ours = weights(tmp_path)
    manifest = json.loads((ours / "manifest.json").read_text())
    assert manifest["kind"] == "weights" and manifest["dtype"] == "fp32"
    assert manifest["source"] == {"kind": "hf", "path": str(tmp_path / "in"), "step": None}
    assert manifest["parameters"] == sum(t.numel() for t in files(tmp_path / "in").values())
    assert manifest["tokenizer"]["fingerprint"] == sha256_file(tmp_path / "in" / "tokenizer.json")
    assert manifest["files"].keys() == {p.name for p in ours.iterdir()} - {"manifest.json"}
    manifests.verify(ours, deep=True)


@pytest.mark.parametrize("what", ["missing", "short", "changed", "tensor", "manifest"])
def test_damage_is_named(tmp_path, what):
    """Before the new folder is there."""
    ours = weights(tmp_path)
    second = sorted(ours.glob("*.safetensors"))[1]
    data = second.read_bytes()
    if what == "missing":
        second.unlink()
    elif what == "short":
        second.write_bytes(data[:-10])
    elif what == "changed":
        second.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif what == "tensor":
        manifest = json.loads((ours / "manifest.json").read_text())
        manifest["model"]["num_layers"] = 3
        (ours / "manifest.json").write_text(json.dumps(manifest))
    else:
        (ours / "manifest.json").write_text("{")
    said = {
        "missing": f"{second} is missing",
        "short": f"{second} has {len(data) - 10} bytes, the manifest says {len(data)}",
        "changed": f"{second} has checksum",
        "tensor": "has no tensor layers.2.attention_norm.weight",
        "manifest": "manifest.json is not JSON",
    }
    with pytest.raises(manifests.Damaged) as caught:
        convert(open_weights(ours), "hf", tmp_path / "out")
    assert said[what] in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "ours"]


def test_a_disk_that_is_too_small(tmp_path):
    """Before a byte is written, with both sizes."""
    source, usage = open_weights(weights(tmp_path)), shutil.disk_usage(tmp_path)
    with (
        mock.patch.object(shutil, "disk_usage", lambda path: type(usage)(10**12, 10**12, 300_000)),
        mock.patch.object(conversion, "Writer", side_effect=AssertionError("wrote")),
        pytest.raises(StorageFailed, match=r"out needs 0\.4 MB, the disk has 0\.3 MB free: nothing was written") as caught,
    ):
        convert(source, "hf", tmp_path / "out")
    assert caught.value.code == 74 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["write", "sync", "beside", "rename"])
def test_a_write_that_fails(tmp_path, where):
    """Exit code 74, and no trace."""
    source, full = open_weights(weights(tmp_path)), OSError(28, "No space left on device")
    at = {
        "write": (safetensors_files, "write_all"),
        "sync": (safetensors_files, "_sync_and_close"),
        "beside": (side_files.Beside, "write"),
        "rename": (conversion.os, "rename"),
    }[where]
    with mock.patch.object(*at, side_effect=full), pytest.raises(StorageFailed, match="No space left on device; needed 0"):
        convert(source, "hf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "ours"]


def test_what_a_killed_conversion_left(tmp_path):
    """The next one to the same place removes it, unless its process still runs, or ran on another machine."""
    model, _ = hf_models.llama()
    source = open_weights(write(model, tmp_path / "in"))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = platform.node()
    names = [
        f".out.tmp-{here}-{gone.pid}",
        f".out.tmp-{here}-{os.getppid()}",
        ".out.tmp-elsewhere-1",
        f".other.tmp-{here}-{gone.pid}",
    ]
    for name in names:
        (tmp_path / name / "part").mkdir(parents=True)
    convert(source, "megakit", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in", "out", *names[1:]])


def test_what_is_no_folder_of_weights(tmp_path):
    for name, said in (("nowhere", "there is no folder"), (".", "has no weights: give a Hugging Face folder")):
        with pytest.raises(Refused, match=said):
            open_weights(tmp_path / name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(Refused, match=r"is of Megatron-LM: turn it into a folder of weights by tools/convert_ckpt\.py"):
        open_weights(tmp_path)
