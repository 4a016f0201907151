"""Configurations of Hugging Face both ways, and the name maps."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from transformers import AutoConfig

from megakit.config.ranges import CHOICES
from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from model_zoo import FAMILIES, family
from model_zoo.family import differences
from tests.checkpoint.layouts import gpt2, llama

LLAMA2_7B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
GPT2_SMALL = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def test_no_torch():
    """The planner and every refusal use it."""
    code = "import sys, model_zoo; model_zoo.family('llama'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_families():
    assert set(FAMILIES) == set(CHOICES["model.family"]) and family("gpt2").name == "gpt2"
    with pytest.raises(Refused, match="there is no model family bert: use llama or mistral or qwen2 or qwen3 or gpt2"):
        family("bert")


def test_known_configurations():
    m = family("llama").from_hf(LLAMA2_7B)
    assert (m.num_layers, m.hidden_size, m.ffn_hidden_size, m.num_query_groups, m.norm_epsilon) == (32, 4096, 11008, 32, 1e-5)
    assert (m.rotary_base, m.tie_embeddings, m.normalization, m.activation) == (10000.0, False, "rmsnorm", "swiglu")
    m = family("gpt2").from_hf(GPT2_SMALL)
    assert (m.num_layers, m.hidden_size, m.ffn_hidden_size, m.max_position_embeddings) == (12, 768, 3072, 1024)
    assert (m.activation, m.tie_embeddings, m.add_bias_linear, m.position_embedding) == ("gelu_tanh", True, True, "learned")


@pytest.mark.parametrize(("name", "config"), [("llama", LLAMA2_7B), ("gpt2", GPT2_SMALL)])
def test_configuration_round_trip(name, config):
    model = family(name).from_hf(config)
    written = family(name).config_json(model, "bfloat16", 1, 2, None)
    assert family(name).from_hf(written) == model
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (1, 2, None)
    assert written["architectures"] == [family(name).architecture] and written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("change", "base"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 500000}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 2e4}, "rope_scaling": {"type": "default"}}, 2e4),
        ({}, 1e4),
    ],
)
def test_rotary_base(change, base):
    """Where transformers 4 puts it and where 5 does."""
    assert family("llama").from_hf({**LLAMA2_7B, **change}).rotary_base == base


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": "linear", "rope_factor": 2}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         {"rope_scaling": "linear", "rope_factor": 2.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
         {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0,
          "rope_original_max_position_embeddings": 1024}),
        ({"rope_parameters": YARN, "rope_scaling": {"type": "yarn", **YARN}}, {"rope_scaling": "yarn", "rope_factor": 4.0}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_original_max_position_embeddings": 4096}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 77},
         {"rope_original_max_position_embeddings": 77}),
        ({"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2}}, {"rope_beta_fast": 16, "rope_beta_slow": 2}),
        ({"rope_scaling": {**YARN, "beta_fast": None}}, {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0}),
        ({"rope_scaling": {**YARN, "attention_factor": 1.5}}, {"rope_attention_factor": 1.5}),
        # the recommended factor is no factor of its own
        ({"rope_scaling": {**YARN, "attention_factor": 0.1 * math.log(4) + 1}}, {"rope_attention_factor": None}),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, {"rope_attention_factor": 1.0}),
        # scales nothing
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, {"rope_scaling": "none", "rope_factor": None}),
    ],
)  # fmt: skip
def test_rope_scaling_is_read_and_written(change, fields):
    """In the words of transformers 4 and of 5."""
    model = family("llama").from_hf({**LLAMA2_7B, **change})
    assert {name: getattr(model, name) for name in fields} == fields
    written = family("llama").config_json(model, "float32", 1, 2, None)
    for block in ("rope_scaling", "rope_parameters"):
        one = {k: v for k, v in written.items() if k not in {"rope_scaling", "rope_parameters"} - {block}}
        assert family("llama").from_hf(one) == model, block


def test_a_resumed_model_has_the_scaling_of_its_checkpoint():
    model = llama().model
    scaled = replace(model, rope_scaling="linear", rope_factor=2.0)
    assert [name for name, *_ in differences(vars(scaled), model)] == ["rope_scaling", "rope_factor"]
    assert differences(vars(scaled), replace(scaled, rope_factor=2)) == []
    older = {name: value for name, value in vars(model).items() if not name.startswith("rope_")}
    assert differences(older, model) == []
    assert differences(older, scaled) == [("rope_scaling", "none", "linear"), ("rope_factor", None, 2.0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "of type llama3 with low_freq_factor = None, which is no"),
        ({"rope_scaling": {"type": "linear"}}, "of type linear with factor = None, which is no number"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "of type linear with factor = 2, which is no number"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters of type dynamic"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate = False"),
        ({"rope_scaling": {**YARN, "long_factor": [1.0]}}, "rope_scaling.long_factor = [1.0]"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN}, "which differ"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "foo"}}, "rope_parameters of type foo"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta twice, as 10000.0 and 500000.0"),
        ({"attention_bias": True}, "attention_bias = True and mlp_bias = False, megakit's LlamaForCausalLM has biases on all"),
        ({"mlp_bias": True}, "attention_bias = False and mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"head_dim": "64"}, "model.kv_channels = '64', which is no Optional[int]"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"rms_norm_eps": "1e-5"}, "model.norm_epsilon = '1e-5', which is no float"),
        ({"num_hidden_layers": True}, "model.num_layers = True, which is no int"),
        ({"model_type": "mistral"}, "model_type = mistral, model.family is llama"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5, megakit's LlamaForCausalLM has 1.0 only"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"rope_interleaved": True}, "rope_interleaved = True, megakit's LlamaForCausalLM has False only"),
        ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention in layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention = "),
        ({"rope_parameters": "default"}, "rope_parameters = 'default', which is no dict"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4', which is no float"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rotary_base = '1e4', which is no float"),
        ({"rope_parameters": {"rope_type": []}}, "rope_parameters of type []"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0]}}, "rope_parameters of type longrope"),
        ({"rope_theta": 0}, "model.rotary_base = 0.0: it must be greater than 1"),
        ({"num_attention_heads": 0}, "model.num_attention_heads = 0: it must be at least 1"),
        ({"num_key_value_heads": 5}, "model.num_query_groups = 5 doesn't divide"),
        ({"rms_norm_eps": float("nan")}, "model.norm_epsilon = nan, which is no number"),
        ({"rms_norm_eps": -1.0}, "model.norm_epsilon = -1.0: it must be greater than 0"),
    ],
)
def test_llama_refusals(change, said):
    """CV3: what would change the logits is refused, not dropped."""
    with pytest.raises(Refused) as caught:
        family("llama").from_hf({**LLAMA2_7B, **change})
    assert said in str(caught.value)


QWEN3_8B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": True}, "attention_bias = True, megakit's Qwen3ForCausalLM has False only"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30},
         "a sliding window on 6 of 36 layers (max_window_layers = 30), megakit's Qwen3ForCausalLM has it on all layers or none"),
        ({"use_sliding_window": True, "sliding_window": 4096, "layer_types": ["sliding_attention"] + ["full_attention"] * 35},
         "a sliding window on 1 of 36 layers"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling of type dynamic"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"num_hidden_layers": None, "use_sliding_window": True, "sliding_window": 4096}, "config.json has no num_hidden_layers"),
        ({"model_type": "qwen3_moe"}, "model_type = qwen3_moe, model.family is qwen3"),
        ({"layer_types": ["sliding_attention"] * 36}, "sliding_attention in layer_types"),
        ({"layer_types": 3}, "layer_types = 3, which is no list"),
        ({"num_experts": 128}, "num_experts = 128"),
    ],
)  # fmt: skip
def test_qwen_refusals(change, said):
    with pytest.raises(Refused) as caught:
        family("qwen3").from_hf({**QWEN3_8B, **change})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "fields"),
    [
        ("qwen3", {}, {"kv_channels": None, "qk_layernorm": True, "window_size": None, "add_qkv_bias": False}),
        ("qwen3", {"head_dim": None, "num_attention_heads": 64}, {"kv_channels": 128}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64}, {"window_size": None}),  # from layer 36 on: on none
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, {"window_size": 64}),
        ("qwen2", {}, {"add_qkv_bias": True, "qk_layernorm": False, "window_size": None, "kv_channels": None}),
        ("qwen2", {"sliding_window": 131072}, {"window_size": None}),  # as published ones have it, unused
        ("qwen2", {"head_dim": 64}, {"kv_channels": 64}),
        ("mistral", {}, {"window_size": None, "add_qkv_bias": False}),
        ("mistral", {"sliding_window": 4096}, {"window_size": 4096}),
        ("llama", {"head_dim": 64}, {"kv_channels": 64}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"add_bias_linear": True}),
    ],
)
def test_what_the_families_read_and_write(name, change, fields):
    given = {**QWEN3_8B, "model_type": name, **change}
    model = family(name).from_hf(given)
    assert {f: getattr(model, f) for f in fields} == fields
    written = family(name).config_json(model, "bfloat16", 1, [2, 3], None)
    assert family(name).from_hf(written) == model and written["eos_token_id"] == [2, 3]
    absent = {k: v for k, v in QWEN3_8B.items() if k not in ("max_position_embeddings", "sliding_window", "head_dim")}
    read = family(name).from_hf({**absent, "model_type": name})
    theirs = AutoConfig.for_model(**{k: v for k, v in absent.items() if k != "model_type"}, model_type=name)
    assert read.max_position_embeddings == theirs.max_position_embeddings
    assert read.window_size == (theirs.sliding_window if name == "mistral" else None)


@pytest.mark.parametrize("kv_channels", [None, 16])
def test_the_width_of_a_head_counts_as_what_it_comes_to(kv_channels):
    model = llama().model  # 64 / 4 or 8 heads
    width = model.hidden_size // model.num_attention_heads
    theirs = {**vars(model), "kv_channels": width if kv_channels is None else None}
    assert differences(theirs, replace(model, kv_channels=None if kv_channels is None else width)) == []
    assert differences(theirs, replace(model, kv_channels=width + 2))[0][0] == "kv_channels"
    del theirs["kv_channels"]  # of an older version
    assert differences(theirs, replace(model, kv_channels=width)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activation_function": "relu"}, "activation_function = relu"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"n_embd": None}, "config.json has no n_embd"),
    ],
)
def test_gpt2_refusals(change, said):
    with pytest.raises(Refused) as caught:
        family("gpt2").from_hf({**GPT2_SMALL, **change})
    assert said in str(caught.value)


def test_activations():
    for theirs, ours in (("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")):
        model = family("gpt2").from_hf({**GPT2_SMALL, "activation_function": theirs, "n_inner": 100})
        assert model.activation == ours and model.ffn_hidden_size == 100
        assert family("gpt2").from_hf(family("gpt2").config_json(model, "float32", None, None, None)) == model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (llama(normalization="layernorm").model, "model.normalization = layernorm, LlamaForCausalLM means rmsnorm"),
        (llama(position_embedding="learned").model, "model.position_embedding = learned"),
        (llama(activation="gelu").model, "model.activation = gelu"),
        (llama(add_qkv_bias=True).model, "model.add_qkv_bias = True, LlamaForCausalLM means False"),
        (llama(qk_layernorm=True).model, "model.qk_layernorm = True, LlamaForCausalLM means False"),
        (llama(window_size=5).model, "model.window_size = 5, LlamaForCausalLM means None"),
        (llama(family="qwen2").model, "model.add_qkv_bias = False, Qwen2ForCausalLM means True"),
        (llama(family="qwen3").model, "model.qk_layernorm = False, Qwen3ForCausalLM means True"),
        (llama(family="mistral", add_bias_linear=True).model, "model.add_bias_linear = True, MistralForCausalLM means False"),
        (gpt2(kv_channels=6).model, "model.kv_channels = 6, GPT2LMHeadModel means None"),
        (gpt2(num_query_groups=1).model, "model.num_query_groups = 1, GPT2LMHeadModel means 5"),
        (gpt2(add_bias_linear=False).model, "model.add_bias_linear = False"),
        (gpt2(position_embedding="rope").model, "model.position_embedding = rope"),
    ],
)
def test_models_that_a_family_cannot_state(model, said):
    with pytest.raises(Refused) as caught:
        family(model.family).config_json(model, "float32", None, None, None)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "model", [llama().model, llama(tie_embeddings=True).model, gpt2().model, gpt2(tie_embeddings=False).model]
)
def test_every_row_has_one_name(model: ModelConfig):
    """Parts cover each tensor without gap or overlap, and no Hugging Face name is used twice."""
    names = []
    for ours, (shape, parts) in family(model.family).tensors(model).items():
        at = 0
        for part in parts:
            assert part.start == at and part.rows > 0, ours
            at += part.rows
            names.append(part.name)
        assert at == shape[0], ours
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) == (not model.tie_embeddings)
    per_layer = 9 if model.family == "llama" else 12
    others = {"llama": 2, "gpt2": 4}[model.family]
    assert len(names) == per_layer * model.num_layers + others + (not model.tie_embeddings)


def test_parts():
    model = replace(llama().model, num_query_groups=4)
    shape, parts = family("llama").tensors(model)["layers.2.attention.qkv.weight"]
    assert shape == (128, 64)
    assert [(p.name, p.start, p.rows) for p in parts] == [
        ("model.layers.2.self_attn.q_proj.weight", 0, 64),
        ("model.layers.2.self_attn.k_proj.weight", 64, 32),
        ("model.layers.2.self_attn.v_proj.weight", 96, 32),
    ]
    shape, (part,) = family("gpt2").tensors(gpt2().model)["layers.1.attention.qkv.weight"]
    assert part == ("transformer.h.1.attn.c_attn.weight", 0, 105, True) and part.hf_shape(shape) == (35, 105)
    shape, (part,) = family("gpt2").tensors(gpt2().model)["layers.1.attention.qkv.bias"]
    assert part == ("transformer.h.1.attn.c_attn.bias", 0, 105, False) and part.hf_shape(shape) == (105,)


def test_differences_that_matter():
    model = llama().model
    theirs = vars(replace(model, hidden_dropout=0.5, make_vocab_size_divisible_by=1, init_method_std=1.0))
    assert differences(theirs, model) == []
    assert differences({**theirs, "max_position_embeddings": 7}, model) == []
    assert differences({**theirs, "max_position_embeddings": 7}, replace(model, position_embedding="learned")) != []
    assert differences({**theirs, "num_layers": 5, "rotary_base": 1e4}, model) == [
        ("num_layers", 5, 4),
        ("rotary_base", 1e4, 5e5),
    ]
