"""The smallest complete configuration, for tests of single rules."""

from __future__ import annotations

import pytest

from megakit.config.compose import compose
from megakit.config.schema import Config
from megakit.errors import Refused

TINY = [
    "model.family=llama",
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.ffn_hidden_size=176",
    "model.num_attention_heads=8",
    "model.num_query_groups=2",
    "model.vocab_size=101",
    "model.max_position_embeddings=32",
    "model.rotary_base=5e5",
    "train.steps=10",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "train.seq_len=32",
    "train.precision=fp32",
    "optim.lr=1e-3",
    "data.mock=true",
]


def tiny(*overrides: str) -> Config:
    """TINY of shared/CASES.md with changes; a later override of a key replaces the earlier one."""
    return compose([*TINY, *overrides])


def refusal(*overrides: str, start: list[str] | None = None) -> str:
    """The one line with which a configuration is refused."""
    with pytest.raises(Refused) as caught:
        compose([*(TINY if start is None else start), *overrides])
    line = str(caught.value)
    assert line and "\n" not in line
    return line
