"""The proof of a job: every layout is clean, faults in the engine are found, replay changes nothing, bytes are exact."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import io
import itertools
import json
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore

from megakit.errors import Refused
from megakit.parallel.comm import Comm, Handle
from megakit.parallel.grid import Grid, ParallelState
from megakit.parallel.pipeline import executor
from megakit.parallel.tensor import Region
from megakit.parallel.zero import FlatBuffers
from megakit.planner.memory import held_at
from megakit.train.engine import Engine
from megakit.verify.live import LiveBytes
from megakit.verify.prove import Proof, prove
from megakit.verify.render import render
from megakit.verify.simulate import NAMES
from megakit.verify.step import step
from tests.verify.programs import small

SP = {"tp": 2, "sequence_parallel": True}
TIED = {"model__tie_embeddings": True}
CHUNKS = {"pp": 2, "virtual_stages": 2}
LAYOUTS = {
    "one rank": {},
    "sp zero 1": {**SP, "dp": 2, "zero": 1, "train__precision": "bf16"},
    "gpipe tied": {**TIED, "pp": 2, "schedule": "gpipe", "recompute": "full"},
    "three stages": {**TIED, "pp": 3},
    "interleaved, sp": {**SP, **CHUNKS, "schedule": "interleaved_1f1b", "microbatches": 4},
    "zb_h1, zero 2": {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb_h1"},
    "zb_v tied, cp": {**TIED, **CHUNKS, "schedule": "zb_v", "cp": 2, "zero": 1},
    "hybrid zero 2, ring": {"dp": 2, "cp": 2, "zero": 2, "zero_group": 2},
    "zero 3, hybrid": {"zero": 3, "dp": 4, "zero_group": 2},
    "zero 3 by micro-batch, sp": {**SP, "zero": 3, "dp": 2, "zero3_reduce": "microbatch", "recompute": "selective"},
    "gathered keys, sp": {**SP, "cp": 2, "cp_comm_type": "all_gather"},
    "muon": {**SP, "dp": 2, "zero": 1, "optim__name": "muon"},
    "uneven stages": {"pp": 2, "model__num_layers": 3, "train__precision": "fp16"},
}


def proven(**keys) -> Proof:
    return prove(small(**keys), types=False, processes=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_proven(layout):
    cfg = small(**LAYOUTS[layout])
    proof = prove(cfg, types=False, processes=1)
    assert proof.errors == [] and proof.notes == [] and proof.proven
    assert proof.semantics == list(NAMES.values())
    assert proof.ranks_stepped == list(range(proof.world)), "small worlds are stepped whole"
    assert all(p.peak_bytes > p.static_bytes > 0 for p in proof.peaks)
    assert all(p.at and p.operation and p.site.startswith("megakit/") for p in proof.peaks)
    if cfg.parallel.zero < 3:  # which makes its gradients in the step
        planned = [held_at(cfg, Grid.of(cfg.parallel), p.stage).states for p in proof.peaks]
        for peak, of in zip(proof.peaks, planned):
            counts = peak.static_bytes - of.total
            assert 0 <= counts <= 4 * 40 and counts % 4 == 0, "besides what is planned there are AdamW's counts of steps"


@pytest.mark.parametrize(
    "keys",
    [
        {**SP, "pp": 2, "dp": 2, "zero": 1},
        {**CHUNKS, **SP, "dp": 2, "zero": 2, "schedule": "zb_v"},
        {"pp": 3, "schedule": "zb_h1", "recompute": "full"},
        {"dp": 2, "zero": 3},
        {**CHUNKS, "schedule": "interleaved_1f1b"},
    ],
    ids=["1f1b", "zb_v", "zb_h1", "zero 3", "interleaved"],
)
def test_replay_changes_nothing(keys):
    cfg = small(**keys, microbatches=6)
    for rank in {0, cfg.parallel.pp * cfg.parallel.cp * cfg.parallel.tp - 1}:
        replayed, whole = step(cfg, rank), step(cfg, rank, replay=False)
        assert replayed.skipped >= 4 and not whole.skipped
        assert replayed.program.digest == whole.program.digest
        for name in ("static_bytes", "most_bytes", "at", "end_bytes", "errors"):
            assert getattr(replayed, name) == getattr(whole, name), name


def test_micro_batches_that_differ_are_not_replayed(monkeypatch):
    leave, passes = Region.leave, []

    def uneven(self, y):
        passes.append(0)
        if len(passes) > 6:  # in the third micro-batch: a layer's forward pass has two of them, the embedding one
            self.comm.all_reduce(torch.zeros(1), "tp").wait()
        return leave(self, y)

    monkeypatch.setattr(Region, "leave", uneven)
    assert step(small(tp=2, microbatches=8), 0).skipped == 0


def test_live_bytes_are_those_of_tensors():
    live = LiveBytes()
    with live:
        a = torch.zeros(1000)
        b = a.view(10, 100)[2:] + 1  # a view takes nothing
        assert live.now == 4000 + 3200
        del a
        assert live.now == 3200
        b = b.double().sum(0)
    assert (live.now, live.most) == (800, 3200 + 6400 + 800) and "sum" in live.at.operation
    del b
    assert live.now == 0


def profiled(cfg) -> int:
    """Most bytes that a real step of one rank takes from torch's allocator, by torch's own profiler."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            state = ParallelState(Grid(), torch.device("cpu"), timedelta(seconds=60))
        engine = Engine(cfg, state, Comm(state))
        engine.initialize()
        batches = engine.split(torch.zeros(cfg.train.global_batch_size, cfg.train.seq_len + 1, dtype=torch.long), 0)
        gc.collect()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            engine.train_step(batches, 1e-3)
    finally:
        dist.destroy_process_group()
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(nbytes for _, nbytes in sorted(events, key=lambda e: e[0])))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("keys", [{"tp": 2}, {"pp": 2}, {"recompute": "full", **TIED}], ids=["tp", "pp", "recomputed"])
def test_the_plan_has_the_logits_beside_their_probabilities(keys, precision):
    proof = proven(**keys, model__vocab_size=20000, train__precision=precision)
    last, logits = proof.peaks[-1], 16 * 20000 // keys.get("tp", 1)
    assert last.site.endswith("_CrossEntropy.forward")
    assert abs(last.peak_bytes - last.planned_bytes) < 0.1 * logits, "a few numbers for each"


WIDE = {"model__hidden_size": 256, "model__ffn_hidden_size": 704, "model__num_attention_heads": 8, "model__num_layers": 4,
        "model__vocab_size": 2048, "train__seq_len": 128, "train__precision": "bf16", "microbatches": 8}  # fmt: skip
BOUNDED = {
    "one rank": {},
    "sequence parallel": SP,
    "recomputed": {"pp": 2, "recompute": "full"},
    "four stages": {**SP, "pp": 4},
    "interleaved": {**CHUNKS, "schedule": "interleaved_1f1b"},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "zb_h1": {"pp": 4, "schedule": "zb_h1"},
    "zb_v": {**SP, **CHUNKS, "schedule": "zb_v"},
    "ring": {"cp": 2, "pp": 2},
    "zero 2": {"pp": 2, "dp": 2, "zero": 2},
    "zero 3": {"zero": 3, "dp": 2},
    "loss by chunks": {"tp": 2, "model__vocab_size": 20000, "ops__loss_chunk": 32},
    "loss by chunks, zb_h1": {"pp": 2, "schedule": "zb_h1", "model__vocab_size": 20000, "ops__loss_chunk": 50},
    "loss by chunks, zero 3": {"zero": 3, "dp": 2, "train__seq_len": 1024, "model__vocab_size": 20000, "ops__loss_chunk": 32},
    "zero 3, whole": {"zero": 3, "dp": 2, "zero3_reduce": "step"},
    "zero 3, large tables": {"zero": 3, "dp": 2, "model__vocab_size": 20000, "train__seq_len": 16},
}


def test_what_kernels_a_recipe_names_and_the_proof_does_not_step_is_said():
    text = "torch's operators were stepped in place of those of csrc"
    assert any(text in said for said in proven(ops__loss="csrc", ops__loss_chunk=7).assumptions)
    assert not any("in place of" in said for said in proven(ops__loss="torch", ops__loss_chunk=7).assumptions)


@pytest.mark.parametrize("layout", BOUNDED)
def test_the_planned_peak_is_not_below_the_proven_one_nor_far_above(layout):
    for peak in proven(**{**WIDE, **BOUNDED[layout]}).peaks:
        assert -0.001 <= peak.planned_bytes / peak.peak_bytes - 1 <= 0.1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_is_that_of_a_real_step_to_the_byte(recompute):
    """In fp32, where the kernels take no scratch; the sequence is long, for the optimizer's norm in fp64 does."""
    keys = {"train__seq_len": 256, "model__max_position_embeddings": 256, "launch__device": "cpu"}
    cfg = small(recompute=recompute, model__num_layers=2, microbatches=2, **keys)
    stepped = step(cfg, 0)
    tokens = cfg.train.global_batch_size * (cfg.train.seq_len + 1) * 8  # those of the step are there before it
    assert profiled(cfg) == stepped.most_bytes - stepped.static_bytes - tokens


def test_a_world_of_thousands_is_proven_from_a_few_ranks():
    keys = {**SP, "tp": 4, "pp": 4, "dp": 64, "zero": 1, "model__num_query_groups": 4, "model__num_layers": 4}
    proof = proven(**keys, microbatches=4)
    assert proof.world == 1024 and proof.errors == []
    assert len(proof.ranks_stepped) == 10 and proof.programs == 4
    assert any("1,014 ranks that were not stepped" in text for text in proof.assumptions)


# faults in the engine


def skipped_on_one_rank(patch):
    original = Region.leave
    patch.setattr(Region, "leave", lambda self, y: y if self.comm.index("tp") == 1 else original(self, y))


def never_settled(patch):
    """The new weights of a bucket are used when they may still be on their way."""
    patch.setattr(FlatBuffers, "_arrived", staticmethod(lambda bucket: None))


def never_waits(patch):
    patch.setattr(FlatBuffers, "_settle", lambda self, bucket: setattr(bucket, "reduction", None))


def gradient_too_early(patch):
    """A stage's gradient is used before it has arrived."""
    patch.setattr(executor._Run, "_backward", _hasty(executor._Run._backward))


def _hasty(original):
    def backward(self, op):
        for key, handle in self.inbox.items():
            if key[0] == "g":
                self.inbox[key] = Handle(handle.result)
        original(self, op)

    return backward


def reversed_sends(patch):
    """The first two micro-batches leave stage 0 in the other order."""
    original = executor._Run.run

    def run(self, program):
        sends = [i for i, op in enumerate(program) if getattr(op, "kind", "") == "SEND"][:2]
        if self.executor.rank == 0 and len(sends) == 2:
            i, j = sends
            program = [*program[:i], *program[i + 1 : j + 1], program[i], *program[j + 1 :]]
        return original(self, program)

    patch.setattr(executor._Run, "run", run)


def by_place(patch):
    """The last of four tensor-parallel ranks sums over another group."""
    original = Region.leave

    def leave(self, y):
        if self.comm.index("tp") == self.comm.size("tp") - 1:
            self.comm.all_reduce(torch.zeros(1), "tp").wait()
        return original(self, y)

    patch.setattr(Region, "leave", leave)


FAULTS = {
    # name: (layout, plant, words of a report)
    "a sum skipped on one rank": (
        {"tp": 2},
        skipped_on_one_rank,
        ("group tp of ranks 0, 1", "all_reduce", "megakit/parallel/tensor.py"),
    ),
    "weights used on their way": (
        {"dp": 2, "zero": 1},
        never_settled,
        ("did not wait for all_gather", "megakit/parallel/zero.py"),
    ),
    "a reduction is never waited for": ({"dp": 2}, never_waits, ("never waits for the end of all_reduce", "dp")),
    "a gradient used before it came": ({"pp": 2}, gradient_too_early, ("did not wait for recv", "megakit/parallel/pipeline")),
    "sends in another order": (
        {"pp": 2, "schedule": "gpipe"},
        reversed_sends,
        ("message 0 from rank 0 to rank 1", "micro-batch 1"),
    ),
    "a place that does more": (
        {"tp": 4, "dp": 4, "model__num_query_groups": 4},
        by_place,
        ("group tp of ranks 0, 1, 2, 3", "rank 3 has one too many", "all_reduce [1]"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_engine_is_found(fault, monkeypatch):
    keys, plant, words = FAULTS[fault]
    plant(monkeypatch)
    proof = proven(**keys)
    assert not proof.proven and all("\n" not in e for e in proof.errors)
    assert any(all(w in e for w in words) for e in proof.errors), "\n".join(proof.errors)


def test_a_doubled_reduction_of_gradients_is_found_by_types(monkeypatch):
    """On all ranks alike: nothing mismatches, nobody waits, the gradient is wrong."""
    pytest.importorskip("spmd_types")
    original = FlatBuffers._reduce

    def twice(self, bucket):
        self.comm.all_reduce(bucket.whole, "dp_cp").wait()
        original(self, bucket)

    monkeypatch.setattr(FlatBuffers, "_reduce", twice)
    proof = prove(small(dp=2), processes=1)
    assert proof.types_checked == [0]
    assert any("reduced twice" in e and "over dp" in e for e in proof.errors), proof.errors


# the result


def test_a_proof_is_told_and_written():
    told = []
    proof = prove(small(pp=2), types=False, processes=2, progress=lambda *args: told.append(args))
    assert proof.proven and proof.ranks_stepped == [0, 1]
    assert [done for done, _, _ in told] == [1, 2, 2] and told[-1][2] == "matching 2 ranks"
    assert json.loads(proof.to_json())["proven"] is True
    text = spelled(proof)
    assert "Proven for dp 1 x pp 2 x tp 1 = 2 ranks" in text and "Assumed: one step is proven" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    failed = spelled(dataclasses.replace(proof, errors=["it is wrong"]))
    assert "Not proven" in failed and "Error: it is wrong" in failed


def spelled(proof: Proof) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(proof))
    return console.export_text()


def test_what_cannot_be_planned_is_refused(monkeypatch):
    with pytest.raises(Refused, match=r"parallel\.tp"):
        prove(small(tp=3), processes=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match="pip install spmd-types"):
        prove(small(), processes=1)
