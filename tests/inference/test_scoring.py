"""Log-likelihoods beside transformers' logits; windows of long texts."""

from __future__ import annotations

import pytest
import torch

from megakit.errors import Refused
from megakit.inference.scoring import score, windows
from tests.inference.models import pair
from tests.inference.test_decoder import prompts


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_log_likelihoods(name, batch_size, tmp_path):
    """In float64, each text alone. Contexts that are too long lose their beginning."""
    ours, theirs = pair(name, tmp_path)
    theirs = theirs.double()
    lengths = [(5, 3), (1, 7), (20, 1), (30, 20), (2, 32), (4, 0), (9, 9)]
    pairs = [tuple(prompts(i, both)) for i, both in enumerate(lengths)]
    done: list[int] = []
    got = score(ours, pairs, batch_size, done.append)
    assert len(got) == sum(done) == len(pairs)
    for (context, continuation), (logprob, greedy) in zip(pairs, got):
        tokens = torch.tensor((context + continuation)[-ours.context - 1 :])
        with torch.no_grad():
            log_p = theirs(tokens[None, :-1]).logits[0].log_softmax(-1)
        rows, count = log_p[len(log_p) - len(continuation) :], len(continuation)
        wanted = tokens[len(tokens) - count :]
        assert logprob == pytest.approx(float(rows.gather(-1, wanted[:, None]).sum()), rel=1e-5, abs=1e-9)
        assert greedy == bool((rows.argmax(-1) == wanted).all())


def test_what_the_model_would_say_is_greedy(tmp_path):
    ours, theirs = pair("llama", tmp_path)
    (text,) = prompts(1, (6,))
    said = theirs.generate(torch.tensor([text]), max_new_tokens=5, do_sample=False)[0, 6:].tolist()
    assert [s.greedy for s in score(ours, [(text, said), (text, [*said[:-1], (said[-1] + 1) % 101])], 2)] == [True, False]


def test_windows():
    """The example of lm-evaluation-harness's documentation, and what is true of any."""
    found = list(windows(range(10), 99, 4))
    assert found == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    for length in range(12):
        for context in range(1, 7):
            pairs = list(windows(range(length), 99, context))
            assert [t for _, continuation in pairs for t in continuation] == list(range(length))
            for i, (before, continuation) in enumerate(pairs):
                assert before and len(before) + len(continuation) == (
                    context + 1 if i or len(continuation) == context else 1 + length
                )


def test_refusals(tmp_path):
    ours, _ = pair("llama", tmp_path)
    with pytest.raises(Refused, match="scored behind nothing"):
        score(ours, [([], [1])], 1)
    with pytest.raises(Refused, match="33 tokens are to be scored at once, and the model's context is 32"):
        score(ours, [([1], [1] * 33)], 1)
