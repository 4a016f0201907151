"""Greedy text is that of transformers' `generate` on the same folder, for each prompt of a batch; what ends it and is refused."""

from __future__ import annotations

import pytest
import torch

from megakit.errors import Refused
from megakit.inference.generator import generate
from megakit.inference.sampling import Sampling
from tests.inference.models import MODELS, pair
from tests.inference.test_decoder import prompts

GREEDY = Sampling(0.0)


def columns(steps) -> list[list[int]]:
    """What each prompt got."""
    steps = list(steps)
    return [[token for token in column if token is not None] for column in zip(*steps)]


@pytest.mark.parametrize("name", list(MODELS))
def test_greedy_is_that_of_transformers(name, tmp_path):
    ours, theirs = pair(name, tmp_path)
    texts = prompts(5, (9, 4, 1, 12))
    got = columns(generate(ours, texts, 16, GREEDY))
    for text, tokens in zip(texts, got):
        expected = theirs.generate(torch.tensor([text]), max_new_tokens=16, do_sample=False)[0, len(text) :]
        assert tokens == expected.tolist()


def test_a_prompt_ends_at_an_end_and_the_others_go_on(tmp_path):
    ours, _ = pair("llama", tmp_path)
    texts = prompts(5, (9, 4))
    free = columns(generate(ours, texts, 12, GREEDY))
    end = next(token for token in free[0] if token not in free[1])
    until = free[0].index(end)
    steps = list(generate(ours, texts, 12, GREEDY, ends={end}))
    assert columns(steps) == [free[0][:until], free[1]]
    assert [step[0] is None for step in steps] == [i >= until for i in range(12)]
    one = next(token for token in free[1] if token not in free[0])
    last = max(until, free[1].index(one))
    assert len(list(generate(ours, texts, 12, GREEDY, ends={end, one}))) == last, "it stops when all have ended"


def test_text_is_the_same_alone_and_in_a_batch(tmp_path):
    ours, _ = pair("gpt2", tmp_path)
    texts, how = prompts(5, (9, 4, 7)), Sampling(1.0, top_k=50)
    together = columns(generate(ours, texts, 10, how, seeds=[3, 4, 5]))
    assert together == [columns(generate(ours, [text], 10, how, seeds=[seed]))[0] for text, seed in zip(texts, (3, 4, 5))]
    assert together != columns(generate(ours, texts, 10, how, seeds=[6, 7, 8]))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_rows_are_never_drawn(name, tmp_path):
    """CV5: the rows behind the vocabulary have logits of about +100 times the others', and ids that the tokenizer lacks too."""
    ours, _ = pair(name, tmp_path)
    head = ours.stage.head.weight
    assert head.shape[0] > 101
    with torch.no_grad():
        head[101:] = 100.0 * head[:1]
        head[90:101] = 100.0 * head[:1]
    texts = prompts(5, (9, 4))
    for how in (GREEDY, Sampling(5.0)):
        drawn = [t for column in columns(generate(ours, texts, 20, how, seeds=[1, 2])) for t in column]
        assert len(drawn) == 40 and max(drawn) <= 100
        drawn = [t for column in columns(generate(ours, texts, 20, how, seeds=[1, 2], known=90)) for t in column]
        assert len(drawn) == 40 and max(drawn) < 90


def test_refusals(tmp_path):
    ours, _ = pair("llama", tmp_path)
    for texts, count, words in (
        ([[1], []], 3, "prompt 2 has no tokens"),
        ([[1] * 30], 3, "prompt 1 has 30 tokens, and 3 new ones .* context of 32: ask for at most 2 new tokens"),
        ([[1], [1] * 40], 3, "prompt 2 has 40 tokens, .*: shorten it to less than 32 tokens"),
        ([[1]], 0, "the number of new tokens is 0"),
    ):
        with pytest.raises(Refused, match=words):
            list(generate(ours, texts, count, GREEDY))
    with torch.no_grad():
        ours.stage.head.weight[:] = float("nan")
    with pytest.raises(Refused, match="the logits are not numbers"):
        list(generate(ours, [[1]], 3, GREEDY))
