"""The same training in plain torch, in one process, sharing no code with the engine: the reference of the parity tests."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F

from megakit.config.schema import Config, ModelConfig
from megakit.parallel.loss import IGNORE
from tests.tiny import batch, documents_of


def _wavelength(m: ModelConfig, pair: int, d: int) -> float:
    """Positions of one turn of a pair, scaled: each kind told pair by pair, from the papers."""
    plain = 2 * math.pi * m.rotary_base ** (2 * pair / d)
    if m.rope_scaling == "none":
        return plain
    stretched = plain * m.rope_factor
    if m.rope_scaling == "linear":
        return stretched
    turns = m.rope_original_max_position_embeddings / plain
    if m.rope_scaling == "llama3":
        if turns <= m.rope_low_freq_factor:
            return stretched
        if turns >= m.rope_high_freq_factor:
            return plain
        kept = (turns - m.rope_low_freq_factor) / (m.rope_high_freq_factor - m.rope_low_freq_factor)
    else:
        wanted = [m.rope_original_max_position_embeddings / (2 * math.pi * beta) for beta in (m.rope_beta_fast, m.rope_beta_slow)]
        fast, slow = (d / 2 * math.log(w, m.rotary_base) for w in wanted)
        fast, slow = max(math.floor(fast), 0), math.ceil(slow)
        kept = 1 - min(max((pair - fast) / (slow - fast), 0), 1)
    return 1 / (kept / plain + (1 - kept) / stretched)


def _rotate(x_BNSD: torch.Tensor, m: ModelConfig) -> torch.Tensor:
    s, d = x_BNSD.shape[-2:]
    turns = torch.arange(s, dtype=torch.float64)[:, None] / torch.tensor([_wavelength(m, i, d) for i in range(d // 2)]).double()
    angle = (2 * math.pi * turns).repeat(1, 2)
    half = torch.cat([-x_BNSD[..., d // 2 :], x_BNSD[..., : d // 2]], -1)
    longer = 1.0
    if m.rope_scaling == "yarn":
        longer = m.rope_attention_factor or math.log(m.rope_factor) / 10 + 1
    return longer * (x_BNSD * angle.cos().to(x_BNSD) + half * angle.sin().to(x_BNSD))


def _attention(q, k, v, documents: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """[B, N, S, D] -> [B, N, S, D]: of each document by itself, one sample after the other; with a window each token by
    itself, on a slice of the keys."""
    if documents is not None:
        samples = []
        for i, row in enumerate(documents.tolist()):
            ends = [at for at in range(1, len(row)) if row[at] != row[at - 1]]
            spans = [slice(a, b) for a, b in zip([0, *ends], [*ends, len(row)])]
            samples.append(torch.cat([_attention(*(t[i : i + 1, :, at] for t in (q, k, v)), None, window) for at in spans], 2))
        return torch.cat(samples)
    if window is not None:
        rows = [slice(max(0, i + 1 - window), i + 1) for i in range(q.shape[2])]
        scores = [q[:, :, i : i + 1] @ k[:, :, at].transpose(-1, -2) / q.shape[-1] ** 0.5 for i, at in enumerate(rows)]
        return torch.cat([s.softmax(-1) @ v[:, :, at] for s, at in zip(scores, rows)], 2)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def logits(cfg: Config, w: dict[str, torch.Tensor], tokens: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
    """tokens and documents [B, S] -> [B, S, V]"""
    m = cfg.model
    d = m.kv_channels or m.hidden_size // m.num_attention_heads

    def norm(x, name):
        if m.normalization == "rmsnorm":
            return x * (x.square().mean(-1, keepdim=True) + m.norm_epsilon).rsqrt() * w[f"{name}.weight"]
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], m.norm_epsilon)

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    x = w["embedding.word.weight"][tokens]
    if m.position_embedding == "learned":
        x = x + w["embedding.position.weight"][: tokens.shape[1]]
    for i in range(m.num_layers):
        n, kv = f"layers.{i}", m.num_query_groups * d
        rows = [m.num_attention_heads * d, kv, kv]
        q, k, v = linear(norm(x, f"{n}.attention_norm"), f"{n}.attention.qkv").split(rows, -1)
        q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
        if m.qk_layernorm:
            q, k = norm(q, f"{n}.attention.q_norm"), norm(k, f"{n}.attention.k_norm")
        k, v = (t.repeat_interleave(m.num_attention_heads // m.num_query_groups, 1) for t in (k, v))
        if m.position_embedding == "rope":
            q, k = _rotate(q, m), _rotate(k, m)
        y = _attention(q, k, v, documents, m.window_size)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{n}.attention.out")
        y = linear(norm(x, f"{n}.mlp_norm"), f"{n}.mlp.up")
        if m.activation == "swiglu":
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh" if m.activation == "gelu_tanh" else "none")
        x = x + linear(y, f"{n}.mlp.down")
    return F.linear(norm(x, "final_norm"), w["embedding.word.weight" if m.tie_embeddings else "output.weight"])


class Muon:
    """Singular values are taken up by the quintic one by one, in float64: no Newton-Schulz iteration on matrices."""

    def __init__(self, cfg: Config, named: dict[str, torch.Tensor]):
        self.cfg, self.named = cfg, named
        self.momentum = {name: torch.zeros_like(t) for name, t in named.items()}

    @torch.no_grad()
    def step(self) -> None:
        o, m = self.cfg.optim, self.cfg.model
        u = 0.95 if o.momentum is None else o.momentum
        d = m.kv_channels or m.hidden_size // m.num_attention_heads
        kv = m.num_query_groups * d
        for name, w in self.named.items():
            momentum = self.momentum[name].mul_(u).add_(w.grad, alpha=1 - u)
            direction = momentum if o.nesterov is False else (1 - u) * w.grad + u * momentum
            rows = [w.shape[0]]
            if "qkv" in name:
                rows = [m.num_attention_heads * d, kv, kv]
            elif "mlp.up" in name and m.activation == "swiglu":
                rows = [m.ffn_hidden_size] * 2
            w.mul_(1 - o.lr * multiplier(o.lr_mult, name) * o.weight_decay * multiplier(o.wd_mult, name))
            for part, n in zip(w.split(rows), direction.split(rows)):
                left, s, right = torch.linalg.svd(n / n.norm(), full_matrices=False)
                for _ in range(o.ns_steps or 5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                part.sub_(left * s @ right, alpha=o.lr * multiplier(o.lr_mult, name) * 0.2 * max(part.shape) ** 0.5)


def multiplier(patterns: dict[str, float] | None, name: str) -> float:
    found = [value for pattern, value in (patterns or {}).items() if fnmatchcase(name, pattern)]
    return found[-1] if found else 1.0


def optimizers(cfg: Config, w: dict[str, torch.Tensor]) -> list:
    o, out = cfg.optim, []
    if o.name == "muon":
        hidden = {name: t for name, t in w.items() if name.startswith("layers.") and t.dim() == 2}
        out.append(Muon(cfg, hidden))
        w = {name: t for name, t in w.items() if name not in hidden}
    groups = [
        {
            "params": [t],
            "lr": o.lr * multiplier(o.lr_mult, name),
            "weight_decay": o.weight_decay * multiplier(o.wd_mult, name) * ("norm" not in name and "bias" not in name),
        }
        for name, t in w.items()
    ]
    if o.name == "sgd":
        momentum = 0.9 if o.momentum is None else o.momentum
        return [torch.optim.SGD(groups, momentum=momentum, nesterov=bool(o.nesterov))]
    return [*out, torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)]


def train(cfg: Config, start: dict[str, torch.Tensor], steps: int = 5, dtype=torch.float64, sizes=None):
    """From the global weights -> [(loss, gradient norm)], the gradients of the first step, the weights after the last.

    `sizes`: samples of each step, in place of train.global_batch_size.
    """
    w = {name: t.to(dtype).requires_grad_() for name, t in start.items()}
    o, stepped = cfg.optim, optimizers(cfg, w)
    curve, first = [], {}
    for step in range(steps):
        tokens, labels = batch(cfg, step, sizes and sizes[step])
        out = logits(cfg, w, tokens, documents_of(cfg, step) if cfg.data.isolate_documents else None).flatten(0, 1)
        loss = F.cross_entropy(out, labels.flatten(), ignore_index=IGNORE, label_smoothing=cfg.train.label_smoothing)
        for t in w.values():
            t.grad = None
        loss.backward()
        first = first or {n: t.grad.clone() for n, t in w.items()}
        norm = torch.nn.utils.clip_grad_norm_(w.values(), o.clip_grad) if o.clip_grad else torch.zeros(())
        for each in stepped:
            each.step()
        curve.append((loss.item(), norm.item()))
    return curve, first, {n: t.detach() for n, t in w.items()}
