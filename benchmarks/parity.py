"""The parity table: how far each feature on each layout is from one process, in loss and gradient norm.

    python benchmarks/parity.py [--write] [--rows TEXT ...]

5 clipped optimizer steps in fp32 from the same weights on the same global batch. --write puts the table into
docs/parity.md; --rows keeps the rows whose name contains one of the TEXTs, the others stay as they are published.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the plain command finds this clone from anywhere

from megakit.ops import build
from tests.ops import emulation
from tests.pool import Pool
from tests.train.features import FEATURES, LAYOUTS, STEPS, TOLERANCE, Feature, config, layouts, reference_curve, world
from tests.train.parity import assemble, train, worst

BEGIN, END = "<!-- made by benchmarks/parity.py --write -->\n", "<!-- end -->\n"
DOC = ROOT / "docs" / "parity.md"


def measure(rows: list[Feature]) -> Iterator[tuple[Feature, dict[str, float]]]:
    """Row by row, the largest relative difference of loss and gradient norm by column."""
    pools = {n: Pool(n) for n in {1, *map(world, LAYOUTS)}}
    for feature in rows:
        reference, found = reference_curve(feature, pools[1]), {}
        for layout in layouts(feature):
            results = pools[world(layout)].run(train, config(feature, layout), STEPS)
            assert all(r.curve == results[0].curve for r in results), f"{feature.name}, {layout}: ranks disagree"
            assemble([r.after for r in results])
            found[layout] = worst(results[0].curve, reference)
        yield feature, found
    for pool in pools.values():
        pool.close()


def markdown(feature: Feature, found: dict[str, float]) -> str:
    row = [f"{found[layout]:.1e}" if layout in found else "" for layout in LAYOUTS]
    return f"|{feature.name}{'' if feature.oracle else ' *'}|{'|'.join(row)}|"


def published() -> dict[str, str]:
    """Lines of the table as it is, by row."""
    lines = [line for line in DOC.read_text().splitlines() if line.startswith("|")]
    return {line.split("|")[1].removesuffix(" *"): line for line in lines[2:]}


def values(line: str) -> list[float]:
    return [float(cell) for cell in line.split("|")[2:] if cell]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/parity.md")
    parser.add_argument("--rows", nargs="+", default=[""], help="keep the rows whose name contains one of these")
    args = parser.parse_args()
    build.build(build.emulated(), emulation.FOLDER)
    os.environ["MEGAKIT_KERNELS"] = str(emulation.FOLDER)  # before a worker starts
    head, rows = ["| |" + "|".join(LAYOUTS) + "|", "|---" * (len(LAYOUTS) + 1) + "|"], {}
    print("\n".join(head))
    for feature, found in measure([f for f in FEATURES if any(text in f.name for text in args.rows)]):
        rows[feature.name] = markdown(feature, found)
        print(rows[feature.name], flush=True)  # a run takes a while: each row when it is there
    if args.write:
        rows = published() | rows
        rows = {f.name: rows[f.name] for f in FEATURES}
    every = [value for line in rows.values() for value in values(line)]
    largest = max(every)
    summary = f"{len(every)} cells, the largest is {largest:.1e}.\n"
    print("\n" + summary)
    if args.write:
        table = "\n".join([*head, *rows.values()])
        before, after = DOC.read_text().split(BEGIN)[0], DOC.read_text().split(END)[1]
        DOC.write_text(f"{before}{BEGIN}\n{table}\n\n{summary}\n{END}{after}")
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
