"""The models of recipes/model as they are published: the values of each config.json that say what the model is, and its number
of parameters.

Of the hub's models these are the values of config.json in the repository named (Llama 1: those that
transformers/models/llama/convert_llama_weights_to_hf.py makes of Meta's params.json; Mistral 7B v0.1: its launch's too). The
numbers of parameters are what the hub shows of the safetensors files, tied embeddings once; GPT-2's is OpenAI's of the released
weights; GPT-3's are those of table D.1 of Brown et al. 2020 (arXiv:2005.14165), in millions, since no weights are out.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model."""

    source: str
    """Repository of the hub, or paper."""
    config: dict[str, Any]
    """What its config.json says; defaults of transformers are left out."""
    parameters: int
    millions: int | None = None
    """What the paper prints, where it prints no more."""


def gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_layer": layers, "n_embd": hidden, "n_head": heads}


def gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Table 2.1; heads of 1.3B and width of 13B such that heads x width of a head are the hidden size, which table D.1's
    numbers of parameters confirm (2.1 prints 24 heads and a width of 5140)."""
    return {**gpt2(layers, hidden, heads), "n_positions": 2048, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


def llama(hidden: int, ffn: int, layers: int, heads: int, groups: int, **keys: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "llama", "vocab_size": 32000, **sizes, "num_key_value_heads": groups, **keys}


LLAMA2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}


def llama3_1(*sizes: int, factor: float = 8.0, **keys: Any) -> dict[str, Any]:
    stretched = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", **stretched}
    return llama(*sizes, **{**LLAMA3, "max_position_embeddings": 131072, "rope_scaling": rope, **keys})


def mistral(**keys: Any) -> dict[str, Any]:
    return llama(4096, 14336, 32, 32, 8, model_type="mistral", max_position_embeddings=32768, rms_norm_eps=1e-5, **keys)


def qwen2(*sizes: int, vocab: int = 152064, context: int = 131072, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    unused = {"use_sliding_window": False, "sliding_window": context, "max_window_layers": sizes[2]}
    keys = {"vocab_size": vocab, "max_position_embeddings": context, "rms_norm_eps": eps, "rope_theta": 1000000.0}
    return llama(*sizes, model_type="qwen2", tie_word_embeddings=tied, **keys, **unused)


def qwen3(*sizes: int, tied: bool = False) -> dict[str, Any]:
    unused = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": sizes[2]}
    keys = {"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000}
    return llama(*sizes, model_type="qwen3", head_dim=128, attention_bias=False, tie_word_embeddings=tied, **keys, **unused)


def smollm2(*sizes: int, theta: float = 100000, std: float = 0.02) -> dict[str, Any]:
    keys = {"vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": theta}
    return llama(*sizes, tie_word_embeddings=True, initializer_range=std, **keys)


SMALL = {"vocab": 151936, "tied": True}
PAPER = "Brown et al. 2020"
PUBLISHED = {
    "gpt2_124m": Published("openai-community/gpt2", gpt2(12, 768, 12), 124_439_808),
    "gpt2_355m": Published("openai-community/gpt2-medium", gpt2(24, 1024, 16), 354_823_168),
    "gpt2_774m": Published("openai-community/gpt2-large", gpt2(36, 1280, 20), 774_030_080),
    "gpt2_1.5b": Published("openai-community/gpt2-xl", gpt2(48, 1600, 25), 1_557_611_200),
    "gpt3_125m": Published(PAPER, gpt3(12, 768, 12), 125_226_240, 125),
    "gpt3_350m": Published(PAPER, gpt3(24, 1024, 16), 355_871_744, 356),
    "gpt3_760m": Published(PAPER, gpt3(24, 1536, 16), 760_300_032, 760),
    "gpt3_1.3b": Published(PAPER, gpt3(24, 2048, 16), 1_315_723_264, 1320),
    "gpt3_2.7b": Published(PAPER, gpt3(32, 2560, 32), 2_651_553_280, 2650),
    "gpt3_6.7b": Published(PAPER, gpt3(32, 4096, 32), 6_658_404_352, 6660),
    "gpt3_13b": Published(PAPER, gpt3(40, 5120, 40), 12_853_386_240, 12850),
    "gpt3_175b": Published(PAPER, gpt3(96, 12288, 96), 174_604_259_328, 174600),
    "llama1_7b": Published("huggyllama/llama-7b", llama(4096, 11008, 32, 32, 32, rms_norm_eps=1e-6), 6_738_415_616),
    "llama1_13b": Published("huggyllama/llama-13b", llama(5120, 13824, 40, 40, 40, rms_norm_eps=1e-6), 13_015_864_320),
    "llama1_33b": Published("huggyllama/llama-30b", llama(6656, 17920, 60, 52, 52, rms_norm_eps=1e-6), 32_528_943_616),
    "llama1_65b": Published("huggyllama/llama-65b", llama(8192, 22016, 80, 64, 64, rms_norm_eps=1e-5), 65_285_660_672),
    "llama7b": Published("meta-llama/Llama-2-7b-hf", llama(4096, 11008, 32, 32, 32, **LLAMA2), 6_738_415_616),
    "llama13b": Published("meta-llama/Llama-2-13b-hf", llama(5120, 13824, 40, 40, 40, **LLAMA2), 13_015_864_320),
    "llama70b": Published("meta-llama/Llama-2-70b-hf", llama(8192, 28672, 80, 64, 8, **LLAMA2), 68_976_648_192),
    "llama3_8b": Published("meta-llama/Meta-Llama-3-8B", llama(4096, 14336, 32, 32, 8, **LLAMA3), 8_030_261_248),
    "llama3_70b": Published("meta-llama/Meta-Llama-3-70B", llama(8192, 28672, 80, 64, 8, **LLAMA3), 70_553_706_496),
    "llama3.1_8b": Published("meta-llama/Llama-3.1-8B", llama3_1(4096, 14336, 32, 32, 8), 8_030_261_248),
    "llama3.1_70b": Published("meta-llama/Llama-3.1-70B", llama3_1(8192, 28672, 80, 64, 8), 70_553_706_496),
    "llama3.1_405b": Published("meta-llama/Llama-3.1-405B", llama3_1(16384, 53248, 126, 128, 8), 405_853_388_800),
    "llama3.2_1b": Published(
        "meta-llama/Llama-3.2-1B", llama3_1(2048, 8192, 16, 32, 8, factor=32.0, tie_word_embeddings=True), 1_235_814_400
    ),
    "llama3.2_3b": Published(
        "meta-llama/Llama-3.2-3B", llama3_1(3072, 8192, 28, 24, 8, factor=32.0, tie_word_embeddings=True), 3_212_749_824
    ),
    "mistral_7b_v0.1": Published("mistralai/Mistral-7B-v0.1", mistral(sliding_window=4096, rope_theta=10000.0), 7_241_732_096),
    "mistral_7b_v0.3": Published(
        "mistralai/Mistral-7B-v0.3", mistral(sliding_window=None, rope_theta=1000000.0, vocab_size=32768), 7_248_023_552
    ),
    "qwen2_0.5b": Published("Qwen/Qwen2-0.5B", qwen2(896, 4864, 24, 14, 2, **SMALL), 494_032_768),
    "qwen2_1.5b": Published("Qwen/Qwen2-1.5B", qwen2(1536, 8960, 28, 12, 2, **SMALL), 1_543_714_304),
    "qwen2_7b": Published("Qwen/Qwen2-7B", qwen2(3584, 18944, 28, 28, 4), 7_615_616_512),
    "qwen2_72b": Published("Qwen/Qwen2-72B", qwen2(8192, 29568, 80, 64, 8, eps=1e-5), 72_706_203_648),
    "qwen2.5_0.5b": Published("Qwen/Qwen2.5-0.5B", qwen2(896, 4864, 24, 14, 2, context=32768, **SMALL), 494_032_768),
    "qwen2.5_1.5b": Published("Qwen/Qwen2.5-1.5B", qwen2(1536, 8960, 28, 12, 2, **SMALL), 1_543_714_304),
    "qwen2.5_3b": Published("Qwen/Qwen2.5-3B", qwen2(2048, 11008, 36, 16, 2, context=32768, **SMALL), 3_085_938_688),
    "qwen2.5_7b": Published("Qwen/Qwen2.5-7B", qwen2(3584, 18944, 28, 28, 4), 7_615_616_512),
    "qwen2.5_14b": Published("Qwen/Qwen2.5-14B", qwen2(5120, 13824, 48, 40, 8, eps=1e-5), 14_770_033_664),
    "qwen2.5_32b": Published("Qwen/Qwen2.5-32B", qwen2(5120, 27648, 64, 40, 8, eps=1e-5), 32_763_876_352),
    "qwen2.5_72b": Published("Qwen/Qwen2.5-72B", qwen2(8192, 29568, 80, 64, 8, eps=1e-5), 72_706_203_648),
    "qwen3_0.6b": Published("Qwen/Qwen3-0.6B", qwen3(1024, 3072, 28, 16, 8, tied=True), 596_049_920),
    "qwen3_1.7b": Published("Qwen/Qwen3-1.7B", qwen3(2048, 6144, 28, 16, 8, tied=True), 1_720_574_976),
    "qwen3_4b": Published("Qwen/Qwen3-4B", qwen3(2560, 9728, 36, 32, 8, tied=True), 4_022_468_096),
    "qwen3_8b": Published("Qwen/Qwen3-8B", qwen3(4096, 12288, 36, 32, 8), 8_190_735_360),
    "qwen3_14b": Published("Qwen/Qwen3-14B", qwen3(5120, 17408, 40, 40, 8), 14_768_307_200),
    "qwen3_32b": Published("Qwen/Qwen3-32B", qwen3(5120, 25600, 64, 64, 8), 32_762_123_264),
    "smollm2_135m": Published("HuggingFaceTB/SmolLM2-135M", smollm2(576, 1536, 30, 9, 3, std=1 / 24), 134_515_008),
    "smollm2_360m": Published("HuggingFaceTB/SmolLM2-360M", smollm2(960, 2560, 32, 15, 5), 361_821_120),
    "smollm2_1.7b": Published("HuggingFaceTB/SmolLM2-1.7B", smollm2(2048, 8192, 24, 32, 32, theta=130000), 1_711_376_384),
}
