"""A Megatron-LM checkpoint as a source of weights: its model from the arguments of the run, its tensors by our names.

Only the model is taken, no optimizer. What our decoder lacks is refused by the name of the argument.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megakit.checkpoint.lazy import LazyTensor, cat
from megakit.checkpoint.megatron_files import read_megatron
from megakit.checkpoint.weights import WeightsSource
from megakit.config.derived import head_dim
from megakit.config.schema import Config, ModelConfig
from megakit.errors import Refused
from megakit.modeling.layout import model_params
from model_zoo import FAMILIES
from model_zoo.family import check_layers, check_values

_ONLY = {
    "num_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "apply_layernorm_1p": False,
    "qk_l2_norm": False,
    "apply_residual_connection_post_layernorm": False,
    "squared_relu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "no_rope_freq": None,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "window_attn_skip_freq": None,
    "is_hybrid_model": False,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "experimental_attention_variant": None,
    "use_mup": False,
}
"""Arguments whose other values our decoder doesn't have."""
_NAMES = {
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "decoder.layers.N.input_layernorm": "layers.N.attention_norm",
    "decoder.layers.N.self_attention.linear_qkv": "layers.N.attention.qkv",
    "decoder.layers.N.self_attention.q_layernorm": "layers.N.attention.q_norm",
    "decoder.layers.N.self_attention.k_layernorm": "layers.N.attention.k_norm",
    "decoder.layers.N.self_attention.linear_proj": "layers.N.attention.out",
    "decoder.layers.N.pre_mlp_layernorm": "layers.N.mlp_norm",
    "decoder.layers.N.mlp.linear_fc1": "layers.N.mlp.up",
    "decoder.layers.N.mlp.linear_fc2": "layers.N.mlp.down",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "output",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def open_megatron(path: Path, vocab_size: int | None, tokenizer: str | None) -> WeightsSource:
    """The weights of a Megatron-LM checkpoint folder, or of one of its iterations.

    The embedding is padded there: the true vocabulary is `vocab_size`, or that of the file `tokenizer`. Raises Refused if
    neither is given, or naming the argument, tensor or file that doesn't fit.
    """
    found = read_megatron(path)
    merged = {name: _merge([rank[name] for rank in found.ranks], name, _gated(found.args)) for name in found.ranks[0]}
    rows = merged["embedding.word_embeddings.weight"].shape[0] if "embedding.word_embeddings.weight" in merged else 0
    model = model_of(found.args, _vocabulary(found.folder, rows, vocab_size, tokenizer), found.folder)
    check_layers(model, len(merged), f"{found.folder}, by its args,")
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in merged.items():
        ours = _ours(name)
        if ours is None:
            raise Refused(f"{found.folder} has {name}, for which megakit's decoder has no place")
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            tensor = tensor.narrow(0, 0, model.vocab_size)
        tensors[ours] = _ungrouped(tensor, model) if ".linear_qkv." in name else tensor
    if model.tie_embeddings:
        tensors.pop("output.weight", None)  # the last stage's copy
    return WeightsSource("megatron", path, model, _checked(found.folder, tensors, model))


def _checked(folder: Path, tensors: dict[str, LazyTensor], model: ModelConfig) -> dict[str, LazyTensor]:
    """In the order of the forward pass."""
    specs = model_params(Config(model=model))
    for name, spec in specs.items():
        if name not in tensors:
            raise Refused(f"{folder} has nothing for {name}, which its args ask for: fetch it again")
        if tensors[name].shape != spec.shard.shape:
            shapes = f"{list(tensors[name].shape)}, its args make it {list(spec.shard.shape)}"
            raise Refused(f"{folder}: what is {name} here is {shapes}")
    surplus = [name for name in tensors if name not in specs]
    if surplus:
        raise Refused(f"{folder} has {surplus[0]}, which its args don't ask for")
    return {name: tensors[name] for name in specs}


def _merge(parts: list[LazyTensor], name: str, gated: bool) -> LazyTensor:
    """Of all tensor parallel ranks."""
    if ".linear_fc1." in name and gated:  # each rank has its gate, then its up
        half = parts[0].shape[0] // 2
        return cat([part.narrow(0, start, half) for start in (0, half) for part in parts])
    if name.endswith(_BY_ROWS) or ".linear_fc1." in name:
        return cat(parts)
    return cat(parts, 1) if name.endswith(_BY_COLUMNS) else parts[0]


def _ungrouped(qkv: LazyTensor, model: ModelConfig) -> LazyTensor:
    """From the queries, key and value of each group in turn to q | k | v."""
    width, groups = head_dim(model), model.num_query_groups
    queries = model.num_attention_heads // groups * width
    per = queries + 2 * width
    if qkv.shape[0] != groups * per:
        return qkv  # refused by its shape
    cuts = ((0, queries), (queries, width), (queries + width, width))
    return cat([qkv.narrow(0, g * per + start, rows) for start, rows in cuts for g in range(groups)])


def _ours(name: str) -> str | None:
    module, _, kind = name.rpartition(".")
    layer = _NUMBER.search(module)
    ours = _NAMES.get(_NUMBER.sub("N", module))
    return f"{ours.replace('N', layer[0]) if layer else ours}.{kind}" if ours else None


def _vocabulary(folder: Path, rows: int, given: int | None, tokenizer: str | None) -> int:
    if given is None and tokenizer not in (None, "none"):
        from megakit.data.tokenizer import load_tokenizer

        given = load_tokenizer(str(tokenizer)).vocab_size
    if given is None:
        raise Refused(
            f"{folder}: the embedding has {rows} rows, padding among them, and Megatron-LM doesn't store how many are true: give"
            " --vocab-size N, or the tokenizer by --tokenizer FILE"
        )
    if not 0 < given <= rows:
        raise Refused(f"{folder}: the vocabulary is said to be {given}, the embedding has {rows} rows: correct --vocab-size")
    return given


def _gated(args: SimpleNamespace) -> bool:
    return bool(getattr(args, "swiglu", False))


def model_of(args: SimpleNamespace, vocab_size: int, folder: Path) -> ModelConfig:
    """The model of a run's arguments; absent ones have Megatron-LM's defaults of the time before they came.

    Raises Refused naming the argument that our decoder has no counterpart for.
    """

    def get(name: str, default: Any = None) -> Any:
        value = getattr(args, name, None)
        return default if value is None else value

    for name, only in _ONLY.items():
        if get(name, only) not in (only, False if only is None else only):
            raise Refused(f"{folder} was trained with {name} = {get(name)}, megakit's decoder has {only} only")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if type(get(name)) is not int or get(name) < 1:
            raise Refused(f"{folder} has {name} = {get(name)} in its args: it must be a whole number, 1 or more")
    hidden, heads = get("hidden_size"), get("num_attention_heads")
    width = get("kv_channels", hidden // heads)
    model = ModelConfig(
        family="llama",
        num_layers=get("num_layers"),
        hidden_size=hidden,
        ffn_hidden_size=get("ffn_hidden_size", 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=get("num_query_groups", heads) if get("group_query_attention", False) else heads,
        kv_channels=None if width * heads == hidden else width,
        vocab_size=vocab_size,
        max_position_embeddings=get("max_position_embeddings"),
        normalization=_word(folder, "normalization", get("normalization", "LayerNorm"), _NORMS),
        norm_epsilon=get("norm_epsilon", get("layernorm_epsilon", 1e-5)),
        activation=_activation(get),
        position_embedding=_word(folder, "position_embedding_type", _positions(get), _POSITIONS),
        add_bias_linear=get("add_bias_linear", True),
        add_qkv_bias=get("add_qkv_bias", False) and not get("add_bias_linear", True),
        qk_layernorm=get("qk_layernorm", False),
        window_size=_window(get("window_size")),
        tie_embeddings=not get("untie_embeddings_and_output_weights", False),
        hidden_dropout=get("hidden_dropout", 0.1),
        attention_dropout=get("attention_dropout", 0.1),
        init_method_std=get("init_method_std", 0.02),
    )
    if model.position_embedding == "rope":
        model = replace(model, rotary_base=float(get("rotary_base", 10000)), **_scaling(get))
    check_values(model, f"{folder}, by its args,")
    return replace(model, family=_family(model))


_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope"}


def _word(folder: Path, name: str, value: str, known: dict[str, str]) -> str:
    if value not in known:
        raise Refused(f"{folder} was trained with {name} = {value}, megakit's decoder has {', '.join(known)} only")
    return known[value]


def _positions(get: Any) -> str:
    if get("use_rotary_position_embeddings", False):
        return "rope"
    return str(get("position_embedding_type", "learned_absolute"))


def _activation(get: Any) -> str:
    """Megatron's fused kernel of bias and GELU computes the tanh approximation, its plain GELU the exact one."""
    if get("swiglu", False):
        return "swiglu"
    fused = get("bias_gelu_fusion", True) and get("add_bias_linear", True)
    return "gelu_tanh" if fused or get("openai_gelu", False) else "gelu"


def _window(given: Any) -> int | None:
    """Megatron counts the tokens before a token, without itself; -1 is no limit."""
    return None if given is None or given[0] < 0 else given[0] + 1


def _scaling(get: Any) -> dict[str, Any]:
    """--use-rope-scaling is Llama 3.1's, with its constants (megatron/core/models/common/embeddings)."""
    if get("use_rope_scaling", False):
        return {
            "rope_scaling": "llama3",
            "rope_factor": float(get("rope_scaling_factor", 8.0)),
            "rope_original_max_position_embeddings": 8192,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 4.0,
        }
    factor = get("rotary_seq_len_interpolation_factor")
    return {} if factor is None else {"rope_scaling": "linear", "rope_factor": float(factor)}


def _family(model: ModelConfig) -> str:
    """The first family that can state the model in a config.json; a mixture that none can is kept under the nearest one, and
    can't be written for Hugging Face."""
    for name, family in FAMILIES.items():
        try:
            family.tensors(replace(model, family=name))
            family.config_json(replace(model, family=name), "float32", None, None, None)
        except Refused:
            continue
        return name
    return "llama" if model.position_embedding == "rope" else "gpt2"
