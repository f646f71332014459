"""Gradients of elementwise losses, from the backward to the forward of a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.graphs import (
    ancestors,
    change_input,
    copy_nodes,
    emit,
    erase_unused,
    fresh_like,
    replace_uses,
    retrace_views,
)
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import Cost, buffers_read, nbytes_of
from compile_losses.lower.decision import ELEMENTWISE, Decision
from compile_losses.lower.elementwise.find import Part, find_parts
from compile_losses.lower.elementwise.refuse import (
    is_materialised,
    memory_for,
    pays,
    refusal,
    refusal_to_share,
)
from compile_losses.lower.elementwise.rows import Rows, find_sums, rows_to_keep, sum_in_rows
from compile_losses.lower.gradient_in_forward import overwrites_buffers, scale
from compile_losses.lower.known_factors import is_one_number
from compile_losses.sites import site_of
from compile_losses.torch_internals.inductor import get_default_op_list

aten = torch.ops.aten
fused = torch.ops.fused


def move_gradients(graph: AtenGraph) -> None:
    """Moves each gradient of an elementwise loss that may move; says of each loss whether."""
    overwrites: bool | None = None
    for part in find_parts(graph) if graph.request.elementwise else ():
        gradients = [g for g in part.gradients if is_materialised(g) and pays(g)]
        loss = _loss_of(part.of(gradients), graph) if gradients else None
        if loss is None:
            continue
        if overwrites is None:  # before anything is moved
            overwrites = overwrites_buffers(graph)
        decision = _decide(graph, part, gradients, loss, overwrites)
        if decision is not None:
            graph.decisions.append(decision)


def _decide(
    graph: AtenGraph, part: Part, gradients: Sequence[Node], loss: Node, overwrites: bool
) -> Decision | None:
    """Moves gradients of a part, or says why not; None if the part has no loss of elements."""
    moved = part.of(gradients)
    values: list[Tensor] = [gradient.meta["val"] for gradient in gradients]
    sums = find_sums(loss, values, set(ancestors(moved.operands)))
    if not sums:
        return None
    nodes = [loss] if isinstance(sums, str) else [loss, *(found.node for found in sums)]
    buffers: list[Node] | str = (
        refusal(graph, moved, nodes, overwrites)
        or refusal_to_share(moved, part)
        or memory_for(graph, moved)
    )
    rows: Rows | str | None = buffers if isinstance(buffers, str) else None
    if rows is None:
        rows = sums if isinstance(sums, str) else rows_to_keep(sums, moved)
    if isinstance(sums, str) or isinstance(rows, str) or isinstance(buffers, str):
        site, trace = site_of(nodes[-1]), _trace(reversed(nodes))
        return Decision(site, ELEMENTWISE, "gradient in backward", str(rows), trace=trace)
    first = sums[0].node
    site, trace = site_of(first), _trace([first, loss])
    read = sum(buffers_read(moved.nodes, get_default_op_list()).values())
    written = sum(map(nbytes_of, values))
    units = _copy_in_the_forward(moved, loss, rows)
    _move(moved, units, buffers, sum_in_rows(sums, loss), owned=overwrites)
    cost, stock = Cost(read + written, written), Cost(2 * read + written, written)
    return Decision(site, ELEMENTWISE, "gradient in forward", cost=cost, stock=stock, trace=trace)


def _trace(nodes: Iterable[Node]) -> str:
    return next((t for node in nodes if (t := node.meta.get("stack_trace"))), "")


def _loss_of(part: Part, graph: AtenGraph) -> Node | None:
    """The number that the forward returns and that shares sources with the part's operands. Of
    several numbers it is the one with most of the operands among its sources, and then the first
    without a gradient in the forward; None if there is none."""
    tangent: Tensor = part.tangent.meta["val"]
    operands = set(part.operands)
    inputs = {node for node in ancestors(operands) if node.op == "placeholder"}
    found: dict[Node, tuple[int, bool]] = {}
    for node in graph.forward_outputs:
        if node.op != "call_function" or not is_one_number(node):
            continue
        value: Tensor = node.meta["val"]
        cone = set(ancestors([node]))
        if (value.shape, value.dtype) == (tangent.shape, tangent.dtype) and inputs & cone:
            found[node] = len(operands & cone), node.target is not operator.getitem
    return max(found, key=found.__getitem__, default=None)


def _move(
    part: Part, units: Sequence[Node], buffers: Sequence[Node], loss: Node, *, owned: bool
) -> None:
    """Replaces gradients by the same for a tangent of 1, scaled in the backward.

    Args:
        units: those.
        buffers: over which they may be written; empty where they may not.
    """
    kept, of_loss = loss, loss.meta["val"]
    over: Sequence[Node | None] = buffers or [None] * len(units)
    for gradient, unit, buffer in zip(part.gradients, units, over, strict=True):
        values = of_loss, fresh_like(gradient.meta["val"])
        target = fused.keep_gradient.default
        args = (kept, unit) if buffer is None else (kept, unit, buffer)
        both = emit(gradient, target, args, like=loss, value=values)
        kept, saved = (
            emit(gradient, operator.getitem, (both, index), like=loss, value=value)
            for index, value in enumerate(values)
        )
        scaled = scale(gradient, saved, part.tangent, gradient.meta["val"], owned=owned)
        replace_uses(gradient, scaled)
        retrace_views(scaled)
    (output,) = loss.graph.find_nodes(op="output")
    change_input(output, loss, kept)
    erase_unused(reversed(part.nodes))


def _copy_in_the_forward(part: Part, loss: Node, rows: Rows | None) -> list[Node]:
    """Computes the gradients of a part for a tangent of 1.

    Args:
        rows: whose loop they are computed in, or None.
    """
    value: Tensor = part.tangent.meta["val"]
    kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    options = kind | {"layout": torch.strided}
    place = part.nodes[0] if rows is None else rows.sum
    one = emit(place, aten.full.default, ([*value.shape], 1), options, like=loss, value=value)
    copies = {part.tangent: one}
    copy_nodes(part.nodes, copies, lambda node: node if rows is None else rows.sum, loss)
    units = [copies[gradient] for gradient in part.gradients]
    if rows is None:
        return units
    ones: dict[torch.dtype, Node] = {}
    for i, unit in enumerate(units):
        value = unit.meta["val"]
        if value.dtype not in ones:
            kind = {"dtype": value.dtype, "device": value.device}
            with value.fake_mode:  # type: ignore[attr-defined]
                number = torch.empty(rows.shape, **kind)
            target, shape = fused.row_ones.default, ([*rows.shape],)
            ones[value.dtype] = emit(rows.sum, target, shape, kind, like=loss, value=number)
        args = (unit, ones[value.dtype])
        units[i] = emit(rows.sum, aten.mul.Tensor, args, like=loss, value=value)
    return units
