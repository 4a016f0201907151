"""From a recipe to ranks: how many, where, and what is refused; under torchrun and by hand."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megakit.config.compose import compose
from megakit.config.shrink import shrink
from megakit.errors import Refused, StorageFailed
from megakit.launch.ranks import Ranks
from megakit.launch.start import launch, local_world
from tests.launch.conftest import ROOT, Job

TARGETS = "tests.launch.targets:"
START = """
import sys
from megakit.config.compose import compose
from megakit.launch.start import launch
quick = ["launch.threads_per_rank=1", "launch.device=cpu", "launch.timeout_s=30", "train.global_batch_size=24", "run.dir=null"]
sys.exit(launch(compose(["+recipe=demo", *quick, *sys.argv[2:]]), target="tests.launch.targets:" + sys.argv[1]))
"""


def recipe(*overrides: str, name: str = "demo"):
    return compose([f"+recipe={name}", "launch.threads_per_rank=1", *overrides])


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus)`: a machine that shows so many GPUs, and no launcher's environment."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    return lambda gpus: monkeypatch.setattr("megakit.launch.start.visible_gpus", lambda env: gpus)


@pytest.mark.parametrize(
    "overrides, gpus, world",
    [
        ([], 0, 1),
        ([], 1, 1),
        ([], 8, 8),
        ([], 6, 4),  # the global batch of 32 is not divisible by 6 micro-batches of 4, nor by 5
        (["launch.device=cpu"], 8, 1),
        (["launch.device=cpu", "parallel.dp=2"], 8, 2),
        (["parallel.dp=2"], 0, 2),
        (["parallel.dp=2"], 8, 2),
        (["parallel.tp=2", "parallel.pp=2"], 0, 4),
        (["parallel.tp=2"], 8, 8),
        (["parallel.tp=2"], 3, 2),
    ],
)
def test_ranks_of_plain_python(overrides, gpus, world):
    assert local_world(recipe(*overrides), gpus) == world


def test_a_recipe_for_more_gpus_than_there_are():
    with pytest.raises(Refused) as refused:
        local_world(recipe(name="llama7b"), 0, ["+recipe=llama7b"])
    assert str(refused.value) == (
        "this recipe needs 32 GPUs (dp 32 x pp 1 x tp 1), this machine has 0: start it with srun or torchrun on 4 nodes of 8 GPUs"
        " (python -m megakit.submit +recipe=llama7b submits it to Slurm), try it here with run.shrink=true,"
        " or see its plan with run.dry_run=true"
    )
    with pytest.raises(Refused, match=r"needs 2 GPUs \(dp 2 x pp 1 x tp 1\), this machine has 1: .* on one node of 8 GPUs"):
        local_world(recipe("launch.device=cuda", "parallel.dp=2"), 1)
    with pytest.raises(Refused, match=r"needs 1 GPUs .*, this machine has 0.* on one node of .*launch.device=cpu") as refused:
        local_world(recipe("launch.device=cuda"), 0, ["+recipe=demo", "launch.device=cuda"])
    assert "megakit.submit" not in str(refused.value)  # which refuses a recipe without a cluster
    assert local_world(shrink(recipe("run.shrink=true", name="llama7b")), 0) == 2
    assert local_world(recipe(name="llama7b"), 32) == 32


def test_refusing_is_quick_and_without_torch():
    started = time.monotonic()
    code = (
        "import sys; from megakit.launch.start import launch; from megakit.launch import run_folder, worker, verdict\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    assert time.monotonic() - started < 5  # most of it is the interpreter; 0.3 s on an idle core


def test_one_rank_runs_in_this_process(machine, capfd, monkeypatch):
    machine(0)
    assert launch(recipe(), target=TARGETS + "says_where") == 0
    assert capfd.readouterr().out == "single 1 1 None 0\n"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert launch(recipe(), target=TARGETS + "says_where") == 0
    assert capfd.readouterr().out == "single 1 1 17 2\n"
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    monkeypatch.setenv("MEGAKIT_RESTART_COUNT", "3")
    assert launch(recipe(), target=TARGETS + "says_where") == 0
    assert capfd.readouterr().out == "single 1 1 None 3\n"


def test_how_one_rank_fails(machine, capsys, monkeypatch):
    machine(0)
    assert launch(recipe(), target=TARGETS + "refused_by_all") == 2
    assert capsys.readouterr().err == "megakit: refused: data.path = x is missing: give another\n"

    def job(error: BaseException):
        def fail(cfg, ranks: Ranks) -> int:
            raise error

        monkeypatch.setattr("megakit.launch.start.load_target", lambda name: fail)
        return launch(recipe()), capsys.readouterr().err

    assert job(StorageFailed("no space left")) == (74, "megakit: stopped: no space left\n")
    code, err = job(ValueError("planted"))
    assert code == 1 and err.startswith("Traceback") and err.endswith("ValueError: planted\n")
    code, err = job(KeyboardInterrupt())
    assert code == 75 and "nothing to save" in err and "Traceback" not in err


def test_a_signal_before_the_first_step_is_a_request_too(machine, capsys, monkeypatch):
    """Slurm may send it while the ranks still import torch."""
    machine(0)
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr("megakit.launch.start.load_target", lambda name: lambda cfg, ranks: os.kill(os.getpid(), signal.SIGUSR1))
    assert launch(recipe()) == 75
    assert "nothing to save" in capsys.readouterr().err and signal.getsignal(signal.SIGUSR1) is before


def test_a_rank_that_srun_ends_after_its_own_failure_keeps_its_code(tmp_path):
    """All ranks refuse alike, the first one's end makes srun end the others, and srun's code is the largest of all."""
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    place = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2", "PYTHONPATH": str(ROOT)}
    job = Job([sys.executable, "-c", START, "refused_by_all", "parallel.dp=2"], env={**env, **place})
    deadline = time.monotonic() + 60
    while not _catches(job.proc.pid, signal.SIGTERM) and time.monotonic() < deadline:
        time.sleep(0.01)
    job.proc.terminate()
    assert job.wait(30)[0] == 2


def test_ranks_of_srun_that_refuse_before_they_meet_are_refused_once():
    """A rank that is still reading its recipe when srun ends it hides no other's exit code; rank 0 has the word."""
    code = "import os, signal; from megakit.launch.refusal import of_all_ranks\nwith of_all_ranks(os.environ): "
    step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    slow = subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGTERM)"], env=step)
    assert slow.returncode == 1
    refused = subprocess.run(
        [sys.executable, "-m", "megakit.pretrain", "+recipe=demo", "parallel.tp=3"], env=step, capture_output=True, text=True
    )
    assert refused.returncode == 2 and refused.stderr.startswith("megakit: refused: ")


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


def test_local_ranks(tmp_path):
    code, out, _ = Job([sys.executable, "-c", START, "says_where", "parallel.dp=2"]).wait()
    assert (code, out) == (0, "local 2 2 None 0\n")


def test_the_world_of_the_environment_must_fit_the_recipe(machine, monkeypatch):
    machine(0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match="there are 3"):
        launch(recipe("parallel.dp=2"), target=TARGETS + "says_where")
    with pytest.raises(Refused, match=r"parallel\.tp = 2 would cross machines"):
        launch(recipe("parallel.tp=2"), target=TARGETS + "says_where")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_ranks_started_by_hand_one_after_the_other_share_one_folder(tmp_path):
    port, jobs = str(free_port()), []
    for rank in range(3):
        env = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", START, "makes_run_folder"]
        jobs.append(subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True))
        time.sleep(0.7)
    outs = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert {out.split("folder ")[1].strip() for out in outs} == {str(folder)}
    assert [p.name for p in folder.iterdir() if p.name.startswith("config")] == ["config.yaml"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["parallel"]["dp"] == 3


def torchrun(tmp_path: Path, target: str, *options: str) -> Job:
    script = tmp_path / "start.py"
    script.write_text(START)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *options]
    out = f"run.dir={tmp_path}/out" if target == "raises_in_loader" else "run.name=restarted"
    return Job([*run, str(script), target, out], env={"PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_a_failure_under_torchrun_is_in_its_summary(tmp_path):
    job = torchrun(tmp_path, "raises_in_loader")
    code, _, err = job.wait(120)
    assert code == 1 and job.all_gone(10)
    assert "megakit: rank 1 of 2 failed:\nTraceback" in err
    summary = err[err.index("Root Cause") :]
    assert "ValueError: planted in the loader of rank 1" in summary and "rank      : 1" in summary


@pytest.mark.slow
def test_a_restart_by_torchrun_uses_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.launch.conftest.ROOT", tmp_path)
    job = torchrun(tmp_path, "raises_once", "--max-restarts=1")
    code, out, err = job.wait(120)
    assert code == 0, err
    folders = [line.split()[1] for line in out.splitlines() if line.startswith("folder")]
    assert len(folders) == 4 and len(set(folders)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_ranks_save_and_end_when_torchrun_is_gone(tmp_path, number):
    job = torchrun(tmp_path, "asked_to_stop")
    job.wait_for_line("running")
    assert len(job.living()) == 3
    job.proc.send_signal(number)
    assert job.all_gone(20)
    _, _, err = job.wait()
    assert "megakit: stopped: step 7, checkpoint saved" in err


def test_ctrl_c_of_one_rank_is_quiet(tmp_path):
    job = Job([sys.executable, "-c", START, "interrupted", f"run.dir={tmp_path}"])
    code, _, err = job.wait()
    assert code == 75 and err.count("\n") == 1
    assert signal.SIGINT.name not in err
