"""What is known in the forward of the gradient that will reach a loss.

With ``0.5 * loss``, ``loss / num_items`` or ``a * loss1 + b * loss2`` in the graph, the loss's
grad_output is the tangent of the whole times or divided by numbers that the forward has. They go
into the gradient when it is computed; the backward then multiplies by the tangent alone, which is 1
after ``total.backward()``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx import Node

from compile_losses.graphs import emit, in_dtype, is_view
from compile_losses.op_traits import CASTS, IN_ORDER, PRODUCTS, QUOTIENTS

aten = torch.ops.aten


@dataclass
class Factor:
    """``tangent * constant * product(numerators) / product(denominators)`` is a grad_output."""

    tangent: Node
    constant: float = 1.0
    numerators: list[Node] = field(default_factory=list)
    denominators: list[Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        return [*self.numerators, *self.denominators]


def factor_of(grad_output: Any, backward: set[Node]) -> Factor | None:
    """What stands between the tangent of the whole and a grad_output of one element.

    Args:
        grad_output: a node of a joint graph.
        backward: the nodes that depend on tangents.

    Returns:
        None where that is nothing, or more than factors.
    """
    if not isinstance(grad_output, Node):
        return None
    factor = Factor(grad_output)
    while factor.tangent.op == "call_function":
        # A view of one number, and a number times it, is that everywhere, whatever its shape.
        node = factor.tangent
        target: Any = node.target
        if is_view(node) or target in CASTS or target in IN_ORDER:
            factor.tangent = node.args[0]  # type: ignore[assignment]
        elif target is aten.neg.default:
            factor.constant = -factor.constant
            factor.tangent = node.args[0]  # type: ignore[assignment]
        elif target in (*PRODUCTS, *QUOTIENTS) and not node.kwargs:
            if not _peel(factor, node, backward):
                return None
        else:
            return None
    if factor.tangent not in backward or not is_one_number(factor.tangent):
        return None
    if factor.constant == 1.0 and not factor.nodes:
        return None
    return factor


def is_one_number(node: Node) -> bool:
    """Whether a node holds a tensor of one floating-point number, of any number of dimensions."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and has_one_element(value)


def scaling_of(node: Node) -> tuple[Any, Any] | None:
    """The operands of a product or a quotient, a number last if one of a product's is one; None of
    another node."""
    if node.target not in (*PRODUCTS, *QUOTIENTS) or node.kwargs:
        return None
    first, second = node.args
    if node.target in PRODUCTS and isinstance(first, Node) and is_one_number(first):
        first, second = second, first
    return first, second


def has_one_element(value: Tensor) -> bool:
    """Whether a tensor is known to hold one number, in any number of dimensions."""
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def _peel(factor: Factor, node: Node, backward: set[Node]) -> bool:
    """Takes a factor off the tangent; False if the node is no product with what the forward
    knows."""
    left, right = node.args
    divides = node.target in QUOTIENTS
    if not divides and right in backward:
        left, right = right, left
    if left not in backward or right in backward:
        return False
    if isinstance(right, int | float):
        if divides and right == 0:
            return False
        constant = factor.constant / right if divides else factor.constant * right
        # Beyond the smallest normal number of float32 the product would lose digits.
        if not math.isfinite(constant) or abs(constant) < torch.finfo(torch.float32).tiny:
            return False
        factor.constant = constant
    elif isinstance(right, Node) and _is_number(right):
        (factor.denominators if divides else factor.numerators).append(right)
    else:
        return False
    factor.tangent = left  # type: ignore[assignment]
    return True


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return has_one_element(value)
    return isinstance(value, SymInt | SymFloat)


def product_of(factor: Factor, dtype: torch.dtype, like: Tensor, place: Node) -> Node:
    """Computes a factor before a loss; in float32, or in float64 for such a loss.

    Args:
        dtype: of the loss.
        like: a tensor on the loss's device.
        place: the call of the loss.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def widened(node: Node) -> Node:
        value = node.meta["val"]
        return in_dtype(node, wide, place) if isinstance(value, Tensor) else node

    def is_here(node: Node) -> bool:
        value = node.meta["val"]
        return isinstance(value, Tensor) and value.device == like.device

    # Symbols, and numbers on the host, take part in arithmetic on the device but don't begin it.
    product: Node | None = None
    elsewhere = [n for n in factor.numerators if not is_here(n)]
    for numerator in map(widened, filter(is_here, factor.numerators)):
        product = (
            numerator if product is None else emit(place, aten.mul.Tensor, (product, numerator))
        )
    if product is None:
        options = {"dtype": wide, "device": like.device, "layout": torch.strided}
        product = emit(place, aten.full.default, ([], factor.constant), options)
    elif factor.constant != 1.0:
        product = emit(place, aten.mul.Tensor, (product, factor.constant))
    for numerator in map(widened, elsewhere):
        product = emit(place, aten.mul.Tensor, (product, numerator))
    for denominator in map(widened, factor.denominators):
        product = emit(place, aten.div.Tensor, (product, denominator))
    return product
