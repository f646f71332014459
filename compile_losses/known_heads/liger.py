"""Liger Kernel's linear cross entropy, which its patches of models call.

Without a row: its losses of preferences and policies, which compute a whole loss of chunks of a
batch. Of a call's options these stay theirs: weights of classes, scaled tokens, sums in another
dtype than the weight's, other kernels than its Triton ones, and results besides the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compile_losses.known_heads.head import KnownHead, product_dtype, refuse_layer
from compile_losses.ops.checks import REDUCTIONS


def linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ce_impl: Any = None,
    ce_mode: Any = None,
    chunk_mem_const: int = 1,
) -> tuple[Tensor, None, None, None] | str:
    """The loss in float32, and nothing in the places of other results."""
    if return_z_loss or return_token_accuracy or return_predicted_tokens:
        return "it returns more than the loss"
    if ce_weight is not None or use_token_scaling:
        return "its classes or tokens have weights"
    if ce_impl is not None or ce_mode is not None:
        return "its kernels are chosen"
    if accum_dtype not in (None, weight.dtype):
        return "its gradients are sums in another dtype"
    if reduction not in REDUCTIONS:
        return "its reduction is not known"
    if _input.dtype not in (torch.float32, torch.bfloat16):
        return "its dtype is neither float32 nor bfloat16"
    if not _input.dtype == weight.dtype == product_dtype(_input):
        return "its product has another dtype than its operands"
    if bias is not None and bias.dtype != weight.dtype:
        return "its bias has another dtype than its weight"
    if softcap is not None and not softcap > 0:
        return "its soft-cap is not positive"
    reason = refuse_layer(_input, weight, bias, target)
    if reason is not None:
        return reason
    # Of no rows at all their mean is 0, and torch's nan.
    loss = torch.ops.fused.linear_cross_entropy(
        _input,
        weight,
        target,
        linear_bias=bias,
        reduction=REDUCTIONS["none" if reduction == "none" else "sum"],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=lse_square_scale,
        dtype=torch.float32,
    )
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum().clamp(min=1)
    return loss, None, None, None


HEADS = (
    KnownHead(
        package="liger-kernel",
        versions=("0.8.5",),
        module="liger_kernel.ops.fused_linear_cross_entropy",
        name="LigerFusedLinearCrossEntropyFunction",
        loss="linear_cross_entropy",
        compute=linear_cross_entropy,
    ),
)
