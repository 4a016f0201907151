"""Real runs scraped by a real Prometheus with the rules of docker/monitoring: make test-monitoring."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_NOT_FINITE
from tests.config.tiny import TINY
from tests.monitoring.stack import ROOT, Prometheus, missing, wait_for

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Iterator[Prometheus]:
    if why := missing():
        pytest.skip(why)
    server = Prometheus(tmp_path_factory.mktemp("prometheus"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def start(prometheus, tmp_path) -> Iterator[object]:
    started: list[subprocess.Popen] = []

    def start(name: str, *keys: str, module: tuple[str, ...] = ("megakit.pretrain",)) -> subprocess.Popen:
        sink = ["log.prometheus=true", "log.prometheus_port=0", f"log.prometheus_targets={prometheus.targets}"]
        run = [*TINY, f"run.name={name}", f"run.dir={tmp_path / name}", "launch.device=cpu", "parallel.dp=1", *sink, *keys]
        with open(tmp_path / f"{name}.log", "w") as log:
            started.append(subprocess.Popen([sys.executable, "-m", *module, *run], cwd=ROOT, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def records(folder: Path) -> dict[int, dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line["kind"] == "train"}


def quiet_for(prometheus: Prometheus, run: str, seconds: int) -> None:
    """Rules have been evaluated for so long since the target went, and the run has never fired an alert."""
    wait_for(lambda: run not in prometheus.active(), f"{run} is no target any more")
    gone = float(prometheus.query("time()")[1])
    wait_for(lambda: float(prometheus.query("time()")[1]) > gone + seconds, "time goes on")
    assert prometheus.query(f'count_over_time(ALERTS{{alertstate="firing", run="{run}"}}[10m])') == []


def test_a_run_is_scraped_and_its_end_is_no_alert(prometheus, start, tmp_path):
    process = start("well", "train.steps=150", "checkpoint.interval_steps=50", "train.eval_interval=50")
    seen: dict[int, float] = {}

    def look() -> bool:
        found = prometheus.query('{__name__=~"megakit_step|megakit_loss", run="well"}')  # of one scrape
        values = {series["metric"]["__name__"]: float(series["value"][1]) for series in found}
        if "megakit_loss" in values:
            seen[int(values["megakit_step"])] = values["megakit_loss"]
        return process.poll() is not None

    wait_for(look, "the run ends")
    assert process.returncode == EXIT_DONE, (tmp_path / "well.log").read_text()
    written = records(tmp_path / "well")
    assert len(seen) >= 3 and {step: written[step]["loss"] for step in seen} == pytest.approx(seen)
    assert list(prometheus.targets.iterdir()) == []
    quiet_for(prometheus, "well", 5)
    (info,) = prometheus.query('last_over_time(megakit_run_info{run="well"}[10m])')
    assert info["metric"]["run_dir"] == str(tmp_path / "well") and info["metric"]["job"] == "megakit"
    assert not any(label.startswith("exported_") for label in info["metric"])


def test_a_run_that_was_asked_to_stop_is_no_alert(prometheus, start, tmp_path):
    process = start("stopped", "train.steps=1000000")
    wait_for(lambda: prometheus.query('megakit_loss{run="stopped"}'), "the run is scraped")
    process.terminate()
    assert process.wait(60) == EXIT_ASKED_TO_STOP
    quiet_for(prometheus, "stopped", 5)


def test_a_loss_that_is_nan_pages_and_so_does_the_end_of_that_run(prometheus, start, tmp_path):
    process = start("nan", "train.steps=1000000", "train.max_skipped_steps=30", module=("tests.monitoring.faulty", "nan"))
    found = wait_for(lambda: prometheus.alerts("nan").get("MegakitLossNotFinite"), "the alert fires")
    assert found["summary"] == "the loss of nan is NaN" and process.poll() is None
    assert process.wait(200) == EXIT_NOT_FINITE, (tmp_path / "nan.log").read_text()
    found = wait_for(lambda: prometheus.alerts("nan").get("MegakitRunDown"), "the alert fires")
    assert found["summary"] == "nan has ended without finishing, or its node is gone"
    assert f"{tmp_path / 'nan'}/events.jsonl" in found["action"]
    wait_for(lambda: "MegakitLossNotFinite" not in prometheus.alerts("nan"), "what was scraped from it is stale")
    # the same command goes on: here it has nothing wrong with it any more
    assert start("nan", "train.steps=40").wait(200) == EXIT_DONE
    wait_for(lambda: "MegakitRunDown" not in prometheus.alerts("nan"), "the page resolves")
    assert set(prometheus.alerts("nan")) <= {"MegakitSkippedSteps"}  # of the last 15 minutes


def test_a_run_that_hangs_pages_and_so_does_its_death(prometheus, start, tmp_path):
    process = start("hang", "train.steps=1000000", module=("tests.monitoring.faulty", "hang"))
    found = wait_for(lambda: prometheus.alerts("hang").get("MegakitStalled"), "the alert fires")
    assert found["summary"].startswith("hang has done no step for ")
    assert prometheus.active()["hang"] == "up"
    process.kill()
    found = wait_for(lambda: prometheus.alerts("hang").get("MegakitRunDown"), "the alert fires")
    (target,) = prometheus.targets.glob("hang-*.json")
    target.unlink()  # as the alert says where the run isn't to go on
    wait_for(lambda: not prometheus.alerts("hang"), "the alert resolves")
