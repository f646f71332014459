"""The placements of a loss's arguments and of its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from compile_losses.torch_internals.dtensors import StridedShard
from compile_losses.torch_internals.tensors import shard_of

Placements: TypeAlias = tuple[Placement, ...]


def common_mesh(op: str, **tensors: Tensor | None) -> DeviceMesh:
    """The mesh of arguments of which some are DTensors; raises as ``mesh_of``."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, sharded = next((n, t) for n, t in given.items() if isinstance(t, DTensor))
    mesh = sharded.device_mesh
    for name, tensor in given.items():
        if not isinstance(tensor, DTensor):
            raise RuntimeError(
                f"{op}: {first} is a DTensor and {name} a plain tensor, of which it is not known "
                "whether it is a shard or the whole. Make it a DTensor on the same mesh: "
                f"distribute_tensor({name}, mesh, [Replicate(), ...]) where every rank has all of "
                f"it, DTensor.from_local({name}, mesh, [Shard(0), ...]) where each has its part"
            )
        if tensor.device_mesh != mesh:
            raise RuntimeError(
                f"{op}: expected all arguments on one mesh, but {first} is on {mesh} and "
                f"{name} on {tensor.device_mesh}"
            )
    return mesh


def is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard)


def dim_of(placement: Placement) -> int:
    dim: int = placement.dim  # type: ignore[attr-defined]
    return dim


def moved(placement: Placement, dim: int) -> Placement:
    """The same sharding of another dimension."""
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def without(placements: Placements, dim: int) -> Placements:
    """Those of a tensor that has one dimension less, which they do not shard."""
    return tuple(moved(p, dim_of(p) - (dim_of(p) > dim)) if is_shard(p) else p for p in placements)


def replicated(mesh: DeviceMesh) -> Placements:
    return (Replicate(),) * mesh.ndim


def shards_classes_alone(tensor: Any, dim: int) -> bool:
    """Whether one dimension of the mesh shards a dimension of a tensor, and none another one."""
    sharded = [p for p in tensor.placements if not p.is_replicate()]
    return sharded == [Shard(dim)]


def as_replicated(tensor: Tensor, like: Any) -> Tensor:
    """A DTensor of which every rank has all, on the mesh of another one; a DTensor as it is."""
    if isinstance(tensor, DTensor):
        return tensor
    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, replicated(mesh), run_check=False)


def summed(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Placements:
    """The placements of a number of which each rank along these dimensions has a part."""
    return tuple(Partial() if i in mesh_dims else Replicate() for i in range(mesh.ndim))


class _Local(torch.autograd.Function):
    """As DTensor.to_local, which gives the gradient the strides of a rank's own shard: with uneven
    shards the ranks would not agree on them."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: Placements) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, placements
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        shard = shard_of(tensor)
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return DTensor.from_local(
            grad_output,
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=ctx.stride,
        ), None


def local(tensor: Any, placements: Placements, partial: Sequence[int] = ()) -> Any:
    """A rank's shard of a DTensor once it is placed so; None for None. Differentiable.

    Args:
        partial: the dimensions of the mesh along which each rank will have a part of the gradient
            of what is replicated there.
    """
    if tensor is None:
        return None
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    gradient = (Partial() if i in partial else p for i, p in enumerate(placements))
    shard: Tensor = _Local.apply(tensor, tuple(gradient))
    return shard


def assemble(
    shard: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size, like: Any = None
) -> Tensor:
    """A DTensor of a rank's shard; its strides are those of like, if that has the shape."""
    stride = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        stride[d] = stride[d + 1] * max(shape[d + 1], 1)
    if like is not None and like.shape == shape and 0 not in like.stride():
        stride = like.stride()
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
    )


class Rows:
    """How the rows and the classes of logits [C], [N, C] or [N, C, d1, ...] are sharded.

    Args:
        target: has the logits' dimensions without that of the classes, or more dimensions after
            these, which are not sharded.
        class_dim: of the logits, if it is another.

    Attributes:
        input, target: the placements that both are brought to: input keeps its own, target follows.
            Logits that are Partial are summed up first.
        mesh_dims: the dimensions of the mesh that shard the rows.
        classes: the one that shards the classes, or None.
    """

    def __init__(self, op: str, input: Any, target: Any, class_dim: int | None = None) -> None:
        if class_dim is None:
            class_dim = 0 if input.dim() == 1 else 1
        found: list[tuple[Placement, Placement]] = []
        self.mesh_dims: list[int] = []
        self.classes: int | None = None
        pairs = zip(input.placements, target.placements, strict=True)
        for i, (of_input, of_target) in enumerate(pairs):
            if is_shard(of_input) and dim_of(of_input) == class_dim:
                if self.classes is not None or not isinstance(of_input, Shard):
                    raise RuntimeError(
                        f"{op}: expected the classes to be sharded by Shard({class_dim}) along one "
                        f"dimension of the mesh, got {input.placements}. Redistribute input first"
                    )
                self.classes = i
                found.append((of_input, Replicate()))
            elif is_shard(of_input):
                dim = dim_of(of_input)
                self.mesh_dims.append(i)
                found.append((of_input, moved(of_input, dim - (dim > class_dim))))
            elif of_input.is_partial() and self._shards_rows(of_target, input):
                dim = dim_of(of_target)
                self.mesh_dims.append(i)
                found.append((moved(of_target, dim + (dim >= class_dim)), of_target))
            else:
                found.append((Replicate(), Replicate()))
        self.input, self.target = (tuple(placements) for placements in zip(*found, strict=True))

    @staticmethod
    def _shards_rows(of_target: Placement, input: Any) -> bool:
        return is_shard(of_target) and dim_of(of_target) < input.dim() - 1

    def refuse_sharded_classes(self, op: str, instead: str) -> None:
        if self.classes is not None:
            raise RuntimeError(
                f"{op}: the classes of input are sharded along dimension {self.classes} of the "
                f"mesh, for which there is no sharded form. {instead}"
            )


class Elements:
    """How the elements of arguments that broadcast to ``shape`` are sharded.

    A dimension of the mesh shards what the first argument to be sharded along it says; arguments
    that are replicated there are cut, without communication, and those that are Partial are summed.
    """

    def __init__(
        self,
        op: str,
        mesh: DeviceMesh,
        shape: torch.Size,
        tensors: Sequence[Any],
        classes: int | None = None,
    ) -> None:
        self.shape = shape
        self.placements = tuple(self._of(i, tensors) for i in range(mesh.ndim))
        self.mesh_dims = [i for i, p in enumerate(self.placements) if is_shard(p)]
        for i in self.mesh_dims:
            if classes is not None and dim_of(self.placements[i]) == classes:
                raise RuntimeError(
                    f"{op}: dimension {classes}, over which the softmax goes, is sharded along "
                    f"dimension {i} of the mesh, for which there is no sharded form. Redistribute "
                    "the arguments to Replicate() or to another dimension first"
                )

    def _of(self, i: int, tensors: Sequence[Any]) -> Placement:
        for tensor in tensors:
            if tensor is None or not is_shard(placement := tensor.placements[i]):
                continue
            dim = dim_of(placement) + len(self.shape) - tensor.dim()
            if tensor.shape[dim_of(placement)] == self.shape[dim]:
                return moved(placement, dim)
        return Replicate()

    def local(self, tensor: Any) -> Any:
        """A rank's part of an argument; None for None."""
        if tensor is None:
            return None
        placements = self._placements(tensor)
        partial = [i for i in self.mesh_dims if not is_shard(placements[i])]
        return local(tensor, placements, partial)

    def copies(self, mesh: DeviceMesh, tensor: Any) -> int:
        """How many of the ranks that have different elements have the same part of an argument."""
        placements = self._placements(tensor)
        return math.prod(mesh.size(i) for i in self.mesh_dims if not is_shard(placements[i]))

    def _placements(self, tensor: Any) -> Placements:
        missing = len(self.shape) - tensor.dim()
        placements: list[Placement] = []
        for placement in self.placements:
            dim = dim_of(placement) - missing if is_shard(placement) else -1
            there = dim >= 0 and tensor.shape[dim] == self.shape[dim + missing]
            placements.append(moved(placement, dim) if there else Replicate())
        return tuple(placements)
