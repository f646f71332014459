"""Losses of elements, and of rows whose classes all lie on one rank: a sum of each rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compile_losses.distributed.collectives import totals
from compile_losses.distributed.layout import (
    Elements,
    assemble,
    replicated,
    summed,
    without,
)
from compile_losses.ops import checks

NONE, SUM = checks.REDUCTIONS["none"], checks.REDUCTIONS["sum"]


def elementwise(
    op: str,
    mesh: DeviceMesh,
    loss: Callable[..., Tensor],
    tensors: dict[str, Tensor | None],
    shape: torch.Size,
    reduction: int,
    dtype: torch.dtype,
    divisor: int | None,
    *,
    weight_repeats: int | None = None,
    like: Tensor | None = None,
    classes: int | None = None,
) -> Tensor:
    """A loss whose reductions are sums over its elements.

    Args:
        loss: of local tensors in the order of ``tensors``, a reduction (none or sum) and a dtype.
        shape: what the arguments broadcast to.
        divisor: of the sum, over all ranks.
        weight_repeats: where the sum of ``weight`` divides instead, how often each of its elements
            counts.
        like: whose strides an unreduced loss has.
        classes: a dimension that may not be sharded, and that the unreduced loss does not have.

    Returns:
        A DTensor: unreduced, sharded as the arguments are; reduced, Partial along the dimensions
        of the mesh that shard them, without communication; divided by a weight replicated, after an
        all-reduce of two numbers along each of them.
    """
    elements = Elements(op, mesh, shape, list(tensors.values()), classes)
    parts: Sequence[Any] = [elements.local(tensor) for tensor in tensors.values()]
    if reduction == NONE:
        placements, result = elements.placements, shape
        if classes is not None:
            placements = without(placements, classes)
            result = torch.Size([*shape[:classes], *shape[classes + 1 :]])
        return assemble(loss(*parts, NONE, dtype), mesh, placements, result, like)
    # In float32 at least: sums of float16 overflow where their quotient does not.
    total = loss(*parts, SUM, checks.accumulation_type(dtype))
    if weight_repeats is not None:
        place = list(tensors).index("weight")
        share = weight_repeats / elements.copies(mesh, tensors["weight"])
        own = parts[place].sum(dtype=total.dtype) * share
        total, weight = totals([total, own], mesh, elements.mesh_dims)
        return assemble((total / weight).to(dtype), mesh, replicated(mesh), torch.Size())
    if divisor is not None:
        total = total / divisor
    return assemble(total.to(dtype), mesh, summed(mesh, elements.mesh_dims), torch.Size())
