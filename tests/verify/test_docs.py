"""The example of docs/verify.md runs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

pytest.importorskip("spmd_types")


def test_the_example_is_clean():
    text = (Path(__file__).parents[2] / "docs/verify.md").read_text()
    code = text.partition("## Types of a step")[2].partition("Every value")[0]
    exec(textwrap.dedent(code), {})
