"""Rules that join several keys. Every refusal states both values and the cure; all here is arithmetic on a Config."""

from __future__ import annotations

import math

from megakit.config import job_rules, model_rules, ops_rules, optim_rules
from megakit.config.batch import BatchSize
from megakit.config.cures import Broken, Change, broken_alone, divisors, listed, near, nearest_first, tried
from megakit.config.keys import changes_nothing, show
from megakit.config.ranges import check_each
from megakit.config.schema import Config, DataConfig, LogConfig, OptimConfig, ParallelConfig
from megakit.config.typed import replace
from megakit.errors import Refused


def check(cfg: Config) -> None:
    """Raise Refused for the first rule that the configuration breaks, with cures that break none.

    What layers_per_stage may be is checked where layers are placed, in modeling.layout.split_layers.
    """
    try:
        _check(cfg)
    except Broken as broken:
        raise tried(broken, cfg, _check) from None


def _check(cfg: Config) -> None:
    check_each(cfg)
    model_rules.check(cfg)
    _check_tensor_parallel(cfg)
    _check_context_parallel(cfg)
    _check_pipeline(cfg)
    _check_zero(cfg)
    check_stages(cfg)
    _check_world(cfg)
    _check_batch(cfg)
    _check_length(cfg)
    optim_rules.check(cfg)
    ops_rules.check(cfg)
    job_rules.check(cfg)
    _check_schedule(cfg)
    _check_recompute(cfg)
    _check_precision(cfg)
    _check_data(cfg)
    _check_checkpoint(cfg)
    _check_log(cfg)


def total_steps(cfg: Config) -> int:
    """Optimizer steps of the run, a ramp-up of the batch included; train.tokens is rounded up to whole steps."""
    if cfg.train.steps is not None:
        return cfg.train.steps
    if cfg.train.tokens is None:
        raise Refused("train.steps and train.tokens are both missing: give train.steps=N or train.tokens=N")
    return BatchSize.of(cfg.train).steps_for(math.ceil(cfg.train.tokens / cfg.train.seq_len))


def model_ranks(cfg: Config) -> int:
    """Ranks of one replica of the model: tp * pp * cp."""
    return cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.cp


def cluster_world(cfg: Config) -> int | None:
    """GPUs of the recipe's cluster; None where it leaves the GPUs of a node open."""
    return None if cfg.cluster.gpus_per_node is None else cfg.cluster.nodes * cfg.cluster.gpus_per_node


def planned_world(cfg: Config) -> int:
    """Ranks that the recipe asks for: by parallel.dp, else all GPUs of its cluster, else one replica of the model."""
    p = cfg.parallel
    if p.dp is not None:
        return p.dp * model_ranks(cfg)
    if (there := cluster_world(cfg)) is not None:
        return there
    if p.zero_group is not None and p.cp % p.zero_group:
        raise Refused(
            f"parallel.zero_group = {p.zero_group} is planned for dp 1, since parallel.dp is null and cluster.gpus_per_node"
            f" unknown: give parallel.dp, as in parallel.dp={p.zero_group // math.gcd(p.zero_group, p.cp)}"
        )
    return model_ranks(cfg)


def resolve(cfg: Config, world: int) -> Config:
    """The configuration for `world` ranks, as a new object: parallel.dp is a number, and the batch rules hold for it."""
    try:
        return _resolve(cfg, world)
    except Broken as broken:

        def both(changed: Config) -> None:
            _check(changed)
            _resolve(changed, world)

        raise tried(broken, cfg, both) from None


def _resolve(cfg: Config, world: int) -> Config:
    grid, ranks, dp = _grid(cfg), model_ranks(cfg), cfg.parallel.dp
    if dp is not None and dp * ranks != world:
        fit = f" or set parallel.dp={world // ranks}" if world % ranks == 0 else ""
        raise Refused(f"parallel.dp = {dp} x {grid} = {dp * ranks} ranks, but there are {world}: start {dp * ranks} ranks{fit}")
    if world % ranks:
        fit = nearest_multiples(world, ranks)
        raise Refused(f"{world} ranks can't be divided by {grid} = {ranks}: start {fit} ranks, or change the grid")
    out = replace(cfg, {"parallel.dp": world // ranks})
    _check_zero(out)
    _check_batch(out)
    return out


def _grid(cfg: Config) -> str:
    return " x ".join(
        f"{axis} {getattr(cfg.parallel, axis)}" for axis in ("pp", "cp", "tp") if axis != "cp" or cfg.parallel.cp > 1
    )


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around a value."""
    low = value // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)


def _check_tensor_parallel(cfg: Config) -> None:
    m, p = cfg.model, cfg.parallel
    more: list[Change] = [{"parallel.tp": tp} for tp in range(2, m.num_attention_heads + 1)]
    for name in ("parallel.sequence_parallel", "parallel.allow_tp_across_nodes"):
        if p.tp == 1 and getattr(p, name.removeprefix("parallel.")):
            raise broken_alone(name, True, "parallel.tp = 1", False, more)
    cut = {
        "model.num_query_groups": m.num_query_groups,
        "model.num_attention_heads": m.num_attention_heads,
        "model.ffn_hidden_size": m.ffn_hidden_size,
    }
    if p.sequence_parallel:
        cut["train.seq_len"] = cfg.train.seq_len
    valid = divisors(math.gcd(*cut.values()))
    per_node = cfg.cluster.gpus_per_node
    if per_node is not None and not p.allow_tp_across_nodes:
        valid = [tp for tp in valid if per_node % tp == 0]
    others: list[Change] = [{"parallel.tp": tp} for tp in nearest_first(valid, p.tp)]
    for name, size in cut.items():
        if size % p.tp:
            of_sequence = name == "train.seq_len"
            why = "; sequence_parallel cuts it" if of_sequence else ""
            kinds = [near("train.seq_len", size, p.tp), [{"parallel.sequence_parallel": False}]] if of_sequence else []
            raise Broken(
                f"{name} = {size} is not divisible by parallel.tp = {p.tp}{why}; valid tp {listed(valid)}", others, *kinds
            )
    if p.tp not in valid:
        raise Broken(
            f"parallel.tp = {p.tp} does not fit the nodes of cluster.gpus_per_node = {per_node}; valid tp {listed(valid)}",
            others,
            [{"parallel.allow_tp_across_nodes": True}],
        )


def _check_pipeline(cfg: Config) -> None:
    """How many chunks and micro-batches a schedule takes is checked where it is made, in parallel.pipeline.generators."""
    p = cfg.parallel
    more: list[Change] = [{"parallel.pp": pp} for pp in range(2, cfg.model.num_layers + 1)]
    if p.pp == 1 and (p.schedule != "1f1b" or p.virtual_stages > 1):
        name = "schedule" if p.schedule != "1f1b" else "virtual_stages"
        off: Change = {"parallel.schedule": "1f1b"} if p.schedule != "1f1b" else {}
        off |= {"parallel.virtual_stages": 1} if p.virtual_stages > 1 else {}
        raise Broken(f"parallel.{name} = {getattr(p, name)} needs a pipeline, parallel.pp = 1", [off], more)
    check_chunks(p.schedule, p.virtual_stages)
    if p.layers_per_stage is not None and p.pp == 1:
        raise broken_alone("parallel.layers_per_stage", p.layers_per_stage, "parallel.pp = 1", None)
    if p.stage_balance != "layers" and (p.pp == 1 or p.layers_per_stage is not None):
        given = p.layers_per_stage is not None
        why = f"parallel.layers_per_stage = {show(p.layers_per_stage)}" if given else "parallel.pp = 1"
        raise broken_alone(
            "parallel.stage_balance", p.stage_balance, why, "layers", [{"parallel.layers_per_stage": None}] if given else more
        )


def check_chunks(schedule: str, chunks: int) -> None:
    """That a schedule can have that many chunks per rank."""
    given = f"parallel.virtual_stages = {chunks}"
    if schedule == "zb_v" and chunks != 2:
        raise Broken(f"parallel.schedule = zb_v has 2 chunks per rank, {given}", [{"parallel.virtual_stages": 2}])
    one: Change = {"parallel.schedule": "1f1b"}
    if schedule == "interleaved_1f1b" and chunks < 2:
        more: list[Change] = [{"parallel.virtual_stages": n} for n in range(2, 10)]
        raise Broken(f"parallel.schedule = interleaved_1f1b with {given} has nothing to interleave", more, [one])
    if schedule in ("gpipe", "1f1b", "zb_h1") and chunks > 1:
        interleaved: Change = {"parallel.schedule": "interleaved_1f1b"}
        why = f"parallel.schedule = {schedule} has 1 chunk per rank, {given}"
        raise Broken(why, [interleaved], [{"parallel.virtual_stages": 1}])


def check_stages(cfg: Config) -> None:
    """That there are layers for all stages, and, where virtual stages are cut evenly, as many for each."""
    p, layers = cfg.parallel, cfg.model.num_layers
    stages = p.pp * p.virtual_stages
    if p.layers_per_stage is not None:
        return
    fewer: list[Change] = [{"parallel.pp": pp} for pp in range(min(p.pp - 1, layers // p.virtual_stages), 0, -1)]
    chunks: list[Change] = []
    if p.schedule == "interleaved_1f1b":
        fit = [v for v in range(2, layers // p.pp + 1) if layers % (p.pp * v) == 0]
        chunks = [{"parallel.virtual_stages": v} for v in nearest_first(fit, p.virtual_stages)]
        chunks.append({"parallel.schedule": "1f1b", "parallel.virtual_stages": 1})
    if layers < stages:
        raise Broken(f"model.num_layers = {layers} is less than parallel.pp x parallel.virtual_stages = {stages}", fewer, chunks)
    if p.stage_balance != "cost" and p.virtual_stages > 1 and layers % stages:
        raise Broken(
            f"model.num_layers = {layers} can't be cut evenly into parallel.pp x parallel.virtual_stages ="
            f" {p.pp} x {p.virtual_stages} = {stages} stages",
            chunks,
            [{"parallel.stage_balance": "cost"}],
            fewer,
        )


def _check_zero(cfg: Config) -> None:
    p = cfg.parallel
    if p.zero == 3:
        _check_fully_sharded(p)
    elif p.zero3_reduce != "microbatch":
        zero = f"parallel.zero = {p.zero}"
        raise broken_alone("parallel.zero3_reduce", p.zero3_reduce, zero, "microbatch", [{"parallel.zero": 3}])
    if p.zero_group is None:
        return
    if p.zero == 0:
        raise broken_alone("parallel.zero_group", p.zero_group, "parallel.zero = 0", None, [{"parallel.zero": 1}])
    if p.zero_group == 1:
        raise Broken(
            "parallel.zero_group = 1 shards nothing",
            [{"parallel.zero": 0, "parallel.zero_group": None}],
            [{"parallel.zero_group": None}],
        )
    dp, there = p.dp, cluster_world(cfg)
    if dp is None and there is not None and there % model_ranks(cfg) == 0:
        dp = there // model_ranks(cfg)
    if dp is not None and (dp * p.cp) % p.zero_group:
        valid = divisors(dp * p.cp)[1:]
        raise Broken(
            f"parallel.zero_group = {p.zero_group} does not divide parallel.dp x parallel.cp = {dp} x {p.cp} = {dp * p.cp};"
            f" valid groups {listed(valid) or 'none'}",
            [{"parallel.zero_group": n} for n in nearest_first(valid, p.zero_group)],
            [{"parallel.zero_group": None}],
        )


def sequence_unit(cfg: Config) -> int:
    """What a sequence must be a multiple of: two chunks on each cp rank, and what is there cut over tp where it is."""
    cp, cut = cfg.parallel.cp, cfg.parallel.tp if cfg.parallel.sequence_parallel else 1
    return cp * math.lcm(2, cut) if cp > 1 else cut


def _check_context_parallel(cfg: Config) -> None:
    p, seq_len = cfg.parallel, cfg.train.seq_len
    if p.cp == 1:
        if p.cp_comm_type != "p2p":
            raise broken_alone("parallel.cp_comm_type", p.cp_comm_type, "parallel.cp = 1", "p2p", [{"parallel.cp": 2}])
        return
    unit = sequence_unit(cfg)
    if seq_len % unit:
        tp = f" and its cut over parallel.tp = {p.tp}" if p.sequence_parallel else ""
        valid = [cp for cp in divisors(seq_len) if cp == 1 or seq_len % (unit // p.cp * cp) == 0]
        raise Broken(
            f"train.seq_len = {seq_len} is not divisible by the two chunks of each of parallel.cp = {p.cp} ranks{tp}, {unit}",
            *([change] for change in near("train.seq_len", seq_len, unit)),
            [{"parallel.cp": cp} for cp in nearest_first(valid, p.cp)],
        )


def _check_fully_sharded(p: ParallelConfig) -> None:
    if p.pp > 1:
        raise Broken(
            f"parallel.zero = 3 and parallel.pp = {p.pp}: a pipeline would gather each layer's weights twice per micro-batch",
            [{"parallel.zero": 1}],
            [{"parallel.zero": 2}],
            [{"parallel.pp": 1}],
        )
    if p.bucket_size != ParallelConfig().bucket_size:
        beside = "parallel.zero = 3, which reduces layer by layer"
        raise broken_alone("parallel.bucket_size", p.bucket_size, beside, ParallelConfig().bucket_size, [{"parallel.zero": 2}])


def _check_world(cfg: Config) -> None:
    there = cluster_world(cfg)
    if there is None:
        return
    p, per_node, ranks = cfg.parallel, cfg.cluster.gpus_per_node or 1, model_ranks(cfg)
    have = f"cluster.nodes = {cfg.cluster.nodes} x cluster.gpus_per_node = {per_node} are {there} GPUs"
    if p.dp is not None and p.dp * ranks > there:
        need = p.dp * ranks
        raise Broken(
            f"parallel.dp = {p.dp} x {_grid(cfg)} = {need} ranks, {have}",
            [{"cluster.nodes": math.ceil(need / per_node)}],
            [{"parallel.dp": dp} for dp in range(there // ranks, 0, -1)],
        )
    if p.dp is None and there % ranks:
        nodes = math.lcm(ranks, per_node) // per_node
        low = cfg.cluster.nodes // nodes * nodes
        whole = sorted(
            (n for n in range(max(nodes, low - 8 * nodes), low + 9 * nodes, nodes)), key=lambda n: abs(n - cfg.cluster.nodes)
        )
        others = [pp for pp in range(1, cfg.model.num_layers + 1) if there % (p.tp * p.cp * pp) == 0]
        raise Broken(
            f"{_grid(cfg)} = {ranks} ranks do not divide the cluster, {have}",
            [{"cluster.nodes": n} for n in whole if n < cfg.cluster.nodes],
            [{"cluster.nodes": n} for n in whole if n > cfg.cluster.nodes],
            [{"parallel.pp": pp} for pp in nearest_first(others, p.pp)],
            [{"parallel.dp": dp} for dp in range(there // ranks, 0, -1)],
        )


def _check_batch(cfg: Config) -> None:
    t, p, dp = cfg.train, cfg.parallel, cfg.parallel.dp
    if dp is None:
        there = cluster_world(cfg)
        dp = there // model_ranks(cfg) if there else 1
    unit, size = t.micro_batch_size * dp, t.global_batch_size
    if size % unit:
        by = f"train.micro_batch_size = {t.micro_batch_size}" + (f" x parallel.dp = {dp} = {unit}" if dp > 1 else "")
        blocks = unit * p.pp if p.schedule == "interleaved_1f1b" else unit
        raise Broken(
            f"train.global_batch_size = {size} is not divisible by {by}",
            *([change] for change in near("train.global_batch_size", size, blocks)),
            [{"train.micro_batch_size": n} for n in range(min(t.micro_batch_size, size) - 1, 0, -1) if size % (n * dp) == 0],
            [{"parallel.dp": n} for n in range(dp - 1, 0, -1) if size % (n * t.micro_batch_size) == 0] if p.dp else [],
        )
    if t.rampup_batch_size is not None:
        _check_rampup(t.rampup_batch_size, size, unit)


def _check_rampup(given: list[int], final: int, unit: int) -> None:
    """`unit`: micro_batch_size x dp, which must divide every size of the ramp-up."""
    shown = f"train.rampup_batch_size = {show(given)}"
    if len(given) != 3:
        raise Refused(f"{shown} has {len(given)} numbers: give [START, INCREMENT, SAMPLES], or null")
    start, increment = given[:2]
    if start >= final:
        raise Refused(f"{shown} starts at train.global_batch_size = {final} or above it: use a smaller start, or null")
    by = f"train.micro_batch_size x parallel.dp = {unit}"
    if start % unit:
        valid = [n for n in (start // unit * unit, start // unit * unit + unit) if 0 < n < final]
        cure = f"start at {' or '.join(map(str, valid))}" if valid else "there is no smaller batch: use null"
        raise Refused(f"{shown}: its size {start} is not divisible by {by}: {cure}")
    if increment % unit or (final - start) % increment:
        fit = [unit * n for n in divisors((final - start) // unit)]  # start and final are multiples of unit
        steps = " or ".join(map(str, sorted(sorted(fit, key=lambda n: (abs(n - increment), n))[:2])))
        if (final - start) % increment:
            wrong = f"its increment {increment} does not divide train.global_batch_size {final} - {start} = {final - start}"
        else:
            wrong = f"its size {start + increment} is not divisible by {by}"
        raise Refused(f"{shown}: {wrong}: increment by {steps}")


def _check_length(cfg: Config) -> None:
    m, t = cfg.model, cfg.train
    if m.position_embedding == "learned" and t.seq_len > m.max_position_embeddings:
        raise Broken(
            f"train.seq_len = {t.seq_len} is longer than the learned position table, model.max_position_embeddings ="
            f" {m.max_position_embeddings}",
            [{"train.seq_len": m.max_position_embeddings}],
            [{"model.max_position_embeddings": t.seq_len}],
        )
    if t.steps is not None and t.tokens is not None:
        raise Refused(
            f"train.steps = {t.steps} and train.tokens = {t.tokens} are both given: set train.tokens=null, or train.steps=null"
        )
    if t.generate_tokens and cfg.data.tokenizer is None:
        raise Refused(
            f"train.generate_tokens = {t.generate_tokens} needs data.tokenizer, which is null: give the file, or"
            " train.generate_tokens=0"
        )


def _check_schedule(cfg: Config) -> None:
    o, steps = cfg.optim, total_steps(cfg)
    if o.min_lr > o.lr:
        raise Refused(f"optim.min_lr = {o.min_lr} is above optim.lr = {o.lr}: use optim.min_lr <= {o.lr}")
    of_wsd = {"wsd_decay_steps": o.wsd_decay_steps is not None, "wsd_decay_style": o.wsd_decay_style != "linear"}
    for name, given in of_wsd.items():
        if o.schedule != "wsd" and given:
            raise changes_nothing(f"optim.{name}", getattr(o, name), f"optim.schedule = {o.schedule}", "optim.schedule=wsd")
    if o.schedule == "constant":
        for name, value, off in (("decay_steps", o.decay_steps, None), ("min_lr", o.min_lr, 0.0)):
            if value != off:
                raise Refused(
                    f"optim.{name} = {value} changes nothing with optim.schedule = constant: set it to {show(off)}, or use"
                    " optim.schedule=cosine"
                )
        return
    if o.decay_steps is None and o.warmup_steps >= steps:
        return  # a trial run that ends in the warm-up; the plan says so
    end = steps if o.decay_steps is None else o.decay_steps
    if end <= o.warmup_steps:
        raise Refused(
            f"optim.decay_steps = {end} is not after the warm-up, optim.warmup_steps = {o.warmup_steps}: use"
            f" optim.decay_steps > {o.warmup_steps}"
        )
    if o.schedule == "wsd":
        decay = max(1, end // 10) if o.wsd_decay_steps is None else o.wsd_decay_steps
        if o.warmup_steps + decay > end:
            raise Refused(
                f"optim.warmup_steps = {o.warmup_steps} and the wsd decay of {decay} steps do not fit into {end} steps: use"
                f" optim.wsd_decay_steps <= {end - o.warmup_steps}"
            )


def _check_recompute(cfg: Config) -> None:
    p = cfg.parallel
    if p.recompute_layers is not None and p.recompute != "full":
        beside = f"parallel.recompute = {p.recompute}"
        most = max(p.layers_per_stage or [math.ceil(cfg.model.num_layers / (p.pp * p.virtual_stages))])
        full: list[Change] = [{"parallel.recompute": "full"}] if p.recompute_layers <= most else []
        raise broken_alone("parallel.recompute_layers", p.recompute_layers, beside, None, full)


def _check_precision(cfg: Config) -> None:
    o, precision = cfg.optim, cfg.train.precision
    if cfg.train.grad_dtype == "bf16" and precision != "bf16":
        raise Broken(
            f"train.grad_dtype = bf16 would round the gradients of train.precision = {precision}",
            [{"train.grad_dtype": "fp32"}],
            [{"train.precision": "bf16"}],
        )
    if cfg.train.grad_dtype == "bf16" and cfg.parallel.zero == 3:
        raise Broken(
            "train.grad_dtype = bf16 is not built for parallel.zero = 3", [{"train.grad_dtype": "fp32"}], [{"parallel.zero": 2}]
        )
    if precision != "fp16":
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "loss_scale_hysteresis"):
            value, default = getattr(o, name), getattr(OptimConfig(), name)
            if value != default:
                raise changes_nothing(f"optim.{name}", value, f"train.precision = {precision}", "train.precision=fp16")
    elif o.min_loss_scale > o.initial_loss_scale:
        raise Refused(
            f"optim.min_loss_scale = {show(o.min_loss_scale)} is above optim.initial_loss_scale ="
            f" {show(o.initial_loss_scale)}: use optim.min_loss_scale <= {show(o.initial_loss_scale)}"
        )


def _check_data(cfg: Config) -> None:
    d = cfg.data
    given = d.path or d.valid_path
    if d.mock and given:
        raise Refused(
            f"data.mock = true and the files {show(given)} are both given: use data=mock for mock data, or data.mock=false"
        )
    if not d.mock and not d.path and not cfg.run.dry_run:
        raise Refused("data.path is empty and data.mock = false: give data.path=[PREFIX], or use data=mock")
    if d.weights is not None and len(d.weights) != len(d.path):
        raise Refused(f"data.weights has {len(d.weights)} entries, data.path has {len(d.path)}: give one weight per path")
    if not d.mock and d.mock_samples != DataConfig.mock_samples:
        raise changes_nothing("data.mock_samples", d.mock_samples, "data.mock = false", "data=mock")
    if d.packing != "none" and d.mock:
        raise changes_nothing("data.packing", d.packing, "data.mock = true", "data.path=[PREFIX]")
    if d.packing == "none" and d.cache_dir is not None:
        raise changes_nothing("data.cache_dir", d.cache_dir, "data.packing = none", "data.packing=best_fit")
    validation = _validation_share(d.split)
    if cfg.train.eval_interval and d.path and not (d.valid_path or validation):
        raise Refused(
            f"train.eval_interval = {cfg.train.eval_interval}, but data.split = {d.split} has no validation part: use"
            " data.split=99,1 or data.valid_path, or train.eval_interval=0"
        )


def _validation_share(split: str) -> float:
    try:
        parts = [float(p) for p in split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(math.isfinite(p) and p >= 0 for p in parts) or parts[0] == 0:
        raise Refused(f"data.split = {split} must be one to three numbers, for training, validation and the rest, as in 99,1")
    return parts[1] if len(parts) > 1 else 0.0


def _check_checkpoint(cfg: Config) -> None:
    c = cfg.checkpoint
    if c.init_from is not None and c.resume not in ("auto", "never"):
        raise Refused(
            f"checkpoint.init_from = {c.init_from} and checkpoint.resume = {c.resume} both give the first weights: leave"
            " init_from out, or use checkpoint.resume=never"
        )


def _check_log(cfg: Config) -> None:
    log = cfg.log
    if log.wandb == "disabled" and log.wandb_project != LogConfig.wandb_project:
        raise changes_nothing("log.wandb_project", log.wandb_project, "log.wandb = disabled", "log.wandb=offline or online")
    for name in ("prometheus_address", "prometheus_port", "prometheus_targets"):
        value = getattr(log, name)
        if not log.prometheus and value != getattr(LogConfig, name):
            raise changes_nothing(f"log.{name}", value, "log.prometheus = false", "log.prometheus=true")
