"""Characters that libraries may see differently, because Unicode is newer in one than in the other.

How byte-level tokenizers split a text depends on which characters are letters, numbers, marks and spaces. Characters that
Unicode 14 (2021) or older has keep their class; a library made for Unicode 15 takes a letter of Unicode 17 for no character
at all. Texts that hold one are rare, and are left to the reference library.
"""

from __future__ import annotations

import re

_RANGES = """
558 58B-58C 5C8-5C9 88F 897 B53-B54 C5C CDC CF3 ECE 1ACF-1AF0 1B4E-1B4F 1B7F 1C89-1C8A 208F 209D-209F 20C1-20C4
2427-2429 2B96 2E60-2E63 2FFC-2FFF 31E4-31EF A7CB-A7CF A7D2 A7D4 A7DA-A7F1 AB6C-AB6D FBC3-FBD2 FD90-FD91 FDC8-FDCE
105C0-105F3 107BB-107BF 10940-10959 10D40-10D8F 10EC2-10EFF 1123F-11241 11380-113E2 116D0-116E3 11B00-11BF9 11DB0-11DF1
11F00-11F5A 1246F 12475-1247F 12550-12686 1342F 13439-143FA 16100-16139 16D40-16D79 16EA0-16ED3 16FF2-16FF6 187F8-187FF
18CD6-18CFF 18D09-191D2 1B123-1B132 1B155 1B168 1CC00-1CEFD 1D127-1D128 1D1EB-1D1FF 1D250-1D2D3 1D6A6 1DB00-1DB1C
1DF1F-1DFFF 1E030-1E08F 1E4D0-1E6FF 1F1AE 1F6D8-1F6DC 1F774-1F77F 1F7D9-1F7DB 1F7F1-1F7FF 1F8B2-1F8D8 1FA54-1FA57
1FA75-1FA77 1FA87-1FA8F 1FAAD-1FAAF 1FABB-1FABF 1FAC6-1FACF 1FADA-1FADF 1FAE8-1FAEF 1FAF7-1FAFA 1FBCB-1FBEF 1FBFA
2B739-2B73F 2B81E 2CEA2-2CEAD 2EBF0-2EE5D 31350-3FC3F
"""
"""First and last code points, in hex, of what Unicode 15 to 18 added; code points that are still free may lie between."""


def _classes(ranges: str) -> tuple[str, str]:
    low, high = "", ""
    for one in ranges.split():
        first, _, last = one.partition("-")
        start, end = int(first, 16), int(last or first, 16)
        if start < 0x10000:
            low += f"{chr(start)}-{chr(end)}"
        else:
            high += f"{chr(start)}-{chr(end)}"
    return low, high


_LOW, _HIGH = _classes(_RANGES)
# one lookup per character up to U+FFFF, where Python compares those above with each range: so these are taken out first
_SUSPECT = re.compile(f"[{_LOW}\U00010000-\U0010ffff]")
_ABOVE = re.compile("[\U00010000-\U0010ffff]+")
_NEW_LOW, _NEW_HIGH = re.compile(f"[{_LOW}]"), re.compile(f"[{_HIGH}]")


def has_new_character(text: str) -> bool:
    """Whether `text` holds a character that Unicode 14 has not."""
    if text.isascii() or _SUSPECT.search(text) is None:
        return False
    return _NEW_LOW.search(text) is not None or _NEW_HIGH.search("".join(_ABOVE.findall(text))) is not None
