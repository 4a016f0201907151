"""docker/Dockerfile: its linter, its user, what it pins, what it copies, and that the pages name the same base."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/container.md").read_text()


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words), in order, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "docker/Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], " ".join(line.split()[1:])) for line in text.splitlines() if line.strip()]


def arguments() -> dict[str, str]:
    """Defaults of the build's arguments."""
    pairs = [words.partition("=") for kind, words in instructions() if kind == "ARG"]
    return {name: value.strip('"') for name, sign, value in pairs if sign}


def hadolint(path: Path) -> subprocess.CompletedProcess:
    tool = shutil.which("hadolint", path=Path(sys.executable).parent)
    if tool is None:
        pytest.skip("no hadolint: pip install -e '.[dev]'")
    return subprocess.run([tool, str(path)], cwd=ROOT, capture_output=True, text=True)


def test_the_linter_finds_nothing_and_finds_a_planted_fault(tmp_path: Path):
    clean = hadolint(ROOT / "docker/Dockerfile")
    assert clean.returncode == 0, clean.stdout
    (tmp_path / "Dockerfile").write_text((ROOT / "docker/Dockerfile").read_text() + "USER root\n")
    assert "DL3002" in hadolint(tmp_path / "Dockerfile").stdout


def test_the_base_is_pinned_by_tag_and_digest():
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3@sha256:[0-9a-f]{64}", arguments()["BASE"])
    assert all(words.split()[0] == "${BASE}" for kind, words in instructions() if kind == "FROM")


def test_the_last_user_is_not_root():
    user = [words for kind, words in instructions() if kind == "USER"][-1]
    assert user == "${UID}:${GID}", "a number: Kubernetes' runAsNonRoot reads no names"
    assert int(arguments()["UID"]) > 999 and int(arguments()["GID"]) > 999


def test_any_user_may_write_at_home_and_in_the_working_folder():
    assert any("chmod 1777 /home/megakit /workspace" in words for kind, words in instructions() if kind == "RUN")
    assert "HOME=/home/megakit" in " ".join(words for kind, words in instructions() if kind == "ENV")
    assert [words for kind, words in instructions() if kind == "WORKDIR"][-1] == "/workspace"


def test_the_check_runs_as_that_user_and_the_entry_point_is_the_bases():
    kinds = [kind for kind, _ in instructions()]
    check = max(i for i, (kind, words) in enumerate(instructions()) if kind == "RUN" and "/check_image.py" in words)
    assert kinds.index("USER") < check and "RUN" not in kinds[check + 1 :]
    assert "ENTRYPOINT" not in kinds and "ADD" not in kinds and "ONBUILD" not in kinds


def test_nothing_is_installed_that_is_not_pinned():
    installs = [i for kind, words in instructions() if kind == "RUN" for i in words.split("&&") if "pip install" in i]
    assert len(installs) == 3
    for words in installs:
        assert "--no-cache-dir" in words and "--no-deps" in words and "--target" in words, "never into the base's packages"
        assert "--require-hashes" in words or words.rstrip().endswith(" ."), words
    assert not re.search(r"apt-get|curl|wget|git clone", (ROOT / "docker/Dockerfile").read_text())


def test_what_the_stage_of_the_kernels_copies_is_enough_to_build(tmp_path: Path):
    """It copies single files, so that no other change compiles the kernels again."""
    stage = instructions()[: [i for i, (kind, _) in enumerate(instructions()) if kind == "FROM"][1]]
    for _, words in [i for i in stage if i[0] == "COPY"]:
        *sources, to = words.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / to)
            else:
                (tmp_path / to).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / to)
    # -S: without what is installed, which has the rest of megakit
    code = "import megakit.ops.build as b; print(b.__file__, len(list(b.SOURCES.glob('kernels/*.cu'))))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"copy this, too, in docker/Dockerfile: {done.stderr.splitlines()[-1]}"
    file, kernels = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path) and int(kernels) == len(list((ROOT / "csrc/kernels").glob("*.cu"))) > 0


def test_there_are_no_secrets():
    names = " ".join(words for kind, words in instructions() if kind in ("ARG", "ENV"))
    assert not re.search(r"TOKEN|KEY|SECRET|PASSWORD|://", names, re.I)


def references() -> list[tuple[str, str]]:
    """(file, tag) of every NVIDIA PyTorch image that a page, a recipe or the schema names."""
    files = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "megakit/config/schema.py", *ROOT.glob("recipes/**/*.yaml")]
    found = [(path.name, re.findall(r"nvcr\.io[/#]nvidia/pytorch:([\w.-]+)", path.read_text())) for path in files]
    return [(name, tag) for name, tags in found for tag in tags if name != "log.md"]


def test_the_pages_name_the_base_of_the_image():
    tag = arguments()["BASE"].split("@")[0].split(":")[-1]
    assert {name for name, _ in references()} >= {"container.md", "schema.py", "config.md"}
    assert {t for _, t in references()} == {tag}


def test_the_bases_torch_and_transformer_engine_are_new_enough():
    """By what docs/container.md says of the base. A pre-release of 2.11 would not do for >=2.11, one of 2.13 does."""
    release = arguments()["BASE"].split(":")[1].split("-")[0]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {release} "))
    _, torch, _, engine, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(r) for r in [*project["dependencies"], *project["optional-dependencies"]["te"]]]
    for name, version in (("torch", torch), ("transformer-engine", engine)):
        specifier = next(r.specifier for r in needed if r.name == name)
        assert specifier.contains(version, prereleases=True), f"{name} {version}: {specifier}"
        assert not specifier.contains("2.9.0a0", prereleases=True)


def ignored(path: str) -> bool:
    """Whether the engine leaves `path` out of the context: the last pattern that matches it or a folder above it decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").strip("/")
        if not pattern or line.startswith("#"):
            continue
        parts = path.split("/")
        above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if any(_matches(p, pattern) for p in above):
            out = not line.startswith("!")
    return out


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return any(_matches("/".join(path.split("/")[i:]), pattern[3:]) for i in range(path.count("/") + 1))
    one, other = path.split("/"), pattern.split("/")
    return len(one) == len(other) and all(fnmatch.fnmatchcase(a, b) for a, b in zip(one, other))


SECRET_OR_LARGE = (
    ".git/config",
    ".env",
    ".netrc",
    ".venv/bin/python",
    "data/demo/corpus.bin",
    "runs/demo/checkpoints/step_00000100/manifest.json",
    "docker/monitoring/compose.yaml",
    "tests/docker/test_dockerfile.py",
    "wandb/settings",
    "id_rsa",
    "megakit/__pycache__/plan.cpython-312.pyc",
    "megakit/ops/lib/libmegakit_cuda.so",
)


@pytest.mark.parametrize("path", SECRET_OR_LARGE)
def test_the_context_has_no(path: str):
    assert ignored(path)


def test_the_context_has_what_is_copied():
    copied = [w for kind, words in instructions() if kind == "COPY" and "--from" not in words for w in words.split()[:-1]]
    assert {"megakit", "csrc", "docker/requirements.txt", "docker/check_image.py"} <= set(copied)
    for source in copied:
        path = ROOT / source
        files = [p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts] if path.is_dir() else [path]
        assert files, source
        out = [str(f.relative_to(ROOT)) for f in files if ignored(str(f.relative_to(ROOT)))]
        assert all(f.startswith("megakit/ops/lib/") for f in out), out
