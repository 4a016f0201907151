"""Answers to lm-evaluation-harness, beside transformers' logits on the same texts; the interface by a stand-in of it.

The stand-in has lm_eval 0.4.13's names and signatures: lm_eval/api/{model,registry,instance}.py. docs/generate.md has what
lm_eval itself said.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from megakit.errors import Refused
from megakit.inference import harness
from megakit.inference.harness import EvaluatedModel
from megakit.inference.load import load
from tests.inference.test_load import hugging_face

TEXTS = ["the of and to in a is that for it", "x", "a\nb  c, the (x) don't", "日本 é the"]


@pytest.fixture(params=[False, True], ids=["without bos", "with bos"])
def both(request, tmp_path):
    """Ours, and transformers' model and tokenizer."""
    folder = hugging_face(tmp_path, bos=request.param)
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return EvaluatedModel(load(folder, "cpu"), 3, 12), theirs, words


def log_probabilities(theirs, ids: list[int]) -> torch.Tensor:
    """Of each token behind those before it, [len - 1, V]."""
    with torch.no_grad():
        return theirs(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)


def test_loglikelihood(both):
    ours, theirs, words = both
    requests = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in TEXTS] + [("", "the of"), ("the of  ", "and")]
    got = ours.loglikelihood(requests, lambda n: None)
    for (context, continuation), (logprob, greedy) in zip(requests, got):
        if context:  # a word that begins before the border is encoded as lm_eval does: the context by itself
            before = words(context.rstrip())["input_ids"]
            ids, count = before + words(context + continuation)["input_ids"][len(before) :], len(before)
        else:
            ids, count = [600, *words(continuation, add_special_tokens=False)["input_ids"]], 1
        log_p, wanted = log_probabilities(theirs, ids)[count - 1 :], torch.tensor(ids[count:])
        assert logprob == pytest.approx(float(log_p.gather(-1, wanted[:, None]).sum()), rel=1e-5)
        assert greedy == bool((log_p.argmax(-1) == wanted).all())


def test_rolling(both):
    """The last text is longer than the model's context of 64: windows of it, and no token twice."""
    ours, theirs, words = both
    texts = [*TEXTS, "", TEXTS[0] * 9]
    got = ours.loglikelihood_rolling(texts, lambda n: None)
    for text, total in zip(texts, got):
        ids = [600, *words(text)["input_ids"]]
        expected, at = 0.0, 1
        while at < len(ids):  # tokens from `at` on, with all the context that there is room for
            end = min(at + 64, len(ids))
            window = ids[max(0, end - 65) : end]
            log_p = log_probabilities(theirs, window)[-(end - at) :]
            expected += float(log_p.gather(-1, torch.tensor(window[-(end - at) :])[:, None]).sum())
            at = end
        assert total == pytest.approx(expected, rel=1e-5)
    assert len(words(texts[-1])["input_ids"]) > 64


def test_generate_until(both):
    ours, theirs, words = both
    theirs = theirs.float()
    whole = []
    for text in TEXTS:
        ids = words(text)["input_ids"]
        suppressed = list(range(603, 640))
        tokens = theirs.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, suppress_tokens=suppressed, eos_token_id=601, pad_token_id=0
        )[0]
        before = words.decode(ids, skip_special_tokens=True)
        whole.append(words.decode(tokens, skip_special_tokens=True)[len(before) :])
    assert ours.generate_until([(text, {"until": []}) for text in TEXTS], lambda n: None) == whole
    stop = whole[0][3:5]
    got = ours.generate_until([(text, {"until": [stop, "never"], "max_gen_toks": 12}) for text in TEXTS], lambda n: None)
    assert got == [text.split(stop)[0] for text in whole] and got[0] != whole[0]
    mixed = [(TEXTS[0], {"until": stop}), (TEXTS[0], {"max_new_tokens": 3}), (TEXTS[0], {"do_sample": True, "temperature": 9.0})]
    stopped, short, warm = ours.generate_until(mixed, lambda n: None)
    assert stopped == got[0] and whole[0].startswith(short) and len(short) < len(whole[0]) and warm != whole[0]
    with pytest.raises(Refused, match="max_gen_toks = 64 leaves no room for a prompt in the context of 64: use at most 63"):
        ours.generate_until([("the", {"max_gen_toks": 64})], lambda n: None)


class LM:
    """lm_eval.api.model.LM, what a subclass may rely on."""

    def __init__(self) -> None:
        self._rank, self._world_size, self._device = 0, 1, None
        self.kept: list[tuple] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda attr, req, res: self.kept.append((attr, req, res)))

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        more = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**arg_dict, **more)


def test_the_interface(tmp_path, monkeypatch):
    models: dict[str, type] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def register_model(*names):
        return lambda cls: [models.__setitem__(name, cls) for name in names] and cls

    for name, content in (("lm_eval", {}), ("lm_eval.api", {}), ("lm_eval.api.model", {"LM": LM})):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    registry = ModuleType("lm_eval.api.registry")
    registry.register_model = register_model
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", registry)
    assert harness.register() is models["megakit"] and issubclass(models["megakit"], LM)
    asked = {"batch_size": "2", "max_batch_size": None, "device": "cuda:0"}  # what lm_eval adds to model_args
    model = models["megakit"].create_from_arg_obj({"path": str(hugging_face(tmp_path)), "dtype": "fp32"}, asked)
    assert model._device == torch.device("cpu") and model.tokenizer_name.endswith("tokenizer.json")
    requests = [SimpleNamespace(args=("the of", " and")), SimpleNamespace(args=("a", " is that"))]
    scores = model.loglikelihood(requests, disable_tqdm=True)
    assert [type(x) for score in scores for x in score] == [float, bool] * 2 and scores[0][0] < 0
    rolling = model.loglikelihood_rolling([SimpleNamespace(args=("the of and",))], disable_tqdm=True)
    text = model.generate_until([SimpleNamespace(args=("the", {"until": ["."], "max_gen_toks": 4}))], disable_tqdm=True)
    assert type(rolling[0]) is float and type(text[0]) is str
    assert [kind for kind, _, _ in model.kept] == ["loglikelihood"] * 2 + ["loglikelihood_rolling", "generate_until"]
    assert model.kept[0] == ("loglikelihood", ("the of", " and"), scores[0])
    with pytest.raises(Refused, match="batch_size = auto: give a number of texts"):
        models["megakit"].create_from_arg_obj({"path": str(tmp_path)}, {"batch_size": "auto"})
