"""Is this a whole image of megakit? The last step of docker/Dockerfile, and for any container or node:

    docker run --rm --gpus all IMAGE python /opt/megakit/check_image.py

Without a GPU the libraries and the kernels are found but not run; with one they are imported and a kernel is run. One line per
fault, and exit code 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

LIB = Path("/opt/megakit/lib")
OURS = ("megakit", "model_zoo", "recipes", "tools")
EXTRAS = ("log", "data", "tokenizers")
BASE = ("torch", "numpy")
"""What has to be the base's own."""
IMPORTED = {"transformer_engine": "transformer_engine.pytorch", "apex": "apex.optimizers"}
"""What is imported of a library where there is a GPU."""


def packages(lib: Path) -> Iterator[str]:
    """Faults of where packages come from: ours from `lib`, torch and numpy from the base."""
    for name in OURS:
        spec = importlib.util.find_spec(name)
        where = [str(p) for p in spec.submodule_search_locations or ()] if spec else []
        if not any(Path(p).is_relative_to(lib) for p in where):
            yield f"{name} comes from {', '.join(where) or 'nowhere'}, not from {lib}: the base has a package of this name"
    for name in BASE:
        spec = importlib.util.find_spec(name)
        if spec is None:
            yield f"{name} is missing: the base must have it"
        elif Path(str(spec.origin)).is_relative_to(lib):
            yield f"{name} comes from {lib}, not from the base: take it out of docker/requirements.txt"


def requirements(top: str = "megakit", extras: tuple[str, ...] = EXTRAS) -> Iterator[str]:
    """Faults of what `top` needs, and what that needs, as it is found: the base's version wins. Pre-releases count."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    todo, seen = [(top, extras)], {canonicalize_name(top)}
    while todo:
        name, extras = todo.pop()
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                continue
            try:
                found = importlib.metadata.version(needed.name)
            except importlib.metadata.PackageNotFoundError:
                yield f"{name} needs {needed}, which is missing: make image-lock"
                continue
            if not needed.specifier.contains(found, prereleases=True):
                yield f"{name} needs {needed}, and {needed.name} {found} is found: another base, or make image-lock"
            if canonicalize_name(needed.name) not in {*seen, *BASE}:
                seen.add(canonicalize_name(needed.name))
                todo.append((needed.name, tuple(needed.extras)))


def libraries(names: list[str], gpu: bool) -> Iterator[str]:
    """Faults of optional libraries: not found, or with a GPU not to be imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            yield f"{name} is missing: another base, or build with --build-arg REQUIRE= without it"
        elif gpu:
            try:
                importlib.import_module(IMPORTED.get(name, name))
            except Exception as e:  # a broken build raises what it likes
                yield f"{name} can't be imported: {type(e).__name__}: {e}"


def kernels(which: list[str], gpu: bool) -> Iterator[str]:
    """Faults of the built kernels: no file, no symbols, another interface; with a GPU, one of them fails."""
    if not which:
        return
    import torch

    from megakit.ops.fused import library, norm

    for kind in which:
        device = "cpu" if kind == "emulated" else kind
        try:
            library.load(device)
        except library.Missing as e:
            yield f"kernels: {e}"
            continue
        if device == "cpu" or gpu:
            x, weight = torch.randn(4, 256, device=device), torch.ones(256, device=device)
            error = (
                (norm.norm(x, weight, None, 1e-5)[0] - torch.nn.functional.rms_norm(x, (256,), weight, 1e-5)).abs().max().item()
            )
            if not error < 1e-4:
                yield f"kernels: rms_norm of {kind} is off by {error:g}"


def writable() -> Iterator[str]:
    """Faults of the folders that this user needs."""
    for folder in (Path.home(), Path.cwd()):
        if not os.access(folder, os.W_OK):
            yield f"uid {os.getuid()} can't write to {folder}: set HOME, or start in a folder of yours"


def plan() -> Iterator[str]:
    """Faults of planning a shipped recipe."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megakit.plan", "+recipe=llama7b"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        yield f"{' '.join(command[1:])} ends with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"


def faults(checks: list[Callable[[], Iterator[str]]]) -> Iterator[str]:
    """Of all checks; one that breaks is a fault, too."""
    for check in checks:
        try:
            yield from check()
        except Exception as e:
            yield f"{type(e).__name__}: {e}"


def found(name: str) -> str:
    """A package and its version, of its metadata: nothing is imported."""
    for top in (name, name.replace("_", "-")):
        try:
            return f"{name} {importlib.metadata.version(top)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    return f"{name} -"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Is this a whole image of megakit?")
    parser.add_argument("--require", nargs="*", default=list(IMPORTED), metavar="NAME", help="libraries that must be there")
    parser.add_argument("--kernels", nargs="*", default=["cuda"], choices=["cuda", "emulated"], help="kernels that must be there")
    parser.add_argument("--lib", type=Path, default=LIB, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    import torch

    gpu = torch.cuda.is_available()
    print(", ".join(found(n) for n in ("megakit", *BASE, *args.require)), f"- {'GPU' if gpu else 'no GPU'}, uid {os.getuid()}")
    checks: list[Callable[[], Iterator[str]]] = [
        lambda: packages(args.lib),
        requirements,
        lambda: libraries(args.require, gpu),
        lambda: kernels(args.kernels, gpu),
        writable,
        plan,
    ]
    wrong = list(faults(checks))
    for line in wrong:
        print(f"fault: {line}", file=sys.stderr)
    print(f"{len(wrong)} faults" if wrong else "all is there")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
