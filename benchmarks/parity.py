"""The parity matrix: how far loss and gradient norm of every layout are from one process of plain torch in float64.

    python benchmarks/parity.py

5 AdamW steps with clipping that bites, GPT-2 (tied, biases) and Llama (GQA), fp32. tests/train/test_parity.py holds every
cell to 1e-5; this prints the figures.
"""

from __future__ import annotations

import itertools

from rich.console import Console
from rich.table import Table

from tests.pool import Pool
from tests.tiny import tiny
from tests.train import oracle
from tests.train.parity import assemble, train, worst
from tests.train.test_parity import GRIDS


def main() -> None:
    pools = {world: Pool(world) for world in (1, 2, 4, 8)}
    table = Table(
        "family", "zero", "sp", *("x".join(map(str, grid)) for grid in GRIDS), title="worst relative difference, TPxPPxDP"
    )
    for family in ("llama", "gpt2"):
        begin = assemble([r.before for r in pools[1].run(train, tiny(family), steps=0)])
        weights = {n.removeprefix("master."): t for n, t in begin.items() if n.startswith("master.")}
        reference, _, _ = oracle.train(tiny(family), weights)
        for zero, sp in itertools.product((0, 1), (False, True)):
            row = []
            for tp, pp, dp in GRIDS:
                if (sp and tp == 1) or (zero and dp == 1):
                    row.append("")
                    continue
                keys = {"tp": tp, "pp": pp, "dp": dp, "zero": zero, "sequence_parallel": sp}
                cfg = tiny(family, **{f"parallel__{k}": v for k, v in keys.items()})
                row.append(f"{worst(pools[tp * pp * dp].run(train, cfg)[0].curve, reference):.1e}")
            table.add_row(family, str(zero), "yes" if sp else "no", *row)
    Console(width=120).print(table)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
