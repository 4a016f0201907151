"""Tensors in files, cut and stacked, against torch's own; files written in pieces, against the safetensors library."""

from __future__ import annotations

import random

import pytest
import safetensors.torch
import torch

from megakit.checkpoint import lazy as lazy_module
from megakit.checkpoint import safetensors_files
from megakit.checkpoint.lazy import LazyTensor, cat, lazy
from megakit.checkpoint.safetensors_files import Planned, Writer, read_header
from megakit.checkpoint.torch_files import Inert, load_lazy
from megakit.errors import Refused
from megakit.files import sha256_file

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def small_blocks(monkeypatch):
    """Pieces of a few rows, so that small tensors are many."""
    for module in (lazy_module, safetensors_files):
        monkeypatch.setattr(module, "BLOCK", 64)


def some(tmp_path, dtype=torch.float32):
    """Matrices of one width and their lazy twins."""
    tensors = {f"t{i}": torch.randn(3 + i, 7, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)}
    safetensors.torch.save_file(tensors, tmp_path / "file")
    held = read_header(tmp_path / "file")
    return [(tensors[name], lazy(held[name])) for name in tensors]


def same(ours: LazyTensor, theirs: torch.Tensor) -> None:
    assert ours.shape == tuple(theirs.shape) and ours.complete
    assert torch.equal(ours.read(theirs.dtype), theirs)
    into = torch.empty(theirs.shape[::-1], dtype=torch.float64).t()
    ours.read_into(into)
    assert torch.equal(into, theirs.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_torchs(tmp_path, small_blocks, dtype):
    """Random sequences of operations."""
    dice = random.Random(3)
    for _ in range(60):
        theirs, ours = dice.choice(pairs := some(tmp_path, dtype))
        for _ in range(dice.randint(1, 5)):
            kind = dice.choice(["narrow", "t", "cat"])
            if kind == "t":
                theirs, ours = theirs.t(), ours.t()
            elif kind == "narrow":
                dim = dice.randrange(2)
                start = dice.randrange(theirs.shape[dim])
                length = dice.randint(1, theirs.shape[dim] - start)
                theirs, ours = theirs.narrow(dim, start, length), ours.narrow(dim, start, length)
            else:
                other, theirs_too = dice.choice(pairs)
                if other.shape[1] == theirs.shape[1]:
                    theirs, ours = torch.cat([theirs, other]), cat([ours, theirs_too])
        same(ours, theirs)


def test_cat_of_columns_and_select(tmp_path, small_blocks):
    (a, b), stack = some(tmp_path)[:2], torch.randn(3, 4, 5)
    same(cat([a[1].t(), b[1].t()], 1), torch.cat([a[0].t(), b[0].t()], 1))
    safetensors.torch.save_file({"stack": stack}, tmp_path / "stack")
    whole = lazy(read_header(tmp_path / "stack")["stack"])
    for i in range(3):
        same(whole.select(i).narrow(1, 1, 3), stack[i, :, 1:4])


@pytest.mark.parametrize("checksums", [True, False])
def test_written_files_are_safetensors(tmp_path, small_blocks, checksums):
    """The library reads them; bytes are the sum that was planned; the checksum is the file's."""
    pairs = some(tmp_path, torch.bfloat16)
    tensors = {"flat": pairs[0][0][0], "cast": pairs[1][0].float(), "turned": pairs[2][0].t(), "empty": torch.zeros(0, 7)}
    sources = {"flat": pairs[0][1].select(0), "cast": pairs[1][1], "turned": pairs[2][1].t(), "empty": LazyTensor((0, 7), ())}
    planned = [Planned(name, sources[name], tensor.dtype) for name, tensor in tensors.items()]
    seen = []
    with Writer(checksums, seen.append) as writer:
        info = writer.write(tmp_path / "out", sorted(planned, key=lambda p: -p.dtype.itemsize))
    assert info.bytes == (tmp_path / "out").stat().st_size == sum(seen)
    assert info.sha256 == (sha256_file(tmp_path / "out") if checksums else "")
    read = safetensors.torch.load_file(tmp_path / "out")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes, too few"),
        (b"\xff" * 20, "too few for its header"),
        (b"\x02\0\0\0\0\0\0\0{]", "as safetensors"),
        (b'\x3f\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}          ' + b"\0" * 4, "a is F32"),
        (b'\x3f\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}          ' + b"\0" * 5, "its header says"),
        (b'\x3f\0\0\0\0\0\0\0{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}          ' + b"\0" * 4, "a has dtype F31"),
    ],
)
def test_broken_headers(tmp_path, content, said):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(Refused, match=r"can't be read") as caught:
        read_header(tmp_path / "file")
    assert said in str(caught.value)


def test_a_write_that_fails_is_raised(tmp_path, small_blocks, monkeypatch):
    """As on a full disk: from the thread that writes, in the middle."""
    (_, tensor), *_ = some(tmp_path)
    calls = []

    def full(file, data):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files, "write_all", full)
    with pytest.raises(OSError, match="No space"), Writer(checksums=True) as writer:
        writer.write(tmp_path / "out", [Planned(str(i), tensor, torch.float32) for i in range(9)])


class Call:
    def __reduce__(self):
        return print, ("ran",)


def test_torch_files(tmp_path, capfd):
    """Shapes, offsets and dtypes of views; plain data as it is; what a pickle would call is not called."""
    base = torch.randn(6, 5).bfloat16()
    content = {
        "base": base,
        "rows": base[2:4],
        "turned": base.t(),
        "columns": base[1:, 1:4],
        "both": base[:, 2:].t()[1:],
        "repeated": base[0].expand(3, 5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "plain": [1, "two", None, {3.0: (4,)}],
        "dtype": torch.bfloat16,
        "call": Call(),
        "size": base.shape,
        "path": tmp_path,
    }
    torch.save(content, tmp_path / "file")
    read = load_lazy(tmp_path / "file")
    for name in ("base", "rows", "parameter", "turned", "columns", "both"):
        assert torch.equal(read[name].read(), content[name]), name
    assert not isinstance(read["repeated"], LazyTensor)
    assert read["plain"] == content["plain"] and read["dtype"] is torch.bfloat16 and read["size"] == (6, 5)
    assert isinstance(read["call"], Inert) and read["call"].given == ("ran",) and capfd.readouterr().out == ""
    (tmp_path / "none").write_bytes(b"no file of torch")
    with pytest.raises(Refused, match="none can't be read as a file of torch"):
        load_lazy(tmp_path / "none")
