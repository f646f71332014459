"""The part of a backward that is linear in a tangent of one number, element by element.

Linearity is known op by op and never tested on numbers: each op of the part is linear in its
arguments that depend on the tangent, and its other arguments depend on no tangent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses.graphs import ancestors
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import behind_views
from compile_losses.lower.known_factors import is_one_number
from compile_losses.lower.node_relations import filled_with
from compile_losses.op_traits import (
    CASTS,
    IN_ORDER,
    MEANS,
    PRODUCTS,
    QUOTIENTS,
    SCATTERS,
    SUMS,
    TOTALS,
    TURNS,
)
from compile_losses.torch_internals.graphs import is_tangent

aten = torch.ops.aten

#: ``a * b + c``, which Inductor writes for some sums. Torch has it since 2.12.
_FMA = getattr(getattr(torch.ops.prims, "fma", None), "default", None)
#: Linear in their only tensor.
_OF_ONE = (*IN_ORDER, *TURNS, *CASTS, aten.neg.default)


@dataclass(frozen=True)
class Part:
    """The nodes that a backward computes from one tangent.

    Attributes:
        tangent: a placeholder of one number.
        nodes: those that are linear in it element by element, in the graph's order.
        gradients: those of ``nodes`` of more than one number, not views, that other nodes read.
    """

    tangent: Node
    nodes: tuple[Node, ...]
    gradients: tuple[Node, ...]

    @property
    def operands(self) -> list[Node]:
        """The nodes of the forward that the nodes read."""
        own = {self.tangent, *self.nodes}
        read = (source for node in self.nodes for source in node.all_input_nodes)
        return list(dict.fromkeys(source for source in read if source not in own))

    def of(self, gradients: Iterable[Node]) -> Part:
        """The part that computes these gradients."""
        chosen = tuple(gradients)
        cone = set(ancestors(chosen))
        return Part(self.tangent, tuple(node for node in self.nodes if node in cone), chosen)


def scalar_tangents(graph: Graph) -> list[Node]:
    """The tangents of one number. Without one a graph has no part."""
    placeholders = graph.find_nodes(op="placeholder")
    return [n for n in placeholders if is_tangent(n) and is_one_number(n)]


def find_parts(graph: AtenGraph) -> list[Part]:
    """The part of each tangent of one number that has a gradient of more."""
    tangents = scalar_tangents(graph.graph)
    parts = (_part(tangent, graph.backward) for tangent in tangents)
    return [part for part in parts if part.gradients]


def linear_part(tangent: Node, backward: set[Node], *, moves: bool = False) -> list[Node]:
    """The nodes that are linear in a tangent element by element, in the graph's order.

    Args:
        moves: whether zeros may be put around elements, as the gradient of a slice is made,
            elements summed up, as that of what is broadcast, some taken, as that of a part, or
            joined, as those of all parts.
    """
    linear: dict[Node, None] = {tangent: None}
    for node in tangent.graph.nodes:
        dependent = [source for source in node.all_input_nodes if source in backward]
        if not dependent or any(source not in linear for source in dependent):
            continue
        if _is_linear(node, dependent, backward) or (moves and _is_moved(node, dependent)):
            linear[node] = None
    del linear[tangent]
    return list(linear)


def _part(tangent: Node, backward: set[Node]) -> Part:
    """The part of a tangent; without gradients if there is none of more than one number."""
    linear = dict.fromkeys(linear_part(tangent, backward))
    read_elsewhere = (n for n in linear if any(user not in linear for user in n.users))
    gradients = dict.fromkeys(map(behind_views, read_elsewhere))
    large = [n for n in linear if n in gradients and not is_one_number(n) and _differs(n)]
    return Part(tangent, tuple(linear), tuple(large))


def _differs(gradient: Node) -> bool:
    """Whether a gradient is made of more than numbers."""
    return any(
        isinstance(node.meta.get("val"), Tensor)
        and node.op == "placeholder"
        and not is_one_number(node)
        for node in ancestors([gradient])
    )


def _is_linear(node: Node, dependent: list[Node], backward: set[Node]) -> bool:
    """Whether a node is linear, element by element, in its arguments that depend on tangents."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return False
    if not value.is_floating_point():
        return False
    target: Any = node.target
    args = node.args
    if target in _OF_ONE:
        return dependent == [args[0]]
    if target in PRODUCTS:
        return len(dependent) == 1 and args.count(dependent[0]) == 1
    if target in QUOTIENTS:  # without a rounding mode, which another overload has
        return dependent == [args[0]] and args[1] is not args[0]
    if target in SUMS:
        return all(argument in dependent for argument in args[:2]) and not _depends(
            node.kwargs.get("alpha"), backward
        )
    if target is _FMA:
        *factors, addend = args
        is_product = sum(factor in dependent for factor in factors) == 1
        return is_product and (addend in dependent or _is_zero(addend))
    if target in (aten.zeros_like.default, aten.full_like.default):
        return _is_zero(node)
    if target is aten.where.self:
        chosen = args[1:3]
        return args[0] not in backward and all(a in dependent or _is_zero(a) for a in chosen)
    return False


#: What sums up or takes some of the elements of the first argument.
_TAKES = (*TOTALS, *MEANS, aten.slice.Tensor, aten.index.Tensor, aten.index_select.default)


def _is_moved(node: Node, dependent: list[Node]) -> bool:
    """Whether a node is linear in a tangent, but puts zeros around elements, sums them up, takes
    some of them or joins them."""
    if node.target is aten.constant_pad_nd.default:
        value = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
        return dependent == [node.args[0]] and isinstance(value, int | float) and value == 0
    if node.target in _TAKES:
        return dependent == [node.args[0]]
    if node.target in SCATTERS:
        return dependent == [node.args[1]] and _is_zero(node.args[0])
    if node.target is aten.index_put.default:
        return dependent == [node.args[2]] and _is_zero(node.args[0])
    if node.target in (aten.scatter.src, aten.scatter_add.default, aten.index_add.default):
        return dependent == [node.args[3]] and _is_zero(node.args[0])
    if node.target is aten.cat.default:
        parts: Any = node.args[0]
        return all(part in dependent or _is_zero(part) for part in parts)
    return False


def _depends(argument: Any, backward: set[Node]) -> bool:
    return isinstance(argument, Node) and argument in backward


def _is_zero(argument: Any) -> bool:
    """Whether an argument is certainly 0, or a tensor of zeros."""
    number = filled_with(argument) if isinstance(argument, Node) else argument
    return isinstance(number, int | float) and number == 0
