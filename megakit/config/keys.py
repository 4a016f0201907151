"""The recipe keys as data: name, type, default and documentation, read from schema.py. No Hydra here."""

from __future__ import annotations

import ast
import dataclasses
import typing
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any, Union

from megakit.config import schema
from megakit.errors import Refused

MISSING = "???"
"""OmegaConf's mark of a value that the recipe must give."""

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}

_ELSEWHERE = {
    "accumulate_allreduce_grads_in_fp32": "train.grad_dtype",
    "activation_checkpoint": "parallel.recompute",
    "activation_checkpointing": "parallel.recompute",
    "batch_size_rampup": "train.rampup_batch_size",
    "context_parallel": "parallel.cp",
    "context_parallel_degree": "parallel.cp",
    "context_parallel_size": "parallel.cp",
    "data_parallel_replicate_degree": "parallel.zero_group",
    "data_parallel_shard_degree": "parallel.zero_group",
    "data_parallel_size": "parallel.dp",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_clipping": "optim.clip_grad",
    "head_dim": "model.kv_channels",
    "hysteresis": "optim.loss_scale_hysteresis",
    "initial_scale_power": "optim.initial_loss_scale",
    "intermediate_size": "model.ffn_hidden_size",
    "learning_rate": "optim.lr",
    "load": "checkpoint.init_from",
    "lr_decay_iters": "optim.decay_steps",
    "lr_decay_style": "optim.schedule",
    "lr_warmup_iters": "optim.warmup_steps",
    "lr_wsd_decay_iters": "optim.wsd_decay_steps",
    "lr_wsd_decay_style": "optim.wsd_decay_style",
    "max_grad_norm": "optim.clip_grad",
    "max_steps": "train.steps",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_query_groups",
    "num_kv_heads": "model.num_query_groups",
    "num_layers_per_virtual_pipeline_stage": "parallel.virtual_stages",
    "num_microbatches": "train.global_batch_size",
    "num_virtual_stages_per_pipeline_rank": "parallel.virtual_stages",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "pipeline_parallel_layers_per_stage": "parallel.layers_per_stage",
    "pipeline_parallel_schedule": "parallel.schedule",
    "pipeline_parallel_size": "parallel.pp",
    "qk_norm": "model.qk_layernorm",
    "qkv_bias": "model.add_qkv_bias",
    "rampup": "train.rampup_batch_size",
    "recompute_granularity": "parallel.recompute",
    "recompute_num_layers": "parallel.recompute_layers",
    "reset_attention_mask": "data.isolate_documents",
    "rope_theta": "model.rotary_base",
    "save": "checkpoint.dir",
    "save_interval": "checkpoint.interval_steps",
    "sequence_length": "train.seq_len",
    "sequence_parallel_size": "parallel.cp",
    "sliding_window": "model.window_size",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tie_word_embeddings": "model.tie_embeddings",
    "train_batch_size": "train.global_batch_size",
    "train_iters": "train.steps",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "use_distributed_optimizer": "parallel.zero",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_stages",
    "zero_hpz_partition_size": "parallel.zero_group",
    "zero_optimization": "parallel.zero",
    "zero_stage": "parallel.zero",
}
"""What other frameworks call some keys."""


@dataclass(frozen=True)
class Key:
    """One recipe key."""

    name: str
    """Dotted, as it is written in a recipe."""
    hint: Any
    """Its Python type, as `typing` writes it."""
    default: Any
    """MISSING where the recipe must give it."""
    doc: str

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def type_name(self) -> str:
        """The type for people: "a whole number", "a list of text", "a number or null"."""
        return type_name(self.hint)

    @property
    def is_text(self) -> bool:
        """The value is a string (or null) and nothing else."""
        return set(options(self.hint)) <= {str, type(None)}


def options(hint: Any) -> tuple[Any, ...]:
    """The members of Optional and Union; a plain type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) is Union else (hint,)


def type_name(hint: Any) -> str:
    """A type for people."""
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        return "a list of " + ("text" if item is str else type_name(item).removeprefix("a ") + "s")
    if typing.get_origin(hint) is dict:
        item = typing.get_args(hint)[1]
        return "a map of names to text" if item is str else f"a map of patterns to {type_name(item).removeprefix('a ')}s"
    names = [type_name(o) if typing.get_origin(o) else _TYPE_NAMES[o] for o in options(hint)]
    return " or ".join(names)


def key_name(field: dataclasses.Field) -> str:
    """A field's name in a recipe: `async` is a Python keyword, so its field has another name."""
    return field.metadata.get("key", field.name)


def walk(cls: type = schema.Config, prefix: str = "") -> list[tuple[str, type, dataclasses.Field]]:
    """Every leaf below a schema class, in order: (dotted name, the class that has it, its field)."""
    out, hints = [], typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = prefix + key_name(field)
        if dataclasses.is_dataclass(hints[field.name]):
            out += walk(typing.cast(type, hints[field.name]), name + ".")
        else:
            out.append((name, cls, field))
    return out


@cache
def schema_keys() -> dict[str, Key]:
    """Every recipe key by its dotted name, in the order of the schema."""
    docs = _docs(Path(schema.__file__).read_text(encoding="utf-8"))
    out = {}
    for name, cls, field in walk():
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        out[name] = Key(name, typing.get_type_hints(cls)[field.name], default, docs.get((cls.__name__, field.name), ""))
    return out


@cache
def group_docs() -> dict[str, str]:
    """Each group of keys ("train", "launch.slurm") and the first line of its class's docstring."""

    def below(cls: type, prefix: str) -> dict[str, str]:
        out = {}
        for name, hint in typing.get_type_hints(cls).items():
            if dataclasses.is_dataclass(hint):
                out[prefix + name] = (hint.__doc__ or "").strip().splitlines()[0]
                out |= below(typing.cast(type, hint), f"{prefix}{name}.")
        return out

    return below(schema.Config, "")


def _docs(source: str) -> dict[tuple[str, str], str]:
    """The string under each field: {(class, field): text}, on one line."""
    out = {}
    for cls in ast.parse(source).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        for field, after in zip(cls.body, cls.body[1:]):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    out[cls.name, name] = " ".join(text.split())
    return out


def nearest(name: str, among: typing.Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar word, or None."""
    best = max(among, key=lambda w: _alike(name, w), default=None)
    return best if best is not None and _alike(name, best) >= cutoff else None


def nearest_key(name: str) -> str | None:
    """The key that a misspelt dotted name most likely means: its last part counts most, then its group."""
    group, _, leaf = name.rpartition(".")
    if leaf in _ELSEWHERE:
        return _ELSEWHERE[leaf]
    close = {k.name: _alike(leaf, k.leaf) for k in schema_keys().values()}
    close = {k: s + 0.25 * _alike(group, k.rpartition(".")[0]) for k, s in close.items() if s >= 0.7}
    return max(close, key=lambda k: close[k]) if close else None


def _alike(a: str, b: str) -> float:
    """0 to 1; a word inside the other is close to it."""
    if min(len(a), len(b)) >= 3 and (a in b or b in a):
        return max(0.8, SequenceMatcher(None, a, b, autojunk=False).ratio())
    return SequenceMatcher(None, a.lower(), b.lower(), autojunk=False).ratio()


def unknown_key(name: str) -> str:
    """The refusal of a key that is not in the schema: its full name, and what may be meant."""
    guess = nearest_key(name)
    if name.startswith("recipe."):
        return f"{name} is not a recipe key: begin the recipe file with '# @package _global_', so that its keys come out on top"
    if guess:
        return f"{name} is not a recipe key: did you mean {guess}?"
    group = nearest(name.split(".")[0], group_docs(), cutoff=0.7)
    if group:
        leaves = ", ".join(k.name.removeprefix(group + ".") for k in schema_keys().values() if k.name.startswith(group + "."))
        return f"{name} is not a recipe key: the keys of {group} are {leaves}"
    return f"{name} is not a recipe key: the groups of keys are {', '.join(g for g in group_docs() if '.' not in g)}"


def changes_nothing(name: str, value: Any, beside: str, instead: str) -> Refused:
    """The refusal of a value that has no effect `beside` another; with `instead` it would have one."""
    return Refused(f"{name} = {show(value)} changes nothing with {beside}: leave it out, or use {instead}")


def show(value: Any) -> str:
    """A value as a recipe writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return "''" if value == "" else str(value)
