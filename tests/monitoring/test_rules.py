"""The configuration of docker/monitoring as promtool and amtool see it, and the unit tests of the rules: make test-monitoring."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.monitoring.stack import MONITORING, missing

pytestmark = pytest.mark.monitoring
HERE = Path(__file__).parent


def ask(*words: str | Path) -> str:
    if why := missing():
        pytest.skip(why)
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_is_valid():
    assert "SUCCESS: 2 rule files found" in ask("promtool", "check", "config", MONITORING / "prometheus/prometheus.yml")
    assert "SUCCESS" in ask("amtool", "check-config", MONITORING / "alertmanager/alertmanager.yml")


@pytest.mark.parametrize(
    "labels, receiver",
    [
        (["severity=page", "alertname=MegakitRunDown"], "pager"),
        (["severity=warning", "alertname=MegakitEvent"], "team"),
        (["severity=none", "alertname=Watchdog"], "dead_mans_switch"),
    ],
)
def test_alerts_go_where_they_should(labels, receiver):
    config = f"--config.file={MONITORING / 'alertmanager/alertmanager.yml'}"
    assert ask("amtool", "config", "routes", "test", config, *labels).strip() == receiver


@pytest.mark.parametrize("name", ["megakit", "gpu"])
def test_every_rule_fires_where_it_should_and_only_there(name):
    assert "SUCCESS" in ask("promtool", "test", "rules", HERE / f"{name}.test.yml")
