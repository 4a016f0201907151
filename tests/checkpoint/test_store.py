"""Saving: complete or not at all, the same outcome on every rank, and the right ones kept."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from megakit.checkpoint.store import read_manifest, steps, verify
from tests.checkpoint import workers


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def tree(path: Path) -> dict[str, str]:
    """Content of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


def test_what_is_in_the_folder(pools, tmp_path):
    pools(2).run(workers.save_steps, tmp_path, [100])
    path = tmp_path / "step_00000100"
    assert names(tmp_path) == ["latest", "step_00000100"]
    assert (tmp_path / "latest").read_text() == "step_00000100\n"
    assert names(path) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "state.json"]
    manifest = read_manifest(path)
    assert manifest["step"] == 100 and manifest["world_size"] == 2 and manifest["consumed_samples"] == 0
    assert manifest["tensors"] == {"master.a": [6, 5], "master.b": [7]}
    assert {"megakit", "torch", "python"} == manifest["versions"].keys()
    assert manifest["files"].keys() == set(names(path)) - {"manifest.json"}
    for name, info in manifest["files"].items():
        content = (path / name).read_bytes()
        assert info == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name
    verify(path, deep=True)
    assert pools(2).run(workers.load_step, path) == [100, 100]


def test_state_must_be_json(pools, tmp_path):
    said = pools(2).run(workers.save_unfit, tmp_path)
    assert said == ["state and info must be JSON: Object of type set is not JSON serializable"] * 2
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("saved", "keep", "protect", "left"),
    [
        ([8, 9, 10, 11], 2, (), [10, 11]),
        ([98, 99, 100, 101], 2, (), [100, 101]),
        ([9900, 9_999, 10_000], 1, (), [10_000]),
        ([99_999_999, 100_000_000], 1, (), [100_000_000]),
        ([8, 9, 10, 11], 1, (8,), [8, 11]),
        ([8, 9, 10, 11], 0, (), [8, 9, 10, 11]),
    ],
)
def test_keep(pools, tmp_path, saved, keep, protect, left):
    """CK3: numeric order, whatever the names sort like."""
    (tmp_path / "step_foo").mkdir()
    (tmp_path / "step_7").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    pools(1).run(workers.save_steps, tmp_path, saved, keep, protect)
    assert steps(tmp_path) == left
    assert set(names(tmp_path)) == {f"step_{s:08d}" for s in left} | {"latest", "step_foo", "step_7", "notes.txt"}
    assert (tmp_path / "latest").read_text() == f"step_{max(saved):08d}\n"


def test_keep_counts_complete_ones_only(pools, tmp_path):
    """CK3: neither an unfinished folder nor a damaged one takes the place of a good one."""
    pools(1).run(workers.save_steps, tmp_path, [1, 2, 3])
    (tmp_path / "step_00000003" / "state.json").unlink()
    (tmp_path / ".step_00000005.tmp").mkdir()
    pools(1).run(workers.save_steps, tmp_path, [4], 2)
    assert steps(tmp_path) == [2, 4]


def test_keep_must_not_be_negative(pools, tmp_path):
    with pytest.raises(RuntimeError, match="keep = -1 must be 0"):
        pools(1).run(workers.save_steps, tmp_path, [1], -1)


@pytest.mark.parametrize("where", ["_begin", "_complete", "_publish"])
def test_nothing_is_removed_when_a_save_fails(pools, tmp_path, where):
    """CK3: with keep 1 the only checkpoint stays until the next one is complete."""
    pools(2).run(workers.save_steps, tmp_path, [8], 1)
    before = tree(tmp_path / "step_00000008")
    said = pools(2).run(workers.save_failing, tmp_path, 10, where, 1)
    assert said[0] == said[1] and said[0].startswith("StorageFailed(74)") and "Input/output error" in said[0]
    assert names(tmp_path) == ["latest", "step_00000008"] and tree(tmp_path / "step_00000008") == before
    pools(2).run(workers.save_steps, tmp_path, [10], 1)
    assert names(tmp_path) == ["latest", "step_00000010"]


@pytest.mark.parametrize(
    ("rank", "limit"), [(0, 40_000), (1, 40_000), (0, 100)], ids=["rank 0's boxes", "rank 1's boxes", "first bytes"]
)
def test_disk_full(pools, tmp_path, rank, limit):
    """CK2: a file can't grow on one rank; every rank raises the same line, the partial one is gone, the first one loads."""
    scale = 1000  # 60 kB a rank
    pools(2).run(workers.save_steps, tmp_path, [2], 1, (), scale)
    before = tree(tmp_path / "step_00000002")
    said = pools(2).run(workers.save_limited, tmp_path, 4, rank, limit, scale, 1)
    assert said[0] == said[1]
    assert said[0].startswith(f"StorageFailed(74): the checkpoint of step 4 was not written to {tmp_path}: rank {rank}: ")
    assert "[Errno 27] File too large" in said[0] and "; needed 0.1 MB, free " in said[0]
    assert said[0].endswith("; intact: step 2") and "\n" not in said[0]
    assert names(tmp_path) == ["latest", "step_00000002"] and tree(tmp_path / "step_00000002") == before
    assert pools(2).run(workers.load_step, tmp_path / "step_00000002", scale) == [2, 2]
    pools(2).run(workers.save_steps, tmp_path, [4], 1, (), scale)  # there is room again
    assert pools(2).run(workers.load_step, tmp_path / "step_00000004", scale) == [4, 4]


def test_too_little_space_is_found_before_writing(pools, tmp_path):
    pools(2).run(workers.save_steps, tmp_path, [2])
    said = pools(2).run(workers.save_without_space, tmp_path, 4, 100)
    assert said[0] == said[1] and "[Errno 28] No space left on device; needed 0.0 MB, free 0.0 MB" in said[0]
    assert pools(2).run(workers.save_without_space, tmp_path, 4, 200) == ["saved"] * 2


def test_a_full_filesystem(pools, tmp_path):
    """CK2: really full, while others fill it too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        root = disk / "checkpoints"
        pools(2).run(workers.save_steps, root, [1], 0, (), 5000)  # 0.6 MB
        (disk / "others").write_bytes(b"x" * 300_000)
        for attempt in (workers.save_plainly, workers.save_blind):  # found before writing, and in the middle of it
            said = pools(2).run(attempt, root, 2, 5000)
            assert said[0] == said[1] and "[Errno 28] No space left on device" in said[0], said
            assert names(root) == ["latest", "step_00000001"]
        assert pools(2).run(workers.load_step, root / "step_00000001", 5000) == [1, 1]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_same_step_again_replaces_it(pools, tmp_path):
    """As after falling back from a damaged one."""
    pools(2).run(workers.save_steps, tmp_path, [4, 8])
    (tmp_path / "step_00000008" / "state.json").write_text("{}")
    pools(2).run(workers.save_steps, tmp_path, [8])
    assert names(tmp_path) == ["latest", "step_00000004", "step_00000008"]
    verify(tmp_path / "step_00000008", deep=True)


def test_a_replacement_that_fails(pools, tmp_path):
    """The one that was to be replaced is back under its name."""
    pools(2).run(workers.save_steps, tmp_path, [4, 8])
    before = tree(tmp_path / "step_00000008")
    said = pools(2).run(workers.save_not_renamed, tmp_path, 8)
    assert said[0] == said[1] and "Input/output error" in said[0] and said[0].endswith("intact: steps 4, 8")
    assert tree(tmp_path / "step_00000008") == before
    assert {n for n in names(tmp_path) if n.startswith((".step", "step"))} == {"step_00000004", "step_00000008"}


def test_steps_of_a_course_that_was_left(pools, tmp_path):
    """Going on from 4 while 8 and 12 are there: the save at 6 is the newest from then on, and nothing is lost."""
    pools(1).run(workers.save_steps, tmp_path, [4, 8, 12])
    pools(1).run(workers.save_steps, tmp_path, [6], 2)
    assert steps(tmp_path) == [4, 6] and (tmp_path / "latest").read_text() == "step_00000006\n"
    verify(tmp_path / "superseded_step_00000008", deep=True)
    pools(1).run(workers.save_steps, tmp_path, [8, 6], 0)
    assert {n for n in names(tmp_path) if n.startswith("superseded")} == {
        "superseded_step_00000008",
        "superseded_step_00000008-2",
        "superseded_step_00000012",
    }


def test_the_manifest_describes_the_run(pools, tmp_path):
    from types import SimpleNamespace

    from megakit.checkpoint.store import run_info
    from tests.checkpoint.layouts import llama

    cfg = llama()
    cfg.train.seq_len, cfg.data.tokenizer = 32, "t.model"
    tokenizer = SimpleNamespace(vocab_size=300, fingerprint="ab", bos=0, eos=1, unk=2, pad=None)
    info = json.loads(json.dumps(run_info(cfg, consumed_samples=12, data={"a": 1}, tokenizer=tokenizer)))
    assert info["config"]["model"]["num_layers"] == 4
    assert (info["consumed_samples"], info["consumed_tokens"], info["data"]) == (12, 384, {"a": 1})
    assert info["tokenizer"] == {
        "path": str(Path("t.model").resolve()),
        "fingerprint": "ab",
        "vocab_size": 300,
        "bos": 0,
        "eos": 1,
        "unk": 2,
        "pad": None,
    }
