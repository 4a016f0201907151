"""The same recipe as a JobSet of Kubernetes: one pod per node, torchrun in each, all started again together.

Kubernetes' jobset.x-k8s.io/v1alpha2 (JobSet 0.10 or newer, for the patterns in its failure policy).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from megakit.config.schema import Config
from megakit.errors import EXIT_ASKED_TO_STOP, NEVER_AGAIN, Refused
from megakit.submit.resources import Resources, resources, time_to_save_s
from megakit.submit.script import SubmissionFailed, arguments

PORT = 29500
_PODS = "ranks"
_POD_RULES = (
    {"onExitCodes": {"containerName": _PODS, "operator": "In", "values": list(NEVER_AGAIN)}},
    {"onExitCodes": {"containerName": _PODS, "operator": "In", "values": [EXIT_ASKED_TO_STOP]}},
    {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},  # preempted, drained, evicted
)
"""Each fails the Job, all for the reason PodFailurePolicy; only the message of the failure tells which: what other failures do,
as one of a rank, is BackoffLimitExceeded. A pod is never replaced alone: the others' ranks would fail without it."""
_SET_RULES = (
    {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": ["matching FailJob rule at index [12]$"],
    },
    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
)
"""The first that fits; without any the JobSet is started again, and that is counted."""


def manifest(cfg: Config, words: Sequence[str]) -> str:
    """The JobSet in YAML; `words` is the command line that composed the recipe. Raises Refused where something is missing."""
    return yaml.safe_dump(jobset(cfg, words), sort_keys=False, width=1000)


def jobset(cfg: Config, words: Sequence[str]) -> dict[str, Any]:
    """The JobSet as plain data."""
    _check(cfg)
    metadata: dict[str, Any] = {"name": cfg.run.name}
    if cfg.submit.kubernetes.namespace:
        metadata["namespace"] = cfg.submit.kubernetes.namespace
    size = resources(cfg)
    job = {
        "completionMode": "Indexed",
        "completions": size.nodes,
        "parallelism": size.nodes,
        "backoffLimit": 0,  # one pod alone can't go on: the JobSet starts all again
        "podFailurePolicy": {"rules": [{"action": "FailJob", **rule} for rule in _POD_RULES]},
        "template": {"spec": _pod(cfg, size, words)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": cfg.submit.max_attempts, "rules": [*_SET_RULES]},
            "replicatedJobs": [{"name": _PODS, "replicas": 1, "template": {"spec": job}}],
        },
    }


def submit(cfg: Config, text: str) -> Iterator[str]:
    """kubectl apply of the manifest; yields what to tell. Raises Refused without kubectl, SubmissionFailed where it fails."""
    if shutil.which("kubectl") is None:
        raise Refused("kubectl is not on the PATH: print the manifest with submit.render_only=true")
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise SubmissionFailed(f"kubectl: {' '.join((done.stderr or done.stdout).split())}")
    yield f"{done.stdout.strip()}; logs: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={cfg.run.name}"


def _pod(cfg: Config, job: Resources, words: Sequence[str]) -> dict[str, Any]:
    kubernetes = cfg.submit.kubernetes
    port = cfg.log.prometheus_port if cfg.log.prometheus else 0
    cpus = cfg.launch.slurm.cpus_per_task * job.ranks_per_node
    limits: dict[str, Any] = {"nvidia.com/gpu": job.ranks_per_node} if job.gpus else {}
    torchrun = [
        *(cfg.submit.python or "python", "-m", "megakit.launch.torchrun"),
        *(f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks_per_node}", "--max-restarts=0"),
        *(f"--master-addr={cfg.run.name}-{_PODS}-0-0.{cfg.run.name}", f"--master-port={PORT}"),
        f"--shutdown-timeout={time_to_save_s(cfg)}",
    ]
    ranks = ["-m", "megakit.pretrain", *arguments(words), f"run.dir={cfg.run.dir or f'runs/{cfg.run.name}'}"]
    lines = [*cfg.submit.setup, f'exec {shlex.join(torchrun)} --node-rank="$JOB_COMPLETION_INDEX" {shlex.join(ranks)}']
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": time_to_save_s(cfg),
        "containers": [
            {
                "name": _PODS,
                "image": cfg.submit.container.image,
                "workingDir": kubernetes.mount,
                "command": ["bash", "-c", _literal("\n".join(lines))],
                "env": [{"name": k, "value": _literal(v)} for k, v in sorted((cfg.cluster.env or {}).items())],
                **({"ports": [{"name": "metrics", "containerPort": port}]} if port else {}),
                "resources": {"requests": {"cpu": cpus, **limits}, "limits": limits},
                "volumeMounts": [
                    {"name": "work", "mountPath": kubernetes.mount},
                    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's, within the pod
                ],
            }
        ],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _literal(text: str) -> str:
    """Kubernetes puts variables in the place of $(NAME), and takes $$( for $(."""
    return text.replace("$(", "$$(")


def _check(cfg: Config) -> None:
    name, submit = cfg.run.name, cfg.submit
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise Refused(f"run.name = {name} can't name a JobSet: use up to 40 small letters, digits and '-'")
    for key, value in (("container.image", submit.container.image), ("kubernetes.claim", submit.kubernetes.claim)):
        if value is None:
            raise Refused(f"submit.target = kubernetes needs submit.{key}, which is null: give it")
    for key, given in (("sweep", submit.sweep), ("modules", submit.modules), ("container.mounts", submit.container.mounts)):
        if given:
            raise Refused(f"submit.{key} is given, and submit.target = kubernetes has no such thing: leave it out")
    if submit.chain != 1 or submit.container.runtime != "pyxis":
        raise Refused("submit.chain and submit.container.runtime are Slurm's: leave them out with submit.target = kubernetes")
