"""No new door by which a file, a name or the network could run code: ruff finds them, with the rules in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUFF = shutil.which("ruff") or shutil.which("ruff", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(RUFF is None, reason="pip install 'megakit[dev]'")

DOORS = {
    "import pickle\npickle.load(open('x', 'rb'))": "TID251",
    "import pickle as p\np.loads(b'')": "TID251",
    "import pickle\npickle.Unpickler(open('x', 'rb'))": "S301",
    "from torch import load\nload('x')": "TID251",
    "import torch\ntorch.load('x', weights_only=False)": "TID251",
    "import torch.distributed.checkpoint as dcp\ndcp.load({}, checkpoint_id='x')": "TID251",
    "from torch.distributed.checkpoint import FileSystemReader\nFileSystemReader('x')": "TID251",
    "import numpy as np\nnp.load('x', allow_pickle=True)": "TID251",
    "import yaml\nyaml.load('x', yaml.Loader)": "S506",
    "eval(input())": "S307",
    "exec(input())": "S102",
    "import os\nos.system('ls')": "S605",
    "import subprocess\nsubprocess.run('ls ' + input(), shell=True)": "S602",
    "import tempfile\ntempfile.mktemp()": "S306",
    "import tarfile\ntarfile.open('x').extractall()": "S202",
    "import ssl\nssl._create_unverified_context()": "S323",
    "import requests\nrequests.get('https://x', verify=False, timeout=5)": "S501",
    "import hydra.utils\nhydra.utils.instantiate({})": "TID251",
    "import socket\nsocket.socket().bind(('0.0.0.0', 80))": "S104",
    "import os\nos.chmod('x', 0o777)": "S103",
    "import jinja2\njinja2.Environment()": "S701",
}


def ruff(*files: Path) -> str:
    command = [str(RUFF), "check", "--no-cache", "--output-format", "concise"]
    command += ["--config", str(ROOT / "pyproject.toml"), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout


def test_each_door_is_found(tmp_path):
    for number, source in enumerate(DOORS):
        (tmp_path / f"door{number}.py").write_text(source + "\n")
    found = ruff(tmp_path)
    lines = {number: [line for line in found.splitlines() if f"door{number}.py" in line] for number in range(len(DOORS))}
    missed = [source for number, (source, rule) in enumerate(DOORS.items()) if not any(rule in line for line in lines[number])]
    assert not missed, missed


def test_there_is_none():
    command = [str(RUFF), "check", "--no-cache", "--output-format", "concise", "megakit", "model_zoo", "tools", "benchmarks"]
    assert subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip() == "All checks passed!"
