"""What a machine is measured to reach, and the plans that use it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megakit import plan
from megakit.config.schema import ClusterConfig
from megakit.errors import Refused
from megakit.planner.hardware import catalogue
from megakit.planner.kernels import HALF_SPEED
from megakit.planner.machines import check_device, folder, gpu_of, store
from megakit.train import calibrate as calibration
from megakit.train.calibrate import Calibration, calibrate

H100 = Calibration("node7", "H100", "2026-11-30", 700.0, 400.0, 4096, 2.8, 2.0, 360.0, 79.1)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_this_machine_is_measured(monkeypatch):
    small = calibration.Sizes(gemm=64, copy_bytes=2**16, sequence=32, heads=2, reduce_bytes=2**12, seconds=0.0)
    monkeypatch.setattr(calibration, "CPU_SIZES", small)
    done = []
    found = calibrate(torch.device("cpu"), 2, lambda n, of, what: done.append((n, of, what)))
    figures = (found.gemm_tflops, found.attention_tflops, found.copy_tb_s, found.norm_tb_s, found.all_reduce_gb_s)
    assert all(x is not None and x > 0 for x in figures) and found.sequence == 32
    assert [n for n, *_ in done] == list(range(5)) and done[-1][2] == "all-reduce"


def test_measured_shares_take_the_place_of_the_shipped_ones():
    cluster = ClusterConfig(name="h100", gpus_per_node=8)
    shipped, source = gpu_of(cluster)
    assert source == "shipped constants" and shipped == catalogue()["h100"]
    path, _ = store(cluster, dataclasses.asdict(H100))
    gpu, source = gpu_of(cluster)
    assert path == folder() / "h100.json" and source == "measured on node7, 2026-11-30"
    assert gpu.bf16_tflops == 989 and gpu.fitted.gemm == 700 / 989 and gpu.fitted.nvlink == 360 / 450
    assert gpu.fitted.attention == pytest.approx(400 / 989 * (4096 + HALF_SPEED) / 4096)
    assert gpu.fitted.elementwise == 1.4 and gpu.fitted.network == shipped.fitted.network


def test_a_gpu_that_is_not_known_gets_its_peaks_from_what_it_reached():
    store(ClusterConfig(name="mine"), dataclasses.asdict(H100))
    gpu, _ = gpu_of(ClusterConfig(name="mine"))
    assert gpu.fitted.gemm * gpu.bf16_tflops == pytest.approx(700) and gpu.memory_gib == 79.1 and gpu.title == "H100"


def test_what_the_recipe_gives_wins_over_what_was_measured():
    store(ClusterConfig(name="h100"), dataclasses.asdict(H100))
    gpu, _ = gpu_of(ClusterConfig(name="h100", network_gb_s=25.0, gpus_per_node=4))
    assert (gpu.network_gb_s, gpu.gpus_per_node) == (25.0, 4) and gpu.fitted.gemm == 700 / 989


def test_a_damaged_file_is_not_used():
    path, _ = store(ClusterConfig(name="h100"), dataclasses.asdict(H100))
    path.write_text('{"gpu": {')
    assert gpu_of(ClusterConfig(name="h100"))[1] == "shipped constants"


def test_the_command_measures_and_later_plans_use_it(monkeypatch, capsys):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: H100)
    assert plan.main(["+recipe=demo", "launch.device=cpu", "--calibrate"]) == 0
    assert "stored for cluster.name = local" in capsys.readouterr().out
    assert plan.main(["+recipe=demo"]) == 0
    text = capsys.readouterr().out
    assert "measured on node7, 2026-11-30" in text and "tokens/s per GPU" in text


def test_a_cpu_is_not_stored_as_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured"))
    assert plan.main(["+recipe=llama7b", "launch.device=cpu", "--calibrate"]) == 2
    assert "this machine's cpu as those of cluster.name = h100" in capsys.readouterr().err
    assert gpu_of(ClusterConfig(name="h100"))[1] == "shipped constants"


@pytest.mark.parametrize(
    ("name", "device", "good"),
    [
        ("a100_40g", "NVIDIA A100-SXM4-40GB", True),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("b200", "NVIDIA GB200", False),
        ("h100", "NVIDIA A100-SXM4-80GB", False),
        ("mine", "cpu", True),
    ],
)
def test_a_known_kind_of_gpu_is_measured_on_one(name: str, device: str, good: bool):
    if good:
        check_device(ClusterConfig(name=name), device)
    else:
        with pytest.raises(Refused, match=f"this machine's {device}"):
            check_device(ClusterConfig(name=name), device)


def test_a_gpu_that_is_not_there_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr("megakit.launch.devices.visible_gpus", lambda env: 0)
    assert plan.main(["+recipe=llama7b", "launch.device=cuda", "--calibrate"]) == 2
    assert "this machine shows no GPU" in capsys.readouterr().err


def test_calibrating_makes_no_plan(capsys):
    assert plan.main(["+recipe=demo", "--calibrate", "--search"]) == 2
    assert "--calibrate and --search are both given" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../x", "a/b", ".hidden", ""])
def test_a_name_cannot_leave_the_folder(name: str):
    with pytest.raises(Refused, match="can't name a file"):
        store(ClusterConfig(name=name), dataclasses.asdict(H100))
    assert gpu_of(ClusterConfig(name=name)) is None
