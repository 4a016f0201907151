"""One request and one answer over a Unix socket, each a line of JSON. The kernel says which account asks."""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megakit.errors import Refused

SOCKET = "socket"
REQUEST_LIMIT, ANSWER_LIMIT = 8 << 20, 64 << 20
"""Bytes of a message."""
TIMEOUT_S = 2.0
"""For a whole request to arrive: the server waits for nobody longer."""
ANSWER_S = 60.0


class Peer(NamedTuple):
    """Who asks."""

    uid: int
    account: str

    @property
    def is_owner(self) -> bool:
        """The account that the server runs under, or root."""
        return self.uid in (0, os.geteuid())


def ask(path: Path, request: dict[str, Any], obeyed: bool = False) -> Any:
    """The server's answer. Raises Refused with its reason, or where none answers.

    `obeyed`: the answer says what to run, and is taken only from this account, as which ssh serves a socket, too, and root.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(os.fspath(path))
            if obeyed and not (server := _peer(sock)).is_owner:
                raise Refused(f"{path} is served by {server.account}, whose jobs would run as you: use a socket of your own")
            sock.sendall(json.dumps(request).encode() + b"\n")
            line = _line(sock, time.monotonic() + ANSWER_S, ANSWER_LIMIT)
        except (OSError, ValueError) as error:
            raise NoServer(
                f"no queue server answers at {path} ({error}): start one with python -m megakit.queue serve, or name its folder"
                " with --folder or MEGAKIT_QUEUE"
            ) from None
    answer = json.loads(line)
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer["answer"]


class NoServer(Refused):
    """Nobody listens at the socket."""


def listen(path: Path, mode: int, gid: int) -> socket.socket:
    """A socket that `mode` lets in; one that a killed server left is replaced. Raises Refused where the path is too long."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
    except OSError as error:
        raise Refused(f"{path} can't be a socket ({error}): use a --folder with a shorter name, on a local disk") from None
    finally:
        os.umask(before)
    os.chown(path, -1, gid)
    os.chmod(path, mode)
    sock.listen(64)
    return sock


def receive(conn: socket.socket) -> tuple[dict[str, Any], Peer]:
    """A request and who sent it. Raises OSError, ValueError or RecursionError where it is none, is too long or takes
    too long.
    """
    request = json.loads(_line(conn, time.monotonic() + TIMEOUT_S, REQUEST_LIMIT))
    if not isinstance(request, dict):
        raise ValueError("not an object")
    return request, _peer(conn)


def answer(conn: socket.socket, **what: Any) -> None:
    """One of answer=..., refused=...; whoever asked may be gone."""
    conn.settimeout(TIMEOUT_S)
    with suppress(OSError):
        conn.sendall(json.dumps(what).encode() + b"\n")


def account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _peer(sock: socket.socket) -> Peer:
    """Who is at the other end."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return Peer(uid, account_name(uid))


def _line(sock: socket.socket, deadline: float, limit: int) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        sock.settimeout(left)
        chunk = sock.recv(1 << 16)
        if not chunk:
            raise ConnectionError("it was cut off")
        data += chunk
        if len(data) > limit:
            raise ValueError("it is too long")
    return bytes(data)
