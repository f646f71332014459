"""Gradients through a product of matrices that one loop reads: written over it, scaled afterwards.

Of ``x = a @ b`` and ``y = x * scale`` autograd scales the gradient g of y, multiplies that by b and
by a, and sums up ``g * x`` for the scale. Then g is read twice as a matrix of its own, and x lives
beside it. Here a and b are multiplied by g, and the small results are scaled. The scale's gradient
is ``sum((g @ b.T) * a)``. So g may be written over x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import emit, erase_unused, move_before, replace_uses, retrace_views
from compile_losses.lower.node_relations import is_generated, is_turned_matrix
from compile_losses.op_traits import PRODUCTS, QUOTIENTS, TOTALS
from compile_losses.ops.checks import accumulation_type

aten = torch.ops.aten


def scale_after_products(product: Node, divides: bool, factor: Any) -> None:
    """Changes the gradients of one product of matrices that is scaled by one number.

    Args:
        product: the call of ``mm``.
        divides: whether it is divided by the factor, or multiplied.
        factor: a number, or a node that holds one.
    """
    if product.meta["val"].dtype == torch.float16:  # a gradient without its scale may underflow
        return
    for node in list(product.graph.nodes):
        gradient = _scaled(node, divides, factor)
        if gradient is None or _matrix_of(gradient)[0].meta["val"].shape not in _shapes(product):
            continue
        readers = _products_of(node)
        if readers is not None:
            for reader in readers:
                _scale_after(reader, node, gradient, factor)
            erase_unused([*node.users, node])
    if isinstance(factor, Node) and not divides:
        for node in list(product.users):
            _sum_of_products(node, product)


def _shapes(product: Node) -> tuple[Any, Any]:
    shape = product.meta["val"].shape
    return shape, torch.Size(reversed(shape))


def _scaled(node: Node, divides: bool, factor: Any) -> Node | None:
    """What a node is the scaling of, by a factor."""
    if node.target not in (QUOTIENTS if divides else PRODUCTS) or node.kwargs:
        return None
    left, right = node.args
    if left is factor and not divides:
        left, right = right, left
    is_same = right is factor if isinstance(factor, Node) else right == factor
    return left if is_same and isinstance(left, Node) else None


def _matrix_of(node: Node) -> tuple[Node, bool]:
    """What a node is a view of, and whether that is turned."""
    turned = False
    while is_turned_matrix(node):
        node, turned = node.args[0], not turned  # type: ignore[assignment]
    return node, turned


def _products_of(node: Node) -> list[Node] | None:
    """The products of matrices that read a node, itself or turned; None if anything else does."""
    found = []
    for user in node.users:
        if user.target is aten.mm.default:
            found.append(user)
        elif is_turned_matrix(user) and all(u.target is aten.mm.default for u in user.users):
            found += user.users
        else:
            return None
    return list(dict.fromkeys(found)) or None


def _scale_after(reader: Node, node: Node, gradient: Node, factor: Any) -> None:
    """Multiplies by a gradient that is not scaled yet, and scales the product."""
    operands = []
    for operand in reader.args:
        matrix, turned = _matrix_of(operand)  # type: ignore[arg-type]
        if matrix is node:
            operand = emit(reader, aten.permute.default, (gradient, [1, 0])) if turned else gradient
        operands.append(operand)
    result = emit(reader, aten.mm.default, operands)
    replace_uses(reader, emit(reader, node.target, (result, factor)))
    erase_unused([reader])


def _sum_of_products(node: Node, product: Node) -> None:
    """Computes the sum of a product and its gradient, the scale's gradient, of a smaller one."""
    if node.target is not aten.mul.Tensor or len(node.users) != 1:
        return
    (total,) = node.users
    if total.target not in TOTALS or total.meta["val"].numel() != 1:
        return
    left, right = node.args
    gradient = _matrix_of(left if right is product else right)  # type: ignore[arg-type]
    for part in _parts(product):
        if (part.gradient, part.turned) == gradient and move_before([part.call], total):
            break
    else:
        return
    wide = accumulation_type(product.meta["val"].dtype)
    cast = torch.ops.prims.convert_element_type.default
    other = emit(total, aten.permute.default, (part.operand, [1, 0]))
    operands = [
        each if each.meta["val"].dtype == wide else emit(total, cast, (each, wide))
        for each in (part.call, part.operand if part.is_of_first else other)
    ]
    terms = emit(total, aten.mul.Tensor, operands)
    value = total.meta["val"]
    result = emit(total, aten.sum.default, (terms,))
    if value.dtype != wide:
        result = emit(total, cast, (result, value.dtype))
    if value.dim():
        result = emit(total, aten.view.default, (result, list(value.shape)))
    replace_uses(total, result)
    erase_unused([total, node, other])


@dataclass(frozen=True)
class _Part:
    """The gradient of one operand of ``x = a @ b``.

    Attributes:
        call: ``g @ b.T`` or ``g.T @ a``, the gradient of a, or of b turned.
        gradient: what g is a view of.
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
        elif second == of_a:
            found.append(_Part(call, gradient, not turned, False, b))  # type: ignore[arg-type]
    return found


def hold_layout(product: Node) -> None:
    """Has Inductor write the gradient of a product in the layout of the product, and so over it.

    The gradient may have a term that is computed of the product turned, and then the layout of the
    turned product.
    """
    value = product.meta["val"]
    if not all(isinstance(s, int) for s in (*value.shape, *value.stride())):
        return
    # Other rows Inductor may pad.
    if any(s != 1 and s * value.element_size() % 16 for s in value.stride()):
        return
    for gradient, turned in {(part.gradient, part.turned): None for part in _parts(product)}:
        if not is_generated(gradient):
            continue
        # Recorded strides say little: those of a sum are its first term's, which has changed.
        like = value.t() if turned else value
        target = torch.ops.prims.inductor_force_stride_order.default
        args = (gradient, list(like.stride()))
        with gradient.meta["val"].fake_mode:
            fresh = torch.empty_like(like, dtype=gradient.meta["val"].dtype)
        held = emit(gradient.next, target, args, like=gradient, value=fresh)
        replace_uses(gradient, held, but=held)
        retrace_views(held)
