"""The stand-ins for a GPU's operators: shapes and types of what they replace, and bytes of what a GPU keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megakit.modeling import attention, norm
from megakit.ops import attention as blocks
from megakit.ops import norm as operators
from megakit.parallel import tensor
from megakit.verify.gpu import gpu_operators
from megakit.verify.live import LiveBytes
from megakit.verify.step import step
from tests.verify.programs import small

X, W = (6, 2, 16), (16,)


def test_they_are_put_back():
    names = [(norm, "norm"), (operators, "norm"), (tensor, "accumulate_outer"), (attention, "F"), (blocks, "_kernel")]
    before = [getattr(*name) for name in names]
    with pytest.raises(KeyError), gpu_operators():
        assert all(getattr(*name) is not original for name, original in zip(names, before))
        raise KeyError
    assert [getattr(*name) for name in names] == before


def shapes(function, *args):
    y = function(*args)
    y.sum().backward()
    return [(t.shape, t.dtype) for t in (y, *(a.grad for a in args if isinstance(a, torch.Tensor)))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_are_those_of_the_real_ones(dtype):
    def tensors(*shapes):
        return [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]

    def norms():
        out = shapes(lambda x, w: norm.norm(x, w, None, 1e-5), *tensors(X, W))
        out += shapes(lambda x, w, b: norm.norm(x, w, b, 1e-5), *tensors(X, W, W))
        return out + shapes(lambda x, r, w: sum(norm.add_norm(x, r, w, None, 1e-5)), *tensors(X, X, W))

    real = norms()
    with gpu_operators():
        stand_in = norms()
        total = torch.zeros(3, 5)
        tensor.accumulate_outer(total, torch.ones(4, 3, dtype=dtype), torch.ones(4, 5, dtype=dtype))
        with pytest.raises(RuntimeError, match=r"weight gradient of \[3, 5\] from \[4, 5\] and \[4, 3\]"):
            tensor.accumulate_outer(total, torch.ones(4, 5), torch.ones(4, 3))
    assert stand_in == real


def test_a_norm_keeps_its_input_and_statistics_only():
    with FakeTensorMode(), LiveBytes() as live, gpu_operators():
        x = torch.empty(X, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(W, dtype=torch.bfloat16, requires_grad=True)
        before = live.now
        y = norm.norm(x, w, None, 1e-5)
        assert live.now - before == live.most - before == 2 * x.numel() + 4 * 12
        del y
        assert live.now == before


def test_attention_dropout_holds_no_scores_on_a_gpu():
    keys = {"model__attention_dropout": 0.1, "train__precision": "bf16", "train__seq_len": 128}
    keys["model__max_position_embeddings"] = 128
    without = step(small(**{**keys, "model__attention_dropout": 0.0}), 0)
    gpu, cpu = step(small(**keys), 0), step(small(**keys, launch__device="cpu"), 0)
    scores = 8 * 128 * 128 * 4
    assert gpu.most_bytes == without.most_bytes < cpu.most_bytes - scores


def test_blocks_choose_as_on_a_gpu():
    q = torch.empty(1, 1, 4, 8, dtype=torch.bfloat16)
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with gpu_operators():
        assert blocks._kernel(q, None, None) == "cpu", "the flash kernel that stands for the GPU's"
        assert blocks._kernel(q.float(), None, None) == blocks._kernel(q, allowed, None) == "plain"
    assert F.scaled_dot_product_attention is attention.F.scaled_dot_product_attention
