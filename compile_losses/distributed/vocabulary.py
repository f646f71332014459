"""Cross entropy of logits whose classes are sharded, with one collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from compile_losses.distributed.collectives import gather
from compile_losses.ops.vocabulary_parallel import gradient, merge, parts


@dataclass(frozen=True)
class Vocabulary:
    """A rank's share of the classes, along one dimension of a mesh; all of them along None."""

    mesh: DeviceMesh
    mesh_dim: int | None
    classes: int

    def first_class(self, own: int) -> int:
        """The first class of the rank's shard, which has ``own`` classes."""
        if self.mesh_dim is None:
            return 0
        # compute_local_shape_and_global_offset fails with unbacked sizes in compiled graphs.
        # A symbol where torch is to compile for all ranks at once (compile_on_one_rank).
        rank_along = getattr(self.mesh, "_sym_get_coordinate", self.mesh.get_local_rank)
        size, first = Shard.local_shard_size_and_offset(
            self.classes, self.shards, rank_along(self.mesh_dim)
        )
        if own != size:
            raise RuntimeError(
                f"expected {size} of {self.classes} classes on this rank of {self.shards}, as "
                f"torch.chunk deals them out, got {own}: whose logits they are would not be known"
            )
        return first

    @property
    def shards(self) -> int:
        return 1 if self.mesh_dim is None else self.mesh.size(self.mesh_dim)

    def shard_weights(self, weight: Tensor | None, like: Tensor) -> Tensor:
        """[shards]: the sum of each shard's class weights. No copy from the host."""
        chunk = -(-self.classes // self.shards)
        bounds = torch.arange(self.shards + 1, device=like.device) * chunk
        bounds = bounds.clamp(max=self.classes)
        if weight is None:
            return bounds.diff().to(like.dtype)
        sums = torch.nn.functional.pad(weight.cumsum(0, dtype=torch.float64), (1, 0))
        return sums.index_select(0, bounds).diff().to(like.dtype)

    def everyones(self, own: Tensor) -> Tensor:
        """[shards, ...]: what each shard has: the one collective."""
        if self.mesh_dim is None:
            return own.unsqueeze(0)
        return gather(own, self.mesh, self.mesh_dim)

    def merged(
        self, own: Tensor, target: Tensor, weight: Tensor | None, reduction: int, options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, statistics and total weight from each rank's parts."""
        ignore_index, label_smoothing, dtype = options
        masses = self.shard_weights(weight, own) if label_smoothing > 0 else None
        return merge(
            self.everyones(own), target, weight, masses, self.classes, reduction, ignore_index,
            label_smoothing, dtype,
        )  # fmt: skip


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "losses of logits whose classes are sharded can be differentiated once only. "
            "Redistribute the logits to Replicate(), or shard their rows, for second derivatives"
        )


def once_differentiable(gradient: Tensor, *sources: Tensor) -> Tensor:
    """A gradient that depends on these tensors, which raises where that is differentiated.

    Torch's decorator of this name looks at the gradient's own argument alone: a second derivative
    with respect to what was saved would be left out silently.
    """
    if not torch.is_grad_enabled():
        return gradient
    result: Tensor = _Once.apply(gradient, *sources)
    return result


def each_once_differentiable(
    gradients: Iterable[Tensor], needs: Iterable[bool], *sources: Tensor
) -> tuple[Tensor | None, ...]:
    """Likewise each gradient that is needed; None in the place of the others."""
    pairs = zip(gradients, needs, strict=True)
    return tuple(once_differentiable(g, *sources) if needed else None for g, needed in pairs)


class VocabularyParallel(torch.autograd.Function):
    """The loss (reduction none or sum) and the total weight, of a rank's logits and all targets."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        vocabulary: Vocabulary,
        reduction: int,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        ignore_index, label_smoothing, _ = options
        own_classes = input.shape[0 if input.dim() == 1 else 1]
        shard = (vocabulary.first_class(own_classes), vocabulary.classes)
        own = parts(input, target, weight, *shard, ignore_index, label_smoothing)
        loss, stats, total_weight = vocabulary.merged(own, target, weight, reduction, options)
        ctx.save_for_backward(input, target, weight, stats)
        ctx.arguments = (*shard, reduction, ignore_index, label_smoothing)
        ctx.mark_non_differentiable(total_weight)
        return loss, total_weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _: Any) -> Any:
        input, target, weight, stats = ctx.saved_tensors
        with torch.no_grad():
            result = gradient(grad_output, input, target, weight, stats, *ctx.arguments)
        return once_differentiable(result, input, grad_output), *(None for _ in range(7))
