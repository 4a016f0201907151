"""CPU-seconds per 1,000 tokens of a 20 M parameter Llama: megakit's training step beside a plain PyTorch loop.

    python benchmarks/train_cpu.py [--steps 8] [--threads 1]

Both have the same weights, batch, AdamW (torch's fused one) and gradient clipping, in one process, and take their steps in
turn, so that a drift of the machine's speed meets both. The plain loop is what one would write without a framework:
nn.Linear, scaled_dot_product_attention, F.cross_entropy, loss.backward(), clip_grad_norm_. In bf16 it keeps fp32 weights
and runs under autocast.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the plain command finds this clone from anywhere

from megakit.config.derived import head_dim
from megakit.config.schema import Config
from megakit.modeling.layout import parameter_count
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from megakit.train.engine import Engine


def config(precision: str) -> Config:
    cfg = Config()
    m, t = cfg.model, cfg.train
    m.family, m.num_layers, m.hidden_size, m.ffn_hidden_size = "llama", 8, 384, 1024
    m.num_attention_heads, m.num_query_groups, m.vocab_size, m.max_position_embeddings = 6, 2, 8192, 512
    t.micro_batch_size, t.global_batch_size, t.seq_len, t.precision = 4, 8, 512, precision
    cfg.optim.lr, cfg.parallel.dp = 3e-4, 1
    return cfg


class PlainBlock(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        m, kv = cfg.model, cfg.model.num_query_groups * head_dim(cfg.model)
        self.m, self.kv = m, kv
        self.norm1, self.norm2 = (nn.RMSNorm(m.hidden_size, eps=m.norm_epsilon) for _ in range(2))
        self.qkv = nn.Linear(m.hidden_size, m.hidden_size + 2 * kv, bias=False)
        self.out = nn.Linear(m.hidden_size, m.hidden_size, bias=False)
        self.up = nn.Linear(m.hidden_size, 2 * m.ffn_hidden_size, bias=False)
        self.down = nn.Linear(m.ffn_hidden_size, m.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm1(x)).split([self.m.hidden_size, self.kv, self.kv], -1)
        q, k, v = (t.unflatten(-1, (-1, head_dim(self.m))).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Plain(nn.Module):
    """The same decoder without a framework."""

    def __init__(self, cfg: Config):
        super().__init__()
        m = cfg.model
        self.cfg = cfg
        self.embed = nn.Embedding(m.vocab_size, m.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(cfg) for _ in range(m.num_layers))
        self.norm = nn.RMSNorm(m.hidden_size, eps=m.norm_epsilon)
        self.head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        d = head_dim(m)
        angle = torch.outer(torch.arange(cfg.train.seq_len).float(), m.rotary_base ** -(torch.arange(0, d, 2).float() / d))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())

    def take_weights(self, e: Engine) -> None:
        theirs = e.buffers.parameters
        pairs = {"embed.weight": "embedding.word.weight", "norm.weight": "final_norm.weight", "head.weight": "output.weight"}
        for i in range(self.cfg.model.num_layers):
            pairs |= {
                f"blocks.{i}.norm1.weight": f"layers.{i}.attention_norm.weight",
                f"blocks.{i}.norm2.weight": f"layers.{i}.mlp_norm.weight",
                f"blocks.{i}.qkv.weight": f"layers.{i}.attention.qkv.weight",
                f"blocks.{i}.out.weight": f"layers.{i}.attention.out.weight",
                f"blocks.{i}.up.weight": f"layers.{i}.mlp.up.weight",
                f"blocks.{i}.down.weight": f"layers.{i}.mlp.down.weight",
            }
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(theirs[pairs[name]][: p.shape[0]])


def plain_step(cfg: Config, e: Engine) -> Callable[[torch.Tensor], float]:
    model = Plain(cfg)
    model.take_weights(e)
    o, size = cfg.optim, cfg.train.micro_batch_size
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)

    def step(tokens: torch.Tensor) -> float:
        total, parts = 0.0, tokens.split(size)
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=cfg.train.precision == "bf16"):
                loss = model(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
        adamw.step()
        adamw.zero_grad()
        return total

    return step


def measure(precision: str, steps: int) -> tuple[list[float], list[float], float]:
    """CPU-seconds per 1,000 tokens of each step, megakit's and plain; largest relative difference of the losses."""
    cfg = config(precision)
    state = ParallelState(Grid(), torch.device("cpu"), timedelta(seconds=60))
    e = Engine(cfg, state, Comm(state))
    e.initialize()
    plain = plain_step(cfg, e)
    ours_s, plain_s, difference = [], [], 0.0
    generator = torch.Generator().manual_seed(1)
    for i in range(steps + 2):
        shape = (cfg.train.global_batch_size, cfg.train.seq_len + 1)
        tokens = torch.randint(cfg.model.vocab_size, shape, generator=generator)
        start = time.process_time()
        a = e.train_step(e.split(tokens, 0), cfg.optim.lr).loss
        middle = time.process_time()
        b = plain(tokens)
        end = time.process_time()
        difference = max(difference, abs(a - b) / b)
        if i >= 2:  # the first steps warm caches and allocate
            thousands = tokens[:, 1:].numel() / 1000
            ours_s.append((middle - start) / thousands)
            plain_s.append((end - middle) / thousands)
    return ours_s, plain_s, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    title = (
        f"{parameter_count(config('fp32')) / 1e6:.1f} M parameter Llama, CPU-seconds per 1,000 tokens, {args.threads} thread(s)"
    )
    table = Table("precision", "megakit", "plain torch", "ratio (median)", "ratio (min-max)", "loss difference", title=title)
    for precision in ("fp32", "bf16"):
        ours, plain, difference = measure(precision, args.steps)
        ratios = [a / b for a, b in zip(ours, plain)]
        table.add_row(
            precision,
            f"{statistics.median(ours):.3f}",
            f"{statistics.median(plain):.3f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f}-{max(ratios):.3f}",
            f"{difference:.1e}",
        )
    Console(width=120).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
