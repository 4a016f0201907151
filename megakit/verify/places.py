"""Which line of the engine an error is about."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from megakit.parallel import comm

_ROOT = Path(__file__).parents[2]
_TYPES = importlib.util.find_spec("spmd_types")  # not everybody has it
_OTHERS = (
    os.fspath(Path(__file__).parent),
    comm.__file__,
    contextlib.__file__,
    functools.__file__,
    os.path.dirname(torch.__file__),
    *(_TYPES.submodule_search_locations or () if _TYPES else ()),
)


@functools.lru_cache(maxsize=4096)
def _place(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    short = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{short}:{line} {getattr(code, 'co_qualname', code.co_name)}"  # co_qualname: Python 3.11


def call_site() -> str:
    """The line that asked for the communication under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    return _place(frame.f_code, frame.f_lineno) if frame else "?"


def raise_site(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that is neither the checker's nor a library's."""
    found = "?"
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OTHERS):
            found = _place(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def defined_at(function: Callable) -> str:
    """Where a function begins."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _place(code, code.co_firstlineno) if code else "?"
