"""Gradients of weights that a joint graph adds up, and the calls of heads that make them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.graphs import is_view
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import nbytes_of
from compile_losses.lower.known_factors import is_one_number
from compile_losses.lower.node_relations import is_turned_matrix
from compile_losses.op_traits import CASTS, PRODUCTS
from compile_losses.ops.linear import region_program
from compile_losses.ops.linear.joined_calls import place_of_weight
from compile_losses.torch_internals.ops import OpOverload

aten = torch.ops.aten
fused = torch.ops.fused


@dataclass(frozen=True)
class Term:
    """A weight's gradient as a sum of several reads it.

    Attributes:
        node: what the sum reads.
        reader: the sum of two, ``aten.add``.
        call: what makes the gradient; ``place`` says which of its results that is.
        number: what it is scaled by; None in the backward.
        is_turned: whether the sum reads it as [hidden, classes].
    """

    node: Node
    reader: Node
    call: Node
    place: int
    number: Node | None
    is_turned: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for terms that may be one sum."""
        made: Tensor = self.call.meta["val"][self.place]
        value: Tensor = self.node.meta["val"]
        return self.number, self.is_turned, made.dtype, value.dtype, value.device


def weight_sums(graph: AtenGraph) -> list[Node]:
    """The sums of two matrices that no other such sum alone reads, the largest first."""
    found = [node for node in graph.graph.nodes if _is_sum(node)]
    roots = [n for n in found if len(n.users) != 1 or not _is_sum(next(iter(n.users)))]
    return sorted(roots, key=lambda node: -nbytes_of(node.meta["val"]))


def _is_sum(node: Node) -> bool:
    """Whether a node is the sum of two matrices of its own kind."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    values = [each.meta.get("val") if isinstance(each, Node) else None for each in node.args]
    own = node.meta["val"]
    if own.dim() != 2 or not all(isinstance(size, int) for size in own.shape):
        return False
    return all(
        isinstance(v, Tensor) and (v.dtype, v.shape) == (own.dtype, own.shape) for v in values
    )


def terms_of(root: Node) -> list[Term]:
    """The gradients of weights that a sum, and the sums that it alone reads, add up."""
    found, waiting = [], [root]
    while waiting:
        reader = waiting.pop()
        if reader.args[0] is reader.args[1]:
            continue
        for node in reader.all_input_nodes:
            if _is_sum(node) and len(node.users) == 1:
                waiting.append(node)
                continue
            term = _term(node, reader)
            if term is not None:
                found.append(term)
    return sorted(found, key=lambda term: (term.reader, term.call))


def _term(node: Node, reader: Node) -> Term | None:
    """The gradient that a sum reads, which nothing else reads; None if it is no gradient of a head.

    Between may stand a scale, a turn, and a cast to a wider dtype.
    """
    source: Any = node
    number: Node | None = None
    is_turned = False
    while source.target is not operator.getitem:
        if source.op != "call_function" or len(source.users) != 1:
            return None
        if source.target is fused.scale.default and number is None:
            number = _number(source.args[1])
        elif is_turned_matrix(source):
            is_turned = not is_turned
        elif not (source.target in CASTS and _is_widened(source)):
            return None
        source = source.args[0]
    call, place = source.args
    if len(source.users) != 1 or not isinstance(call.target, OpOverload):
        return None
    if call.target is fused.linear_region.default:
        sums = sums_of(call)
        if place not in sums:
            return None
        is_turned ^= sums[place].is_turned
    elif place_of_weight(call.target) != place:
        return None
    return Term(node, reader, call, place, number, is_turned)


def _is_widened(node: Node) -> bool:
    """Whether a cast keeps all digits of what it reads."""
    own, source = node.meta["val"].dtype, node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    return own.is_floating_point and torch.promote_types(own, source) == own


def _number(node: Any) -> Node:
    """What a number is, without what leaves it as it is."""
    while _is_same_number(node):
        node = node.args[0]
    found: Node = node
    return found


def _is_same_number(node: Any) -> bool:
    """Whether a number is the one that its node reads first."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node) or not is_one_number(source):
        return False
    if node.target in CASTS:
        return _is_widened(node)
    return is_view(node) or (node.target in PRODUCTS and node.args[1] in (1, 1.0))


def sums_of(call: Node) -> dict[int, region_program.Sum]:
    """The sums of products of a region by the places of the results."""
    program = region_program.parsed(call.args[2])  # type: ignore[arg-type]
    first = len(program.columns) + len(program.row_products)
    return dict(enumerate(program.sums, first))
