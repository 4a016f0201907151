"""Where Prometheus finds a run: the HTTP server of its metrics, and the target file that tells of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import socketserver
import threading
import time
from http.server import HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from prometheus_client import CollectorRegistry, MetricsHandler

CLIENT_S = 2.0
"""For a client to say what it wants, and again to take the answer."""
_ANY = ("0.0.0.0", "::")  # noqa: S104 - what is asked for is compared with them
"""All addresses of this host."""


class MetricsServer:
    """Answers /metrics, and `path` besides, in a thread of its own. Raises RuntimeError where it can't listen.

    The second path is the run's alone: where another run has the port by now, a scrape of it fails, and does not take the
    other's metrics for this one's.
    """

    def __init__(self, address: str, port: int, registry: CollectorRegistry, path: str):
        paths = ("/metrics", path)

        class Handler(MetricsHandler.factory(registry)):  # type: ignore[misc]
            timeout = CLIENT_S

            def setup(self) -> None:
                super().setup()
                self.rfile = io.BufferedReader(_Hurried(self.connection, CLIENT_S))

            def do_GET(self) -> None:
                self.connection.settimeout(CLIENT_S)  # for all of the answer
                if urlparse(self.path).path in paths:
                    super().do_GET()
                else:
                    self.send_error(404)

        try:
            self._server = (_Server6 if ":" in address else _Server)((address, port), Handler)
        except OSError as error:
            raise RuntimeError(
                f"log.prometheus_address = {address}, log.prometheus_port = {port} can't be listened at"
                f" ({error.strerror or error}): give another, or log.prometheus_port=0 for any that is free"
            ) from error
        host = socket.gethostname() if address in _ANY else address
        self.reachable_at = f"{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        """host:port"""
        self._thread = threading.Thread(target=self._server.serve_forever, name="megakit-metrics-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Hurried(io.RawIOBase):
    """What a client says, for a time: a socket's own limit begins anew with each byte."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._until = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Server(HTTPServer):
    """One request after the other: whatever asks, it takes one thread of the rank."""

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up the host's name, which may take 10 s

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no concern of the run's."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def target_name(run_dir: Path) -> str:
    """A name for a run folder that no other has: sweeps have folders of the same name."""
    return f"{run_dir.name}-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]}"


class TargetFile:
    """One run's entry for `file_sd_configs`."""

    def __init__(self, path: Path, target: str, labels: dict[str, str]):
        self._path = path
        self._text = json.dumps([{"targets": [target], "labels": labels}], indent=1) + "\n"

    def write(self) -> None:
        """Appear whole, in the place of that of an earlier start."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_name(f".{self._path.name}.tmp-{os.getpid()}")
        aside.write_text(self._text)
        os.replace(aside, self._path)

    def remove(self) -> None:
        """Unless a later start has written its own."""
        if self._path.exists() and self._path.read_text() == self._text:
            self._path.unlink()
