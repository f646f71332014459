"""Ranks simulated in one process, and a loss of DTensors compared with that of plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 4

#: Whether torch can flatten a sharded sequence, which is where _StridedShard comes from.
FLATTENS = torch.__version__ >= (2, 12)
NO_FLATTENING = "this torch does not flatten sharded dimensions"


def placements(text: str) -> tuple[Any, ...]:
    """One letter for each dimension of the mesh: R, P, or the dimension of a Shard."""
    known = {"R": Replicate(), "P": Partial()}
    return tuple(known.get(c) or Shard(int(c)) for c in text)


def mesh_for(text: str) -> tuple[int, ...]:
    return (WORLD,) if len(text) == 1 else (2, 2)


def ranks_of(tensor: Tensor) -> list[Tensor]:
    """What each simulated rank has of a tensor."""
    shards = getattr(tensor, "_local_tensors", None)
    return [tensor] if shards is None else [shards[rank] for rank in sorted(shards)]


def full(tensor: Any) -> list[Tensor]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return ranks_of(whole.detach())


def difference(ours: Any, exact: Tensor) -> float:
    """The largest difference on any rank; nan where both are nan is none."""
    worst = 0.0
    for value in full(ours):
        assert value.shape == exact.shape, (value.shape, exact.shape)
        both_nan = value.isnan() & exact.isnan()
        gap = torch.where(both_nan, 0.0, (value - exact).abs().double())
        gap = torch.where(gap.isnan(), torch.inf, gap)
        worst = max(worst, gap.max().item() if gap.numel() else 0.0)
    return worst


def distribute(tensor: Tensor, mesh: Any, text: str) -> Any:
    """A DTensor of a plain tensor; one that is Partial is a sum of different parts. S is what a
    batch of two whose second dimension is sharded becomes when both are flattened."""
    if "S" in text:
        if not FLATTENS:
            pytest.skip(reason=NO_FLATTENING)
        batch = tensor.unflatten(0, (2, -1))
        flat = distribute_tensor(batch, mesh, placements(text.replace("S", "1"))).flatten(0, 1)
        assert any(isinstance(p, _StridedShard) for p in flat.placements)
        return flat.detach()
    if "P" not in text:
        return distribute_tensor(tensor, mesh, placements(text), src_data_rank=None)
    replicated = placements(text.replace("P", "R"))
    whole = distribute_tensor(tensor, mesh, replicated, src_data_rank=None)
    dims = [i for i, c in enumerate(text) if c == "P"]
    share = whole.to_local()
    for dim in dims:
        parts = torch.arange(1, mesh.size(dim) + 1, dtype=tensor.dtype)
        along = [Shard(0) if i == dim else Replicate() for i in range(mesh.ndim)]
        share = share * distribute_tensor(parts / parts.sum(), mesh, along).to_local()
    return DTensor.from_local(
        share, mesh, placements(text), shape=whole.shape, stride=whole.stride()
    )


def compare(
    loss: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    layouts: Sequence[str],
    differentiable: Sequence[int] = (0,),
    exact: Callable[..., Tensor] | None = None,
) -> dict[str, float]:
    """Differences of the loss and of each gradient between DTensors and plain tensors.

    Args:
        loss: of tensors.
        layouts: the placements of each tensor, as ``placements`` reads them.
        differentiable: which tensors have gradients.
        exact: the loss of plain tensors; by default the same.
    """
    from torch.distributed._local_tensor import LocalTensorMode

    plain = [t.clone().requires_grad_(i in differentiable) for i, t in enumerate(tensors)]
    expected = (exact or loss)(*plain)
    factors = torch.linspace(0.5, 1.5, expected.numel(), dtype=expected.dtype)
    factors = factors.view(expected.shape)
    expected.backward(factors)
    with LocalTensorMode(WORLD):
        mesh = init_device_mesh("cpu", mesh_for(layouts[0]))
        sharded = [distribute(t, mesh, text) for t, text in zip(tensors, layouts, strict=True)]
        for i in differentiable:
            sharded[i].requires_grad_()
        ours = loss(*sharded)
        assert isinstance(ours, DTensor)
        everywhere = [Replicate()] * mesh.ndim
        ours.backward(distribute_tensor(factors.to(ours.dtype), mesh, everywhere))
        found = {"loss": difference(ours, expected.detach())}
        for i in differentiable:
            assert sharded[i].grad.shape == tensors[i].shape
            found[f"grad {i}"] = difference(sharded[i].grad, plain[i].grad)
    return found


class Collectives(TorchDispatchMode):
    """Records the collectives below DTensors: their names, and how many numbers each rank gives."""

    FREE = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name.partition("::")
        if name[0] == "_c10d_functional" and name[2] not in self.FREE:
            self.calls.append((name[2], args[0].numel()))
        return func(*args, **(kwargs or {}))
