"""What statistics of logits that are held cost: one call reads them, and one makes their gradient.

Recognition has decided already: an entropy is among the statistics, and the logits are in memory
whatever reads them (see ``recognize.plain_logits``).
"""

from __future__ import annotations

from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import Cost, nbytes_of
from compile_losses.lower.decision import Decision
from compile_losses.sites import site_of
from compile_losses.torch_internals.ops import named_arguments

_NAME = "row_statistics"


def plan_statistics(graph: AtenGraph) -> None:
    """Says of the calls for logits that are held what they cost."""
    own = [(node, part) for node, name, part in graph.calls if name == _NAME]
    backwards = [node for node, part in own if part == "backward"]
    for node in (node for node, part in own if part == "forward"):
        input = named_arguments(node)["input"]
        logits = nbytes_of(input.meta["val"])
        trained = any(named_arguments(each)["input"] is input for each in backwards)
        # Read once, and read again for the gradient, which is written. Torch's ops read twice for
        # an entropy in the forward, and twice in the backward, where they sum up each row.
        cost = Cost((1 + 2 * trained) * logits, logits * trained)
        stock = Cost((2 + 3 * trained) * logits, logits * trained)
        graph.decisions.append(Decision(site_of(node), _NAME, "kernel", "", cost, stock))
