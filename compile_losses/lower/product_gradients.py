"""Gradients through large products of matrices: written over them, and scaled afterwards.

Of ``x = a @ b`` and ``y = x * scale`` autograd scales the gradient g of y, multiplies that by b and
by a, and sums up ``g * x`` for the scale. Then g is read twice as a matrix of its own, and x lives
beside it. Here a and b are multiplied by g, and the small results are scaled. The scale's gradient
is ``sum((g @ b.T) * a)``. So g may be written over x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.device_constants import constants_of
from compile_losses.graphs import (
    emit,
    erase_unused,
    give,
    in_dtype,
    move_before,
    replace_uses,
    retrace_views,
)
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import hint_of, nbytes_of
from compile_losses.lower.early_parts import take_parts_early
from compile_losses.lower.known_factors import is_one_number, scaling_of
from compile_losses.lower.node_relations import is_generated, is_turned_matrix
from compile_losses.op_traits import CASTS, PRODUCTS, TOTALS
from compile_losses.ops.checks import accumulation_type

aten = torch.ops.aten
fused = torch.ops.fused

#: Ops of elements that are none by their tags.
_OF_ELEMENTS = (*CASTS, aten.clone.default, aten.scatter.value)


def overwrite_products(graph: AtenGraph) -> None:
    """Changes the gradients of each large product of matrices that has a learned scale, or whose
    softmaxes by rows and by columns one call reads."""
    for product in graph.graph.find_nodes(op="call_function", target=aten.mm.default):
        value = product.meta["val"]
        large = nbytes_of(value) >= constants_of(value.device).two_softmaxes_bytes
        if not large or product in graph.backward:
            continue
        sums = [(n, t) for n in _totals(graph) if (t := _terms_of(n)) and product in t.matrices]
        # In float16 a gradient without its scale may underflow.
        if sums and value.dtype != torch.float16:
            for scaled in [node for node in graph.graph.nodes if node in graph.backward]:
                _scale_after(scaled, product)
            for total, terms in sums:
                _sum_of_parts(total, terms, product)
            take_parts_early(product)
        softmaxes = [u for u in product.users if u.target is fused.softmax_sums.default]
        gradients = list(_in_layout(product)) if sums or softmaxes else []
        is_scaled = any(call.args[1] is not None for call in softmaxes)
        if is_scaled and not _scale_operand(product, softmaxes):
            # Two softmaxes of a scaled product are too many ops for one loop.
            for gradient in gradients:
                _hold_numbers(gradient)


def _totals(graph: AtenGraph) -> list[Node]:
    nodes = (n for op in TOTALS for n in graph.graph.find_nodes(op="call_function", target=op))
    return [n for n in nodes if n in graph.backward and n.meta["val"].numel() == 1]


@dataclass
class _Terms:
    """Matrices and numbers that are multiplied element by element.

    Attributes:
        matrices: without casts.
        numbers: an op for each, and its other operands.
        nodes: which multiply and cast them, each after its readers.
    """

    matrices: list[Node] = field(default_factory=list)
    numbers: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


def _terms_of(total: Node) -> _Terms | None:
    """What a sum of all elements is the sum of; None if that is no product of two matrices."""
    terms, waiting = _Terms(), [total.args[0]]
    while waiting:
        node: Any = waiting.pop()
        target = node.target
        if target in CASTS:
            waiting.append(node.args[0])
        elif target is aten.neg.default:
            terms.numbers.append((target, ()))
            waiting.append(node.args[0])
        elif (operands := scaling_of(node)) is not None:
            left, right = operands
            waiting.append(left)
            if not isinstance(right, Node) or is_one_number(right):
                terms.numbers.append((target, (right,)))
            elif target in PRODUCTS:
                waiting.append(right)
            else:
                return None
        else:
            terms.matrices.append(node)
            continue
        terms.nodes.append(node)
    is_pair = len(terms.matrices) == 2
    return terms if is_pair and all(n.meta["val"].dim() == 2 for n in terms.matrices) else None


def _shapes(product: Node) -> tuple[Any, Any]:
    shape = product.meta["val"].shape
    return shape, torch.Size(reversed(shape))


def _matrix_of(node: Node) -> tuple[Node, bool]:
    """What a node is a view or cast of, and whether that is turned."""
    turned = False
    while node.op == "call_function":
        if is_turned_matrix(node):
            turned = not turned
        elif node.target not in CASTS:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node, turned


def _scale_after(scaled: Node, product: Node) -> None:
    """Multiplies by a gradient that is not scaled yet, and scales the results.

    Args:
        scaled: is changed if it is the gradient of a product, scaled by one number.
    """
    operands = scaling_of(scaled)
    if operands is None:
        return
    gradient, factor = operands
    is_number = isinstance(factor, Node) and is_one_number(factor)
    if not isinstance(gradient, Node) or not is_number:
        return
    if not isinstance(scaled.meta["val"], Tensor) or scaled.meta["val"].shape not in _shapes(
        product
    ):
        return
    parts = {part.call for part in _parts(product)}
    readers = _products_of(scaled)
    if not readers or not parts.issuperset(readers):
        return
    for reader in readers:
        operand = _same_views(reader.args[0], scaled, gradient, reader)
        result = emit(reader, aten.mm.default, (operand, reader.args[1]))
        replace_uses(reader, emit(reader, scaled.target, (result, factor)))
        erase_unused([reader])
    erase_unused([*_views_of(scaled), scaled])


def _views_of(node: Node) -> list[Node]:
    """The views and casts of a node, the last first."""
    found = []
    for user in node.users:
        if is_turned_matrix(user) or user.target in CASTS:
            found += [*_views_of(user), user]
    return found


def _products_of(node: Node) -> list[Node] | None:
    """The products of matrices whose first operand is a node, through views and casts; None if
    anything else reads it."""
    found: list[Node] = []
    for user in node.users:
        if user.target is aten.mm.default and user.args[0] is node:
            found.append(user)
            continue
        inner = _products_of(user) if user in _views_of(node) else None
        if inner is None:
            return None
        found += inner
    return list(dict.fromkeys(found))


def _same_views(view: Any, of: Node, source: Node, place: Node) -> Node:
    """Makes of a node the same views and casts that another one is of a second."""
    if view is of:
        return in_dtype(source, of.meta["val"].dtype, place)
    inner = _same_views(view.args[0], of, source, place)
    return emit(place, view.target, (inner, *view.args[1:]), view.kwargs)


@dataclass(frozen=True)
class _Part:
    """The gradient of one operand of ``x = a @ b``.

    Attributes:
        call: ``g @ b.T`` or ``g.T @ a``, the gradient of a, or of b turned.
        gradient: what g is a view or cast of.
        turned: whether that is g turned.
        is_of_first: whether it is the gradient of a.
        operand: a or b, that of which it is the gradient.
    """

    call: Node
    gradient: Node
    turned: bool
    is_of_first: bool
    operand: Node


def _parts(product: Node) -> list[_Part]:
    """The products of matrices that make the gradients of one product's operands."""
    found = []
    a, b = product.args
    of_a, of_b = _matrix_of(a), _matrix_of(b)  # type: ignore[arg-type]
    for call in product.graph.find_nodes(op="call_function", target=aten.mm.default):
        (gradient, turned), second = map(_matrix_of, call.args)
        if call is product or gradient.meta["val"].shape not in _shapes(product):
            continue
        if second == (of_b[0], not of_b[1]):
            found.append(_Part(call, gradient, turned, True, a))  # type: ignore[arg-type]
        if second == of_a:
            found.append(_Part(call, gradient, not turned, False, b))  # type: ignore[arg-type]
    return found


def _sum_of_parts(total: Node, terms: _Terms, product: Node) -> None:
    """Computes the sum of a product and its gradient, the scale's gradient, of a smaller one."""
    (other,) = [n for n in terms.matrices if n is not product] or [product]
    gradient = _matrix_of(other)
    for part in _parts(product):
        if (part.gradient, part.turned) == gradient and move_before([part.call], total):
            break
    else:
        return
    wide = accumulation_type(product.meta["val"].dtype)
    operand = part.operand
    if not part.is_of_first:
        operand = emit(total, aten.permute.default, (operand, [1, 0]))
    operands = [in_dtype(each, wide, total) for each in (part.call, operand)]
    value = total.meta["val"]
    result = emit(total, aten.sum.default, (emit(total, aten.mul.Tensor, operands),))
    for op, others in terms.numbers:
        result = emit(total, op, (result, *others))
    result = in_dtype(result, value.dtype, total)
    if result.meta["val"].shape != value.shape:
        result = emit(total, aten.view.default, (result, list(value.shape)))
    replace_uses(total, result)
    erase_unused([total, *terms.nodes])


def _scale_operand(product: Node, softmaxes: Sequence[Node]) -> bool:
    """Scales the smaller operand of a product in the place of the product, if nothing reads that
    unscaled; whether it does.

    Args:
        softmaxes: the calls that read the product, and are given its factor.
    """
    value = product.meta["val"]
    if value.dtype == torch.float16:  # a small factor may make the operand underflow
        return False
    scaled: dict[Node, tuple[Any, Any]] = {}
    for user in product.users:
        if user not in softmaxes:
            for each in list(user.users) if user.target in CASTS else [user]:
                read = scaling_of(each)
                if read is None or read[0] not in (product, user):
                    return False
                scaled[each] = each.target, read[1]
    if len(set(scaled.values())) != 1:
        return False
    ((target, factor),) = set(scaled.values())
    if isinstance(factor, Node) and not (is_one_number(factor) and move_before([factor], product)):
        return False
    operands: list[Any] = list(product.args)
    smaller = min((0, 1), key=lambda place: hint_of(operands[place].meta["val"].numel()))
    wide = _before_rounding(operands[smaller], accumulation_type(value.dtype), product)
    operands[smaller] = in_dtype(emit(product, target, (wide, factor)), value.dtype, product)
    result = emit(product, aten.mm.default, operands, like=product)
    for node in scaled:
        replace_uses(node, in_dtype(result, node.meta["val"].dtype, node))
    for call in softmaxes:
        give(call, (result, None))
    casts = [user for user in product.users if user not in scaled]
    erase_unused([*scaled, *casts, product])
    return True


def _before_rounding(operand: Node, wide: torch.dtype, place: Node) -> Node:
    """An operand in a wider dtype: what it was cast from, if that has it, else a cast of it."""
    source: Any = operand.args[0] if operand.target in CASTS else operand
    is_wide = source.meta["val"].dtype == wide
    return source if is_wide else in_dtype(operand, wide, place)


def _in_layout(product: Node) -> Iterator[Node]:
    """Has Inductor write the gradient of a product in the layout of the product, and so over it;
    yields it.

    The gradient may have a term that is computed of the product turned, and then the layout of the
    turned product.
    """
    value = product.meta["val"]
    if not all(isinstance(s, int) for s in (*value.shape, *value.stride())):
        return
    # Other rows Inductor may pad.
    if any(s != 1 and s * value.element_size() % 16 for s in value.stride()):
        return
    for part in _parts(product):
        read: Any = part.call.args[0]
        is_turned = is_turned_matrix(read)
        gradient = read.args[0] if is_turned else read
        is_made = is_generated(gradient) or gradient.target in CASTS
        if not is_made or gradient.meta["val"].dtype != value.dtype:
            continue
        # Recorded strides say little: those of a sum are its first term's, which has changed.
        like = value.t() if is_turned == part.is_of_first else value
        _hold(gradient, like)
        yield gradient


def _hold(node: Node, like: Tensor) -> None:
    """Has Inductor write a node in the strides of another tensor."""
    with node.meta["val"].fake_mode:
        fresh = torch.empty_like(like, dtype=node.meta["val"].dtype)
    target = torch.ops.prims.inductor_force_stride_order.default
    held = emit(node.next, target, (node, list(like.stride())), like=node, value=fresh)
    replace_uses(node, held, but=held)
    retrace_views(held)


def _hold_numbers(gradient: Node) -> None:
    """Has Inductor compute what a gradient takes of each row or column before the gradient.

    Inductor cuts a loop of many ops in several. Those read the product each, so that none of them
    may write over it.
    """
    shapes = _shapes(gradient)
    waiting, found = [gradient], dict[Node, None]()
    for node in waiting:
        elements = is_generated(node) or node.target in _OF_ELEMENTS or is_turned_matrix(node)
        value = node.meta["val"]
        if elements and value.shape in shapes:
            waiting += [each for each in node.all_input_nodes if each not in waiting]
        elif is_generated(node) and value.dim() == 2 and value.numel() > 1:
            found[node] = None
    for node in found:
        _hold(node, node.meta["val"])
