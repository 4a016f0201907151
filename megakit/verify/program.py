"""What one rank communicates in a step, as data: its program. No torch here.

A program is a list of events, posts and waits, in the order in which the rank's own thread makes them. It doesn't name ranks:
a peer is a place in the group, so that ranks that do the same have equal programs.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

P2P = ("send", "recv")


class Call(NamedTuple):
    """An operation as it is posted; the same in every repetition."""

    op: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather_objects, shift, send or recv."""
    group: str
    """The name of the group of the grid that the engine asked for."""
    queue: str
    """The name of the first group that has the same process group: groups of the same ranks may share one."""
    shape: tuple[int, ...]
    dtype: str
    detail: str = ""
    """What else must agree: sum or max, the source of a broadcast, of a message what it carries."""
    peer: int | None = None
    """Of send and recv: place in the group."""
    site: str = ""
    """The line of code that asked for it."""

    @property
    def meaning(self) -> tuple[str, tuple[int, ...], str, str]:
        """What must be equal on all members of the group."""
        return (self.op, self.shape, self.dtype, self.detail)

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" {'to' if self.op == 'send' else 'from'} place {self.peer}"
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.op} {list(self.shape)} {self.dtype}{detail}{peer} on {self.group}"


class Post(NamedTuple):
    """An operation begins; its number counts the posts of the program."""

    call: Call
    label: str = ""
    """What the rank was computing: F3, B3c1, optimizer."""


class Wait(NamedTuple):
    """The rank goes on when the operation of that number is done."""

    number: int


@dataclass(frozen=True)
class Program:
    """The events of one rank. `codes`: a post is the index of its call, a wait is ~number of the post."""

    calls: tuple[Call, ...]
    codes: Sequence[int]
    labels: Sequence[tuple[int, str]] = ()
    """(index of an event, what is computed from there on)."""
    pieces: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Of each all_to_all by number: rows sent to, and received from, each member. They may differ from rank to rank: what
    makes programs equal is without them."""

    @classmethod
    def of(cls, events: Sequence[Post | Wait]) -> Program:
        """From a list of events, such as `events` gives."""
        index: dict[Call, int] = {}
        codes, labels = [], [(0, "")]
        for event in events:
            if isinstance(event, Wait):
                codes.append(~event.number)
                continue
            if event.label != labels[-1][1]:
                labels.append((len(codes), event.label))
            codes.append(index.setdefault(event.call, len(index)))
        return cls(tuple(index), codes, labels)

    def events(self) -> list[Post | Wait]:
        """The events as objects: to edit."""
        return [Wait(~code) if code < 0 else Post(self.calls[code], self.label(at)) for at, code in enumerate(self.codes)]

    def label(self, at: int) -> str:
        """What was computed at an event."""
        place = bisect_right(self._label_starts, at) - 1
        return self.labels[place][1] if place >= 0 else ""

    @cached_property
    def _label_starts(self) -> list[int]:
        return [at for at, _ in self.labels]

    @cached_property
    def posts(self) -> list[int]:
        """Index of the event of each post, by number."""
        return [at for at, code in enumerate(self.codes) if code >= 0]

    def post(self, number: int) -> Call:
        return self.calls[self.codes[self.posts[number]]]

    def where(self, number: int) -> str:
        """The operation with its line of code and what was computed."""
        label = self.label(self.posts[number])
        call = self.post(number)
        return f"{call} ({call.site}{', in ' * bool(label)}{label})"

    def numbered(self) -> Iterator[tuple[int, Call]]:
        for number, at in enumerate(self.posts):
            yield number, self.calls[self.codes[at]]

    @cached_property
    def digest(self) -> str:
        """Equal for equal programs."""
        text = repr((self.calls, list(self.codes)))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def queues(self) -> dict[str, str]:
        """Names of the process groups that it uses, with the name that the engine used first."""
        out: dict[str, str] = {}
        for call in self.calls:
            out.setdefault(call.queue, call.group)
        return out

    @cached_property
    def collectives(self) -> dict[str, list[int]]:
        """By process group the numbers of what all of its members must do, shifts among them."""
        out: dict[str, list[int]] = {}
        for number, call in self.numbered():
            if call.op not in P2P:
                out.setdefault(call.queue, []).append(number)
        return out

    @cached_property
    def messages(self) -> dict[tuple[str, str, int], list[int]]:
        """By (op, process group, place of the peer) the numbers of sends and receives."""
        out: dict[tuple[str, str, int], list[int]] = {}
        for number, call in self.numbered():
            if call.op in P2P:
                assert call.peer is not None
                out.setdefault((call.op, call.queue, call.peer), []).append(number)
        return out

    def never_waited(self) -> list[int]:
        """Numbers of the operations whose end the rank doesn't wait for."""
        waited = {~code for code in self.codes if code < 0}
        return [number for number in range(len(self.posts)) if number not in waited]
