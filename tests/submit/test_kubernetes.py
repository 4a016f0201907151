"""The JobSet of a recipe, held against Kubernetes' own schemas, and its command run with stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from megakit.config.compose import compose
from megakit.errors import Refused
from megakit.submit.kubernetes import jobset, manifest

NEEDS = ["submit.target=kubernetes", "submit.container.image=nvcr.io/nvidia/pytorch:25.09-py3", "submit.kubernetes.claim=work"]
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str},
    "spec": {
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": str, "onJobFailureReasons": [str], "onJobFailureMessagePatterns": [str]}],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": dict}}],
    },
}
"""The fields of jobset.x-k8s.io/v1alpha2 that are used, and their types; below template it is a Job of batch/v1."""


def made(*overrides: str, name: str = "llama70b") -> dict:
    words = [f"+recipe={name}", *NEEDS, *overrides]
    return yaml.safe_load(manifest(compose(words), words))


def fits(value: object, schema: object) -> bool:
    if isinstance(schema, dict):
        return isinstance(value, dict) and set(value) <= set(schema) and all(fits(v, schema[k]) for k, v in value.items())
    if isinstance(schema, list):
        return isinstance(value, list) and all(fits(v, schema[0]) for v in value)
    return isinstance(value, schema)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama7b", "llama70b"])
def test_it_fits_the_schemas(name):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'megakit[test]'")
    got = made("submit.kubernetes.namespace=team", "cluster.env={A: 'x y'}", "log.prometheus=true", name=name)
    assert fits(got, JOBSET) and not fits({**got, "spec": {**got["spec"], "other": 1}}, JOBSET)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
    job["spec"] = got["spec"]["replicatedJobs"][0]["template"]["spec"]
    validate.validate(job, "1.29", strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.29", strict=True)


def test_a_pod_for_each_node_and_a_rank_for_each_gpu():
    job = made()["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (64, 64, "Indexed", 0)
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": 96, "nvidia.com/gpu": 8},
        "limits": {"nvidia.com/gpu": 8},
    }
    assert pod["terminationGracePeriodSeconds"] == 600
    assert "--max-restarts=0 " in pod["containers"][0]["command"][-1]  # JobSet starts all again


@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [
        *((code, disrupted, "FailJobSet") for code in (2, 3, 4) for disrupted in (False, True)),
        (75, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (75, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),  # not saved in time
        *((code, False, "RestartJobSet") for code in (1, 74, 137)),  # the default, which is counted
    ],
)
def test_what_follows_when_a_pod_ends(code: int, disrupted: bool, action: str):
    """As the Job controller matches a pod, words its failure, and JobSet matches that."""
    spec = made()["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", []):
            message = f"Container ranks for pod default/x failed with exit code {code} matching FailJob rule at index {index}"
        elif disrupted and "onPodConditions" in rule:
            message = f"Pod default/x has condition DisruptionTarget matching FailJob rule at index {index}"
        else:
            continue
        assert rule["action"] == "FailJob"
        reason = "PodFailurePolicy"
        break
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            assert rule["action"] == action
            return
    assert action == "RestartJobSet"


def test_the_command_reaches_torchrun_as_it_was_given(tmp_path: Path):
    odd = 'train.generate_prompt=it\'s "$HOME" `id`'
    env_key = "cluster.env={A: 'x $(B) y'}"
    got = made(odd, "submit.setup=['export FROM_SETUP=$(echo 1)']", env_key)
    container = got["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["env"] == [{"name": "A", "value": "x $$(B) y"}]
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@" "setup=$FROM_SETUP"\n')
    (tmp_path / "python").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "5"}
    assert "$(" not in container["command"][2].replace("$$(", "")
    command = [word.replace("$$(", "$(") for word in container["command"]]  # as Kubernetes does
    out = subprocess.run(command, env=env, capture_output=True, text=True).stdout.splitlines()
    assert out[:2] == ["-m", "megakit.launch.torchrun"] and "--node-rank=5" in out and out[-1] == "setup=1"
    assert "--master-addr=llama70b-ranks-0-0.llama70b" in out and {"--nnodes=64", "--nproc-per-node=8"} <= set(out)
    assert out[out.index("megakit.pretrain") + 1 : -1] == ["+recipe=llama70b", odd, env_key, "run.dir=runs/llama70b"]


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["run.name=A_b"], ["run.name = A_b", "small letters"]),
        (["submit.container.image=null"], ["submit.container.image", "null"]),
        (["submit.kubernetes.claim=null"], ["submit.kubernetes.claim", "null"]),
        (["submit.sweep=['optim.lr=1e-4,2e-4']"], ["submit.sweep", "kubernetes"]),
        (["submit.kubernetes.mount='a b'"], ["submit.kubernetes.mount", "absolute path"]),
        (["submit.target=slurm"], ["submit.kubernetes.claim", "submit.target = slurm"]),
    ],
)
def test_what_cannot_be_a_jobset(overrides, words):
    with pytest.raises(Refused) as refused:
        made(*overrides)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    "keys, ports",
    [
        ([], None),
        (["log.prometheus=true", "log.prometheus_port=9000"], [{"name": "metrics", "containerPort": 9000}]),
        (["log.prometheus=true", "log.prometheus_port=0"], None),  # chosen at the start: nothing to declare
    ],
)
def test_prometheus_finds_the_port_by_its_name(keys, ports):
    pod = made(*keys)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0].get("ports") == ports


def test_it_is_plain_data():
    words = ["+recipe=llama7b", *NEEDS]
    assert yaml.safe_load(manifest(compose(words), words)) == json.loads(json.dumps(jobset(compose(words), words)))
