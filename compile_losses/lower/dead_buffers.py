"""Which buffers a call may overwrite: those that are not read, returned or saved after the call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import descendants, is_movable
from compile_losses.lower.cost import hint_of
from compile_losses.lower.fused_calls import fused_call
from compile_losses.lower.node_relations import graph_outputs, storage_of
from compile_losses.op_traits import CASTS, EXTREMES, IN_PLACE, MATMULS, TURNS
from compile_losses.torch_internals.inductor import config, donated_inputs
from compile_losses.torch_internals.ops import tree_leaves

aten = torch.ops.aten

#: Views of a buffer in which no element occurs twice. If Inductor pads the rows of a product, a
#: slice removes the padding.
ROW_VIEWS = (*IN_PLACE, aten.slice.Tensor)
_VIEWS = (*ROW_VIEWS, *TURNS)


def overwritable(
    input: Node,
    readers: set[Node],
    donated: Collection[int] = (),
    earlier: Callable[[Node], bool] = lambda node: False,
    made_by: Collection[Any] = MATMULS,
) -> str | None:
    """Why ``readers``, the last ones to read it, may not overwrite the buffer that ``input`` lies
    in; None where they may.

    Args:
        donated: the places of the graph's inputs that it may overwrite.
        earlier: whether another reader comes before them, or can.
        made_by: the ops of which it is known that an extern kernel writes their result to a buffer
            of its own. That of generated code may be handed over as a copy, and overwriting a copy
            saves nothing.
    """
    producer = _producer(input)
    if producer.op == "placeholder":
        placeholders = producer.graph.find_nodes(op="placeholder")
        if placeholders.index(producer) not in donated:
            return "input is an input of the graph, too"
        if [storage_of(n) for n in placeholders].count(storage_of(producer)) > 1:
            return "two inputs of the graph share its memory"
    elif producer.target not in made_by:
        return f"{producer.name} is not a matrix product"
    if storage_of(input) != storage_of(
        producer
    ):  # Inductor copies a tensor with gaps to reshape it
        return f"input is a copy of {producer.name}"
    if storage_of(producer) in map(storage_of, graph_outputs(producer.graph)):
        return "input is returned, or saved for the backward"
    for user in readers_of_buffer(input):
        if user not in readers and not earlier(user):
            return f"{user.name} reads input, too"
    seen = set(with_views(producer))
    if any(seen.intersection(reader.all_input_nodes) - {input} for reader in readers):
        return "input is read through two views"
    return None


def readers_of_buffer(input: Node) -> list[Node]:
    """The nodes that read the buffer that ``input`` lies in, through any view."""
    views = with_views(_producer(input))
    return [user for view in views for user in view.users if user.target not in _VIEWS]


def _producer(input: Node) -> Node:
    while input.target in _VIEWS:
        input = input.args[0]  # type: ignore[assignment]
    return input


def with_views(producer: Node) -> list[Node]:
    """A buffer and the views of it."""
    found = [producer]
    for each in found:
        found += (user for user in each.users if user.target in _VIEWS)
    return found


def can_go_before(node: Node) -> Callable[[Node], bool]:
    """Whether a reader is before a call, or could be moved there with all its sources."""
    later = set(descendants([node]))
    nodes = list(node.graph.nodes)
    order = {each: index for index, each in enumerate(nodes)}

    def answer(reader: Node) -> bool:
        if reader in later or not is_computed_where_it_stands(reader):
            return False
        return not any(map(_has_effects, nodes[order[node] + 1 : order[reader] + 1]))

    return answer


def is_computed_where_it_stands(node: Node) -> bool:
    """Whether Inductor has read a call's arguments before it goes on to the next call.

    Inductor may compute an op of elements at the place where the result is read, and a write to the
    op's arguments before that place would change the result. The same holds for reductions of few
    numbers, which Inductor unrolls.
    """
    if node.target in CASTS:
        return bool(node.users) and all(map(is_computed_where_it_stands, node.users))
    if fused_call(node) is not None:
        return True
    if node.target not in EXTREMES:
        return False
    source = node.all_input_nodes[0].meta["val"]
    kept = tree_leaves(node.meta["val"])[0]
    return hint_of(source.numel()) > config.unroll_reductions_threshold * hint_of(kept.numel())


def _has_effects(node: Node) -> bool:
    """Whether the order of a call and other calls matters."""
    return node.target is not operator.getitem and not is_movable(node)


def gradient_overwritable(
    gradient: Node, placeholders: Sequence[Node], *, owned: bool
) -> str | None:
    """Why a saved gradient may not be overwritten by its only reader; None where it may.

    Args:
        owned: whether AOTAutograd has donated it, or ``gradient_in_forward`` has said that it may
            be overwritten unless it is retained.
    """
    if gradient.op != "placeholder":
        return "the gradient is not saved by the forward"
    if len(gradient.users) != 1:
        return "the gradient is read again"
    shared = [storage_of(n) for n in placeholders].count(storage_of(gradient)) > 1
    if shared or not owned:
        return "the gradient is not the backward's own"
    return None


def donated_buffers() -> tuple[int, ...]:
    """The placeholders of the backward being compiled that AOTAutograd gives to it for good.

    They depend on whether the first backward retains its graph, and no key of torch's caches holds
    them. So a pass that calls this function has the result in its ``uuid``.
    """
    return donated_inputs()
