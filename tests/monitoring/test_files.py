"""The files of docker/monitoring against the exporter, one another and the documentation; no program is needed for it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megakit.config.schema import LogConfig
from megakit.observe.prometheus import SERIES
from tests.monitoring.stack import MONITORING, ROOT

COMPOSE = yaml.safe_load((MONITORING / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SCRAPES = yaml.safe_load((MONITORING / "prometheus/prometheus.yml").read_text())
RULES = {
    path.stem: [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    for path in (MONITORING / "prometheus/rules").glob("*.yml")
}
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/megakit.json").read_text())
PAGE = (ROOT / "docs/monitoring.md").read_text()
HERE = Path(__file__).parent
ALERTS = [rule["alert"] for rules in RULES.values() for rule in rules if "alert" in rule]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every PromQL expression, by where it stands."""
    found = {rule.get("alert") or rule["record"]: rule["expr"] for rules in RULES.values() for rule in rules}
    found |= {f"panel {p['title']} {t['refId']}": t["expr"] for p in panels() for t in p["targets"]}
    found |= {f"variable {v['name']}": v["definition"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"}
    return found | {f"annotation {a['name']}": a["expr"] for a in DASHBOARD["annotations"]["list"]}


@pytest.mark.parametrize("place, expression", expressions().items())
def test_every_metric_that_is_asked_for_is_exported(place, expression):
    recorded = {rule["record"] for rules in RULES.values() for rule in rules if "record" in rule}
    named = set(re.findall(r"\b(?:[a-z]+:)?megakit_\w+(?::\w+)?", expression))
    assert named <= {*SERIES, "megakit_run_info"} | recorded
    others = re.findall(r"\b(?:DCGM_\w+|ALERTS|up|vector|prometheus_sd_file_read_errors_total)\b", expression)
    assert named or others, f"{place} asks for nothing"


def test_the_page_tells_of_every_metric_and_every_alert():
    assert set(re.findall(r"^\| `(megakit_\w+)", PAGE, re.M)) == {*SERIES, "megakit_run_info"}
    assert set(re.findall(r"^\| `(Megakit\w+|Watchdog)`", PAGE, re.M)) == set(ALERTS)


@pytest.mark.parametrize("name, rules", RULES.items())
def test_every_alert_says_what_to_do_and_has_a_test(name, rules):
    assert len(ALERTS) == len(set(ALERTS))
    cases = (HERE / f"{name}.test.yml").read_text()
    for rule in rules:
        if "alert" in rule:
            assert rule["alert"] in cases
            assert set(rule["annotations"]) == {"summary", "action"} and len(rule["annotations"]["action"]) > 20
            assert rule["labels"]["severity"] in ("page", "warning", "info", "none")


def test_what_prometheus_reads_is_there():
    assert SCRAPES["rule_files"] == ["rules/*.yml"] and len(RULES) == 2
    jobs = {job["job_name"]: job for job in SCRAPES["scrape_configs"]}
    assert set(re.findall(r'job="(\w+)"', " ".join(expressions().values()))) <= set(jobs)
    assert jobs["megakit"]["honor_labels"] is True
    for job in jobs.values():
        for files in (entry["files"] for entry in job.get("file_sd_configs", [])):
            assert all(re.fullmatch(r"[^*]*(\*[^/]*)?\.(json|yml|yaml)", pattern) for pattern in files), "Prometheus refuses it"
    (targets,) = jobs["megakit"]["file_sd_configs"][0]["files"]
    mounts = [mount for mount in SERVICES["prometheus"]["volumes"] if isinstance(mount, dict)]
    assert [f"{mount['target']}/*.json" for mount in mounts] == [targets]
    assert mounts[0]["source"] == f"${{MEGAKIT_TARGETS:-../../{LogConfig.prometheus_targets}}}"
    for path in (MONITORING / "prometheus/gpus").iterdir():
        assert [set(entry) for entry in json.loads(path.read_text())] == [{"targets"}]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_kept_small_and_on_loopback(name):
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", service["image"])
    assert not service["user"].startswith(("0", "root")) and "privileged" not in service and "cap_add" not in service
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name != "dcgm-exporter") and service["healthcheck"]["test"][0] == "CMD"
    assert service["network_mode"] == "host" and "ports" not in service
    listens = {
        "prometheus": lambda s: "--web.listen-address=127.0.0.1:9090" in s["command"],
        "alertmanager": lambda s: {"--web.listen-address=127.0.0.1:9093", "--cluster.listen-address="} <= set(s["command"]),
        "grafana": lambda s: s["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1",
        "dcgm-exporter": lambda s: s["environment"]["DCGM_EXPORTER_LISTEN"] == "${DCGM_ADDRESS:-127.0.0.1}:9400",
    }
    assert listens[name](service)


def test_what_is_mounted_is_there_and_what_holds_data_is_a_named_volume():
    named = set()
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            if isinstance(mount, dict):
                assert mount["read_only"] and mount["bind"] == {"create_host_path": False}
                continue
            source, _, rest = mount.partition(":")
            if source.startswith("."):
                assert (MONITORING / source).is_dir() and rest.endswith(":ro")
            else:
                named.add(source)
    assert named == set(COMPOSE["volumes"]) == {"prometheus", "alertmanager", "grafana"}


def test_no_password_is_in_the_files_and_none_is_a_refusal():
    text = "".join(path.read_text() for path in MONITORING.rglob("*") if path.is_file())
    said = re.findall(r"(?i)^[\s-]*[-\w]*(?:password|secret|token)[-\w]*\s*[:=]\s*(\S.*)$", text, re.M)
    assert len(said) == 1 and said[0].startswith("${GRAFANA_ADMIN_PASSWORD:?")


def test_the_dashboard_is_whole():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) and DASHBOARD["uid"] == "megakit"
    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for a, b in itertools.combinations(boxes, 2):
        assert a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", " ".join(expressions().values()))) <= variables
    for panel in panels():
        assert panel["title"] and panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
        assert panel["type"] == "table" or panel["fieldConfig"]["defaults"]["unit"]
    (provider,) = yaml.safe_load((MONITORING / "grafana/provisioning/dashboards/megakit.yaml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    (source,) = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in SERVICES["prometheus"]["command"]
