"""Losses of a graph that are equal."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import emit, replace
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.fused_calls import result
from compile_losses.lower.node_relations import storage_of

aten = torch.ops.aten


def merge_equal_losses(graph: AtenGraph) -> None:
    """Leaves one of several losses with the same arguments, so that a gradient has one forward.

    Results that the graph returns apart stay apart: the caller may write to one of them.
    """
    first_of: dict[Any, Node] = {}
    returned = {storage_of(node) for node in graph.outputs}

    def merge(same: Node, kept: Node) -> None:
        if {storage_of(same), storage_of(kept)} <= returned:
            kept = emit(same, aten.clone.default, (kept,), value=same.meta["val"])
        replace(same, kept)

    for node, _, part in graph.calls:
        if part != "forward":
            continue
        first = first_of.setdefault((node.target, node.args, *node.kwargs.items()), node)
        if first is node:
            continue
        for item in [user for user in node.users if user.target is operator.getitem]:
            kept = result(first, item.args[1])  # type: ignore[arg-type]
            if kept is not None:
                merge(item, kept)
        merge(node, first)
