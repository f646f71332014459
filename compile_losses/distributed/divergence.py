"""Divergences of two softmaxes, and of a linear layer's output from a teacher's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from compile_losses.distributed.layout import (
    Elements,
    Placements,
    assemble,
    dim_of,
    is_shard,
    local,
    summed,
    without,
)
from compile_losses.distributed.linear_layer import LinearLayer
from compile_losses.distributed.vocabulary import Vocabulary, each_once_differentiable
from compile_losses.ops import checks
from compile_losses.ops.linear import vocabulary_parallel_divergence as of_layers
from compile_losses.ops.linear.arguments import as_rows
from compile_losses.ops.vocabulary_parallel_divergence import divergence, merged

NONE, SUM = checks.REDUCTIONS["none"], checks.REDUCTIONS["sum"]


class _OfLogits(torch.autograd.Function):
    """Kullback-Leibler divergence in float64 from a rank's own classes of both, of each row or
    summed."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        target: Tensor,
        vocabulary: Vocabulary,
        reduction: int,
        temperature: float,
    ) -> Tensor:
        own = divergence(input, target, temperature)
        each, stats = merged(vocabulary.everyones(own), temperature)
        ctx.save_for_backward(input, target, stats)
        ctx.temperature = temperature
        return each if reduction == NONE else each.sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, target, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        with torch.no_grad():
            gradients = torch.ops.fused.softmax_kl_div_backward(
                _by_row(grad_output, stats), input, target, stats, NONE, ctx.temperature, -1, *needs
            )
        found = each_once_differentiable(gradients, needs, input, target, grad_output)
        return *found, None, None, None


def _by_row(grad_output: Tensor, stats: Tensor) -> Tensor:
    """[rows], from the gradient of each row's divergence or of their sum."""
    return grad_output.to(stats.dtype) * torch.ones_like(stats.select(1, 0))


class _OfLayer(torch.autograd.Function):
    """The same of a rank's part of a student's layer, and of a teacher's logits or layer."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        target_weight: Tensor | None,
        target_bias: Tensor | None,
        vocabulary: Vocabulary,
        reduction: int,
        reverse: bool,
        temperature: float,
    ) -> Tensor:
        tensors = (input, linear_weight, target, linear_bias, target_weight, target_bias)
        own = of_layers.divergence(*tensors, reverse, temperature)
        each, stats = merged(vocabulary.everyones(own), temperature)
        ctx.save_for_backward(*tensors, stats)
        ctx.options = (reverse, temperature)
        return each if reduction == NONE else each.sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        *tensors, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        with torch.no_grad():
            gradients = of_layers.gradient(
                _by_row(grad_output, stats), stats, *tensors, *ctx.options, *needs
            )
        found = each_once_differentiable(gradients, needs, *tensors[:2], grad_output)
        return *found, *(None for _ in range(7))


def _assembled(
    loss: Tensor,
    own_rows: torch.Size,
    mesh: DeviceMesh,
    placements: Placements,
    rows: torch.Size,
    reduction: int,
    divisor: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """A DTensor of the divergence of each of a rank's rows, or of their sum.

    Args:
        own_rows: the shape of a rank's rows.
        placements, rows: the placements and the shape of all rows.
        divisor: of the sum, over all ranks.
    """
    if reduction == NONE:
        return assemble(loss.reshape(own_rows).to(dtype), mesh, placements, rows)
    mesh_dims = [i for i, p in enumerate(placements) if is_shard(p)]
    total = (loss / (divisor or 1)).to(dtype)
    return assemble(total, mesh, summed(mesh, mesh_dims), torch.Size())


def kl_div_of_sharded_classes(
    mesh: DeviceMesh,
    input: Any,
    target: Any,
    reduction: int,
    temperature: float,
    dim: int,
    divisor: int | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """``softmax_kl_div`` of DTensors; None if dimension ``dim``, which is not negative, is sharded
    along no dimension of the mesh, or otherwise than by Shard along one."""
    elements = Elements("softmax_kl_div", mesh, input.shape, [input, target])
    along = [i for i, p in enumerate(elements.placements) if is_shard(p) and dim_of(p) == dim]
    if len(along) != 1 or not isinstance(elements.placements[along[0]], Shard):
        return None
    vocabulary = Vocabulary(mesh, along[0], input.shape[dim])
    last = [elements.local(t).movedim(dim, -1).contiguous() for t in (input, target)]
    vocabulary.first_class(last[0].shape[-1])  # checks how they are dealt out
    loss = _OfLogits.apply(*map(as_rows, last), vocabulary, reduction, temperature)
    kept = (Replicate() if i in along else p for i, p in enumerate(elements.placements))
    placements = without(tuple(kept), dim)
    rows = torch.Size([*input.shape[:dim], *input.shape[dim + 1 :]])
    own_rows = last[0].shape[:-1]
    return _assembled(loss, own_rows, mesh, placements, rows, reduction, divisor, dtype)


def linear_divergence(
    op: str,
    whole: Callable[..., Tensor],
    reverse: bool | None,
    mesh: DeviceMesh,
    student: tuple[Any, Any, Any],
    teacher: tuple[Any, Any, Any],
    reduction: int,
    temperature: float,
    divisor: int,
    dtype: torch.dtype,
) -> Tensor:
    """Of DTensors; see LinearLayer for their placements. The teacher's classes are placed as the
    student's.

    Args:
        whole: of the local tensors of student and teacher, a reduction (none or sum) and a dtype.
        reverse: of Kullback-Leibler's divergence without soft-caps, whose classes may be sharded;
            None of another's.
        student: input, weight and bias of a layer.
        teacher: the same, or logits, None and None.
        divisor: of the sum, over all ranks.

    Returns:
        A DTensor: unreduced, placed as the rows; reduced, Partial along the dimensions of the mesh
        that shard them.

    Raises:
        RuntimeError: sharded classes that have no sharded form; a layer that is sharded otherwise.
    """
    input, linear_weight, linear_bias = student
    target, target_weight, target_bias = teacher
    layout = LinearLayer(op, input, linear_weight, target)
    _check_teacher(op, layout, target, target_weight)
    if layout.classes is not None and reverse is None:
        raise RuntimeError(
            f"{op}: the classes are sharded along dimension {layout.classes} of the mesh, for "
            "which a Jensen-Shannon divergence, or one with a soft-cap, has no sharded form. "
            "Redistribute the layers and the teacher's logits to Replicate(), and shard the rows "
            "of input"
        )
    placed = layout.target
    if layout.classes is not None and target_weight is None:
        placed = tuple(
            Shard(target.dim() - 1) if i == layout.classes else p for i, p in enumerate(placed)
        )
    hidden, layer, bias, _ = layout.local(input, linear_weight, linear_bias, None)
    of_teacher = (
        local(target, placed), local(target_weight, layout.weight),
        local(target_bias, layout.weight),
    )  # fmt: skip
    shape, rows = input.shape[:-1], layout.target
    if layout.classes is None:
        if reduction == NONE:
            each = whole((hidden, layer, bias), of_teacher, NONE, dtype)
            return assemble(each, mesh, rows, shape)
        # In float32 at least: sums of float16 overflow where their quotient does not.
        wide = checks.accumulation_type(dtype)
        total = whole((hidden, layer, bias), of_teacher, SUM, wide) / divisor
        return assemble(total.to(dtype), mesh, summed(mesh, layout.mesh_dims), torch.Size())
    vocabulary = Vocabulary(mesh, layout.classes, linear_weight.shape[0])
    vocabulary.first_class(layer.shape[0])  # checks how they are dealt out
    own_target, *teacher_layer = of_teacher
    loss = _OfLayer.apply(
        as_rows(hidden), layer, bias, as_rows(own_target), *teacher_layer, vocabulary, reduction,
        reverse, temperature,
    )  # fmt: skip
    own_rows = hidden.shape[:-1]
    return _assembled(loss, own_rows, mesh, rows, shape, reduction, divisor, dtype)


def _check_teacher(op: str, layout: LinearLayer, target: Any, target_weight: Any) -> None:
    """Refuses classes that are sharded otherwise than the student's; these are never gathered."""
    holder, dim = (target, target.dim() - 1) if target_weight is None else (target_weight, 0)
    for i, placement in enumerate(holder.placements):
        if not is_shard(placement) or (target_weight is None and dim_of(placement) != dim):
            continue
        if i != layout.classes or placement != Shard(dim):
            name = "target" if target_weight is None else "target_weight"
            raise RuntimeError(
                f"{op}: expected the classes of student and teacher to be sharded alike, got "
                f"{name} with {holder.placements}. Redistribute it first"
            )
