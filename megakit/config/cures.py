"""Cures of a refusal: changes of keys that are tried on the rules before they are named, so that none is refused in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megakit.config.keys import show
from megakit.config.schema import Config
from megakit.config.typed import replace
from megakit.errors import Refused

Change = dict[str, Any]
"""Keys and what they are set to."""

NAMED = 3
"""Cures that are named, at most."""
TRIED = 32
"""Cures of a kind that are tried, at most."""
STEPS = 2
"""Refusals of a cure that are followed: their cures are named with it."""


class Broken(Refused):
    """A rule that is broken, and changes of keys that may mend it: of each kind several, the least first."""

    def __init__(self, why: str, *kinds: Iterable[Change]):
        self.why, self.kinds = why, [list(kind)[:TRIED] for kind in kinds]
        first = [kind[0] for kind in self.kinds if kind]
        super().__init__(f"{why}: use {', or '.join(_grouped(first))}" if first else why)


def broken_alone(name: str, value: Any, beside: str, default: Any, *kinds: Iterable[Change]) -> Broken:
    """The refusal of a value that has no effect `beside` another: with its default, or one of `kinds`, it isn't refused."""
    return Broken(f"{name} = {show(value)} changes nothing with {beside}", [{name: default}], *kinds)


def tried(broken: Broken, cfg: Config, check: Callable[[Config], object]) -> Refused:
    """The refusal with, of each kind, the first of its cures after which `check` raises nothing."""
    works: list[Change] = []
    for kind in broken.kinds:
        found: list[Change] = []
        for cure in kind:
            change = _mended(cfg, cure, check)
            if change is not None:
                found.append(change)
                if len(change) == len(cure):
                    break
        if found and (least := min(found, key=len)) not in works:
            works.append(least)
    named = sorted(works, key=len)[:NAMED]  # stable: of those as long in the order of their kinds
    if not named and (then := _refused_then(broken, cfg, check)):
        return then
    if not named:
        return Refused(f"{broken.why}: one other value will not do, python -m megakit.plan --search finds grids that fit")
    return Refused(f"{broken.why}: use {', or '.join(_grouped(named))}")


def _refused_then(broken: Broken, cfg: Config, check: Callable[[Config], object]) -> Refused | None:
    """The refusal with its first cure and another refusal that stays whatever is cured here; None where keys belong together."""
    cure = next((kind[0] for kind in broken.kinds if kind), None)
    if cure is None:
        return None
    try:
        check(replace(cfg, cure))
    except Broken:
        return None
    except Refused as then:
        if not any(key in str(then) for key in cure):
            return Refused(f"{broken.why}: use {next(_grouped([cure]))}; what is refused then: {then}")
    return None


def _mended(cfg: Config, cure: Change, check: Callable[[Config], object]) -> Change | None:
    """The cure, with what else it needs; None where that changes a key back or takes too many steps."""
    change = dict(cure)
    for step in range(STEPS + 1):
        try:
            check(replace(cfg, change))
            return change
        except Broken as then:
            more = next((c for kind in then.kinds for c in kind if not c.keys() & change.keys()), None)
            if more is None or step == STEPS:
                return None
            change |= more
        except Refused:
            return None
    return None


def _grouped(changes: list[Change]) -> Iterator[str]:
    """Neighbours that change the same key alone are written as KEY=A or B."""
    at = 0
    while at < len(changes):
        alike = [changes[at]]
        while at + len(alike) < len(changes) and len(changes[at]) == 1 and changes[at + len(alike)].keys() == changes[at].keys():
            alike.append(changes[at + len(alike)])
        if len(alike) > 1:
            ((key, _),) = alike[0].items()
            yield f"{key}={' or '.join(show(change[key]) for change in alike)}"
        else:
            yield " ".join(f"{key}={show(value)}" for key, value in changes[at].items())
        at += len(alike)


def near(key: str, value: int, unit: int) -> list[Change]:
    """The key set to the multiples of `unit` around its value."""
    return [{key: n} for n in (value // unit * unit, value // unit * unit + unit) if n]


def nearest_first(numbers: list[int], to: int) -> list[int]:
    """By their ratio to a number, the smaller one of two as near first."""
    return sorted((n for n in numbers if n != to), key=lambda n: (max(n / to, to / n), n))


def divisors(n: int) -> list[int]:
    """From 1 to the number itself."""
    return [d for d in range(1, n + 1) if n % d == 0]


def listed(numbers: list[int]) -> str:
    """For a message: 1, 2, 4"""
    return ", ".join(map(str, numbers))
