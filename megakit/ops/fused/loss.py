"""csrc/kernels/loss.cu. logits [..., V], labels [...] int64. What the ranks tell each other is the caller's work."""

from __future__ import annotations

import torch
from torch import Tensor

from megakit.ops.fused.library import call, dtype_code, fake, needs, operator


@operator("loss_stats(Tensor logits, Tensor labels, int cols, int first) -> Tensor")
def loss_stats(logits: Tensor, labels: Tensor, cols: int, first: int) -> Tensor:
    """fp32 [4, ...]: max, sum exp(z - max), z of the label or 0, sum z; of the first `cols` columns, from id `first` on."""
    needs("labels", labels, logits.shape[:-1], torch.int64, logits.device)
    logits, labels = logits.contiguous(), labels.contiguous()
    stats = torch.empty((4, *labels.shape), dtype=torch.float32, device=logits.device)
    sizes = (labels.numel(), cols, logits.shape[-1], first)
    call("mk_loss_forward", logits.device, stats, logits, labels, *sizes, dtype_code(logits))
    return stats


@operator(
    "loss_gradient_(Tensor(a!) logits, Tensor top, Tensor exps, Tensor grad, Tensor labels, int cols, int first, int ignore,"
    " int vocab, float smoothing, float z_loss) -> ()"
)
def loss_gradient_(
    logits: Tensor,
    top: Tensor,
    exps: Tensor,
    grad: Tensor,
    labels: Tensor,
    cols: int,
    first: int,
    ignore: int,
    vocab: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """logits become their gradient, that of the summed loss times `grad`, fp32 []; see csrc/include/megakit/abi.h."""
    if not logits.is_contiguous():
        raise RuntimeError(f"the gradient takes the place of logits without gaps, not of strides {logits.stride()}")
    needs("labels", labels, logits.shape[:-1], torch.int64, logits.device)
    needs("top", top, labels.shape, torch.float32, logits.device)
    needs("exps", exps, labels.shape, torch.float32, logits.device)
    needs("grad", grad, (), torch.float32, logits.device)
    sizes = (labels.numel(), cols, logits.shape[-1], first, ignore)
    parts = (logits, top.contiguous(), exps.contiguous(), grad, labels.contiguous())
    call("mk_loss_backward", logits.device, *parts, *sizes, smoothing, vocab, z_loss, dtype_code(logits))


@fake("loss_stats")
def _(logits: Tensor, labels: Tensor, cols: int, first: int) -> Tensor:
    return logits.new_empty((4, *labels.shape), dtype=torch.float32)


@fake("loss_gradient_")
def _(*args: object) -> None:
    return None
