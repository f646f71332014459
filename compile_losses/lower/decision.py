"""What a pass decided about a loss, and which loss of the user's program that is."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from compile_losses.lower.cost import Cost

#: ``TORCH_LOGS="+compile_losses"`` shows what is sent here, and so does Python's ``logging``.
log = logging.getLogger("compile_losses")

#: What decisions name a loss for which there is no op: gradients of a loss of elements that move
#: into the forward, and the readers of logits that are computed by chunks.
ELEMENTWISE, REGION = WITHOUT_OP = ("elementwise", "linear_region")


@dataclass(frozen=True)
class Decision:
    """A choice for one loss.

    Attributes:
        site: its mark, see :mod:`compile_losses.sites`; None where the node has none.
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
