"""What a scrape gets: the values of the records; and what Prometheus is told of a run that ends, well or not."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from megakit.config.compose import compose
from megakit.observe import scrape as scrape_module
from megakit.observe.prometheus import ACTIVITIES, EVENTS, SERIES, Prometheus
from megakit.observe.writer import MetricsWriter
from tests.observe.test_writer import evaluation, open_writer, records, step


@pytest.fixture
def keys(tmp_path) -> list[str]:
    return ["log.prometheus=true", "log.prometheus_port=0", f"log.prometheus_targets={tmp_path}/targets", "log.console=lines"]


def exporter(keys: list[str], folder: Path, **known: Any) -> Prometheus:
    values = {"total_steps": 10, "start_step": 0, "job_id": None, **known}
    return Prometheus(compose(["+recipe=demo", "parallel.dp=1", *keys]), folder, warn=pytest.fail, **values)


def target(folder: Path) -> dict[str, Any]:
    """The one in the folder of targets."""
    (path,) = (folder / "targets").iterdir()
    assert path.suffix == ".json"
    (entry,) = json.loads(path.read_text())
    assert len(entry["targets"]) == 1
    return entry


def get(entry: dict[str, Any], path: str | None = None) -> str:
    with urllib.request.urlopen(
        f"http://{entry['targets'][0]}{path or entry['labels']['__metrics_path__']}", timeout=10
    ) as reply:
        return reply.read().decode()


def scrape(entry: dict[str, Any]) -> dict[tuple[str, str], float]:
    """(metric, value of its label beside `run`) -> value."""
    values = {}
    for family in text_string_to_metric_families(get(entry)):
        for sample in family.samples:
            assert sample.labels.pop("run") == "demo"
            if sample.name != "megakit_run_info":
                values[sample.name, "".join(sample.labels.values())] = sample.value
    return values


def test_a_scrape_has_the_values_of_the_records(tmp_path, keys):
    sink = exporter(keys, tmp_path, start_step=3)
    start = scrape(target(tmp_path))
    assert start["megakit_step", ""] == start["megakit_start_step", ""] == 3
    assert (start["megakit_planned_steps", ""], start["megakit_ranks", ""]) == (10, 1)
    assert start["megakit_parameters", ""] == 10_030_464
    assert start["megakit_checkpoint_interval_steps", ""] == 75 and ("megakit_checkpoint_interval_seconds", "") not in start
    assert all(start["megakit_events_total", kind] == 0 for kind in EVENTS)  # an increase needs a first value
    assert all(start["megakit_time_seconds_total", activity] == 0 for activity in ACTIVITIES)
    assert start["megakit_skipped_steps_total", ""] == 0 and ("megakit_loss", "") not in start

    record = step(4, loss_scale=1024.0, data_wait_s=0.25, peak_memory_gib=1.5)
    sink.record(record)
    sink.record(step(5, loss=3.0, grad_norm=math.inf, skipped=True, loss_scale=512.0, data_wait_s=0.5, peak_memory_gib=2.0))
    sink.record(evaluation(5))
    sink.event("checkpoint", {"step": 5, "path": "/x", "save_time_s": 7.0})
    sink.event("alert", {"text": "x"})
    got = scrape(target(tmp_path))
    expected = {
        "megakit_step": 5,
        "megakit_loss": 3.0,
        "megakit_grad_norm": math.inf,
        "megakit_learning_rate": record.lr,
        "megakit_loss_scale": 512.0,
        "megakit_consumed_samples": 40,
        "megakit_consumed_tokens": 320,
        "megakit_step_time_seconds": 0.1,
        "megakit_data_wait_seconds": 0.5,
        "megakit_tokens_per_second": 640.0,
        "megakit_tokens_per_second_per_gpu": 320.0,
        "megakit_mfu_ratio": 0.5,
        "megakit_peak_memory_bytes": 2.0 * 2**30,
        "megakit_steps_total": 2,
        "megakit_skipped_steps_total": 1,
        "megakit_eval_loss": 4.0,
        "megakit_eval_step": 5,
        "megakit_eval_time_seconds": 0.2,
        "megakit_checkpoint_step": 5,
        "megakit_checkpoint_save_seconds": 7.0,
    }
    assert {name: got[name, ""] for name in expected} == pytest.approx(expected)
    times = {activity: got["megakit_time_seconds_total", activity] for activity in ACTIVITIES}
    assert times == pytest.approx({"step": 0.2, "data_wait": 0.75, "evaluation": 0.2, "checkpoint": 7.0})
    assert [got["megakit_events_total", kind] for kind in ("checkpoint", "alert", "resume")] == [1, 1, 0]
    since = start["megakit_start_timestamp_seconds", ""]
    assert since <= got["megakit_last_step_timestamp_seconds", ""] <= got["megakit_checkpoint_timestamp_seconds", ""]
    assert {name for name, _ in got} | {"megakit_checkpoint_interval_seconds"} == set(SERIES)
    sink.close(True)


def test_what_is_not_known_is_absent_and_nan_is_nan(tmp_path, keys):
    sink = exporter([*keys, "checkpoint.interval_minutes=2"], tmp_path)
    sink.record(step(1, loss=math.nan, grad_norm=math.nan, mfu=None))
    got = scrape(target(tmp_path))
    assert math.isnan(got["megakit_loss", ""]) and math.isnan(got["megakit_grad_norm", ""])
    assert not {"megakit_mfu_ratio", "megakit_loss_scale", "megakit_checkpoint_step"} & {name for name, _ in got}
    assert got["megakit_checkpoint_interval_seconds", ""] == 120
    assert got["megakit_data_wait_seconds", ""] == got["megakit_start_step", ""] == 0  # and that is known
    sink.close(True)


def test_names_are_those_that_prometheus_recommends(tmp_path, keys):
    units = ("seconds", "bytes", "ratio", "total", "step", "steps", "loss", "norm", "rate", "scale", "samples", "tokens")
    units += ("second", "gpu", "ranks", "parameters")
    for series in SERIES.values():
        assert series.name.startswith("megakit_") and series.name.split("_")[-1] in units
        assert series.counter == series.name.endswith("_total")
        assert series.help.endswith(".")


def test_the_run_says_what_it_is(tmp_path, keys):
    sink = exporter([*keys, "run.name=other", "train.precision=bf16"], tmp_path, job_id="4711")
    entry = target(tmp_path)
    (info,) = (f.samples[0] for f in text_string_to_metric_families(get(entry)) if f.name == "megakit_run_info")
    assert (
        info.value == 1
        and {"run": "other", "model": "llama", "precision": "bf16", "job_id": "4711"}.items() <= info.labels.items()
    )
    assert [info.labels[axis] for axis in ("dp", "pp", "cp", "tp", "zero")] == ["1", "1", "1", "1", "1"]
    assert info.labels["run_dir"] == entry["labels"]["run_dir"] == str(tmp_path) and entry["labels"]["run"] == "other"
    sink.close(True)


def test_nothing_is_global(tmp_path, keys):
    before = list(REGISTRY._collector_to_names)
    first = exporter([*keys, "run.name=first"], tmp_path / "first")
    second = exporter([*keys, "run.name=second"], tmp_path / "second")
    first.record(step(1, loss=1.0))
    second.record(step(1, loss=2.0))
    entries = [json.loads(path.read_text())[0] for path in sorted((tmp_path / "targets").iterdir())]
    assert ['megakit_loss{run="first"} 1.0' in get(entries[0]), 'megakit_loss{run="second"} 2.0' in get(entries[1])] == [True] * 2
    assert list(REGISTRY._collector_to_names) == before
    first.close(True)
    second.close(True)


def test_a_path_of_another_run_is_not_found(tmp_path, keys):
    """A target file that a dead run left must not show the metrics of whoever has its port now."""
    sink = exporter(keys, tmp_path)
    entry = target(tmp_path)
    assert get(entry, "/metrics") == get(entry)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(entry, "/other-0123abcd/metrics")
    sink.close(True)


def test_a_client_that_says_nothing_holds_up_the_next_for_a_moment_only(tmp_path, keys, monkeypatch):
    monkeypatch.setattr(scrape_module, "CLIENT_S", 0.2)
    sink = exporter(keys, tmp_path)
    entry, threads = target(tmp_path), threading.active_count()
    host, port = entry["targets"][0].split(":")
    with closing(socket.create_connection((host, int(port)))), closing(socket.create_connection((host, int(port)))):
        assert "megakit_step" in get(entry) and threading.active_count() == threads
    sink.close(True)


def test_a_client_that_goes_on_saying_a_little_is_let_go(tmp_path, keys, monkeypatch):
    monkeypatch.setattr(scrape_module, "CLIENT_S", 0.2)
    sink = exporter(keys, tmp_path)
    host, port = target(tmp_path)["targets"][0].split(":")
    with closing(socket.create_connection((host, int(port)))) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        client.settimeout(0.05)  # pause between two bytes
        for _ in range(100):
            try:
                client.sendall(b"x")
                gone = client.recv(1) == b""
            except TimeoutError:
                gone = False
            except ConnectionError:
                gone = True
            if gone:
                break
        else:
            pytest.fail("it is still listened to")
    sink.close(True)


@pytest.mark.parametrize("ok, stop, left", [(True, False, 0), (False, True, 0), (False, False, 1)])
def test_the_target_stays_only_where_the_run_failed(tmp_path, keys, ok, stop, left):
    w = open_writer(tmp_path, *keys)
    w.train(step(1))
    if stop:
        w.event("stop", step=1)
    w.close(ok)
    assert len(list((tmp_path / "targets").iterdir())) == left
    if left:
        with pytest.raises(urllib.error.URLError):
            get(target(tmp_path))


def test_a_new_start_replaces_the_target_and_keeps_it(tmp_path, keys):
    old = exporter(keys, tmp_path)
    before = target(tmp_path)
    new = exporter(keys, tmp_path, start_step=5)
    assert target(tmp_path)["targets"] != before["targets"]
    old.close(True)  # late
    assert scrape(target(tmp_path))["megakit_step", ""] == 5
    new.close(True)
    assert not list((tmp_path / "targets").iterdir())


def test_events_of_a_run_are_counted(tmp_path, keys, monkeypatch):
    w = open_writer(tmp_path, *keys)
    w.event("resume", step=7, path="x")
    w.train(step(8))
    deadline = time.monotonic() + 60
    while not (tmp_path / "targets").exists() or ("megakit_loss", "") not in scrape(target(tmp_path)):
        assert time.monotonic() < deadline, "the sink's thread never came so far"
        time.sleep(0.05)
    got = scrape(target(tmp_path))
    assert (got["megakit_events_total", "resume"], got["megakit_checkpoint_step", ""], got["megakit_step", ""]) == (1, 7, 8)
    w.close(True)
    assert [event["kind"] for event in records(tmp_path, "events")] == ["resume"]


def test_a_port_that_is_taken_costs_one_warning(tmp_path, keys, capsys):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        w = open_writer(tmp_path, *keys, f"log.prometheus_port={port}")
        for n in range(1, 11):
            w.train(step(n))
        w.close(True)
    out = capsys.readouterr().out
    assert out.count("WARNING") == 1 and len(records(tmp_path)) == 10
    assert (
        f"prometheus is left out, the run goes on: RuntimeError: log.prometheus_address = 127.0.0.1, log.prometheus_port = {port}"
        in out
    )
    assert "Address already in use" in out and "log.prometheus_port=0" in out
    assert not (tmp_path / "targets").exists()


def test_targets_that_can_not_be_written_cost_one_warning(tmp_path, keys, capsys):
    (tmp_path / "targets").write_text("a file")
    w = open_writer(tmp_path, *keys)
    w.train(step(1))
    w.close(True)
    out = capsys.readouterr().out
    assert out.count("WARNING: log.prometheus_targets: Prometheus is not told of this run: FileExistsError") == 1
    assert len(records(tmp_path)) == 1


def test_an_absent_package_costs_one_warning(tmp_path, keys, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for name in ("prometheus", "scrape"):
        monkeypatch.delitem(sys.modules, f"megakit.observe.{name}", raising=False)
    w = open_writer(tmp_path, *keys)
    w.train(step(1))
    w.close(True)
    assert capsys.readouterr().out.count("needs the package prometheus-client: pip install prometheus-client") == 1


def test_off_is_off(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    cfg = compose(["+recipe=demo", "log.console=off"])
    MetricsWriter(cfg, tmp_path, total_steps=1).close(True)
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "metrics.jsonl"}
