"""Which layers and parameters a rank holds: pure data that the model is built from and the planner counts. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megakit.config.derived import head_dim
from megakit.config.rules import check_stages
from megakit.config.schema import Config, ModelConfig, ParallelConfig
from megakit.errors import Refused
from megakit.modeling import groups
from megakit.modeling.balance import balanced
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.schedule import Placement
from megakit.parallel.shard import ParamSpec, ShardSpec


@dataclass(frozen=True)
class StageLayout:
    """What one pipeline stage is made of."""

    index: int
    count: int
    """Number of stages."""
    layers: range
    ends_together: bool = False
    """The first and the last stage are on the same rank."""

    @property
    def first(self) -> bool:
        """Has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Has the output head and the loss."""
        return self.index == self.count - 1


def model_placement(cfg: Config) -> Placement:
    """Where the stages of the model are."""
    p = cfg.parallel
    return generators.placement(p.schedule, p.pp, p.virtual_stages)


def model_stages(cfg: Config) -> list[StageLayout]:
    """All stages, in order of the layers.

    Raises Refused where the layers don't fit them.
    """
    p, layers, where = cfg.parallel, cfg.model.num_layers, model_placement(cfg)
    check_stages(cfg)
    given = p.layers_per_stage
    if given is None and p.stage_balance == "cost":
        given = balanced(cfg.model, cfg.train.seq_len, where.stages)
    together = where.place(0)[0] == where.place(where.stages - 1)[0]
    stages = [replace(stage, ends_together=together) for stage in split_layers(layers, where.stages, given)]
    most = max(len(stage.layers) for stage in stages)
    if p.recompute_layers is not None and p.recompute_layers > most:
        raise Refused(
            f"parallel.recompute_layers = {p.recompute_layers}, but the largest of the pipeline stages has {most} layers: use"
            f" parallel.recompute_layers={most}, or parallel.recompute_layers=null to recompute all"
        )
    return stages


def rank_stages(cfg: Config, rank: int) -> list[StageLayout]:
    """The stages of one pipeline rank, one per chunk."""
    stages = model_stages(cfg)
    return [stages[s] for s in model_placement(cfg).held(rank)]


def split_layers(num_layers: int, stages: int, given: list[int] | None = None) -> list[StageLayout]:
    """Cut the layers into pipeline stages: as `given`, or as even as possible with the remainder in the middle stages,
    since the first stage also has the embedding and the last one the loss.

    Raises Refused where a stage would have no layer, or `given` doesn't add up.
    """
    if given is None:
        if num_layers < stages:
            raise Refused(
                f"model.num_layers = {num_layers} is less than parallel.pp x parallel.virtual_stages = {stages}: use at most"
                f" {num_layers} stages"
            )
        base, extra = divmod(num_layers, stages)
        middle = sorted(range(stages), key=lambda s: (min(s, stages - 1 - s) == 0, abs(2 * s - stages + 1), s))[:extra]
        given = [base + (s in middle) for s in range(stages)]
    if len(given) != stages:
        raise Refused(
            f"parallel.layers_per_stage has {len(given)} entries, parallel.pp x parallel.virtual_stages = {stages}:"
            " give one per stage, in order of the model"
        )
    if min(given) < 1 or sum(given) != num_layers:
        raise Refused(
            f"parallel.layers_per_stage = {list(given)} adds up to {sum(given)}, model.num_layers = {num_layers}:"
            " give each stage at least 1 layer and each layer one stage"
        )
    ends = [sum(given[: s + 1]) for s in range(stages)]
    return [StageLayout(s, stages, range(e - n, e)) for s, (n, e) in enumerate(zip(given, ends, strict=True))]


def stage_params(cfg: Config, stage: StageLayout, tp: int, tp_rank: int) -> dict[str, ParamSpec]:
    """The parameters of one stage on one tensor-parallel rank, by global name, in the order of the forward pass.

    A tied output head on another rank than the embedding appears as its second copy under the embedding's name; on the same
    rank it is the embedding of the first stage.
    """
    m, std = cfg.model, cfg.model.init_method_std
    over_tp = ("tp",) if tp > 1 else ()
    partial = over_tp if cfg.parallel.sequence_parallel else ()  # where each rank sees its part of the sequence
    out: dict[str, ParamSpec] = {}

    def add(shard: ShardSpec, init: float | str, decay: bool = True, hidden: bool = False, **kw) -> None:
        group = groups.group_of(cfg.optim, shard.name, decay, hidden)
        out[shard.name] = ParamSpec(shard, init, decay, group, **kw)

    def replicated(
        name: str, shape: tuple[int, ...], init: float | str, decay: bool = False, late: tuple[str, ...] = partial
    ) -> None:
        add(ShardSpec.replicated(name, shape), init, decay=decay, late=late, replicated=True, owner=tp_rank == 0)

    def norm(name: str, width: int = m.hidden_size, late: tuple[str, ...] = partial) -> None:
        replicated(f"{name}.weight", (width,), "ones", late=late)
        if m.normalization == "layernorm":
            replicated(f"{name}.bias", (width,), "zeros", late=late)

    def column(name: str, parts: tuple[int, ...], bias: bool = m.add_bias_linear) -> None:
        add(ShardSpec.rows(f"{name}.weight", parts, m.hidden_size, tp_rank, tp), std, hidden=True)
        if bias:
            add(ShardSpec.rows(f"{name}.bias", parts, None, tp_rank, tp), "zeros", decay=False)

    def row(name: str, cols: int) -> None:
        add(ShardSpec.cols(f"{name}.weight", m.hidden_size, cols, tp_rank, tp), std / math.sqrt(2 * m.num_layers), hidden=True)
        if m.add_bias_linear:
            replicated(f"{name}.bias", (m.hidden_size,), "zeros")

    def vocabulary(name: str, **kw) -> None:
        add(ShardSpec.padded_rows(name, m.vocab_size, m.hidden_size, tp_rank, tp, m.make_vocab_size_divisible_by), std, **kw)

    apart = m.tie_embeddings and stage.count > 1 and not stage.ends_together
    if stage.first:
        uses = 2 if m.tie_embeddings and not apart else 1
        vocabulary("embedding.word.weight", late=("embed",) if apart else (), uses=uses)
        if m.position_embedding == "learned":
            replicated("embedding.position.weight", (m.max_position_embeddings, m.hidden_size), std, decay=True)
    kv = m.num_query_groups * head_dim(m)
    for i in stage.layers:
        norm(f"layers.{i}.attention_norm")
        column(f"layers.{i}.attention.qkv", (m.num_attention_heads * head_dim(m), kv, kv), m.add_bias_linear or m.add_qkv_bias)
        for name in ("q_norm", "k_norm") if m.qk_layernorm else ():
            norm(f"layers.{i}.attention.{name}", head_dim(m), over_tp)  # of this rank's heads only
        row(f"layers.{i}.attention.out", m.num_attention_heads * head_dim(m))
        norm(f"layers.{i}.mlp_norm")
        column(f"layers.{i}.mlp.up", (m.ffn_hidden_size,) * (2 if m.activation == "swiglu" else 1))
        row(f"layers.{i}.mlp.down", m.ffn_hidden_size)
    if stage.last:
        norm("final_norm")
        if not m.tie_embeddings:
            vocabulary("output.weight")
        elif apart:
            vocabulary("embedding.word.weight", late=("embed",), owner=False)
    return out


def padded_vocabulary(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding and of the head over all `tp` ranks, which hold equally many: the vocabulary and its padding."""
    return tp * ShardSpec.padded_rows("", model.vocab_size, 1, 0, tp, model.make_vocab_size_divisible_by).numel


def units(params: dict[str, ParamSpec]) -> list[list[ParamSpec]]:
    """The parameters of a stage as ZeRO 3 gathers them: those in no layer first, then each layer's."""
    out: dict[str, list[ParamSpec]] = {"": []}
    for name, spec in params.items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        out.setdefault(layer, []).append(spec)
    return list(out.values())


def recomputed_layers(parallel: ParallelConfig, layers: int) -> int:
    """How many of a stage's layers are recomputed as a whole: the first ones."""
    if parallel.recompute != "full":
        return 0
    return layers if parallel.recompute_layers is None else min(layers, parallel.recompute_layers)


def context_length(m: ModelConfig) -> int:
    """Positions that the model is meant for, RoPE scaling included. `linear` stretches max_position_embeddings itself, as
    in Hugging Face's configurations; yarn the original context; llama3 states the stretched one."""
    if m.rope_scaling == "linear":
        return math.floor(m.max_position_embeddings * (m.rope_factor or 1.0))
    if m.rope_scaling == "yarn":
        stretched = (m.rope_original_max_position_embeddings or 0) * (m.rope_factor or 1.0)
        return max(m.max_position_embeddings, math.floor(stretched))
    return m.max_position_embeddings


def model_params(cfg: Config) -> dict[str, ParamSpec]:
    """The parameters of the whole model, uncut, by name."""
    (stage,) = split_layers(cfg.model.num_layers, 1)
    return stage_params(cfg, stage, 1, 0)


def parameter_count(cfg: Config) -> int:
    """Parameters of the whole model: tied ones once, padding not at all."""
    return sum(math.prod(p.shard.shape) for p in model_params(cfg).values())
