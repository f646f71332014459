"""The shards of DTensors and their collectives. Importing this loads DTensor."""

from __future__ import annotations

from typing import Any

from torch.distributed import _functional_collectives as _functional
from torch.distributed.tensor import placement_types

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
