"""python -m megakit.queue as users type it, and a real run that is preempted and goes on in its place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megakit.config.compose import compose
from megakit.errors import Refused
from megakit.queue.__main__ import main
from megakit.queue.submission import make_job
from tests.queue.conftest import ROOT, Server

TINY = [
    *("+recipe=demo", "data=mock", "launch.device=cpu", "launch.threads_per_rank=1", "train.steps=40", "train.seq_len=32"),
    *(
        "train.global_batch_size=2",
        "train.eval_interval=0",
        "train.generate_tokens=0",
        "model.num_layers=2",
        "model.vocab_size=128",
    ),
    *("model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=4", "model.num_query_groups=4"),
    *("checkpoint.interval_steps=100", "log.console=off", "model.hidden_dropout=0.1"),
]
PROBE = """
import sys
from megakit.queue.__main__ import main
code = main(sys.argv[1:])
heavy = {"torch", "numpy", "sentencepiece", "safetensors"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def curve(run: Path) -> list[tuple[int, str, str]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], repr(r["loss"]), repr(r["grad_norm"])) for r in lines if r["kind"] == "train"]


def test_a_run_is_preempted_and_resumed_with_the_losses_of_an_uninterrupted_one(server: Server):
    server.start("--slots", "1")
    made = server.command("submit", "--user", "ann", "--name", "low", *TINY, "run.dir=low")
    assert made.stdout == f"job 1: 1 GPU, run folder {server.work}/low\n", made.stderr
    server.wait(1, "running", step=3, timeout_s=90)
    high = server.submit({"steps": 5000, "step_s": 0.1}, priority=1)
    server.wait(high, "running", timeout_s=60)
    stopped = server.show(1)
    assert stopped["state"] == "queued" and 3 <= stopped["checkpoint"] < 40
    listed = server.command("list").stdout
    assert re.search(rf"1 +low +ann +queued +0 +1 +{stopped['checkpoint']}/40", listed), listed
    server.ask(do="cancel", id=high)
    assert server.wait(1, "done", timeout_s=90)["attempt"] == 2
    whole = subprocess.run([sys.executable, "-m", "megakit.pretrain", *TINY, "run.dir=whole"], cwd=server.work, timeout=90)
    assert whole.returncode == 0
    assert curve(server.work / "low") == curve(server.work / "whole") and len(curve(server.work / "low")) == 40
    assert "resume" in (server.work / "low" / "events.jsonl").read_text()
    page = server.command("list", "1").stdout
    assert "preempted" in page and f"from the checkpoint of step {stopped['checkpoint']}" in page


def test_what_was_checked_is_what_runs(server: Server):
    """The configuration is kept as it was composed: a recipe that is edited while a job waits changes nothing."""
    server.start()
    recipe = server.work / "mine" / "recipe" / "own.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ndefaults:\n  - demo\ntrain:\n  steps: 7\n")
    server.ask(do="quota", quotas={"*": 1})
    server.submit({"steps": 5000, "step_s": 0.05})
    assert server.command("submit", "--config-dir", "mine", "+recipe=own", "data=mock", "train.generate_tokens=0").returncode == 0
    recipe.write_text("broken: [")
    assert (server.show(2)["steps"], server.show(2)["state"]) == (7, "queued")
    server.ask(do="cancel", id=1)
    server.wait(2, "running")
    order = server.attempt(2, "order.json")
    assert order["command"] == [
        *(sys.executable, "-m", "megakit.pretrain", "--config-file", str(server.path(2, "config.yaml"))),
        f"run.dir={server.work}/runs/demo",
    ]
    cfg = compose(order["command"][5:], config_file=order["command"][4])
    assert cfg == compose(["+recipe=demo", "data=mock", "train.generate_tokens=0", "train.steps=7", *order["command"][5:]])
    server.ask(do="cancel", id=2, now=True)


OPEN = ["+recipe=demo", "data=mock", "train.generate_tokens=0"]  # parallel.dp is open, a batch has 8 samples


@pytest.mark.parametrize(
    ("overrides", "gpus", "ranks"),
    [
        (OPEN, None, 1),
        (OPEN, 4, 4),
        (OPEN, 3, "--gpus = 3, but the recipe starts 2 ranks on them"),
        ([*OPEN, "parallel.tp=2"], None, 2),
        ([*OPEN, "parallel.tp=2", "parallel.dp=2"], None, 4),
        ([*OPEN, "parallel.tp=2", "parallel.dp=2"], 2, "--gpus = 2, but the recipe's grid has 4 ranks"),
        (["+recipe=llama7b"], None, 32),
        (["+recipe=llama7b"], 64, "--gpus = 64, but the recipe starts 32 ranks"),
        (["+recipe=llama7b", "run.shrink=true"], None, 2),
    ],
)
def test_gpus_are_those_of_the_grid(overrides: list[str], gpus: int | None, ranks: int | str):
    """In a queue with GPUs, wherever it is submitted from."""
    if isinstance(ranks, int):
        assert make_job(overrides, None, None, gpus, with_gpus=True)["gpus"] == ranks
        return
    with pytest.raises(Refused, match=ranks):
        make_job(overrides, None, None, gpus, with_gpus=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["submit", "+recipe=demo", "train.stepz=3"], "train.stepz is not a recipe key: did you mean train.steps?"),
        (["submit", *TINY, "model.num_attention_heads=3"], "model.num_attention_heads"),
        (["submit", "+recipe=demo", "run.dry_run=true"], "run.dry_run = true trains nothing"),
        (["submit", *TINY, "parallel.dp=2", "--gpus", "1"], "--gpus = 1, but the recipe's grid has 2 ranks"),
        (["submit", *TINY, "parallel.dp=2", "--gpus=3"], "--gpus = 3, but the recipe starts 2 ranks"),
        (["submit", *TINY, "parallel.tp=4"], "needs 4 GPUs, the largest machine has 2"),
        (["submit", "+recipe=llama7b"], "this recipe needs 32 GPUs"),
        (["submit", *TINY, "--priority", "x"], "argument --priority: invalid int value: 'x': see python -m megakit.queue submit"),
        (["submit", *TINY, "--gpus", "0"], "argument --gpus: 0 is no whole number above 0"),
        (["submit", *TINY, "--env", "NOT_SET_HERE"], "--env NOT_SET_HERE: it is not set here"),
        (["submit", *TINY, "--name", "a/b"], "can't name a folder and a job"),
        (["submit"], "the following arguments are required: KEY=VALUE"),
        (["list", "--prio"], "unrecognized arguments: --prio"),
        (["list", "9"], "there is no job 9"),
        (["logs", "9"], "there is no job 9"),
        (["quota", "ann"], "ann: a quota is written USER=GPUS"),
        (["quota", "a b=3"], "'a b' is not a user's name"),
        (["forget", "moon"], "there is no machine moon: there are here"),
        (["dance"], "dance is not a command: there are submit, list"),
    ],
)
def test_refused(one_server: Server, words: list[str], says: str, capfd, monkeypatch):
    monkeypatch.setenv("MEGAKIT_QUEUE", str(one_server.folder))
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("megakit: refused: ") and says in err
    assert one_server.ask(do="list") == []


def test_quotas_machines_and_lists(server: Server):
    server.start()
    assert server.command("quota", "ann=1", "*=2").returncode == 0
    for _ in range(2):
        server.submit({"steps": 5000, "step_s": 0.05}, user="ann", name="x")
    server.wait(1, "running", step=1)
    assert [line.split() for line in server.command("quota").stdout.splitlines() if "ann" in line] == [["ann", "1", "1"]]
    assert re.search(r"here +2 CPU slots +1 +1", server.command("machines").stdout)
    listed = json.loads(server.command("list", "--json").stdout)
    assert [(j["id"], j["state"]) for j in listed] == [(1, "running"), (2, "queued")]
    assert listed[1]["why"] == "waits for its quota: ann holds 1 of 1 GPU, it needs 1"
    assert server.command("logs", "2").stderr.startswith("megakit: refused: job 2 has written nothing yet: waits for its quota")
    done = server.command("cancel", "1", "2")
    assert done.stdout == "job 1: asked to save and stop; killed after 20 s\njob 2: cancelled\n"


def test_without_a_server(tmp_path: Path, capfd):
    for words in (["list"], ["submit", "+recipe=demo"], ["logs", "1"], ["cancel", "1"]):
        assert main([*words, "--folder", str(tmp_path)]) == 2
        assert f"no queue server answers at {tmp_path}/socket" in capfd.readouterr().err


def test_a_machine_without_gpus_needs_slots(tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setattr("megakit.queue.agent.gpu_names", lambda env: [])
    assert main(["serve", "--folder", str(tmp_path / "q")]) == 2
    assert "this machine shows no GPU: give --slots N" in capfd.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["submit", "--help"], ["list", "--folder", "/nowhere"]])
def test_needs_no_torch(words: list[str]):
    done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == (2 if words[:1] == ["list"] else 0), done.stderr


@pytest.fixture(scope="module")
def one_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (folder / "work").mkdir()
    made = Server(folder / "q", folder / "work")
    made.start()
    yield made
    made.close()
