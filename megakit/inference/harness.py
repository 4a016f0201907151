"""megakit's models for lm-evaluation-harness (EleutherAI, `lm_eval` 0.4): `--model megakit --model_args path=CHECKPOINT`.

`EvaluatedModel` answers the three kinds of requests, and knows nothing of lm_eval. What is scored and how follows lm_eval's `hf`
model: how a text is cut into context and continuation, rolling windows, stop strings. `register` makes lm_eval know it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megakit.errors import Refused
from megakit.inference.generator import generate
from megakit.inference.load import LanguageModel, load
from megakit.inference.sampling import Sampling
from megakit.inference.scoring import score, windows
from megakit.inference.text import TextStream

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the number of new tokens; the first that is there counts."""
Done = Callable[[int], object]
"""Told how many more requests have been answered."""


class EvaluatedModel:
    """A model, asked in texts."""

    def __init__(self, model: LanguageModel, batch_size: int, max_gen_toks: int):
        """max_gen_toks: new tokens where a request gives no number."""
        self.model, self.batch_size, self.max_gen_toks = model, batch_size, max_gen_toks
        words = model.tokenizer
        self.first = words.eod if words.bos is None else words.bos
        """What a text is scored behind that has nothing before it."""

    def loglikelihood(self, requests: Sequence[tuple[str, str]], done: Done) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the logarithm of its probability, and whether it is what greedy decoding gives."""
        scores = score(self.model.decoder, [self._pair(*request) for request in requests], self.batch_size, done)
        return [(s.logprob, s.greedy) for s in scores]

    def loglikelihood_rolling(self, texts: Sequence[str], done: Done) -> list[float]:
        """Of each text: the logarithm of its probability, in windows where it is longer than the model's context."""
        cut = [list(windows(self._encode(text), self.first, self.model.decoder.context)) for text in texts]
        scores = iter(score(self.model.decoder, [pair for text in cut for pair in text], self.batch_size))
        totals = [sum((next(scores).logprob for _ in text), 0.0) for text in cut]
        done(len(totals))
        return totals

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]], done: Done) -> list[str]:
        """What follows each context, up to the first of its stop strings. The options are those of lm_eval's tasks: until, the
        number of new tokens, do_sample, temperature, top_k, top_p."""
        prompts = [self._encode(context) or [self.first] for context, _ in requests]
        alike: dict[str, list[int]] = defaultdict(list)  # those of a batch are drawn alike
        for i in sorted(range(len(requests)), key=lambda i: -len(prompts[i])):
            alike[json.dumps(requests[i][1], sort_keys=True)].append(i)
        out: dict[int, str] = {}
        for indices in alike.values():
            for at in range(0, len(indices), self.batch_size):
                here = indices[at : at + self.batch_size]
                out.update(zip(here, self._continue([prompts[i] for i in here], requests[here[0]][1], here)))
                done(len(here))
        return [out[i] for i in range(len(requests))]

    def _continue(self, prompts: list[list[int]], options: dict[str, Any], seeds: list[int]) -> list[str]:
        """Of prompts that are too long the beginning is left out."""
        model, context, until = self.model, self.model.decoder.context, options.get("until") or []
        stops = [s for s in ([until] if isinstance(until, str) else until) if s]
        count = next((int(options[name]) for name in MAX_TOKENS if name in options), self.max_gen_toks)
        if count >= context:
            raise Refused(
                f"max_gen_toks = {count} leaves no room for a prompt in the context of {context}: use at most {context - 1}"
            )
        prompts = [prompt[-(context - count) :] for prompt in prompts]
        streams = [TextStream(model.tokenizer, prompt) for prompt in prompts]

        def stopped(row: int, token: int) -> bool:
            streams[row].add(token)
            return any(s in streams[row].text for s in stops)

        for _ in generate(model.decoder, prompts, count, _sampling(options), model.ends, seeds, model.known, stopped):
            pass
        for stream in streams:
            stream.end()
        return [_before(stream.text, stops) for stream in streams]

    def _encode(self, text: str) -> list[int]:
        """As a prompt; bos is not put before one that is there."""
        prefix, ids = list(self.model.prefix), self.model.tokenizer.encode(text)
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Spaces behind a context belong to the continuation; both are encoded as one text, as tokens cross the border."""
        if not context:
            ids = self.model.tokenizer.encode(continuation)
            return ([self.first], ids) if ids[:1] != [self.first] else (ids[:1], ids[1:])
        kept = context.rstrip()
        whole, before = self._encode(context + continuation), self._encode(kept)
        return before or [self.first], whole[len(before) :]


def _sampling(options: dict[str, Any]) -> Sampling:
    """Greedy, unless a request asks for samples."""
    temperature = options.get("temperature")
    drawn = options.get("do_sample", bool(temperature))
    temperature = 1.0 if temperature is None else float(temperature)
    return Sampling(temperature if drawn else 0.0, options.get("top_k"), float(options.get("top_p") or 1.0))


def _before(text: str, stops: list[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min((at for s in stops if (at := text.find(s)) >= 0), default=len(text))]


def register() -> type:
    """The subclass of lm_eval's LM, which lm_eval finds as `megakit` from now on. Raises ImportError without lm_eval."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm

    @register_model("megakit")
    class MegakitLM(LM):
        """A training step, a folder of weights or a Hugging Face folder, in one process on one device."""

        def __init__(
            self,
            path: str,
            device: str | None = None,
            dtype: str | None = None,
            batch_size: int | str = 8,
            max_gen_toks: int = 256,
            tokenizer: str | None = None,
            add_bos_token: bool | None = None,
            max_batch_size: int | None = None,
        ):
            """device, dtype, tokenizer and add_bos_token as `load` takes them. max_batch_size is lm_eval's, for
            batch_size=auto, which is not known here. Raises Refused."""
            super().__init__()
            if not str(batch_size).isdigit() or int(batch_size) < 1:
                raise Refused(f"batch_size = {batch_size}: give a number of texts, 1 or more")
            if device == "cuda:0" and not torch.cuda.is_available():  # what lm_eval says where nobody has said anything
                device = None
            self.evaluated = EvaluatedModel(load(path, device, dtype, tokenizer, add_bos_token), int(batch_size), max_gen_toks)
            self._device = self.evaluated.model.decoder.device

        @property
        def tokenizer_name(self) -> str:
            return self.evaluated.model.tokenizer.path

        def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return self._answer("loglikelihood", requests, [request.args for request in requests], disable_tqdm)

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            return self._answer("loglikelihood_rolling", requests, [request.args[0] for request in requests], disable_tqdm)

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            return self._answer("generate_until", requests, [request.args for request in requests], disable_tqdm)

        def _answer(self, kind: str, requests: list[Instance], asked: list, disable_tqdm: bool) -> list:
            with tqdm(total=len(asked), disable=disable_tqdm, desc=f"megakit: {kind}") as bar:
                answers = getattr(self.evaluated, kind)(asked, bar.update)
            for request, answer in zip(requests, answers):
                self.cache_hook.add_partial(kind, request.args, answer)
            return answers

    return MegakitLM
