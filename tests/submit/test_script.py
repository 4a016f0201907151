"""The job script: what it asks of Slurm, and how it behaves with an srun and a scontrol that the tests hold (SL2, SL5)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megakit.config.compose import compose
from megakit.errors import Refused
from tests.submit.bench import Bench, options, script


@pytest.mark.parametrize("name", ["llama7b", "llama13b", "llama70b"])
def test_every_recipe_for_a_cluster(name, tmp_path):
    cfg, text = compose([f"+recipe={name}"]), script(name=name)
    assert text.startswith("#!/bin/bash\n")
    got = options(text)
    assert int(got["nodes"]) == cfg.cluster.nodes and got["ntasks-per-node"] == got["gpus-per-node"] == "8"
    assert got["cpus-per-task"] == str(cfg.launch.slurm.cpus_per_task) and got["time"] == cfg.launch.slurm.time_limit
    assert got["job-name"] == name and got["signal"] == f"B:USR1@{cfg.launch.slurm.signal_lead_s}"
    assert got["open-mode"] == "append" and "requeue" in got and "no-requeue" not in got
    assert (
        "srun --export=ALL --kill-on-bad-exit=1 --distribution=$placed" in text
        and "array" not in got
        and "--container" not in text
    )


def test_options_from_the_recipe():
    slurm = {"partition": "gpu,long", "account": "a-1", "qos": "high", "constraint": "h100&ib"}
    text = script(*(f"launch.slurm.{k}={v}" for k, v in slurm.items()), 'launch.slurm.extra=["--exclusive","--mem=0"]')
    got = options(text)
    assert {k: got[k] for k in slurm} == slurm and got["mem"] == "0" and "exclusive" in got
    final = script("launch.slurm.requeue=false")
    assert "no-requeue" in options(final) and "scontrol requeue" not in final


def test_nodes_follow_the_grid():
    assert options(script("parallel.dp=1", "train.global_batch_size=64"))["nodes"] == "8"
    part = options(script("parallel.dp=2", name="llama7b"))
    assert (part["nodes"], part["ntasks-per-node"], part["gpus-per-node"]) == ("1", "2", "2")
    cpu = options(script("launch.device=cpu", "cluster.nodes=2", "cluster.gpus_per_node=2", name="demo"))
    assert (cpu["nodes"], cpu["ntasks-per-node"]) == ("2", "2") and "gpus-per-node" not in cpu


def test_torchrun_has_one_task_per_node_with_the_cores_of_its_ranks():
    text = script("submit.template=torchrun")
    got = options(text)
    assert (got["nodes"], got["ntasks-per-node"], got["gpus-per-node"], got["cpus-per-task"]) == ("64", "1", "8", "96")
    for words in (
        "--ntasks=64 --ntasks-per-node=1",
        "--nnodes=64 --nproc-per-node=8",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=600",
        "--max-restarts=3",
    ):
        assert words in text


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["run.name='a;rm -rf x'"], ["run.name"]),
        (['run.name="a\nb"'], ["run.name"]),
        (["launch.slurm.time_limit=tomorrow"], ["time_limit", "tomorrow"]),
        (["launch.slurm.time_limit=0:05:00", "launch.slurm.signal_lead_s=300"], ["signal_lead_s = 300", "0:05:00"]),
        (["launch.slurm.signal_lead_s=65536"], ["signal_lead_s = 65536", "65535"]),  # Slurm's bound
        (["launch.slurm.partition='a b'"], ["partition", "a b"]),
        (["launch.slurm.account='$(id)'"], ["account"]),
        (["launch.slurm.constraint='a;b'"], ["constraint", "a;b"]),
        (['launch.slurm.extra=["mem=0"]'], ["extra", "mem=0", "--name=value"]),
        (['launch.slurm.extra=["--mem=0\ntouch x"]'], ["extra"]),
        (['launch.slurm.extra=["--nodes=7"]'], ["--nodes=7", "cluster.nodes"]),
        (["parallel.dp=12", "train.global_batch_size=1536"], ["12 ranks", "nodes of 8"]),
        (["cluster.env={1A: x}"], ["cluster.env", "1A"]),
        (['cluster.env={A: "x\ny"}'], ["cluster.env", "A"]),
        (["cluster.env={WANDB_API_KEY: abc}"], ["WANDB_API_KEY", "secret", "submit.setup"]),
        (["submit.container.mounts=[/a:/b]"], ["submit.container.mounts", "submit.container.image"]),
        (["submit.container.image=i", "submit.container.mounts=['/a b']"], ["/a b", "/SOURCE:/TARGET"]),
        (["submit.setup=['a\nb']"], ["submit.setup"]),
        (["submit.sweep=['optim.lr=1e-4']"], ["optim.lr=1e-4", "one value"]),
        (["submit.sweep=['run.name=a,b']"], ["run.name", "share"]),
        (["submit.sweep=['optim.lr=1e-4,2e-4']", "checkpoint.dir=c"], ["checkpoint.dir = c", "submit.sweep"]),
        (["submit.sweep_parallel=2"], ["submit.sweep_parallel = 2", "submit.sweep"]),
        (["submit.chain=2"], ["submit.chain = 2", "launch.slurm.requeue = true"]),
    ],
)
def test_what_cannot_stand_in_a_job_script(overrides, words):
    with pytest.raises(Refused) as refused:
        script(*overrides, name="llama7b")
    assert all(word in str(refused.value) for word in words) and "abc" not in str(refused.value)


STOPS = """trap 'echo 1 >> $OUT/got; [ -e $OUT/slow ] || { touch $OUT/slow; sleep 0.5; }; exit 75' USR1
touch $OUT/up
for i in $(seq 300); do sleep 0.1; done"""


@pytest.mark.parametrize("template", ["srun", "torchrun"])
@pytest.mark.parametrize("sent", [[signal.SIGUSR1], [signal.SIGUSR1, signal.SIGTERM]])
def test_a_signal_reaches_srun_and_75_queues_the_job_again(tmp_path, sent, template):
    bench = Bench(tmp_path, script(f"submit.template={template}"), STOPS)
    bench.wait_for("up")
    for number in sent:
        bench.proc.send_signal(number)
        time.sleep(0.1)
    assert bench.end() == (75, "requeue 42\n")
    assert (tmp_path / "got").exists()


def test_what_scancel_sends_lets_the_ranks_save_and_does_not_queue_the_job_again(tmp_path):
    bench = Bench(tmp_path, script(), STOPS)
    bench.wait_for("up")
    bench.proc.send_signal(signal.SIGTERM)
    assert bench.end() == (75, "") and (tmp_path / "got").exists() and "cancelled" in bench.out


@pytest.mark.parametrize(
    ("announced", "at_term", "again"),
    [
        (
            "JobState=RUNNING Reason=None EndTime=500 Deadline=N/A",
            "JobState=COMPLETING Reason=None EndTime=300 Deadline=N/A",
            False,
        ),  # scancel
        (
            "JobState=RUNNING Reason=None EndTime=500 Deadline=N/A",
            "JobState=COMPLETING Reason=TimeLimit EndTime=524 Deadline=N/A",
            True,
        ),
        (
            "JobState=RUNNING Reason=None EndTime=500 Deadline=N/A",
            "JobState=COMPLETING Reason=None EndTime=900 Deadline=N/A",
            True,
        ),  # preempted, and queued
        (
            "JobState=RUNNING Reason=None EndTime=Unknown Deadline=N/A",
            "JobState=COMPLETING Reason=None EndTime=300 Deadline=N/A",
            True,
        ),
        ("JobState=RUNNING Reason=None EndTime=500 Deadline=N/A", "", True),  # slurmctld does not answer
    ],
)
def test_scancel_after_the_warning_is_known_by_an_end_that_comes_early(tmp_path, announced, at_term, again):
    bench = Bench(tmp_path, script(), STOPS)
    bench.wait_for("up")
    bench.show(f"JobId=42 {announced}\n")
    bench.proc.send_signal(signal.SIGUSR1)
    bench.wait_for("got")
    time.sleep(0.2)
    bench.show(f"JobId=42 {at_term}\n" if at_term else "")
    bench.proc.send_signal(signal.SIGTERM)
    assert bench.end() == (75, "requeue 42\n" if again else "")
    assert ("cancelled" in bench.out) != again


def test_scancel_right_after_the_warning_is_known_by_the_end_that_was_planned_at_the_start(tmp_path):
    """The script asks when the job ends after it has: what it hears then is no announcement."""
    (tmp_path / "shown").write_text("JobId=42 JobState=RUNNING Reason=None EndTime=500 Deadline=N/A\n")
    bench = Bench(tmp_path, script(), STOPS)
    bench.wait_for("up")
    bench.show("JobId=42 JobState=COMPLETING Reason=None EndTime=300 Deadline=N/A\n")
    bench.proc.send_signal(signal.SIGUSR1)
    bench.proc.send_signal(signal.SIGTERM)
    assert bench.end() == (75, "") and "cancelled" in bench.out


def test_a_signal_that_finds_no_python_yet_is_no_failure(tmp_path):
    bench = Bench(tmp_path, script(), "touch $OUT/up; kill -STOP $$; exit 138")
    bench.wait_for("up")
    bench.proc.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    pid = subprocess.run(["pgrep", "-P", str(bench.proc.pid)], capture_output=True, text=True).stdout.split()[0]
    os.kill(int(pid), signal.SIGCONT)
    assert bench.end() == (75, "requeue 42\n")


def test_a_signal_before_the_ranks_start_is_passed_on_when_they_do(tmp_path):
    text = script().replace("placed=block", "placed=block; touch $OUT/early; sleep 1")
    bench = Bench(tmp_path, text, STOPS)
    bench.wait_for("early")
    bench.proc.send_signal(signal.SIGUSR1)
    assert bench.end() == (75, "requeue 42\n")


@pytest.mark.parametrize("code", [0, 2, 3, 4])
def test_ends_that_a_new_start_would_not_change_are_passed_on(tmp_path, code):
    assert Bench(tmp_path, script(), f"exit {code}").end() == (code, "")


SAVES = """folder=$OUT/runs/llama70b-42/checkpoints
[ ! -e $OUT/step ] || { mkdir -p $folder; cp $OUT/step $folder/latest; }
exit $(cat $OUT/code)"""


def test_other_failures_are_queued_again_until_the_same_checkpoint_has_failed_too_often(tmp_path):
    def start(code: int, step: str | None = None) -> tuple[int, bool]:
        (tmp_path / "code").write_text(str(code))
        if step:
            (tmp_path / "step").write_text(step)
        bench = Bench(tmp_path, script(), SAVES)
        code, told = bench.end()
        self_explaining = "queued again" in bench.out or "submit.max_attempts" in bench.err
        assert self_explaining or code == 0
        return code, told == "requeue 42\n"

    assert start(1) == (1, True)
    assert start(74) == (74, True)
    assert start(1, "step_5") == (1, True)  # it saved and then failed: the first failure there
    assert start(137) == (137, True)
    assert start(75) == (75, True)  # asked to stop: no failure
    assert start(1) == (1, True)
    assert start(1) == (1, True)
    assert start(1) == (4, False)
    assert start(0) == (0, False)  # by hand, after it was mended


def test_a_failure_that_repeats_at_one_place_is_tried_three_times(tmp_path):
    (tmp_path / "code").write_text("1")
    (tmp_path / "step").write_text("step_5")
    assert [Bench(tmp_path, script(), SAVES).end() for _ in range(3)] == [(1, "requeue 42\n")] * 2 + [(4, "")]


def test_a_time_limit_that_leaves_no_time_for_a_checkpoint_is_a_failure_and_a_preemption_is_none(tmp_path):
    short = ["launch.slurm.time_limit=0:02:00", "launch.slurm.signal_lead_s=90"]
    assert [Bench(tmp_path, script(*short), "exit 75").end() for _ in range(3)] == [(75, "requeue 42\n")] * 2 + [(4, "")]
    assert [Bench(tmp_path, script("run.name=x"), "exit 75").end() for _ in range(4)] == [(75, "requeue 42\n")] * 4


def test_starts_that_ended_without_a_word_count_too(tmp_path):
    """A node that is lost takes the script with it, and Slurm queues the job again by itself."""
    for _ in range(3):
        bench = Bench(tmp_path, script(), "touch $OUT/up; sleep 20")
        bench.wait_for("up")
        (tmp_path / "up").unlink()
        bench.lose()
    assert Bench(tmp_path, script(), "exit 0").end() == (4, "")


def test_a_node_without_the_folder_of_submission_is_refused(tmp_path):
    gone, there = {"SLURM_SUBMIT_DIR": "/nowhere"}, {"SLURM_SUBMIT_DIR": str(tmp_path)}
    assert Bench(tmp_path, script(), "exit 0", gone).end() == (2, "") and not (tmp_path / "runs").exists()
    assert Bench(tmp_path, script("launch.slurm.extra=['--chdir=/x']"), "exit 0", gone).end() == (0, "")
    assert Bench(tmp_path, script(), "exit 0", there).end() == (0, "")


def test_no_requeue(tmp_path):
    assert Bench(tmp_path, script("launch.slurm.requeue=false"), "exit 75").end() == (75, "")


def test_without_scontrol_it_says_what_to_do(tmp_path):
    bench = Bench(tmp_path, script().replace("scontrol requeue", "/nowhere/scontrol requeue"), "exit 75")
    assert bench.end()[0] == 75 and "run.dir=runs/llama70b-42" in bench.err


def test_a_run_folder_in_which_starts_cannot_be_counted_ends_the_job(tmp_path):
    """As on a full disk, where it would be queued again for ever."""
    (tmp_path / "runs/llama70b-42/attempts.tmp").mkdir(parents=True)
    assert Bench(tmp_path, script(), "touch $OUT/ran; exit 1").end() == (74, "")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("template", ["srun", "torchrun"])
def test_what_the_script_has_set_reaches_the_ranks_after_sbatch_export_none(tmp_path, template):
    bench = Bench(
        tmp_path, script(f"submit.template={template}"), 'echo "$1" >> $OUT/first', {"SLURM_TOPOLOGY_ADDR": "top.s1.n1"}
    )
    bench.end()
    assert set((tmp_path / "first").read_text().split()) == {"--export=ALL"}


def test_a_chained_job_goes_on_in_the_first_ones_folder_and_ends_at_once_when_the_run_is_over(tmp_path):
    final = "launch.slurm.requeue=false"
    note = 'printf "%s\\n" "${@: -1}" >> $OUT/folders; exit '
    assert Bench(tmp_path, script(final), note + "75").end() == (75, "")
    for job, code in (("43", 1), ("44", 0), ("45", 1)):
        bench = Bench(tmp_path, script(final, first_job="42"), f"{note}{code}", {"SLURM_JOB_ID": job})
        bench.end()
    assert bench.proc.returncode == 0 and "nothing is left" in bench.out
    assert (tmp_path / "folders").read_text().splitlines() == ["run.dir=runs/llama70b-42"] * 3


def test_arguments_reach_the_ranks_as_they_were_given(tmp_path):
    odd = ["run.name=x", "data.weights=null", "data.path=[a b]", 'train.generate_prompt=it\'s "$HOME" `id`; $(id)']
    text = script(*odd, "submit.max_attempts=2", "run.dir=a b/$(id)", name="llama7b")
    assert Bench(tmp_path, text, 'printf "%s\\n" "$@" > $OUT/args').end()[0] == 0
    args = (tmp_path / "args").read_text().splitlines()
    tail = ["run.dir=a b/$(id)", "run.dir=a b/$(id)"]
    assert args[-len(odd) - 6 :] == [sys.executable, "-m", "megakit.pretrain", "+recipe=llama7b", *odd, *tail]
    assert (tmp_path / "a b/$(id)").is_dir()


VALUES = {"NCCL_DEBUG": "INFO", "A": "x y", "B": "a,b", "C": 'q"q', "D": "it's $HOME `id` \\"}
ENV = "cluster.env={NCCL_DEBUG: INFO, A: x y, B: 'a,b', C: 'q\"q', D: 'it\\'s $HOME `id` \\\\'}"
PRINTS = "env -0 > $OUT/env; printf '%s\\n' \"$@\" > $OUT/args"


def environment(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "env").read_text().split("\0") if line)


def test_values_of_the_environment_are_exact_and_the_jobs_own_win(tmp_path):
    text = script(ENV)
    assert "--container" not in text and "apptainer" not in text
    assert Bench(tmp_path, text, PRINTS, {"NCCL_DEBUG": "WARN"}).end()[0] == 0
    got = environment(tmp_path)
    assert {name: got[name] for name in VALUES} == {**VALUES, "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize("template", ["srun", "torchrun"])
def test_pyxis_is_told_of_every_variable(tmp_path, template):
    image = "nvcr.io#nvidia/pytorch:25.09-py3"
    text = script(
        ENV,
        f"submit.container.image={image}",
        "submit.container.mounts=['/data:/data:ro','/my data:/d']",
        f"submit.template={template}",
    )
    assert Bench(tmp_path, text, PRINTS).end()[0] == 0
    args, got = (tmp_path / "args").read_text().splitlines(), environment(tmp_path)
    flags = dict(word.split("=", 1) for word in args if word.startswith("--container"))
    assert flags["--container-image"] == image and flags["--container-workdir"] == str(tmp_path)
    assert flags["--container-mounts"] == f"{tmp_path}:{tmp_path},/data:/data:ro,/my data:/d"
    lines = [line.strip() for line in text.splitlines()]
    exported = {word for line in lines if line.startswith("export ") for word in re.sub(r"=\S+( -n.*)?", "", line).split()[1:]}
    assert set(flags["--container-env"].split(",")) == {name.partition("=")[0] for name in exported} >= set(VALUES)
    assert {name: got[name] for name in VALUES} == VALUES
    assert args[args.index("-m") - 1] == "python"  # the image's


@pytest.mark.parametrize("template", ["srun", "torchrun"])
def test_apptainer_gets_every_variable_and_signals_reach_it(tmp_path, template):
    text = script(
        ENV,
        "submit.container.image=/images/py torch.sif",
        "submit.container.runtime=apptainer",
        "submit.container.mounts=[/data:/data]",
        f"submit.template={template}",
    )
    assert Bench(tmp_path, text, PRINTS).end()[0] == 0
    got, args = environment(tmp_path), (tmp_path / "args").read_text().splitlines()
    assert {name: got[f"APPTAINERENV_{name}"] for name in VALUES} == VALUES
    assert ("APPTAINERENV_TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in got) == (template == "torchrun")
    words = args[args.index("apptainer") :]
    assert words[:4] == ["apptainer", "exec", "--nv", "--no-eval"] and "--container-image" not in text
    assert f"{tmp_path}:{tmp_path},/data:/data" in words and words[words.index("-m") - 2 :][:2] == [
        "/images/py torch.sif",
        "python",
    ]


def test_modules_and_setup_lines_run_before_the_ranks(tmp_path):
    text = script("submit.modules=[cuda/12.4,'a b']", "submit.setup=['export FROM_SETUP=\"$MODULES\"']")
    module = 'module() { MODULES="$MODULES $*"; }; export -f module'
    (tmp_path / "rc").write_text(module)
    assert Bench(tmp_path, text, PRINTS, {"BASH_ENV": str(tmp_path / "rc")}).end()[0] == 0
    assert environment(tmp_path)["FROM_SETUP"] == " load cuda/12.4 load a b"


TOPOLOGY = """if [ "$2" = --ntasks=64 ]; then for i in $(seq 1 64); do echo top.s$((i % 2)).n$i n$i; done; else env -0 > $OUT/env
printf '%s\\n' "$@" > $OUT/args; fi"""


def test_ranks_follow_the_switches_where_slurm_knows_them(tmp_path):
    assert Bench(tmp_path, script(), TOPOLOGY, {"SLURM_TOPOLOGY_ADDR": "top.s1.n1"}).end()[0] == 0
    hosts = (tmp_path / "runs/llama70b-42/hosts").read_text().split()
    assert len(hosts) == 512 and hosts[:9] == ["n2"] * 8 + ["n4"] and hosts[256] == "n1"
    got = environment(tmp_path)
    assert (got["SLURM_HOSTFILE"], got["MASTER_ADDR"]) == ("runs/llama70b-42/hosts", "n2")
    assert "--distribution=arbitrary" in (tmp_path / "args").read_text()
    for env in ({"SLURM_TOPOLOGY_ADDR": "n1"}, {"SLURM_TOPOLOGY_ADDR": "top.s1.n1", "MASTER_ADDR": "ib0"}):
        assert Bench(tmp_path, script(), TOPOLOGY, env).end()[0] == 0
        assert "--distribution=block" in (tmp_path / "args").read_text() and "SLURM_HOSTFILE" not in environment(tmp_path)


def test_each_task_of_a_sweep_has_its_overrides_and_its_folder(tmp_path):
    text = script("submit.sweep=['optim.lr=1e-4,3e-4','train.seed=1,2']", "submit.sweep_parallel=2", name="llama7b")
    assert options(text)["array"] == "0-3%2" and options(text)["output"] == "%x-%A_%a.log"
    for task, lr, seed in ((0, "1e-4", 1), (1, "1e-4", 2), (3, "3e-4", 2)):
        env = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": str(task)}
        assert Bench(tmp_path, text, PRINTS, env).end()[0] == 0
        args = (tmp_path / "args").read_text().splitlines()
        folder = f"run.dir=runs/llama7b-40/{task}-lr_{lr}_seed_{seed}"
        assert [w.replace("0.0001", "1e-4").replace("0.0003", "3e-4") for w in args[-3:]] == [
            f"optim.lr={lr}",
            f"train.seed={seed}",
            folder,
        ]
    bench = Bench(tmp_path, text, PRINTS, {"SLURM_ARRAY_TASK_ID": "4"})
    assert bench.end()[0] == 2 and "array of 4 tasks" in bench.err


def test_the_command_line_stands_in_the_script():
    text = script("train.seed=3", name="llama7b")
    assert shlex.split(text.splitlines()[1])[-2:] == ["+recipe=llama7b", "train.seed=3"]
    assert os.linesep == "\n" and text.endswith('exit "$code"\n')
