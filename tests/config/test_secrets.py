"""A recipe with a secret is refused before anything is saved, and the refusal doesn't have it."""

from __future__ import annotations

import pytest

from megakit.config.compose import compose
from megakit.errors import Refused

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)


@pytest.mark.parametrize(
    "override, words",
    [
        ("run.dir=${oc.env:WANDB_API_KEY}", "run.dir has the value of WANDB_API_KEY"),
        (f"log.wandb_project={SECRET}", "log.wandb_project has the value of WANDB_API_KEY"),
        ("data.path=['x/${oc.env:WANDB_API_KEY}/y']", "data.path has the value of WANDB_API_KEY"),
        ("cluster.env={A: '${oc.env:WANDB_API_KEY}'}", "cluster.env has the value of WANDB_API_KEY"),
        ("cluster.env={https_proxy: 'http://me:word@proxy:80'}", "cluster.env has a password in a URL"),
        ("cluster.env={AWS_SESSION_TOKEN: x}", "cluster.env has AWS_SESSION_TOKEN, which looks like a secret"),
        ("submit.setup=['export HF_TOKEN=abcdefghij']", "submit.setup has what looks like the value of HF_TOKEN"),
        ("checkpoint.init_from='https://host/x?sig=abcdef'", "checkpoint.init_from has a signature or token in a URL"),
        ("submit.container.image='docker://me:word@host/image'", "submit.container.image has a password in a URL"),
    ],
)
def test_refused_without_saying_it(override, words):
    with pytest.raises(Refused) as refused:
        compose(["+recipe=demo", override])
    line = str(refused.value)
    assert words in line and "export it in your shell" in line
    assert not any(secret in line for secret in (SECRET, "word@", "abcdef"))


def test_a_word_that_the_environment_calls_a_key(monkeypatch):
    monkeypatch.setenv("SORT_KEY", "transformer_large")
    with pytest.raises(Refused, match=r"run\.name has the value of SORT_KEY.*if it is no secret, unset SORT_KEY"):
        compose(["+recipe=demo", "run.name=transformer_large"])


def test_what_a_recipe_may_have(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    cfg = compose(
        [
            "+recipe=demo",
            "run.dir='${oc.env:SCRATCH}/run'",
            "submit.setup=['export HF_TOKEN=\"$MINE\"','source ~/keys']",
            "cluster.env={NCCL_DEBUG: INFO, GOOGLE_APPLICATION_CREDENTIALS: /keys/x.json}",
            "submit.container.image='docker://$oauthtoken@host#team/image:1'",
        ]
    )
    assert cfg.run.dir == f"{tmp_path}/run"
