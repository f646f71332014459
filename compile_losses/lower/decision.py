"""What a pass decided about a loss, and which loss of the user's program that is."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from compile_losses.lower.cost import Cost

#: ``TORCH_LOGS="+compile_losses"`` shows what is sent here, and so does Python's ``logging``.
log = logging.getLogger("compile_losses")

#: Tracing copies ``meta["custom"]`` from a Dynamo node to all nodes that it becomes, and
#: AOTAutograd from a forward node to its backward; this is our entry there.
_SITE = "compile_losses"
_numbers = itertools.count()


@dataclass(frozen=True)
class Decision:
    """A choice for one loss.

    Attributes:
        site: what :func:`mark` returned for the loss; None where the node has no mark.
        loss: its name.
        choice: what is done.
        reason: why, or why nothing better; may be empty.
        cost, stock: of the loss as it is now, and as torch's own ops; where they were compared.
        trace: the stack trace of the program where it computes the loss; of losses without a mark.
    """

    site: int | None
    loss: str
    choice: str
    reason: str = ""
    cost: Cost | None = None
    stock: Cost | None = None
    trace: str = ""

    def __str__(self) -> str:
        text = f"{self.loss}: {self.choice}"
        if self.reason:
            text += f" ({self.reason})"
        if self.cost is not None and self.stock is not None:
            text += f"; {self.cost}, torch's own ops {self.stock}"
        return text


def mark(node: Node) -> int:
    """Gives a Dynamo node a number that the nodes which it becomes after autograd carry too."""
    number = next(_numbers)
    node.meta["custom"] = {**node.meta.get("custom", {}), _SITE: number}
    return number


def site_of(node: Node) -> int | None:
    custom: dict[str, Any] = node.meta.get("custom") or {}
    return custom.get(_SITE)
