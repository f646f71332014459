"""The two collectives of the losses, as functional collectives, which a compiler sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compile_losses.torch_internals.dtensors import all_gather, all_reduce, waited


def gather(shard: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    """[ranks, ...]: the shards of all ranks along a dimension of the mesh. Not differentiable."""
    whole = all_gather(shard.contiguous(), 0, (mesh, mesh_dim))
    return waited(whole).view(mesh.size(mesh_dim), *shard.shape)


class _Total(torch.autograd.Function):
    """Sums over ranks; every rank's part has the gradient of the sum, which all ranks know."""

    @staticmethod
    def forward(
        ctx: Any, groups: tuple[Any, ...], dtype: torch.dtype, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtypes = [part.dtype for part in parts]
        total = torch.stack([part.to(dtype) for part in parts])
        for group in groups:
            total = waited(all_reduce(total, "sum", group))
        results = total.unbind(0)
        needs = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(r for r, n in zip(results, needs, strict=True) if not n))
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        needs = ctx.needs_input_grad[2:]
        gradients = (
            grad.to(dtype) if needed else None
            for grad, dtype, needed in zip(grad_outputs, ctx.dtypes, needs, strict=True)
        )
        return None, None, *gradients


def totals(parts: Sequence[Tensor], mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Sequence[Tensor]:
    """The sums of some numbers over ranks: one collective for each dimension of the mesh."""
    return totals_over([(mesh, dim) for dim in mesh_dims], parts)


def totals_over(groups: Sequence[Any], parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same, over one group after the other."""
    if not groups:
        return parts
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    results: Sequence[Tensor] = _Total.apply(tuple(groups), dtype, *parts)
    return results
