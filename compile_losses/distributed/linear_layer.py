"""The placements of a linear layer, of its input and of the targets of its output."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from compile_losses.distributed.layout import dim_of, is_shard, local, moved


class LinearLayer:
    """Where the shards of hidden, the weight and bias of the layer, and target are brought to.

    A dimension of the mesh shards the classes where it shards linear_weight; hidden and target are
    then gathered along it (the gradient of a hidden that was sharded is reduced and scattered).
    Elsewhere it may shard the rows, and target follows hidden. Target has hidden's dimensions
    without the features, or one more dimension, which is gathered.

    Attributes:
        hidden, weight, target: the placements; the bias is placed as the weight.
        mesh_dims: the dimensions of the mesh that shard the rows.
        classes: the one that shards the classes, or None.
    """

    def __init__(self, op: str, hidden: Any, linear_weight: Any, target: Any) -> None:
        self.mesh_dims: list[int] = []
        self.classes: int | None = None
        found: list[tuple[Placement, ...]] = []
        features = hidden.dim() - 1
        for i, (of_hidden, of_weight, of_target) in enumerate(
            zip(hidden.placements, linear_weight.placements, target.placements, strict=True)
        ):
            if is_shard(of_weight):
                if self.classes is not None or of_weight != Shard(0):
                    raise RuntimeError(
                        f"{op}: expected linear_weight to be sharded by Shard(0) along one "
                        f"dimension of the mesh, got {linear_weight.placements}. Redistribute it "
                        "first, or unshard the layer (fully_shard's unshard()) around the loss"
                    )
                self.classes = i
                found.append((Replicate(), Shard(0), Replicate()))
                continue
            rows: Placement = Replicate()
            if is_shard(of_hidden) and dim_of(of_hidden) != features:
                rows = of_hidden
            elif of_hidden.is_partial() and is_shard(of_target) and dim_of(of_target) != features:
                rows = of_target
            if is_shard(rows):
                self.mesh_dims.append(i)
                rows = moved(rows, dim_of(rows))
            found.append((rows, Replicate(), rows))
        self.hidden, self.weight, self.target = (tuple(p) for p in zip(*found, strict=True))

    def local(
        self, hidden: Any, linear_weight: Any, linear_bias: Any, target: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """A rank's own parts, in this order. Differentiable."""
        along = [] if self.classes is None else [self.classes]
        return (
            local(hidden, self.hidden, along),
            local(linear_weight, self.weight, self.mesh_dims),
            local(linear_bias, self.weight, self.mesh_dims),
            local(target, self.target),
        )
