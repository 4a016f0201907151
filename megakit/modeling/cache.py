"""Keys and values of tokens that were read before, so that generation computes each token once.

All are kept to the end, also with a sliding window, which only decides what is read of them.

Shapes: B sequences, G key/value heads, D head dim, S tokens that are read at once, T places that are filled.

The sequences of a batch end at the same place: shorter ones have `padding` places in front that nobody sees. A token's
position, which is what rotation and learned embeddings go by, counts from the end of the padding.
"""

from __future__ import annotations

import torch

from megakit.config.derived import head_dim
from megakit.config.schema import ModelConfig


class LayerCache:
    """Of one layer."""

    def __init__(self, whole: KVCache, keys: torch.Tensor, values: torch.Tensor):
        self.whole, self._keys, self._values = whole, keys, values

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the tokens that are being read, [B, G, S, D] -> those of all that any of them sees, [B, G, T, D]"""
        new, visible = slice(self.whole.before, self.whole.filled), slice(self.whole.first, self.whole.filled)
        self._keys[:, :, new], self._values[:, :, new] = k, v
        return self._keys[:, :, visible], self._values[:, :, visible]


class KVCache:
    """Of all layers, with room for a fixed number of tokens. `extend` it before each forward pass."""

    def __init__(self, m: ModelConfig, padding: torch.Tensor, room: int, dtype: torch.dtype):
        """padding: int64 [B], on the device of the model; room: places, padding included."""
        shape = (len(padding), m.num_query_groups, room, head_dim(m))
        self.padding, self.room = padding, room
        self.filled = self.before = self.first = 0
        self._window = m.window_size
        self.seen: torch.Tensor | None = None
        """bool [B, 1, S, T]: which places each of the tokens being read sees; None: all, or as `causal` says."""
        self.causal = False
        """Each of the tokens being read sees itself and those before it, and there are no others."""
        self._padded = bool(padding.any())
        self.layers = [
            LayerCache(self, *(torch.empty(shape, dtype=dtype, device=padding.device) for _ in "kv")) for _ in range(m.num_layers)
        ]

    def extend(self, tokens: int) -> torch.Tensor:
        """`tokens` more are read by every sequence -> their positions, int64 [S, B]; 0 where there is padding.

        Raises ValueError where there is no room.
        """
        if self.filled + tokens > self.room:
            raise ValueError(f"{self.filled} + {tokens} tokens don't fit in a cache of {self.room}")
        self.before, self.filled = self.filled, self.filled + tokens
        places = torch.arange(self.before, self.filled, device=self.padding.device)
        self._look(places)
        return (places[:, None] - self.padding).clamp(min=0)

    def _look(self, places: torch.Tensor) -> None:
        window = self.filled if self._window is None else self._window
        self.first = max(0, self.before + 1 - window)  # of the places that the first of the tokens sees
        simple = not self._padded and (len(places) == 1 or window >= self.filled)
        self.causal = simple and self.before == 0
        if self.causal or (simple and len(places) == 1):
            self.seen = None
            return
        keys = torch.arange(self.first, self.filled, device=places.device)
        back = places[:, None] - keys
        seen = (back >= 0) & (back < window) & (keys >= self.padding[:, None, None])
        self.seen = (seen | (back == 0))[:, None]  # itself, so that padding, which sees nothing, is no NaN
