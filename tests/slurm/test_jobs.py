"""Recipes on a real Slurm of four nodes: swept, preempted, cut by the time limit, and through the death of a node (SL2).

Every job is 2 nodes x 2 ranks, tensor parallel in the node, data parallel across. The reference is a task of the sweep, which
nothing disturbs; the others must have its losses to the last bit.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path

import pytest

from megakit.launch.local import NOTHING_TO_SAVE
from megakit.launch.slurm_env import expand_nodelist
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
STEPS = 80
RECIPE = f"""# @package _global_
defaults:
  - override /data: mock
  - _self_
model: {{family: llama, num_layers: 4, hidden_size: 128, ffn_hidden_size: 344, num_attention_heads: 8, num_query_groups: 4,
  vocab_size: 500, max_position_embeddings: 128}}
parallel: {{tp: 2, zero: 1}}
train: {{steps: {STEPS}, micro_batch_size: 2, global_batch_size: 16, seq_len: 128, precision: fp32, seed: 1}}
optim: {{lr: 1e-3, schedule: constant}}
checkpoint: {{interval_steps: 20}}
log: {{console: lines}}
cluster: {{nodes: 2, gpus_per_node: 2}}
launch: {{device: cpu, threads_per_rank: 1, timeout_s: 60,
  slurm: {{cpus_per_task: 1, extra: ["--exclusive"], signal_lead_s: 40}}}}
run: {{name: tiny}}
"""


class User:
    """Somebody with a folder and a recipe on the login node."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        (folder / "own/recipe").mkdir(parents=True)
        (folder / "own/recipe/tiny.yaml").write_text(RECIPE)

    def submit(self, *overrides: str) -> str:
        """The job's id."""
        words = ["-m", "megakit.submit", "+recipe=tiny", "--config-dir", "own", *overrides]
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        said = self.cluster.run(sys.executable, *words, cwd=self.folder, env=env)
        return re.findall(r"submitted job (\d+), log ", said)[-1]

    def steps(self, folder: str) -> int:
        """Records so far."""
        path = self.folder / folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def losses(self, folder: str) -> dict[int, float]:
        """By step; of steps that were run twice the last record."""
        lines = (self.folder / folder / "metrics.jsonl").read_text().splitlines()
        return {r["step"]: r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"}

    def resumed(self, folder: str) -> list[int]:
        """The steps at which a start went on."""
        lines = (self.folder / folder / "events.jsonl").read_text().splitlines()
        return [e["step"] for e in map(json.loads, lines) if e["kind"] == "resume"]

    def log(self, job: str) -> str:
        return (self.folder / f"tiny-{job}.log").read_text()


@pytest.fixture(scope="module")
def user(cluster, tmp_path_factory) -> User:
    return User(cluster, tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def swept(user: User) -> str:
    """A sweep over two seeds, the first of them the recipe's own: its id."""
    job = user.submit("submit.sweep=['train.seed=1,2']")
    for task in (0, 1):
        assert user.cluster.wait(f"{job}_{task}")["JobState"] == "COMPLETED", (user.folder / f"tiny-{job}_{task}.log").read_text()
    return job


@pytest.fixture(scope="module")
def reference(user: User, swept: str) -> dict[int, float]:
    return user.losses(f"runs/tiny-{swept}/0-seed_1")


def test_a_sweep_has_a_task_and_a_folder_for_each_value(user, swept, reference):
    other = user.losses(f"runs/tiny-{swept}/1-seed_2")
    assert sorted(reference) == sorted(other) == list(range(1, STEPS + 1))
    assert all(reference[step] != other[step] for step in reference)


def test_ranks_are_numbered_along_the_switches(user):
    grid = ["cluster.nodes=4", "cluster.gpus_per_node=1", "parallel.tp=1", "parallel.pp=2", "train.steps=2"]
    job = user.submit(*grid)
    assert user.cluster.wait(job)["JobState"] == "COMPLETED", user.log(job)
    rows = [line.split("  ") for line in user.log(job).splitlines() if re.match(r"node\d  ranks", line)]
    assert rows == [
        ["node1", "ranks 0", "dp 0, pp 0"],
        ["node3", "ranks 1", "dp 0, pp 1"],
        ["node2", "ranks 2", "dp 1, pp 0"],
        ["node4", "ranks 3", "dp 1, pp 1"],
    ]


def test_a_preempted_job_is_queued_again_and_ends_as_if_nothing_had_been(user, reference):
    job = user.submit("launch.slurm.extra=['--exclusive','--nodelist=node[1-2]']")
    folder = f"runs/tiny-{job}"
    user.cluster.until(lambda: user.steps(folder) > 5, 240, "the first steps")
    urgent = ["sbatch", "--parsable", "-p", "high", "--exclusive", "--nodelist=node[1-2]", "-N2", "-o/dev/null", "--wrap=sleep 2"]
    high = user.cluster.run(*urgent)
    assert user.cluster.wait(high)["JobState"] == "COMPLETED"
    ended = user.cluster.wait(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), user.log(job)
    assert user.losses(folder) == reference
    (step,) = user.resumed(folder)
    assert user.steps(folder) == STEPS and 5 < step < STEPS  # saved on the signal: no step was run twice
    assert f"at step {step} of {STEPS}, as a signal asked" in user.log(job) and "queued again" in user.log(job)


def test_a_job_that_reaches_its_time_limit_goes_on(user, swept, reference):
    times = [json.loads(line)["step_time_s"] for line in (user.folder / f"runs/tiny-{swept}/0-seed_1/metrics.jsonl").open()]
    steps = max(STEPS, int(35 / statistics.median(times)))
    # a start on a loaded machine may be told to stop before its first step
    job = user.submit("launch.slurm.time_limit=00:01:00", f"train.steps={steps}", "submit.max_attempts=20")
    ended, folder = user.cluster.wait(job, 800), f"runs/tiny-{job}"
    assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 1, user.log(job)
    got = user.losses(folder)
    assert sorted(got) == list(range(1, steps + 1)) and {s: got[s] for s in reference} == reference
    assert user.steps(folder) == steps  # none was run twice
    # Slurm may send the signal up to a minute early, also before the first step
    assert user.resumed(folder) or NOTHING_TO_SAVE in user.log(job), user.log(job)


def test_torchrun_of_each_node_passes_the_signal_on(user, reference):
    job = user.submit("submit.template=torchrun")
    folder = f"runs/tiny-{job}"
    user.cluster.until(lambda: user.steps(folder) > 5, 240, "the first steps")
    user.cluster.run("scancel", "--batch", "--signal=USR1", job)
    ended = user.cluster.wait(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), user.log(job)
    assert user.losses(folder) == reference and len(user.resumed(folder)) == 1


@pytest.mark.parametrize("warned", [False, True])
def test_a_cancelled_job_is_not_queued_again(user, warned):
    """Nor where Slurm has sent USR1 shortly before, as ahead of the time limit."""
    job = user.submit()
    user.cluster.until(lambda: user.steps(f"runs/tiny-{job}") > 5, 240, "the first steps")
    if warned:
        user.cluster.run("scancel", "--batch", "--signal=USR1", job)
    user.cluster.run("scancel", job)
    ended = user.cluster.wait(job)
    time.sleep(3)
    assert user.cluster.state(job)["JobState"] == "CANCELLED" and ended["Restarts"] == "0", user.log(job)


def test_the_nodes_of_a_failing_job_are_free_after_its_attempts(user):
    """A refusal that only the ranks can see ends the job at once; a failure is tried max_attempts times, then ends with 4."""
    for template in ("srun", "torchrun"):
        bad = user.submit("data.mock=false", "data.path=[nowhere]", f"submit.template={template}")
        ended = user.cluster.wait(bad)
        assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0"), user.log(bad)
        assert "megakit: refused: data path nowhere" in user.log(bad) and "Traceback" not in user.log(bad), user.log(bad)
    fails = user.submit("submit.setup=['export GLOO_SOCKET_IFNAME=none0']", "submit.max_attempts=2")
    ended = user.cluster.wait(fails)
    assert (ended["ExitCode"], ended["Restarts"]) == ("4:0", "1"), user.log(fails)


def test_a_job_whose_node_dies_goes_on_with_a_spare(user, reference):
    job = user.submit("launch.slurm.extra=['--exclusive','--exclude=node1']")
    folder = f"runs/tiny-{job}"
    user.cluster.until(lambda: user.steps(folder) > 25, 240, "the first checkpoint")
    before = expand_nodelist(user.cluster.state(job)["NodeList"])
    (spare,) = {"node2", "node3", "node4"} - set(before)
    user.cluster.kill_node(int(before[1].removeprefix("node")))
    ended = user.cluster.wait(job, 800)
    assert ended["JobState"] == "COMPLETED", user.log(job)
    assert set(expand_nodelist(ended["NodeList"])) == {before[0], spare}
    assert user.losses(folder) == reference and user.resumed(folder)[-1] >= 20
