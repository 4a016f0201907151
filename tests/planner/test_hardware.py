"""The shipped constants: the recipes' cluster files agree with them, and every one is in the range that its meaning allows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

import recipes
from megakit.config.schema import ClusterConfig
from megakit.errors import Refused
from megakit.planner.hardware import Fitted, catalogue, find

CLUSTERS = Path(recipes.__file__).parent / "cluster"
SAME = {
    "gpus_per_node": "gpus_per_node",
    "gpu_memory_gib": "memory_gib",
    "peak_bf16_tflops": "bf16_tflops",
    "peak_fp32_tflops": "fp32_tflops",
    "memory_bandwidth_tb_s": "memory_tb_s",
    "nvlink_gb_s": "nvlink_gb_s",
    "network_gb_s": "network_gb_s",
}


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_clusters_agree_with_the_shipped_numbers(path):
    cluster = yaml.safe_load(path.read_text())
    if path.stem == "local":
        return
    gpu = find(path.stem)
    assert {key: cluster[key] for key in SAME} == {key: getattr(gpu, name) for key, name in SAME.items()}


def test_every_shipped_gpu_is_there():
    assert set(catalogue()) >= {"a100_40g", "a100_80g", "h100", "h200", "b200", "gb200", "gb300", "v100"}


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_fitted_constants_are_in_the_range_of_their_meaning(name):
    fitted = find(name).fitted
    assert len(dataclasses.fields(Fitted)) <= 10
    for share in ("gemm", "gemm_fp8", "attention", "tp_exposed", "nvlink", "network"):
        assert 0.05 < getattr(fitted, share) <= 1.0
    assert 0.5 < fitted.elementwise < 5 and 0.5 < fitted.cast < 6
    assert 0 <= fitted.fp8_layer_us < 500 and 0 <= fitted.straggler < 0.02


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(Refused, match=r"cluster.name = tpu .* use one of a100_40g, .*h100"):
        find("tpu")


@pytest.mark.parametrize("key", SAME)
def test_a_recipes_own_numbers_win(key):
    given = ClusterConfig(name="h100")
    setattr(given, key, 7)
    gpu = find("h100").of_cluster(given)
    follows = {"nvlink_domain": 7} if key == "gpus_per_node" else {}
    assert gpu == dataclasses.replace(find("h100"), **{SAME[key]: 7}, **follows)


def test_nvlink_ends_with_the_node_unless_a_rack_is_wired_as_one():
    four = ClusterConfig(name="h100", gpus_per_node=4)
    assert find("h100").of_cluster(four).nvlink_reach == 4 and find("gb200").of_cluster(four).nvlink_reach == 72
