"""Every key has a doc, a default that its own rules accept, and a range or a list of words that really refuses."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from megakit.config import keys
from megakit.config.keys import MISSING, schema_keys
from megakit.config.ranges import CHOICES, FREE_TEXT, NOT_BUILT, RANGES
from megakit.config.schema import Config
from megakit.config.typed import leaves, replace, to_tree
from tests.config.tiny import TINY, refusal, tiny

KEYS = list(schema_keys().values())


def scalars(key: keys.Key) -> set[type]:
    """The plain types in a key's type."""
    out: set[type] = set()
    for option in keys.options(key.hint):
        inside = {list: typing.get_args(option), dict: typing.get_args(option)[1:]}
        out |= set(inside.get(typing.get_origin(option), (option,)))
    return out - {type(None)}


@pytest.mark.parametrize("key", KEYS, ids=lambda k: k.name)
def test_every_key_is_documented(key: keys.Key):
    assert len(key.doc) > 5 and key.doc.endswith((".", ".)", '."'))
    for word in CHOICES.get(key.name, ()):
        assert word in key.doc, f"{word} is not in the doc of {key.name}"
    if key.name in NOT_BUILT:
        assert "built" in key.doc or key.name in ("parallel.schedule", "train.precision", "ops.backend")


@pytest.mark.parametrize("key", KEYS, ids=lambda k: k.name)
def test_every_number_has_a_range_and_every_text_is_free_or_of_a_list(key: keys.Key):
    types = scalars(key)
    assert types <= {int, float, bool, str}
    assert (key.name in RANGES) == bool(types & {int, float})
    assert (key.name in CHOICES) + (key.name in FREE_TEXT) == (str in types)


def test_the_tables_name_only_keys_of_the_schema():
    assert {*RANGES, *CHOICES, *FREE_TEXT, *NOT_BUILT} <= set(schema_keys())
    assert set(keys._ELSEWHERE.values()) <= set(schema_keys())


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range_are_refused(name: str):
    key, span = schema_keys()[name], RANGES[name]
    outside = [(span.low, "greater than") if span.open_low else (span.low - 1, "at least")]
    if span.high is not None:
        outside.append((span.high, "less than") if span.open_high else (span.high + 1, "at most"))
    for value, words in outside:
        listed = f"[{value}]" if "list" in key.type_name else f"{{a: {value}}}" if "map" in key.type_name else str(value)
        line = refusal(f"{name}={listed}")
        if name in NOT_BUILT and "not built yet" in line:
            continue
        shown = value if int in scalars(key) else float(value)
        bound = span.high if words in ("less than", "at most") else span.low
        place = ".0" if listed.startswith("[") else "[a]" if listed.startswith("{") else ""
        assert line == f"{name}{place} = {shown} must be {words} {bound}"


@pytest.mark.parametrize("name", CHOICES)
def test_words_not_in_the_list_are_refused(name: str):
    line = refusal(f"{name}=zzz")
    assert f"{name} = zzz is not one of " in line and all(word in line for word in CHOICES[name])


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("checkpoint.async=true", "false"),
    ],
)
def test_what_is_not_built_is_refused_as_such(override: str, instead: str):
    name, value = override.split("=")
    assert refusal(override) == f"{name} = {value} is not built yet: use {instead}"


def test_defaults_pass_their_own_rules():
    given = {override.split("=")[0] for override in TINY}
    values = leaves(tiny())
    for key in KEYS:
        if key.default != MISSING and key.name not in given:
            assert values[key.name] == key.default


def test_the_tree_has_the_names_that_recipes_use():
    tree = to_tree(tiny())
    assert tree["checkpoint"]["async"] is False and "async_save" not in tree["checkpoint"]
    assert list(tree) == [f.name for f in dataclasses.fields(Config)]


def test_replace_changes_one_key_of_a_copy():
    cfg = tiny()
    assert replace(cfg, {"launch.slurm.partition": "gpu"}).launch.slurm.partition == "gpu"
    assert cfg.launch.slurm.partition is None
    with pytest.raises(KeyError):
        replace(cfg, {"train.lrr": 1})


def test_type_names():
    names = {key.name: key.type_name for key in KEYS}
    assert names["train.steps"] == "a whole number or null"
    assert names["optim.lr"] == "a number"
    assert names["data.path"] == "a list of text"
    assert names["data.weights"] == "a list of numbers or null"
    assert names["parallel.layers_per_stage"] == "a list of whole numbers or null"
    assert names["checkpoint.resume"] == "a whole number or text"
