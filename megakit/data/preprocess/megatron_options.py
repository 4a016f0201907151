"""Options that commands for Megatron-LM's preprocessing carry: those without effect here, and those that are refused."""

from __future__ import annotations

from collections.abc import Sequence

NO_EFFECT = {
    "--partitions": "--workers alone takes all cores, and memory doesn't grow with the input",
    "--keep-sequential-samples": "the order of the input is always kept",
    "--chunk-size": "the workers' share is chosen by size",
    "--dataset-impl": "the files are those of its mmap",
}
"""Options that the result doesn't depend on, and why."""
REFUSED = {
    "--vocab-file": "give the file of the whole tokenizer, such as tokenizer.json, by --tokenizer-model",
    "--merge-file": "give the file of the whole tokenizer, such as tokenizer.json, by --tokenizer-model",
    "--vocab-size": "it is read from the file of --tokenizer-model",
    "--split-sentences": "it is for BERT; documents are written whole",
    "--keep-newlines": "it is for BERT; texts are encoded as they are, newlines included",
    "--lang": "it is for BERT; documents are written whole",
    "--find-optimal-num-workers": "give --workers as many as there are cores, which is the default",
    "--tiktoken-pattern": "it is told by the file of --tokenizer-model",
    "--tokenizer-name-or-path": "give the file or folder by --tokenizer-model",
}
"""Options that would change the result, and what to do instead."""
FLAGS = {"--keep-sequential-samples", "--split-sentences", "--keep-newlines", "--find-optimal-num-workers"}
"""Those of both that take no value."""
_KINDS: dict[str, Sequence[str]] = {
    "SentencePieceTokenizer": ["sentencepiece"],
    "GPTSentencePieceTokenizer": ["sentencepiece"],
    "Llama2Tokenizer": ["sentencepiece"],
    "HuggingFaceTokenizer": ["tokenizers"],
    "PretrainedFromHF": ["tokenizers"],
    "GPT2BPETokenizer": ["tokenizers", "tiktoken"],
    "TikTokenizer": ["tiktoken"],
}


def tokenizer_type_problem(name: str, kind: str) -> str:
    """What is wrong with --tokenizer-type NAME for a tokenizer file of this `kind`; empty if it fits."""
    wanted = _KINDS.get(name)
    if wanted is None:
        return f"--tokenizer-type {name} is none of {', '.join(_KINDS)}: leave it out, the kind is told by the file"
    if kind in wanted:
        return ""
    return (
        f"--tokenizer-type {name} is not the kind of the file of --tokenizer-model ({kind}): leave it out, or give its own file"
    )
