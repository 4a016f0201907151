"""A training step as the time model sees it: the sizes of the model, the grid, the batch and how the stack runs them.

No torch here. Of a recipe it is made by `Workload.of`; of runs of other programs by `Workload.of_model`, with their `Stack`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from megakit.config import algorithms
from megakit.config.derived import head_dim, reach
from megakit.config.schema import Config, ModelConfig
from megakit.modeling.layout import model_stages, padded_vocabulary
from megakit.observe.flops import flops_per_token
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.planner.operators import by_kernels
from megakit.planner.states import micro_batches
from megakit.planner.widths import GRADIENT_BYTES


@dataclass(frozen=True)
class Stack:
    """How a program runs a step, as far as its time depends on it."""

    name: str
    flash: bool = True
    """Attention never writes its scores to memory."""
    flash_version: int = 99
    """Of FlashAttention, whose kernels 1, 2 and 3 were written for successive GPUs; a high number: the best there is."""
    fused: bool = True
    """Norms, residuals and activations are one kernel each."""
    kernels: tuple[str, ...] = ()
    """Operators by the kernels of csrc/ (operators.py); the others as `fused` and `loss_bytes` say."""
    loss_bytes: int = 32
    """Moved per logit by the loss and its gradient."""
    tp_overlap: bool = False
    """Tensor parallel traffic runs beside the matrix products."""
    dp_overlap: bool = True
    """Gradients are reduced during the last backward pass, new weights gathered during the first forward pass."""
    broadcasts: bool = False
    """ZeRO 1 and 2: new weights are sent by one broadcast per shard, after the step, in place of an all-gather."""
    accumulates: bool = True
    """Weight gradients are added to fp32 ones in memory by the product that makes them; else written in the compute type."""
    pp_overlap: bool = True
    """Transfers between stages run beside the computation of another micro-batch, with virtual stages."""
    stops_early: bool = False
    """Recomputation of a layer ends where its last product begins, whose output the backward pass doesn't need (torch's does)."""
    checkpoint_s: float = 0.0
    """Seconds for which the GPU waits when a layer's recomputation starts: old programs read its random state back first."""
    host_s: float = 0.0
    """Seconds for which the GPU waits for the host in a layer's forward pass, where kernels are launched one after another's
    end (CUDA_LAUNCH_BLOCKING=1); twice that backward."""
    pp_scatter: bool = False
    """Transfers are cut over the tp ranks also without sequence parallelism."""
    dp_inside: bool = False
    """Ranks are numbered with dp inside of pp, so that a node has more ranks of a data parallel group."""
    fp8_whole: bool = True
    """With precision fp8 weight gradients are products in fp8, too, and sequence parallelism gathers what is fp8 already."""
    factor: float = 1.0
    """Time of a layer relative to the constants of the GPU: what one program does better or worse throughout."""


MEGAKIT = Stack("megakit", fused=False, loss_bytes=40, fp8_whole=False)


@dataclass(frozen=True)
class Workload:
    """All that the time of a step depends on besides the hardware. Hashable; vary one with dataclasses.replace."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    """SwiGLU: the MLP's first product makes gate and up."""
    rope: bool
    bias: bool
    bias_qkv: bool
    """Of queries, keys and values, without those of other linear layers."""
    head_norms: bool
    """Each head's query and key are normed."""
    reach: float
    """Twice the mean number of tokens before a token that it sees: seq without a window."""
    learned: int
    """Rows of a learned position table; 0: none."""
    tied: bool
    vocab: int
    """With the padding that the grid needs."""
    seq: int
    flops_per_token: int
    """Useful ones, attention over the full square (observe/flops.py)."""
    causal_flops_per_token: int
    tp: int
    pp: int
    cp: int
    dp: int
    micro_batch_size: int
    micro_batches: int
    """Of one data parallel rank per step."""
    stage_layers: tuple[int, ...]
    """Layers of each of the pp x virtual_stages stages, in order of the model."""
    virtual_stages: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    zero_group: int = 1
    """Ranks that share one copy of what ZeRO shards; dp x cp without hybrid sharding."""
    zero3_each: bool = True
    """ZeRO 3 reduces gradients with every micro-batch, not once a step."""
    sequence_parallel: bool = False
    cp_gather: bool = False
    """Keys and values are gathered before attention, not passed around during it."""
    precision: str = "bf16"
    """bf16 | fp16 | fp32 | fp8 (linear layers in fp8, the rest in bf16)."""
    gradient_bytes: int = 4
    bucket_size: int = 40_000_000
    """Elements that ZeRO 0 to 2 reduce in one message."""
    recompute: str = "none"
    """none | selective | full | alternate (every other matrix product and all between them)."""
    recompute_layers: int | None = None
    """Of each pipeline rank, with recompute full; None: all."""
    states_per_parameter: int = 3
    """fp32 numbers of the optimizer per element of the layers' matrices, the master (in fp32 the weight) among them."""
    states_of_tables: int = 3
    """The same of the embedding and the head, which Muon leaves to AdamW."""
    loss_chunk: int | None = None
    """Tokens whose logits are held at once: the head's product is made again in the backward pass. None: all."""
    ns_steps: int = 0
    """Newton-Schulz iterations of Muon; 0: another optimizer."""
    stack: Stack = MEGAKIT

    @classmethod
    def of(cls, cfg: Config, stack: Stack = MEGAKIT) -> Workload:
        """Of a resolved recipe (rules.resolve). Raises Refused where its layers don't fit the stages."""
        p, t, muon = cfg.parallel, cfg.train, cfg.optim.name == "muon"
        if stack is MEGAKIT:
            stack = replace(stack, kernels=by_kernels(cfg))
        grid = Grid.of(p)
        return cls.of_model(
            cfg.model,
            seq=t.seq_len,
            tp=p.tp,
            pp=p.pp,
            cp=p.cp,
            dp=grid.dp,
            micro_batch_size=t.micro_batch_size,
            micro_batches=micro_batches(cfg, grid),
            stage_layers=tuple(len(stage.layers) for stage in model_stages(cfg)),
            virtual_stages=p.virtual_stages,
            schedule=p.schedule,
            zero=p.zero,
            zero_group=grid.size("dp_shard"),
            zero3_each=p.zero3_reduce == "microbatch",
            sequence_parallel=p.sequence_parallel and p.tp > 1,
            cp_gather=p.cp_comm_type == "all_gather",
            precision=t.precision,
            gradient_bytes=GRADIENT_BYTES[t.grad_dtype],
            bucket_size=p.bucket_size,
            recompute=p.recompute,
            recompute_layers=p.recompute_layers,
            states_per_parameter=1 + len(algorithms.kept(cfg.optim, cfg.optim.name)),
            states_of_tables=1 + len(algorithms.kept(cfg.optim, "adamw" if muon else cfg.optim.name)),
            ns_steps=(cfg.optim.ns_steps or algorithms.NS_STEPS) if muon else 0,
            loss_chunk=cfg.ops.loss_chunk,
            stack=stack,
        )

    @classmethod
    def of_model(cls, m: ModelConfig, *, seq: int, tp: int, **keys) -> Workload:
        """Of a model and the fields that describe the run."""
        full, causal = _flops(astuple(m), seq)
        return cls(
            layers=m.num_layers,
            hidden=m.hidden_size,
            heads=m.num_attention_heads,
            kv_heads=m.num_query_groups,
            head_dim=head_dim(m),
            ffn=m.ffn_hidden_size,
            gated=m.activation == "swiglu",
            rope=m.position_embedding == "rope",
            bias=m.add_bias_linear,
            bias_qkv=m.add_qkv_bias,
            head_norms=m.qk_layernorm,
            reach=reach(m, seq),
            learned=m.max_position_embeddings if m.position_embedding == "learned" else 0,
            tied=m.tie_embeddings,
            vocab=padded_vocabulary(m, tp),
            seq=seq,
            tp=tp,
            flops_per_token=full,
            causal_flops_per_token=causal,
            **keys,
        )

    @property
    def world(self) -> int:
        """GPUs."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.micro_batch_size * self.micro_batches * self.dp

    @property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each place on the pp axis, by chunk."""
        return _rank_stages(self.schedule, self.pp, self.virtual_stages)

    @property
    def rank_layers(self) -> list[int]:
        """Layers of each place on the pp axis."""
        return [sum(self.stage_layers[s] for s in held) for held in self.rank_stages]

    @property
    def layer_elements(self) -> int:
        """Elements of a layer's matrices on one rank."""
        width = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.hidden * (width + self.ffn * (3 if self.gated else 2)) // self.tp

    @property
    def table_elements(self) -> int:
        """Elements of the embedding, or of the head, on one rank."""
        return self.hidden * self.vocab // self.tp


@lru_cache(maxsize=256)
def _rank_stages(schedule: str, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    where = generators.placement(schedule, pp, chunks)
    return tuple(where.held(rank) for rank in range(pp))


@lru_cache(maxsize=256)
def _flops(fields: tuple, seq: int) -> tuple[int, int]:
    """Useful FLOPs per token, full and causal: counting a model's parameters takes milliseconds, and a search asks often."""
    model = ModelConfig(*fields)
    return flops_per_token(model, seq), flops_per_token(model, seq, causal=True)
