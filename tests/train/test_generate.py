"""Generation reads the logits behind the last token, of as much context as fits, and ends where it should."""

from __future__ import annotations

import torch

from megakit.train.generate import generate
from tests.tiny import tiny


class Counting:
    """Predicts, with certainty, the token at the asked position plus one; padding is 0."""

    def __init__(self, vocab: int, seq_len: int):
        self.cfg = tiny(train__seq_len=seq_len)
        self.vocab = vocab

    def logits(self, tokens: torch.Tensor, at: int) -> torch.Tensor:
        assert tokens.shape == (self.cfg.train.seq_len,) and not tokens[at + 1 :].any()
        return torch.full((self.vocab,), -1e9).index_fill_(0, tokens[at] + 1, 0.0)


def test_each_token_follows_from_the_one_before_it_beyond_the_sequence_length():
    assert list(generate(Counting(64, 8), [5, 6], 20, end=None, seed=0)) == list(range(7, 27))
    assert list(generate(Counting(64, 8), list(range(1, 31)), 3, end=None, seed=0)) == [31, 32, 33]


def test_ends_at_the_end_token_which_is_not_yielded():
    assert list(generate(Counting(64, 8), [5], 20, end=9, seed=0)) == [6, 7, 8]
