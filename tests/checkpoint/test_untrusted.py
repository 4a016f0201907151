"""Checkpoints and weights made to do harm: nothing in them is run, read from elsewhere, or allowed to fill the memory. Each is
refused in one line."""

from __future__ import annotations

import argparse
import gc
import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from megakit.checkpoint.dcp_files import read_index
from megakit.checkpoint.torch_files import load_lazy, read_pickle
from megakit.checkpoint.weights import open_weights
from megakit.errors import Refused
from tests.checkpoint import hf_models, layouts, workers
from tests.checkpoint.hf_models import write
from tests.limits import memory_limit
from tools import convert_ckpt, generate

NAME = "master.embedding.word.weight"


class Runs:
    """Pickled as a call that makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """What must not be there at the end."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists(), "something in a file was run"


@pytest.fixture(name="memory_limit")
def limited_memory():
    with memory_limit(2 << 30):
        yield


@pytest.fixture
def step(pools, tmp_path):
    """A training step, and the configuration of its model."""
    cfg = layouts.llama()
    pools(1).run(workers.save_layout, cfg, workers.Grid(), 0, tmp_path)
    folder = tmp_path / "step_00000005"
    vouched(folder, config={"model": vars(cfg.model), "optim": {}})
    return folder, cfg


def vouched(folder: Path, **changes: Any) -> None:
    """Whoever changes a file can change the manifest, too."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    for path in folder.iterdir():
        if path.name != "manifest.json":
            data = path.read_bytes()
            manifest["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def index_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def tampered(folder: Path, index: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    vouched(folder)


def outcomes(pools, folder, cfg, tmp_path, capfd):
    """What a resume and every tool say of it: each in one line, with exit code 2."""
    (resumed,) = pools(1).run(workers.try_load_layout, cfg, folder)
    said = [resumed]
    assert resumed.startswith(f"can't load {folder}: {folder}/.metadata") and "rank" not in resumed
    for main, argv in (
        (convert_ckpt.main, ["--to", "hf", str(folder), str(tmp_path / "out")]),
        (convert_ckpt.main, ["--to", "megakit", str(folder), str(tmp_path / "out")]),
        (generate.main, ["--checkpoint", str(folder), "--prompt", "x"]),
    ):
        capfd.readouterr()
        assert main(argv) == 2
        said.append(capfd.readouterr().err.rstrip("\n"))
    for line in said:
        assert line.count("\n") == 0 and ".metadata" in line, line
    return said


def test_the_index_of_a_step_is_not_run(pools, step, mark, tmp_path, capfd):
    folder, cfg = step
    index = index_of(folder)
    index.state_dict_metadata = Runs(mark)
    tampered(folder, index)
    assert all("is no index of torch.distributed.checkpoint" in line for line in outcomes(pools, folder, cfg, tmp_path, capfd))


def test_what_nobody_asks_for_in_an_index_is_left_out(pools, step, mark):
    """A step whose tensors are all right loads, and what else its index would do is not done."""
    folder, cfg = step
    index = index_of(folder)
    index.planner_data = {"x": Runs(mark)}
    tampered(folder, index)
    assert pools(1).run(workers.load_layout, cfg, workers.Grid(), 0, folder) == [[]]
    assert open_weights(folder).model == cfg.model


def test_bytes_in_place_of_a_tensor_are_not_loaded(pools, step, mark):
    """DCP unpickles an entry that its index calls bytes."""
    folder, cfg = step
    (folder / "x.distcp").write_bytes(b"")
    torch.save(Runs(mark), folder / "x.distcp")
    index = index_of(folder)
    index.state_dict_metadata[NAME] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(NAME)] = _StorageInfo("x.distcp", 0, (folder / "x.distcp").stat().st_size)
    tampered(folder, index)
    (said,) = pools(1).run(workers.try_load_layout, cfg, folder)
    assert NAME in said and "\n" not in said
    with pytest.raises(Refused, match=r"has no tensor embedding\.word\.weight"):
        open_weights(folder)


def test_a_piece_that_is_no_tensor_is_not_loaded(pools, step, mark, tmp_path, capfd):
    folder, cfg = step
    index = index_of(folder)
    info = next(i for key, i in index.storage_data.items() if key.fqn == NAME)
    data = io.BytesIO()
    torch.save(Runs(mark), data)
    path = folder / info.relative_path
    info.offset, info.length = path.stat().st_size, len(data.getvalue())
    path.write_bytes(path.read_bytes() + data.getvalue())
    tampered(folder, index)
    (said,) = pools(1).run(workers.try_load_layout, cfg, folder)
    assert "can't load" in said and "\n" not in said
    assert convert_ckpt.main(["--to", "hf", str(folder), str(tmp_path / "out")]) == 2
    assert "is no tensor but mkdir" in capfd.readouterr().err


def test_an_index_names_files_of_its_folder_only(pools, step, tmp_path, capfd):
    folder, cfg = step
    index = index_of(folder)
    for info in index.storage_data.values():
        info.relative_path = f"../{folder.name}/{info.relative_path}"
    tampered(folder, index)
    for line in outcomes(pools, folder, cfg, tmp_path, capfd):
        assert f"'../{folder.name}/__0_0.distcp', which is no file of the folder" in line


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "", "."])
def test_a_manifest_names_files_of_its_folder_only(step, tmp_path, name, capfd):
    folder, _ = step
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert convert_ckpt.main(["inspect", str(folder)]) == 2
    assert f"lists {name!r}, which is no file of the folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"config": {"model": {"num_layers": 10**9}}}, "gives model"),
        ({"config": {"model": "x"}}, "is not as megakit writes it"),
        ({"config": None}, "is not as megakit writes it"),
        ({"files": {"state.json": {"bytes": "1", "sha256": 1}}}, "lists no files"),
    ],
)
def test_a_manifest_of_other_things(step, changes, words):
    folder, _ = step
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(Refused, match=words):
        open_weights(folder)


def test_weights_with_a_tokenizer_elsewhere(tmp_path):
    cfg = layouts.llama()
    out = tmp_path / "ours"
    source = open_weights(write(hf_models.llama()[0], tmp_path / "hf"))
    hf_models.convert(source, "megakit", out)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["tokenizer"] = {"path": "../../x.model", "fingerprint": "0"}
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match=r"has the tokenizer '\.\./\.\./x\.model', which is no file of the folder"):
        open_weights(out)
    manifest["tokenizer"], manifest["model"]["num_layers"] = None, 10**9
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match=r"num_layers = 1,000,000,000, and there are \d+ tensors"):
        open_weights(out)
    assert cfg.model.num_layers < 10


def hugging_face(tmp_path: Path) -> Path:
    return write(hf_models.llama()[0], tmp_path / "hf", shard="100KB")


@pytest.mark.parametrize("elsewhere", ["../secret.safetensors", "/etc/secret.safetensors", "x/../../secret.safetensors"])
def test_an_index_of_hugging_face_names_files_of_its_folder_only(tmp_path, elsewhere, capfd):
    folder = hugging_face(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "secret.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = elsewhere
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert convert_ckpt.main(["--to", "megakit", str(folder), str(tmp_path / "out")]) == 2
    line = capfd.readouterr().err
    assert f"lists {elsewhere!r}, which is no file of the folder" in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "num_key_value_heads", "head_dim"])
def test_a_size_without_an_end(tmp_path, key, memory_limit):
    """num_hidden_layers = 1e9 would make a list of that length."""
    folder = hugging_face(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 10**9}))
    with pytest.raises(Refused, match=r"1,000,000,000|1000000000|is \["):
        open_weights(folder)


@pytest.mark.parametrize(
    "head, words",
    [
        (struct.pack("<Q", 2**63), "too few for its header"),
        (struct.pack("<Q", 2**64 - 1), "too few for its header"),
        (b"[" * 100_000, "recursion"),
        (b'{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}', "is \\[-1, -2\\]"),
        (b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', "is \\[2.0\\]"),
        (b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,8]}}', "in 8 bytes"),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', "can't be read as safetensors"),
    ],
)
def test_headers_of_safetensors(tmp_path, head, words, memory_limit):
    folder = hugging_face(tmp_path)
    data = head if head[:1] not in b"[{" else struct.pack("<Q", len(head)) + head + bytes(8)
    (folder / sorted(p.name for p in folder.glob("*.safetensors"))[0]).write_bytes(data)
    with pytest.raises(Refused, match=words):
        open_weights(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_without_an_end(tmp_path, name):
    folder = hugging_face(tmp_path)
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(Refused, match=f"{name} is not JSON"):
        open_weights(folder)


@pytest.mark.parametrize("before", [b"\x80\x02N", b"\x80\x04" + b"K\x000" * 5000 + b"\x8c\x05r.abcN"], ids=["short", "long"])
@pytest.mark.parametrize("put", [b"r" + struct.pack("<I", 2**32 - 1), b"p4294967295\n"])
def test_a_pickle_with_a_memo_without_an_end(before, put, memory_limit):
    """Ten bytes that make Python's unpickler fill 64 GiB."""
    with pytest.raises(pickle.UnpicklingError, match="of their memo"):
        read_pickle(io.BytesIO(before + put + b"."))


def test_texts_and_ends_of_pickles_are_no_opcodes():
    """What stands in a text, and behind the end, puts nothing into the memo."""
    put = b"r" + struct.pack("<I", 2**32 - 1)
    assert read_pickle(io.BytesIO(pickle.dumps([put, put.hex(), 1.5, 2**70]) + put)) == [put, put.hex(), 1.5, 2**70]


def test_an_index_whose_text_has_no_end(step, memory_limit):
    """A pickle of 100 bytes whose tuple, written out, is longer than the memory."""
    folder, _ = step
    index, endless = index_of(folder), (1,)
    for _ in range(64):
        endless = (endless, endless)
    first = next(iter(index.storage_data.values()))
    for part, name, words in (
        (first, "transform_descriptors", "save it without"),
        (first, "relative_path", "is no name"),
        (index.state_dict_metadata[NAME].chunks[0], "offsets", "are no sizes"),
    ):
        kept = getattr(part, name)
        setattr(part, name, endless)
        (folder / ".metadata").write_bytes(pickle.dumps(index))
        with pytest.raises(Refused, match=words) as refused:
            read_index(folder)
        assert len(str(refused.value)) < 1000
        setattr(part, name, kept)


def test_nothing_stays_switched_off(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"x")
    with pytest.raises(Refused, match="is no index"):
        read_index(tmp_path)
    assert gc.isenabled()


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_tensor_outside_its_storage(tmp_path, offset):
    """Bytes before it or behind it are the file's, or another tensor's."""
    torch.save({"x": torch.ones(4)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, data in members.items():
            changed = data.replace(b"QK\x00", b"QJ" + struct.pack("<i", offset)) if name.endswith("data.pkl") else data
            assert changed != data or not name.endswith("data.pkl")
            archive.writestr(name, changed)
    with pytest.raises(Refused, match=r"a tensor \[4\] ends at byte"):
        load_lazy(tmp_path / "x.pt")


def test_the_tracker_of_megatron(tmp_path, mark, capfd):
    """Its text is a folder's name; its files are not run."""
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere" / "mp_rank_00").mkdir(parents=True)
    tracker = tmp_path / "there" / "latest_checkpointed_iteration.txt"
    for text in ("../elsewhere", str(tmp_path / "elsewhere"), "9" * 5000):
        tracker.write_text(text)
        assert convert_ckpt.main(["--to", "megakit", str(tmp_path / "there"), str(tmp_path / "out")]) == 2
        assert "is not there: correct it" in capfd.readouterr().err
    tracker.write_text("5")
    rank = tmp_path / "there" / "iter_0000005" / "mp_rank_00"
    rank.mkdir(parents=True)
    args = argparse.Namespace(num_layers=Runs(mark))
    torch.save({"args": args, "checkpoint_version": 3, "model": {}}, rank / "model_optim_rng.pt")
    assert convert_ckpt.main(["--to", "megakit", "--vocab-size", "5", str(tmp_path / "there"), str(tmp_path / "out")]) == 2
    assert "the embedding has 0 rows" in capfd.readouterr().err


def test_layers_without_elements(pools, step, memory_limit):
    """torch_dist stacks layers: a billion of them fit into no bytes."""
    from megakit.checkpoint.megatron_files import read_megatron

    folder, _ = step
    index = index_of(folder)
    entry = index.state_dict_metadata[NAME]
    shape = torch.Size([10**9, 0])
    index.state_dict_metadata = {"decoder.layers.mlp.linear_fc1.weight": TensorStorageMetadata(entry.properties, shape, [])}
    index.storage_data = {}
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    torch.save({"args": argparse.Namespace(num_layers=1)}, folder / "common.pt")
    with pytest.raises(Refused, match="without elements"):
        read_megatron(folder)
