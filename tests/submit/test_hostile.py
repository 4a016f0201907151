"""SL5: whatever stands in names, paths, overrides and values, the job script and the pods give it to the ranks as it is, and run
nothing of it."""

from __future__ import annotations

import os
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest

from megakit.config.compose import compose
from megakit.submit.kubernetes import jobset
from megakit.submit.script import render
from tests.submit.bench import Bench
from tests.submit.test_kubernetes import NEEDS

WORDS = [
    *("x y", " lead", "trail ", "a'b", 'q"q', "a\\b", "\\", "'", '"', "é ☃", "", "=", "a=b"),
    *(
        "$(touch ran)",
        "`touch ran`",
        "$((1))",
        "$HOME",
        "a;touch ran",
        "a|touch ran",
        "a&touch ran",
        "'; touch ran; '",
        "<(touch ran)",
    ),
    *(
        "-rf",
        "--mode=777",
        "--",
        "-",
        "%j",
        "%x-%A_%a",
        "%",
        "*",
        "~",
        "~root",
        "{a,b}",
        "[ab]",
        "!!",
        "#x",
        "null",
        "yes",
        "0x10",
    ),
    *("{{ 1 }}", "{% raw %}", "$$(NAME)", "$(NAME)", "#SBATCH --x", "!include x", "&a *a", "- x: y"),
]
LINES = ["a\nb", "\n#SBATCH --nodes=99", "a\n$(touch ran)\n", "\r", "\t"]
CPU = ["+recipe=demo", "launch.device=cpu", "cluster.nodes=1", "cluster.gpus_per_node=1"]
SRUN = 'printf "%s\\0" "$@" > "$OUT/args"; env -0 > "$OUT/env"'


def read(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1]


@pytest.mark.parametrize("template", ["srun", "torchrun"])
@pytest.mark.parametrize("folder", ["-m777 $(touch ran)", "a'b\n\"c", "--", "plain"])
def test_a_job_script(tmp_path, template, folder):
    cfg = compose(CPU)
    cfg.submit.template, cfg.run.dir, cfg.checkpoint.dir = template, folder, f"{folder}/`touch ran`"
    cfg.cluster.env = {f"V{i}": word for i, word in enumerate([*WORDS, "\t", "\r"])}
    words = [f"data.tokenizer={word}" for word in (*WORDS, *LINES)]
    text = render(cfg, words)
    head = takewhile(lambda line: not line or line.startswith("#"), text.split("\n"))  # behind it sbatch reads no options
    assert [line for line in head if line.startswith("#SBATCH --nodes")] == ["#SBATCH --nodes=1"]
    bench = Bench(tmp_path, text, SRUN)
    assert bench.end() == (0, ""), bench.err
    args, env = read(tmp_path / "args"), dict(entry.split("=", 1) for entry in read(tmp_path / "env"))
    assert args[args.index("megakit.pretrain") + 1 :] == [*words, f"run.dir={folder}"]
    assert {name: env[name] for name in cfg.cluster.env} == cfg.cluster.env
    if template == "torchrun":  # each start of each job meets at its own place
        (endpoint,) = (arg for arg in args if arg.startswith("--rdzv-endpoint="))
        assert endpoint.endswith(":21302") and "--rdzv-id=42-0" in args  # 20000 + 42 x 31
    assert (tmp_path / folder / "attempts").exists() and not list(tmp_path.rglob("ran"))


def test_pods(tmp_path):
    cfg = compose([*CPU, *NEEDS])
    cfg.run.dir = "a'b\n$(touch ran)"
    cfg.submit.python = str(tmp_path / "a python")
    cfg.cluster.env = {f"V{i}": word for i, word in enumerate(WORDS)}
    words = [f"data.tokenizer={word}" for word in (*WORDS, *LINES)]
    (container,) = jobset(cfg, words)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    Path(cfg.submit.python).write_text(f"#!/bin/bash\n{SRUN}\n")
    Path(cfg.submit.python).chmod(0o755)
    env = {**os.environ, "OUT": str(tmp_path), "JOB_COMPLETION_INDEX": "0"}
    env |= {entry["name"]: entry["value"].replace("$$(", "$(") for entry in container["env"]}  # as Kubernetes does
    command = [word.replace("$$(", "$(") for word in container["command"]]
    subprocess.run(command, env=env, cwd=tmp_path, check=True)
    args, found = read(tmp_path / "args"), dict(entry.split("=", 1) for entry in read(tmp_path / "env"))
    assert args[args.index("megakit.pretrain") + 1 :] == [*words, f"run.dir={cfg.run.dir}"]
    assert {name: found[name] for name in cfg.cluster.env} == cfg.cluster.env
    assert not list(tmp_path.rglob("ran"))
