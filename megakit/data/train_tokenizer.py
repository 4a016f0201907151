"""Train a sentencepiece byte-pair tokenizer that gives back every text exactly."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator, Sequence
from typing import Optional

from megakit.data.preprocess.blocks import plan_blocks, where
from megakit.data.preprocess.inputs import find_inputs
from megakit.data.preprocess.job import bad_record
from megakit.data.preprocess.records import BAD, DEFAULT_LIMIT, text_of
from megakit.data.preprocess.worker import BadRecord
from megakit.errors import Refused, StorageFailed
from megakit.files import write_whole

_SAMPLE_SEED = 0
_LONGEST_LINE = 1 << 30  # bytes; sentencepiece silently leaves out longer ones, by default those over 4,192


def texts_of(inputs: Sequence[str], keys: tuple[str, ...], skip_bad: bool, limit: int = DEFAULT_LIMIT) -> Iterator[str]:
    """The text of every document of `inputs` (inputs.py), in order.

    A record without a text, or of more than `limit` bytes, is Refused, or left out with `skip_bad`.
    """
    sources = find_inputs(inputs).sources
    before, source = 0, 0
    for block in plan_blocks(sources, keys):
        if block.source != source:
            before, source = 0, block.source
        number = -1
        for number, record in enumerate(block.work.records(keys, limit)):
            for key in keys:
                text, reason = text_of(record, key)
                if reason in BAD and not skip_bad:
                    raise Refused(bad_record(where(sources, block, number, before), BadRecord(number, key, reason), limit))
                if not reason:
                    yield text
        before += number + 1


def train(
    texts: Iterator[str], vocab_size: int, *, max_lines: Optional[int] = None, character_coverage: float = 0.99995
) -> bytes:
    """The bytes of a .model of `vocab_size` pieces; the same for the same texts.

    Trained on all lines of `texts`, or on `max_lines` of them drawn evenly. Characters beyond `character_coverage` of the
    text, and everything that was never seen, are encoded as their UTF-8 bytes. Digits stand alone. Nothing is normalised,
    and no space is put in front. Refused if the text can't give that many pieces.
    """
    import sentencepiece

    if not 0 < character_coverage <= 1:
        raise Refused(f"a character coverage of {character_coverage}: it is a share above 0 and up to 1, such as 0.99995")
    lines = _Lines(texts)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines if max_lines is None else _draw(iter(lines), max_lines)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=_LONGEST_LINE,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # stands in the model file: another number would change the fingerprint
            minloglevel=2,
        )
    except (RuntimeError, OSError) as e:
        if lines.error is not None:  # sentencepiece wraps what its iterator raises
            raise lines.error from None
        if not lines.count:
            raise Refused("there is no text to train a tokenizer on: every record is blank or empty") from None
        raise Refused(f"a vocabulary of {vocab_size} pieces can't be trained on this text: {_reason(e)}") from None
    return model.getvalue()


def check_new(path: str, overwrite: bool) -> None:
    """Refused if `path` is there and may not be replaced."""
    if os.path.exists(path) and not overwrite:
        raise Refused(f"{path} is there already: choose another output prefix, or replace it with --overwrite")


def write_model(path: str, model: bytes) -> None:
    """Write `path` aside and rename it. StorageFailed if it can't be written."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_whole(path, model)
    except OSError as e:
        raise StorageFailed(f"writing {path}: {e.strerror}") from e


class _Lines:
    """The lines of all texts; keeps their number and the error that ended them."""

    def __init__(self, texts: Iterator[str]):
        self._texts = texts
        self.count = 0
        self.error: Optional[BaseException] = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                for line in text.split("\n"):
                    if line:
                        self.count += 1
                        yield line
        except Exception as e:
            self.error = e
            raise


def _draw(lines: Iterator[str], count: int) -> list[str]:
    """`count` lines, each with the same probability (reservoir sampling), in any order."""
    chance = random.Random(_SAMPLE_SEED)
    kept: list[str] = []
    for seen, line in enumerate(lines):
        if seen < count:
            kept.append(line)
        elif (at := chance.randrange(seen + 1)) < count:
            kept[at] = line
    return kept


def _reason(error: Exception) -> str:
    """The last sentence of sentencepiece's message, which starts with its source file and condition."""
    return " ".join(str(error).split("] ")[-1].split()) or repr(error)
