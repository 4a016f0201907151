"""Which checkpoint a start takes, what it says, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from megakit.checkpoint.resume import check_model
from megakit.checkpoint.store import Choice
from megakit.errors import Refused
from tests.checkpoint import workers
from tests.checkpoint.layouts import gpt2, llama


def flip(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "its content has changed"


def truncate(path: Path) -> str:
    os.truncate(path, path.stat().st_size - 10)
    return f"has {path.stat().st_size} bytes, the manifest says {path.stat().st_size + 10}"


def delete(path: Path) -> str:
    path.unlink()
    return "is missing"


def empty(path: Path) -> str:
    path.write_bytes(b"")
    return "is not JSON (empty)" if path.name == "manifest.json" else "has 0 bytes"


DAMAGE = [
    (flip, "__1_0.distcp"),
    (flip, "__0_0.distcp"),
    (flip, ".metadata"),
    (flip, "state.json"),
    (truncate, "__1_0.distcp"),
    (truncate, "state.json"),
    (delete, "__1_0.distcp"),
    (delete, ".metadata"),
    (delete, "state.json"),
    (delete, "manifest.json"),
    (empty, "manifest.json"),
    (empty, "__0_0.distcp"),
    (truncate, "manifest.json"),
]


@pytest.mark.parametrize(("how", "name"), DAMAGE, ids=[f"{how.__name__} {name}" for how, name in DAMAGE])
def test_the_newest_is_damaged(pools, tmp_path, how, name):
    """EL4: auto falls back loudly, an explicit choice fails, and step 0 is never the answer."""
    pools(2).run(workers.save_steps, tmp_path, [4, 8])
    bad, good = tmp_path / "step_00000008", tmp_path / "step_00000004"
    reason = how(bad / name)
    if how is truncate and name == "manifest.json":
        reason = "is not JSON"

    for resume in ("auto", "must"):
        first, second = pools(2).run(workers.choose, tmp_path, resume)
        assert first == second and (first.step, first.path) == (4, good) and first.manifest["step"] == 4
        (alert,) = first.alerts
        assert alert.startswith(f"the checkpoint of step 8 is damaged: {bad / name} ") and reason in alert
        assert alert.endswith("; going on from step 4 instead")
    assert pools(2).run(workers.load_step, good) == [4, 4]

    first, second = pools(2).run(workers.choose, tmp_path, 8)
    assert first == second and first[0] == "Refused"
    assert f"{bad / name} " in first[1] and reason in first[1] and first[1].endswith("other complete steps there: 4")
    with pytest.raises(RuntimeError, match=r"can't load .*step_00000008: "):
        pools(2).run(workers.load_step, bad)

    delete(good / "state.json")
    for resume in ("auto", "must"):
        first, second = pools(2).run(workers.choose, tmp_path, resume)
        assert first == second and first[0] == "Refused"
        assert f"{bad / name} " in first[1] and f"{good / 'state.json'} is missing" in first[1] and "start afresh" in first[1]


def test_nothing_there(pools, tmp_path):
    """CK5: auto says that it starts at step 0; whoever asked for a checkpoint is refused."""
    root = tmp_path / "checkpoints"
    assert pools(1).run(workers.choose, root, "must") == [
        ("Refused", f"checkpoint.resume = must: there is no folder {root}: correct checkpoint.dir, or use checkpoint.resume=auto")
    ]
    assert not root.exists()
    for resume in ("auto", "never"):
        line = f"starting at step 0: no checkpoint in {root}"
        assert pools(2).run(workers.choose, root, resume) == [Choice(None, None, line)] * 2
        assert list(root.iterdir()) == []
    (choice,) = pools(1).run(workers.choose, root, "auto", "/weights")
    assert choice.line == f"starting at step 0 from the weights in /weights: no checkpoint in {root}"
    ((kind, said),) = pools(1).run(workers.choose, root, "must")
    assert kind == "Refused" and f"no complete checkpoint in {root}: correct checkpoint.dir" in said
    ((kind, said),) = pools(1).run(workers.choose, root, 999)
    assert (kind, said) == ("Refused", f"checkpoint.resume = 999: {root} has no step_00000999; steps there: none")


def test_only_an_unfinished_save(pools, tmp_path):
    """CK5: neither a folder aside nor one with a foreign name is a checkpoint; the former is removed."""
    for resume, answer in (("must", "Refused"), (8, "Refused"), ("auto", None)):
        (tmp_path / ".step_00000008.tmp").mkdir()
        (tmp_path / ".step_00000008.tmp" / "__0_0.distcp").write_text("half")
        (tmp_path / "step_foo").mkdir(exist_ok=True)
        (choice,) = pools(1).run(workers.choose, tmp_path, resume)
        assert not (tmp_path / ".step_00000008.tmp").exists() and (tmp_path / "step_foo").exists()
        if answer is None:
            assert choice.step is None
            assert choice.line == f"starting at step 0: no checkpoint in {tmp_path} (1 unfinished, removed)"
        else:
            assert choice[0] == answer


def test_what_was_asked_for(pools, tmp_path):
    pools(2).run(workers.save_steps, tmp_path, [4, 8, 12])
    (auto, _) = pools(2).run(workers.choose, tmp_path, "auto")
    assert (auto.step, auto.alerts) == (12, []) and auto.line == f"resuming at step 12 from {tmp_path / 'step_00000012'}"
    (must, _) = pools(2).run(workers.choose, tmp_path, "must")
    assert must == auto
    (exact, _) = pools(2).run(workers.choose, tmp_path, 4)
    assert exact.step == 4 and exact.line.endswith("step_00000004, as asked")
    assert exact.alerts == [f"{tmp_path} has newer checkpoints (8, 12): they will be set aside at the first save after step 4"]
    (missing, _) = pools(2).run(workers.choose, tmp_path, 999)
    assert missing[1] == f"checkpoint.resume = 999: {tmp_path} has no step_00000999; steps there: 4, 8, 12"
    (never, _) = pools(2).run(workers.choose, tmp_path, "never")
    assert never[0] == "Refused" and f"never and {tmp_path} has checkpoints (steps 4, 8, 12)" in never[1]


@pytest.mark.parametrize("resume", ["newest", True, -1, 1.5, None, "8"])
def test_other_values_are_refused(pools, tmp_path, resume):
    ((kind, said),) = pools(1).run(workers.choose, tmp_path, resume)
    assert (kind, said) == ("Refused", f"checkpoint.resume = {resume!r} is none of auto, must, never or the number of a step")


def test_new_weights_and_a_checkpoint(pools, tmp_path):
    """CK5: a requeued job goes on from its checkpoint, and says that init_from did nothing."""
    pools(1).run(workers.save_steps, tmp_path, [4])
    (choice,) = pools(1).run(workers.choose, tmp_path, "auto", "/weights")
    assert choice.step == 4
    assert choice.alerts == [
        f"checkpoint.init_from = /weights has no effect: {tmp_path} has a checkpoint of step 4, which goes on"
    ]
    for resume in ("must", 4):
        ((kind, said),) = pools(1).run(workers.choose, tmp_path, resume, "/weights")
        assert kind == "Refused" and f"checkpoint.resume = {resume} and checkpoint.init_from = /weights both" in said
    ((kind, _),) = pools(1).run(workers.choose, tmp_path, "never", "/weights")
    assert kind == "Refused"


def test_a_replacement_that_was_killed_half_way(pools, tmp_path):
    """Between the two renames of a save that replaces a checkpoint: the old one comes back."""
    pools(1).run(workers.save_steps, tmp_path, [4])
    os.rename(tmp_path / "step_00000004", tmp_path / ".step_00000004.old")
    (tmp_path / ".step_00000004.tmp").mkdir()
    (tmp_path / ".latest.tmp").write_text("step_00000004\n")
    (choice,) = pools(1).run(workers.choose, tmp_path)
    assert choice.step == 4 and sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000004"]


def test_a_removal_that_was_killed_half_way(pools, tmp_path):
    """An old one that retention had taken out of sight doesn't come back as a damaged one."""
    pools(1).run(workers.save_steps, tmp_path, [4, 8])
    os.rename(tmp_path / "step_00000004", tmp_path / ".step_00000004.trash")
    (tmp_path / ".step_00000004.trash" / "manifest.json").unlink()
    (choice,) = pools(1).run(workers.choose, tmp_path)
    assert choice.step == 8 and choice.alerts == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000008"]


def test_a_file_in_place_of_the_folder(pools, tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        ((kind, said),) = pools(1).run(workers.choose, root)
        assert kind == "Refused" and said.startswith(f"checkpoint.dir = {root} can't be written (")


READ_ONLY = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from megakit.checkpoint.store import choose
from megakit.errors import Refused
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = Comm(ParallelState(Grid(), torch.device("cpu"), timedelta(seconds=60)))
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    choose(Path(sys.argv[1]), "auto", None, comm)
except Refused as error:
    print(error)
    sys.exit(error.code)
"""


def test_a_read_only_folder(tmp_path):
    """CK5: found before step 1, not at the first save."""
    root = Path(tempfile.mkdtemp(prefix="megakit-ro-"))
    root.chmod(0o555)
    try:
        done = subprocess.run([sys.executable, "-c", READ_ONLY, root], capture_output=True, text=True, timeout=120)
    finally:
        root.rmdir()
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(f"checkpoint.dir = {root} can't be written ([Errno 13] Permission denied: ")


def manifest(cfg, **more):
    return {"step": 3, "config": asdict(cfg), **more}


def test_another_model():
    """CK5: every field that differs, with both values."""
    saved = manifest(llama())
    assert check_model(saved, llama()) == []
    with pytest.raises(Refused, match=r"of another model \(model\.num_layers: 4 in the checkpoint, 5 in the recipe\): use"):
        check_model(saved, llama(num_layers=5))
    with pytest.raises(Refused) as caught:
        check_model(saved, gpt2())
    for text in ("model.family: llama in the checkpoint, gpt2 in", "model.tie_embeddings: False in", "model.hidden_size: 64 in"):
        assert text in str(caught.value)
    with pytest.raises(Refused, match=r"model\.max_position_embeddings: 34 in the checkpoint, 64 in"):
        check_model(manifest(gpt2()), gpt2(max_position_embeddings=64))


def test_what_may_differ():
    saved = manifest(llama(), data={"seed": [1]}, tokenizer={"fingerprint": "a" * 64})
    cfg = llama(hidden_dropout=0.1, make_vocab_size_divisible_by=1, max_position_embeddings=64)
    cfg.parallel.tp, cfg.parallel.zero, cfg.train.precision, cfg.train.global_batch_size = 2, 1, "fp32", 7
    assert check_model(saved, cfg, {"seed": (1,)}, "a" * 64) == []  # JSON makes lists of tuples
    (alert,) = check_model(saved, cfg, {"seed": 2}, "a" * 64)
    assert "the data is not that of the checkpoint of step 3" in alert
    with pytest.raises(Refused, match=r"tokenizer aaaaaaaaaaaa\.\.\., data\.tokenizer is bbbbbbbbbbbb\.\.\."):
        check_model(saved, cfg, {"seed": 1}, "b" * 64)


def test_what_no_checkpoint_has():
    saved, cfg = manifest(llama()), llama()
    cfg.train.precision, cfg.ops.fp8, cfg.ops.fp8_recipe = "fp8", "te", "delayed"
    (alert,) = check_model(saved, cfg)
    assert alert.startswith("ops.fp8_recipe = delayed") and "not in checkpoints" in alert and "\n" not in alert
    cfg.ops.fp8_recipe = "current"
    assert check_model(saved, cfg) == []
