"""python -m megakit.submit, with an sbatch that the tests hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megakit.config.compose import compose
from megakit.config.job_rules import time_limit_s
from megakit.submit.sweep import tasks
from tests.submit.bench import options, script

ROOT = Path(__file__).parents[2]
TAKES = """n=$(ls $OUT/jobs | wc -l); cat > $OUT/jobs/$n; echo "$@" >> $OUT/options; echo $((100 + n))"""


@pytest.fixture
def submit(tmp_path):
    """Runs the command with an sbatch of this body; returns code, stdout, stderr."""

    def run(*overrides: str, name: str = "llama7b", sbatch: str | None = TAKES) -> tuple[int, str, str]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "jobs").mkdir(exist_ok=True)
        if sbatch is not None:
            (tmp_path / "bin/sbatch").write_text(f"#!/bin/bash\n{sbatch}\n")
            (tmp_path / "bin/sbatch").chmod(0o755)
        # the machine's own sbatch must not be found
        env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/bin", "PYTHONPATH": str(ROOT), "OUT": str(tmp_path)}
        if sbatch is None:
            env["PATH"] = str(tmp_path / "bin")
        words = [sys.executable, "-m", "megakit.submit", f"+recipe={name}", *overrides]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return run


def test_it_submits_the_script_and_names_job_and_log(submit, tmp_path):
    code, out, err = submit("train.seed=7")
    assert (code, out) == (0, "submitted job 100, log llama7b-100.log\n")
    assert (tmp_path / "jobs/0").read_text() == script("train.seed=7", name="llama7b")
    assert err.count("\n") == 2 and " steps, 6,738 M parameters" in err and "dp 32 x pp 1 x tp 1" in err and "4 x 8 GPUs" in err
    assert (tmp_path / "options").read_text() == "--parsable\n"


def test_render_only_prints_it(submit, tmp_path):
    code, out, _ = submit("train.seed=7", "submit.render_only=true", sbatch=None)
    assert code == 0 and options(out) == options(script("train.seed=7", name="llama7b"))
    assert not list((tmp_path / "jobs").iterdir())


@pytest.mark.parametrize(
    "overrides, sbatch, code, words",
    [
        (["train.micro_batch_size=3"], TAKES, 2, ["refused", "global_batch_size"]),
        (["submit.sweep=['optim.lr=1e-4,-1']"], TAKES, 2, ["task 1-lr_-1", "optim.lr = -1"]),
        (["submit.sweep=['parallel.dp=16,32']"], TAKES, 2, ["task 0-dp_16", "16 ranks", "32"]),
        (["submit.chain=auto", "launch.slurm.requeue=false", "cluster.name=mine"], TAKES, 2, ["auto", "mine", "submit.chain=3"]),
        (["run.dry_run=true"], TAKES, 2, ["run.dry_run = true", "megakit.pretrain"]),
        (["run.shrink=true"], TAKES, 2, ["run.shrink = true", "megakit.pretrain"]),
        ([], None, 2, ["sbatch is not on the PATH", "submit.render_only=true"]),
        ([], "echo sbatch: error: invalid partition specified: big >&2; exit 1", 1, ["sbatch: invalid partition specified: big"]),
        ([], "echo hello", 1, ["no job id", "hello"]),
    ],
)
def test_what_is_refused_before_sbatch_and_what_sbatch_refuses(submit, tmp_path, overrides, sbatch, code, words):
    got, out, err = submit(*overrides, sbatch=sbatch)
    assert got == code and out == "" and all(word in err.splitlines()[-1] for word in words)
    assert not list((tmp_path / "jobs").iterdir())
    assert code == 1 or sbatch is None or err.count("\n") == 1


def test_a_jobset_goes_to_kubectl_as_it_is_printed(submit, tmp_path):
    words = ["submit.target=kubernetes", "submit.kubernetes.claim=work", "submit.container.image=i"]
    assert submit(*words, sbatch=None)[2].splitlines()[-1].startswith("megakit: refused: kubectl is not on the PATH")
    (tmp_path / "bin/kubectl").write_text(
        '#!/bin/bash\ncat > $OUT/manifest; echo "$@" > $OUT/options; echo created; exit $FAILS\n'
    )
    (tmp_path / "bin/kubectl").chmod(0o755)
    code, out, _ = submit(*words)
    assert (code, out) == (0, "created; logs: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=llama7b\n")
    assert (tmp_path / "options").read_text() == "apply -f -\n"
    printed = yaml.safe_load(submit(*words, "submit.render_only=true")[1])
    assert yaml.safe_load((tmp_path / "manifest").read_text()) == printed and printed["kind"] == "JobSet"


def test_a_chain_is_as_long_as_the_plan_needs(submit, tmp_path):
    code, out, err = submit("submit.chain=auto", "launch.slurm.requeue=false", name="llama70b")
    hours = 63.0 * 24 * 1.15 / (72 - 1 / 6)  # planned days, the margin, what the limit leaves of 72 hours
    lines = out.splitlines()
    assert code == 0 and len(lines) == -(-hours // 1) and f"{len(lines)} jobs are chained" in err
    assert lines[:2] == [
        "submitted job 100, log llama70b-100.log",
        f"submitted job 101, 2 of {len(lines)}, behind it, log llama70b-101.log",
    ]
    said = (tmp_path / "options").read_text().splitlines()
    assert said == ["--parsable"] + [f"--parsable --dependency=afterany:{100 + i}" for i in range(len(lines) - 1)]
    assert "runs/llama70b-100" in (tmp_path / "jobs/5").read_text()
    assert "use submit.chain=auto" in submit("launch.slurm.requeue=false", name="llama70b")[2]
    assert "is queued again and goes on" in submit(name="llama70b")[2]


def test_what_sbatch_says_is_told_also_where_it_takes_the_job(submit, tmp_path):
    warns = 'echo "sbatch: warning: 3 hours left" >&2; echo Welcome; echo "77;big"'
    code, out, err = submit("launch.slurm.extra=['--output=logs/%j.out']", sbatch=warns)
    assert (code, out) == (0, "submitted job 77, log logs/77.out\n") and "sbatch: warning: 3 hours left" in err
    full = "mkdir $OUT/first || { echo sbatch: error: QOSMaxSubmitJobPerUserLimit >&2; exit 1; }; echo 77"
    code, out, err = submit("submit.chain=3", "launch.slurm.requeue=false", sbatch=full)
    assert (code, out) == (1, "submitted job 77, log llama7b-77.log\n")
    assert err.endswith("QOSMaxSubmitJobPerUserLimit; of the chain's 3 jobs 1 are submitted, 77 first\n")


def test_rendering_imports_no_torch():
    code = "import sys; from megakit.submit.__main__ import main; main(['+recipe=llama7b', 'submit.render_only=true']); "
    done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("24:00:00", 86400),
        ("05:30", 330),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-00:00:01", 86401),
        ("UNLIMITED", float("inf")),
        ("60", None),
        ("a", None),
        ("1:2:3:4", None),
    ],
)
def test_times_of_slurm(text, seconds):
    assert time_limit_s(text) == seconds


def test_combinations_change_the_last_key_fastest_and_take_hydras_ranges():
    got = tasks(["train.seed=range(1,3)", "optim.name=adamw,muon"])
    assert [t.overrides for t in got] == [
        ("train.seed=1", "optim.name=adamw"),
        ("train.seed=1", "optim.name=muon"),
        ("train.seed=2", "optim.name=adamw"),
        ("train.seed=2", "optim.name=muon"),
    ]
    assert [t.label for t in got] == ["0-seed_1_name_adamw", "1-seed_1_name_muon", "2-seed_2_name_adamw", "3-seed_2_name_muon"]
    assert compose(["+recipe=llama7b", *got[3].overrides]).optim.name == "muon"
