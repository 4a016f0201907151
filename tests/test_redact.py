"""Secrets are recognised by the names of variables, by where they stand in URLs, and by their own form."""

from __future__ import annotations

import signal

import pytest

from megakit.errors import Refused
from megakit.redact import names_a_secret, printable, redact, secret_in, secret_in_shell
from tools import generate


@pytest.fixture(name="time_limit")
def limited_time():
    """Of the processor; what takes time by the square of the length would take minutes."""

    def over(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, 10)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


ENV = {"WANDB_API_KEY": "0123456789abcdef0123", "TOKEN_FILE": "/home/me/token", "HOME": "/home/somebody", "PIN_TOKEN": "short"}


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "aws_session_token",
        "DB_PASSWORD",
        "KEY",
        "SLACK_WEBHOOK",
        "api-key",
        "PGPASSWORD",
        "MYSQL_PWD",
        "SSHPASS",
        "SLURM_JWT",
        "WANDBAPIKEY",
        "OPENAI_KEY2",
        "COOKIE",
    ],
)
def test_names_of_secrets(name):
    assert names_a_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "TOKENIZERS_PARALLELISM",
        "NCCL_IB_HCA",
        "MONKEY",
        "PATH",
        "MAX_TOKENS",
        "KEYBOARD",
        "WANDB_IDENTITY_TOKEN_FILE",
        "HF_TOKEN_PATH",
        "OLDPWD",
        "NVSHMEM_BYPASS",
    ],
)
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
        ("no user hf_abcdEfghijklm0pqrstuvwx here", "no user *** here"),
        ("key ghp_0123456789abcdefghij0123, AKIAABCDEFGHIJKLMNOP", "key ***, ***"),
        ("-H 'Authorization: Bearer abcdefgh'", "-H 'Authorization: Bearer ***'"),
        ("sk-proj-Abcdefghij0123456789, eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "***, ***"),
        (
            "sk-learn-baseline-run-number-2, hf_transferencebenchmarkruns",
            "sk-learn-baseline-run-number-2, hf_transferencebenchmarkruns",
        ),
        ("/home/me/token and /home/somebody/short stay", "/home/me/token and /home/somebody/short stay"),
    ],
)
def test_redacted(text, told):
    assert redact(text, ENV) == told
    assert (secret_in(text, ENV) is None) == (text == told)


def test_values_as_they_may_be_written():
    """In a URL, in a traceback's repr; one that another is a part of; a number is no secret."""
    env = {"A_KEY": "word/one+two", "B_KEY": "word/one+two\\more", "TOKEN_BUDGET": "300000000000"}
    assert redact("?q=word%2Fone%2Btwo word/one%2Btwo, 300000000000 tokens", env) == "?q=*** ***, 300000000000 tokens"
    assert redact("at /data/team/key.json", {"MY_SECRET": "/data/team/key.json"}) == "at /data/team/key.json"
    assert redact("no eightday here", {"MY_SECRET": "eightday"}) == "no *** here"
    assert secret_in("eightday", {"MY_SECRET": "eightday"}) is None  # a recipe may have such a word
    assert redact(f"{env['B_KEY']} {env['B_KEY']!r}", env) == "*** '***'"


@pytest.mark.parametrize(
    "text", ["login " * 20_000, "key=" * 20_000, "--a-" * 20_000, "eyJ-" * 20_000, "sk-" * 20_000, "://a" * 20_000]
)
def test_long_texts_take_no_longer_than_their_length(text, time_limit):
    redact(text, {})
    secret_in_shell(text)


@pytest.mark.parametrize(
    "line, found",
    [
        ("wandb login --relogin 0123456789abcdef0123456789abcdef01234567", "what looks like a key for a login"),
        ('docker login registry-of-the-whole-team-2.example.com; wandb login "$KEY"', None),
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
