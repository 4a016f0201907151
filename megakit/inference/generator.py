"""Token after token behind a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from megakit.errors import Refused
from megakit.inference.decoder import Decoder
from megakit.inference.sampling import Sampling, sample


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    how: Sampling,
    ends: Collection[int] = (),
    seeds: Sequence[int] = (),
    known: int | None = None,
    stopped: Callable[[int, int], bool] | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, up to `count` times; None for those that have ended, by a token of `ends`, which is
    not given itself. It stops when all have ended.

    Prompts may have different lengths. `seeds`, one of each prompt, decide what is drawn. Tokens from `known` on are never
    drawn: those that the tokenizer doesn't have. `stopped` is told each prompt's index and token, and says whether it ends that
    prompt, which it does after having been given. Raises Refused for a prompt that is empty or that doesn't leave room for
    `count` tokens in the model's context.
    """
    check_room(decoder.context, prompts, count)
    generators = [torch.Generator().manual_seed(seed % 2**63) for seed in seeds] if how.temperature else []
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    cache = decoder.cache(padding, longest + count)
    tokens = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts)], device=decoder.device).t()
    ended = [False] * len(prompts)
    for _ in range(count):
        drawn = sample(decoder.next(tokens, cache)[:, :known].float(), how, generators)
        ended = [end or token in ends for end, token in zip(ended, drawn)]
        if all(ended):
            return
        yield [None if end else token for end, token in zip(ended, drawn)]
        if stopped is not None:
            ended = [end or stopped(i, token) for i, (end, token) in enumerate(zip(ended, drawn))]
            if all(ended):
                return
        tokens = torch.tensor([drawn], device=decoder.device)


def check_room(context: int, prompts: Sequence[Sequence[int]], count: int) -> None:
    """Raises Refused unless each prompt has a token, and fits into the context with `count` more."""
    if count < 1:
        raise Refused(f"the number of new tokens is {count}: it must be 1 or more")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise Refused(f"prompt {i + 1} has no tokens, and the model needs one to begin with: give it some text")
        if len(prompt) + count > context:
            left = context - len(prompt)
            cure = f"ask for at most {left} new tokens" if left > 0 else f"shorten it to less than {context} tokens"
            raise Refused(
                f"prompt {i + 1} has {len(prompt)} tokens, and {count} new ones would go beyond the model's context of {context}:"
                f" {cure}"
            )
