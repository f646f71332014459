"""Cross entropy of a linear layer's output, without ever holding that output.

``torch.ops.fused.linear_cross_entropy(input, linear_weight, target, *, linear_bias=None,
weight=None, reduction=1, ignore_index=None, label_smoothing=0.0, softcap=None, z_loss=0.0,
dtype=None)`` equals torch 2.13's ``torch.nn.functional.linear_cross_entropy``: ``cross_entropy`` of
``linear(input, linear_weight, linear_bias)``. Input is [hidden], [rows, hidden] or with any other
leading dimensions, linear_weight [classes, hidden], linear_bias [classes], target class indices
(int64 or uint8) of input's leading shape. The logits are computed a chunk of rows at a time, and
their gradient replaces them there (:mod:`compile_losses.ops.linear.row_chunks`); or those of many
rows in the memory of linear_weight's gradient (:mod:`compile_losses.ops.linear.class_blocks`).

Additions, for what models do between the two:

- ``softcap``: logits become ``softcap * tanh(logits / softcap)``, not rounded to their own dtype.
- ``z_loss``: ``z_loss * logsumexp(logits) ** 2`` is added to the loss of each row that is not
  ignored (PaLM, https://arxiv.org/abs/2204.02311). Reduction mean divides it by the number of such
  rows, whatever the class weights.
- ``dtype``: of the loss; the result is that of casting the logits, after the soft-cap, to it. When
  it is given autocast changes nothing; otherwise arguments are cast as autocast casts those of
  ``linear``.

Gradients of a loss that is reduced are computed with the loss, in three matrix products in all, and
only those that are needed. With reduction none that is so if only input needs a gradient
(:mod:`compile_losses.ops.linear.unit_gradients`), and in compiled steps of more kinds
(:mod:`compile_losses.lower.row_gradients`). Otherwise, and in float16, whose unit gradients
underflow, the backward recomputes the logits. Ignored rows have gradients
of exactly 0; in torch a row of nan has gradients of nan even when it is ignored.

Two cases are computed as torch does, over all logits: class probabilities as target, which are as
large as the logits themselves, and K-dimensional classes (linear_weight [classes, d1, ..., hidden]
with input [rows, hidden]), whose softmax goes over a part of linear_weight's rows.

Raises:
    RuntimeError: shapes, dtypes or devices that don't go together; label_smoothing above 1; a
        softcap that is not positive; ignore_index together with class probabilities.
    ValueError: input's and target's numbers of rows differ; unknown reduction.
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index. On CUDA the
        kernel stops with a device-side assertion.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.distributed import are_dtensors, mesh_of, replicated_by_loss_parallel
from compile_losses.ops.checks import REDUCTIONS, class_indices, loss_dtype
from compile_losses.ops.linear.arguments import NAME, as_rows, check, has_probabilities
from compile_losses.ops.linear.leaf_ops import declare_leaves
from compile_losses.ops.linear.reference import autocast_off, reference, under_autocast
from compile_losses.ops.linear.row_chunks import of_cross_entropy
from compile_losses.ops.transforms import needs_torch

public = library.define(
    "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *, "
    "Tensor? linear_bias=None, Tensor? weight=None, int reduction=1, SymInt? ignore_index=None, "
    "float label_smoothing=0.0, float? softcap=None, float z_loss=0.0, ScalarType? dtype=None) "
    "-> Tensor"
)

leaves = declare_leaves(
    NAME,
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    "int reduction, SymInt ignore_index, float label_smoothing, float? softcap, float z_loss, "
    "ScalarType dtype",
    problem=of_cross_entropy,
    check=partial(check, leaf=True),
    reference=reference,
)


def public_kernel(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if are_dtensors(input) and all(placement.is_replicate() for placement in input.placements):  # type: ignore[attr-defined]
        target, weight = replicated_by_loss_parallel((linear_weight, 0), target, weight)
    mesh = mesh_of(
        NAME, input=input, linear_weight=linear_weight, target=target, linear_bias=linear_bias,
        weight=weight,
    )  # fmt: skip
    promoting = []
    probabilities = has_probabilities(input, linear_weight, target)
    if probabilities:
        others = (target, weight)
        promoting = [t for t in others if t is not None and t.is_floating_point()]
    else:
        target = class_indices(input, target)
    result = loss_dtype(dtype, input, *promoting)
    if dtype is None and input.dtype != torch.float64 and under_autocast(input):
        lower = torch.get_autocast_dtype(input.device.type)
        input, linear_weight = input.to(lower), linear_weight.to(lower)
        linear_bias = None if linear_bias is None else linear_bias.to(lower)
        weight = None if weight is None else weight.to(result)
    tensors = (input, linear_weight, target, linear_bias, weight)
    more = (softcap, z_loss, result)
    check(*tensors, reduction, ignore_index, label_smoothing, *more)
    ignored = -100 if ignore_index is None else ignore_index
    options: Any = (reduction, ignored, max(label_smoothing, 0.0), *more)
    if mesh is not None:
        from compile_losses.distributed import linear

        return linear.linear_cross_entropy(public_kernel, mesh, *tensors, *options)
    if probabilities or linear_weight.dim() > 2 or needs_torch(*tensors):
        with autocast_off(input):
            return reference(*tensors, *options)
    rows = (as_rows(input), linear_weight, target.reshape(-1), *tensors[3:])
    loss = leaves((*rows, *options), by_row=reduction == REDUCTIONS["none"])
    return loss.reshape(target.shape) if reduction == REDUCTIONS["none"] else loss


library.implement_public(public, public_kernel)
