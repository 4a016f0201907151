"""A job script run on this machine, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from megakit.config.compose import compose
from megakit.submit.script import render


def script(*overrides: str, name: str = "llama70b", first_job: str | None = None) -> str:
    words = [f"+recipe={name}", *overrides]
    return render(compose(words), words, first_job)


def options(text: str) -> dict[str, str]:
    """The #SBATCH lines."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


class Bench:
    """Runs a script in a folder; `commands` are bodies of bash, of srun at least, that find the folder in $OUT."""

    def __init__(self, folder: Path, text: str, srun: str, env: dict[str, str] | None = None, **commands: str):
        self.folder = folder
        (folder / "bin").mkdir(exist_ok=True)
        scontrol = f'[ "$2" = show ] && cat {folder}/shown || echo "$@" >> {folder}/scontrol'
        for name, body in {"srun": srun, "scontrol": scontrol, **commands}.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / "bin" / name).chmod(0o755)
        (folder / "job").write_text(text)
        if not (folder / "shown").exists():
            self.show("")
        assert subprocess.run(["bash", "-n", folder / "job"]).returncode == 0
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "42", "OUT": str(folder), **(env or {})}
        self.proc = subprocess.Popen(
            ["bash", folder / "job"],
            env=env,
            cwd=folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def show(self, text: str) -> None:
        """What scontrol shows of the job from now on."""
        (self.folder / "shown").write_text(text)

    def lose(self) -> None:
        """The node is gone, and all that ran on it."""
        os.killpg(self.proc.pid, signal.SIGKILL)
        self.proc.communicate()

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit code, and what scontrol was told since the last end."""
        self.out, self.err = self.proc.communicate(timeout=20)
        told = self.folder / "scontrol"
        words = told.read_text() if told.exists() else ""
        told.unlink(missing_ok=True)
        return self.proc.returncode, words
