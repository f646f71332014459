"""Linear cross entropy whose rows or classes are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compile_losses.distributed.collectives import totals
from compile_losses.distributed.layout import assemble, local, replicated, summed
from compile_losses.distributed.linear_layer import LinearLayer
from compile_losses.distributed.vocabulary import Vocabulary, each_once_differentiable
from compile_losses.ops import checks
from compile_losses.ops.divisors import divisors, mean_of
from compile_losses.ops.linear.arguments import NAME, has_probabilities
from compile_losses.ops.linear.vocabulary_parallel import gradient, parts

NONE, MEAN, SUM = (checks.REDUCTIONS[name] for name in ("none", "mean", "sum"))


class _VocabularyParallel(torch.autograd.Function):
    """Cross entropy (reduction none or sum), squared logsumexp (likewise) and the total weight."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        vocabulary: Vocabulary,
        reduction: int,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard = (vocabulary.first_class(linear_weight.shape[0]), vocabulary.classes)
        own = parts(
            input, linear_weight, target, linear_bias, weight, *shard, ignore_index,
            label_smoothing, softcap,
        )  # fmt: skip
        options = (ignore_index, label_smoothing, dtype)
        loss, stats, total_weight = vocabulary.merged(own, target, weight, reduction, options)
        squares = torch.where(target != ignore_index, stats.sum(1).square(), 0)
        ctx.save_for_backward(input, linear_weight, linear_bias, target, weight, stats)
        ctx.arguments = (*shard, reduction, ignore_index, label_smoothing, softcap)
        ctx.mark_non_differentiable(total_weight)
        ctx.set_materialize_grads(False)
        return loss, squares if reduction == NONE else squares.sum(), total_weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_squares: Tensor | None, _: Any) -> Any:
        input, linear_weight, linear_bias, target, weight, stats = ctx.saved_tensors
        _, _, reduction, *_ = ctx.arguments
        if grad_output is None:
            zero = stats.new_zeros(())
            grad_output = zero if reduction != NONE else torch.zeros_like(target, dtype=zero.dtype)
        needs = ctx.needs_input_grad[:3]
        with torch.no_grad():
            gradients = gradient(
                grad_output, grad_squares, input, linear_weight, target, linear_bias, weight, stats,
                *ctx.arguments, *needs,
            )  # fmt: skip
        found = each_once_differentiable(gradients, needs, input, linear_weight, grad_output)
        return *found, *(None for _ in range(8))


def linear_cross_entropy(
    whole: Callable[..., Tensor],
    mesh: DeviceMesh,
    input: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    dtype: torch.dtype,
) -> Tensor:
    """Of DTensors; see LinearLayer for their placements.

    Args:
        whole: the public op, for local tensors if every rank has all classes.
    """
    if linear_weight.dim() > 2 or has_probabilities(input, linear_weight, target):
        raise RuntimeError(
            f"{NAME}: class probabilities and K-dimensional classes are computed over all logits, "
            "for which there is no sharded form: give cross_entropy the output of linear"
        )
    layout = LinearLayer(NAME, input, linear_weight, target)
    classes, shape = linear_weight.shape[0], target.shape
    hidden, layer, bias, rows = layout.local(input, linear_weight, linear_bias, target)
    weights = local(weight, replicated(mesh))
    wide = torch.promote_types(dtype, checks.accumulation_type(input.dtype))
    # A weighted mean and the mean of the z-loss have different divisors.
    apart = reduction == MEAN and z_loss != 0 and weights is not None
    inner = NONE if reduction == NONE else SUM
    inner_dtype = wide if reduction == MEAN or z_loss != 0 else dtype
    squares: Tensor | None = None
    if layout.classes is not None or apart:
        vocabulary = Vocabulary(mesh, layout.classes, classes)
        loss, squares, _ = _VocabularyParallel.apply(
            hidden.reshape(-1, hidden.shape[-1]), layer, bias, rows.reshape(-1).to(torch.int64),
            weights, vocabulary, inner, ignore_index, label_smoothing, softcap, inner_dtype,
        )  # fmt: skip
        loss = loss.reshape(rows.shape) if inner == NONE else loss
        if not apart and z_loss != 0:
            assert squares is not None
            loss = loss + z_loss * squares.reshape(loss.shape)
    else:
        loss = whole(
            hidden, layer, rows, linear_bias=bias,
            weight=None if weights is None else weights.to(inner_dtype), reduction=inner,
            ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
            z_loss=z_loss, dtype=inner_dtype,
        )  # fmt: skip
    if reduction == NONE:
        return assemble(loss.to(dtype), mesh, layout.target, shape)
    if reduction == SUM:
        return assemble(loss.to(dtype), mesh, summed(mesh, layout.mesh_dims), torch.Size())
    total_weight, count = divisors(rows, weights, ignore_index, wide)
    smoothed = weights is not None and label_smoothing > 0
    if not apart:
        loss, total_weight = totals([loss, total_weight], mesh, layout.mesh_dims)
        mean = mean_of(loss, total_weight, smoothed=smoothed)
        return assemble(mean.to(dtype), mesh, replicated(mesh), torch.Size())
    assert squares is not None
    loss, squares, total_weight, count = totals(
        [loss, squares, total_weight, count], mesh, layout.mesh_dims
    )
    mean = mean_of(loss, total_weight, smoothed=smoothed) + z_loss * squares / count
    return assemble(mean.to(dtype), mesh, replicated(mesh), torch.Size())
