"""What torch writes into the nodes of its graphs, by its names."""

from __future__ import annotations

from torch.fx import Node

#: In a node's meta, beside the documented ``val`` and ``stack_trace``: what Dynamo computed for it.
#: Without it no argument of a loss is known, and none is rewritten.
EXAMPLE = "example_value"
#: What Dynamo guards an input by; its example has the class that the user gave. Without it a class
#: that tracing does not show is met by the op, as in eager code.
GRAPH_ARGUMENT = "grapharg"
#: What tracing copies from a node to all that it becomes. Without it a report has no plans.
CUSTOM = "custom"
#: What a checkpointed region, or this package, asks of the partitioner. Not heeded, such a loss is
#: computed twice.
RECOMPUTE = "recompute"
#: The arguments that a custom op had in eager mode, to whose strides Inductor brings them. A new
#: node that inherited another one's would be given other strides.
EAGER_VALUES = "eager_input_vals"
#: Asks Inductor for no gaps between rows. Not heeded, a product with a bias takes longer.
DISLIKES_PADDING = "dislike_padding"


def is_tangent(node: Node) -> bool:
    """Whether a node of a joint graph is a gradient that comes from outside, as AOTAutograd names
    it. Where none was found, all would be taken for forward and no gradient be moved there."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def is_erased(node: Node) -> bool:
    """Whether a node was taken out of its graph. Else a rewrite could read one that is gone."""
    return node._erased
