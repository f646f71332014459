"""Gradients over dead buffers, in graphs of a forward or a backward alone.

In a forward graph, ``X_with_grad`` may write its gradient over its input when nothing else reads
it; in a backward graph, ``scale`` may work on the unit gradient itself, and then returns at once
when its factor is 1. Where both happen, peak memory is that of a stock graph, which keeps the input
for the backward. A backward that has the logits themselves may write their gradient over them, as
Inductor's kernels do.

Gradients of elementwise losses that were not hoisted are written out in torch's own ops: a kernel
moves as many bytes, and Inductor fuses those ops with what stands around them. In a joint graph
they would be cut in two, and the forward would write a difference for the backward to read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from compile_losses.lower.aliases import (
    depends_on,
    graph_outputs,
    is_fused_into_readers,
    storage_of,
)
from compile_losses.lower.calls import (
    fused_call,
    fused_op,
    has_part,
    is_elementwise,
    named_arguments,
)
from compile_losses.lower.cost import MATMULS, hint_of
from compile_losses.lower.decision import Decision, log
from compile_losses.lower.elementwise import drop_markers
from compile_losses.lower.factor import is_movable, later_sources
from compile_losses.lower.hoist import SAVED
from compile_losses.lower.inline import inline_backward
from compile_losses.ops.checks import CASTS, REDUCTIONS
from compile_losses.sites import site_of
from compile_losses.torch_internals.graphs import DISLIKES_PADDING, EAGER_VALUES
from compile_losses.torch_internals.inductor import config, donated_inputs
from compile_losses.torch_internals.ops import schema_of, tree_leaves
from compile_losses.torch_internals.tensors import FakeTensor

aten = torch.ops.aten
fused = torch.ops.fused

#: Other looks at a buffer in which no element occurs twice. A slice is what is left of a product
#: whose rows Inductor has padded.
_ROW_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.alias.default,
    aten.detach.default,
)
_VIEWS = (*_ROW_VIEWS, aten.permute.default, aten.transpose.int, aten.t.default)

#: What is made of logits for metrics.
_REDUCTIONS = (
    aten.argmax.default,
    aten.argmin.default,
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.topk.default,
)


def in_place(graph: Graph, donated: Collection[int] = ()) -> list[Decision]:
    """Replaces functional ops by in-place ones where the overwritten buffer is dead.

    Args:
        donated: the places of the graph's inputs that it may overwrite.
    """
    decisions = []
    for node in list(graph.nodes):
        loss, part = fused_call(node) or ("", "")
        if part or node.target is fused.scale.default:
            _accept_layouts(node)
            _leave_unpadded(node)
        if node.target is fused.scale.default:
            decisions.append(_scale(node, donated))
        elif part == "with_grad" and has_part(loss, "with_grad_"):
            decisions.append(_gradient_over_input(node, loss))
        elif part == "backward" and has_part(loss, "with_grad_") and is_elementwise(loss):
            inline_backward(node)
        elif node.target is fused.cross_entropy_backward.default:
            decisions.append(_gradient_over_saved_input(node, donated))
    drop_markers(graph)
    for decision in decisions:
        log.debug("%s", decision)
    return decisions


def _accept_layouts(node: Node) -> None:
    """Lets a call take its arguments in the layout that Inductor gives them.

    Inductor brings the arguments of a custom op to the strides that they had in eager mode, by a
    copy where it laid them out otherwise, as it pads the rows of matrix products. The kernels take
    any strides, and gaps between rows leave the strides of their results as they are.
    """
    if EAGER_VALUES not in node.meta:
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    (first, *_) = (value for value in args if isinstance(value, FakeTensor))
    with first.fake_mode:
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    results, expected = (
        [t.stride() for t in tree_leaves(tree) if isinstance(t, Tensor)]
        for tree in (value, node.meta["val"])
    )
    if not all(isinstance(s, int) for s in tree_leaves((results, expected))):
        return
    if results == expected and all(map(_has_rows, node.all_input_nodes)):
        del node.meta[EAGER_VALUES]


def _row_views(node: Node) -> list[Node]:
    """A tensor, what it is a view of by rows, what that is one of, and so on."""
    looks = [node]
    while looks[-1].target in _ROW_VIEWS:
        looks.append(looks[-1].args[0])  # type: ignore[arg-type]
    return looks


def _has_rows(node: Node) -> bool:
    """Whether a tensor has its layout already, or rows that Inductor may pad but not permute."""
    source = _row_views(node)[-1]
    return source.op == "placeholder" or source.target in MATMULS


def _leave_unpadded(node: Node) -> None:
    """Has Inductor lay out products with a bias, of which a call reads a slice, without gaps.

    Where rows are padded, a GPU's library does not add the bias as it writes the product, but
    copies it over all of the result first, which takes as long as the loss itself.
    """
    for look in node.all_input_nodes:
        looks = _row_views(look)
        if looks[-1].target is aten.addmm.default:
            for each in looks:
                each.meta[DISLIKES_PADDING] = True  # which Inductor asks for


def _gradient_over_input(node: Node, name: str) -> Decision:
    input = node.args[0]
    assert isinstance(input, Node)
    site = site_of(node)
    reason = overwritable(input, {node}, earlier=_can_go_before(node))
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
    """Cross entropy's gradient where it was not hoisted, over the logits.

    Torch's own ops, fused, write it there, too.
    """
    named = named_arguments(node)
    input: Node = named["input"]
    site = site_of(node)
    reason = overwritable(input, {node}, donated, earlier=_can_go_before(node))
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
        named |= {"first_class": 0, "classes": classes}
        args = tuple(named[argument.name] for argument in schema_of(target).arguments)
        written = node.graph.call_function(target, args)
    written.meta = {k: v for k, v in node.meta.items() if k != EAGER_VALUES} | {"val": None}
    node.replace_all_uses_with(input)
    node.graph.erase_node(node)
    return Decision(site, "gradient", "gradient in place")


def overwritable(
    input: Node,
    readers: set[Node],
    donated: Collection[int] = (),
    earlier: Callable[[Node], bool] = lambda node: False,
) -> str | None:
    """Why ``readers``, the last ones to read it, may not overwrite the buffer that ``input`` lies
    in; None where they may.

    Args:
        donated: the places of the graph's inputs that it may overwrite.
        earlier: whether another reader comes before them, or can.
    """
    producer = _producer(input)
    if producer.op == "placeholder":
        placeholders = producer.graph.find_nodes(op="placeholder")
        if placeholders.index(producer) not in donated:
            return "input is an input of the graph, too"
        if [storage_of(n) for n in placeholders].count(storage_of(producer)) > 1:
            return "two inputs of the graph share its memory"
    # A product is an extern kernel's, and surely a buffer of its own. What Inductor generates it
    # may hand over as a copy, which would be overwritten in vain.
    elif producer.target not in MATMULS:
        return f"{producer.name} is not a matrix product"
    if storage_of(input) != storage_of(producer):  # Inductor reshapes what has gaps by a copy
        return f"input is a copy of {producer.name}"
    if storage_of(producer) in map(storage_of, graph_outputs(producer.graph)):
        return "input is returned, or saved for the backward"
    for user in readers_of_buffer(input):
        if user not in readers and not earlier(user):
            return f"{user.name} reads input, too"
    seen = set(_looks(producer))
    if any(seen.intersection(reader.all_input_nodes) - {input} for reader in readers):
        return "input is read through two views"
    return None


def readers_of_buffer(input: Node) -> list[Node]:
    """What reads the buffer that ``input`` lies in, through whatever view."""
    looks = _looks(_producer(input))
    return [user for look in looks for user in look.users if user.target not in _VIEWS]


def _producer(input: Node) -> Node:
    while input.target in _VIEWS:
        input = input.args[0]  # type: ignore[assignment]
    return input


def _looks(producer: Node) -> list[Node]:
    """A buffer and the views of it."""
    looks = [producer]
    for look in looks:
        looks += (user for user in look.users if user.target in _VIEWS)
    return looks


def _can_go_before(node: Node) -> Callable[[Node], bool]:
    """Whether a reader is before a call, or could be, with all that it is computed from."""
    later = depends_on(node)
    nodes = list(node.graph.nodes)
    order = {each: index for index, each in enumerate(nodes)}

    def answer(reader: Node) -> bool:
        if reader in later or not is_computed_where_it_stands(reader):
            return False
        return not any(map(_has_effects, nodes[order[node] + 1 : order[reader] + 1]))

    return answer


def is_computed_where_it_stands(node: Node) -> bool:
    """Whether Inductor has read a call's arguments before it goes on to the next call.

    Ops of elements it may compute where their result is read, and then with what was written to
    their arguments in between. So it does with reductions of few numbers, which it unrolls.
    """
    if node.target in CASTS:
        return bool(node.users) and all(map(is_computed_where_it_stands, node.users))
    if fused_call(node) is not None:
        return True
    if node.target not in _REDUCTIONS:
        return False
    source = node.all_input_nodes[0].meta["val"]
    kept = tree_leaves(node.meta["val"])[0]
    return hint_of(source.numel()) > config.unroll_reductions_threshold * hint_of(kept.numel())


def _has_effects(node: Node) -> bool:
    """Whether it matters what comes before a call, and what after it."""
    return node.target is not operator.getitem and not is_movable(node)


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
    reason = _kept(gradient, placeholders, owned=index in donated or SAVED in node.meta)
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


def _kept(gradient: Node, placeholders: Sequence[Node], *, owned: bool) -> str | None:
    """Why a saved gradient may not be overwritten by its only reader; None where it may.

    Args:
        owned: whether AOTAutograd has donated it, or ``hoist`` has said that it may be overwritten
            unless it is retained.
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

    Which they are depends on whether the first backward retains its graph, and is in no key of
    torch's caches: a pass that asks has them in its ``uuid``.
    """
    return donated_inputs()
