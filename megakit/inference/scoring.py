"""How likely a model finds texts: sums of log-probabilities of tokens behind others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from megakit.errors import Refused
from megakit.inference.decoder import Decoder


class Score(NamedTuple):
    """Of a continuation."""

    logprob: float
    """Natural logarithm of its probability."""
    greedy: bool
    """Each of its tokens is the likeliest at its place."""


@torch.inference_mode()
def score(
    decoder: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int,
    done: Callable[[int], object] = lambda n: None,
) -> list[Score]:
    """Of each (context, continuation) of tokens, in order. Of a context that is too long for the model only the last tokens
    count. `done` is told how many more have been scored.

    Raises Refused for an empty context, and for a continuation that alone is longer than the model's context.
    """
    for context, continuation in pairs:
        if not context:
            raise Refused("a text is to be scored behind nothing: put the token that ends documents before it")
        if len(continuation) > decoder.context:
            raise Refused(f"{len(continuation)} tokens are to be scored at once, and the model's context is {decoder.context}")
    rows = [([*context, *continuation][-decoder.context - 1 :], len(continuation)) for context, continuation in pairs]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))  # batches of like length, the largest first
    out: dict[int, Score] = {}
    for at in range(0, len(order), batch_size):
        here = order[at : at + batch_size]
        out.update(zip(here, _score_batch(decoder, [rows[i] for i in here])))
        done(len(here))
    return [out[i] for i in range(len(rows))]


def _score_batch(decoder: Decoder, rows: list[tuple[list[int], int]]) -> Iterator[Score]:
    """Padded behind their ends, which no token sees. The head is asked for the places that count alone."""
    longest = max(len(tokens) for tokens, _ in rows) - 1
    padded = torch.tensor([tokens[:-1] + [0] * (longest + 1 - len(tokens)) for tokens, _ in rows], device=decoder.device)
    x, residual = decoder.read(padded.t())
    for i, (tokens, count) in enumerate(rows):
        if count == 0:
            yield Score(0.0, True)
            continue
        places = slice(len(tokens) - 1 - count, len(tokens) - 1)
        logits = decoder.logits((x[places, i : i + 1], None if residual is None else residual[places, i : i + 1]))[:, 0].float()
        wanted = torch.tensor(tokens[-count:], device=decoder.device)
        logprob = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum(dtype=torch.float64)
        yield Score(float(logprob), bool((logits.argmax(-1) == wanted).all()))


def windows(tokens: Sequence[int], first: int, context: int) -> Iterator[tuple[list[int], list[int]]]:
    """A text of any length as (context, continuation) pairs, each token in one continuation: behind `first` as many as fit, then
    so many at a time, the last ones behind all the context that there is room for."""
    for at in range(0, len(tokens), context):
        here = list(tokens[at : at + context])
        if at == 0:
            yield [first], here
        else:  # as many tokens before them as make up the context, at least one
            yield list(tokens[at + len(here) - 1 - context : at]), here
