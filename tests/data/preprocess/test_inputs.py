"""What --input names: files, folders, globs, URLs; in which order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megakit.data.preprocess.inputs import find_inputs
from megakit.data.preprocess.job import Options, preprocess
from megakit.errors import Refused
from tests.data.corpus import plain_text
from tests.data.preprocess.packed import PACK
from tests.data.preprocess.test_job import files, write_jsonl


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(tmp_path: Path, *arguments: str) -> list[str]:
    return [os.path.relpath(source.path, tmp_path) for source in find_inputs([str(tmp_path / one) for one in arguments]).sources]


def test_order_of_folders_globs_and_files(tmp_path: Path) -> None:
    touch(tmp_path, "z.txt", "d/b.jsonl", "d/a/2.txt", "d/a/10.md", "d/a-b.txt", "d/B.rst.gz", "d/x.parquet", "e/c.JSONL.ZST")
    touch(tmp_path, "d/info.json", "d/.hidden.txt", "d/.git/x.txt", "d/picture.png", "d/x.parquet.gz")
    in_d = ["d/B.rst.gz", "d/a/10.md", "d/a/2.txt", "d/a-b.txt", "d/b.jsonl", "d/x.parquet"]
    assert found(tmp_path, "z.txt", "d", "e") == ["z.txt", *in_d, "e/c.JSONL.ZST"]
    assert find_inputs([str(tmp_path / "d")]).others == 4  # what is below a hidden folder is not even looked at
    assert found(tmp_path, "e", "z.txt") == ["e/c.JSONL.ZST", "z.txt"]
    assert found(tmp_path, "d/*.json*") == ["d/b.jsonl", "d/info.json"]
    assert found(tmp_path, "d/a/*") == ["d/a/10.md", "d/a/2.txt"]
    assert found(tmp_path, "?") == [*in_d, "e/c.JSONL.ZST"]
    touch(tmp_path, "odd[1].txt")
    assert found(tmp_path, "odd[1].txt") == ["odd[1].txt"]


def test_folders_that_links_lead_to(tmp_path: Path) -> None:
    """They are below the folder like others, as for a glob; a link that leads back to where it stands ends nothing."""
    touch(tmp_path, "d/a/1.txt", "elsewhere/b/2.txt")
    (tmp_path / "d" / "link").symlink_to("../elsewhere")
    (tmp_path / "d" / "a" / "up").symlink_to("..")
    (tmp_path / "d" / "a" / "self").symlink_to(".")
    assert found(tmp_path, "d") == ["d/a/1.txt", "d/link/b/2.txt"]
    (tmp_path / "d" / "again").symlink_to("a")
    with pytest.raises(Refused, match=r"1\.txt is given more than once"):
        found(tmp_path, "d")


def test_forms_and_packings(tmp_path: Path) -> None:
    touch(tmp_path, "a.json", "b.ndjson.gz", "c.text.zst", "d.parquet")
    sources = find_inputs([str(tmp_path / name) for name in sorted(os.listdir(tmp_path))]).sources
    assert [(source.form, source.packing) for source in sources] == [
        ("lines", ""),
        ("lines", "gz"),
        ("text", "zst"),
        ("parquet", ""),
    ]
    assert [source.size for source in sources] == [6, 11, 10, 9]


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["none.txt"], "none.txt can't be read: No such file"),
        (["none"], "none can't be read: No such file"),
        (["a.csv"], r"a.csv ends in none of \.jsonl"),
        (["a.parquet.gz"], "parquet without"),
        (["a.txt", "a.txt"], "more than once"),
        (["a.txt", "link.txt"], "more than once"),
        (["a.txt", "[a]*.txt"], "more than once"),
        (["*.jsonl"], "matches no file"),
        (["empty"], "is a folder without a file that ends in"),
        (["pipe.txt"], "is no regular file"),
    ],
)
def test_inputs_that_cannot_be_read(tmp_path: Path, arguments: list[str], words: str) -> None:
    touch(tmp_path, "a.txt", "a.csv", "a.parquet.gz", "empty/x.png")
    os.symlink(tmp_path / "a.txt", tmp_path / "link.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(Refused, match=words) as e:
        find_inputs([str(tmp_path / one) for one in arguments])
    assert "\n" not in str(e.value)


def test_a_file_and_its_url_are_one(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    with pytest.raises(Refused, match=r"a\.txt is given more than once"):
        find_inputs([f"file://{tmp_path}/a.txt", str(tmp_path / "a.txt")])


def test_a_remote_folder_has_the_rules_of_a_folder(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    names = ("a.jsonl", ".hidden.jsonl", ".trash/b.jsonl", "c/d.txt.gz", "c/.e.txt", "facts.json", "note.pdf")
    touch(tmp_path, *names)
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/.a/corpus", recursive=True)  # hidden above the folder is nothing to it
    found = find_inputs(["memory://.a/corpus"])
    assert [source.path.removeprefix("memory:///.a/corpus/") for source in found.sources] == ["a.jsonl", "c/d.txt.gz"]
    assert found.others == len(names) - 2
    store.rm("/.a", recursive=True)


class Quiet(SimpleHTTPRequestHandler):
    """A web server that answers with files and says nothing."""

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and its address."""
    (tmp_path / "served").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield tmp_path / "served", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_urls_give_what_files_give(tmp_path: Path, model_path: Path, served: tuple[Path, str]) -> None:
    pytest.importorskip("aiohttp")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder, address = served
    texts = [text for text in plain_text(30) if text.strip()]
    plain = write_jsonl(folder / "a.jsonl", texts)
    (folder / "b.jsonl.gz").write_bytes(PACK[".gz"](plain.read_bytes()))
    (folder / "c.md").write_text(texts[0])
    parquet.write_table(pyarrow.table({"text": texts}), folder / "d.parquet")
    names = sorted(os.listdir(folder))
    options = Options(block_bytes=1000)
    preprocess([str(folder)], str(model_path), str(tmp_path / "files"), options)
    for where, inputs in (("http", [f"{address}/{name}" for name in names]), ("file", [f"file://{folder}"])):
        summary = preprocess(inputs, str(model_path), str(tmp_path / where), options)
        assert files(tmp_path / where) == files(tmp_path / "files")
        assert summary.counts[0].documents == 3 * len(texts) + 1
    with pytest.raises(Refused, match=r"input http://.*/none\.jsonl can't be read: 404, .*not found") as e:
        find_inputs([f"{address}/none.jsonl"])
    assert "\n" not in str(e.value)
    with pytest.raises(Refused, match=r"input nosuch://x\.jsonl can't be read: Protocol not known"):
        find_inputs(["nosuch://x.jsonl"])


def test_secrets_of_urls_are_told_and_kept_nowhere(served, model_path, tmp_path):
    """A signed URL that fails is told without its signature; one that works leaves none in the journal or the output."""
    pytest.importorskip("aiohttp")
    folder, address = served
    url = f"{address.replace('://', '://me:word1234@')}/%s?X-Amz-Signature=abc123def"
    with pytest.raises(Refused) as refused:
        find_inputs([url % "none.jsonl"])
    line = str(refused.value)
    assert "word1234" not in line and "abc123def" not in line and "none.jsonl" in line
    write_jsonl(folder / "a.jsonl", [f"text {number}" for number in range(100)])
    preprocess([url % "a.jsonl"], str(model_path), str(tmp_path / "out"), Options(block_bytes=1000))
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("out*"))
    assert kept and b"word1234" not in kept and b"abc123def" not in kept
