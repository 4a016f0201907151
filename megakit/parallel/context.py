"""Context parallelism: the sequence cut over the cp ranks, and attention that sees all of it.

The sequence is cut into 2 * CP chunks; rank r holds chunks r and 2 * CP - 1 - r, one behind the other ("zigzag"), so that
every rank has the same number of causal pairs to compute (Brandon et al. 2023, striped attention, has the argument; this
cut is Megatron's and Zhu's ring-flash-attention's). Queries stay where they are. Keys and values come to them in one of two ways
(`parallel.cp_comm_type`):

  p2p         they travel round a ring of the cp ranks, one block per step (Liu et al. 2023, ring attention): while a block
              is attended to, the next one is under way. A rank holds two blocks at a time. In the backward pass the blocks
              go round again, and their gradients with them, one hop behind; each arrives at home with all contributions.
  all_gather  every rank gathers all keys and values (Grattafiori et al. 2024, section 3.3.2), and attends to its own while
              they come. Their gradients are reduce-scattered. One message in place of CP - 1, and room for the whole.

Shapes: B micro-batch, N query heads, G key/value heads, D head dim, S the whole sequence, n = S / CP that of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megakit.ops.attention import Merged, attention_block, attention_block_backward
from megakit.parallel.comm import Comm, Handle
from megakit.parallel.random import keep_mask, mix


def chunks(cp: int, rank: int) -> tuple[int, int]:
    """The two of 2 * cp chunks of the sequence that a rank holds."""
    return rank, 2 * cp - 1 - rank


def cut(x: torch.Tensor, cp: int, rank: int) -> torch.Tensor:
    """A rank's part of the sequence: [S, ...] -> [S / cp, ...]"""
    if cp == 1:
        return x
    parts = x.chunk(2 * cp)
    return torch.cat([parts[c] for c in chunks(cp, rank)])


def positions(seq_len: int, cp: int, rank: int, device: torch.device) -> torch.Tensor:
    """Where in the sequence each token of a rank's part stands: int64 [S / cp]."""
    return cut(torch.arange(seq_len, device=device), cp, rank)


def own_positions(length: int, comm: Comm, device: torch.device) -> torch.Tensor:
    """Of this rank's `length` tokens: int64 [length]."""
    cp = comm.size("cp")
    return comm.varying(positions(length * cp, cp, comm.index("cp"), device), "cp")


def holder(position: int, seq_len: int, cp: int) -> tuple[int, int]:
    """The rank that holds a position of the sequence, and where in its part."""
    size = seq_len // (2 * cp) if cp > 1 else seq_len
    chunk, within = divmod(position, size)
    return (chunk, within) if chunk < cp else (2 * cp - 1 - chunk, size + within)


@dataclass(frozen=True)
class Piece:
    """Queries of this rank that see a block of keys."""

    queries: slice
    """Of the rank's n."""
    keys: slice
    """Of the block."""
    causal: bool = False
    """Query i sees keys up to i; else all of them."""

    def pairs(self) -> int:
        """Query-key pairs to compute."""
        rows, columns = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def ring_piece(cp: int, rank: int, source: int, n: int) -> Piece:
    """What rank's queries see of the n keys that `source` holds: of an earlier rank's block the first chunk, all of them;
    of a later rank's both chunks, the second half of them."""
    if source == rank:
        return Piece(slice(0, n), slice(0, n), causal=True)
    if source < rank:
        return Piece(slice(0, n), slice(0, n // 2))
    return Piece(slice(n // 2, n), slice(0, n))


def gathered_pieces(cp: int, rank: int, n: int) -> list[Piece]:
    """What rank's queries see of the whole sequence of keys, its own chunks left out: all of them what is before the first
    chunk, the second half of them what is between the two."""
    first, second = (c * n // 2 for c in chunks(cp, rank))
    pieces = [Piece(slice(0, n), slice(0, first)), Piece(slice(n // 2, n), slice(first + n // 2, second))]
    return [p for p in pieces if p.keys.start < p.keys.stop]


@dataclass(frozen=True)
class Exchange:
    """How attention reaches beyond this rank's part of the sequence."""

    comm: Comm
    kind: str
    """p2p | all_gather."""
    documents_SB: torch.Tensor | None = None
    """Document of each token of the whole sequence [S, B]: a token sees its own document only. None: it sees all before it."""
    dropout: float = 0.0
    """Probability."""
    seed: int = 0
    window: int | None = None
    """A token sees so many tokens, itself and those before it. None: all before it."""

    def options(self, piece: Piece, q: torch.Tensor, k: torch.Tensor, source: int | None, n: int) -> dict:
        """For attention_block; k is the piece's part of the block of `source`, or of the whole sequence for None; a rank has n
        tokens."""
        allowed = keep = None
        cp, rank = self.comm.size("cp"), self.comm.index("cp")
        if self.window is not None and cp > 1:
            mine = own_positions(n, self.comm, q.device)[piece.queries]
            theirs = positions(n * cp, *((1, 0) if source is None else (cp, source)), q.device)[piece.keys]
            allowed = (mine[:, None] - self.comm.varying(theirs, "cp") < self.window)[None, None]
        if self.documents_SB is not None:
            whole = self.documents_SB
            mine = cut(whole, cp, rank)[piece.queries].t()
            theirs = (whole if source is None else cut(whole, cp, source))[piece.keys].t()
            same = mine[:, None, :, None] == theirs[:, None, None, :]
            allowed = same if allowed is None else allowed & same
        if self.dropout:  # another mask for each head and each pair of positions
            place = (piece.keys.start if source is None else cp + source, self.comm.index("tp"), rank)
            seed = mix(self.seed, *place)
            keep = keep_mask((*q.shape[:3], k.shape[2]), self.dropout, seed, q.device).div_(1.0 - self.dropout)
            keep = self.comm.varying(self.comm.varying(keep, "tp"), "cp")
        window = self.window if cp == 1 else None
        return {"causal": piece.causal, "allowed": allowed, "keep": keep, "window": window}


class _Ring(torch.autograd.Function):
    """Blocks of keys and values go round; see the module."""

    @staticmethod
    def forward(ctx, q, k, v, ex: Exchange):
        cp, rank = ex.comm.size("cp"), ex.comm.index("cp")
        merged, block = None, torch.stack([k, v])
        for step in range(cp):
            coming = ex.comm.shift(block, "cp") if step < cp - 1 else None  # under way while this one is attended to
            piece = ring_piece(cp, rank, (rank - step) % cp, q.shape[2])
            part = _attend(ex, piece, q, block, (rank - step) % cp)
            if merged is None:
                merged = Merged(*part)
            else:
                merged.add(piece.queries, *part)
            block = coming.wait() if coming else block
        assert merged is not None
        return _finish(ctx, ex, q, k, v, merged)

    @staticmethod
    def backward(ctx, g):
        (q, k, v, out, lse), ex = ctx.saved_tensors, ctx.exchange
        cp, rank = ex.comm.size("cp"), ex.comm.index("cp")
        dq, block = torch.zeros_like(q, dtype=lse.dtype), torch.stack([k, v])
        travelling: Handle | None = None
        home = torch.empty(0)
        for step in range(cp):
            coming = ex.comm.shift(block, "cp") if step < cp - 1 else None
            source = (rank - step) % cp
            piece = ring_piece(cp, rank, source, q.shape[2])
            part = torch.zeros_like(block)
            _attend_backward(ex, piece, g, (q, out, lse), block, source, dq, part)
            if step == 0:
                home = part
            else:  # what the ranks behind this one added to this block's gradient comes in, and goes on
                part = part if travelling is None else part.add_(travelling.wait())
                travelling = ex.comm.shift(part, "cp")
            block = coming.wait() if coming else block
        dk, dv = home.unbind(0) if travelling is None else home.add_(travelling.wait()).unbind(0)
        return dq.to(q.dtype), dk, dv, None


class _Gathered(torch.autograd.Function):
    """All keys and values are gathered; see the module."""

    @staticmethod
    def forward(ctx, q, k, v, ex: Exchange):
        cp, rank, n = ex.comm.size("cp"), ex.comm.index("cp"), q.shape[2]
        own = torch.stack([k, v])
        coming = ex.comm.all_gather(own, "cp")
        merged = Merged(*_attend(ex, ring_piece(cp, rank, rank, n), q, own, rank))
        whole = _in_order(coming.wait(), cp)
        for piece in gathered_pieces(cp, rank, n):
            merged.add(piece.queries, *_attend(ex, piece, q, whole, None))
        return _finish(ctx, ex, q, k, v, merged)

    @staticmethod
    def backward(ctx, g):
        (q, k, v, out, lse), ex = ctx.saved_tensors, ctx.exchange
        cp, rank, n = ex.comm.size("cp"), ex.comm.index("cp"), q.shape[2]
        own = torch.stack([k, v])
        coming = ex.comm.all_gather(own, "cp")
        dq = torch.zeros_like(q, dtype=lse.dtype)
        home = torch.zeros_like(own)
        _attend_backward(ex, ring_piece(cp, rank, rank, n), g, (q, out, lse), own, rank, dq, home)
        whole = _in_order(coming.wait(), cp)
        total = ex.comm.varying(torch.zeros_like(whole), "cp")  # filled with what this rank's queries give
        for piece in gathered_pieces(cp, rank, n):
            _attend_backward(ex, piece, g, (q, out, lse), whole, None, dq, total)
        theirs = ex.comm.reduce_scatter(ex.comm.partial(_by_rank(total, cp), "cp"), "cp").wait()
        dk, dv = home.add_(theirs).unbind(0)
        return dq.to(q.dtype), dk, dv, None


def _attend(
    ex: Exchange, piece: Piece, q: torch.Tensor, block: torch.Tensor, source: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    ex.comm.mark("attention")
    n, q, (k, v) = q.shape[2], q[:, :, piece.queries], block[..., piece.keys, :].unbind(0)
    return attention_block(q, k, v, **ex.options(piece, q, k, source, n))


def _attend_backward(
    ex: Exchange,
    piece: Piece,
    g: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block: torch.Tensor,
    source: int | None,
    dq: torch.Tensor,
    dblock: torch.Tensor,
) -> None:
    """Adds to dq and to the gradient of the block; `rows` are q, out and lse."""
    ex.comm.mark("attention")
    n = g.shape[2]
    g, q, out, lse = (t[:, :, piece.queries] for t in (g, *rows))
    k, v = block[..., piece.keys, :].unbind(0)
    dq_part, dk, dv = attention_block_backward(g, q, k, v, out, lse.contiguous(), **ex.options(piece, q, k, source, n))
    dq[:, :, piece.queries] += dq_part
    dblock[..., piece.keys, :] += torch.stack([dk, dv])


def _finish(ctx, ex: Exchange, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged) -> torch.Tensor:
    out = merged.out.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, merged.lse)
    ctx.exchange = ex
    return out


def _in_order(x: torch.Tensor, cp: int) -> torch.Tensor:
    """Gathered blocks [CP * 2, B, G, n, D] -> the whole sequence [2, B, G, S, D]."""
    first, second = x.unflatten(0, (cp, 2)).chunk(2, -2)
    return torch.cat([first, second.flip(0)]).movedim(0, 3).flatten(3, 4)


def _by_rank(x: torch.Tensor, cp: int) -> torch.Tensor:
    """The whole sequence [2, B, G, S, D] -> blocks [CP * 2, B, G, n, D]."""
    parts = x.unflatten(3, (2 * cp, -1)).movedim(3, 0)
    return torch.cat([parts[:cp], parts[cp:].flip(0)], -2).flatten(0, 1)


def context_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Causal attention of this rank's queries [B, N, n, D] on all cp ranks' keys and values [B, G, n, D] -> [B, N, n, D]."""
    function = _Gathered if exchange.kind == "all_gather" and exchange.comm.size("cp") > 1 else _Ring
    return function.apply(q, k, v, exchange)
