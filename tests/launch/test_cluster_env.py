"""What the ranks' environment is set to, who wins, and the map of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megakit.config.compose import compose
from megakit.launch import cluster_env, rank_map
from megakit.launch.env import ranks_from_env
from megakit.parallel.grid import Grid
from tests.config.tiny import TINY
from tests.launch.test_env import slurm

ROOT = Path(__file__).parents[2]


def chosen(*overrides: str, name: str = "llama70b", env: dict[str, str] | None = None, gpus: bool = True) -> tuple[dict, dict]:
    """What is set, and what is said of it."""
    env = dict(env or {})
    said = cluster_env.apply(compose([f"+recipe={name}", *overrides]), env, gpus)
    assert {c.variable: c.value for c in said} == env
    return env, {c.variable: c.why for c in said}


def test_by_the_recipe():
    seventy, _ = chosen()
    assert seventy == {
        "GOMP_SPINCOUNT": "10000",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_IB_TIMEOUT": "22",
    }
    seven, _ = chosen(name="llama7b")  # no tp, 4 nodes
    assert set(seven) == {"GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF"}
    blackwell, _ = chosen("cluster=b200", "cluster.nodes=64")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in blackwell
    sharded, _ = chosen("parallel.zero=3", "parallel.pp=1", "parallel.zero_group=8")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in sharded
    assert set(chosen(gpus=False)[0]) == {"GOMP_SPINCOUNT"}


def test_every_choice_has_a_reason_with_its_source():
    assert len({s.variable for s in cluster_env.SETTINGS}) == len(cluster_env.SETTINGS)
    assert all("(" in s.why and any(w in s.why for w in ("docs", "#")) for s in cluster_env.SETTINGS)


def test_what_is_set_already_wins_then_the_recipe():
    mine = {"NCCL_IB_TIMEOUT": "20", "NCCL_DEBUG": "WARN", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "A": "mine"}
    env = {**mine}
    cfg = compose(["+recipe=llama70b", "cluster.env={CUDA_DEVICE_MAX_CONNECTIONS: '8', A: theirs, B: theirs}"])
    why = {c.variable: c.why for c in cluster_env.apply(cfg, env, True)}
    assert {k: env[k] for k in mine} == mine and env["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and env["B"] == "theirs"
    assert "PYTORCH_ALLOC_CONF" not in env
    assert why["NCCL_IB_TIMEOUT"].startswith("yours; megakit's is 22") and why["A"] == "yours; the recipe has theirs"
    assert why["B"] == why["CUDA_DEVICE_MAX_CONNECTIONS"] == "the recipe's cluster.env"
    assert why["NCCL_DEBUG"] == why["PYTORCH_CUDA_ALLOC_CONF"] == "yours"


def test_other_variables_are_not_told():
    env = {"WANDB_API_KEY": "secret", "HOME": "/root", "NCCL_SOCKET_IFNAME": "ib0"}
    said = cluster_env.lines(cluster_env.apply(compose(["+recipe=llama7b"]), env, False))
    assert said == ["environment NCCL_SOCKET_IFNAME=ib0 (yours)"]


def test_what_is_as_on_every_machine_is_told_only_where_somebody_chose_it():
    def told(*overrides: str, **env: str) -> list[str]:
        return cluster_env.lines(cluster_env.apply(compose(["+recipe=llama7b", *overrides]), env, False))

    assert told() == [] and told(GOMP_SPINCOUNT="10000") == []
    assert told(GOMP_SPINCOUNT="7")[0].startswith("environment GOMP_SPINCOUNT=7 (yours; megakit's is 10000: ")
    assert told("cluster.env={GOMP_SPINCOUNT: '9'}") == ["environment GOMP_SPINCOUNT=9 (the recipe's cluster.env)"]


def test_the_banner_and_the_ranks_have_it(tmp_path):
    words = ["launch.device=cpu", "log.console=lines", "run.dir=out", "train.steps=1", "cluster.env={MEGAKIT_TEST: 'a b'}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NCCL_DEBUG": "WARN"}
    code = (
        "import os, sys; from megakit import pretrain; from megakit.train import job; before = job.run\n"
        "def run(cfg, ranks): print('in the rank', os.environ['MEGAKIT_TEST']); return before(cfg, ranks)\n"
        "job.run = run; sys.exit(pretrain.main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *TINY, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "environment MEGAKIT_TEST=a b (the recipe's cluster.env)" in lines and "environment NCCL_DEBUG=WARN (yours)" in lines
    assert "in the rank a b" in lines and json.loads((tmp_path / "out/plan.json").read_text())


def test_the_map_of_slurms_nodes():
    ranks = ranks_from_env(slurm(0, 0, 0, "2(x3)", 6))
    rows = rank_map.lines(rank_map.nodes_of(ranks, slurm(0, 0, 0, "2(x3)", 6)), Grid(dp=1, pp=3, tp=2))
    assert rows == ["n01  ranks 0-1  pp 0, tp 0-1", "n02  ranks 2-3  pp 1, tp 0-1", "n03  ranks 4-5  pp 2, tp 0-1"]


@pytest.mark.parametrize("nodelist", [None, "", "n[1-", "n[01-02]"])
def test_ranks_that_know_their_place_need_no_names_of_nodes(nodelist):
    env = slurm(2, 0, 1, "2(x3)", 6, MASTER_ADDR="ib0", SLURM_JOB_NODELIST=nodelist or "")
    if nodelist is None:
        del env["SLURM_JOB_NODELIST"]
    assert rank_map.nodes_of(ranks_from_env(env), env) == []


def test_coordinates_are_those_of_the_grid():
    grid = Grid(dp=2, pp=2, cp=1, tp=4)
    nodes = [("a", range(0, 6)), ("b", range(6, 16))]
    assert rank_map.lines(nodes, grid) == ["a  ranks 0-5   dp 0, pp 0-1, tp 0-3", "b  ranks 6-15  dp 0-1, pp 0-1, tp 0-3"]


def test_many_nodes_are_cut_short():
    nodes = [(f"n{i}", range(8 * i, 8 * i + 8)) for i in range(64)]
    rows = rank_map.lines(nodes, Grid(dp=8, pp=8, tp=8))
    assert len(rows) == rank_map.MOST_ROWS and rows[0] == "n0   ranks 0-7      dp 0, pp 0, tp 0-7"
    assert "57 more nodes" in rows[-2] and rows[-1].split() == ["n63", "ranks", "504-511", "dp", "7,", "pp", "7,", "tp", "0-7"]
    assert len(rows) - 2 + 57 + 1 == 64


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_without_names_nodes_are_numbered(launcher):
    from megakit.launch.ranks import Ranks

    nodes = rank_map.nodes_of(Ranks(0, 6, 0, 4, "a", 1, launcher), {})
    assert nodes == [("node 0", range(0, 4)), ("node 1", range(4, 6))]
    assert rank_map.lines(rank_map.nodes_of(Ranks(), {}), Grid()) == []
