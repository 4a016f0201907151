"""Checkpoints in Megatron-LM's layouts, made from transformers' models: by torch alone, from the layouts' description.

Queries, keys and values: for each group its queries, then its key, then its value. A tensor parallel rank has whole groups, and
the gates of its part of the MLP before its ups. Stages have their layers numbered from 0.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import GPT2LMHeadModel, PreTrainedModel

ROWS = 128
"""Of the padded embedding."""


def args_of(model: PreTrainedModel, **changes: Any) -> argparse.Namespace:
    c = model.config
    shared = {
        "padded_vocab_size": ROWS,
        "make_vocab_size_divisible_by": 128,
        "untie_embeddings_and_output_weights": not c.tie_word_embeddings,
        "params_dtype": torch.float32,
        "rampup_batch_size": None,
        "num_experts": None,
        "attention_backend": Backend(),
    }
    if isinstance(model, GPT2LMHeadModel):
        own = {
            "num_layers": c.n_layer,
            "hidden_size": c.n_embd,
            "ffn_hidden_size": 4 * c.n_embd,
            "num_attention_heads": c.n_head,
            "max_position_embeddings": c.n_positions,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "norm_epsilon": c.layer_norm_epsilon,
            "add_bias_linear": True,
            "bias_gelu_fusion": True,
            "swiglu": False,
        }
    else:
        own = {
            "num_layers": c.num_hidden_layers,
            "hidden_size": c.hidden_size,
            "ffn_hidden_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "group_query_attention": True,
            "num_query_groups": c.num_key_value_heads,
            "kv_channels": width(model),
            "max_position_embeddings": c.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": c.rope_parameters["rope_theta"],
            "normalization": "RMSNorm",
            "norm_epsilon": c.rms_norm_eps,
            "add_bias_linear": False,
            "add_qkv_bias": c.model_type == "qwen2",
            "qk_layernorm": c.model_type == "qwen3",
            "swiglu": True,
        }
    return argparse.Namespace(**{**shared, **own, **changes})


class Backend:
    """Stands for classes of Megatron-LM that nobody here has: pickled as a call of one."""

    def __reduce__(self):
        return _backend, (5,)


def _backend(number: int) -> str:
    return "a class of Megatron-LM"


def width(model: PreTrainedModel) -> int:
    c = model.config
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def rank_tensors(model: PreTrainedModel, tp: int, rank: int) -> dict[str, torch.Tensor]:
    """By megatron.core's names, with the norms fused into the linear layers as Transformer Engine has them; layers counted over
    the model."""
    return (_gpt2 if isinstance(model, GPT2LMHeadModel) else _llama)(model.state_dict(), model, tp, rank)


def _padded(table: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Rubbish in the rows that are padding."""
    rows = torch.full((ROWS, table.shape[1]), 77.0, dtype=table.dtype)
    rows[: len(table)] = table
    return rows.chunk(tp)[rank]


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, tp: int, rank: int) -> torch.Tensor:
    parts = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, 1).chunk(tp)[rank].flatten(0, 1)


def _llama(s: dict[str, torch.Tensor], model: PreTrainedModel, tp: int, rank: int) -> dict[str, torch.Tensor]:
    groups = model.config.num_key_value_heads
    out = {"embedding.word_embeddings.weight": _padded(s["model.embed_tokens.weight"], tp, rank)}
    for i in range(model.config.num_hidden_layers):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        out[ours + "self_attention.linear_qkv.layer_norm_weight"] = s[theirs + "input_layernorm.weight"]
        for kind in ("weight", "bias"):
            if theirs + f"self_attn.q_proj.{kind}" in s:
                qkv = (s[theirs + f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                out[ours + f"self_attention.linear_qkv.{kind}"] = _grouped(*qkv, groups, tp, rank)
        for x in "qk":
            if theirs + f"self_attn.{x}_norm.weight" in s:
                out[ours + f"self_attention.{x}_layernorm.weight"] = s[theirs + f"self_attn.{x}_norm.weight"]
        out[ours + "self_attention.linear_proj.weight"] = s[theirs + "self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        out[ours + "mlp.linear_fc1.layer_norm_weight"] = s[theirs + "post_attention_layernorm.weight"]
        halves = [s[theirs + f"mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up")]
        out[ours + "mlp.linear_fc1.weight"] = torch.cat(halves)
        out[ours + "mlp.linear_fc2.weight"] = s[theirs + "mlp.down_proj.weight"].chunk(tp, 1)[rank]
        out[ours + "mlp.linear_fc1._extra_state"] = None
    out["decoder.final_layernorm.weight"] = s["model.norm.weight"]
    out["output_layer.weight"] = _padded(s["lm_head.weight"], tp, rank)  # of a tied model: the last stage's copy
    return out


def _gpt2(s: dict[str, torch.Tensor], model: PreTrainedModel, tp: int, rank: int) -> dict[str, torch.Tensor]:
    out = {
        "embedding.word_embeddings.weight": _padded(s["transformer.wte.weight"], tp, rank),
        "embedding.position_embeddings.weight": s["transformer.wpe.weight"],
    }
    for i in range(model.config.n_layer):
        theirs, ours = f"transformer.h.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            turn = (lambda x: x.t()) if kind == "weight" else (lambda x: x)
            qkv = turn(s[theirs + f"attn.c_attn.{kind}"]).chunk(3)
            out[ours + f"self_attention.linear_qkv.{kind}"] = _grouped(*qkv, model.config.n_head, tp, rank)
            out[ours + f"mlp.linear_fc1.{kind}"] = turn(s[theirs + f"mlp.c_fc.{kind}"]).chunk(tp)[rank].contiguous()
            out[ours + f"input_layernorm.{kind}"] = s[theirs + f"ln_1.{kind}"]
            out[ours + f"pre_mlp_layernorm.{kind}"] = s[theirs + f"ln_2.{kind}"]
        for name, theirs_too in (("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc2", "mlp.c_proj")):
            out[ours + f"{name}.weight"] = s[theirs + f"{theirs_too}.weight"].t().chunk(tp, 1)[rank]
            out[ours + f"{name}.bias"] = s[theirs + f"{theirs_too}.bias"]
    out |= {f"decoder.final_layernorm.{kind}": s[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    return out


def _old_names(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As before megatron.core: nested dictionaries, a transformer in a language model."""
    pairs = {
        "self_attention.linear_qkv.layer_norm": "input_norm.",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "mlp.linear_fc1.layer_norm_": "post_attention_norm.",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    out: dict[str, Any] = {"language_model": {"embedding": {}, "encoder": {}, "output_layer": {}}}
    for name, tensor in tensors.items():
        if name.startswith("embedding."):
            _, table, kind = name.split(".")
            out["language_model"]["embedding"][table] = {kind: tensor}
        elif name.startswith("decoder."):
            new = name.removeprefix("decoder.")
            for theirs, old in pairs.items():
                new = new.replace(theirs, old)
            out["language_model"]["encoder"][new.replace("input_norm._", "input_norm.")] = tensor
        else:
            out["language_model"]["output_layer"]["weight"] = tensor
    return out


def write_ranks(
    model: PreTrainedModel, folder: Path, tp: int = 1, pp: int = 1, vpp: int = 1, old: bool = False, **changes: Any
) -> Path:
    """The "torch" format; the newest iteration is 10."""
    layers = model.config.num_hidden_layers
    args = args_of(model, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **changes)
    for t in range(tp):
        tensors = rank_tensors(model, tp, t)
        for p in range(pp):
            state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "rng_state": [Backend()]}
            for v in range(vpp):
                of_chunk = _chunk(tensors, range(layers), v * pp + p, pp * vpp)
                state["model" if vpp == 1 else f"model{v}"] = _old_names(of_chunk) if old else of_chunk
            state["optimizer"] = {"state": torch.zeros(5)}
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            (folder / "iter_0000010" / name).mkdir(parents=True)
            torch.save(state, folder / "iter_0000010" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def _chunk(tensors: dict[str, torch.Tensor], layers: range, index: int, count: int) -> dict[str, torch.Tensor]:
    """Of one virtual stage, its layers counted from 0."""
    each = len(layers) // count
    here, out = layers[index * each : (index + 1) * each], {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if int(number) in here:
                out[f"decoder.layers.{int(number) - here[0]}.{rest}"] = tensor
        elif index == 0 if name.startswith("embedding.") else index == count - 1:
            out[name] = tensor
    return out


def write_torch_dist(model: PreTrainedModel, folder: Path, stacked: bool = True, **changes: Any) -> Path:
    """Whole tensors by torch.distributed.checkpoint, as it reads them into any layout; layers in dim 0 of one tensor."""
    here = folder / "iter_0000010"
    here.mkdir(parents=True)
    tensors = {name: t for name, t in rank_tensors(model, 1, 0).items() if t is not None}
    if stacked:
        of_layers: dict[str, list[torch.Tensor]] = {}
        for name in [n for n in tensors if n.startswith("decoder.layers.")]:
            of_layers.setdefault(name.removeprefix("decoder.layers.").split(".", 1)[1], []).append(tensors.pop(name))
        tensors |= {f"decoder.layers.{rest}": torch.stack(parts) for rest, parts in of_layers.items()}
    else:
        for name in [n for n in tensors if n.endswith("linear_fc1.weight")]:
            tensors[f"{name}_w"], tensors[f"{name}_v"] = (half.clone() for half in tensors.pop(name).chunk(2))
    state = {**tensors, "optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(here), no_dist=True)
    torch.save({"args": args_of(model, **changes), "checkpoint_version": 3.0, "iteration": 10}, here / "common.pt")
    (here / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder
