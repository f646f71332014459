"""Fake tensors, and what tells whether tensors share memory and were written to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# What tracing computes with: the examples in a graph's nodes are of this class. Others are taken
# for a user's class, whose losses stay torch's.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode


def storage_id(tensor: Tensor) -> int:
    """The identity of a tensor's storage, a fake one's too. Where it was wrong, a gradient would be
    written over memory that something else reads."""
    return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to. Without it writes that no schema tells would be missed."""
    return tensor._version


def shard_of(tensor: Any) -> Any:
    """A rank's own part of a DTensor, not differentiably; any other tensor itself. DTensor.to_local
    is differentiable, and would record a node of its own."""
    return getattr(tensor, "_local_tensor", tensor)
