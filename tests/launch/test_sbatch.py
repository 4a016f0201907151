"""The job script: what it asks of Slurm, and how it behaves with an srun and a scontrol that the tests hold (SL2, SL5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megakit.config.compose import compose
from megakit.errors import Refused
from tests.launch.conftest import ROOT
from tools.slurm.render_sbatch import main, render


def script(*overrides: str, name: str = "llama70b") -> str:
    argv = [f"+recipe={name}", *overrides]
    return render(compose(argv), argv)


def options(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


@pytest.mark.parametrize("name", ["llama7b", "llama13b", "llama70b"])
def test_every_recipe_for_a_cluster(name, tmp_path):
    cfg, text = compose([f"+recipe={name}"]), script(name=name)
    (tmp_path / "job").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "job"]).returncode == 0
    assert text.startswith("#!/bin/bash\n")
    got = options(text)
    assert int(got["nodes"]) == cfg.cluster.nodes and got["ntasks-per-node"] == got["gpus-per-node"] == "8"
    assert got["cpus-per-task"] == str(cfg.launch.slurm.cpus_per_task) and got["time"] == cfg.launch.slurm.time_limit
    assert got["job-name"] == name and got["signal"] == f"B:USR1@{cfg.launch.slurm.signal_lead_s}"
    assert got["open-mode"] == "append" and "requeue" in got and "no-requeue" not in got
    assert "srun --kill-on-bad-exit=1 --distribution=block" in text


def test_options_from_the_recipe():
    text = script("launch.slurm.partition=gpu,long", "launch.slurm.account=a-1", 'launch.slurm.extra=["--exclusive","--mem=0"]')
    got = options(text)
    assert got["partition"] == "gpu,long" and got["account"] == "a-1" and got["mem"] == "0" and "exclusive" in got
    final = script("launch.slurm.requeue=false")
    assert "no-requeue" in options(final) and "scontrol" not in final


def test_nodes_follow_the_grid():
    assert options(script("parallel.dp=1", "train.global_batch_size=64"))["nodes"] == "8"
    part = options(script("parallel.dp=2", name="llama7b"))
    assert (part["nodes"], part["ntasks-per-node"], part["gpus-per-node"]) == ("1", "2", "2")
    cpu = options(script("launch.device=cpu", "cluster.nodes=2", "cluster.gpus_per_node=2", name="demo"))
    assert (cpu["nodes"], cpu["ntasks-per-node"]) == ("2", "2") and "gpus-per-node" not in cpu


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["run.name='a;rm -rf x'"], ["run.name"]),
        (['run.name="a\nb"'], ["run.name"]),
        (["launch.slurm.time_limit=tomorrow"], ["time_limit", "tomorrow"]),
        (["launch.slurm.partition='a b'"], ["partition", "a b"]),
        (["launch.slurm.account='$(id)'"], ["account"]),
        (['launch.slurm.extra=["mem=0"]'], ["extra", "mem=0", "--name=value"]),
        (['launch.slurm.extra=["--mem=0\ntouch x"]'], ["extra"]),
        (["parallel.dp=12", "train.global_batch_size=1536"], ["12 ranks", "nodes of 8"]),
    ],
)
def test_what_cannot_stand_in_a_job_script(overrides, words):
    with pytest.raises(Refused) as refused:
        script(*overrides, name="llama7b")
    assert all(word in str(refused.value) for word in words)


def test_a_recipe_that_names_no_nodes(capsys):
    assert main(["+recipe=demo"]) == 2
    error = capsys.readouterr()
    assert error.out == "" and "cluster.gpus_per_node is null" in error.err and error.err.count("\n") == 1


class Bench:
    """Runs the script's body with stand-ins for Slurm's commands."""

    def __init__(self, folder: Path, srun: str, text: str):
        self.folder = folder
        (folder / "bin").mkdir()
        for name, body in {"srun": srun, "scontrol": f'echo "$@" >> {folder}/scontrol'}.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / "bin" / name).chmod(0o755)
        (folder / "job").write_text(text)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "42", "OUT": str(folder)}
        self.proc = subprocess.Popen(["bash", folder / "job"], env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit code, and what scontrol was told."""
        self.proc.communicate(timeout=20)
        told = self.folder / "scontrol"
        return self.proc.returncode, told.read_text() if told.exists() else ""


STOPS = """trap 'echo 1 >> $OUT/got; [ -e $OUT/slow ] || { touch $OUT/slow; sleep 0.5; }; exit 75' USR1
touch $OUT/up
for i in $(seq 300); do sleep 0.1; done"""


@pytest.mark.parametrize("sent", [[signal.SIGUSR1], [signal.SIGUSR1, signal.SIGTERM], [signal.SIGTERM]])
def test_a_signal_reaches_srun_and_75_queues_the_job_again(tmp_path, sent):
    bench = Bench(tmp_path, STOPS, script())
    bench.wait_for("up")
    for number in sent:
        bench.proc.send_signal(number)
        time.sleep(0.1)
    assert bench.end() == (75, "requeue 42\n")
    assert (tmp_path / "got").exists()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 74])
def test_other_codes_are_passed_on(tmp_path, code):
    assert Bench(tmp_path, f"exit {code}", script()).end() == (code, "")


def test_no_requeue(tmp_path):
    assert Bench(tmp_path, "exit 75", script("launch.slurm.requeue=false")).end() == (75, "")


def test_without_scontrol_it_says_what_to_do(tmp_path):
    bench = Bench(tmp_path, "exit 75", script().replace("scontrol requeue", "/nowhere/scontrol requeue"))
    _, err = bench.proc.communicate(timeout=20)
    assert bench.proc.returncode == 75 and "submit this script again" in err


def test_arguments_reach_the_ranks_as_they_were_given(tmp_path):
    odd = ["run.name=x", "data.weights=null", "data.path=[a b]", 'train.generate_prompt=it\'s "$HOME" `id`; $(id)']
    text = script(*odd, name="llama7b")
    bench = Bench(tmp_path, 'printf "%s\\n" "$@" > $OUT/args', text)
    assert bench.end()[0] == 0
    args = (tmp_path / "args").read_text().splitlines()
    assert args[-len(odd) - 4 :] == [sys.executable, "-m", "megakit.pretrain", "+recipe=llama7b", *odd]


def test_the_command(tmp_path):
    run = subprocess.run(
        [sys.executable, "tools/slurm/render_sbatch.py", "+recipe=llama7b"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout == script(name="llama7b")
