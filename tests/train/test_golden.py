"""The demo's first 20 losses are those in the tree: whatever changes them must be meant to."""

from __future__ import annotations

import json

import pytest

from megakit.launch.devices import has_bf16
from tests.train.golden import FILE, PINNED, fingerprint, losses, make_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo")
    make_data(path)
    return path


def test_fp32_losses_are_equal_to_the_bit(folder):
    assert losses(folder, "fp32", PINNED) == json.loads(FILE.read_text())["portable"]


def test_bf16_losses(folder):
    golden = json.loads(FILE.read_text())["bf16"]
    got = losses(folder, "bf16", {}, steps=len(golden["losses"]) if has_bf16() else 1)
    golden["losses"] = golden["losses"][: len(got)]
    if fingerprint() == golden["fingerprint"]:
        assert got == golden["losses"]
    else:  # another CPU rounds its partial sums elsewhere
        assert [float(x) for x in got] == pytest.approx([float(x) for x in golden["losses"]], rel=2e-2)
