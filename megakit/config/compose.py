"""recipes/ + the user's recipe folder + overrides -> a checked Config.

Hydra chooses and joins the files (`+recipe=NAME`, `cluster=h200`); values (`optim.lr=1e-4`) are set afterwards, with or
without `+`, and everything is held against the schema. Whatever is wrong is one line of Refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import megakit
from megakit.config import keys, rules, secret_rules, typed
from megakit.config.keys import schema_keys
from megakit.config.schema import Config
from megakit.errors import Refused

RECIPES = Path(megakit.__file__).resolve().parent.parent / "recipes"
"""The shipped recipes: beside the package, in a checkout and in a wheel."""

_FAULTS = (HydraException, OmegaConfBaseException, MissingConfigException, yaml.YAMLError, ValueError, TypeError, OSError)


@dataclass(frozen=True)
class _Value:
    """`optim.lr=1e-4`, or `~optim.lr`."""

    key: str
    value: Any
    delete: bool


def compose(
    overrides: list[str], config_dir: str | None = None, config_file: str | None = None, *, checked: bool = True
) -> Config:
    """The Config of recipes/ and `overrides`, strict, and if `checked` held to rules.py.

    `config_dir`: a folder with the user's own recipe/NAME.yaml, model/NAME.yaml and so on; it comes after the shipped ones.
    `config_file`: a whole configuration, as config.yaml of a run folder, in place of recipes.
    Raises Refused.
    """
    user = user_folder(config_dir)
    files = group_files(user)
    choices, values = _sorted(overrides, files)
    if config_file is not None:
        if choices:
            raise Refused(f"--config-file = {config_file} and {choices[0]} are both given: a configuration file takes no recipe")
        composed = _load(config_file)
    else:
        composed = _hydra(choices, user, files)
    tree = _resolved(composed, values)
    cfg = typed.build(tree)
    if names := typed.missing(cfg):
        chosen = next((c for c in choices if c.startswith("+recipe=")), config_file and f"={config_file}")
        raise Refused(_missing(names, files, chosen and chosen.partition("=")[2]))
    secret_rules.check(cfg)
    if checked:
        rules.check(cfg)
    return cfg


def group_files(user: Path | None = None) -> dict[str, list[str]]:
    """The names in each group of the recipe folders: {"recipe": ["demo", ...], "cluster": ["h100", ...], ...}."""
    out: dict[str, list[str]] = {}
    for root in filter(None, (RECIPES, user)):
        for path in sorted(root.glob("*/*.yaml"), key=_natural):
            out.setdefault(path.parent.name, []).append(path.stem)
    return out


def recipe_summaries(config_dir: str | None = None) -> dict[str, str]:
    """Every recipe and its first comment line that is not Hydra's."""
    out = {}
    for root in filter(None, (RECIPES, user_folder(config_dir))):
        for path in sorted(root.glob("recipe/*.yaml"), key=_natural):
            comments = [
                ln[1:].strip() for ln in path.read_text(encoding="utf-8", errors="replace").splitlines() if ln.startswith("#")
            ]
            out[path.stem] = next((c for c in comments if not c.startswith("@")), "")
    return out


def user_folder(config_dir: str | None) -> Path | None:
    """The folder of --config-dir. Raises Refused where it is not there, or hides behind a shipped file of the same name."""
    if config_dir is None:
        return None
    user = Path(config_dir).absolute()
    if not user.is_dir():
        raise Refused(f"--config-dir = {config_dir} is not a folder: give one that has recipe/NAME.yaml")
    if user.resolve() == RECIPES:
        raise Refused(f"--config-dir = {config_dir} is the folder of the shipped recipes, which is always read: leave it out")
    for path in sorted(user.glob("*/*.yaml")):
        name = path.relative_to(user)
        if (RECIPES / name).exists():
            raise Refused(f"{path} has the name of a shipped file, recipes/{name}: rename it")
        if re.search(r"^hydra\s*:", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            raise Refused(f"{path} has a section hydra, whose settings have no effect here: take it out")
    return user


def _natural(path: Path) -> list[tuple[int, str]]:
    """llama7b before llama13b."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", f"{path.parent.name}/{path.stem}")]


def _sorted(overrides: list[str], files: dict[str, list[str]]) -> tuple[list[str], list[_Value]]:
    """Overrides that choose a file, in Hydra's form, and those that set a value."""
    choices, values = [], []
    for text in overrides:
        prefix = text[: len(text) - len(text.lstrip("+~"))]
        name, equals, raw = text[len(prefix) :].partition("=")
        group = name.split("@")[0]
        if group in files and not raw.startswith("{"):
            choices.append(_choice(text, prefix, group, name, raw, files[group]))
        elif group == "hydra" or group.startswith(("hydra.", "hydra/")):
            raise Refused(f"{text}: Hydra's own settings have no effect here; for recipe folders use --config-dir")
        elif not name or not (equals or prefix == "~"):
            raise Refused(f"{text}: an override is written KEY=VALUE, as in train.steps=100, and a recipe +recipe=NAME")
        else:
            values.append(_value(text, name, raw))
    for group in {c.partition("=")[0] for c in choices}:
        twice = [c for c in choices if c.partition("=")[0] == group]
        if len(twice) > 1:
            raise Refused(f"{twice[0]} and {twice[1]} are both given: give one")
    return choices, values


def _choice(text: str, prefix: str, group: str, name: str, raw: str, there: list[str]) -> str:
    """`+recipe=NAME` or `cluster=NAME` in the form that Hydra wants: recipe is appended, the others are in its list."""
    if prefix == "~" or "@" in name or raw in ("", "null"):
        raise Refused(f"{text}: choose one of {', '.join(there)}, as in {'+' * (group == 'recipe')}{group}={there[0]}")
    if raw not in there:
        guess = keys.nearest(raw, there)
        hint = f"did you mean {guess}? Choose" if guess else "choose"
        own = f"--config-dir DIR adds DIR/{group}/NAME.yaml"
        raise Refused(f"there is no {group} {raw}: {hint} one of {', '.join(there)}; {own}")
    if (RECIPES / group).is_dir():
        prefix = "+" * (group == "recipe")
    return f"{prefix}{group}={raw}"


def _value(text: str, name: str, raw: str) -> _Value:
    """One value override. The value of a text key is taken as it stands, so that it needs no quotes of Hydra's."""
    key = schema_keys().get(name)
    if key is None and name not in keys.group_docs():
        raise Refused(keys.unknown_key(name))
    if text.startswith("~"):
        return _Value(name, None, True)
    if key and key.is_text and raw != "null" and raw[:1] not in ("'", '"') and "${" not in raw:
        return _Value(name, raw, False)
    try:
        override: Override = OverridesParser.create().parse_override(f"{name}={raw}")
        if override.is_sweep_override():
            raise Refused(f"{text}: give one value, or a list in brackets, as in {name}=[{raw}]")
        return _Value(name, override.value(), False)
    except _FAULTS as fault:
        raise Refused(
            f"{text} can't be read: {_one_line(fault)}; text with special characters needs quotes inside the value"
        ) from fault


def _hydra(choices: list[str], user: Path | None, files: dict[str, list[str]]) -> DictConfig:
    search = [] if user is None else ["hydra.searchpath=[" + "'file://" + str(user).replace("'", "\\'") + "']"]
    try:
        with initialize_config_dir(str(RECIPES), version_base="1.3"):
            return hydra_compose("config", overrides=search + choices)
    except MissingConfigException as fault:
        group, _, name = (fault.missing_cfg_file or "").rpartition("/")
        guess = keys.nearest(name, files.get(group, []))
        hint = f"did you mean {guess}?" if guess else f"there are {', '.join(files.get(group, []))}"
        raise Refused(f"a recipe asks for {group}/{name}.yaml, which is not there: {hint}") from fault
    except _FAULTS as fault:
        raise Refused(f"{' '.join(choices)} can't be composed: {_one_line(fault)}") from fault


def _load(config_file: str) -> DictConfig:
    try:
        loaded = OmegaConf.load(config_file)
    except _FAULTS as fault:
        raise Refused(f"--config-file = {config_file} can't be read: {_one_line(fault)}") from fault
    if not isinstance(loaded, DictConfig):
        raise Refused(f"--config-file = {config_file} is not a configuration: give config.yaml of a run folder")
    return loaded


def _resolved(composed: DictConfig, values: list[_Value]) -> dict[str, Any]:
    """Plain values: the composed tree over the schema's defaults, with overrides set and interpolations resolved."""
    at = "the recipe"
    OmegaConf.set_struct(composed, False)
    try:
        for v in values:
            at = v.key
            if v.delete:
                _delete(composed, v.key)
            else:
                OmegaConf.update(composed, v.key, v.value, merge=True, force_add=True)
        at = "the recipe"
        defaults = typed.nested({key.name: key.default for key in schema_keys().values()})
        tree = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(defaults), composed), resolve=True)
    except _FAULTS as fault:
        raise Refused(f"{at} can't be used: {_one_line(fault)}") from fault
    assert isinstance(tree, dict)
    return {str(k): v for k, v in tree.items()}


def _delete(tree: DictConfig, name: str) -> None:
    group, _, leaf = name.rpartition(".")
    node = OmegaConf.select(tree, group) if group else tree
    if not isinstance(node, DictConfig) or leaf not in node:
        raise Refused(f"~{name}: the recipe does not set {name}, so there is nothing to take out")
    del node[leaf]


def _missing(names: list[str], files: dict[str, list[str]], recipe: str | None) -> str:
    """The refusal of a configuration in which keys have no value."""
    if recipe is None:
        recipes = ", ".join(files["recipe"])
        return f"no recipe is given: add +recipe=NAME, one of {recipes} ({len(names)} keys have no value: {names[0]}, ...)"
    first, group = names[0], names[0].split(".")[0]
    more = f" (nor have {', '.join(names[1:4])}{', ...' if len(names) > 4 else ''})" if len(names) > 1 else ""
    by_group = f", or {group}=NAME, one of {', '.join(files[group])}" if group in files else ""
    return f"{first} has no value in {recipe}{more}: add {first}=VALUE{by_group}"


def _one_line(fault: BaseException) -> str:
    """What a library says, without its tail of search paths and links."""
    lines = []
    for line in str(fault).splitlines():
        if line.startswith(("Config search path", "See https", "    full_key:", "    object_type=", "    reference_type=")):
            break
        lines.append(line.strip())
    return " ".join(" ".join(lines).split()).rstrip(".") or type(fault).__name__


__all__ = ["RECIPES", "compose", "group_files", "recipe_summaries", "schema_keys", "user_folder"]
