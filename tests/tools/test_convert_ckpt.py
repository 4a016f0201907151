"""The command: checkpoints to Hugging Face folders, and a look into both."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece
import torch
import yaml

from megakit.parallel.grid import Grid
from tests.checkpoint import hf_models, workers
from tests.checkpoint.hf_models import files, same_bytes, write
from tests.checkpoint.test_weights import with_tokenizer
from tests.tools.processes import modules_after
from tools.convert_ckpt import _bytes, convert_parser, inspect_parser, main

DP2_TP2 = Grid(dp=2, tp=2)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """CV2: 101 pieces, with the special ones at other ids than usual."""
    return trained(tmp_path_factory.mktemp("tokenizer"))


def trained(folder: Path, **options: bool) -> Path:
    words = [f"{a}{b}{c}" for a in "abcde" for b in "fghij" for c in "klmno"]
    (folder / "text").write_text("\n".join(" ".join(words[i:] + words[:i]) for i in range(len(words))))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "t"), vocab_size=101, model_type="bpe",
        bos_id=0, eos_id=1, unk_id=2, pad_id=3, normalization_rule_name="identity", minloglevel=2, **options,
    )  # fmt: skip
    return folder / "t.model"


def checkpoint(pools, tmp_path, model, cfg, grid=DP2_TP2, tokenizer=None) -> Path:
    cfg.train.seq_len = 32
    write(model, tmp_path / "in")
    pools(grid.world).run(workers.save_weights_of, tmp_path / "in", cfg, tmp_path / "checkpoints", grid, tokenizer)
    return tmp_path / "checkpoints" / "step_00000010"


@pytest.mark.parametrize("case", ["llama", "llama tied", "gpt2"])
def test_export_gives_the_imported_bytes(pools, tmp_path, capsys, case):
    """From a TP 2, DP 2 checkpoint with flat shards."""
    if case == "gpt2":
        (model, cfg), grid = hf_models.gpt2(), Grid(dp=2, pp=2)
    else:
        (model, cfg), grid = hf_models.llama(tie="tied" in case), DP2_TP2
    path = checkpoint(pools, tmp_path, model, cfg, grid)
    assert main(["--to", "hf", str(path), str(tmp_path / "out")]) == 0
    before, after = files(tmp_path / "in"), files(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same_bytes(tensor, after[name]) for name, tensor in before.items())
    said = capsys.readouterr().out
    assert said.startswith(f"{path} written to {tmp_path / 'out'}: hf, {cfg.model.family}, fp32, 0.") and "1 file(s)" in said


def test_export_in_shards(pools, tmp_path):
    model, cfg = hf_models.llama(dtype=torch.bfloat16)
    path = checkpoint(pools, tmp_path, model, cfg)
    assert (
        main(
            ["--from", "megakit", "--to", "hf", str(path), str(tmp_path / "out"), "--dtype", "bf16", "--max-shard-size", "100kB"]
        )
        == 0
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 3
    assert all(same_bytes(tensor, files(tmp_path / "out")[name]) for name, tensor in files(tmp_path / "in").items())


def test_special_tokens(pools, tmp_path, capsys, tokenizer):
    """CV2: the ids of the tokenizer that the model was trained with, everywhere, and its file unchanged."""
    model, cfg = hf_models.llama()
    path = checkpoint(pools, tmp_path, model, cfg, tokenizer=tokenizer)
    export = ["--to", "hf", str(path), str(tmp_path / "out")]
    assert main(export) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 3)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (0, 1, 3)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tokenizer.read_bytes()

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id) == (0, 1, 2, 3)
    assert theirs("afk bgl").input_ids == pieces.encode("afk bgl")

    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tokenizer"]["eos"] = 2
    (path / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main([*export[:-1], str(tmp_path / "again")]) == 2
    assert f"was trained with eos = 2, the tokenizer {tokenizer} has 1" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_transformers_adds_no_space_where_the_tokenizer_adds_none(pools, tmp_path):
    """megakit's own tokenizers put no space before a text; transformers does unless the folder says otherwise."""
    from transformers import AutoTokenizer

    file = trained(tmp_path, add_dummy_prefix=False, remove_extra_whitespaces=False)
    model, cfg = hf_models.llama()
    path = checkpoint(pools, tmp_path, model, cfg, tokenizer=file)
    assert main(["--to", "hf", str(path), str(tmp_path / "out")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for text in ("afk bgl", "afk", "", "  afk", " bgl  afk "):
        assert theirs(text).input_ids == pieces.encode(text), text
        assert theirs.decode(pieces.encode(text)) == text


def test_a_folder_that_is_no_checkpoint(pools, tmp_path, capsys):
    model, cfg = hf_models.llama()
    path = checkpoint(pools, tmp_path, model, cfg)
    wrong = {
        path.parent: f"{path.parent} is a folder of checkpoints: give one of them, as {path}",
        path.parent / "step_00000011": f"there is no folder {path.parent}/step_00000011: give {path}",
        tmp_path / "none": f"there is no folder {tmp_path}/none: give one with weights",
    }
    for folder, message in wrong.items():
        assert main(["--to", "hf", str(folder), str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


def test_tokenizer_refusals(pools, tmp_path, capsys, tokenizer):
    model, cfg = hf_models.llama()
    moved = tmp_path / "moved.model"
    moved.write_bytes(tokenizer.read_bytes())
    path = checkpoint(pools, tmp_path, model, cfg, tokenizer=moved)
    moved.unlink()
    export = ["--to", "hf", str(path), str(tmp_path / "out")]
    assert main(export) == 2
    assert f"there is no tokenizer {moved}: give the file by --tokenizer" in capsys.readouterr().err
    moved.write_bytes(b"other")
    assert main(export) == 2
    assert "moved.model" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*export, "--tokenizer", "none"]) == 0
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    assert main([*export[:-1], str(tmp_path / "second"), "--tokenizer", str(tokenizer)]) == 0


@pytest.mark.parametrize("what", ["damaged", "output", "size", "missing"])
def test_export_refusals(pools, tmp_path, capsys, what):
    model, cfg = hf_models.llama()
    path = checkpoint(pools, tmp_path, model, cfg)
    out, size = tmp_path / "out", "5GB"
    if what == "damaged":
        shard = path / "__1_0.distcp"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    if what == "output":
        out.mkdir()
        (out / "mine").write_text("")
    size = "lots" if what == "size" else "5GB"
    path = path.with_name("step_00000011") if what == "missing" else path
    assert main(["--to", "hf", str(path), str(out), "--max-shard-size", size]) == 2
    said = {
        "damaged": "__1_0.distcp has checksum",
        "output": "is there already",
        "size": "lots is no size",
        "missing": f"there is no folder {path}: give {path.with_name('step_00000010')}",
    }
    error = capsys.readouterr().err
    assert said[what] in error and error.startswith("error: ") and error.count("\n") == 1
    assert what == "output" or not out.exists()


def test_inspect_checkpoints(pools, tmp_path, capsys, tokenizer):
    model, cfg = hf_models.llama()
    path = checkpoint(pools, tmp_path, model, cfg, tokenizer=tokenizer)
    parameters = sum(t.numel() for t in files(tmp_path / "in").values())
    for target in (path, path.parent):
        assert main(["inspect", str(target)]) == 0
        heading, row = capsys.readouterr().out.splitlines()[:2]
        assert heading.split() == ["step", "saved", "tokens", "parameters", "files", "size", "state"]
        cells = row.split()
        assert (cells[0], cells[2], cells[3], cells[4], cells[-1]) == ("10", "1,280", f"{parameters:,}", "6", "intact")
    main(["inspect", str(path)])
    out = capsys.readouterr().out
    assert "written by 4 rank(s) with megakit" in out and "bos 0, eos 1, unk 2, pad 3" in out and "  num_layers: 2\n" in out
    (path / "state.json").write_text("{}")
    assert main(["inspect", str(path.parent)]) == 2
    captured = capsys.readouterr()
    assert "damaged" in captured.out and f"{path / 'state.json'} has 3 bytes" not in captured.err
    assert f"{path / 'state.json'} has 2 bytes" in captured.err


def test_inspect_hugging_face(tmp_path, capsys):
    """What a recipe must say to start from the folder."""
    model, _ = hf_models.llama(6, 2)
    write(model, tmp_path / "in")
    assert main(["inspect", str(tmp_path / "in")]) == 0
    out = capsys.readouterr().out
    for line in ("family: llama", "num_query_groups: 2", "rotary_base: 500000.0", "tie_embeddings: false", "norm_epsilon: 1e-06"):
        assert f"  {line}\n" in out
    assert yaml.safe_load(out[out.index("model:") :])["model"]["kv_channels"] is None
    (tmp_path / "in" / "model.safetensors").write_bytes(b"")
    assert main(["inspect", str(tmp_path / "in")]) == 2
    for empty in (tmp_path, tmp_path / "nowhere"):
        assert main(["inspect", str(empty)]) == 2


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("100kB", 100_000), ("1.5 GiB", 3 << 29), ("12", 12)])
def test_sizes(text, size):
    assert _bytes(text) == size


def test_as_a_command(tmp_path):
    script = Path(__file__).parents[2] / "tools" / "convert_ckpt.py"
    done = subprocess.run([sys.executable, script, "inspect", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path} has no weights")
    assert subprocess.run([sys.executable, script, tmp_path, tmp_path / "out"], capture_output=True).returncode == 2


def test_commands_in_the_docs():
    """They parse; what they do is tested above."""
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    commands = re.findall(r"^ +\$ python tools/convert_ckpt\.py (.+)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        words = command.split()
        inspect_parser().parse_args(words[1:]) if words[0] == "inspect" else convert_parser().parse_args(words)


def test_a_tokenizer_json_that_a_run_was_trained_with(pools, tmp_path):
    """It goes along with the files beside it; transformers gives the ids that the training data has."""
    from transformers import AutoTokenizer

    from megakit.data.tokenizer import load_tokenizer

    model, cfg = hf_models.llama()
    beside = tmp_path / "tokenizer"
    beside.mkdir()
    (beside / "config.json").write_text("{}")
    path = checkpoint(pools, tmp_path, model, cfg, tokenizer=with_tokenizer(beside) / "tokenizer.json")
    assert main(["--to", "hf", str(path), str(tmp_path / "out")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (beside / name).read_bytes()
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(beside / "tokenizer.json")
    assert theirs("a b a", add_special_tokens=False).input_ids == ours.encode("a b a")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (ours.bos, ours.eos, ours.pad) == (1, 2, 4)


def test_a_tokenizer_json_alone(tmp_path):
    """Without files beside it its configuration is made: the ends of documents are eos."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    library = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1, "?": 2}, unk_token="?"))
    library.save(str(tmp_path / "words.json"))
    model, _ = hf_models.llama()
    write(model, tmp_path / "in")
    assert main(["--to", "hf", "--tokenizer", str(tmp_path / "words.json"), str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a").input_ids == [0] and theirs.unk_token_id == 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 1


def test_verify(tmp_path, capsys, monkeypatch):
    """A difference above the tolerance is exit code 1, without a folder; a model too large to run is refused before."""
    from megakit.inference import compare

    model, _ = hf_models.llama()
    write(model, tmp_path / "in")
    command = ["--to", "megakit", "--verify", "--dtype", "bf16", str(tmp_path / "in"), str(tmp_path / "out")]
    assert main([*command, "--tolerance", "1e-6"]) == 1
    assert "differ: largest difference" in capsys.readouterr().err
    assert main(command) == 0
    numbers = r"largest difference (\S+) of logits up to (\S+), allowed (\S+); loss (\S+) by transformers, (\S+) by megakit"
    said = re.match(f"verified: {numbers}; 1 x 32 random tokens\n", capsys.readouterr().out)
    assert said is not None
    difference, largest, allowed, theirs, ours = map(float, said.groups())
    with torch.no_grad():
        tokens = torch.randint(101, (1, 32), generator=torch.Generator().manual_seed(0))
        logits, rounded = model(tokens).logits, model.bfloat16().float()(tokens).logits
    assert largest == pytest.approx(logits.abs().max().item(), rel=0.01) and allowed == pytest.approx(largest / 8, rel=0.03)
    assert difference == pytest.approx((logits - rounded).abs().max().item(), rel=0.05)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).item()
    assert theirs == pytest.approx(loss, abs=1e-5) and ours != theirs
    monkeypatch.setattr(compare, "_available", lambda: 1000)
    assert main([*command[:-1], str(tmp_path / "again")]) == 2
    assert "that needs 0.0 GB of memory" in capsys.readouterr().err and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from", "megatron"], "--from megatron, but {path} is of hf"),
        (["--vocab-size", "101"], "--vocab-size 101 is for a SRC of Megatron-LM"),
        (["--verify", "--tolerance", "nan"], "--tolerance nan must be 0 or more"),
        (["--tolerance", "1"], "--tolerance belongs to --verify"),
        (["--tokenizer", "nowhere"], "there is no tokenizer nowhere"),
    ],
)
def test_options_that_do_not_fit(tmp_path, capsys, options, said):
    model, _ = hf_models.llama()
    path = write(model, tmp_path / "in")
    assert main(["--to", "megakit", *options, str(path), str(tmp_path / "out")]) == 2
    assert said.format(path=path) in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_places_that_cannot_be_a_new_folder(tmp_path, capsys, monkeypatch):
    """Said before anything is written."""
    model, _ = hf_models.llama()
    path = write(model, tmp_path / "in")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "to_empty").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    for target in (path, tmp_path / "link", tmp_path / "to_empty", path / "config.json", path / "config.json" / "x", ".", ".."):
        assert main(["--to", "hf", str(path), str(target)]) == 2, target
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and ("is there already" in error or "there can't be a folder" in error), error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_conversion_that_is_stopped(tmp_path, number):
    """By Ctrl-C or a job's end in the middle: nothing is left, neither under DST nor beside it."""
    model, _ = hf_models.llama()
    path = write(model, tmp_path / "in")
    slow = "import time, megakit.checkpoint.safetensors_files as s; f = s.write_all"
    slow += "; s.write_all = lambda file, data: (time.sleep(0.2), f(file, data))"
    script = Path(__file__).parents[2] / "tools" / "convert_ckpt.py"
    run = f"{slow}; import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", run, script, "--to", "megakit", path, tmp_path / "out"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".out.tmp-*/weights*")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number and error == f"error: stopped by {number.name}: nothing is left of it\n"
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_when_nobody_reads_what_is_inspected(tmp_path):
    model, _ = hf_models.llama()
    command = [sys.executable, Path(__file__).parents[2] / "tools" / "convert_ckpt.py", "inspect", write(model, tmp_path / "in")]
    gone = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    gone.stdout.close()
    assert (gone.stderr.read(), gone.wait()) == ("", 128 + signal.SIGPIPE)


def test_help_does_not_import_torch():
    assert "torch" not in modules_after("convert_ckpt", "--help")
