"""The demo's first losses are those in the tree: whatever changes them must be meant to."""

from __future__ import annotations

import json

import pytest

from megakit.launch.devices import has_bf16
from tests.train.golden import BF16_STEPS, FILE, PINNED, fingerprint, losses, make_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo")
    make_data(path)
    return path


def test_fp32_losses_are_equal_to_the_bit(folder):
    assert losses(folder, "fp32", PINNED) == json.loads(FILE.read_text())["portable"]


@pytest.mark.skipif(not has_bf16(), reason="a step takes minutes on a CPU without bf16 instructions")
def test_bf16_losses(folder):
    golden = json.loads(FILE.read_text())["bf16"]
    got = losses(folder, "bf16", {}, BF16_STEPS)
    if fingerprint() == golden["fingerprint"]:
        assert got == golden["losses"]
    else:  # another CPU rounds its partial sums elsewhere
        assert [float(x) for x in got] == pytest.approx([float(x) for x in golden["losses"]], rel=2e-2)
