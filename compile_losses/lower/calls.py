"""The fused ops in an ATen graph, by the loss they belong to and the part they play."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

PARTS = ("forward", "backward", "with_grad")


def fused_call(node: Node) -> tuple[str, str] | None:
    """The loss and the part of a call of ``fused::<loss>_<part>``; None for any other node."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    namespace, _, name = node.target._schema.name.partition("::")
    if namespace != "fused":
        return None
    for part in PARTS:
        if name.endswith(f"_{part}"):
            return name.removesuffix(f"_{part}"), part
    return None


def has_part(loss: str, part: str) -> bool:
    return hasattr(torch.ops.fused, f"{loss}_{part}")


def fused_op(loss: str, part: str) -> OpOverload[..., Any]:
    return getattr(torch.ops.fused, f"{loss}_{part}").default
