"""What each key alone may be: numbers in a range, words of a list, and values that are accepted by name but not built yet."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megakit.config.algorithms import ALGORITHMS
from megakit.config.keys import nearest, show
from megakit.config.schema import Config, OpsConfig
from megakit.config.typed import leaves
from megakit.errors import Refused


@dataclass(frozen=True)
class Range:
    """An interval of numbers; `open_low` and `open_high` leave the end itself out."""

    low: float
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (self.high is None or (value < self.high if self.open_high else value <= self.high))

    def __str__(self) -> str:
        """For documentation: ends that only a slip of the keyboard reaches are left out."""
        above = self.high is None or self.high >= _SLIP
        return self._above() if above else f"{self._above()}, {self._below()}"

    def bound(self, value: float) -> str:
        """What a value outside must be."""
        low = value <= self.low if self.open_low else value < self.low
        return self._above() if low else self._below()

    def _above(self) -> str:
        return f"{'greater than' if self.open_low else 'at least'} {self.low}"

    def _below(self) -> str:
        return f"{'less than' if self.open_high else 'at most'} {self.high}"


_SLIP = 10**9
COUNT = Range(1, _SLIP)
MANY = Range(1, 10**18)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open_low=True)
SHARE = Range(0, 1, open_high=True)

RANGES: dict[str, Range] = {
    "model.num_layers": COUNT,
    "model.hidden_size": COUNT,
    "model.ffn_hidden_size": COUNT,
    "model.num_attention_heads": COUNT,
    "model.num_query_groups": COUNT,
    "model.kv_channels": COUNT,
    "model.window_size": COUNT,
    "model.vocab_size": Range(2, _SLIP),
    "model.max_position_embeddings": COUNT,
    "model.norm_epsilon": Range(0, 1, open_low=True, open_high=True),
    "model.rotary_base": Range(1, open_low=True),
    "model.rope_factor": Range(1, open_low=True),
    "model.rope_original_max_position_embeddings": COUNT,
    "model.rope_low_freq_factor": POSITIVE,
    "model.rope_high_freq_factor": POSITIVE,
    "model.rope_beta_fast": POSITIVE,
    "model.rope_beta_slow": POSITIVE,
    "model.rope_attention_factor": POSITIVE,
    "model.hidden_dropout": SHARE,
    "model.attention_dropout": SHARE,
    "model.init_method_std": POSITIVE,
    "model.make_vocab_size_divisible_by": COUNT,
    "parallel.tp": COUNT,
    "parallel.pp": COUNT,
    "parallel.cp": COUNT,
    "parallel.dp": COUNT,
    "parallel.zero": Range(0, 3),
    "parallel.zero_group": COUNT,
    "parallel.virtual_stages": COUNT,
    "parallel.layers_per_stage": COUNT,
    "parallel.recompute_layers": COUNT,
    "parallel.bucket_size": MANY,
    "train.steps": COUNT,
    "train.tokens": MANY,
    "train.micro_batch_size": COUNT,
    "train.global_batch_size": COUNT,
    "train.rampup_batch_size": MANY,
    "train.seq_len": COUNT,
    "train.seed": Range(0, 2**63 - 1),
    "train.eval_interval": NOT_NEGATIVE,
    "train.eval_samples": COUNT,
    "train.label_smoothing": SHARE,
    "train.z_loss": NOT_NEGATIVE,
    "train.max_skipped_steps": COUNT,
    "train.generate_tokens": NOT_NEGATIVE,
    "optim.lr": Range(0, 1, open_low=True),
    "optim.min_lr": NOT_NEGATIVE,
    "optim.base_batch_size": COUNT,
    "optim.warmup_steps": NOT_NEGATIVE,
    "optim.decay_steps": COUNT,
    "optim.wsd_decay_steps": COUNT,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.beta1": SHARE,
    "optim.beta2": SHARE,
    "optim.eps": POSITIVE,
    "optim.lr_mult": NOT_NEGATIVE,
    "ops.loss_chunk": COUNT,
    "optim.wd_mult": NOT_NEGATIVE,
    "optim.momentum": SHARE,
    "optim.ns_steps": Range(1, 99),
    "optim.clip_grad": NOT_NEGATIVE,
    "optim.initial_loss_scale": Range(0, 2**50, open_low=True),
    "optim.min_loss_scale": POSITIVE,
    "optim.loss_scale_window": COUNT,
    "optim.loss_scale_hysteresis": COUNT,
    "data.weights": POSITIVE,
    "data.max_epochs": POSITIVE,
    "data.mock_samples": COUNT,
    "data.prefetch": NOT_NEGATIVE,
    "checkpoint.interval_steps": COUNT,
    "checkpoint.interval_minutes": POSITIVE,
    "checkpoint.keep": NOT_NEGATIVE,
    "checkpoint.resume": NOT_NEGATIVE,
    "log.interval": COUNT,
    "log.prometheus_port": Range(0, 65535),
    "launch.timeout_s": Range(0, 10**6, open_low=True),
    "launch.threads_per_rank": COUNT,
    "launch.slurm.cpus_per_task": COUNT,
    "launch.slurm.signal_lead_s": Range(0, 65535),  # of sbatch --signal
    "submit.max_attempts": COUNT,
    "submit.sweep_parallel": COUNT,
    "submit.chain": Range(1, 1000),
    "cluster.nodes": COUNT,
    "cluster.gpus_per_node": COUNT,
    "cluster.gpu_memory_gib": POSITIVE,
    "cluster.peak_bf16_tflops": POSITIVE,
    "cluster.peak_fp32_tflops": POSITIVE,
    "cluster.gpu_hour_price": POSITIVE,
    "cluster.memory_bandwidth_tb_s": POSITIVE,
    "cluster.nvlink_gb_s": POSITIVE,
    "cluster.network_gb_s": POSITIVE,
}
"""Of a list or a map, each entry must lie in the range."""

OPERATORS: dict[str, tuple[str, ...]] = {
    "norm": ("torch", "csrc", "te", "apex"),
    "rope": ("torch", "csrc"),
    "activation": ("torch", "csrc"),
    "loss": ("torch", "csrc"),
    "dropout_add": ("torch", "csrc"),
    "adamw": ("torch", "csrc", "apex"),
    "attention": ("torch", "te"),
}
"""Which backends have each operator."""


def asked_backend(ops: OpsConfig, operator: str) -> str:
    """What a recipe names for an operator; "auto" where that backend doesn't have it, too."""
    asked = getattr(ops, operator) or ops.backend
    return asked if asked in OPERATORS[operator] else "auto"


CHOICES: dict[str, tuple[str, ...]] = {
    "model.family": ("llama", "mistral", "qwen2", "qwen3", "gpt2"),
    "model.normalization": ("rmsnorm", "layernorm"),
    "model.activation": ("swiglu", "gelu", "gelu_tanh"),
    "model.position_embedding": ("rope", "learned"),
    "model.rope_scaling": ("none", "linear", "llama3", "yarn"),
    "parallel.schedule": ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"),
    "parallel.stage_balance": ("layers", "cost"),
    "parallel.cp_comm_type": ("p2p", "all_gather"),
    "parallel.zero3_reduce": ("microbatch", "step"),
    "parallel.recompute": ("none", "selective", "full"),
    "train.precision": ("bf16", "fp16", "fp32", "fp8"),
    "train.grad_dtype": ("fp32", "bf16"),
    "optim.name": tuple(ALGORITHMS),
    "optim.schedule": ("cosine", "linear", "constant", "wsd"),
    "data.packing": ("none", "best_fit"),
    "optim.lr_scaling": ("none", "linear", "sqrt"),
    "optim.wsd_decay_style": ("linear", "cosine", "minus_sqrt"),
    "checkpoint.resume": ("auto", "must", "never"),
    "log.console": ("auto", "bar", "lines", "off"),
    "log.wandb": ("disabled", "offline", "online"),
    "launch.device": ("auto", "cuda", "cpu"),
    "submit.target": ("slurm", "kubernetes"),
    "submit.template": ("srun", "torchrun"),
    "submit.chain": ("auto",),
    "submit.container.runtime": ("pyxis", "apptainer"),
    "ops.backend": ("auto", "torch", "csrc", "te", "apex"),
    **{f"ops.{name}": words for name, words in OPERATORS.items()},
    "ops.fp8": ("torch", "te", "torchao"),
    "ops.fp8_recipe": ("current", "delayed", "mxfp8"),
}


def _words(*words: Any) -> Callable[[Any], bool]:
    return words.__contains__


NOT_BUILT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "parallel.schedule": (_words("dualpipe"), "zb_v"),
    "checkpoint.async": (bool, "false"),
}
"""Which values of a key are planned but not built, and what to use until then."""

_ELSEWHERE = {
    "zbvzerobubble": "zb_v",
    "zbv": "zb_v",
    "zero_bubble": "zb_h1",
    "zb1p": "zb_h1",
    "interleaved1f1b": "interleaved_1f1b",
    "interleaved": "interleaved_1f1b",
    "allgather": "all_gather",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float8": "fp8",
    "cuda": "csrc",
    "transformer_engine": "te",
    "transformerengine": "te",
}
"""What other frameworks call some words, in small letters."""

FREE_TEXT = {
    "train.generate_prompt",
    "data.path",
    "data.valid_path",
    "data.tokenizer",
    "data.split",
    "data.cache_dir",
    "checkpoint.dir",
    "checkpoint.init_from",
    "log.wandb_project",
    "log.prometheus_address",
    "log.prometheus_targets",
    "launch.slurm.partition",
    "launch.slurm.account",
    "launch.slurm.qos",
    "launch.slurm.constraint",
    "launch.slurm.time_limit",
    "launch.slurm.extra",
    "submit.sweep",
    "submit.python",
    "submit.modules",
    "submit.setup",
    "submit.container.image",
    "submit.container.mounts",
    "submit.kubernetes.namespace",
    "submit.kubernetes.claim",
    "submit.kubernetes.mount",
    "cluster.name",
    "cluster.env",
    "run.name",
    "run.dir",
}
"""Text keys whose values are not a list of words."""

MAY_BE_EMPTY = {"train.generate_prompt", "cluster.env"}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_each(cfg: Config) -> None:
    """Raise Refused for the first key whose value, looked at alone, can't be used."""
    for name, value in leaves(cfg).items():
        if value is not None:
            for place, entry in _entries(value):
                _check(name, entry, place)
    if not _NAME.fullmatch(cfg.run.name):
        raise Refused(
            f"run.name = {cfg.run.name} must be up to 100 letters, digits, '.', '_' and '-', since it names a folder and a job:"
            " put folders into run.dir"
        )


def _entries(value: Any) -> list[tuple[str, Any]]:
    """(what is written after the key's name, value) of each entry of a list or a map."""
    if isinstance(value, dict):
        return [(f"[{pattern}]", entry) for pattern, entry in value.items()]
    return [(f".{i}", entry) for i, entry in enumerate(value)] if isinstance(value, list) else [("", value)]


def _check(name: str, value: Any, place: str = "") -> None:
    not_built, instead = NOT_BUILT.get(name, (_words(), ""))
    if not_built(value):
        raise Refused(f"{name} = {show(value)} is not built yet: use {instead}")
    if isinstance(value, bool):
        return
    if isinstance(value, str):
        words = CHOICES.get(name)
        if words and value not in words:
            word = value.lower().removeprefix("schedule")  # torch's classes begin so
            guess = next((w for w in (_ELSEWHERE.get(word), word) if w in words), None) or nearest(value, words)
            hint = f"did you mean {guess}?" if guess else f"use {words[0]}" if len(words) == 1 else "use one of these"
            raise Refused(f"{name} = {show(value)} is not one of {_listed(name, words)}: {hint}")
        if not value and name not in MAY_BE_EMPTY:
            raise Refused(f"{name} is empty: give a value, or leave the key out")
    elif name in RANGES and value not in RANGES[name]:
        raise Refused(f"{name}{place} = {show(value)} must be {RANGES[name].bound(value)}")


def _listed(name: str, words: tuple[str, ...]) -> str:
    return " | ".join(words) + (" | a number" if name in RANGES else "")
