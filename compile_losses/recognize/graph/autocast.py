"""Which autocast is on at a node of a Dynamo graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from compile_losses.recognize.graph.memory import memory_of
from compile_losses.torch_internals.ops import enter_autocast, exit_autocast


def autocast_dtype(node: Node, device: str) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of a product at a node; None if it is off.

    Args:
        device: its type.
    """
    around = memory_of(node.graph).at
    if around is not None:
        state = autocast_dtype(around, device)
    else:  # a graph is compiled with the autocast of its call
        state = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    states: dict[Any, torch.dtype | None] = {}
    # Under autocast most layers of a model have mixed dtypes: none goes through the whole graph.
    changes = (
        change
        for target in (enter_autocast, exit_autocast)
        for change in node.graph.find_nodes(op="call_function", target=target)
        if change < node
    )
    for each in sorted(changes):
        if each.target is exit_autocast:
            state = states.pop(each.args[0], state)
            continue
        given: Any = each.args
        of_device, dtype, enabled, *_ = given
        if of_device == device:
            states[each] = state
            state = (dtype or torch.get_autocast_dtype(device)) if enabled else None
    return state


def cast_by(autocast: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a product under autocast reads an operand: float64 stays."""
    return dtype if autocast is None or dtype == torch.float64 else autocast
