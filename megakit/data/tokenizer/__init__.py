"""The tokenizer of a run: a sentencepiece model, a Hugging Face tokenizer.json or a tiktoken rank file."""

from megakit.data.tokenizer.base import SpecialIds, Tokenizer, check_encodable, lone_surrogate
from megakit.data.tokenizer.load import load_tokenizer, tokenizer_file, tokenizer_fingerprint

__all__ = [
    "SpecialIds",
    "Tokenizer",
    "check_encodable",
    "load_tokenizer",
    "lone_surrogate",
    "tokenizer_file",
    "tokenizer_fingerprint",
]
