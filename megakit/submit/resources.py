"""Nodes and ranks that a recipe's job asks for."""

from __future__ import annotations

from dataclasses import dataclass

from megakit.config.rules import planned_world
from megakit.config.schema import Config
from megakit.errors import Refused


@dataclass(frozen=True)
class Resources:
    """All nodes alike, filled by the ranks of one job."""

    nodes: int
    ranks_per_node: int
    gpus: bool
    """Whether each rank takes a GPU."""

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node


def resources(cfg: Config) -> Resources:
    """Full nodes, or part of one. Raises Refused where the recipe doesn't say how many GPUs a node has, or they don't fit."""
    world, per_node = planned_world(cfg), cfg.cluster.gpus_per_node
    if per_node is None:
        if cfg.cluster.nodes == 1:
            raise Refused(
                f"cluster.gpus_per_node is null, {world} ranks could be on any number of nodes: use cluster=h100 or another of"
                " recipes/cluster, or give cluster.nodes and cluster.gpus_per_node"
            )
        per_node = -(-world // cfg.cluster.nodes)
    if world <= per_node:
        return Resources(1, world, cfg.launch.device != "cpu")
    if world % per_node:
        raise Refused(f"{world} ranks don't fill nodes of {per_node}: use a multiple, or another cluster.gpus_per_node")
    return Resources(world // per_node, per_node, cfg.launch.device != "cpu")


def time_to_save_s(cfg: Config) -> int:
    """Seconds from the request to stop until torchrun and Kubernetes kill ranks that have not ended: never below torch's own."""
    return max(cfg.launch.slurm.signal_lead_s, 30)
