"""Every feature trains like one process, on one layout; benchmarks/parity.py has all cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.features import (
    FEATURES,
    LAYOUTS,
    STEPS,
    TOLERANCE,
    cells,
    chosen,
    config,
    reference_config,
    reference_curve,
    refused,
    world,
)
from tests.train.parity import assemble, train, worst

DOC = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.fixture(scope="module")
def reference(pools):
    """The curve of one process, by feature."""
    made = {}

    def of(feature):
        key = repr(reference_config(feature))
        if key not in made:
            made[key] = reference_curve(feature, pools(1))
        return made[key]

    return of


def cells_of_rows():
    """Those of 8 ranks are slow but for every fourth: docs/parity.md has all of them, measured."""
    large = 0
    for feature, layout in chosen():
        large += world(layout) == 8
        slow = [pytest.mark.slow] if world(layout) == 8 and large % 4 else []
        yield pytest.param(feature, layout, id=f"{feature.name}-{layout}", marks=slow)


@pytest.mark.parametrize(("feature", "layout"), list(cells_of_rows()))
def test_feature_equals_one_process(pools, reference, kernels, feature, layout):
    results = pools(world(layout)).run(train, config(feature, layout), STEPS)
    assert all(r.curve == results[0].curve for r in results), "ranks disagree"
    assert worst(results[0].curve, reference(feature)) < TOLERANCE
    assemble([r.after for r in results])  # replicas equal to the bit


def test_no_row_is_empty_and_what_is_blank_is_refused_with_a_cure():
    there = {(f.name, layout) for f, layout in cells()}
    for feature in FEATURES:
        assert any(world(layout) > 1 for name, layout in there if name == feature.name), feature.name
        for layout in LAYOUTS:
            if (feature.name, layout) not in there and not set(feature.without) & set(LAYOUTS[layout]):
                reason = refused(config(feature, layout))
                assert reason and "\n" not in reason and ":" in reason, (feature.name, layout, reason)


def test_the_published_table_has_every_cell():
    """docs/parity.md is made by benchmarks/parity.py --write: a row or a column that is added asks for a new run."""
    lines = [line.strip("|").split("|") for line in DOC.read_text().splitlines() if line.startswith("|")]
    (_, *columns), _, *rows = lines
    assert columns == list(LAYOUTS)
    assert [name.removesuffix(" *") for name, *_ in rows] == [f.name for f in FEATURES]
    published = {(f.name, c) for f, (_, *values) in zip(FEATURES, rows) for c, v in zip(columns, values) if v.strip()}
    assert published == {(f.name, layout) for f, layout in cells()}
    assert all(float(v) < TOLERANCE for _, *values in rows for v in values if v.strip())
