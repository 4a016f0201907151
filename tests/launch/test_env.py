"""Environment tables: SL1 (node lists), SL4 (tasks per node, binding), and what torchrun, srun and people set."""

from __future__ import annotations

import pytest

from megakit.errors import Refused
from megakit.launch.env import check_tensor_parallel, ranks_from_env
from megakit.launch.ranks import Ranks
from megakit.launch.slurm_env import expand_nodelist, in_step, tasks_per_node


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n1", ["n1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[1,2]", ["n1", "n2"]),
        ("n[001-003,007]", ["n001", "n002", "n003", "n007"]),
        ("a-b-ia810", ["a-b-ia810"]),
        ("x,y[001,003],z", ["x", "y001", "y003", "z"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("node1g[0010,0011],node2g0005", ["node1g0010", "node1g0011", "node2g0005"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("gpu-[1-2]-ib", ["gpu-1-ib", "gpu-2-ib"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", " ", "n[1-", "n]1[", "n[[1]]", "n[]", "n[a-b]", "n[3-1]", "a,,b", "n[1,]"])
def test_malformed_node_lists(text):
    with pytest.raises(Refused, match="SLURM_JOB_NODELIST = "):
        expand_nodelist(text)


@pytest.mark.parametrize("text, counts", [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2)", [1, 1]), ("8,4(x2)", [8, 4, 4])])
def test_tasks_per_node(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x)", "x3", "2(3)", "2;1"])
def test_malformed_tasks_per_node(text):
    with pytest.raises(Refused, match="SLURM_TASKS_PER_NODE = "):
        tasks_per_node(text)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}


def slurm(rank: int, local: int, node: int, per_node: str, world: int, **more: str) -> dict[str, str]:
    """As Slurm 22.05 sets them in a step of a batch job."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(world), "SLURM_STEP_TASKS_PER_NODE": per_node}
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURM_NTASKS": str(world)}
    job = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "n[01-03]", "SLURM_TASKS_PER_NODE": per_node, "ENVIRONMENT": "BATCH"}
    return {**step, **place, **job, **more}


def test_plain_python():
    assert ranks_from_env({}) is None
    assert ranks_from_env({"MASTER_ADDR": "x", "WORLD_SIZE": "1"}) is None


def test_torchrun():
    assert ranks_from_env(TORCHRUN) == Ranks(5, 8, 1, 4, "h", 29500, "torchrun", None, 1)
    named = ranks_from_env({**TORCHRUN, "TORCHELASTIC_RUN_ID": "my-job"})
    in_a_job = ranks_from_env({**TORCHRUN, "TORCHELASTIC_RUN_ID": "my-job", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
    assert named and named.job_id == "my-job"
    assert in_a_job and (in_a_job.job_id, in_a_job.restart) == ("7", 3)


def test_srun_of_each_rank():
    ranks = ranks_from_env(slurm(2, 0, 1, "2(x3)", 6, SLURM_RESTART_COUNT="1"))
    assert ranks == Ranks(2, 6, 0, 2, "n01", 20000 + 1234 * 31 % 10000, "slurm", "1234", 1)
    assert ranks.node_ranks == range(2, 4)


def test_rank_0_is_on_the_first_host_of_the_step():
    step = ranks_from_env(slurm(0, 0, 0, "1(x2)", 2, SLURM_STEP_NODELIST="n[02-03]"))
    given = ranks_from_env(slurm(0, 0, 0, "1(x2)", 2, MASTER_ADDR="ib0", MASTER_PORT="1"))
    assert step and step.master_addr == "n02"
    assert given and (given.master_addr, given.master_port) == ("ib0", 1)


def test_steps_side_by_side_meet_on_different_ports():
    ports = {ranks_from_env(slurm(0, 0, 0, "2", 2, SLURM_STEP_ID=str(i))).master_port for i in range(30)}
    assert len(ports) == 30 and all(20000 <= p < 30000 for p in ports)


def test_ranks_placed_by_a_file_of_hosts():
    """SLURM_NODEID counts along the list of nodes, ranks along SLURM_HOSTFILE."""
    placed = slurm(2, 0, 2, "2(x3)", 6, SLURM_DISTRIBUTION="arbitrary", MASTER_ADDR="n03")
    ranks = ranks_from_env(placed)
    assert (ranks.rank, ranks.local_rank, ranks.local_world, ranks.master_addr) == (2, 0, 2, "n03")
    with pytest.raises(Refused, match="SLURM_DISTRIBUTION = arbitrary and MASTER_ADDR is not set"):
        ranks_from_env({k: v for k, v in placed.items() if k != "MASTER_ADDR"})
    with pytest.raises(Refused, match="node by node"):
        ranks_from_env(slurm(1, 0, 2, "2(x3)", 6, SLURM_DISTRIBUTION="arbitrary", MASTER_ADDR="n03"))


def test_uneven_nodes():
    table = [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 0, 1)]
    found = [ranks_from_env(slurm(*place, "3,1", 4)) for place in table]
    assert [(r.rank, r.local_rank, r.local_world, r.world) for r in found] == [
        (0, 0, 3, 4),
        (1, 1, 3, 4),
        (2, 2, 3, 4),
        (3, 0, 1, 4),
    ]
    for r in found:
        check_tensor_parallel(r, 1)
        check_tensor_parallel(r, 2, allow_across_nodes=True)
        with pytest.raises(Refused, match=r"parallel\.tp = 2 would cross machines: this one has ranks [03] to [23]"):
            check_tensor_parallel(r, 2)
    check_tensor_parallel(ranks_from_env(slurm(4, 0, 2, "2(x3)", 6)), 2)
    with pytest.raises(Refused, match=r"parallel\.tp = 4 would cross"):
        check_tensor_parallel(ranks_from_env(slurm(4, 0, 2, "2(x3)", 6)), 4)


def test_shells_of_slurm_are_no_ranks():
    batch = slurm(0, 0, 0, "2(x2)", 4)
    for name in [n for n in batch if "STEP" in n]:
        del batch[name]
    salloc = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "n1"}
    interactive_step = slurm(0, 0, 0, "1", 1, SLURM_STEP_ID="4294967290")
    pty = slurm(0, 0, 0, "1", 1, SLURM_PTY_PORT="3333")
    for env in (batch, salloc, interactive_step, pty):
        assert not in_step(env) and ranks_from_env(env) is None
    del batch["ENVIRONMENT"]
    assert in_step(batch)


def test_torchrun_within_slurm():
    batch = {k: v for k, v in slurm(0, 0, 0, "1(x2)", 2).items() if "STEP" not in k}
    assert ranks_from_env({**TORCHRUN, **batch}).launcher == "torchrun"
    one_per_node = {**TORCHRUN, **slurm(1, 0, 1, "1(x2)", 2)}
    assert ranks_from_env(one_per_node).rank == 5
    assert ranks_from_env({**TORCHRUN, **slurm(1, 0, 1, "1(x3)", 3)}).restart == 1  # a node is gone since the first start


@pytest.mark.parametrize(
    "env, values",
    [
        # four tasks, each with a torchrun of its own and all the ranks
        ({**TORCHRUN, **slurm(0, 0, 0, "4", 4), "TORCHELASTIC_RESTART_COUNT": "0"}, ["WORLD_SIZE = 8", "SLURM_NTASKS = 4"]),
        ({**slurm(0, 0, 0, "4", 4), "WORLD_SIZE": "8"}, ["WORLD_SIZE = 8", "SLURM_NTASKS = 4"]),
        (
            {**slurm(1, 1, 0, "4", 4), "WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            ["RANK = 0", "SLURM_PROCID = 1"],
        ),
        (slurm(1, 0, 1, "2(x2)", 4), ["SLURM_PROCID = 1", "task 0 of node 1, whose first is 2", "--distribution=block"]),
        (slurm(0, 0, 0, "2(x2)", 3), ["adds up to 4", "SLURM_NTASKS = 3"]),
        (slurm(4, 0, 2, "2(x2)", 4), ["SLURM_NODEID = 2", "2 nodes"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE = 2", "RANK is not"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK = 0", "MASTER_ADDR and MASTER_PORT"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["rank 2", "world of 2"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK = '-1'"]),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ["RANK = 'x'"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4", "4 ranks"]),
        ({**slurm(0, 0, 0, "2", 2), "SLURM_JOB_NODELIST": "n[1-"}, ["n[1-"]),
        ({**slurm(2, 0, 1, "2(x2)", 4), "MASTER_ADDR": "localhost"}, ["MASTER_ADDR = localhost", "2 of 4 ranks"]),
    ],
)
def test_contradictions_name_both_values(env, values):
    with pytest.raises(Refused) as refused:
        ranks_from_env(env)
    assert all(value in str(refused.value) for value in values) and "\n" not in str(refused.value)


def test_by_hand():
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert ranks_from_env(env) == Ranks(3, 4, 3, 4, "h", 1, "manual")
    assert ranks_from_env({**env, "LOCAL_WORLD_SIZE": "2"}) == Ranks(3, 4, 1, 2, "h", 1, "manual")
    assert ranks_from_env({"RANK": "0", "WORLD_SIZE": "1"}) == Ranks(launcher="manual")
