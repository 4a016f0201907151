"""Context parallelism and document isolation in the whole engine, against one process of plain torch in float64."""

from __future__ import annotations

import functools
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megakit.data.build import build_streams
from megakit.modeling import block
from megakit.modeling.decoder import MicroBatch
from megakit.parallel import context
from megakit.parallel.context import positions
from megakit.parallel.loss import IGNORE
from megakit.train.evaluate import evaluate
from tests.tiny import tiny
from tests.train import oracle
from tests.train.jobs import config, records, run_job
from tests.train.parity import engine, masters, micro_batches, train, worst

BATCH = {"train__global_batch_size": 4}
TOLERANCE = 1e-5
KINDS = ("p2p", "all_gather")


@pytest.fixture(scope="module")
def expected(pools):
    """(family, isolated) -> initial weights, curve and last weights in one process."""

    @functools.cache
    def make(family, isolated):
        cfg = tiny(family, **BATCH, data__isolate_documents=isolated)
        start = masters([r.before for r in pools(1).run(train, cfg, steps=0)])
        curve, _, end = oracle.train(cfg, start)
        return start, curve, end

    return make


def compare(pools, expected, family, isolated, **parallel):
    start, curve, end = expected(family, isolated)
    keys = {f"parallel__{k}": v for k, v in parallel.items()}
    cfg = tiny(family, **BATCH, data__isolate_documents=isolated, **keys)
    world = math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    results = pools(world).run(train, cfg)
    assert all(r.curve == results[0].curve for r in results), "ranks disagree"
    assert worst(results[0].curve, curve) < TOLERANCE
    begin, after = masters([r.before for r in results]), masters([r.after for r in results])
    assert all(torch.equal(begin[n], start[n]) for n in start), "initial weights differ"
    for name, t in after.items():
        torch.testing.assert_close(t.double(), end[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {
    "cp2": {"cp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "cp2-tp2-sp": {"cp": 2, **SP},
    "cp2-pp2": {"cp": 2, "pp": 2},
    "cp2-pp2-zb_h1": {"cp": 2, "pp": 2, "schedule": "zb_h1"},
    "cp2-dp2-zero1": {"cp": 2, "dp": 2, "zero": 1},
    "cp4": {"cp": 4},
    "cp2-tp2-sp-pp2": {"cp": 2, **SP, "pp": 2},
    "cp4-dp2-zero1": {"cp": 4, "dp": 2, "zero": 1},
}
IN_THE_SUITE = {
    ("cp2", "llama", "p2p", True),
    ("cp2", "gpt2", "all_gather", True),
    ("cp2-tp2", "llama", "p2p", False),
    ("cp2-tp2-sp", "gpt2", "p2p", True),
    ("cp2-tp2-sp", "llama", "all_gather", False),
    ("cp2-pp2", "gpt2", "p2p", False),
    ("cp2-pp2-zb_h1", "llama", "all_gather", True),
    ("cp2-dp2-zero1", "llama", "p2p", False),
    ("cp4", "gpt2", "p2p", False),
    ("cp4", "llama", "all_gather", True),
    ("cp2-tp2-sp-pp2", "llama", "p2p", True),
    ("cp4-dp2-zero1", "gpt2", "all_gather", False),
}
"""Each layout, and each pair of the other three; the rest are as slow as they are many."""


def cells():
    for cell in itertools.product(LAYOUTS, ("llama", "gpt2"), KINDS, (False, True)):
        marks = () if cell in IN_THE_SUITE else (pytest.mark.slow,)
        yield pytest.param(*cell, marks=marks, id="-".join((*cell[:3], "isolated" if cell[3] else "whole")))


@pytest.mark.parametrize(("layout", "family", "kind", "isolated"), list(cells()))
def test_equals_one_process(pools, expected, layout, family, kind, isolated):
    compare(pools, expected, family, isolated, cp_comm_type=kind, **LAYOUTS[layout])


@pytest.mark.parametrize(("family", "grid"), [("llama", {}), ("gpt2", {"tp": 2}), ("llama", {"pp": 2})])
def test_documents_without_context_parallelism(pools, expected, family, grid):
    compare(pools, expected, family, True, **grid)


# documents don't see each other


def forward(cfg, tokens, documents):
    """Logits of this rank [s, B, vocabulary of this rank] and its positions; weights without a pattern."""
    e = engine(cfg)
    e.initialize()
    comm = e.comm
    batch = MicroBatch(e._own(tokens.t()), None, 0, documents.t() if documents is not None else None)
    (logits,) = e._forward([batch])
    return positions(tokens.shape[1], comm.size("cp"), comm.index("cp"), torch.device("cpu")), logits


ONE, OTHER = slice(9, 20), slice(20, 32)
TOKENS = torch.arange(32)[None] * 7 % 101
DOCUMENTS = ((torch.arange(32) >= 9).int() + (torch.arange(32) >= 20).int())[None]


@pytest.mark.parametrize(("family", "keys"), [
    ("llama", {}),
    ("gpt2", {"tp": 2, "recompute": "full"}),
    ("llama", {"cp": 2}),
    ("gpt2", {"cp": 2, "cp_comm_type": "all_gather"}),
    ("llama", {"cp": 2, **SP}),
])  # fmt: skip
def test_a_token_changes_nothing_in_another_document(pools, family, keys):
    """To the bit; and something in its own, behind it."""
    cfg = tiny(family, **{f"parallel__{k}": v for k, v in keys.items()})
    changed = TOKENS.clone()
    changed[:, ONE.start + 2] += 1
    world = keys.get("tp", 1) * keys.get("cp", 1)
    for documents in (DOCUMENTS, None):
        differs = torch.zeros(32, dtype=torch.bool)
        runs = zip(pools(world).run(forward, cfg, TOKENS, documents), pools(world).run(forward, cfg, changed, documents))
        for (at, before), (_, after) in runs:
            differs[at] |= (before != after).flatten(1).any(1)
        reached = ONE.stop if documents is not None else 32
        assert differs.nonzero().flatten().tolist() == list(range(ONE.start + 2, reached))


@pytest.mark.parametrize("cp", [1, 2])
def test_a_document_among_others_is_as_good_as_alone(pools, cp):
    """Rotary attention inside a document depends on differences of positions only, so where it lies doesn't matter."""
    cfg = tiny(parallel__cp=cp)
    packed = torch.zeros(32, 1, 104)
    for at, logits in pools(cp).run(forward, cfg, TOKENS, DOCUMENTS):
        packed[at] = logits
    alone = torch.zeros(1, 32, dtype=torch.long)
    alone[:, : OTHER.stop - OTHER.start] = TOKENS[:, OTHER]
    ((_, logits),) = pools(1).run(forward, tiny(), alone, None)
    torch.testing.assert_close(packed[OTHER], logits[: OTHER.stop - OTHER.start], rtol=1e-4, atol=1e-4)


# what enters


def split(cfg):
    e = engine(cfg)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.int32)
    return e.split(torch.arange(18).view(2, 9), 40, valid=None, documents=documents)


def test_what_a_rank_is_given(pools):
    """Its two chunks of tokens and of their labels; all of the documents; and the label behind a document's end or not."""
    keys = {"train__seq_len": 8, "train__micro_batch_size": 2, "parallel__cp": 2, "data__isolate_documents": True}
    for rank, ((one,),) in enumerate(zip(pools(2).run(split, tiny(**keys)))):
        rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert one.tokens_SB.tolist() == [[i, 9 + i] for i in rows]
        assert one.labels_SB.tolist() == [[i + 1, 10 + i] for i in rows]
        assert one.documents_SB.t().tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8] and one.position == 40
    results = pools(2).run(split, tiny(**{**keys, "data__eod_mask_loss": True, "data__isolate_documents": False}))
    for rank, (one,) in enumerate(results):
        rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert one.labels_SB.tolist() == [[IGNORE if i in (2, 6) else i + 1, IGNORE if i == 7 else 10 + i] for i in rows]
        assert one.documents_SB is None


def test_documents_that_nobody_asked_for_change_nothing(pools):
    ((one,),) = pools(1).run(split, tiny(train__seq_len=8, train__micro_batch_size=2))
    assert one.documents_SB is None and one.labels_SB.tolist() == [[i + 1, 10 + i] for i in range(8)]


# generation and evaluation


def next_logits(cfg, length):
    e = engine(cfg)
    e.initialize()
    return [e.logits(TOKENS[0, :length], at) for at in (0, 7, length - 1)]


@pytest.mark.parametrize(("keys", "length"), [
    ({"cp": 2}, 32),
    ({"cp": 2, "pp": 2, "cp_comm_type": "all_gather"}, 32),
    ({"cp": 2, **SP}, 29),
])  # fmt: skip
def test_logits_of_any_position_on_every_rank(pools, keys, length):
    """Also of a length that can't be cut: it is padded."""
    (expected,) = pools(1).run(next_logits, tiny(), length)
    world = math.prod(keys.get(axis, 1) for axis in ("tp", "pp", "cp"))
    for got in pools(world).run(next_logits, tiny(**{f"parallel__{k}": v for k, v in keys.items()}), length):
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def evaluated(cfg):
    e = engine(cfg)
    e.initialize()
    return evaluate(e, build_streams(cfg)[1], cfg.train), e.boxes(owned=False)


@pytest.mark.parametrize("masked", [False, True])
def test_an_evaluation_isolates_too(pools, masked):
    """Documents come with the samples of the stream, here made-up ones."""
    keys = {"train__eval_interval": 1, "train__eval_samples": 6, "data__mock_samples": 9, "data__eod_mask_loss": masked}
    cfg = tiny("gpt2", **BATCH, **keys, parallel__cp=2, data__isolate_documents=True)
    results = pools(2).run(evaluated, cfg)
    weights = {n: t.double() for n, t in masters([boxes for _, boxes in results]).items()}
    stream = build_streams(cfg)[1]
    tokens, documents = (torch.from_numpy(read(stream.ids(0, 6))) for read in (stream.read, stream.documents_of))
    labels = tokens[:, 1:].clone()
    if masked:
        labels[documents[:, 1:] > documents[:, :-1]] = IGNORE
    out = oracle.logits(cfg, weights, tokens[:, :-1], documents[:, :-1])
    loss = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=IGNORE).item()
    assert 0 < documents[:, -1].float().mean() < 8, "there must be documents"
    for (got, samples), _ in results:
        assert samples == 6 and got == pytest.approx(loss, rel=1e-5)


# dropout and recomputation


def with_dropout(**keys):
    return tiny("gpt2", model__hidden_dropout=0.1, model__attention_dropout=0.1, **{**BATCH, **keys})


def dropped(cfg):
    """Which elements of the embedding's output are dropped."""
    cfg.model.hidden_dropout = 0.5
    e = engine(cfg)
    e.initialize()
    (b, *_) = micro_batches(e, 0)
    return e.stages[0].embedding(b.tokens_SB, 1) == 0


@pytest.mark.parametrize("sp", [False, True])
def test_hidden_masks_differ_over_cp_and_are_equal_over_tp_where_activations_are(pools, sp):
    masks = pools(4).run(dropped, with_dropout(parallel__cp=2, parallel__tp=2, parallel__sequence_parallel=sp))
    for one, other in itertools.combinations(range(4), 2):
        share = (masks[one] != masks[other]).float().mean()
        alike = not sp and one // 2 == other // 2  # tp is innermost
        assert share == 0 if alike else 0.4 < share < 0.6, (one, other)


def seeds(kind):
    """What each dropout of a micro-batch is drawn from -> (of the residual stream, of attention)."""
    e = engine(with_dropout(parallel__cp=2, parallel__tp=2, parallel__cp_comm_type=kind))
    e.initialize()
    hidden, inside = [], []
    with (
        mock.patch.object(block, "dropout", lambda x, p, seed: hidden.append(seed) or x),
        mock.patch.object(context, "keep_mask", lambda shape, p, seed, device: inside.append(seed) or torch.ones(shape)),
    ):
        e.stages[0](None, micro_batches(e, 0)[0])
    return hidden, inside


@pytest.mark.parametrize("kind", KINDS)
def test_every_dropout_has_a_seed_of_its_own(pools, kind):
    found = pools(4).run(seeds, kind)
    for rank in (0, 2):
        assert found[rank][0] == found[rank + 1][0], "replicated over tp: one mask"
    everywhere = [*found[0][0], *found[2][0], *itertools.chain(*(inside for _, inside in found))]
    assert len(set(everywhere)) == len(everywhere)


@pytest.mark.parametrize(("kind", "recompute"), [("p2p", "selective"), ("all_gather", "full"), ("p2p", "full")])
def test_recomputation_changes_no_bit(pools, kind, recompute):
    keys = {"parallel__cp": 2, "parallel__cp_comm_type": kind, "data__isolate_documents": True}
    expected = pools(2).run(train, with_dropout(**keys), steps=2)
    got = pools(2).run(train, with_dropout(**keys, parallel__recompute=recompute), steps=2)
    assert [r.curve for r in got] == [r.curve for r in expected]
    for a, b in zip(got, expected):
        assert all(torch.equal(a.weights[n], b.weights[n]) for n in b.weights)


def test_a_whole_run(tmp_path):
    """Loader, steps, evaluation and checkpoints, with the documents of the stream: the same losses as without cp."""
    keys = {"train__steps": 2, "train__eval_interval": 2, "train__eval_samples": 4}
    keys |= {"data__isolate_documents": True, "data__eod_mask_loss": True}
    losses = {}
    for cp in (1, 2):
        cfg = config(tmp_path / str(cp), parallel__cp=cp, **keys)
        assert run_job(cfg) == (0, "")
        losses[cp] = [r["loss"] for r in records(tmp_path / str(cp))]
    assert len(losses[1]) == 3 and losses[2] == pytest.approx(losses[1], rel=1e-5)
    plain = config(tmp_path / "plain", **{**keys, "data__isolate_documents": False})
    assert run_job(plain) == (0, "")
    assert [r["loss"] for r in records(tmp_path / "plain")] != pytest.approx(losses[1], rel=1e-4)
