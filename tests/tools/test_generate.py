"""The command: text on the terminal, alone and of several prompts; refusals in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megakit.errors import EXIT_DONE, EXIT_REFUSED
from tests.inference.test_load import hugging_face
from tests.tools.processes import modules_after, run_tool
from tools.generate import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("model"))


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([*map(str, arguments), "--device", "cpu"])
    return code, *capsys.readouterr()


def test_a_prompt_and_its_text(folder, capsys):
    code, out, err = run(capsys, "--checkpoint", folder, "--prompt", "the of", "--max-new-tokens", 9)
    assert code == EXIT_DONE and out.startswith("the of") and out.endswith("\n")
    first, last = err.splitlines()
    assert first == f"{folder}: llama, 143,680 parameters, fp32 on cpu, context 64"
    assert re.fullmatch(r"\d+ tokens read, 9 made in \d+\.\d\d s: [\d,.]+ tokens/s", last)
    assert run(capsys, "--checkpoint", folder, "--prompt", "the of", "--max-new-tokens", 9)[1] == out, "the same seed"
    assert run(capsys, "--checkpoint", folder, "--prompt", "the of", "--max-new-tokens", 9, "--seed", 1)[1] != out


def test_several_prompts_by_batches(folder, capsys, tmp_path):
    """Each has the text that it has alone with its seed; a file's lines come behind those of the command line."""
    (tmp_path / "prompts").write_text("in a is that for\nx\n")
    prompts = ["the of", "in a is that for", "x"]
    common = ("--checkpoint", folder, "--max-new-tokens", 8, "--top-k", 40, "--top-p", 0.9)
    alone = [run(capsys, *common, "--prompt", text, "--seed", 5 + i)[1] for i, text in enumerate(prompts)]
    for size in (1, 2, 16):
        code, out, err = run(
            capsys, *common, "--prompt", prompts[0], "--prompt-file", tmp_path / "prompts", "--seed", 5, "--batch-size", size
        )
        assert code == EXIT_DONE and out == "".join(f"{text}\n" for text in alone)
        assert "24 made" in err


def test_as_many_tokens_as_there_is_room_for(folder, capsys):
    code, _, err = run(capsys, "--checkpoint", folder, "--prompt", "the " * 40, "--temperature", 0)
    read, made = map(int, re.search(r"(\d+) tokens read, (\d+) made", err).groups())
    assert code == EXIT_DONE and 0 < made <= 64 - read


def test_it_stops_at_the_end_of_a_text(folder, capsys, tmp_path):
    """The token that greedy text has third is made an end."""
    _, free, _ = run(capsys, "--checkpoint", folder, "--prompt", "the of", "--temperature", 0, "--max-new-tokens", 12)
    from megakit.inference.generator import generate
    from megakit.inference.load import load
    from megakit.inference.sampling import Sampling

    model = load(folder, "cpu")
    tokens = [t for (t,) in generate(model.decoder, [model.encode("the of")], 12, Sampling(0.0), known=model.known)]
    end = tokens[2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    try:
        _, out, err = run(capsys, "--checkpoint", folder, "--prompt", "the of", "--temperature", 0, "--max-new-tokens", 12)
    finally:
        (folder / "generation_config.json").unlink()
    assert f"{tokens.index(end)} made" in err and free.startswith(out.rstrip("\n"))


def test_refusals_are_one_line(folder, capsys, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    for arguments, words in (
        ((), "there is no prompt: give --prompt TEXT"),
        (("--prompt-file", tmp_path / "empty"), "there is no prompt"),
        (("--prompt-file", tmp_path / "none"), "can't be read"),
        (("--prompt-file", tmp_path / "bytes"), "can't be read"),
        (("--prompt", "the", "--temperature", -1), "temperature = -1.0 must be 0"),
        (("--prompt", "the", "--top-p", 0), "top-p = 0.0 must be above 0"),
        (("--prompt", "the", "--batch-size", 0), "--batch-size 0 must be 1 or more"),
        (("--prompt", "the", "--max-new-tokens", 64), "ask for at most 63 new tokens"),
        (("--prompt", "the " * 64), "beyond the model's context of 64: shorten it"),
        (("--prompt", "the", "--max-new-tokens", 0), "the number of new tokens is 0"),
    ):
        code, out, err = run(capsys, "--checkpoint", folder, *arguments)
        assert code == EXIT_REFUSED and not out
        assert words in err.splitlines()[-1] and err.splitlines()[-1].startswith("generate: "), err
    code, _, err = run(capsys, "--checkpoint", tmp_path / "nothing", "--prompt", "the")
    assert code == EXIT_REFUSED and err.startswith("generate: there is no folder") and err.count("\n") == 1


def test_help_is_quick():
    assert "torch" not in modules_after("generate", "--help")
    done = run_tool("evaluate", "--help")
    assert done.returncode == 0 and "--model_args path=" in done.stdout


def test_when_nobody_reads_the_text(folder):
    """`| head` and terminals that lack a character: no traceback."""
    command = [
        sys.executable,
        str(Path(__file__).parents[2] / "tools" / "generate.py"),
        "--checkpoint",
        str(folder),
        "--device",
        "cpu",
    ]
    gone = subprocess.Popen([*command, "--prompt", "a"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    gone.stdout.close()
    error = gone.stderr.read()
    assert gone.wait() == 128 + signal.SIGPIPE and "Traceback" not in error
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(
        [*command, "--prompt", "\u00e9", "--max-new-tokens", "2"], env=ascii_only, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("?"), done.stderr
