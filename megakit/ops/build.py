"""Builds the kernels of csrc/: `python -m megakit.ops.build [cuda | emulated ...]`.

  cuda      libmegakit_cuda.so, by nvcc, for the GPUs it knows of sm_80, sm_90a and sm_100, with PTX of the first for others
  emulated  libmegakit_emulated.so, by g++: the same kernels on the CPU, for tests

Each is built aside and renamed, so that two builds at once don't clash and nobody loads half a file. What is up to date is
left alone. Nothing is ever built behind the user's back: only by this command, or `make kernels`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megakit.errors import EXIT_DONE, Refused
from megakit.ops.folder import NAMES, SOURCES, folder

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
EMULATED = ("-std=c++17", "-O2", "-fPIC", "-DMEGAKIT_EMULATED", "-Wall", "-Wextra", "-Wno-unknown-pragmas")


@dataclass(frozen=True)
class Target:
    """A file to build."""

    name: str
    compiler: str
    version: str
    """What the compiler says of itself."""
    flags: tuple[str, ...]
    kernel_flags: tuple[str, ...] = ()
    """For the kernels and the driver alone: the emulator itself is never instrumented."""
    link: tuple[str, ...] = ("-shared",)
    host: tuple[str, ...] = ()
    """Host sources beside the kernels, in csrc/."""
    instrumented: tuple[str, ...] = ()
    """Of those, the ones that take `kernel_flags`."""


def cuda(architectures: Sequence[str] = ARCHITECTURES) -> Target:
    """Raises Refused without nvcc, or with one that knows none of the architectures."""
    home = os.environ.get("CUDA_HOME")
    of_home, of_path = shutil.which("nvcc", path=f"{home}/bin") if home else None, shutil.which("nvcc")
    nvcc = of_home or of_path
    if nvcc is None:
        where = f"CUDA_HOME = {home}, nor in PATH" if home else "PATH"
        raise Refused(f"no nvcc in {where}: install the CUDA toolkit, or copy a {NAMES['cuda']} into {folder()}")
    if home and not of_home:
        print(f"megakit: no nvcc in CUDA_HOME = {home}: using {nvcc}, found in PATH", file=sys.stderr)
    known = _run([nvcc, "--list-gpu-code"]).split()
    usable = [a for a in architectures if a.rstrip("a") in known]
    if not usable:
        raise Refused(f"{nvcc} knows none of {', '.join(architectures)}, only {', '.join(known)}: name one of these by --arch")
    codes = [f"-gencode=arch={a.replace('sm', 'compute')},code={a}" for a in usable]
    virtual = usable[0].rstrip("a").replace("sm", "compute")
    flags = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", *codes, f"-gencode=arch={virtual},code={virtual}")
    # without the table of local symbols: it holds names of temporary files, and a rebuild would never be the same
    link = ("--shared", "--cudart", "static", "-Xlinker", "-s", *codes)
    return Target(NAMES["cuda"], nvcc, _run([nvcc, "--version"]), flags, link=link)


def emulated() -> Target:
    """Raises Refused without a C++ compiler."""
    cxx = host_compiler()
    host = ("sim/simt.cc", "sim/fiber.cc", "sim/traffic.cc")
    return Target(NAMES["cpu"], cxx, _run([cxx, "--version"]), EMULATED, host=host)


def host_compiler() -> str:
    """g++, or CXX."""
    name = os.environ.get("CXX", "g++")
    cxx = shutil.which(name)
    if cxx is None:
        raise Refused(f"no C++ compiler {name} in PATH: install g++, or name another one in CXX")
    return cxx


TARGETS = {"cuda": cuda, "emulated": emulated}


def build(target: Target, out: Path, force: bool = False, jobs: int | None = None) -> bool:
    """Build `out`/`target.name` unless it is up to date -> whether it was built. Raises Refused with the compiler's words."""
    kernels = sorted(SOURCES.glob("kernels/*.cu"))
    if not kernels:
        raise Refused(f"no sources in {SOURCES}: build in a checkout of megakit, or copy a {target.name} into {folder()}")
    fingerprint = _fingerprint(target)
    final = out / target.name
    if not force and final.is_file() and fingerprint.encode() in final.read_bytes():
        return False
    units = [(path, True) for path in kernels] + [(SOURCES / name, name in target.instrumented) for name in target.host]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=out) as aside:
            with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
                made_of = [pool.submit(_compile, target, path, inner, Path(aside), fingerprint) for path, inner in units]
                objects = [unit.result() for unit in made_of]
            made = Path(aside) / target.name
            _run([target.compiler, *target.kernel_flags, *map(str, objects), *target.link, "-o", str(made)])
            os.replace(made, final)
    except OSError as e:
        raise Refused(f"{final} can't be written ({e.strerror}): name another folder by --out, and in MEGAKIT_KERNELS") from e
    return True


def _compile(target: Target, source: Path, instrumented: bool, aside: Path, fingerprint: str) -> Path:
    made = aside / f"{source.stem}.o"
    flags = [*target.flags, *(target.kernel_flags if instrumented else ()), f'-DMEGAKIT_SOURCE_HASH="{fingerprint}"']
    language = ["-x", "c++"] if source.suffix == ".cu" and not target.compiler.endswith("nvcc") else []
    _run([target.compiler, *flags, *language, "-c", str(source), "-o", str(made)])
    return made


def _fingerprint(target: Target) -> str:
    """Of the sources, the flags and the compiler: it is in the library."""
    digest = hashlib.sha256(repr((target.version, target.flags, target.kernel_flags, target.link)).encode())
    for path in sorted(p for p in SOURCES.rglob("*") if p.suffix in (".h", ".cu", ".cc")):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return f"megakit-{digest.hexdigest()[:32]}"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise Refused(f"{Path(command[0]).name} failed with exit code {done.returncode} on {command[-3]}: its words are above")
    return done.stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megakit.ops.build", description="Build the fused kernels of csrc/.")
    parser.add_argument("targets", nargs="*", default=["cuda"], metavar="cuda | emulated", help="what to build (default: cuda)")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help=f"GPUs (default: {' '.join(ARCHITECTURES)})")
    parser.add_argument("--out", type=Path, default=folder(), help="folder (default: where the run looks for them)")
    parser.add_argument("--force", action="store_true", help="build what is up to date, too")
    args = parser.parse_args(argv)
    try:
        for name in args.targets:
            if name not in TARGETS:
                raise Refused(f"{name} is not one of {', '.join(TARGETS)}: use one of these")
            target = cuda(args.arch) if name == "cuda" else emulated()
            built = build(target, args.out, args.force)
            print(f"{args.out / target.name}: {'built' if built else 'up to date'}")
    except Refused as e:
        print(f"megakit: {e}", file=sys.stderr)
        return e.code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
