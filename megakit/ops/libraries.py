"""Libraries that a run may ask for beside torch: found, imported and checked when they are asked for, never before."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from megakit.errors import Refused


def needed(asked: str, title: str, top: str, module: str, names: tuple[str, ...], cure: str) -> ModuleType:
    """`module` of the library `top`, which must have `names`. Raises Refused: `asked` is what asks for it, `title` and `cure`
    are for the user."""
    try:
        importlib.import_module(top)
    except ImportError as e:
        absent = isinstance(e, ModuleNotFoundError) and e.name == top
        why = "is not installed" if absent else f"can't be imported ({_line(e)})"
        raise Refused(f"{asked} needs {title}, which {why}: {cure}") from e
    try:
        found = importlib.import_module(module)
    except Exception as e:  # a broken build raises what it likes: OSError, RuntimeError
        raise Refused(f"{asked} needs {title}, but its {module} can't be imported ({_line(e)}): {cure}") from e
    lacking = [name for name in names if not hasattr(found, name)]
    if lacking:
        raise Refused(f"{asked} needs {title}, but the {version(top)} that is installed has no {module}.{lacking[0]}: {cure}")
    return found


def version(top: str) -> str:
    """What an imported library says of itself, for messages."""
    return f"{top} {getattr(importlib.import_module(top), '__version__', 'without a version')}"


def on_gpu(asked: str, title: str, device: torch.device) -> None:
    """Raises Refused where the run isn't on a GPU: the library's kernels are for nothing else."""
    if device.type != "cuda":
        raise Refused(f"{asked} needs a GPU, which {title} is made for, and the run is on {device.type}: use torch")


def _line(e: BaseException) -> str:
    return " ".join(str(e).split())[:200]
