"""The demo's first 20 losses are those in the tree: whatever changes them must be meant to."""

from __future__ import annotations

import json

import pytest

from tests.train.golden import FILE, PINNED, fingerprint, losses, make_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo")
    make_data(path)
    return path


def test_fp32_losses_are_equal_to_the_bit(folder):
    assert losses(folder, "fp32", PINNED) == json.loads(FILE.read_text())["portable"]


def test_bf16_losses_as_shipped(folder):
    golden = json.loads(FILE.read_text())["as_shipped"]
    got = losses(folder, "bf16", {})
    if fingerprint() == golden["fingerprint"]:
        assert got == golden["losses"]
    else:  # another CPU rounds its partial sums elsewhere
        assert [float(x) for x in got] == pytest.approx([float(x) for x in golden["losses"]], rel=2e-2)
