"""What a process is told of its own memory."""

from __future__ import annotations

import subprocess
import sys

from megakit.observe.memory import peak_rss_bytes


def test_the_peak_is_the_process_own():
    """Not that of the one which started it, as ru_maxrss is."""
    held = bytearray(300 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert peak_rss_bytes() > 300 << 20
    code = "from megakit.observe.memory import peak_rss_bytes; print(peak_rss_bytes())"
    small = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 1 << 20 < small < 150 << 20
