"""Whether two folders hold the same model: their logits on random tokens.

A Hugging Face folder is run by transformers, where that is installed: it shares nothing with megakit's decoder and name maps.
A folder of Megatron-LM is run by a forward pass in its own layout (megatron_forward.py). Everything else, and a Hugging Face
folder without transformers, is run by megakit's decoder. Where both sides are, what is compared is the tensors, not the maps.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from megakit.checkpoint.weights import WeightsSource, open_weights
from megakit.config.schema import Config
from megakit.errors import Refused, Stop
from megakit.inference.decoder import Decoder
from megakit.modeling.layout import context_length, parameter_count

BATCH, LENGTH = 1, 256
EXACT = 1e-4
"""Allowed difference of logits, over the largest one, where no precision was lost: rounding of fp32 in another order."""
ROUNDED = 16
"""Allowed difference over the largest logit, in units of the precision (torch.finfo.eps) that the weights were rounded to."""


@dataclass(frozen=True)
class Seen:
    """What one side gave."""

    by: str
    logits: torch.Tensor
    loss: float
    """Mean cross entropy of the next token."""


@dataclass(frozen=True)
class Comparison:
    """Both sides on the same tokens."""

    source: Seen
    target: Seen
    tolerance: float

    @property
    def difference(self) -> float:
        """The largest of any logit; infinite if one side is not a number."""
        largest = (self.source.logits - self.target.logits).abs().max().item()
        return math.inf if math.isnan(largest) else largest

    def __str__(self) -> str:
        batch, length, _ = self.source.logits.shape
        return (
            f"largest difference {self.difference:.2g} of logits up to {self.source.logits.abs().max().item():.3g}, allowed"
            f" {self.tolerance:.2g}; loss {self.source.loss:.6f} by {self.source.by}, {self.target.loss:.6f} by {self.target.by};"
            f" {batch} x {length} random tokens"
        )


def check_memory(source: WeightsSource) -> None:
    """Raises Refused if the model doesn't fit in this machine's memory in fp32, or with a part of its logits."""
    needed = 4 * parameter_count(Config(model=source.model)) + 16 * BATCH * LENGTH * source.model.vocab_size
    available = _available()
    if available is not None and needed > available:
        raise Refused(
            f"--verify runs the model in fp32: that needs {needed / 1e9:,.1f} GB of memory, {available / 1e9:,.1f} GB are"
            " available: leave --verify out, or use a larger machine"
        )


def compare(source: WeightsSource, target: Path, tolerance: float | None = None) -> Comparison:
    """Run both in fp32, one after the other. Raises Stop (exit code 1) if they differ by more than `tolerance`, or by more than
    rounding explains where it is None."""
    length = min(LENGTH, context_length(source.model))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(source.model.vocab_size, (BATCH, length), generator=generator)
    theirs, written = _see(source, tokens), open_weights(target)
    if tolerance is None:
        eps = torch.finfo(written.dtype).eps
        kept = eps <= torch.finfo(source.dtype).eps and written.dtype != torch.float16
        largest = theirs.logits.abs().max().item()
        tolerance = EXACT * largest if kept or written.dtype == source.dtype else ROUNDED * eps * largest
    found = Comparison(theirs, _see(written, tokens), tolerance)
    if not found.difference <= tolerance:
        raise Stop(f"{source.path} and what was written differ: {found}; nothing is left of it")
    return found


def _see(source: WeightsSource, tokens: torch.Tensor) -> Seen:
    if source.kind == "megatron":
        from megakit.checkpoint.megatron_forward import forward

        by, found = "a forward pass in Megatron's layout", forward(source, tokens)
    elif source.kind == "hf" and importlib.util.find_spec("transformers"):
        by, found = "transformers", _by_transformers(source.path, tokens)
    else:
        by, found = "megakit", by_megakit(source, tokens)
    return Seen(by, found, F.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item())


def by_megakit(source: WeightsSource, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S] -> [B, S, V] in fp32, by megakit's decoder."""
    decoder = Decoder(source.model, source, torch.device("cpu"), torch.float32)
    return decoder.logits(decoder.read(tokens.t().contiguous())).transpose(0, 1)


@torch.no_grad()
def _by_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()(tokens).logits


def _available() -> int | None:
    """Bytes of memory that can be had; None where the system doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pages = "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in os.sysconf_names else None
