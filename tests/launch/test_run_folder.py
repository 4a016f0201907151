"""SL6: one folder for all ranks, unique per job, used again by a restart, by one running job at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megakit.config.compose import compose
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.launch import run_folder
from megakit.launch.ranks import Ranks

ROOT = Path(__file__).parents[2]


class Alone:
    def broadcast_object(self, obj):
        return obj


@pytest.fixture(autouse=True)
def start_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    run_folder.release()


def recipe(*overrides: str) -> Config:
    return compose(["+recipe=demo", "run.dir=null", *overrides])


def prepare(cfg: Config | None = None, plan: str | None = None, **ranks) -> Path:
    folder = run_folder.prepare(cfg or recipe(), Ranks(**ranks), Alone(), plan)
    run_folder.release()
    return folder


def test_a_given_folder_is_relative_to_the_start(tmp_path):
    folder = prepare(recipe("run.dir=a/b"), plan='{"world": 1}')
    assert folder == tmp_path / "a/b"
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["dir"] == "a/b"
    assert (folder / "plan.json").read_text() == '{"world": 1}'
    assert not list(folder.glob("*.tmp-*"))


def test_two_runs_in_the_same_second_get_two_folders():
    folders = {prepare() for _ in range(3)}
    assert len(folders) == 3 and all(f.name.startswith("demo-20") for f in folders)


def test_a_restart_of_the_job_uses_its_folder_again():
    first = prepare(job_id="4711")
    assert first.name == "demo-4711"
    assert prepare(job_id="4711", restart=1) == first
    changed = recipe("train.steps=7")
    assert prepare(changed, job_id="4711", restart=2) == first  # the recipe was edited meanwhile
    assert prepare(job_id="4712") != first


def test_one_job_that_runs_two_recipes_gets_two_folders():
    a, b = recipe("optim.lr=1e-3"), recipe("optim.lr=2e-3")
    folders = [prepare(a, job_id="9").name, prepare(b, job_id="9").name]
    assert folders == ["demo-9", "demo-9-1"]
    assert [prepare(a, job_id="9", restart=1).name, prepare(b, job_id="9", restart=1).name] == folders


def test_torchrun_without_an_id_is_known_by_its_agent():
    first = prepare(launcher="torchrun", world=1)
    assert first.name.endswith(f"-{os.getppid()}")
    assert prepare(launcher="torchrun", restart=1) == first


def test_the_history_of_the_config_is_kept():
    for steps in (7, 7, 8, 9):
        folder = prepare(recipe(f"train.steps={steps}", "run.dir=x"))
    found = {p.name: yaml.safe_load(p.read_text())["train"]["steps"] for p in folder.glob("config.yaml*")}
    assert found == {"config.yaml.1": 7, "config.yaml.2": 8, "config.yaml": 9}


HOLD = """
import sys
from megakit.config.compose import compose
from megakit.launch import run_folder
from megakit.launch.ranks import Ranks
class Alone:
    def broadcast_object(self, obj): return obj
run_folder.prepare(compose(["+recipe=demo", "run.dir=x"]), Ranks(job_id="77"), Alone())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_until_its_holder_is_gone():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(Refused, match=rf"is in use by pid {other.pid} on \S+ \(job 77\)"):
            prepare(recipe("run.dir=x"))
        other.kill()
        other.wait()
        assert prepare(recipe("run.dir=x")).name == "x"


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.dir"])
def test_a_folder_that_cannot_be_written(key):
    with pytest.raises(Refused, match=r"/proc/no.* can be written"):
        prepare(recipe(f"{key}=/proc/no/folder"))


@pytest.mark.parametrize("name", ["a/b", "..", "a;rm", "a\nb", "", " ", "-x"])
def test_a_name_that_cannot_be_a_folder(name):
    cfg = recipe()
    cfg.run.name = name
    with pytest.raises(Refused, match=r"run\.name"):
        prepare(cfg)


def test_every_rank_hears_of_a_refusal(pools, tmp_path):
    assert pools(2).run(_refused, str(tmp_path)) == ["run.dir"] * 2


def _refused(folder: str) -> str:
    import torch.distributed as dist

    class World:
        def broadcast_object(self, obj):
            box = [obj]
            dist.broadcast_object_list(box, src=0)
            return box[0]

    try:
        cfg = recipe("run.dir=/proc/no/folder")
        run_folder.prepare(cfg, Ranks(dist.get_rank(), 2, dist.get_rank(), 2), World())
    except Refused as refused:
        return "run.dir" if "run.dir" in str(refused) else str(refused)
    return "nothing was refused"


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    """Someone who can write to a shared folder could else have a file of the user's cut off."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(Refused, match=r"run folder: .*\.lock"):
        prepare(recipe("run.dir=out"))
    assert (tmp_path / "precious").read_text() == "mine"
