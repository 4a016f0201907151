"""A real Prometheus on loopback with the configuration of docker/monitoring, its times shortened."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docker" / "monitoring"
PROGRAMS = ("prometheus", "promtool", "amtool")
PATIENCE_S = 300.0


def missing() -> str | None:
    """Why nothing of this can run here."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(lacking)} is not installed: make test-monitoring installs it where it may" if lacking else None


def wait_for(what: Callable[[], T | None], saying: str) -> T:
    """What it returns once that is neither None nor empty."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError(f"{saying}: not within {PATIENCE_S:.0f} s")


class Prometheus:
    """Started in `folder`; reads target files in folder/targets."""

    def __init__(self, folder: Path):
        self.targets = folder / "targets"
        self.targets.mkdir()
        shutil.copytree(MONITORING / "prometheus", folder / "etc")
        (config,) = (folder / "etc").glob("*.yml")
        text = config.read_text().replace("/targets/", f"{self.targets}/").replace("15s", "1s")
        assert text.count("1s") == 3 and text.count(str(self.targets)) == 1, "the configuration looks different now"
        config.write_text(text)
        rules = folder / "etc" / "rules" / "megakit.yml"
        text, waits = re.subn(r"for: \d+[mh]", "for: 3s", rules.read_text())
        text, ends = re.subn(r'(up\{job="megakit"\} == 0\n +for:) 3s', r"\1 20s", text)  # a target that goes is noticed every 5 s
        text, limits = re.subn(r"300 \+ 10 \*", "5 + 10 *", text)
        assert waits > 5 and ends == limits == 1, "the rules look different now"
        rules.write_text(text)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={self._address}"]
        with open(folder / "prometheus.log", "w") as log:
            self._process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)
        wait_for(self._ready, "Prometheus is ready")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector: {"metric": labels, "value": [time, text]} of each series."""
        data = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return data["result"]

    def alerts(self, run: str) -> dict[str, dict[str, str]]:
        """Those of a run that fire: name -> annotations."""
        firing = [a for a in self._get("/api/v1/alerts")["alerts"] if a["state"] == "firing" and a["labels"].get("run") == run]
        return {alert["labels"]["alertname"]: alert["annotations"] for alert in firing}

    def active(self) -> dict[str, str]:
        """Runs that are scraped -> health."""
        targets = self._get("/api/v1/targets?state=active")["activeTargets"]
        return {t["labels"]["run"]: t["health"] for t in targets if t["labels"]["job"] == "megakit"}

    def _ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus has ended: see its log"
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self._address}{path}", timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]
