"""PREFIX.json beside PREFIX.bin and PREFIX.idx: what the indexed data was made of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional

from megakit.errors import Refused

SIDECAR_VERSION = 1


@dataclass(frozen=True)
class Sidecar:
    """Counts and origin of one corpus."""

    tokenizer: str
    """SHA-256 of the tokenizer file, hex."""
    vocab_size: int
    """Pieces of the tokenizer."""
    dtype: str
    """Numpy's name of the token type."""
    documents: int
    tokens: int
    """All tokens in the .bin, those that end documents included."""
    max_token_id: int
    """Largest id in the .bin; -1 if it is empty."""
    eod: Optional[int]
    """Id appended to every document; null: none was."""
    version: int = SIDECAR_VERSION


def sidecar_bytes(sidecar: Sidecar) -> bytes:
    """The file's content: the same for the same data."""
    return (json.dumps(asdict(sidecar), indent=2) + "\n").encode()


def read_sidecar(prefix: str) -> Optional[Sidecar]:
    """The sidecar of a corpus, or None if it has none. Refused if it is damaged or of another version."""
    path = f"{prefix}.json"
    try:
        with open(path, encoding="utf-8") as f:
            values: Any = json.load(f)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as e:
        raise Refused(f"{path} can't be read ({e}): make the data again") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != SIDECAR_VERSION:
        raise Refused(f"{path} is of version {version}, this megakit reads version {SIDECAR_VERSION}: make the data again")
    names = {field.name for field in fields(Sidecar)}
    if set(values) != names:
        odd = ", ".join(sorted(set(values) ^ names))
        raise Refused(f"{path} has other keys than a sidecar of version {SIDECAR_VERSION} ({odd}): make the data again")
    return Sidecar(**values)
