"""What a model family is: its Hugging Face configuration both ways, and a map of tensor names. Data, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from megakit.config.derived import head_dim
from megakit.config.keys import MISSING
from megakit.config.ranges import RANGES
from megakit.config.schema import Config, ModelConfig
from megakit.errors import Refused
from megakit.modeling.layout import split_layers, stage_params

NO_BEARING = frozenset({"make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout", "init_method_std"})
"""Fields of the model that change neither the shapes of the weights nor what they mean."""


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "Optional[int]": (int, type(None)),
    "Optional[float]": (int, float, type(None)),
}


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict,)),
    **dict.fromkeys(("hidden_act", "activation_function"), (str,)),
    **dict.fromkeys(("rope_theta", "max_window_layers", "n_embd"), (int, float)),
    "layer_types": (list,),
}
"""Of keys of config.json that more is done with than to copy them; each may be null."""
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 1.0),
    **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv")),
    **dict.fromkeys(("attention_sinks", "use_qk_norm", "no_rope_layers", "rope_interleaved", "use_mrope"), False),
    **dict.fromkeys(("num_experts", "num_local_experts"), 0),
}
"""Keys of other families that change the logits where they have other values: a config.json that borrows one is of a model that
our decoder isn't."""


class Part(NamedTuple):
    """A Hugging Face tensor that makes a range of rows of one of ours."""

    name: str
    start: int
    """First row in our tensor."""
    rows: int
    transposed: bool
    """Stored as [in, out]."""

    def hf_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor, for our whole tensor's shape."""
        return (*ours[1:], self.rows) if self.transposed else (self.rows, *ours[1:])


class Mapped(NamedTuple):
    """One of our global tensors and the parts that it is made of, in order of rows."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    """model.family, and Hugging Face's model_type."""
    architecture: str
    """Hugging Face's class."""
    prefix: str
    """Before each name but the output head's; folders saved from the bare model lack it."""
    modules: dict[str, tuple[str, ...]]
    """Our module -> Hugging Face's modules, stacked by rows; N stands for the layer."""
    transposed: frozenset[str]
    """Our modules whose weight Hugging Face stores as [in, out]."""
    ignored: tuple[str, ...]
    """Patterns of tensors that carry nothing: buffers that old folders hold."""
    read_config: Callable[[dict[str, Any]], ModelConfig] = field(repr=False)
    """From the content of config.json, unchecked types; use `from_hf`."""
    write_config: Callable[[ModelConfig], dict[str, Any]] = field(repr=False)
    """To the content of config.json, without what `config_json` adds."""

    def from_hf(self, config: dict[str, Any]) -> ModelConfig:
        """The model that a config.json describes. Raises Refused naming what our decoder doesn't have, or a value that
        is missing, of the wrong type or out of range."""
        if config.get("model_type") != self.name:
            raise Refused(f"config.json has model_type = {config.get('model_type')}, model.family is {self.name}")
        for key, types in _JSON_TYPES.items():
            if config.get(key) is not None and not isinstance(config[key], types):
                raise Refused(f"config.json has {key} = {config[key]!r}, which is no {types[-1].__name__}")
        need(config, _NEUTRAL, self.architecture)
        model = self.read_config(config)
        check_values(model, "config.json")
        every = "full_attention" if model.window_size is None else "sliding_attention"
        if others := [kind for kind in config.get("layer_types") or () if kind != every]:
            raise Refused(
                f"config.json has {others[0]} in layer_types, its other keys give {every} to every layer of a"
                f" {self.architecture}: megakit's has one kind of layers"
            )
        return model

    def tensors(self, model: ModelConfig) -> dict[str, Mapped]:
        """Every global tensor of the model and what it is called in Hugging Face files."""
        (stage,) = split_layers(model.num_layers, 1)
        params = stage_params(Config(model=model), stage, 1, 0)
        return {name: self._mapped(model, name, p.shard.shape) for name, p in params.items()}

    def _mapped(self, model: ModelConfig, name: str, shape: tuple[int, ...]) -> Mapped:
        module, _, kind = name.rpartition(".")
        layer = re.search(r"\d+", module)
        generic = re.sub(r"\d+", "N", module)
        if generic not in self.modules:
            raise Refused(f"{self.architecture} has nothing for {name} (model.family = {self.name})")
        theirs = self.modules[generic]
        rows = _split_rows(model, generic, shape[0], len(theirs))
        transposed = kind == "weight" and generic in self.transposed
        parts, at = [], 0
        for their, n in zip(theirs, rows, strict=True):
            full = their.replace("N", layer[0]) if layer else their
            parts.append(Part(f"{full}.{kind}", at, n, transposed))
            at += n
        return Mapped(shape, tuple(parts))

    def config_json(
        self, model: ModelConfig, dtype: str, bos: int | None, eos: int | list[int] | None, pad: int | None
    ) -> dict[str, Any]:
        """The content of config.json; `dtype` as torch names it. `eos` may be several ids, each of which ends a text. Ids that
        the tokenizer lacks are null, for transformers' defaults are those of other tokenizers.

        Raises Refused listing the fields of the model that the family can't state.
        """
        config = self.write_config(model)
        lost = differences(vars(self.read_config(config)), model)
        if lost:
            listed = ", ".join(f"model.{name} = {ours}, {self.architecture} means {theirs}" for name, theirs, ours in lost)
            raise Refused(f"the model is no {self.architecture} ({listed}): change model.family or these fields")
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            **config,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": dtype,
            "dtype": dtype,  # its name since transformers 5
        }


def _split_rows(model: ModelConfig, module: str, rows: int, parts: int) -> list[int]:
    if module.endswith("attention.qkv") and parts == 3:
        kv = model.num_query_groups * head_dim(model)
        return [rows - 2 * kv, kv, kv]
    return [rows // parts] * parts


def differences(theirs: dict[str, Any], model: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(field, in `theirs`, in `model`) of each model field that differs and matters to the shapes or the meaning of
    the weights. A rotary model has no table of positions: its max_position_embeddings doesn't. A field that `theirs`
    lacks, since it is of an older version, had its default's meaning. kv_channels counts as what it comes to."""
    out = []
    for f in fields(ModelConfig):
        unused = f.name == "max_position_embeddings" and model.position_embedding == "rope"
        their = theirs.get(f.name, f.default)
        if f.name in NO_BEARING or unused or their == MISSING:
            continue
        ours = getattr(model, f.name)
        if f.name == "kv_channels" and (their is None or ours is None) and _width(theirs) == head_dim(model):
            continue
        numbers = isinstance(ours, float) and their is not None
        if not (math.isclose(their, ours, rel_tol=1e-9) if numbers else their == ours):
            out.append((f.name, their, ours))
    return out


def _width(theirs: dict[str, Any]) -> int:
    """Of a head."""
    return theirs.get("kv_channels") or theirs["hidden_size"] // theirs["num_attention_heads"]


def check_values(model: ModelConfig, where: str) -> None:
    """Raises Refused for a value of the wrong type or out of the range that a recipe's has; `where` says whose it is."""
    for f in fields(model):
        value = getattr(model, f.name)
        allowed = RANGES.get(f"model.{f.name}")
        if not isinstance(value, _TYPES[str(f.type)]) or (isinstance(value, bool) and f.type != "bool"):
            raise Refused(f"{where} gives model.{f.name} = {value!r}, which is no {f.type}")
        if isinstance(value, (int, float)) and not math.isfinite(value):
            raise Refused(f"{where} gives model.{f.name} = {value}, which is no number")
        if allowed is not None and isinstance(value, (int, float)) and value not in allowed:
            raise Refused(f"{where} gives model.{f.name} = {value}: it must be {allowed.bound(value)}")
    if model.num_attention_heads % model.num_query_groups:
        raise Refused(
            f"{where} gives model.num_attention_heads = {model.num_attention_heads}, which model.num_query_groups ="
            f" {model.num_query_groups} doesn't divide"
        )


def check_layers(model: ModelConfig, tensors: int, where: str) -> None:
    """Raises Refused for more layers than there are tensors, before anything is made for each of them."""
    if model.num_layers > tensors:
        raise Refused(f"{where} gives model.num_layers = {model.num_layers:,}, and there are {tensors:,} tensors: fetch it again")


def need(config: dict[str, Any], wanted: dict[str, Any], architecture: str) -> None:
    """Refuse a config.json whose value of a key, where it is given, is not the only one that our decoder has."""
    for key, value in wanted.items():
        if config.get(key, value) not in (value, None):
            raise Refused(f"config.json has {key} = {config[key]}, megakit's {architecture} has {value} only")


def required(config: dict[str, Any], *keys: str) -> list[Any]:
    """Values that config.json must have. Raises Refused naming the missing one."""
    for key in keys:
        if config.get(key) is None:
            raise Refused(f"config.json has no {key}")
    return [config[key] for key in keys]
