"""Gradients of elementwise losses, from the backward to the forward of a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses.lower.cost import Cost, buffers_read, nbytes_of
from compile_losses.lower.decision import Decision, log
from compile_losses.lower.elementwise.find import (
    Part,
    cone_of,
    find_parts,
    forward_outputs,
)
from compile_losses.lower.elementwise.refuse import (
    is_materialised,
    pays,
    refusal,
    refusal_to_share,
)
from compile_losses.lower.elementwise.rows import Rows, find_sums, rows_to_keep, sum_in_rows
from compile_losses.lower.gradient_in_forward import (
    SAVED,
    _like,
    _retrace_views,
    _view,
    overwrites_buffers,
)
from compile_losses.lower.known_factors import is_one_number
from compile_losses.sites import site_of
from compile_losses.torch_internals.graphs import EAGER_VALUES
from compile_losses.torch_internals.inductor import get_default_op_list

aten = torch.ops.aten
fused = torch.ops.fused


def move_gradients(graph: Graph) -> list[Decision]:
    """Moves each gradient of an elementwise loss that may move; says of each loss whether."""
    decisions = []
    overwrites: bool | None = None
    for part in find_parts(graph):
        gradients = [g for g in part.gradients if is_materialised(g) and pays(g)]
        loss = _loss_of(part.of(gradients)) if gradients else None
        if loss is None:
            continue
        if overwrites is None:  # before anything is moved
            overwrites = overwrites_buffers(graph)
        decision = _decide(part, gradients, loss, overwrites)
        if decision is None:
            continue
        log.debug("%s", decision)
        decisions.append(decision)
    return decisions


def _decide(part: Part, gradients: Sequence[Node], loss: Node, overwrites: bool) -> Decision | None:
    """Moves gradients of a part, or says why not; None if the part has no loss of elements."""
    moved = part.of(gradients)
    values: list[Tensor] = [gradient.meta["val"] for gradient in gradients]
    sums = find_sums(loss, values, cone_of(moved.operands))
    if not sums:
        return None
    nodes = [loss] if isinstance(sums, str) else [loss, *(found.node for found in sums)]
    rows: Rows | str | None = refusal(moved, nodes, overwrites) or refusal_to_share(moved, part)
    if rows is None:
        rows = sums if isinstance(sums, str) else rows_to_keep(sums, moved)
    if isinstance(sums, str) or isinstance(rows, str):
        site, trace = site_of(nodes[-1]), _trace(reversed(nodes))
        return Decision(site, "elementwise", "gradient in backward", str(rows), trace=trace)
    first = sums[0].node
    site, trace = site_of(first), _trace([first, loss])
    read = sum(buffers_read(moved.nodes, get_default_op_list()).values())
    written = sum(map(nbytes_of, values))
    units = _copy_in_the_forward(moved, loss, rows)
    _move(moved, units, sum_in_rows(sums, loss), owned=overwrites)
    cost, stock = Cost(read + written, written), Cost(2 * read + written, written)
    return Decision(site, "elementwise", "gradient in forward", cost=cost, stock=stock, trace=trace)


def _trace(nodes: Iterable[Node]) -> str:
    return next((t for node in nodes if (t := node.meta.get("stack_trace"))), "")


def _loss_of(part: Part) -> Node | None:
    """The number that the forward returns and that shares sources with the part's operands. Of
    several numbers it is the one with most of the operands among its sources, and then the first
    without a gradient in the forward."""
    tangent: Tensor = part.tangent.meta["val"]
    operands = set(part.operands)
    inputs = {node for node in cone_of(operands) if node.op == "placeholder"}
    found: dict[Node, tuple[int, bool]] = {}
    for node in forward_outputs(part.tangent.graph):
        if node.op != "call_function" or not is_one_number(node):
            continue
        value: Tensor = node.meta["val"]
        cone = cone_of([node])
        if (value.shape, value.dtype) == (tangent.shape, tangent.dtype) and inputs & cone:
            found[node] = len(operands & cone), node.target is not operator.getitem
    return max(found, key=found.__getitem__, default=None)


def _context(loss: Node) -> dict[str, Any]:
    return {k: v for k, v in loss.meta.items() if k not in ("val", EAGER_VALUES)}


def _move(part: Part, units: Iterable[Node], loss: Node, *, owned: bool) -> None:
    """Replaces gradients by the same for a tangent of 1, scaled in the backward."""
    graph = loss.graph
    context = _context(loss)
    kept = loss
    for gradient, unit in zip(part.gradients, units, strict=True):
        uses = list(gradient.users)
        with graph.inserting_before(gradient):
            both = graph.call_function(fused.keep_gradient.default, (kept, unit))
            unit_value = _like(gradient.meta["val"])
            both.meta = {**context, "val": (loss.meta["val"], unit_value)}
            kept = graph.call_function(operator.getitem, (both, 0))
            kept.meta = {**context, "val": loss.meta["val"]}
            saved = graph.call_function(operator.getitem, (both, 1))
            saved.meta = {**context, "val": unit_value}
            scaled = graph.call_function(fused.scale.default, (saved, part.tangent))
            scaled.meta = {**gradient.meta}
            if not owned:  # as in gradient_in_forward
                scaled.meta |= {SAVED: True, "val": _view(unit_value)}
        for user in uses:
            user.replace_input_with(gradient, scaled)
        _retrace_views(scaled)
    (output,) = graph.find_nodes(op="output")
    output.replace_input_with(loss, kept)
    _erase_unused(part.nodes)


def _copy_in_the_forward(part: Part, loss: Node, rows: Rows | None) -> list[Node]:
    """Computes the gradients of a part for a tangent of 1.

    Args:
        rows: whose loop they are computed in, or None.
    """
    graph = loss.graph
    context = _context(loss)

    def call(op: Any, args: tuple[Any, ...], options: dict[str, Any], val: Tensor) -> Node:
        node = graph.call_function(op, args, options)
        node.meta = {**context, "val": val}
        return node

    value: Tensor = part.tangent.meta["val"]
    kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(part.nodes[0] if rows is None else rows.sum):
        one = call(aten.full.default, ([*value.shape], 1), kind | {"layout": torch.strided}, value)
    copies: dict[Any, Node] = {part.tangent: one}
    for node in part.nodes:
        with graph.inserting_before(node if rows is None else rows.sum):
            copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        copies[node].meta = {**context, "val": node.meta["val"]}
    units = [copies[gradient] for gradient in part.gradients]
    if rows is None:
        return units
    ones: dict[torch.dtype, Node] = {}
    with graph.inserting_before(rows.sum):
        for i, unit in enumerate(units):
            value = unit.meta["val"]
            if value.dtype not in ones:
                kind = {"dtype": value.dtype, "device": value.device}
                with value.fake_mode:  # type: ignore[attr-defined]
                    number = torch.empty(rows.shape, **kind)
                ones[value.dtype] = call(fused.row_ones.default, ([*rows.shape],), kind, number)
            units[i] = call(aten.mul.Tensor, (unit, ones[value.dtype]), {}, value)
    return units


def _erase_unused(nodes: Sequence[Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)


def drop_markers(graph: Graph) -> None:
    """Replaces each marker by its arguments, in a graph of a forward alone."""
    for node in graph.find_nodes(op="call_function", target=fused.keep_gradient.default):
        for item in list(node.users):
            item.replace_all_uses_with(node.args[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)
