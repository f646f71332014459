"""Losses of DTensors, and data-parallel training. Imports nothing of torch.distributed.

A public op that is given DTensors computes on each rank's own shard and exchanges at most a few
numbers: see docs/distributed.md for the layouts and what each of them costs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def are_dtensors(*values: Any) -> bool:
    """Whether any of them is a DTensor; there is none before its module is imported."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return False
    # Not any(): this is on the way of every eager call.
    for value in values:  # noqa: SIM110
        if isinstance(value, kind):
            return True
    return False


def mesh_of(op: str, **tensors: Tensor | None) -> DeviceMesh | None:
    """The mesh of all arguments of a public op; None where there is no DTensor among them.

    Raises:
        RuntimeError: some are plain tensors, or on another mesh.
    """
    if not are_dtensors(*tensors.values()):
        return None
    from compile_losses.distributed.layout import common_mesh

    return common_mesh(op, **tensors)


def replicated_by_loss_parallel(classes: tuple[Tensor, int], *plain: Tensor | None) -> Any:
    """Plain tensors as DTensors of which every rank has all, where torch takes them for that: in
    ``torch.distributed.tensor.parallel.loss_parallel()``. Elsewhere as they are.

    Args:
        classes: the DTensor whose classes are sharded, and their dimension. Torch asks that nothing
            else of it is.
        plain: the target and the weights of a cross entropy.
    """
    sharded, dim = classes
    if not are_dtensors(sharded) or all(are_dtensors(t) for t in plain if t is not None):
        return plain
    from compile_losses.distributed.layout import as_replicated, shards_classes_alone
    from compile_losses.torch_internals.dtensors import in_loss_parallel

    if not in_loss_parallel() or not shards_classes_alone(sharded, dim):
        return plain
    return tuple(t if t is None else as_replicated(t, sharded) for t in plain)
