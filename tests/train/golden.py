"""The demo's first losses, as kept in tests/assets/golden_demo.json: how they are made, and the command to renew them.

    python -m tests.train.golden     # writes the file; say in the commit why the losses changed

`portable` is the demo with the CPU's instruction set pinned to what every x86-64 of the last ten years has, so that its bits
don't depend on the machine. `bf16` is the demo in bf16 with this machine's best kernels; its bits hold on machines of the
same fingerprint. Few steps of it: a CPU without bf16 instructions takes a minute for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "assets" / "golden_demo.json"
STEPS = 6
BF16_STEPS = 4
PINNED = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def losses(folder: Path, precision: str, env: dict[str, str], steps: int = STEPS) -> list[str]:
    """Run the demo in `folder`, on one process and two threads -> repr of its first losses."""
    run = folder / precision
    command = [
        *(sys.executable, "-m", "megakit.pretrain", "+recipe=demo", f"run.dir={run}", f"train.precision={precision}"),
        *(f"data.path=[{folder}/train]", f"data.valid_path=[{folder}/valid]", f"data.tokenizer={folder}/tokenizer.model"),
        *(f"train.steps={steps}", "optim.decay_steps=400", "train.eval_interval=0", "train.generate_tokens=0"),
        *("launch.device=cpu", "launch.threads_per_rank=2", "log.console=off"),
    ]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [repr(r["loss"]) for r in lines]


def make_data(folder: Path) -> None:
    """The demo's tokenizer and data."""
    subprocess.run([sys.executable, "tools/demo_data.py", str(folder)], cwd=ROOT, check=True, capture_output=True)


def fingerprint() -> str:
    """What the bits of a bf16 run on a CPU depend on."""
    import torch

    amx = torch.cpu._is_amx_tile_supported()
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, amx {amx}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        golden: dict[str, Any] = {
            "portable": losses(folder, "fp32", PINNED),
            "bf16": {"fingerprint": fingerprint(), "losses": losses(folder, "bf16", {}, BF16_STEPS)},
        }
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
