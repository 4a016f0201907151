"""How well the planner's time model meets published runs, with the constants that ship.

    python benchmarks/planner_accuracy.py [--rows FILE.csv] [--held-out] [--rows-of TEXT] [--json FILE] [--write] [--fit]

Without --fit nothing is refitted: the numbers are those of megakit/planner/gpus.json and accuracy/stacks.json. --held-out
also fits each chip without each model in turn, and judges that model by it; --fit fits all rows and writes both files;
--write puts the tables into docs/planner_accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the plain command finds this clone from anywhere

from benchmarks.accuracy import fit, judge, memory, rows
from benchmarks.accuracy.stacks import FACTORS
from megakit.errors import Refused
from megakit.planner import hardware

DEFAULT = ROOT.parent / "shared" / "reference" / "measured_runs.csv"
DOC = ROOT / "docs" / "planner_accuracy.md"
BEGIN, END = "<!-- made by benchmarks/planner_accuracy.py --held-out --write -->\n", "<!-- end -->\n"
TARGET = ("target", "at most", "reached", "rows", "with factors unknown", "with factors of other grids", "all rows", "null")
MEMORY = ("group", "rows", "what was printed", "mean error", "largest error", "lowest", "highest")
COLUMNS = ("source", "model", "seq", "gpu", "n_gpus", "tp", "pp", "vpp", "cp", "dp", "zero")
KINDS = ("shipped", "held out", "held out, factor unknown", "its factor of other grids", "null")


def write_fit(runs: list[rows.Run]) -> None:
    """Fit every chip that has runs, and write gpus.json and stacks.json."""
    data, factors = json.loads(hardware.DATA.read_text()), {}
    chips: dict[str, dict[str, float]] = {}
    for chip in fit.PRIORS:
        mine = [r for r in runs if r.source.fitted and r.gpu.fitted_on == chip]
        if mine:
            constants = fit.Problem(chip, mine).fit()
            data["fitted"][chip] = {name: float(f"{value:.4g}") for name, value in constants.fitted.items()}
            chips[chip] = {name: float(f"{value:.4g}") for name, value in constants.factors.items()}
            factors.update({f"{name} on {chip}": value for name, value in chips[chip].items()})
    lines = [f'  "{n}": {json.dumps(entry)}' for n, entry in data["fitted"].items()]
    gpus = [f'  "{n}": {json.dumps(entry)}' for n, entry in data["gpus"].items()]
    hardware.DATA.write_text('{\n "fitted": {\n' + ",\n".join(lines) + '\n },\n "gpus": {\n' + ",\n".join(gpus) + "\n }\n}\n")
    FACTORS.write_text(json.dumps(factors, indent=1) + "\n")


def report(read: list[rows.Row], held_out: bool) -> dict[str, Any]:
    """All that is printed, as data."""
    good, bad = rows.runs(read)
    judged = judge.judge(good, held_out)
    memories, unknown = memory.memories(read)
    regret = judge.regrets(judged, held_out)
    sizes = [r["regret"] for r in regret]
    reasons = Counter((row.get("source", ""), why) for row, why in bad)
    return {
        "groups": judge.by_group(judged),
        "targets": targets(judged) if held_out else [],
        "regret": {
            "held out": held_out,
            "jobs": len(regret),
            "mean": sum(sizes) / len(sizes) if sizes else None,
            "max": max(sizes, default=None),
            "each": sorted(regret, key=lambda r: -r["regret"]),
        },
        "memory": memory.by_group(memories),
        "not judged": [{"source": s, "rows": n, "reason": why} for (s, why), n in reasons.items()],
        "memory not judged": [{"source": row.get("source", ""), "reason": why} for row, why in unknown],
        "runs": [
            {
                **{
                    k: j.run.row.get(k, "")
                    for k in ("source", "model", "seq", "gpu", "n_gpus", "tp", "pp", "vpp", "cp", "dp", "zero")
                },
                "micro_batch": j.run.workload.micro_batch_size,
                "precision": j.run.workload.precision,
                "measured": j.run.tokens_per_s,
                "shipped": j.shipped,
                "held_out": j.held_out,
                "null": j.null,
            }
            for j in judged
        ],
    }


TARGETS: tuple[tuple[str, tuple[str, ...], dict[str, float]], ...] = (
    ("H100, NVIDIA, bf16", ("NVIDIA, h100, bf16",), {"mean": 4.0}),
    ("H100, NVIDIA, fp8", ("NVIDIA, h100, fp8",), {"mean": 4.5}),
    ("llm-foundry", ("llm-foundry",), {"median": 3.0, "p90": 8.0}),
    ("vTrain", ("vTrain",), {"median": 6.0, "p90": 12.0}),
    ("BigScience", ("BigScience",), {"median": 4.0, "p90": 11.0}),
    ("B200", ("NVIDIA, b200", "SimuMax, b200"), {"mean": 5.0}),
)
"""(name, groups that begin so, largest held-out error in %)"""


def targets(judged: list[judge.Judged]) -> list[dict[str, Any]]:
    """What was aimed at, and what is reached on held-out models."""
    out = []
    for name, begins, bars in TARGETS:
        group = [j for j in judged if j.run.group.startswith(begins) and j.held_out is not None]
        known, nulls = [j.held_out for j in group if not j.alone], [j.null for j in group if not j.alone]
        for statistic, bar in bars.items():
            out.append(
                {
                    "target": f"{name}, {statistic}",
                    "at most": bar,
                    "reached": judge.summary(known).get(statistic),
                    "rows": len(known),
                    "with factors unknown": judge.summary([j.held_out for j in group]).get(statistic),
                    "with factors of other grids": judge.summary(
                        [j.by_grids if j.alone and j.by_grids is not None else j.held_out for j in group]
                    ).get(statistic),
                    "all rows": len(group),
                    "null": judge.summary(nulls).get(statistic),
                }
            )
    return out


def cells(entry: dict[str, Any]) -> list[str]:
    """Of a group: rows, models, and median / p90 / largest (mean) of each kind."""
    out = [str(entry["rows"]), str(entry["models"])]
    for kind in KINDS:
        s = entry[kind]
        out.append(f"{s['mean']:.1f} ({s['median']:.1f} / {s['p90']:.1f} / {s['max']:.1f})" if s else "")
    return out


def target_rows(data: dict[str, Any]) -> list[list[str]]:
    """Of the table of targets."""
    return [
        ["" if t[k] is None else f"{t[k]:.1f}" if isinstance(t[k], float) else str(t[k]) for k in TARGET] for t in data["targets"]
    ]


def memory_rows(data: dict[str, Any]) -> list[list[str]]:
    """Of the table of memory."""
    return [
        [
            name,
            str(g["rows"]),
            "allocated" if g["exact"] else "process",
            *(f"{g[k]:.1f}" for k in ("mean", "max", "lowest", "highest")),
        ]
        for name, g in data["memory"].items()
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """For the terminal."""
    errors = Table(title="Throughput, error in %: mean (median / p90 / largest)", box=box.SIMPLE_HEAD)
    for name in ("group", "rows", "models", *KINDS):
        errors.add_column(name, justify="left" if name == "group" else "right", no_wrap=name in ("rows", "models"))
    for name, entry in data["groups"].items():
        errors.add_row(name, *cells(entry))
    regret = Table(title="Regret of the grid that is predicted fastest", box=box.SIMPLE_HEAD)
    for name in ("job", "grids", "regret %", "chosen", "best"):
        regret.add_column(name)
    for r in data["regret"]["each"][:10]:
        regret.add_row(r["job"], str(r["grids"]), f"{r['regret']:.1f}", r["chosen"], r["best"])
    peaks = Table(title="Peak memory without any fit: predicted / printed - 1, in %", box=box.SIMPLE_HEAD)
    for name in MEMORY:
        peaks.add_column(name, justify="left" if name == "group" else "right")
    for row in memory_rows(data):
        peaks.add_row(*row)
    left = Table(title="Not judged", box=box.SIMPLE_HEAD)
    for name in ("rows", "source", "reason"):
        left.add_column(name)
    for entry in data["not judged"]:
        left.add_row(str(entry["rows"]), entry["source"], entry["reason"])
    aims = Table(title="Held-out models, error in %", box=box.SIMPLE_HEAD)
    for name in TARGET:
        aims.add_column(name, justify="left" if name == "target" else "right")
    for row in target_rows(data):
        aims.add_row(*row)
    return [errors, aims, regret, peaks, left]


def markdown(data: dict[str, Any]) -> str:
    """For the documentation."""
    lines = ["|group|rows|models|" + "|".join(KINDS) + "|", "|---" * (3 + len(KINDS)) + "|"]
    lines += [f"|{name}|{'|'.join(cells(entry))}|" for name, entry in data["groups"].items()]
    for place, names in enumerate((TARGET, ["---"] * len(TARGET))) if data["targets"] else ():
        lines += [""] * (not place) + ["|" + "|".join(names) + "|"]
    lines += [f"|{'|'.join(row)}|" for row in target_rows(data)]
    regret = data["regret"]
    if regret["jobs"]:
        lines += [
            "",
            f"Regret of choosing the grid that is predicted fastest, over {regret['jobs']} jobs that were measured on several"
            f" grids: {regret['mean']:.1f}% mean, {regret['max']:.1f}% largest.",
        ]
    lines += ["", "|" + "|".join(MEMORY) + "|", "|---" * len(MEMORY) + "|"]
    lines += [f"|{'|'.join(row)}|" for row in memory_rows(data)]
    lines += ["", "|rows not judged|source|reason|", "|---|---|---|"]
    lines += [f"|{e['rows']}|{e['source']}|{e['reason']}|" for e in data["not judged"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=DEFAULT, help="CSV file of measured runs")
    parser.add_argument("--rows-of", default="", help="keep the sources that contain this")
    parser.add_argument("--held-out", action="store_true", help="also judge each model by constants fitted on the others")
    parser.add_argument("--fit", action="store_true", help="fit the constants to the rows, and write them")
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/planner_accuracy.md")
    args = parser.parse_args()
    try:
        read = [row for row in rows.read(args.rows) if args.rows_of in row.get("source", "")]
    except Refused as why:
        print(why, file=sys.stderr)
        return why.code
    if args.fit:
        write_fit(rows.runs(read)[0])
        hardware.catalogue.cache_clear()
    data = report(read, args.held_out)
    console = Console(width=None if sys.stdout.isatty() else 240)
    for table in tables(data):
        console.print(table)
    regret = data["regret"]
    if regret["jobs"]:
        console.print(f"regret {regret['mean']:.1f}% mean, {regret['max']:.1f}% largest, over {regret['jobs']} jobs")
    console.print(f"{len(data['runs'])} rows judged, {sum(e['rows'] for e in data['not judged'])} not")
    if args.json:
        args.json.write_text(json.dumps(data, indent=1, allow_nan=True) + "\n")
    if args.write:
        before, after = DOC.read_text().split(BEGIN)[0], DOC.read_text().split(END)[1]
        DOC.write_text(f"{before}{BEGIN}\n{markdown(data)}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
