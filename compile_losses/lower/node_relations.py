"""Which nodes of an ATen graph share memory, which belong to the backward, and which Inductor
generates itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses.graphs import descendants, is_view
from compile_losses.op_traits import SCATTERS, TURNS, View, is_pointwise
from compile_losses.torch_internals.graphs import is_tangent
from compile_losses.torch_internals.tensors import storage_id

aten = torch.ops.aten


def storage_of(node: Node) -> Any:
    """The identity of a node's memory; the node itself where it is not a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node
    return storage_id(value)


def graph_outputs(graph: Graph) -> list[Node]:
    """The nodes that a graph returns."""
    (output,) = graph.find_nodes(op="output")
    return list(output.all_input_nodes)


def depends_on_tangents(graph: Graph) -> set[Node]:
    """The backward half of a joint graph."""
    return set(descendants(filter(is_tangent, graph.find_nodes(op="placeholder"))))


def filled_with(node: Node) -> int | float | None:
    """The number that a tensor is filled with; None if that is not known."""
    filled: Any = None
    if node.target in (aten.zeros.default, aten.zeros_like.default):
        filled = 0
    elif node.target in (aten.ones.default, aten.ones_like.default):
        filled = 1
    elif node.target is aten.scalar_tensor.default:
        filled = node.args[0]
    elif node.target in (aten.full.default, aten.full_like.default):
        filled = node.args[1]
    return filled if isinstance(filled, int | float) else None


def view_of(node: Node) -> View:
    """A call of an op of one tensor, with its shapes."""
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    return View(node.target, node.args, source.shape, node.meta["val"].shape)


def is_turned_matrix(node: Node) -> bool:
    """Whether a node is another matrix turned."""
    if node.target not in TURNS or node.meta["val"].dim() != 2:
        return False
    return view_of(node).order == [1, 0]


def readers_of(node: Node) -> list[Node]:
    """What reads a value, itself or through views."""
    readers = []
    for user in node.users:
        views = is_view(user) or user.target is aten._unsafe_view.default
        readers += readers_of(user) if views else [user]
    return readers


def is_fused_into_readers(node: Node) -> bool:
    """Whether all that read a value, through views, are ops that Inductor generates itself."""
    return all(map(is_generated, readers_of(node)))


def is_generated(node: Node) -> bool:
    """Whether a node is an op of elements, or one that pads, which Inductor generates itself."""
    target: Any = node.target
    return target in (*SCATTERS, aten.constant_pad_nd.default) or is_pointwise(target)
