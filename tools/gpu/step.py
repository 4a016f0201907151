"""One training step of 8 layers of Llama 7B's shape on one GPU: ours, and transformers' with and without help.

The same sizes, batch, precision (bf16 weights, fp32 masters) and optimizer (AdamW, clipped) for all; weights are random, for
their values take no time. Useful FLOPs count attention's causal half (megakit/observe/flops.py).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megakit.config import rules
from megakit.config.compose import compose
from megakit.config.schema import Config
from megakit.observe.flops import flops_per_token, mfu
from megakit.planner.hardware import catalogue

PROGRAMS = {"csrc": 30, "torch": 25, "transformers+compile+liger": 60, "transformers": 25}
"""And the seconds of each at most; compiling takes some."""
LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
WARM_UP, STEPS = 3, 20
BIG = ("model.num_layers=8", "train.seq_len=4096", "train.micro_batch_size=4")
SMALL = (
    *("model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=176", "model.num_attention_heads=4"),
    *("model.num_query_groups=4", "model.vocab_size=512", "train.seq_len=32", "train.micro_batch_size=2"),
)


def config(small: bool, backend: str = "torch") -> Config:
    """The recipe that is measured: one micro-batch a step."""
    size = 2 if small else 4
    words = (
        *("+recipe=llama7b", *(SMALL if small else BIG), f"train.global_batch_size={size}", f"ops.backend={backend}"),
        *("cluster.nodes=1", "cluster.gpus_per_node=1", "parallel.dp=1", "parallel.zero=0", "parallel.recompute=none"),
        *(f"optim.lr={LR}", f"optim.clip_grad={CLIP}", f"optim.weight_decay={DECAY}"),
    )
    return rules.resolve(compose(list(words)), 1)


def measure(program: str, device: torch.device, small: bool, deadline: float) -> dict[str, Any]:
    """{program, step_s, tokens_per_s, tflops, mfu (causal; None for an unknown GPU), peak_gib, loss, note}.

    Steps are taken until `deadline` (`time.monotonic`), at most STEPS; at least one.
    """
    cfg, note = config(small), ""
    torch.manual_seed(0)
    tokens = torch.randint(cfg.model.vocab_size, (cfg.train.global_batch_size, cfg.train.seq_len + 1), device=device)
    if program in ("csrc", "torch"):
        step = _engine_step(config(small, program), device, tokens)
    else:
        step, note = _transformers_step(cfg, device, tokens, helped="+" in program)
    losses, seconds = [], []
    for i in range((1 if small else WARM_UP) + STEPS):
        started = time.perf_counter()
        losses.append(step())  # the loss is read: the GPU has finished
        if i >= (1 if small else WARM_UP):
            seconds.append(time.perf_counter() - started)
        if seconds and (time.monotonic() > deadline or len(seconds) >= (2 if small else STEPS)):
            break
    took = statistics.median(seconds)
    rate = cfg.train.global_batch_size * cfg.train.seq_len / took
    flops = flops_per_token(cfg.model, cfg.train.seq_len, causal=True)
    return {
        "program": program,
        "step_s": took,
        "steps": len(seconds),
        "tokens_per_s": rate,
        "tflops": rate * flops / 1e12,
        "mfu": mfu(rate, flops, peak_tflops(device)),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "loss": losses[-1],
        "note": note,
    }


def peak_tflops(device: torch.device) -> float | None:
    """bf16, dense, of a GPU that the planner knows by name; None of others."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = [word for word in catalogue() if word.split("_")[0] in name]
    return catalogue()[max(known, key=len)].bf16_tflops if known else None


def _engine_step(cfg: Config, device: torch.device, tokens: torch.Tensor) -> Callable[[], float]:
    """The engine's own, as a run of one rank takes it."""
    from megakit.parallel.comm import Comm
    from megakit.parallel.grid import Grid, ParallelState
    from megakit.train.engine import Engine

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    state = ParallelState(Grid.of(cfg.parallel), device, timedelta(minutes=5))
    engine = Engine(cfg, state, Comm(state))
    if engine.ops_note.startswith("NOTE"):
        raise RuntimeError(engine.ops_note)
    engine.initialize()
    return lambda: engine.train_step(engine.split(tokens, 0), LR).loss


def _transformers_step(cfg: Config, device: torch.device, tokens: torch.Tensor, helped: bool) -> tuple[Callable[[], float], str]:
    """Of LlamaForCausalLM, `helped` by torch.compile and Liger-Kernel; and what helped, if not both."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    library: Any = transformers
    m, note = cfg.model, ""
    if helped:
        try:
            from liger_kernel.transformers import apply_liger_kernel_to_llama
        except ImportError:
            note = "Liger-Kernel is not installed: torch.compile alone"
        else:
            apply_liger_kernel_to_llama()
    sizes = library.LlamaConfig(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_query_groups,
        max_position_embeddings=max(cfg.train.seq_len, 1),
        rms_norm_eps=m.norm_epsilon,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = library.LlamaForCausalLM(sizes).to(torch.bfloat16).train()
    optimizer = _Masters(list(model.parameters()))
    inputs = tokens[:, :-1].contiguous()
    run = torch.compile(model) if helped and device.type == "cuda" else model

    def step() -> float:
        loss = run(input_ids=inputs, labels=inputs).loss  # it shifts them itself
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, note


class _Masters:
    """AdamW on fp32 copies of bf16 weights, by torch's fused kernel; gradients clipped."""

    def __init__(self, weights: list[torch.nn.Parameter]):
        self.weights = weights
        self.masters = [torch.nn.Parameter(w.detach().float()) for w in weights]
        self.inner = torch.optim.AdamW(self.masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, weight in zip(self.masters, self.weights):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
        self.inner.step()
        torch._foreach_copy_([*self.weights], [*self.masters])
        self.inner.zero_grad(set_to_none=True)
