"""The one writer: one record per step whatever happens, and no sink that stops or holds up the training (LG1, LG5)."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from pathlib import Path

import pytest

from megakit.config.compose import compose
from megakit.observe import background, writer
from megakit.observe.console import Bar, Lines, duration
from megakit.observe.jsonl import JsonLines, rewind
from megakit.observe.record import EvalRecord, StepRecord, record_line
from megakit.observe.writer import MetricsWriter


def step(n: int, loss: float = 5.0, **kw) -> StepRecord:
    values = {"grad_norm": 1.5, "lr": 1e-3, "consumed_samples": 8 * n, "consumed_tokens": 64 * n, "step_time_s": 0.1}
    values |= {"tokens_per_s": 640.0, "tokens_per_s_per_gpu": 320.0, "mfu": 0.5, "loss_scale": None, "skipped": False}
    values |= {"peak_memory_gib": 1.0, "data_wait_s": 0.0}
    return StepRecord(n, loss, **(values | kw))


def evaluation(n: int) -> EvalRecord:
    return EvalRecord(n, 4.0, math.exp(4.0), 8 * n, 64 * n, 0.2, 16)


def open_writer(folder: Path, *overrides: str, start: int = 0, total: int = 10) -> MetricsWriter:
    cfg = compose(["+recipe=demo", "log.console=lines", "log.interval=5", *overrides])
    return MetricsWriter(cfg, folder, total_steps=total, start_step=start)


def records(folder: Path, name: str = "metrics") -> list[dict]:
    def no_constants(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=no_constants) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def run(folder: Path, *overrides: str, steps: int = 10) -> float:
    """Seconds that the loop itself took."""
    w = open_writer(folder, *overrides)
    started = time.monotonic()
    for n in range(1, steps + 1):
        w.train(step(n))
    took = time.monotonic() - started
    w.evaluation(evaluation(steps))
    w.close(True)
    return took


def test_fields_are_those_of_the_design(tmp_path):
    run(tmp_path)
    train, evaluated = records(tmp_path)[0], records(tmp_path)[-1]
    fields = """kind step loss grad_norm lr consumed_samples consumed_tokens step_time_s tokens_per_s tokens_per_s_per_gpu
        mfu loss_scale skipped peak_memory_gib data_wait_s"""
    assert set(train) == set(fields.split())
    assert train["kind"] == "train" and train["step"] == 1 and train["loss_scale"] is None
    assert evaluated["kind"] == "eval" and {"step", "loss", "perplexity", "eval_time_s", "samples"} < set(evaluated)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_still_json(tmp_path, bad):
    w = open_writer(tmp_path)
    w.train(step(1, loss=bad, skipped=True))
    w.train(step(2, mfu=None))
    w.event("alert", loss=bad)
    w.close(True)
    first, second = records(tmp_path)
    assert (first["loss"], first["nonfinite"], first["grad_norm"], first["skipped"]) == (None, True, 1.5, True)
    assert second["mfu"] is None and "nonfinite" not in second
    (event,) = records(tmp_path, "events")
    assert (event["kind"], event["loss"], event["nonfinite"]) == ("alert", None, True) and event["time"] > 1.7e9


def test_a_resumed_run_has_one_record_per_step(tmp_path):
    w = open_writer(tmp_path)
    for n in range(1, 8):
        w.train(step(n, loss=1.0))
        if n % 2 == 0:
            w.evaluation(evaluation(n))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # killed in the middle of a line; the writer is never closed
    w = open_writer(tmp_path, start=4)
    w.event("resume", step=4)
    for n in range(5, 11):
        w.train(step(n, loss=2.0))
    w.close(True)
    kept = records(tmp_path)
    assert [(r["step"], r["loss"]) for r in kept if r["kind"] == "train"] == [(n, 1.0 + (n > 4)) for n in range(1, 11)]
    assert [r["step"] for r in kept if r["kind"] == "eval"] == [2, 4]
    rewound = (tmp_path / "metrics.rewound.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in rewound[:-1]] == [5, 6, 6, 7] and rewound[-1] == '{"kind": "train", "st'


def test_rewind_of_nothing(tmp_path):
    path = tmp_path / "x.jsonl"
    rewind(path, 3)
    path.write_text("")
    rewind(path, 3)
    path.write_text(record_line(step(1)) + record_line(step(2)))
    rewind(path, 0)
    assert path.read_text() == ""
    path.write_text('{"kind": "a"}\n{"torn')
    rewind(path, None)
    assert path.read_text() == '{"kind": "a"}\n'


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = JsonLines(tmp_path / "x")
    file.write("first\n")
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[:3]))
    with pytest.raises(OSError, match="no space left"):
        file.write("second\n")
    monkeypatch.undo()
    file.write("third\n")
    assert (tmp_path / "x").read_text() == "first\nthird\n"


def test_a_full_disk_costs_one_warning(tmp_path, monkeypatch, capsys):
    w = open_writer(tmp_path)
    monkeypatch.setattr(JsonLines, "write", lambda self, line: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for n in range(1, 5):
        w.train(step(n))
    w.close(True)
    assert capsys.readouterr().out.count("metrics.jsonl can't be written") == 1


def test_lines_come_at_the_interval_the_first_and_the_last(tmp_path, capsys):
    w = open_writer(tmp_path, start=3, total=12)
    for n in range(4, 13):
        w.train(step(n, skipped=n == 7))
        if n == 10:
            w.evaluation(evaluation(n))
            w.message("a message [with brackets]")
    w.close(True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "step 4/12",
        "step 5/12",
        "step 7/12",
        "step 10/12",
        "step 10/12",
        "a message [with brackets]",
        "step 12/12",
    ]
    assert lines[3].startswith("step 10/12 | loss 5.0000 | grad norm 1.500 | lr 1.00e-03 | 640 tokens/s | mfu 50.0% | 0:0")
    assert "skipped" in lines[2] and "eval loss 4.0000" in lines[4] and "left" not in lines[-1]


def test_one_warning_where_mfu_is_unknown(tmp_path, capsys):
    w = open_writer(tmp_path)
    for n in range(1, 11):
        w.train(step(n, mfu=None))
    w.close(True)
    assert capsys.readouterr().out.count("mfu is not reported") == 1
    assert all(r["mfu"] is None for r in records(tmp_path))


def test_the_time_left_is_a_running_average(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    w = open_writer(tmp_path, "log.console=off", total=1000)
    left = {}
    for n in range(1, 501):
        now[0] += 10.0 if n <= 300 else 2.0  # the slow start is forgotten
        w.train(step(n))
        left[n] = w._time_left(n)
    assert left[1] is None and left[2] == pytest.approx(9980.0) and left[500] == pytest.approx(1000.0)
    w.close(True)


def test_durations():
    assert [duration(s) for s in (0, 59.6, 75, 3675, 200_000)] == ["0:00", "1:00", "1:15", "1:01:15", "2d 7:33:20"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    bar = Bar(10, 4, out)
    bar.message("above [the] bar")
    bar.train(step(5), 75.0)
    bar.evaluation(evaluation(5))
    bar.train(step(6, tokens_per_s=12_345.0), 60.0)
    bar.close(True)
    text = out.getvalue()
    assert "above [the] bar\n" in text and "step 6/10" in text
    assert "loss 5.0000 | eval 4.0000 | 12.3k tokens/s | mfu 50.0% | 1:00 left" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_console_lines_to_a_closed_pipe_do_not_stop_the_run(tmp_path, monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Closed())
    run(tmp_path)
    assert len(records(tmp_path)) == 11
    assert capsys.readouterr().err.count("WARNING: console failed") == 1


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "log.tensorboard=true")
    w = open_writer(tmp_path, "log.tensorboard=true", start=6)
    for n in range(7, 11):
        w.train(step(n, loss=2.0))
    w.close(True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(n, 5.0 if n < 7 else 2.0) for n in range(1, 11)]
    assert "train/loss_scale" not in events.Tags()["scalars"]


FAKE = """
import json, os, time
calls = []
class Settings:
    def __init__(self, **kw): self.kw = kw
class Run:
    internal = -1
    def define_metric(self, name, step_metric=None): calls.append(("define", name, step_metric))
    def log(self, data, step=None):
        if step is not None:
            assert step > self.internal, "dropped: the step does not increase"
            self.internal = step
        if os.environ.get("FAKE_WANDB") == "log raises" and data["step"] >= 5: raise RuntimeError("HTTP 500")
        if os.environ.get("FAKE_WANDB") == "log hangs" and data["step"] >= 5: time.sleep(300)
        calls.append(("log", data))
    def finish(self, exit_code=0): calls.append(("finish", exit_code))
def init(**kw):
    calls.append(("init", kw))
    mode = os.environ.get("FAKE_WANDB")
    key = os.environ.get("WANDB_API_KEY", "")
    offline_only = mode == "no network" and kw["mode"] == "online"
    if mode == "init raises" or offline_only: raise ConnectionError("no route for key " + key)
    if mode == "init hangs": time.sleep(300)
    return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A stand-in for the package; its `calls` are what it was asked."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    import wandb

    yield wandb
    del sys.modules["wandb"]


def test_wandb_keeps_its_run_and_an_axis_of_its_own(tmp_path, wandb):
    for start, end in ((0, 11), (8, 14)):
        w = open_writer(tmp_path, "log.wandb=offline", start=start, total=14)
        for n in range(start + 1, end + 1):
            w.train(step(n))
            if n % 4 == 0:
                w.evaluation(evaluation(n))
        w.close(True)
    inits = [c[1] for c in wandb.calls if c[0] == "init"]
    assert len(inits) == 2 and inits[0]["id"] == inits[1]["id"] == (tmp_path / "wandb" / "run_id").read_text()
    assert inits[0]["mode"] == "offline" and inits[0]["dir"] == str(tmp_path)
    logged = [c[1] for c in wandb.calls if c[0] == "log"]
    assert [d["step"] for d in logged if "train/loss" in d] == [*range(1, 12), *range(9, 15)]
    assert [d["step"] for d in logged if "eval/loss" in d] == [4, 8, 12]
    assert all(d["tokens"] == 64 * d["step"] for d in logged)
    axes = {c[1]: c[2] for c in wandb.calls if c[0] == "define"}
    assert axes == {"step": None, "train/*": "step", "eval/*": "step"}
    assert [c[1] for c in wandb.calls if c[0] == "finish"] == [0, 0]


@pytest.mark.parametrize(
    "fault, warning",
    [
        ("init raises", "wandb is left out, the run goes on: ConnectionError"),
        ("init hangs", "wandb was not ready after 1 s and is left out"),
        ("log raises", "wandb failed and misses records, the run goes on: RuntimeError: HTTP 500"),
        ("log hangs", "wandb did not finish in time"),
    ],
)
def test_a_tracker_in_trouble_costs_one_warning_and_no_time(tmp_path, wandb, monkeypatch, capsys, fault, warning):
    monkeypatch.setenv("FAKE_WANDB", fault)
    monkeypatch.setattr(background, "START_S", 1.0)
    monkeypatch.setattr(background, "CLOSE_S", 2.0)
    started = time.monotonic()
    took = run(tmp_path, "log.wandb=offline", steps=200)
    assert took < 1.0 and time.monotonic() - started < 5.0
    assert len(records(tmp_path)) == 201
    text = capsys.readouterr().out
    assert text.count(warning) == 1 and 1 <= text.count("WARNING") <= 2
    assert records(tmp_path, "events")[0]["kind"] == "warning"
    if fault == "log raises":
        assert "wandb missed 197 records" in text


def test_online_without_a_key_or_network_goes_on_offline(tmp_path, wandb, monkeypatch, capsys):
    run(tmp_path, "log.wandb=online")
    assert [c[1]["mode"] for c in wandb.calls if c[0] == "init"] == ["offline"]
    assert capsys.readouterr().out.count("wandb has no API key and writes offline") == 1
    wandb.calls.clear()
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    monkeypatch.setenv("FAKE_WANDB", "no network")
    run(tmp_path, "log.wandb=online")
    assert [c[1]["mode"] for c in wandb.calls if c[0] == "init"] == ["online", "offline"]
    assert len([c for c in wandb.calls if c[0] == "log"]) == 11
    out = capsys.readouterr().out
    assert out.count("wandb could not start online and writes offline: ConnectionError: no route for key ***") == 1
    assert "s3cr3t" not in out + (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("sink, package", [("log.wandb=offline", "wandb"), ("log.tensorboard=true", "torch.utils.tensorboard")])
def test_an_absent_package_costs_one_warning(tmp_path, monkeypatch, capsys, sink, package):
    monkeypatch.setitem(sys.modules, package, None)
    run(tmp_path, sink)
    assert capsys.readouterr().out.count("needs the package") == 1 and len(records(tmp_path)) == 11


def test_the_real_wandb_offline(tmp_path, monkeypatch):
    """Complete when the writer is closed: wandb's own finish comes back while its service still writes."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    run(tmp_path, "log.wandb=offline")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/tokens_per_s" in file.read_bytes()
    assert not any(b"s3cr3t" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_a_failed_run_does_not_wait_long_for_its_sinks(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("FAKE_WANDB", "log hangs")
    monkeypatch.setattr(background, "ABORT_S", 0.3)
    w = open_writer(tmp_path, "log.wandb=offline")
    for n in range(1, 10):
        w.train(step(n))
    started = time.monotonic()
    w.close(False)
    assert time.monotonic() - started < 2.0


def test_a_line_sink_flushes():
    out = io.StringIO()
    Lines(10, 5, out).message("text")
    assert out.getvalue() == "text\n"


def test_events_tell_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cr3t" * 3)
    w = open_writer(tmp_path)
    w.event("alert", text=f"https://me:word@host/x?sig=abcdef: no access for {'s3cr3t' * 3}", step=3)
    w.close(True)
    assert json.loads((tmp_path / "events.jsonl").read_text())["text"] == "https://me:***@host/x?sig=*** no access for ***"
