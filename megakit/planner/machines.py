"""Speeds that were measured on this machine, by cluster: they stand in for the shipped ones. No torch here."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megakit.config.rules import model_ranks
from megakit.config.schema import ClusterConfig, Config
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.files import write_whole
from megakit.planner.hardware import Fitted, Gpu, catalogue
from megakit.planner.kernels import HALF_SPEED, STREAM

TYPICAL = 0.75
"""Share of its peak that a large matrix product reaches, where the peak is not documented."""


def folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where they are stored: $XDG_CONFIG_HOME/megakit/machines, by default in ~/.config."""
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "megakit" / "machines"


def check_device(cluster: ClusterConfig, device: str) -> None:
    """Raise Refused where the cluster's kind of GPU is known, and a device of another name would be measured as it."""
    kind = cluster.name.split("_")[0]
    if cluster.name in catalogue() and not re.search(rf"\b{kind}\b", device, re.IGNORECASE):
        raise Refused(
            f"--calibrate would store the speeds of this machine's {device} as those of cluster.name = {cluster.name}: run it"
            f" on a node with {kind.upper()}, or use a name of its own, as cluster.name=mine"
        )


def store(cluster: ClusterConfig, measured: Mapping[str, Any]) -> tuple[Path, Gpu]:
    """Write what train/calibrate.py measured as the GPU of this cluster -> the file, and the GPU."""
    gpu = as_gpu(cluster, measured)
    if not _names_a_file(cluster.name):
        raise Refused(f"cluster.name = {cluster.name} can't name a file: use letters, digits, - and _")
    path = folder() / f"{cluster.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"measured": dict(measured), "gpu": dataclasses.asdict(gpu)}, indent=1) + "\n")
    return path, gpu


def gpu_of(cluster: ClusterConfig) -> tuple[Gpu, str] | None:
    """The GPU of a recipe's cluster, and where its speed comes from; None where it isn't known.

    Measured on this machine, else as shipped; with the numbers that the recipe gives.
    """
    if (here := _measured(cluster.name)) is not None:
        return here[0].of_cluster(cluster), here[1]
    gpu = catalogue().get(cluster.name)
    return None if gpu is None else (gpu.of_cluster(cluster), "shipped constants")


def as_documented(cfg: Config) -> Config:
    """The recipe with the GPUs of a node and their memory, where it leaves them open and its kind of GPU is known; not where
    parallel.dp asks for more GPUs than its nodes would then have."""
    known = gpu_of(cfg.cluster)
    if known is None:
        return cfg
    gpu, c = known[0], cfg.cluster
    open_ones: dict[str, Any] = {}
    if c.gpu_memory_gib is None:
        open_ones["cluster.gpu_memory_gib"] = gpu.memory_gib
    asked = (cfg.parallel.dp or 1) * model_ranks(cfg)
    if c.gpus_per_node is None and (cfg.parallel.dp is None or asked <= c.nodes * gpu.gpus_per_node):
        open_ones["cluster.gpus_per_node"] = gpu.gpus_per_node
    return replace(cfg, open_ones) if open_ones else cfg


def _measured(name: str) -> tuple[Gpu, str] | None:
    path = folder() / f"{name}.json"
    if not _names_a_file(name):
        return None
    try:
        data = json.loads(path.read_text())
        gpu = Gpu(**{**data["gpu"], "fitted": Fitted(**data["gpu"]["fitted"])})
    except (OSError, ValueError, KeyError, TypeError):  # not there, or of another version: the shipped figures serve
        return None
    return gpu, f"measured on {data['measured']['host']}, {data['measured']['date']}"


def _names_a_file(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*", name) is not None


def as_gpu(cluster: ClusterConfig, measured: Mapping[str, Any]) -> Gpu:
    """The cluster's GPU with measured shares of its peaks. Of one that isn't known the peaks are taken from what it reached."""
    gemm, copy = measured["gemm_tflops"], measured["copy_tb_s"]
    base = catalogue().get(cluster.name)
    if base is None:
        like = catalogue()["h100"]
        peak = gemm / TYPICAL
        base = dataclasses.replace(
            like,
            name=cluster.name,
            title=measured["device"],
            memory_gib=measured["memory_gib"] or cluster.gpu_memory_gib or like.memory_gib,
            bf16_tflops=peak,
            fp8_tflops=peak,
            fp32_tflops=peak,
            memory_tb_s=copy / STREAM,
            nvlink_gb_s=measured["all_reduce_gb_s"] or like.nvlink_gb_s,
        )
    base = base.of_cluster(cluster)
    length = measured["sequence"]
    fitted = dataclasses.replace(
        base.fitted,
        gemm=gemm / base.bf16_tflops,
        attention=measured["attention_tflops"] / base.bf16_tflops * (length + HALF_SPEED) / length,
        elementwise=copy / measured["norm_tb_s"],
    )
    if measured["all_reduce_gb_s"]:
        fitted = dataclasses.replace(fitted, nvlink=measured["all_reduce_gb_s"] / base.nvlink_gb_s)
    return dataclasses.replace(base, fitted=fitted)
