"""Inputs that a graph changes, and a backward that reads what they held before.

AOTAutograd writes the new value of an input at the end of the forward (``copy_``). The partitioner
does not know that: it may save the input itself, and let the backward compute again what the
forward computed from it. The backward then reads the new value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import descendants
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.node_relations import readers_of
from compile_losses.lower.shared_with_forward import save

_COPY = torch.ops.aten.copy_.default


def changed_inputs(graph: AtenGraph) -> list[Node]:
    """The inputs that the forward of a joint graph changes."""
    copies = graph.graph.find_nodes(op="call_function", target=_COPY)
    written: list[Any] = [copy.args[0] for copy in copies if copy not in graph.backward]
    return [node for node in written if node.op == "placeholder"]


def save_before_mutation(graph: AtenGraph) -> None:
    """Makes the forward of a joint graph save what the backward needs of inputs that it changes.

    The partitioner then saves a result of the marked nodes, or a later one, if the backward needs
    any. The backward reads no such input itself: autograd refuses saved tensors that have changed.
    """
    written = changed_inputs(graph)
    if not written:
        return
    backward = graph.backward - {*graph.graph.find_nodes(op="output")}
    for input in written:
        for reader in readers_of(input):
            if not backward.isdisjoint(descendants([reader])):
                save(reader)
