"""Tokens that come one by one as text, as soon as they are whole characters."""

from __future__ import annotations

from collections.abc import Sequence

from megakit.data.tokenizer import Tokenizer

UNFINISHED = "�"
"""What the bytes of a character give before the last of them is there."""
BEHIND = 8
"""Tokens of the prompt that are decoded with the first new ones: a token's text may depend on those before it."""


class TextStream:
    """The text behind a prompt. What `add` and `end` give, joined, is `text`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer, self._tokens = tokenizer, list(prompt[-BEHIND:])
        self._given = len(self._tokens)
        """Tokens whose text has been given."""
        self.text = ""

    def add(self, token: int) -> str:
        """The text that is known now and wasn't before; "" in the middle of a character."""
        self._tokens.append(token)
        new = self._new()
        return "" if new.endswith(UNFINISHED) else self._give(new)

    def end(self) -> str:
        """What is left: broken characters are U+FFFD."""
        return self._give(self._new())

    def _new(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._given])
        return self._tokenizer.decode(self._tokens)[len(before) :]

    def _give(self, new: str) -> str:
        drop = max(0, self._given - BEHIND)  # those that were given stay in front, a few of them
        self._tokens, self._given = self._tokens[drop:], len(self._tokens) - drop
        self.text += new
        return new
