"""Ways to pack the bytes of an input, by the end of its name."""

from __future__ import annotations

import gzip

import zstandard

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
