"""The script for GPUs, on the emulation: every part runs and is reported, and what is wrong, late or absent is named."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from megakit.ops.fused.library import load
from tools import gpu_check
from tools.gpu import cases, kernels, step, tables
from tools.gpu.jobs import MARK, Job, run_jobs

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def report(folder):
    (path,) = folder.glob("gpu-cpu-emulated-*.json")
    return json.loads(path.read_text())


@pytest.fixture
def no_sanitizer(monkeypatch):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)


def test_all_parts_end_to_end(on_cpu, no_sanitizer, tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path / "results")]) == 0
    found = report(tmp_path / "results")
    assert found["wrong"] == [] and found["device"] == "cpu, emulated" and found["small"]
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["liger-kernel"] is None
    parts = found["parts"]
    assert list(parts) == list(gpu_check.PARTS) and [p["failed"] for p in parts.values()] == [[]] * 4
    numerics = parts["numerics"]["results"]
    assert len({r["name"] for r in numerics}) == 18 and {r["dtype"] for r in numerics} == {"bfloat16", "float16", "float32"}
    assert all(0 < r["error"] < r["tolerance"] for r in numerics)
    assert "compute-sanitizer is not in PATH" in parts["sanitizer"]["missing"][0]
    copy, *speeds = parts["speed"]["results"]
    assert copy["copy_gb_s"] > 0 and len(speeds) == 19
    assert all(set(r["gb_s"]) == {"csrc", "eager"} and r["share_of_copy"] > 0 for r in speeds)
    programs = parts["step"]["results"]
    assert [r["program"] for r in programs] == list(step.PROGRAMS)
    ours, torchs, *_ = programs
    assert ours["loss"] == pytest.approx(torchs["loss"], rel=1e-3), "the same step by other operators"
    assert "Liger-Kernel is not installed" in programs[2]["note"] and programs[0]["mfu"] is None
    out = capsys.readouterr().out
    for words in (
        "RMSNorm of a sum, backward",
        "Missing: compute-sanitizer",
        "transformers+compile",
        "Nothing is wrong",
        ".json",
    ):
        assert words in out, words


def test_a_wrong_kernel_is_named(on_cpu, monkeypatch):
    right = cases.swiglu
    monkeypatch.setattr(cases, "swiglu", lambda x, backend: right(x, backend) * 1.01)
    wrong = {r["name"] for r in kernels_numerics() if r["wrong"]}
    assert wrong == {"SwiGLU", "SwiGLU, backward"}


def kernels_numerics():
    return list(kernels.numerics(CPU, small=True))


def test_odd_sizes_are_within_the_tolerance(on_cpu, monkeypatch):
    monkeypatch.setattr(kernels, "TINY", replace(cases.ODD, seq=5, flat=5003))
    assert [r for r in kernels_numerics() if r["wrong"]] == []


def test_liger_is_timed_where_it_is_there_and_may_fail(on_cpu, monkeypatch):
    def broken(*args, **keys):
        raise TypeError("another signature")

    there = SimpleNamespace(
        liger_rms_norm=lambda x, w, eps, in_place: torch.rms_norm(x, w.shape, w, eps),
        liger_layer_norm=broken,
        liger_swiglu=lambda a, b: torch.nn.functional.silu(a) * b,
        liger_cross_entropy=lambda z, labels, reduction: torch.nn.functional.cross_entropy(
            z.float(), labels, reduction=reduction
        ),
    )
    monkeypatch.setattr(cases, "_liger", lambda: there)
    rows = list(kernels.speed(CPU, True, time.monotonic() + 60))
    timed = {r["name"] for r in rows if "liger" in r.get("gb_s", {})}
    assert timed == {"RMSNorm", "RMSNorm, backward", "SwiGLU", "SwiGLU, backward", "cross entropy, both passes"}
    assert [r["failed"] for r in rows if "failed" in r] == ["Liger-Kernel's LayerNorm: TypeError: another signature"]
    assert len([r for r in rows if "share_of_copy" in r]) == 19, "ours are measured all the same"


def python(code, seconds=30.0, name="job"):
    return Job(name, [sys.executable, "-c", code], seconds)


def test_what_came_before_a_failure_counts():
    said = f"print('{MARK}' + '{{\"name\": \"first\"}}', flush=True); print('noise', flush=True); "
    late, broken, well = run_jobs(
        [
            [python(said + "import time; time.sleep(60)", 3.0, "late"), python(said + "raise ValueError('of some kind')")],
            [python(said)],
        ],
        lambda words: None,
    )
    assert late.rows == broken.rows == well.rows == [{"name": "first"}]
    assert late.failed == "took longer than 3 s and was ended" and well.failed == ""
    assert broken.failed == "exit code 1: ValueError: of some kind"


def test_a_part_that_fails_is_reported_and_the_others_go_on(on_cpu, tmp_path, monkeypatch, capsys):
    def jobs(part, small):
        return [[python("raise SystemExit(3)" if part == "numerics" else "", name=part)]], []

    monkeypatch.setattr(gpu_check, "_jobs", jobs)
    assert gpu_check.main(["--out", str(tmp_path), "--only", "numerics", "speed"]) == 1
    found = report(tmp_path)
    assert found["wrong"] == ["numerics: exit code 3: it said nothing"] and list(found["parts"]) == ["numerics", "speed"]
    assert "WRONG: numerics: exit code 3" in capsys.readouterr().out


TOOL = """#!{python}
import sys
print("========= COMPUTE-SANITIZER")
assert sys.argv[1] == "--tool" and sys.argv[3:5] == ["--error-exitcode", "86"] and "drive" in sys.argv, sys.argv
print("========= ERROR SUMMARY:", 2 if sys.argv[2] == "racecheck" else 0, "errors")
sys.exit(86 if sys.argv[2] == "racecheck" else 0)
"""


def test_a_sanitizers_verdict(on_cpu, tmp_path, monkeypatch, capsys):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check.main(["--out", str(tmp_path), "--only", "sanitizer"]) == 1
    found = report(tmp_path)["parts"]["sanitizer"]
    assert [(r["tool"], r["clean"]) for r in found["results"]] == [("memcheck", True), ("racecheck", False)]
    assert "racecheck: exit code 86: ========= ERROR SUMMARY: 2 errors" in capsys.readouterr().out


def test_the_driver_for_sanitizers_runs_every_case(on_cpu, monkeypatch):
    seen = set()
    run = kernels.passes
    monkeypatch.setattr(kernels, "passes", lambda ours, inputs: seen.add(ours.__code__) or run(ours, inputs))
    kernels.drive(CPU)
    assert len(seen) == 11


def test_all_fits_six_minutes():
    assert sum(gpu_check.PARTS.values()) <= 355, "and a few seconds to start and to write"
    for name, seconds in gpu_check.PARTS.items():
        rounds, _ = gpu_check._jobs(name, False)
        assert sum(max(job.seconds for job in jobs) for jobs in rounds) <= seconds
        left = [float(job.command[job.command.index("tools.gpu.worker") + 2]) for jobs in rounds for job in jobs]
        assert min(left, default=10) >= 10, "what a process has to begin something in"


def test_the_step_is_that_of_the_issue_and_its_mfu_counts_half_of_attention():
    cfg = step.config(small=False, backend="csrc")
    m, t = cfg.model, cfg.train
    assert (m.num_layers, m.hidden_size, m.ffn_hidden_size, t.seq_len, t.micro_batch_size) == (8, 4096, 11008, 4096, 4)
    assert t.global_batch_size == 4 and t.precision == "bf16" and cfg.parallel.recompute == "none"
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    by_hand = 6 * (8 * layer + 32000 * 4096 + 17 * 4096) + 6 * 8 * 4096 * 4096
    assert step.flops_per_token(m, t.seq_len, causal=True) == by_hand


def test_a_gpu_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert step.peak_tflops(torch.device("cuda")) == pytest.approx(989, abs=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert step.peak_tflops(torch.device("cuda")) == pytest.approx(989, abs=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GB200")
    assert step.peak_tflops(torch.device("cuda")) == step.catalogue()["gb200"].bf16_tflops
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert step.peak_tflops(torch.device("cuda")) is None


def test_tables_join_what_comes_later_and_name_what_is_left_out():
    rows = [
        {"copy_gb_s": 4000.0},
        {"name": "RMSNorm", "gb_s": {"csrc": 3700.0, "eager": 1200.0}, "share_of_copy": 0.925},
        {"name": "RMSNorm", "gb_s": {"compile": 3000.0}},
        {"left_out": "torch.compile of SwiGLU"},
    ]
    part = {"seconds": 90, "budget_s": 95, "results": rows, "failed": [], "missing": []}
    found = {"device": "x", "date": "y", "versions": {}, "small": False, "goals": gpu_check.GOALS, "wrong": []}
    console = Console(width=100, record=True)
    console.print(tables.render({**found, "parts": {"speed": part}}))
    text = console.export_text()
    assert [line.split() for line in text.splitlines() if line.startswith("RMSNorm")] == [
        ["RMSNorm", "3700", "92%", "1200", "3000"]
    ]
    assert "1 of 1" in text and "Left out: torch.compile of SwiGLU" in text


def test_without_a_library_it_refuses_with_the_cure(on_cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGAKIT_KERNELS", str(tmp_path))
    load.cache_clear()
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "run python -m megakit.ops.build emulated" in capsys.readouterr().err
    load.cache_clear()


def test_nan_is_an_infinite_error():
    nan = torch.full((2,), float("nan"))
    assert kernels.error([nan], [torch.ones(2)]) == float("inf")
    assert kernels.error([torch.ones(2), torch.ones(2) * 1.5], [torch.ones(2), torch.ones(2)]) == pytest.approx(0.5)
