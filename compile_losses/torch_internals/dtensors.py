"""The shards of DTensors and their collectives. Importing this loads DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _functional_collectives as _functional
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, placement_types

#: A shard of a dimension that another dimension of the mesh shards as well. Taken for no
#: shard, such a loss would be refused.
StridedShard = placement_types._StridedShard
#: Gathers tensors of all ranks, as an op that a compiler sees: its name in torch 2.13, and before.
all_gather: Any = getattr(_functional, "all_gather_single", None) or _functional.all_gather_tensor
#: Sums tensors over ranks, likewise.
all_reduce: Any = _functional.all_reduce


def waited(tensor: Any) -> Any:
    """A collective's result when it is there; read earlier, it would be half of one."""
    return tensor.wait() if isinstance(tensor, _functional.AsyncCollectiveTensor) else tensor


def in_loss_parallel() -> bool:
    """Whether torch's ``loss_parallel`` is on, which has handlers of its own for DTensors' ops. A
    plain target would be refused in it."""
    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    return torch.ops.aten.nll_loss_forward.default in handlers


def default_store() -> Any:
    """The store through which the ranks found each other. Without it they could not tell each other
    anything while one of them compiles."""
    return distributed_c10d._get_default_store()
