"""Some text of the inputs, from places spread over them, to try an encoder on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megakit.data.preprocess.blocks import Block, Place, plan_blocks
from megakit.data.preprocess.inputs import LINES, Source
from megakit.data.preprocess.lines import ByteRange
from megakit.data.preprocess.records import text_of
from megakit.errors import Refused

_PLACES = 8
_CHARACTERS_PER_PLACE = 1 << 15
_WINDOW = 1 << 17


def sample_texts(sources: Sequence[Source], keys: tuple[str, ...], limit: int) -> list[str]:
    """Texts of up to 2^15 characters from each of 8 places; the end of a longer text is cut off. Bad records are left out."""
    texts: list[str] = []
    for block in _places(sources, keys, limit):
        room = _CHARACTERS_PER_PLACE
        for record in block.work.records(keys, limit):
            for key in keys:
                text, reason = text_of(record, key, limit)
                if not reason and room > 0:
                    texts.append(text[:room])
                    room -= len(text)
            if room <= 0:
                break
    return texts


def _places(sources: Sequence[Source], keys: tuple[str, ...], limit: int) -> Iterator[Block]:
    """One block at each place; of a file that can't be cut by bytes, its beginning, once."""
    total = sum(source.size for source in sources)
    seen = Place(-1)
    for step in range(_PLACES):
        at = total * step // _PLACES
        number = 0
        while number < len(sources) - 1 and at >= sources[number].size:
            at -= sources[number].size
            number += 1
        source = sources[number]
        if source.form == LINES and not source.packing and not source.remote:
            start = max(at, seen.offset) if number == seen.source else at
            seen = Place(number, min(at + _WINDOW, source.size))
            if start < seen.offset:
                yield Block(ByteRange(source.path, start, seen.offset), number, seen, 0)
        elif number != seen.source:
            seen = Place(number)
            try:
                yield from itertools.islice(plan_blocks(sources[number : number + 1], keys, Place(), _WINDOW, limit), 1)
            except Refused:
                continue  # the job itself will say so, in its place
