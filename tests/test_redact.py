"""Secrets are recognised by the names of variables, by where they stand in URLs, and by their own form."""

from __future__ import annotations

import pytest

from megakit.errors import Refused
from megakit.redact import names_a_secret, printable, redact, secret_in, secret_in_shell
from tools import generate

ENV = {"WANDB_API_KEY": "0123456789abcdef0123", "TOKEN_FILE": "/home/me/token", "HOME": "/home/somebody", "PIN_TOKEN": "short"}


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "aws_session_token", "DB_PASSWORD", "KEY", "SLACK_WEBHOOK", "api-key"],
)
def test_names_of_secrets(name):
    assert names_a_secret(name)


@pytest.mark.parametrize("name", ["PWD", "TOKENIZERS_PARALLELISM", "NCCL_IB_HCA", "MONKEY", "PATH", "MAX_TOKENS", "KEYBOARD"])
def test_names_of_others(name):
    assert not names_a_secret(name)


@pytest.mark.parametrize(
    "text, told",
    [
        ("login with 0123456789abcdef0123 failed", "login with *** failed"),
        ("https://me:pass@host/x.jsonl can't be read", "https://me:***@host/x.jsonl can't be read"),
        ("https://abcdefghij0123456789@host/x", "https://***@host/x"),
        ("s3://me@bucket/x and a@b.c", "s3://me@bucket/x and a@b.c"),
        (
            "https://host/x.gz?X-Amz-Date=1&X-Amz-Signature=abc123&X-Amz-Expires=5: 403",
            "https://host/x.gz?X-Amz-Date=1&X-Amz-Signature=***&X-Amz-Expires=5: 403",
        ),
        ("https://host/x?page=2&token=abc#top", "https://host/x?page=2&token=***#top"),
        ("no user hf_abcdefghijklmnopqrstuvwx here", "no user *** here"),
        ("key ghp_0123456789abcdefghij0123, AKIAABCDEFGHIJKLMNOP", "key ***, ***"),
        ("/home/me/token and /home/somebody/short stay", "/home/me/token and /home/somebody/short stay"),
    ],
)
def test_redacted(text, told):
    assert redact(text, ENV) == told
    assert (secret_in(text, ENV) is None) == (text == told)


@pytest.mark.parametrize(
    "line, found",
    [
        ("export WANDB_API_KEY=0123456789", "what looks like the value of WANDB_API_KEY"),
        ("huggingface-cli login --token 'abcdefghij'", "what looks like the value of --token"),
        ("--export=ALL,HF_TOKEN=abcdefghij", "what looks like the value of HF_TOKEN"),
        ('export HF_TOKEN="$MINE"; export B=$(cat ~/.key)', None),
        ("export HF_TOKEN=$(cat /secrets/hf)", None),
        ("export GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json", None),
        ("source ~/keys.sh", None),
        ("export NCCL_DEBUG=INFO_AND_MORE", None),
    ],
)
def test_lines_of_a_shell(line, found):
    assert secret_in_shell(line) == found


def test_what_a_terminal_would_act_upon_is_shown():
    text = "a \x1b]0;owned\x07 \u202e\udc80 é\n\tb"
    assert printable(text) == "a \\x1b]0;owned\\x07 \\u202e\\udc80 é\n\tb"
    assert str(Refused(text)) == printable(text)


def test_refusals_have_no_secrets(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", ENV["WANDB_API_KEY"])
    assert str(Refused(f"x {ENV['WANDB_API_KEY']} https://a:b@c")) == "x *** https://a:***@c"


def test_a_model_that_speaks_to_the_terminal(monkeypatch, capsys):
    """Elsewhere its words are passed on as they are."""
    for terminal, said in ((True, "a\\x1b[31m é\n"), (False, "a\x1b[31m é\n")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        generate._print("a\x1b[31m é\n")
        assert capsys.readouterr().out == said
