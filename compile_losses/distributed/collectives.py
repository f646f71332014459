"""The two collectives of the losses, as functional collectives, which a compiler sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# Its name in torch 2.13, and before.
_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def _waited(tensor: Tensor) -> Tensor:
    if isinstance(tensor, functional.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def gather(shard: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    """[ranks, ...] of what each rank along a dimension of the mesh has. Not differentiable."""
    whole = _all_gather(shard.contiguous(), 0, (mesh, mesh_dim))
    return _waited(whole).view(mesh.size(mesh_dim), *shard.shape)


class _Total(torch.autograd.Function):
    """Sums over ranks; every rank's part has the gradient of the sum, which all ranks know."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Tensor:
        total = part.clone()
        for dim in mesh_dims:
            total = _waited(functional.all_reduce(total, "sum", (mesh, dim)))
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, None, None


def totals(parts: Sequence[Tensor], mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Sequence[Tensor]:
    """The sums of some numbers over ranks: one collective for each dimension of the mesh."""
    if not mesh_dims:
        return parts
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    stacked = torch.stack([part.to(dtype) for part in parts])
    return _Total.apply(stacked, mesh, tuple(mesh_dims)).unbind(0)
