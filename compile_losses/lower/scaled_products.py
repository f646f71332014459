"""Gradients through a scaled product of matrices: the products first, the scale afterwards.

Of ``x = a @ b`` and ``y = x * scale`` autograd scales the gradient g of y, multiplies that by b and
by a, and sums up ``g * x`` for the scale. Then g is read twice as a matrix of its own, and x lives
beside it. Here a and b are multiplied by g, and the small results are scaled. The scale's gradient
is ``sum((g @ b.T) * a)``. So g may be written over x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import emit, erase_unused, move_before, replace_uses
from compile_losses.lower.node_relations import is_turned_matrix
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
    # In float16 a gradient without its scale may underflow.
    if product.target is not aten.mm.default or product.meta["val"].dtype == torch.float16:
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
    gradient: Any = left if right is product else right
    matrix, turned = _matrix_of(gradient)
    for small in list(matrix.graph.find_nodes(op="call_function", target=aten.mm.default)):
        other = _other_operand(small, matrix, turned, product)
        if other is not None and move_before([small, other], total):
            break
    else:
        return
    wide = accumulation_type(product.meta["val"].dtype)
    cast = torch.ops.prims.convert_element_type.default
    operands = [
        each if each.meta["val"].dtype == wide else emit(total, cast, (each, wide))
        for each in (small, other)
    ]
    terms = emit(total, aten.mul.Tensor, operands)
    value = total.meta["val"]
    result = emit(total, aten.sum.default, (terms,))
    if value.dtype != wide:
        result = emit(total, cast, (result, value.dtype))
    if value.dim():
        result = emit(total, aten.view.default, (result, list(value.shape)))
    replace_uses(total, result)
    erase_unused([total, node])


def _other_operand(small: Node, matrix: Node, turned: bool, product: Node) -> Node | None:
    """Of a product of a gradient with one operand, the other operand; None for other products.

    With ``x = a @ b`` that is a for ``g @ b.T``, and b.T for ``g.T @ a``; a turned result is what
    is summed with the operand turned.
    """
    first, second = map(_matrix_of, small.args)  # type: ignore[arg-type]
    a, b = product.args
    (a_matrix, a_turned), (b_matrix, b_turned) = _matrix_of(a), _matrix_of(b)  # type: ignore[arg-type]
    if first[0] is not matrix:
        return None
    if first[1] == turned and second == (b_matrix, not b_turned):
        return a  # type: ignore[return-value]
    if first[1] != turned and second == (a_matrix, a_turned):
        place = small.next
        return emit(place, aten.permute.default, (b, [1, 0]), like=small)
    return None
