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

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from compile_losses import implementations
from compile_losses.graphs import GIVEN_AS, emit, in_dtype, move_before, replace
from compile_losses.lower.argument_layouts import accept_layouts, leave_unpadded
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.dead_buffers import (
    can_go_before,
    gradient_overwritable,
    overwritable,
    readers_of_buffer,
)
from compile_losses.lower.decision import Decision
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
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.passes import IN_PLACE
from compile_losses.pipeline import Pipeline
from compile_losses.request import Request
from compile_losses.sites import site_of
from compile_losses.torch_internals.ops import named_arguments, schema_of

aten = torch.ops.aten
fused = torch.ops.fused


class LoneGraph(AtenGraph):
    """The graph of a forward or a backward alone.

    Attributes:
        donated: the places of the graph's inputs that it may overwrite.
    """

    def __init__(self, graph: Graph, donated: Collection[int]) -> None:
        super().__init__(graph, Request(frozenset()))
        self.donated = donated


def in_place(graph: Graph, donated: Collection[int] = ()) -> list[Decision]:
    """Replaces functional ops by in-place ones where the overwritten buffer is dead.

    Args:
        donated: the places of the graph's inputs that it may overwrite.
    """
    indexed = LoneGraph(graph, donated)
    _PIPELINE.run(indexed)
    return indexed.decisions


def _overwrite_buffers(graph: LoneGraph) -> None:
    """Writes over buffers, each call in its turn."""
    decisions, donated = graph.decisions, graph.donated
    for node in list(graph.graph.nodes):
        loss, part = fused_call(node) or ("", "")
        if part or node.target is fused.scale.default:
            accept_layouts(node)
            leave_unpadded(node)
        if node.target is fused.scale.default:
            decisions.append(_scale(node, donated))
        elif part == "with_grad" and has_part(loss, "with_grad_"):
            choices = "in place", "not in place"
            decisions.append(_over_input(node, loss, choices, (), _write_with_loss))
        elif part == "backward" and has_part(loss, "with_grad_") and is_elementwise(loss):
            decompose_backward(node)
        elif node.target is fused.cross_entropy_backward.default:
            decisions.append(_over_input(node, *_IN_BACKWARD, donated, _write_cross_entropy))
        elif node.target is fused.row_statistics_backward.default:
            decisions.append(_over_input(node, *_IN_BACKWARD, donated, _write_statistics))


#: What is decided of gradients in the backward. Torch's own ops, fused, overwrite the logits, too.
_IN_BACKWARD = "gradient", ("gradient in place", "gradient in a new buffer")


_PIPELINE: Pipeline[LoneGraph] = Pipeline(
    IN_PLACE, buffers=_overwrite_buffers, markers=drop_markers
)


def _over_input(
    node: Node,
    loss: str,
    choices: tuple[str, str],
    donated: Collection[int],
    write: Callable[[Node, dict[str, Any]], Node | Sequence[Node]],
) -> Decision:
    """A gradient over the input of a loss, which nothing reads any more.

    Args:
        loss, choices: what is decided of which loss: that it is written there, or not.
        write: emits the call that writes it, of the node and its arguments by name; returns what
            takes the node's place.
    """
    named = named_arguments(node)
    input: Node = named["input"]
    written, left = choices
    reason = overwritable(input, {node}, donated, earlier=can_go_before(node))
    if reason is None:
        _put_readers_before(node, input)
        replace(node, write(node, named))
    return Decision(site_of(node), loss, left if reason else written, reason or "")


def _write_with_loss(node: Node, named: dict[str, Any]) -> Sequence[Node]:
    """The loss, with the gradient over its input; returns both."""
    name, _ = fused_call(node) or ("", "")
    target, value, given = (
        fused_op(name, "with_grad_"),
        node.meta["val"][0],
        node.meta.get(GIVEN_AS),
    )
    loss = emit(node, target, node.args, node.kwargs, value=value, given_as=given)
    return loss, named["input"]


def _write_cross_entropy(node: Node, named: dict[str, Any]) -> Node:
    """The gradient from statistics, over the logits; returns these."""
    input: Node = named["input"]
    value = input.meta["val"]
    dim = min(1, value.dim() - 1)
    classes = value.shape[dim]
    target = fused.vocabulary_parallel_gradient_.default
    if not isinstance(classes, int):
        classes = emit(node, aten.sym_size.int, (input, dim), value=classes)
    if named["reduction"] == REDUCTIONS["mean"]:  # which the op in place does not know
        divided = emit(node, aten.div.Tensor, (named["grad_output"], named["total_weight"]))
        named = {**named, "grad_output": divided, "reduction": REDUCTIONS["sum"]}
    named = {**named, "first_class": 0, "classes": classes, "grad_squares": None}
    args = [named[argument.name] for argument in schema_of(target).arguments]
    emit(node, target, args, value=None)
    return input


def _write_statistics(node: Node, named: dict[str, Any]) -> Node:
    emit(node, fused.row_statistics_backward_.default, node.args, value=None)
    input: Node = named["input"]
    return input


def _put_readers_before(node: Node, input: Node) -> None:
    """Moves what else reads a buffer, and comes after a call, to before it."""
    others = [reader for reader in readers_of_buffer(input) if reader is not node]
    moved = move_before(others, node, lambda _: True)
    assert moved, f"{node.name} makes what reads its buffer"


def _scale(node: Node, donated: Collection[int]) -> Decision:
    """Says how a gradient is scaled, and replaces the marker by that."""
    gradient, factor = node.args
    assert isinstance(gradient, Node)
    placeholders = node.graph.find_nodes(op="placeholder")
    index = placeholders.index(gradient) if gradient in placeholders else None
    reason = gradient_overwritable(
        gradient, placeholders, owned=index in donated or SAVED in node.meta
    )
    given, site = node.meta.get(GIVEN_AS), site_of(node)
    if reason is not None:
        choice = "scale in a new buffer"
    elif is_fused_into_readers(node) or (
        # Inductor's loop writes over a donated buffer as well, and torch's ops would read it twice.
        index in donated and not implementations.has_kernels(node.meta["val"].device)
    ):
        choice = "scale fused"
    elif index in donated:
        choice = "scale in place"
        emit(node, fused.scale_.default, (gradient, factor), value=None, given_as=given)
        replace(node, gradient)
        return Decision(site, "gradient", choice)
    else:
        choice = "scale in place unless retained"
        args, value = (gradient, factor), node.meta["val"]
        replace(node, emit(node, fused.scale_saved.default, args, value=value, given_as=given))
        return Decision(site, "gradient", choice)
    replace(node, _multiply(node, gradient, factor))
    return Decision(site, "gradient", choice, reason or "")


def _multiply(node: Node, gradient: Node, factor: Any) -> Node:
    """A multiplication in ATen, which Inductor fuses into whatever reads it."""
    value = node.meta["val"]
    factor = in_dtype(factor, value.dtype, node)
    return emit(node, aten.mul.Tensor, (gradient, factor), value=value)
