"""The parity table: how far each feature on each layout is from one process, in loss and gradient norm.

    python benchmarks/parity.py [--write] [--rows TEXT]

5 clipped optimizer steps in fp32 from the same weights on the same global batch. --write puts the table into
docs/parity.md; --rows keeps the rows whose name contains TEXT.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tests.pool import Pool
from tests.train import oracle
from tests.train.features import FEATURES, LAYOUTS, STEPS, TOLERANCE, Feature, cells, config, reference_config, world
from tests.train.parity import assemble, train, worst

BEGIN, END = "<!-- made by benchmarks/parity.py --write -->\n", "<!-- end -->\n"
DOC = Path(__file__).parent.parent / "docs" / "parity.md"


def measure(rows: list[Feature]) -> dict[tuple[str, str], float]:
    """Largest relative difference of loss and gradient norm, by (row, column)."""
    pools = {n: Pool(n) for n in {1, *map(world, LAYOUTS)}}
    out = {}
    references: dict[str, list[tuple[float, float]]] = {}
    todo = [(f, layout) for f, layout in cells() if f in rows]
    for feature, layout in track(todo, "cells", console=Console(stderr=True)):
        if feature.name not in references:
            cfg = reference_config(feature)
            (result,) = pools[1].run(train, cfg, 0 if feature.oracle else STEPS)
            start = {n.removeprefix("master."): t for n, t in assemble([result.before]).items() if n.startswith("master.")}
            references[feature.name] = oracle.train(cfg, start, STEPS)[0] if feature.oracle else result.curve
        results = pools[world(layout)].run(train, config(feature, layout), STEPS)
        assert all(r.curve == results[0].curve for r in results), f"{feature.name}, {layout}: ranks disagree"
        assemble([r.after for r in results])
        out[feature.name, layout] = worst(results[0].curve, references[feature.name])
    for pool in pools.values():
        pool.close()
    return out


def markdown(rows: list[Feature], cells: dict[tuple[str, str], float]) -> str:
    lines = ["| |" + "|".join(LAYOUTS) + "|", "|---" * (len(LAYOUTS) + 1) + "|"]
    for feature in rows:
        row = [f"{cells[feature.name, layout]:.1e}" if (feature.name, layout) in cells else "" for layout in LAYOUTS]
        lines.append(f"|{feature.name}{'' if feature.oracle else ' *'}|" + "|".join(row) + "|")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/parity.md")
    parser.add_argument("--rows", default="", help="keep the rows whose name contains this")
    args = parser.parse_args()
    rows = [f for f in FEATURES if args.rows in f.name]
    found = measure(rows)
    text = markdown(rows, found)
    largest = max(found.values())
    summary = f"{len(found)} cells, the largest is {largest:.1e}.\n"
    print(text + "\n" + summary)
    if args.write:
        before, after = DOC.read_text().split(BEGIN)[0], DOC.read_text().split(END)[1]
        DOC.write_text(f"{before}{BEGIN}\n{text}\n{summary}\n{END}{after}")
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
