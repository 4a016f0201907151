"""What the parity tests run in the workers: a few steps of the engine on any grid, and its state as global tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from megakit.config.schema import Config
from megakit.modeling.decoder import MicroBatch
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from megakit.parallel.zero import Boxes
from megakit.train.engine import Engine
from tests.tiny import batch, documents_of

_states: dict[Grid, ParallelState] = {}  # groups are made once per worker: making them takes longer than a test


def engine(cfg: Config) -> Engine:
    grid = Grid.of(cfg.parallel)
    if grid not in _states:
        _states[grid] = ParallelState(grid, torch.device("cpu"), timedelta(seconds=60))
    made = Engine(cfg, _states[grid], Comm(_states[grid]))
    assert not made.ops_note.startswith("NOTE"), made.ops_note  # kernels that are asked for must be there
    return made


def micro_batches(e: Engine, step: int, samples: int | None = None) -> list[MicroBatch]:
    """This rank's part of a step of so many samples; None: of train.global_batch_size."""
    cfg = e.cfg
    n, size, dp = samples or cfg.train.global_batch_size, cfg.train.micro_batch_size, e.state.size("dp")
    first = e.state.index("dp") * n // dp
    tokens, labels, documents = (t[first : first + n // dp] for t in (*batch(cfg, step, n), documents_of(cfg, step)))
    cp, rank, length = e.state.size("cp"), e.state.index("cp"), cfg.train.seq_len
    chunk = length // (2 * cp)  # the first of its chunks from the start of the sequence, the second from its end
    own = [*range(rank * chunk, (rank + 1) * chunk), *range(length - (rank + 1) * chunk, length - rank * chunk)]
    return [
        MicroBatch(
            tokens[i : i + size, own].t(),
            labels[i : i + size, own].t(),
            step * n + first + i,
            documents[i : i + size].t() if cfg.data.isolate_documents else None,
        )
        for i in range(0, n // dp, size)
    ]


@dataclass
class Result:
    """Of one rank."""

    curve: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    before: Boxes = field(default_factory=dict)
    after: Boxes = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def _copy(boxes: Boxes) -> Boxes:
    return {name: (shape, [(start, t.clone()) for start, t in views]) for name, (shape, views) in boxes.items()}


def train(cfg: Config, steps: int = 5, first: int = 0, sizes: list[int] | None = None) -> Result:
    e = engine(cfg)
    e.initialize()
    before = _copy(e.boxes(owned=False))
    results = [e.train_step(micro_batches(e, i, sizes and sizes[i]), cfg.optim.lr) for i in range(first, first + steps)]
    e.settle()
    return Result(
        [(r.loss, r.grad_norm) for r in results],
        before,
        _copy(e.boxes(owned=False)),
        {name: p.detach().clone() for name, p in e.buffers.parameters.items()},
    )


def assemble(boxes: list[Boxes]) -> dict[str, torch.Tensor]:
    """All ranks' boxes -> global tensors. Copies of an element must be equal to the bit, and none may be missing."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for rank in boxes:
        for name, (shape, views) in rank.items():
            full = whole.setdefault(name, torch.zeros(shape, dtype=views[0][1].dtype))
            have = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            for start, t in views:
                at = tuple(slice(s, s + n) for s, n in zip(start, t.shape))
                assert torch.equal(full[at][have[at]], t[have[at]]), f"{name}: copies of the same elements differ"
                full[at], have[at] = t, True
    missing = [name for name, have in seen.items() if not have.all()]
    assert not missing, f"not held by any rank: {missing}"
    return whole


def masters(boxes: list[Boxes]) -> dict[str, torch.Tensor]:
    """The weights in fp32 as global tensors, by the parameters' own names."""
    return {name.removeprefix("master."): t for name, t in assemble(boxes).items() if name.startswith("master.")}


def warmed_up(cfg: Config) -> Engine:
    """An engine after its first step, with nothing under way and an empty record."""
    e = engine(cfg)
    e.initialize()
    e.train_step(micro_batches(e, 0), 0.01)
    e.settle()
    e.comm.records.clear()
    e.comm.bytes.clear()
    e.comm.messages.clear()
    return e


def worst(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Largest relative difference of two curves."""
    assert len(a) == len(b)
    return max(abs(x - y) / abs(y) for p, q in zip(a, b) for x, y in zip(p, q))
