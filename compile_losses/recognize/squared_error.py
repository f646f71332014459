"""Squared errors written by hand: a full reduction of (a - b)^2, in whatever spelling.

The root is brought into the form ``scale * sum(E)`` by peeling means, sums, views and constant
factors off it; E must then be the square of a difference of two tensors. The scale is kept as
integers and symbols, so that ``.sum() / a.numel()`` is a mean under dynamic shapes, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.ops.checks import REDUCTIONS
from compile_losses.recognize.absorb import absorb
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.shadow import Shadow, Value

aten = torch.ops.aten

_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.alias.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
)
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_MEANS = (aten.mean.default, aten.mean.dim)
_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default)
#: Cheap test of what a root can be: names of functions and methods that end a reduction.
_ROOTS = {
    "mean",
    "sum",
    "div",
    "truediv",
    "true_divide",
    "mul",
    "multiply",
    "divide",
    "pow",
    "square",
    "neg",
    "nanmean",
}


class Peeled:
    """``root == constant * numerator / denominator * sum(body)``."""

    def __init__(self, body: Value) -> None:
        self.body = body
        self.constant = 1.0
        self.numerator: Any = 1
        self.denominator: Any = 1
        self.interior: list[Node] = []
        self.reduced = False
        self.squared_norm = False  # the body is ||x||, and the root its square: the sum of x^2

    def enter(self, value: Value) -> None:
        """Goes from the body to one of its op's arguments."""
        if self.body.node not in self.interior:
            self.interior.append(self.body.node)
        self.body = value


def recognize_squared_error(node: Node, shadow: Shadow) -> Match | None:
    """mean((a - b) ** 2) and its kin, with ``node`` holding the loss."""
    value = example(node)
    if not _may_be_root(node) or not isinstance(value, torch.Tensor):
        return None
    if value.dim() != 0 or not value.is_floating_point():
        return None
    peeled = _peel(shadow.of(node), shadow)
    if not peeled.reduced:
        return None
    difference = _square_root(peeled, shadow)
    if difference is None:
        return None
    input, target, numel = difference
    scaled = _reduction(peeled, numel)
    if scaled is None or (scaled[1] != 1.0 and shadow.of(node).op in _SCALINGS):
        # The factor stays the user's: the node inside it is recognised on its own.
        return None
    reduction, multiplier = scaled
    interior = [n for n in peeled.interior if n is not node]
    match = Match(
        node,
        "mse_loss",
        (input, target, REDUCTIONS[reduction]),
        interior=interior,
        multiplier=multiplier,
    )
    absorb(match)
    return match


def _may_be_root(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _ROOTS
    if node.op != "call_function":
        return False
    return getattr(node.target, "__name__", "").partition(".")[0] in _ROOTS


def _peel(root: Value, shadow: Shadow) -> Peeled:
    peeled = Peeled(root)
    while True:
        value = peeled.body = shadow.resolve(peeled.body)
        if value.kwargs.get("dtype") is not None:
            return peeled
        if value.op in _SUMS or value.op in _MEANS:
            inner = value.args[0]
            if value.op in _MEANS:
                _divide_by_count(peeled, value, inner)
            peeled.reduced = True
            peeled.enter(inner)
        elif value.op in _VIEWS and not peeled.reduced and value.fake.numel() != 1:
            return peeled
        elif value.op in _VIEWS:
            peeled.enter(value.args[0])
        elif value.op in _SCALINGS and _scale(peeled, value):
            continue
        elif _is_square(value) and not peeled.reduced:
            norm = shadow.resolve(value.args[0])
            if not _is_two_norm(norm):
                return peeled
            peeled.enter(norm)
            peeled.reduced = peeled.squared_norm = True
            return peeled
        else:
            return peeled


def _divide_by_count(peeled: Peeled, value: Value, inner: Value) -> None:
    dims = value.args[1] if value.op is aten.mean.dim else None
    shape = inner.fake.shape
    for dim in dims or range(len(shape)):
        peeled.denominator = peeled.denominator * shape[dim]


def _scale(peeled: Peeled, value: Value) -> bool:
    """Takes a constant or symbolic factor off a product, a quotient or a negation."""
    if value.op is aten.neg.default:
        peeled.constant = -peeled.constant
        peeled.enter(value.args[0])
        return True
    left, right = value.args[:2]
    multiplies = value.op in (aten.mul.Tensor, aten.mul.Scalar)
    if multiplies and not isinstance(left, Value):
        left, right = right, left
    if isinstance(right, int | torch.SymInt) and not isinstance(right, bool):
        if multiplies:
            peeled.numerator = peeled.numerator * right
        else:
            peeled.denominator = peeled.denominator * right
    elif isinstance(right, float) and (multiplies or right != 0):
        peeled.constant = peeled.constant * right if multiplies else peeled.constant / right
    else:
        return False
    peeled.enter(left)
    return True


def _is_two(number: Any) -> bool:
    return isinstance(number, int | float) and number == 2  # comparing a symbol would add a guard


def _is_square(value: Value) -> bool:
    return value.op is aten.pow.Tensor_Scalar and _is_two(value.args[1])


def _is_two_norm(value: Value) -> bool:
    if value.op is not aten.linalg_vector_norm.default:
        return False
    order = value.args[1] if len(value.args) > 1 else value.kwargs.get("ord", 2)
    return _is_two(order) and value.fake.dim() == 0 and value.kwargs.get("dtype") is None


def _square_root(peeled: Peeled, shadow: Shadow) -> tuple[Node, Node, Any] | None:
    """The two nodes whose difference is squared in the body, and how many elements it has."""
    value = shadow.resolve(peeled.body)
    peeled.body = value
    if value.op is aten.mse_loss.default and value.args[2:] == (0,):
        peeled.enter(value.args[0])
        return _operands(value)
    product = value.op is aten.mul.Tensor and _same(value.args[0], value.args[1], shadow)
    if not (_is_square(value) or product or peeled.squared_norm):
        return None
    peeled.enter(value.args[0])
    value = peeled.body = shadow.resolve(peeled.body)
    while value.op in (aten.abs.default, aten.neg.default):
        peeled.enter(value.args[0])
        value = peeled.body = shadow.resolve(peeled.body)
    if value.op not in (aten.sub.Tensor, aten.add.Tensor) or value.kwargs.get("alpha", 1) != 1:
        return None
    left, right = value.args[:2]
    if not isinstance(left, Value) or not isinstance(right, Value):
        return None
    peeled.enter(left)
    if value.op is aten.sub.Tensor:
        return _operands(value)
    for kept, negated in ((left, right), (right, left)):
        negation = shadow.resolve(negated)
        if negation.op is aten.neg.default and _is_node(kept) and _is_node(negation.args[0]):
            peeled.interior.append(negation.node)
            return kept.node, negation.args[0].node, value.fake.numel()
    return None


def _operands(value: Value) -> tuple[Node, Node, Any] | None:
    left, right = value.args[:2]
    if not _is_node(left) or not _is_node(right):
        return None
    return left.node, right.node, value.fake.numel()


def _is_node(value: Any) -> bool:
    """Whether a Value is the whole result of a Dynamo node, and so can be an argument of ours."""
    return isinstance(value, Value) and value.op is None


def _same(left: Any, right: Any, shadow: Shadow) -> bool:
    if not isinstance(left, Value) or not isinstance(right, Value):
        return False
    return left is right or (left.op is right.op is None and left.node is right.node)


def _reduction(peeled: Peeled, numel: Any) -> tuple[str, float] | None:
    """The reduction and the factor that make the peeled scale, if it is a number."""
    if statically_known_true(peeled.numerator * numel == peeled.denominator):
        return "mean", peeled.constant
    if statically_known_true(peeled.numerator == peeled.denominator):
        return "sum", peeled.constant
    if isinstance(peeled.numerator, int) and isinstance(peeled.denominator, int):
        if peeled.denominator == 0:
            return None
        return "sum", peeled.constant * peeled.numerator / peeled.denominator
    return None
