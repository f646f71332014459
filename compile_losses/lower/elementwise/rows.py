"""Sums of whole tensors, as sums of rows.

Inductor cuts the sum of all elements into partial sums of its own, in a loop of its own. A sum over
rows is one loop with what else is computed of the same elements, and leaves a number for each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.lower.elementwise.find import Part

aten = torch.ops.aten

#: Elements of a row, at most, and the fewest for which rows are worth it.
ROW, SHORTEST = 8192, 256

_ALL = (aten.sum.default, aten.mean.default)
_SOME = (aten.sum.dim_IntList, aten.mean.dim)


def sum_in_rows(part: Part, loss: Node) -> Node:
    """Rewrites the sums of all elements of tensors as large as a gradient, on the way to a loss.

    Returns:
        The loss, which may be such a sum itself.
    """
    sizes = {gradient.meta["val"].numel() for gradient in part.gradients}
    seen, work = {loss}, [loss]
    while work:
        node = work.pop()
        if _is_whole(node) and node.all_input_nodes[0].meta["val"].numel() in sizes:
            total = _sum_rows_first(node)
            loss = total if node is loss else loss
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                work.append(source)
    return loss


def _is_whole(node: Node) -> bool:
    """Whether a node sums all elements of a tensor up."""
    if node.op != "call_function" or not isinstance(node.args[0] if node.args else None, Node):
        return False
    value = node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if node.target in _ALL:
        return True
    if node.target not in _SOME or len(node.args) < 2:
        return False
    dims: Any = node.args[1] or range(value.dim())
    return len({d % value.dim() for d in dims}) == value.dim()


def row_length(numel: int) -> int | None:
    """The elements of a row, or None: the largest divisor in the range, so that no row is padded,
    among the multiples of 16, so that each row is aligned."""
    for length in range(ROW - ROW % 16, SHORTEST - 1, -16):
        if numel % length == 0 and numel > length:
            return length
    return None


def _sum_rows_first(node: Node) -> Node:
    source: Node = node.args[0]  # type: ignore[assignment]
    value: Tensor = source.meta["val"]
    result: Tensor = node.meta["val"]
    numel = value.numel()
    length = row_length(numel) if isinstance(numel, int) else None
    if length is None:
        return node
    graph = node.graph
    wide = torch.float64 if torch.float64 in (result.dtype, value.dtype) else torch.float32
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: -strides[d])
    context = {k: v for k, v in node.meta.items() if k not in ("val", "eager_input_vals")}

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        new = graph.call_function(op, args, kwargs)
        values, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with value.fake_mode:  # type: ignore[attr-defined]
            new.meta = {**context, "val": op(*values, **named)}
        return new

    with graph.inserting_before(node):
        if order != list(range(value.dim())):
            source = call(aten.permute.default, source, order)
        rows = call(aten.reshape.default, source, [numel // length, length])
        if value.dtype != wide:
            rows = call(torch.ops.prims.convert_element_type.default, rows, wide)
        total = call(aten.sum.default, call(aten.sum.dim_IntList, rows, [1]))
        if "mean" in str(node.target):
            total = call(aten.div.Tensor, total, numel)
        if result.dtype != wide:
            total = call(torch.ops.prims.convert_element_type.default, total, result.dtype)
        if result.dim():
            total = call(aten.view.default, total, list(result.shape))
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return total
