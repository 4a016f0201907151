"""Where a queue may be: nobody else can put another folder in its place."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from megakit.errors import Refused
from megakit.queue import wire
from megakit.queue.server import claim


@pytest.fixture(autouse=True)
def mask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_below_a_folder_that_others_can_write(tmp_path: Path):
    above = tmp_path / "shared" / "mine"
    above.mkdir(parents=True)
    for mode, refused in ((0o777, True), (0o757, True), (0o1777, False), (0o755, False)):
        (tmp_path / "shared").chmod(mode)
        if refused:
            with pytest.raises(Refused, match=f"shared can be written by others \\(mode {mode:o}\\), who could put another"):
                claim(above / "q", -1)
        else:
            os.close(claim(above / "q", -1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_below_a_folder_of_another_account_or_group(tmp_path: Path):
    above = tmp_path / "theirs"
    above.mkdir()
    os.chown(above, 1, 0)
    with pytest.raises(Refused, match="theirs belongs to daemon, who could put another --folder in place"):
        claim(above / "q", -1)
    os.chown(above, 0, 1)
    above.chmod(0o775)
    with pytest.raises(Refused, match="can be written by others"):
        claim(above / "q", -1)
    os.chown(above, 0, 0)
    os.close(claim(above / "q", -1))


def test_a_link_to_a_safe_place(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.close(claim(tmp_path / "link" / "q", -1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another account")
def test_an_agent_obeys_its_own_account_only():
    """What it hears is what it runs: from another account's socket that would run their jobs as its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 1, 1)
        path, (ready, tell) = Path(folder) / "socket", os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # it doesn't outlive a test that fails
            os.setuid(1)
            with wire.listen(path, 0o666, -1) as sock:
                os.write(tell, b"x")
                for _ in range(2):
                    sock.accept()[0].close()
            os._exit(0)
        os.read(ready, 1)
        with pytest.raises(Refused, match="is served by daemon, whose jobs would run as you"):
            wire.ask(path, {"do": "exchange"}, obeyed=True)
        with pytest.raises(wire.NoServer):  # what is only told something may be another's
            wire.ask(path, {"do": "list"})
        assert os.waitpid(pid, 0)[1] == 0
