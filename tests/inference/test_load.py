"""A model of each kind of folder, with its tokenizer: what ends a text, what begins a prompt, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megakit.checkpoint.weights import open_weights
from megakit.errors import Refused
from megakit.inference.generator import generate
from megakit.inference.load import load
from megakit.inference.sampling import Sampling
from megakit.parallel.grid import Grid
from tests.checkpoint import hf_models
from tests.data.tokenizer import made
from tests.tools.test_convert_ckpt import checkpoint, trained

ENDS = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
VOCAB = 640
"""More rows than the tokenizer has tokens, as many models do."""


def hugging_face(path: Path, bos: bool = False, **config: object) -> Path:
    """A random Llama and a byte-level tokenizer of 603 tokens; bos: whose post-processor begins texts with it."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            eos_token_id=601,
        )
    )
    hf_models.write(hf_models.randomised(model, torch.float32), path)
    tokenizer = made.byte_level("llama3", specials=ENDS)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{ENDS[0]} $A", special_tokens=[(ENDS[0], 600)])
    return made.folder(path, tokenizer, tokenizer_config={"bos_token": ENDS[0], "eos_token": ENDS[1], **config})


def test_text_is_that_of_transformers(tmp_path):
    """Greedy, in text, with bos; ids that the tokenizer lacks are left out in both."""
    folder = hugging_face(tmp_path, bos=True)
    ours, theirs = load(folder, "cpu"), LlamaForCausalLM.from_pretrained(folder).eval()
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    with torch.no_grad():
        for head in (ours.decoder.stage.head.weight, theirs.lm_head.weight):
            head[VOCAB - 5 :] = -head[:5]
    for text in ("the of and", "in a is that", "x"):
        ids = ours.encode(text)
        assert ids == words(text)["input_ids"]
        expected = theirs.generate(
            torch.tensor([ids]), max_new_tokens=20, do_sample=False, suppress_tokens=list(range(603, VOCAB)), pad_token_id=0
        )[0, len(ids) :].tolist()
        got = [t for (t,) in generate(ours.decoder, [ids], 20, Sampling(0.0), ours.ends, (), ours.known) if t is not None]
        assert ours.known == 603 and got == [t for t in expected if t != 601]


@pytest.mark.parametrize(
    ("asks", "says", "given", "begins"),
    [
        (True, {}, None, True),
        (False, {}, None, False),
        (True, {"add_bos_token": False}, None, False),
        (False, {"add_bos_token": True}, None, True),
        (True, {}, False, False),
        (False, {}, True, True),
    ],
)
def test_what_begins_a_prompt(tmp_path, asks, says, given, begins):
    """tokenizer.json's post-processor, tokenizer_config.json over it, the caller over both."""
    model = load(hugging_face(tmp_path, bos=asks, **says), "cpu", bos=given)
    assert model.prefix == ((600,) if begins else ())
    assert model.encode("the") == [*model.prefix, *model.tokenizer.encode("the")]
    assert model.encode("") == ([600] if begins else [601]), "a prompt without text"


def test_what_ends_a_text(tmp_path):
    folder = hugging_face(tmp_path)
    assert load(folder, "cpu").ends == {601}
    GenerationConfig(eos_token_id=[601, 602]).save_pretrained(folder)
    assert load(folder, "cpu").ends == {601, 602}


def test_a_training_step_and_folders_made_of_it(pools, tmp_path):
    """TP 2, DP 2, flat shards: the same greedy tokens as the weights it was made of, and from its conversions."""
    (hf, cfg), tokenizer = hf_models.llama(), trained(tmp_path)
    step = checkpoint(pools, tmp_path, hf, cfg, Grid(dp=2, tp=2), tokenizer)
    ours = hf_models.convert(open_weights(step), "megakit", tmp_path / "ours")
    exported = hf_models.convert(open_weights(step), "hf", tmp_path / "exported")
    expected = None
    for folder in (step, ours, exported):
        model = load(folder, "cpu")
        assert model.tokenizer.vocab_size == 101 and model.prefix == () and model.ends == {1}
        assert model.decoder.context == 32 and "fp32 on cpu, context 32" in model.description
        ids = model.encode("afk bgl")
        got = list(generate(model.decoder, [ids], 20, Sampling(0.0)))
        expected = expected or [[t] for t in hf.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]]
        assert got == expected
    shutil.move(tokenizer, tmp_path / "elsewhere.model")
    with pytest.raises(Refused, match=r"its tokenizer .*t\.model is not there: give the file by --tokenizer FILE"):
        load(step, "cpu")
    assert load(step, "cpu", tokenizer=tmp_path / "elsewhere.model").tokenizer.vocab_size == 101
    other = trained(tmp_path, add_dummy_prefix=False)
    with pytest.raises(Refused, match=r"the tokenizer .* goes with .*\.\.\.: give the right file"):
        load(step, "cpu", tokenizer=other)


def test_dtypes(tmp_path):
    folder = hugging_face(tmp_path)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = load(folder, "cpu", name)
        assert {p.dtype for p in model.decoder.stage.parameters()} == {dtype}
        assert len(list(generate(model.decoder, [[1, 2, 3], [4]], 3, Sampling(0.0)))) == 3


def test_refusals(tmp_path, monkeypatch):
    folder = hugging_face(tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for keys, words in (
        ({"device": "cuda"}, "device = cuda, and torch sees no GPU here: use cpu"),
        ({"device": "gpu"}, "device = gpu: use cpu or cuda"),
        ({"device": "meta"}, "device = meta: use cpu or cuda"),
        ({"dtype": "fp8"}, "dtype = fp8 is none of fp32, bf16, fp16"),
        ({"tokenizer": tmp_path / "none"}, "its tokenizer .*none is not there"),
    ):
        with pytest.raises(Refused, match=words):
            load(folder, **keys)
    large = made.folder(tmp_path / "large", made.byte_level("qwen", 700))
    with pytest.raises(Refused, match=r"has 703 pieces, the model of .* 640: give the model's own"):
        load(folder, tokenizer=large)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": config["eos_token"], "add_bos_token": True}))
    with pytest.raises(Refused, match="has no bos token to begin prompts with: leave it out by --no-bos"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(Refused, match="it has no tokenizer: give the file by --tokenizer FILE"):
        load(folder)
