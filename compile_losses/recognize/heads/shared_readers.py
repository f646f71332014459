"""The readers of a head's output: what they read of its rows, and what else needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.recognize.graph.aten_replay import AtenReplay
from compile_losses.recognize.graph.symbolic_tensors import example
from compile_losses.recognize.heads.head import Head
from compile_losses.recognize.heads.readings import Reading, is_pair, reading_of

#: The most nodes between a head and the readers of its output that are looked at.
_MOST_NODES = 4096


@dataclass
class Shared:
    """A head and the readers of its output.

    Attributes:
        head: the linear layer.
        readings: the statistics that are read, by the node that holds them.
        between: the nodes from the head to these.
        outputs: the outputs of the graph that are made of the logits.
    """

    head: Head
    readings: dict[Node, Reading] = field(default_factory=dict)
    between: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)


def look_for_readers(head: Head, replay: AtenReplay) -> tuple[Shared, Node | None]:
    """The readers of a head's output, and a node that needs more of it, if there is one."""
    classes = example(head.node).shape[-1]
    found = Shared(head, between=[head.node])
    seen = {head.node}
    needs: Node | None = None
    for node in found.between:  # grows
        for user in node.users:
            if user.op == "output":
                found.outputs.append(node)
                continue
            if user in seen:
                continue
            seen.add(user)
            value = example(user)
            if is_size(value):
                continue
            reading = reading_of(user, replay, seen - set(found.readings))
            if reading is not None:
                found.readings[user] = reading
            elif (holds(value, classes) or is_pair(user)) and len(found.between) < _MOST_NODES:
                found.between.append(user)
            else:
                needs = needs or user
    return found, needs


def holds(value: Any, classes: Any) -> bool:
    """Whether a tensor, or each of several, has a dimension of the classes."""
    if isinstance(value, tuple | list):
        return bool(value) and any(holds(part, classes) for part in value)
    return isinstance(value, Tensor) and any(
        statically_known_true(size == classes) for size in value.shape
    )


def is_size(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt | torch.Size)
