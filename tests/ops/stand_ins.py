"""Stand-ins for Transformer Engine and NVIDIA Apex: their documented signatures to the letter, torch's arithmetic on the CPU.

A wrong argument name is a TypeError here as it would be there. From the sources of Transformer Engine 2.10 to 2.20
(transformer_engine/pytorch: module/layernorm.py, module/rmsnorm.py, ops/basic/{layer_norm,rmsnorm}.py, module/linear.py,
attention/dot_product_attention/dot_product_attention.py, quantization.py) and of Apex (apex/normalization/fused_layer_norm.py,
apex/optimizers/fused_adam.py). Arguments of the real ones that only later versions have are left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device=None,
        dtype=None,
        sm_margin=0,
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    def forward(self, input):
        return F.rms_norm(input, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(
        self,
        normalized_shape,
        *,
        sequence_parallel=None,
        params_dtype=None,
        eps=1e-5,
        device=None,
        dtype=None,
        zero_centered_gamma=False,
        sm_margin=0,
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(normalized_shape, device=device, dtype=dtype))

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, self.eps)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
    ):
        super().__init__()
        assert qkv_format == "sbhd" and attn_mask_type == "causal" and attention_type == "self"
        self.heads, self.groups, self.width = num_attention_heads, num_gqa_groups or num_attention_heads, kv_channels
        self.dropout, self.window = attention_dropout, window_size

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
    ):
        assert query_layer.shape[2:] == (self.heads, self.width) and key_layer.shape[2:] == (self.groups, self.width)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query_layer, key_layer, value_layer))
        p = self.dropout if self.training else 0.0
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        if self.window is not None:  # (tokens before the query, behind it)
            assert self.window[1] == 0
            seen = seen.triu(-self.window[0])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p, enable_gqa=self.groups != self.heads)
        return y.permute(2, 0, 1, 3).flatten(2)


ACTIVE: list[object] = []
"""Recipes of the autocast contexts that are entered."""


@contextlib.contextmanager
def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
    ACTIVE.append(recipe if enabled else None)
    yield
    ACTIVE.pop()


class Linear(nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        assert not bias and tp_size == 1
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        assert isinstance(ACTIVE[-1], Recipe), "in bf16: no recipe is active"
        return F.linear(inp, self.weight)


class Recipe:
    pass


class DelayedScaling(Recipe):
    def __init__(
        self,
        margin=0,
        fp8_format=None,
        amax_history_len=1024,
        amax_compute_algo="max",
        scaling_factor_compute_algo=None,
        reduce_amax=True,
        fp8_dpa=False,
        fp8_mha=False,
    ):
        assert not reduce_amax, "it would reduce over a group that it isn't given"


class Float8CurrentScaling(Recipe):
    def __init__(self, use_power_2_scales=False, fp8_format=None):
        pass


class MXFP8BlockScaling(Recipe):
    def __init__(self, margin=0, fp8_format=None):
        pass


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    return F.rms_norm(input, normalized_shape, weight, eps)


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


class FusedAdam(torch.optim.Optimizer):
    """AdamW by its formulas, with Apex's state: "exp_avg" and "exp_avg_sq" of a parameter, "step" of a group."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights)

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m, v = state["exp_avg"] / (1 - beta1 ** group["step"]), state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                p -= group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p)


def module(name: str, **content: object) -> ModuleType:
    made = ModuleType(name)
    made.__path__ = []  # a package
    for key, value in content.items():
        setattr(made, key, value)
    return made


def transformer_engine(version: str = "2.20.2") -> dict[str, ModuleType]:
    """What `import transformer_engine.pytorch` finds."""
    made = (RMSNorm, LayerNorm, DotProductAttention, Linear, autocast)
    te = module("transformer_engine.pytorch", **{c.__name__: c for c in made})
    recipes = (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling)
    return {
        "transformer_engine": module("transformer_engine", __version__=version, pytorch=te),
        "transformer_engine.pytorch": te,
        "transformer_engine.common": module("transformer_engine.common"),
        "transformer_engine.common.recipe": module("recipe", **{c.__name__: c for c in recipes}),
    }


def apex() -> dict[str, ModuleType]:
    """NVIDIA's, with its CUDA extensions."""
    norms = (fused_rms_norm_affine, fused_layer_norm_affine)
    return {
        "apex": module("apex"),
        "apex.normalization": module("apex.normalization"),
        "apex.normalization.fused_layer_norm": module("fused_layer_norm", **{f.__name__: f for f in norms}),
        "apex.optimizers": module("apex.optimizers", FusedAdam=FusedAdam),
        "amp_C": module("amp_C", multi_tensor_adam=None),
        "fused_layer_norm_cuda": module("fused_layer_norm_cuda"),
    }


@contextlib.contextmanager
def installed(*libraries: dict[str, ModuleType], gpu: bool = True) -> Iterator[None]:
    """These are what an import finds; gpu: the CPU counts as a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for library in libraries:
            for name, made in library.items():
                patch.setitem(sys.modules, name, made)
        if gpu:
            patch.setattr("megakit.ops.te.on_gpu", lambda *args: None)
            patch.setattr("megakit.ops.apex.on_gpu", lambda *args: None)
        yield
