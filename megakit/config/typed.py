"""Between the composed tree of plain values and the typed Config: unknown keys, missing values and wrong types are refused."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import typing
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

import yaml

from megakit.config import keys
from megakit.config.keys import MISSING, schema_keys, show
from megakit.config.schema import Config
from megakit.errors import Refused

T = TypeVar("T")


def build(tree: dict[str, Any]) -> Config:
    """The Config of a tree of plain values, for example {"train": {"seq_len": 4096, ...}, ...}.

    Raises Refused, naming the full key: a key that the schema lacks, a value that is missing, of a wrong type, or not finite.
    """
    for name in _leaves(tree):
        if name not in schema_keys():
            raise Refused(_group_given_a_value(name, tree) or keys.unknown_key(name))
    return _build(Config, tree, "")


def missing(cfg: Config) -> list[str]:
    """The keys without a value, in the order of the schema."""
    return [name for name, value in leaves(cfg).items() if value == MISSING]


def leaves(cfg: Config) -> dict[str, Any]:
    """Every key's value by its dotted name, in the order of the schema."""

    def below(node: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        for field in dataclasses.fields(node):
            value, name = getattr(node, field.name), prefix + keys.key_name(field)
            if dataclasses.is_dataclass(value):
                yield from below(value, name + ".")
            else:
                yield name, value

    return dict(below(cfg, ""))


def to_tree(cfg: Config) -> dict[str, Any]:
    """A nested dict of plain values under the names that a recipe uses."""
    return nested(leaves(cfg))


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """{"train.steps": 4, ...} -> {"train": {"steps": 4, ...}, ...}."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, leaf = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = copy.copy(value)  # of lists and maps
    return tree


def to_yaml(cfg: Config) -> str:
    """The whole configuration, resolved, as YAML that `--config-file` takes."""
    text = yaml.safe_dump(to_tree(cfg), sort_keys=False, allow_unicode=True, width=120)
    return text.replace("${", "\\${")  # what is resolved is not resolved again


def replace(cfg: Config, changes: dict[str, Any]) -> Config:
    """A copy with some keys changed: {"train.steps": 4, ...}."""
    if unknown := set(changes) - set(schema_keys()):
        raise KeyError(*unknown)
    return build(nested(leaves(cfg) | changes))


def _leaves(tree: Any, prefix: str = "") -> Iterable[str]:
    """The dotted names of all that is not a dict, and of empty dicts."""
    for name, value in tree.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" not in schema_keys():
            yield from _leaves(value, f"{prefix}{name}.")
        elif not (isinstance(value, dict) and f"{prefix}{name}" in keys.group_docs()):
            yield f"{prefix}{name}"


def _group_given_a_value(name: str, tree: dict[str, Any]) -> str | None:
    if name not in keys.group_docs():
        return None
    node: Any = tree
    for part in name.split("."):
        node = node[part]
    example = next(k for k in schema_keys() if k.startswith(name + "."))
    return f"{name} = {show(node)}, but {name} is a group of keys: give them one by one, as in {example}=..."


def _build(cls: type[T], tree: dict[str, Any], prefix: str) -> T:
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy doubts that a class can be hashed
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name, hint = keys.key_name(field), hints[field.name]
        if dataclasses.is_dataclass(hint):
            values[field.name] = _build(typing.cast(type, hint), tree.get(name, {}), f"{prefix}{name}.")
        elif name in tree:
            values[field.name] = tree[name] if tree[name] == MISSING else _typed(prefix + name, tree[name], hint)
    return cls(**values)


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a group's keys. Working them out takes long, and a search replaces keys a thousand times."""
    return typing.get_type_hints(cls)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value in the key's type. Strict: only a whole number where a number is wanted is converted."""
    for option in keys.options(hint):
        if typing.get_origin(option) is list and isinstance(value, list):
            (item,) = typing.get_args(option)
            return [_typed(f"{name}.{i}", v, item) for i, v in enumerate(value)]
        if typing.get_origin(option) is dict and isinstance(value, dict):
            _, item = typing.get_args(option)
            return {str(k): _typed(f"{name}[{k}]", v, item) for k, v in value.items()}
        if option is float and type(value) in (int, float):
            if not math.isfinite(value):
                raise Refused(f"{name} = {value} is not a finite number")
            return float(value)
        if type(value) is option:
            return value
    raise Refused(f"{name} = {show(value)} must be {keys.type_name(hint)}{_cure(name, value, hint)}")


def _cure(name: str, value: Any, hint: Any) -> str:
    accepted = keys.options(hint)
    if int in accepted and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return f": write {name}={int(value)}"
    if accepted[0] is str and isinstance(value, (bool, int, float)):
        return f': in a yaml file write it in quotes, "{show(value)}"'
    if isinstance(value, str) and (int in accepted or float in accepted):
        try:
            float(value)
        except ValueError:
            return ""
        return ": write it without quotes"
    if typing.get_origin(accepted[0]) is list and not isinstance(value, (list, dict)):
        shape = re.match(r"\[.*?\]", schema_keys()[name].doc) if name in schema_keys() else None
        return f": write {name}={shape[0] if shape else f'[{show(value)}]'}"
    return ""
