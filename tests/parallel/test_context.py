"""The zigzag cut, and attention over it: both exchanges, forward and gradients, in float64 against the unsharded operator."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch

from megakit.parallel import context
from megakit.parallel.comm import Comm
from megakit.parallel.context import Exchange, chunks, context_attention, cut, gathered_pieces, positions, ring_piece
from megakit.parallel.grid import Grid, ParallelState

B, N, S, D = 2, 4, 48, 8
KINDS = ("p2p", "all_gather")
_states: dict[Grid, ParallelState] = {}


def comm(**grid: int) -> Comm:
    key = Grid(**grid)
    if key not in _states:
        _states[key] = ParallelState(key, torch.device("cpu"), timedelta(seconds=60))
    return Comm(_states[key])


# the cut: pure arithmetic


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_every_token_is_on_one_rank_and_both_ends_of_the_sequence_meet(cp):
    held = [positions(4 * cp, cp, r, torch.device("cpu")).tolist() for r in range(cp)]
    assert sorted(itertools.chain(*held)) == list(range(4 * cp))
    assert all(h == sorted(h) and len(h) == 4 for h in held)
    assert [chunks(cp, r) for r in (0, cp - 1)] == [(0, 2 * cp - 1), (cp - 1, cp)]
    x = torch.randn(4 * cp, 3)
    for r in range(cp):
        assert torch.equal(cut(x, cp, r), x[held[r]])


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_the_work_of_all_ranks_is_equal_and_no_pair_is_missed_or_doubled(cp):
    """Pairs are counted one by one: each causal pair of the whole sequence once, and as many on each rank."""
    n = 6
    total = cp * n * (cp * n + 1) // 2
    at = [positions(cp * n, cp, r, torch.device("cpu")).tolist() for r in range(cp)]
    work: dict[str, list[int]] = {"p2p": [], "all_gather": []}
    for rank in range(cp):
        ring = [(ring_piece(cp, rank, source, n), at[source]) for source in range(cp)]
        gathered = [(ring_piece(cp, rank, rank, n), at[rank])]
        gathered += [(piece, list(range(cp * n))) for piece in gathered_pieces(cp, rank, n)]
        for kind, pieces in (("p2p", ring), ("all_gather", gathered)):
            seen = []
            for piece, keys in pieces:
                rows, columns = at[rank][piece.queries], keys[piece.keys]
                own = [(q, k) for i, q in enumerate(rows) for j, k in enumerate(columns) if j <= i or not piece.causal]
                assert len(own) == piece.pairs()
                seen += own
            assert sorted(seen) == [(q, k) for q in sorted(at[rank]) for k in range(q + 1)], "pairs that this rank must see"
            work[kind].append(len(seen))
    assert work["p2p"] == work["all_gather"] == [total // cp] * cp
    each_step = {ring_piece(cp, r, s, n).pairs() for r in range(cp) for s in range(cp) if r != s}
    assert len(each_step) == 1, "no rank of a ring waits for another's block"


# the operator


def whole(groups: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(groups)
    q, k, v, g = (torch.randn(B, heads, S, D, generator=generator, dtype=dtype) for heads in (N, groups, groups, N))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g


def documents() -> torch.Tensor:
    """[S, B]: of other lengths in each sample, of one token and of most of the sequence."""
    starts = ((0, 5, 6, 20, 47), (0, 31))
    return torch.stack([(torch.arange(S)[:, None] >= torch.tensor(s)).sum(1) for s in starts], 1)


def expected(groups: int, isolated: bool, window: int | None):
    """Output and gradients of plain attention on the whole sequence."""
    q, k, v, g = whole(groups)
    seen = torch.ones(S, S).tril().bool().expand(B, 1, S, S)
    if isolated:
        d = documents().t()
        seen = seen & (d[:, None, :, None] == d[:, None, None, :])
    for i in range(S if window else 0):
        seen = seen.clone()
        seen[..., i, : max(0, i + 1 - window)] = False
    wide_k, wide_v = (t.repeat_interleave(N // groups, 1) for t in (k, v))
    score = (q @ wide_k.mT / math.sqrt(D)).masked_fill(~seen, -math.inf)
    out = score.softmax(-1) @ wide_v
    return out.detach(), *torch.autograd.grad(out, (q, k, v), g)


def sharded(kind: str, groups: int, isolated: bool, **options):
    """This rank's part of the same -> output, gradients, bytes by operation."""
    c = comm(cp=torch.distributed.get_world_size())
    cp, rank = c.size("cp"), c.index("cp")
    *mine, g = (cut(t.detach().movedim(2, 0), cp, rank).movedim(0, 2) for t in whole(groups))
    for t in mine:
        t.requires_grad_()
    ex = Exchange(c, kind, documents().int() if isolated else None, **options)
    out = context_attention(*mine, ex)
    return out.detach(), *torch.autograd.grad(out, mine, g), {key: n for key, n in c.bytes.items() if n}


@pytest.mark.parametrize(("isolated", "window"), [(False, None), (True, None), (False, 5), (False, 40), (True, 9)])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_equals_the_unsharded_operator(pools, cp, kind, groups, isolated, window):
    results = pools(cp).run(partial(sharded, window=window), kind, groups, isolated)
    for i, want in enumerate(expected(groups, isolated, window)):
        for rank in range(cp):
            torch.testing.assert_close(results[rank][i], cut(want.movedim(2, 0), cp, rank).movedim(0, 2), rtol=1e-9, atol=1e-9)
    block = 2 * B * groups * S // cp * D * 8
    ring = {("shift", "cp"): ((cp - 1) * 3) * block}  # keys and values twice, their gradients once
    gather = {("all_gather", "cp"): 2 * cp * block, ("reduce_scatter", "cp"): cp * block}
    assert results[0][-1] == ({} if cp == 1 else ring if kind == "p2p" else gather)


# dropout on the attention weights


def dropped(kind: str, seed: int):
    """Where the weights are kept, by (query position, key position), of values that give the weights themselves."""
    c = comm(cp=2)
    at = positions(S, 2, c.index("cp"), torch.device("cpu"))
    n = len(at)
    q, k = torch.zeros(1, 2, n, S), torch.zeros(1, 1, n, S)
    v = torch.eye(S)[at][None, None]  # the output of a query is its row of weights
    return at, context_attention(q, k, v, Exchange(c, kind, None, 0.5, seed))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_weights(pools, kind):
    """Half of each head's causal weights, doubled, another choice for each pair of ranks and head and seed."""
    one, other = pools(2).run(dropped, kind, 1), pools(2).run(dropped, kind, 2)

    def kept(results):
        whole = torch.zeros(2, S, S)
        for at, weights in results:
            whole[:, at] = weights[0]
        return whole

    weights = kept(one)
    plain = torch.ones(S, S).tril() / torch.arange(1, S + 1)[:, None]
    assert torch.equal(kept(pools(2).run(dropped, kind, 1)), weights)
    on = weights > 0
    torch.testing.assert_close(weights[on], (2 * plain).expand(2, S, S)[on])
    below = torch.ones(S, S).tril().bool()
    assert not on[:, ~below].any() and abs(on[:, below].float().mean() - 0.5) < 0.05
    for a, b in ((on[0], on[1]), (on, kept(other) > 0)):
        assert 0.4 < (a != b)[..., below].float().mean() < 0.6
    q = S // 4
    first, second = below[:q, :q], on[0, q : 2 * q, q : 2 * q]
    assert 0.3 < (on[0, :q, :q] != second)[first].float().mean() < 0.7, "the two ranks' first chunks"


def seeds(kind):
    c = comm(cp=3)
    drawn: list[int] = []
    mine = [cut(t.detach().movedim(2, 0), 3, c.index("cp")).movedim(0, 2) for t in whole(2)[:3]]
    with mock.patch.object(context, "keep_mask", lambda shape, p, seed, device: drawn.append(seed) or torch.ones(shape)):
        context_attention(*mine, Exchange(c, kind, None, 0.5, 1))
    return drawn


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_read_one_block_draw_other_masks(pools, kind):
    drawn = list(itertools.chain(*pools(3).run(seeds, kind)))
    assert len(set(drawn)) == len(drawn) >= 7


def gradients_of_dropout(kind: str):
    """By finite differences: the backward pass must draw the same masks as the forward pass."""
    c = comm(cp=2)
    ex = Exchange(c, kind, documents().int(), 0.3, 5)
    *mine, g = (cut(t.detach().movedim(2, 0), 2, c.index("cp")).movedim(0, 2) for t in whole(2))
    for t in mine:
        t.requires_grad_()
    grads = torch.autograd.grad(context_attention(*mine, ex), mine, g)
    directions = [torch.randn(t.shape, dtype=torch.float64) for t in mine]

    def at(step):
        moved = [t.detach() + step * d for t, d in zip(mine, directions)]
        return c.all_reduce((context_attention(*moved, ex) * g).sum(), "cp").wait()

    slope = (at(1e-5) - at(-1e-5)) / 2e-5
    return slope, c.all_reduce(sum((a * d).sum() for a, d in zip(grads, directions)), "cp").wait()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_dropout(pools, kind):
    slope, promised = pools(2).run(gradients_of_dropout, kind)[0]
    torch.testing.assert_close(promised, slope, rtol=1e-7, atol=1e-7)


# the ring


def order():
    """What a rank did, in order: s a shift, c a block's computation, and how many shifts were under way meanwhile."""
    c = comm(cp=torch.distributed.get_world_size())
    *mine, g = (cut(t.detach().movedim(2, 0), c.size("cp"), c.index("cp")).movedim(0, 2) for t in whole(2))
    for t in mine:
        t.requires_grad_()
    torch.autograd.backward(context_attention(*mine, Exchange(c, "p2p")), g)
    assert not c.pending()
    shifts = [(r.issued, r.waited or 0) for r in c.records if r.op == "shift"]
    return [f"{r.op[0]}{sum(a < r.issued < b for a, b in shifts)}" for r in c.records]


def test_the_next_block_is_under_way_while_this_one_is_attended_to(pools):
    """In the record of every rank: sent before the computation and waited for behind it, at every block but the last."""
    for seen in pools(4).run(order):
        forward = ["s0", "c1"] * 3 + ["c0"]
        # the next block at every step but the last; from step 1 on also a block's gradient, sent when it is computed
        backward = [*("s0", "c1"), *("s0", "c1", "s1"), *("s1", "c2", "s1"), *("c1", "s0")]
        assert seen == forward + backward


def shifted(count):
    """Shifts over an axis, several under way, of ranks that come in any order."""
    c = comm(cp=torch.distributed.get_world_size())
    handles = [c.shift(torch.full((3,), 10.0 * c.index("cp") + i), "cp") for i in range(count)]
    return [h.wait()[0].item() for h in handles]


@pytest.mark.parametrize("cp", [2, 3])
def test_shift(pools, cp):
    for rank, got in enumerate(pools(cp).run(shifted, 3)):
        assert got == [10.0 * ((rank - 1) % cp) + i for i in range(3)]
