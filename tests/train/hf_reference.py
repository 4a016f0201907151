"""What holds an engine that read a Hugging Face folder to transformers: logits, loss, and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megakit.checkpoint.weights import open_weights
from megakit.config.schema import Config
from megakit.modeling.decoder import MicroBatch
from megakit.parallel.loss import IGNORE
from megakit.parallel.zero import boxes_of
from tests.tiny import batch
from tests.train.parity import assemble, engine, micro_batches

HEADS = [(8, 2), (6, 2), (8, 4), (8, 8), (8, 1)]
"""Shapes at which a wrong permutation of the q and k rows shows: it doesn't at (4, 2), (16, 4), (64, 8)."""


def ours(cfg: Config, path: str):
    """Logits of every position, loss, and gradients of the mean loss as boxes."""
    e = engine(cfg)
    e.initialize(open_weights(path))
    tokens, _ = batch(cfg, 0)
    logits = [e._forward([MicroBatch(tokens[:1].t(), None, 0)]), e.logits(tokens[0], 20)]
    batches = micro_batches(e, 0)
    losses = e.forward_backward(batches)
    grads = boxes_of("grad", {s: s.grad.clone() for s in e.buffers.shards}, owned=False)
    result = e.optimizer.step(0.0, *e._share(losses, batches))
    mean = {n: (s, [(at, t / result.tokens) for at, t in views]) for n, (s, views) in grads.items()}
    return logits[0], logits[1], result.loss, mean


def check(pools, cfg: Config, path: Path, tp: int, pp: int, name_map):
    cfg.parallel.tp, cfg.parallel.pp = tp, pp
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    tokens, labels = batch(cfg, 0)
    expected = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    results = pools(tp * pp).run(ours, cfg, str(path))
    last = [r for r in results if r[0]]
    logits = torch.cat([r[0][0] for r in last], -1)[..., :101]
    torch.testing.assert_close(logits[:, 0], expected[0], rtol=1e-4, atol=1e-4)
    for _, at_20, our_loss, _ in results:
        torch.testing.assert_close(at_20, expected[0, 20], rtol=1e-4, atol=1e-4)
        assert our_loss == pytest.approx(loss.item(), rel=1e-5)
    theirs = {n: p.grad for n, p in model.named_parameters()}
    grads = assemble([r[3] for r in results])
    names = name_map(cfg.model.num_layers)
    if not cfg.model.tie_embeddings:
        names["output.weight"] = [("lm_head.weight", False)]
    for name, parts in names.items():
        whole = torch.cat([t.t() if transposed else t for t, transposed in ((theirs[n], x) for n, x in parts)])
        torch.testing.assert_close(grads.pop(f"grad.{name}"), whole, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert not grads, f"not compared: {set(grads)}"


def llama_names(layers: int):
    names = {"embedding.word.weight": [("model.embed_tokens.weight", False)], "final_norm.weight": [("model.norm.weight", False)]}
    for i in range(layers):
        n = f"model.layers.{i}"
        names |= {
            f"layers.{i}.attention_norm.weight": [(f"{n}.input_layernorm.weight", False)],
            f"layers.{i}.mlp_norm.weight": [(f"{n}.post_attention_layernorm.weight", False)],
            f"layers.{i}.attention.qkv.weight": [(f"{n}.self_attn.{p}_proj.weight", False) for p in "qkv"],
            f"layers.{i}.attention.out.weight": [(f"{n}.self_attn.o_proj.weight", False)],
            f"layers.{i}.mlp.up.weight": [(f"{n}.mlp.{p}_proj.weight", False) for p in ("gate", "up")],
            f"layers.{i}.mlp.down.weight": [(f"{n}.mlp.down_proj.weight", False)],
        }
    return names


def gpt2_names(layers: int):
    names = {
        "embedding.word.weight": [("transformer.wte.weight", False)],
        "embedding.position.weight": [("transformer.wpe.weight", False)],
    }
    pairs = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    linears = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        names[f"final_norm.{kind}"] = [(f"transformer.ln_f.{kind}", False)]
        for i in range(layers):
            for a, b in pairs.items():
                names[f"layers.{i}.{a}.{kind}"] = [(f"transformer.h.{i}.{b}.{kind}", False)]
            for a, b in linears.items():
                names[f"layers.{i}.{a}.{kind}"] = [(f"transformer.h.{i}.{b}.{kind}", kind == "weight")]
    return names
