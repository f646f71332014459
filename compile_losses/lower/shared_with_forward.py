"""Nodes of a loss that its decomposed gradient shares, and results that the forward saves."""

from __future__ import annotations

from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from compile_losses.graphs import annotate, erase_unused, replace_uses
from compile_losses.torch_internals.graphs import RECOMPUTE


def share(forward: list[Node], backward: list[Node]) -> None:
    """Has a gradient read what it would compute a second time.

    Torch's own reads what its forward saved. The partitioner does not find by itself what two nodes
    compute alike: since torch 2.14 it keeps apart what a gradient reads and what none does.

    Args:
        forward, backward: the nodes of one loss and of one gradient of it, in their order, without
            side effects.
    """
    first: dict[tuple[object, str], Node] = {}
    same: dict[Node, Node] = {}

    def computed(node: Node) -> tuple[object, str]:
        # By their text, in which -0.0 is not 0.0, and 1 neither 1.0 nor True.
        return node.target, repr(map_arg((node.args, node.kwargs), lambda n: same.get(n, n)))

    for node in forward:
        same[node] = first.setdefault(computed(node), node)
    for node in backward:
        same[node] = first.get(computed(node), node)
    for node in reversed(backward):
        if same[node] is node:
            continue
        if node.all_input_nodes:  # a constant is made where it is read
            replace_uses(node, same[node])
        erase_unused([node])


def save(node: Node) -> None:
    """Keeps a result, or several, from being computed a second time in the backward."""
    several = isinstance(node.meta.get("val"), tuple | list)
    for each in (node, *node.users) if several else (node,):
        annotate(each, RECOMPUTE, CheckpointPolicy.MUST_SAVE)
