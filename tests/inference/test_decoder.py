"""Logits by a cache are those without one, and those of transformers."""

from __future__ import annotations

import pytest
import torch

from megakit.inference.decoder import Decoder
from megakit.modeling.decoder import MicroBatch
from megakit.modeling.layout import model_params
from megakit.parallel.weights import RandomSource
from tests.inference.models import MODELS, pair
from tests.tiny import tiny


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(101, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("pieces", [(1,) * 20, (7, 1, 1, 6, 5), (20,)])
def test_every_position(name, pieces, tmp_path):
    """Sequences of different length, read in pieces: the logits of each position are transformers' of that sequence alone."""
    ours, theirs = pair(name, tmp_path)
    texts = prompts(3, (20, 13, 1))
    padding = [20 - len(text) for text in texts]
    tokens = torch.tensor([[5] * pad + text for pad, text in zip(padding, texts)]).t()
    cache, got, at = ours.cache(padding, 20), [], 0
    for n in pieces:
        got.append(ours.logits(ours.read(tokens[at : at + n], cache)))
        at += n
    logits = torch.cat(got)
    assert logits.shape == (20, 3, 101)
    for i, text in enumerate(texts):
        with torch.no_grad():
            expected = theirs(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits[padding[i] :, i], expected, rtol=1e-5, atol=1e-5)
        whole = ours.logits(ours.read(torch.tensor(text)[:, None]))[:, 0]
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


ODD = {
    "window of 5": {"model__window_size": 5},
    "window of 1": {"model__window_size": 1},
    "norms of q and k, wide heads": {"model__qk_layernorm": True, "model__kv_channels": 24},
    "biases of q, k, v": {"model__add_qkv_bias": True},
}


@pytest.mark.parametrize("name", list(ODD))
@pytest.mark.parametrize("pieces", [(1,) * 20, (7, 1, 1, 6, 5)])
def test_what_the_model_trains_with(name, pieces):
    """Beside the forward pass of training, which tests/train holds to other references."""
    cfg = tiny(model__num_layers=2, **ODD[name])
    ours = Decoder(cfg.model, RandomSource(model_params(cfg), 3), torch.device("cpu"), torch.float32)
    texts = prompts(3, (20, 13))
    padding = [20 - len(text) for text in texts]
    tokens = torch.tensor([[5] * pad + text for pad, text in zip(padding, texts)]).t()
    cache, got, at = ours.cache(padding, 20), [], 0
    for n in pieces:
        got.append(ours.logits(ours.read(tokens[at : at + n], cache)))
        at += n
    for i, text in enumerate(texts):
        with torch.no_grad():
            expected = ours.stage(None, MicroBatch(torch.tensor(text)[:, None], None, 0))[:, 0, :101]
        torch.testing.assert_close(torch.cat(got)[padding[i] :, i], expected, rtol=1e-5, atol=1e-5)


def test_a_cache_has_so_much_room(tmp_path):
    ours, _ = pair("llama", tmp_path)
    cache = ours.cache([0], 3)
    ours.read(torch.tensor([[1], [2]]), cache)
    with pytest.raises(ValueError, match=r"2 \+ 2 tokens don't fit in a cache of 3"):
        ours.read(torch.tensor([[1], [2]]), cache)
