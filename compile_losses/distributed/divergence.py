"""Divergences of a linear layer's output from a teacher's logits, whose rows are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compile_losses.distributed.layout import (
    assemble,
    dim_of,
    is_shard,
    local,
    replicated,
    summed,
)
from compile_losses.distributed.linear_layer import LinearLayer
from compile_losses.ops import checks

NONE, SUM = checks.REDUCTIONS["none"], checks.REDUCTIONS["sum"]


def linear_divergence(
    op: str,
    whole: Callable[..., Tensor],
    mesh: DeviceMesh,
    student: tuple[Any, Any, Any],
    teacher: tuple[Any, Any, Any],
    reduction: int,
    divisor: int,
    dtype: torch.dtype,
) -> Tensor:
    """Of DTensors; see LinearLayer for their placements. A teacher's layer is replicated.

    Args:
        whole: of the local tensors of student and teacher, a reduction (none or sum) and a dtype.
        student: input, weight and bias of a layer.
        teacher: the same, or logits, None and None.
        divisor: of the sum, over all ranks.

    Returns:
        A DTensor: unreduced, placed as the rows; reduced, Partial along the dimensions of the mesh
        that shard them, without communication.

    Raises:
        RuntimeError: sharded classes, or a layer that is sharded otherwise.
    """
    input, linear_weight, linear_bias = student
    target, target_weight, target_bias = teacher
    layout = LinearLayer(op, input, linear_weight, target)
    if layout.classes is not None or _has_sharded_classes(target, target_weight):
        raise RuntimeError(
            f"{op}: the classes of student or teacher are sharded, for which there is no sharded "
            "form. Redistribute the layers and the teacher's logits to Replicate(), and shard the "
            "rows of input"
        )
    hidden, layer, bias, own_target = layout.local(input, linear_weight, linear_bias, target)
    everywhere = replicated(mesh)
    of_teacher = (own_target, local(target_weight, everywhere), local(target_bias, everywhere))
    if reduction == NONE:
        each = whole((hidden, layer, bias), of_teacher, NONE, dtype)
        return assemble(each, mesh, layout.target, input.shape[:-1])
    # In float32 at least: sums of float16 overflow where their quotient does not.
    total = whole((hidden, layer, bias), of_teacher, SUM, checks.accumulation_type(dtype)) / divisor
    return assemble(total.to(dtype), mesh, summed(mesh, layout.mesh_dims), torch.Size())


def _has_sharded_classes(target: Any, target_weight: Any) -> bool:
    if target_weight is not None:
        return any(map(is_shard, target_weight.placements))
    return any(is_shard(p) and dim_of(p) == target.dim() - 1 for p in target.placements)
