"""run.shrink: the smallest run that still has a recipe's structure, on this machine's CPU in under a minute."""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import replace as replace_fields
from typing import Any

from megakit.config import algorithms, rules
from megakit.config.derived import head_dim
from megakit.config.schema import ClusterConfig, Config, LogConfig, ModelConfig, ParallelConfig
from megakit.config.typed import replace

STEPS = 4
SAVE_AT = 2
EVALUATE_AT = 3
SEQ_LEN = 64
VOCABULARY = 512
RAGGED_VOCABULARY = 509
"""In place of a vocabulary that the grid has to pad."""
MOST_HEADS_PER_GROUP = 16
MOST_MICRO_BATCHES = 4
BUCKET_SIZE = 16_384
"""Small, so that the gradients of a small model still fill several buckets."""


def shrink(cfg: Config) -> Config:
    """The minimal reproduction of a recipe: grid axes above 1 become 2 (4 where hybrid
    sharding needs it for two groups), sizes are cut, and made-up data is used.

    Kept: schedule, ZeRO stage, recomputation, sequence parallelism, uneven stages, tying, biases, norms, activation,
    dropout, MHA or the GQA ratio, heads wider or narrower than usual, a window that bites or doesn't, a vocabulary that needs
    padding, precision, accumulation, a ramp-up of the batch, the learning-rate schedule and its scaling.
    """
    cfg = rules.resolve(cfg, rules.planned_world(cfg))
    grid = {axis: min(getattr(cfg.parallel, axis), 2) for axis in ("dp", "pp", "cp", "tp")}
    group = cfg.parallel.zero_group
    replicated = group is not None and group < (cfg.parallel.dp or 1) * cfg.parallel.cp
    if replicated and grid["dp"] * grid["cp"] == 2:  # two groups of two
        grid["dp" if grid["dp"] > 1 else "cp"] = 4
    layers = _layers(cfg.model, cfg.parallel, grid["pp"])
    changes = {
        **{f"parallel.{axis}": size for axis, size in grid.items()},
        "parallel.zero_group": 2 if replicated else group and grid["dp"] * grid["cp"],
        **layers,
        "parallel.recompute_layers": None if cfg.parallel.recompute_layers is None else 1,
        **_model(cfg, grid["tp"], _seq_len(cfg, grid)),
        **_train(cfg, grid, layers["model.num_layers"]),
        **_surroundings(cfg),
    }
    out = replace(cfg, changes)
    out.cluster = ClusterConfig()
    rules.check(out)
    return out


def _layers(model: ModelConfig, parallel: ParallelConfig, pp: int) -> dict[str, Any]:
    """Two layers per stage; uneven where the recipe is uneven, with the heavier end on the same side."""
    given, chunks = parallel.layers_per_stage, parallel.virtual_stages
    if chunks > 1:
        uneven = given is not None and len(set(given)) > 1
        sizes = [2, *[1] * (pp * chunks - 1)] if uneven else [1] * (pp * chunks)
        return {"model.num_layers": sum(sizes), "parallel.layers_per_stage": given and sizes}
    if given is None or len(set(given)) == 1:
        odd = pp > 1 and model.num_layers % parallel.pp > 0
        layers = min(model.num_layers, 2 * pp + odd)
        return {"model.num_layers": layers, "parallel.layers_per_stage": given and [layers // pp] * pp}
    stages = [2, 1] if given[0] > given[-1] else [1, 2]
    return {"model.num_layers": sum(stages), "parallel.layers_per_stage": stages}


def _model(cfg: Config, tp: int, seq_len: int) -> dict[str, Any]:
    m = cfg.model
    ratio = min(m.num_attention_heads // m.num_query_groups, MOST_HEADS_PER_GROUP)
    groups = min(m.num_query_groups, 4 if ratio == 1 else 2)
    groups = max(groups // tp * tp, tp)
    heads = groups * ratio
    width = 16 if heads <= 8 else 8
    hidden = heads * width
    ffn = max(1, round(m.ffn_hidden_size / m.hidden_size * hidden / 8)) * 8
    padded = m.vocab_size % (cfg.parallel.tp * m.make_vocab_size_divisible_by) != 0
    context = seq_len if m.max_position_embeddings <= cfg.train.seq_len else 2 * seq_len
    original = m.rope_original_max_position_embeddings
    narrow = m.window_size is not None and m.window_size < cfg.train.seq_len
    return {
        "model.kv_channels": m.kv_channels and _width(m, width),
        "model.window_size": m.window_size and max(1, m.window_size * seq_len // cfg.train.seq_len if narrow else seq_len),
        "model.num_attention_heads": heads,
        "model.num_query_groups": groups,
        "model.hidden_size": hidden,
        "model.ffn_hidden_size": ffn,
        "model.vocab_size": min(m.vocab_size, RAGGED_VOCABULARY if padded else VOCABULARY),
        "model.max_position_embeddings": context,
        "model.rope_original_max_position_embeddings": original
        and min(max(1, original * context // m.max_position_embeddings), context),
    }


def _width(m: ModelConfig, usual: int) -> int:
    """Of a head that has kv_channels: as much wider or narrower than `usual` as it is, but one of three."""
    whole = head_dim(m) * m.num_attention_heads
    return 2 * usual if whole > m.hidden_size else usual // 2 if whole < m.hidden_size else usual


def _seq_len(cfg: Config, grid: dict[str, int]) -> int:
    """Short, and what the smaller grid can cut."""
    short, unit = min(cfg.train.seq_len, SEQ_LEN), 2 * grid["cp"]
    return short if short < unit else short // unit * unit


def _train(cfg: Config, grid: dict[str, int], layers: int) -> dict[str, Any]:
    t, o, dp = cfg.train, cfg.optim, cfg.parallel.dp or 1
    full = t.global_batch_size // (t.micro_batch_size * dp)
    starved = full < cfg.parallel.pp and t.rampup_batch_size is None
    # whole blocks of pp = 2, as an interleaved schedule takes them
    micro_batches = 1 if starved else min(full, MOST_MICRO_BATCHES) // grid["pp"] * grid["pp"]
    micro_batch = min(t.micro_batch_size, 2)
    batch = micro_batches * micro_batch * grid["dp"]
    total = rules.total_steps(cfg)
    steps = min(total, STEPS)
    stops_early = o.decay_steps is not None and o.decay_steps < total
    return {
        "train.steps": steps,
        "train.tokens": None,
        "train.micro_batch_size": micro_batch,
        "train.global_batch_size": batch,
        "train.rampup_batch_size": t.rampup_batch_size and _rampup(batch, micro_batch * grid["dp"]),
        "train.seq_len": _seq_len(cfg, grid),
        "train.eval_interval": EVALUATE_AT if t.eval_interval else 0,
        "train.eval_samples": min(t.eval_samples, batch),
        "train.generate_tokens": 0,
        "train.generate_prompt": "",
        "optim.base_batch_size": o.base_batch_size and math.ceil(o.base_batch_size * batch / t.global_batch_size),
        "optim.lr_mult": _patterns(o.lr_mult, cfg.model, layers, decay=False),
        "optim.wd_mult": _patterns(o.wd_mult, cfg.model, layers, decay=True),
        "optim.warmup_steps": min(o.warmup_steps, 1) if steps > 2 else 0,
        "optim.decay_steps": None if o.decay_steps is None else max(2, steps - 1) if stops_early else steps + 1,
        "optim.wsd_decay_steps": None if o.wsd_decay_steps is None else 1,
        **({} if cfg.parallel.zero == 3 else {"parallel.bucket_size": min(cfg.parallel.bucket_size, BUCKET_SIZE)}),
    }


def parameter_names(m: ModelConfig) -> list[str]:
    """Of all parameters of a model, as modeling.layout names them, which can't be asked from here."""
    norms = ["weight"] + ["bias"] * (m.normalization == "layernorm")
    linear = ["weight"] + ["bias"] * m.add_bias_linear
    of_heads = ["attention.q_norm", "attention.k_norm"] * m.qk_layernorm
    of_norms = [f"{name}.{part}" for name in ("attention_norm", "mlp_norm", *of_heads) for part in norms]
    of_layer = of_norms + [f"{name}.{p}" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down") for p in linear]
    of_layer += ["attention.qkv.bias"] * m.add_qkv_bias
    embeddings = ["embedding.word.weight"] + ["embedding.position.weight"] * (m.position_embedding == "learned")
    ends = [f"final_norm.{part}" for part in norms] + ["output.weight"] * (not m.tie_embeddings)
    return [*embeddings, *(f"layers.{i}.{name}" for i in range(m.num_layers) for name in of_layer), *ends]


def _patterns(given: dict[str, float] | None, model: ModelConfig, layers: int, decay: bool) -> dict[str, float] | None:
    """A pattern for layers that are cut off becomes one for the last layer; what then changes nothing is left out.

    `decay`: of weight decay, which norms and biases don't take.
    """
    names = [n for n in parameter_names(replace_fields(model, num_layers=layers)) if not (decay and re.search("norm|bias", n))]
    out: dict[str, float] = {}
    for pattern, value in (given or {}).items():
        tail = re.sub(r"^layers\.[^.]*", "", pattern)
        moved = [f"layers.{layers - 1}{tail}", f"layers.{layers - 1}.*"] if pattern.startswith("layers") else []
        kept = next((p for p in (pattern, *moved) if fnmatch.filter(names, p)), None)
        if kept is not None and (value != 1 or kept not in out):
            out.pop(kept, None)  # the later one comes later
            out[kept] = value
    holding = {algorithms.holding(out, name) for name in names}
    out = {pattern: value for pattern, value in out.items() if pattern in holding}
    return out if any(value != 1 for value in out.values()) else None


def _rampup(batch: int, unit: int) -> list[int]:
    """Two steps of half the batch (in whole `unit`s), of which the second is the last before the save."""
    half = batch // unit // 2 * unit
    return [half, batch - half, 2 * half]


def _surroundings(cfg: Config) -> dict[str, Any]:
    """No files but the run folder, no GPU, no cluster."""
    folder = None if cfg.run.dir is None else cfg.run.dir.rstrip("/") + "-shrunk"
    return {
        "data.mock": True,
        "data.path": [],
        "data.valid_path": [],
        "data.weights": None,
        "data.tokenizer": None,
        "data.max_epochs": None,
        "data.packing": "none",
        "data.cache_dir": None,
        "checkpoint.dir": None,
        "checkpoint.interval_steps": SAVE_AT,
        "checkpoint.interval_minutes": None,
        "checkpoint.init_from": None,
        "checkpoint.resume": "auto",
        "parallel.allow_tp_across_nodes": False,
        "log.interval": 1,
        "log.tensorboard": False,
        "log.wandb": "disabled",
        "log.wandb_project": LogConfig.wandb_project,
        "log.prometheus": False,
        "log.prometheus_address": LogConfig.prometheus_address,
        "log.prometheus_port": LogConfig.prometheus_port,
        "log.prometheus_targets": LogConfig.prometheus_targets,
        "launch.device": "cpu",
        "launch.threads_per_rank": 1,
        "run.name": f"{cfg.run.name[:90]}-shrunk",
        "run.dir": folder,
        "run.shrink": False,
    }
