"""Seeds as a pure function of what they are for.

No generator is carried through a run: the mask of a dropout is drawn from a seed made of the run's seed, the position of
the micro-batch in the global sample order, the layer and the site. So a resumed run needs no saved generator state, a
recomputed layer draws the same mask again, and the mask does not depend on the data or pipeline parallel layout.
"""

from __future__ import annotations

import hashlib

import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """A 63-bit seed from integers; every bit depends on every part (splitmix64's finaliser, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + part * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_seed(seed: int, name: str, block: int) -> int:
    """Seed of one block of rows of a named tensor's initial values."""
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_default_generator(device: torch.device, seed: int) -> None:
    """Seed the generator that `scaled_dot_product_attention` draws its dropout from."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def keep_mask(
    shape: tuple[int, ...], p: float, seed: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """0 with probability p, else 1; `seed` decides which."""
    generator = torch.Generator(device).manual_seed(seed)
    # contiguous, not empty_like(x): it is filled in order of memory, and a gradient may have other strides than the output
    return torch.zeros(shape, dtype=dtype, device=device).bernoulli_(1.0 - p, generator=generator)


def _keep(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    return keep_mask(x.shape, p, seed, x.device, x.dtype)


class _Dropout(torch.autograd.Function):
    """Draws its mask again in the backward pass instead of keeping it."""

    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed
        return _keep(x, p, seed).mul_(x).div_(1.0 - p)

    @staticmethod
    def backward(ctx, g):
        return _keep(g, ctx.p, ctx.seed).mul_(g).div_(1.0 - ctx.p), None, None


def dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Zero elements of x with probability p and scale the others by 1 / (1 - p); `seed` decides which."""
    return _Dropout.apply(x, p, seed) if p else x
