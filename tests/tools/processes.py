"""Run the command-line tools as users do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tool(name: str, *arguments: object) -> list[str]:
    """The command line of tools/NAME.py."""
    return [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]


def run_tool(name: str, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run it to its end; 60 s at most."""
    return subprocess.run(tool(name, *arguments), capture_output=True, text=True, cwd=cwd, timeout=60)


def modules_after(name: str, *arguments: object) -> set[str]:
    """Modules that the tool has imported when it leaves."""
    code = (
        f"import sys; sys.argv = {[name, *map(str, arguments)]!r}\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import importlib\n"
        "try:\n"
        f"    importlib.import_module('tools.{name}').main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('MODULES', *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    return set(out[out.index("MODULES") :].split()[1:])
