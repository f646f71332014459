"""Gradients over dead buffers, in graphs of a forward or a backward alone.

In a forward graph, ``X_with_grad`` may write its gradient over its input when nothing else reads
it; in a backward graph, ``scale`` may work on the unit gradient itself, and then returns at once
when its factor is 1. Where both happen, peak memory is that of a stock graph, which keeps the input
for the backward. A backward that has the logits themselves may write their gradient over them, as
Inductor's kernels do.

Gradients of elementwise losses that stay in the backward are decomposed into torch's own ops: a
kernel moves as many bytes, and Inductor fuses those ops with their neighbours. In a joint graph
they would be cut in two, and the forward would write a difference for the backward to read.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from compile_losses.lower.argument_layouts import accept_layouts, leave_unpadded
from compile_losses.lower.dead_buffers import (
    can_go_before,
    gradient_overwritable,
    overwritable,
    readers_of_buffer,
)
from compile_losses.lower.decision import Decision, log
from compile_losses.lower.decompose import decompose_backward
from compile_losses.lower.elementwise import drop_markers
from compile_losses.lower.fused_calls import (
    fused_call,
    fused_op,
    has_part,
    is_elementwise,
)
from compile_losses.lower.gradient_in_forward import SAVED
from compile_losses.lower.node_relations import is_fused_into_readers
from compile_losses.node_order import later_sources
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.sites import site_of
from compile_losses.torch_internals.graphs import EAGER_VALUES
from compile_losses.torch_internals.ops import named_arguments, schema_of

aten = torch.ops.aten
fused = torch.ops.fused


def in_place(graph: Graph, donated: Collection[int] = ()) -> list[Decision]:
    """Replaces functional ops by in-place ones where the overwritten buffer is dead.

    Args:
        donated: the places of the graph's inputs that it may overwrite.
    """
    decisions = []
    for node in list(graph.nodes):
        loss, part = fused_call(node) or ("", "")
        if part or node.target is fused.scale.default:
            accept_layouts(node)
            leave_unpadded(node)
        if node.target is fused.scale.default:
            decisions.append(_scale(node, donated))
        elif part == "with_grad" and has_part(loss, "with_grad_"):
            decisions.append(_gradient_over_input(node, loss))
        elif part == "backward" and has_part(loss, "with_grad_") and is_elementwise(loss):
            decompose_backward(node)
        elif node.target is fused.cross_entropy_backward.default:
            decisions.append(_gradient_over_saved_input(node, donated))
        elif node.target is fused.row_statistics_backward.default:
            decisions.append(_gradient_of_statistics(node, donated))
    drop_markers(graph)
    for decision in decisions:
        log.debug("%s", decision)
    return decisions


def _gradient_over_input(node: Node, name: str) -> Decision:
    input = node.args[0]
    assert isinstance(input, Node)
    site = site_of(node)
    reason = overwritable(input, {node}, earlier=can_go_before(node))
    if reason is not None:
        return Decision(site, name, "not in place", reason)
    _put_readers_before(node, input)
    graph = node.graph
    with graph.inserting_before(node):
        loss = graph.call_function(fused_op(name, "with_grad_"), node.args, node.kwargs)
        loss.meta = {**node.meta, "val": node.meta["val"][0]}
    for item in list(node.users):
        assert item.target is operator.getitem
        item.replace_all_uses_with(loss if item.args[1] == 0 else input)
        graph.erase_node(item)
    graph.erase_node(node)
    return Decision(site, name, "in place")


def _gradient_over_saved_input(node: Node, donated: Collection[int]) -> Decision:
    """Cross entropy's gradient over the logits, where it is computed in the backward.

    Torch's own ops, fused, write it there, too.
    """
    named = named_arguments(node)
    input: Node = named["input"]
    site = site_of(node)
    reason = overwritable(input, {node}, donated, earlier=can_go_before(node))
    if reason is not None:
        return Decision(site, "gradient", "gradient in a new buffer", reason)
    _put_readers_before(node, input)
    value = input.meta["val"]
    dim = min(1, value.dim() - 1)
    classes = value.shape[dim]
    target = fused.vocabulary_parallel_gradient_.default
    with node.graph.inserting_before(node):
        if not isinstance(classes, int):
            size = node.graph.call_function(aten.sym_size.int, (input, dim))
            size.meta["val"] = classes
            classes = size
        if named["reduction"] == REDUCTIONS["mean"]:  # which the op in place does not know
            factor, total = named["grad_output"], named["total_weight"]
            divided = node.graph.call_function(aten.div.Tensor, (factor, total))
            divided.meta["val"] = factor.meta["val"] / total.meta["val"]
            named |= {"grad_output": divided, "reduction": REDUCTIONS["sum"]}
        named |= {"first_class": 0, "classes": classes, "grad_squares": None}
        args = tuple(named[argument.name] for argument in schema_of(target).arguments)
        written = node.graph.call_function(target, args)
    written.meta = {k: v for k, v in node.meta.items() if k != EAGER_VALUES} | {"val": None}
    node.replace_all_uses_with(input)
    node.graph.erase_node(node)
    return Decision(site, "gradient", "gradient in place")


def _gradient_of_statistics(node: Node, donated: Collection[int]) -> Decision:
    """The gradient of several statistics over the logits, under the same conditions."""
    input: Node = named_arguments(node)["input"]
    site = site_of(node)
    reason = overwritable(input, {node}, donated, earlier=can_go_before(node))
    if reason is not None:
        return Decision(site, "gradient", "gradient in a new buffer", reason)
    _put_readers_before(node, input)
    with node.graph.inserting_before(node):
        written = node.graph.call_function(fused.row_statistics_backward_.default, node.args)
    written.meta = {k: v for k, v in node.meta.items() if k != EAGER_VALUES} | {"val": None}
    node.replace_all_uses_with(input)
    node.graph.erase_node(node)
    return Decision(site, "gradient", "gradient in place")


def _put_readers_before(node: Node, input: Node) -> None:
    """Moves what else reads a buffer, and comes after a call, to before it."""
    others = (reader for reader in readers_of_buffer(input) if reader is not node)
    for each in later_sources(others, node):
        node.prepend(each)


def _scale(node: Node, donated: Collection[int]) -> Decision:
    gradient, factor = node.args
    assert isinstance(gradient, Node)
    graph = node.graph
    placeholders = graph.find_nodes(op="placeholder")
    index = placeholders.index(gradient) if gradient in placeholders else None
    reason = gradient_overwritable(
        gradient, placeholders, owned=index in donated or SAVED in node.meta
    )
    if reason is not None:
        choice = "scale in a new buffer"
    elif is_fused_into_readers(node):
        choice = "scale fused"
    elif index in donated:
        choice = "scale in place"
    else:
        choice = "scale in place unless retained"
    with graph.inserting_before(node):
        if choice == "scale in place":
            scaled = graph.call_function(fused.scale_.default, (gradient, factor))
            scaled.meta = {**node.meta, "val": None}
            node.replace_all_uses_with(gradient)
        elif choice == "scale in place unless retained":
            scaled = graph.call_function(fused.scale_saved.default, (gradient, factor))
            scaled.meta = dict(node.meta)
            node.replace_all_uses_with(scaled)
        else:
            node.replace_all_uses_with(_multiply(graph, node, gradient, factor))
    graph.erase_node(node)
    return Decision(site_of(node), "gradient", choice, reason or "")


def _multiply(graph: Graph, node: Node, gradient: Node, factor: Any) -> Node:
    """A multiplication in ATen, which Inductor fuses into whatever reads it."""
    value, number = node.meta["val"], factor.meta["val"]
    if number.dtype != value.dtype:
        factor = graph.call_function(
            torch.ops.prims.convert_element_type.default, (factor, value.dtype)
        )
        factor.meta["val"] = number.to(value.dtype)
    product = graph.call_function(aten.mul.Tensor, (gradient, factor))
    product.meta = {k: v for k, v in node.meta.items() if k != EAGER_VALUES}
    return product
