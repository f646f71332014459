"""What statistics of logits that are held cost: one call reads them, and one makes their gradient.

Recognition has decided already: an entropy is among the statistics, and the logits are in memory
whatever reads them (see ``recognize.plain_logits``).
"""

from __future__ import annotations

from torch.fx import Graph

from compile_losses.lower.cost import Cost, nbytes_of
from compile_losses.lower.decision import Decision
from compile_losses.lower.fused_calls import fused_call
from compile_losses.sites import site_of
from compile_losses.torch_internals.ops import named_arguments

_NAME = "row_statistics"


def plan_statistics(graph: Graph) -> list[Decision]:
    """Says of the calls for logits that are held what they cost."""
    calls = [(node, fused_call(node)) for node in graph.nodes]
    backwards = [node for node, call in calls if call == (_NAME, "backward")]
    decisions = []
    for node, call in calls:
        if call != (_NAME, "forward"):
            continue
        input = named_arguments(node)["input"]
        logits = nbytes_of(input.meta["val"])
        trained = any(named_arguments(each)["input"] is input for each in backwards)
        # Read once, and read again for the gradient, which is written. Torch's ops read twice for
        # an entropy in the forward, and twice in the backward, where they sum up each row.
        cost = Cost((1 + 2 * trained) * logits, logits * trained)
        stock = Cost((2 + 3 * trained) * logits, logits * trained)
        decisions.append(Decision(site_of(node), _NAME, "kernel", "", cost, stock))
    return decisions
