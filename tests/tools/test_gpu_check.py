"""The script for GPUs, on the emulation: it runs, it writes what it found, and it sees a wrong kernel."""

from __future__ import annotations

import json

import pytest
import torch

from megakit.ops.fused.library import load
from tools import gpu_check


@pytest.fixture
def on_cpu(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def report(folder):
    (path,) = folder.glob("kernels-cpu-emulated-*.json")
    return json.loads(path.read_text())


def test_every_kernel_is_checked_and_reported(on_cpu, tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path / "results")]) == 0
    found = report(tmp_path / "results")
    names = [row["name"] for row in found["kernels"]]
    assert len(names) == 19 and found["wrong"] == [] == found["left_out"] and found["copy_gb_s"] > 0
    for row in found["kernels"]:
        assert row["gb_s"] > 0 and row["eager_gb_s"] > 0 and row["compiled_gb_s"] is None
        assert (row["error"] is None) == row["name"].startswith("dropout"), row
        least = 0.0 if row["name"] in ("squared norm", "AdamW") else 1e-5  # bf16 has an error
        assert row["error"] is None or least <= row["error"] < gpu_check.TOLERANCE
    out = capsys.readouterr().out
    assert all(name in out for name in names) and "wrong: none" in out


def test_a_wrong_kernel_is_named(on_cpu, tmp_path, monkeypatch):
    right = gpu_check.swiglu
    monkeypatch.setattr(gpu_check, "swiglu", lambda x, backend: right(x, backend) * 1.01)
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert report(tmp_path)["wrong"] == ["SwiGLU", "SwiGLU, backward"]


def test_cases_that_there_is_no_time_for_are_named(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "BUDGET_S", -1)
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    assert report(tmp_path)["kernels"] == [] and "RMSNorm" in report(tmp_path)["left_out"]


def test_without_a_library_it_refuses_with_the_cure(on_cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGAKIT_KERNELS", str(tmp_path))
    load.cache_clear()
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "run python -m megakit.ops.build emulated" in capsys.readouterr().err
    load.cache_clear()


def test_nan_is_an_infinite_error():
    nan = torch.full((2,), float("nan"))
    assert gpu_check.error([nan], [torch.ones(2)]) == float("inf")
    assert gpu_check.error([torch.ones(2), torch.ones(2) * 1.5], [torch.ones(2), torch.ones(2)]) == pytest.approx(0.5)
