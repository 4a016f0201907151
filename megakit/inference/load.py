"""A checkpoint of any kind, ready to read and write text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megakit.checkpoint.weights import DTYPES, WeightsSource, open_weights
from megakit.config.schema import Config
from megakit.data.tokenizer import Tokenizer, load_tokenizer
from megakit.errors import Refused
from megakit.inference.decoder import Decoder
from megakit.modeling.layout import parameter_count


@dataclass(frozen=True)
class LanguageModel:
    """A model and its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer
    ends: frozenset[int]
    """Tokens that end a text."""
    prefix: tuple[int, ...]
    """Tokens in front of every prompt."""
    description: str
    """One line for the user."""

    def encode(self, text: str) -> list[int]:
        """Of a prompt. The token that ends documents stands for one that has no tokens."""
        return [*self.prefix, *self.tokenizer.encode(text)] or [self.tokenizer.eod]

    @property
    def known(self) -> int:
        """Ids from here on are padding of the model's vocabulary: the tokenizer has no text for them."""
        return min(self.decoder.model.vocab_size, self.tokenizer.vocab_size)


def load(
    checkpoint: str | Path,
    device: str | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    bos: bool | None = None,
) -> LanguageModel:
    """From a training step, a folder of weights, or a Hugging Face folder.

    device: cpu | cuda; None: cuda where there is one. dtype: fp32 | bf16 | fp16; None: bf16 on a GPU, else fp32. tokenizer: in
    place of the checkpoint's own. bos: whether each prompt begins with the bos token; None: as the tokenizer's files say.

    Raises Refused, naming what is missing or doesn't fit.
    """
    where = _device(device)
    precision = dtype or ("bf16" if where.type == "cuda" else "fp32")
    if precision not in DTYPES:
        raise Refused(f"dtype = {precision} is none of {', '.join(DTYPES)}")
    source = open_weights(checkpoint)
    words = _tokenizer(source, tokenizer)
    record = source.record or {}
    if "vocab_size" in record and bos is None:  # of a training run, whose data has no bos
        bos = False
    ends, prefix = _ends(words, source.ids, Path(checkpoint)), _prefix(words, bos)
    decoder = Decoder(source.model, source, where, DTYPES[precision])
    parameters = parameter_count(Config(model=source.model))
    description = f"{source.model.family}, {parameters:,} parameters, {precision} on {where}, context {decoder.context:,}"
    return LanguageModel(decoder, words, ends, prefix, description)


def _tokenizer(source: WeightsSource, given: str | Path | None) -> Tokenizer:
    """The given one, or that of the checkpoint. Raises Refused unless it is there and the one that the model was trained with."""
    path = Path(given) if given else source.tokenizer
    if path is None or not path.exists():
        there = f"its tokenizer {path} is not there" if path else "it has no tokenizer"
        raise Refused(f"{source.path}: {there}: give the file by --tokenizer FILE")
    found, recorded = load_tokenizer(path), (source.record or {}).get("fingerprint")
    if recorded and recorded != found.fingerprint:
        raise Refused(
            f"the tokenizer {path} is {found.fingerprint[:12]}..., {source.path} goes with {recorded[:12]}...: give the right"
            " file by --tokenizer FILE"
        )
    if found.vocab_size > source.model.vocab_size:
        raise Refused(
            f"the tokenizer {path} has {found.vocab_size} pieces, the model of {source.path} {source.model.vocab_size}: give the"
            " model's own by --tokenizer FILE"
        )
    return found


def _device(name: str | None) -> torch.device:
    there = torch.cuda.is_available()
    if name is not None and name.split(":")[0] == "cuda" and not there:
        raise Refused(f"device = {name}, and torch sees no GPU here: use cpu")
    try:
        device = torch.device(name or ("cuda" if there else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise Refused(f"device = {name}: use cpu or cuda")
    return device


def _ends(tokenizer: Tokenizer, ids: Mapping[str, Any], folder: Path) -> frozenset[int]:
    """Of the tokenizer, of config.json, and of generation_config.json, which names those of a chat's turns too."""
    found = {tokenizer.eod}
    for eos in (ids.get("eos"), _json(folder / "generation_config.json").get("eos_token_id")):
        found.update(number for number in (eos if isinstance(eos, list) else [eos]) if isinstance(number, int))
    return frozenset(found)


def _prefix(tokenizer: Tokenizer, bos: bool | None) -> tuple[int, ...]:
    """bos, where tokenizer_config.json says so by add_bos_token, or tokenizer.json's post-processor puts it there."""
    if bos is None:
        bos = _json(Path(tokenizer.path).parent / "tokenizer_config.json").get("add_bos_token")
    if bos is None:
        bos = tokenizer.bos is not None and tokenizer.begins_with_bos
    if bos and tokenizer.bos is None:
        raise Refused(f"the tokenizer {tokenizer.path} has no bos token to begin prompts with: leave it out by --no-bos")
    return (tokenizer.bos,) if bos and tokenizer.bos is not None else ()


def _json(path: Path) -> dict[str, Any]:
    """Of a file that may not be there."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise Refused(f"{path} can't be read ({e}): correct or remove it") from None
    return value if isinstance(value, dict) else {}
