"""What losses cost whose statistics one call reads, while another makes their gradient of these.

Recognition has decided already. Of logits that are held an entropy is among the statistics, and
they are in memory whatever reads them (see ``recognize.heads.plain_logits``). Losses of a product
by rows and by columns never hold it (see ``recognize.heads.two_way``).
"""

from __future__ import annotations

from torch.fx import Node

from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import Cost, hint_of, nbytes_of
from compile_losses.lower.decision import Decision
from compile_losses.ops.two_way_cross_entropy import rows_of_chunk
from compile_losses.sites import site_of
from compile_losses.torch_internals.ops import named_arguments

_NAME = "row_statistics"
_TWO_WAY = "two_way_losses"


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
    for node, name, part in graph.calls:
        if (name, part) == (_TWO_WAY, "forward"):
            graph.decisions.append(_two_way(graph, node))


def _two_way(graph: AtenGraph, node: Node) -> Decision:
    given = named_arguments(node)
    input, other = (given[name].meta["val"] for name in ("input", "other"))
    rows, hidden, columns = map(hint_of, (*input.shape, other.shape[0]))
    row_bytes = columns * input.element_size()
    chunk = rows_of_chunk(rows, hidden, columns, input.dtype, input.device)
    trained = any(
        (name, part) == (_TWO_WAY, "backward") and named_arguments(each)["input"] is given["input"]
        for each, name, part in graph.calls
    )
    # Written and read; once more for the gradient, which is written, and read for that of each
    # embedding. Torch writes once, reads for rows and for columns, and again for the gradient.
    matrix = rows * row_bytes
    cost = Cost((2 + 5 * trained) * matrix, chunk * row_bytes)
    stock = Cost((3 + 4 * trained) * matrix, (1 + trained) * matrix)
    choice = "logits computed again" if trained else "kernel"
    reason = f"{chunk} rows of logits at a time"
    return Decision(site_of(node), "two_way_cross_entropy", choice, reason, cost, stock)
