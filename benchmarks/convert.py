"""Speed and memory of tools/convert_ckpt.py.

    python benchmarks/convert.py speed [--gb 6] [--folder DIR]    # beside cp and sync of the same bytes, in turn
    python benchmarks/convert.py memory [--folder DIR]            # a 70B: sparse files in, blocks of zeros left out of the output

`memory` needs no 140 GB of disk: its source is made by truncate, and this process leaves holes where the converter writes zeros.
Everything else is the command as users run it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from megakit.checkpoint import safetensors_files
from megakit.checkpoint.convert import Target, plan, write
from megakit.checkpoint.weights import open_weights
from megakit.observe.memory import peak_rss_bytes
from model_zoo import family

LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
_SHARD = 5 * 10**9
_RANDOM = 64 << 20


def hugging_face_folder(folder: Path, config: dict, fill: Callable[[Path, int], None]) -> int:
    """A sharded bf16 folder of that config; `fill(path, size)` makes each file as long as `size` behind its header. Returns the
    bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for mapped in family("llama").tensors(family("llama").from_hf(config)).values():
        for part in mapped.parts:
            shape = part.hf_shape(mapped.shape)
            nbytes = 2 * int(np.prod(shape))
            if shards[-1] and filled + nbytes > _SHARD:
                shards.append([])
                filled = 0
            shards[-1].append((part.name, shape))
            filled += nbytes
    where, total = {}, 0
    for i, shard in enumerate(shards):
        name, at, entries = f"model-{i:05d}.safetensors", 0, {}
        for tensor, shape in shard:
            end = at + 2 * int(np.prod(shape))
            entries[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            at, where[tensor] = end, name
        head = json.dumps(entries).encode()
        (folder / name).write_bytes(len(head).to_bytes(8, "little") + head)
        fill(folder / name, 8 + len(head) + at)
        total += 8 + len(head) + at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return total


def random_bytes(path: Path, size: int) -> None:
    """So that no layer below can leave anything out."""
    block = np.random.default_rng(0).integers(0, 256, _RANDOM, dtype=np.uint8).tobytes()
    with open(path, "ab") as file:
        while (left := size - file.tell()) > 0:
            file.write(block[:left])


def speed(folder: Path, gigabytes: float, rounds: int) -> None:
    """Copies and conversions in turn, each ended by a sync of what it wrote; without the start-up of either."""
    config = {**LLAMA_70B, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": max(1, round(gigabytes / 0.36))}
    nbytes = hugging_face_folder(folder / "hf", config, random_bytes)
    ours, out = folder / "ours", folder / "out"
    converted(folder / "hf", Target("megakit", ours))
    subprocess.run(["sync"], check=True)
    ways: dict[str, Callable[[], object]] = {
        "cp": lambda: subprocess.run(["sh", "-c", f"cp -r {folder}/hf {out} && sync {out}/*"], check=True),
        "hf to megakit": lambda: converted(folder / "hf", Target("megakit", out)),
        "megakit to hf": lambda: converted(ours, Target("hf", out)),
        "megakit to hf, sizes only": lambda: converted(ours, Target("hf", out), compare_checksums=False),
        "hf to hf": lambda: converted(folder / "hf", Target("hf", out)),
        "hf to megakit, fp32": lambda: converted(folder / "hf", Target("megakit", out, torch.float32)),
    }
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started, before = time.perf_counter(), cpu_seconds()
            way()
            runs[name].append((time.perf_counter() - started, cpu_seconds() - before))
            shutil.rmtree(out)
    print(f"{nbytes / 1e9:.2f} GB, {os.cpu_count()} cores, best of {rounds}")
    copy, copy_cpu = min(runs["cp"])[0], min(cpu for _, cpu in runs["cp"])
    for name, found in runs.items():
        wall, cpu = min(found)[0], min(cpu for _, cpu in found)
        rate = f"{nbytes / 1e9 / wall:5.2f} GB/s, {copy / wall:4.2f} of cp's"
        print(f"{name:26} {wall:6.2f} s, {rate}; {cpu:5.2f} s of CPU, {cpu / copy_cpu:4.1f} of cp's")


def converted(source: Path, target: Target, **options: bool) -> None:
    weights = open_weights(source)
    write(weights, target, plan(weights, target), **options)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def memory(folder: Path) -> None:
    """Peak memory of the conversion of a Llama 70B to megakit."""
    nbytes = hugging_face_folder(folder / "hf", LLAMA_70B, os.truncate)
    started = time.perf_counter()
    child = subprocess.run([sys.executable, __file__, "sparse", str(folder / "hf"), str(folder / "out")], check=True)
    assert child.returncode == 0
    largest = 2 * max(LLAMA_70B["vocab_size"], 2 * LLAMA_70B["intermediate_size"]) * LLAMA_70B["hidden_size"]
    print(f"source {nbytes / 1e9:.1f} GB; largest tensor {largest / 2**30:.2f} GiB; {time.perf_counter() - started:.0f} s")
    written = sum(p.stat().st_size for p in (folder / "out").glob("*.safetensors"))
    print(f"written {written / 1e9:.1f} GB; allowed {1.2 * largest / 2**30 + 1:.2f} GiB")


def sparse(source: str, target: str) -> None:
    """The command in this process, with holes for zeros."""
    from tools.convert_ckpt import main

    def write_all(file, data: memoryview) -> None:
        if np.frombuffer(data, dtype=np.uint8).any():
            while data:
                data = data[file.write(data) :]
        else:
            file.seek(len(data), os.SEEK_CUR)
            file.truncate(file.tell())

    usage = shutil.disk_usage(".")
    shutil.disk_usage = lambda path: type(usage)(10**15, 0, 10**15)
    safetensors_files.write_all = write_all
    assert main(["--to", "megakit", source, target]) == 0
    print(f"peak memory of the process: {peak_rss_bytes() / 2**30:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "memory", "sparse"])
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--gb", type=float, default=6.0, help="size of the source of speed (6)")
    parser.add_argument("--rounds", type=int, default=3, help="of speed; the fastest of each way counts (3)")
    parser.add_argument("--folder", type=Path, help="where to work (a temporary folder)")
    args = parser.parse_args()
    if args.what == "sparse":
        sparse(*args.paths)
        return
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        speed(folder, args.gb, args.rounds) if args.what == "speed" else memory(folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
