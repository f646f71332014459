"""Gradients of elementwise losses, from the backward to the forward of a joint graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.partitioners import get_default_op_list
from torch._inductor import config
from torch.fx import Graph, Node

from compile_losses.lower.aliases import (
    depends_on_tangents,
    graph_outputs,
    is_generated,
    is_view,
    readers_of,
    storage_of,
)
from compile_losses.lower.cost import CASTS, MATMULS, nbytes_of
from compile_losses.lower.decision import Decision, log
from compile_losses.lower.elementwise.find import Part, cone_of, find_parts, is_one_number
from compile_losses.lower.elementwise.rows import sum_in_rows
from compile_losses.lower.hoist import SAVED, _like, _view, overwrites_buffers

aten = torch.ops.aten
fused = torch.ops.fused

#: In bytes of the largest gradient: with fewer, calls take longer than one read saves.
SMALL = 1 << 20
#: Whether to do it on a CPU, where Inductor adds up and writes a gradient in two loops.
ON_CPU = False


def move_gradients(graph: Graph) -> list[Decision]:
    """Moves every gradient of an elementwise loss that may be; says of each loss whether."""
    parts = find_parts(graph)
    if not parts:
        return []
    decisions = []
    overwrites = overwrites_buffers(graph)
    for part in parts:
        loss = _loss_of(part)
        reason = refusal(part, loss, overwrites)
        if reason is None:
            assert loss is not None
            _move(part, sum_in_rows(part, loss), owned=overwrites)
            decision = Decision(None, "elementwise", "gradient in forward")
        else:
            decision = Decision(None, "elementwise", "gradient in backward", reason)
        log.debug("%s", decision)
        decisions.append(decision)
    return decisions


def refusal(part: Part, loss: Node | None, overwrites: bool) -> str | None:
    """Why the gradients of a part stay in the backward, or None."""
    values: list[Tensor] = [gradient.meta["val"] for gradient in part.gradients]
    if loss is None:
        return "the forward returns no loss of the same operands"
    if max(map(nbytes_of, values)) < SMALL:
        return "it is small, its calls would take longer than they save"
    device = values[0].device
    if not _has_scale(device):
        return f"there is no kernel for {device.type}"
    if device.type == "cpu" and not ON_CPU:
        return "on a CPU Inductor adds up and writes a gradient in two loops"
    if any(node.meta["val"].dtype == torch.float16 for node in (part.tangent, *part.nodes)):
        return "a unit gradient would underflow in float16 before the loss scale reaches it"
    cone = cone_of(part.operands)
    if any(n.meta.get("recompute") is not None for n in (*part.nodes, *part.operands)):
        return "inside a checkpointed region, which runs its forward twice"
    if any(map(_is_random, cone - cone_of([loss]))):
        return "random numbers are drawn in the backward"
    if _is_written(part.tangent.graph, cone):
        return "an operand is changed in place"
    if (reduction := _reduction_before(part)) is not None:
        return f"its operands are computed by {reduction.name} in the same loop"
    if not all(map(_is_materialised, part.gradients)):
        return "Inductor computes it in what reads it"
    if not overwrites and config.triton.cudagraphs:
        return "a CUDA graph of the backward could no longer run twice (retain_graph)"
    return None


def _has_scale(device: torch.device) -> bool:
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("fused::scale_", key)


def _is_random(node: Node) -> bool:
    target: Any = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def _is_written(graph: Graph, cone: set[Node]) -> bool:
    """Whether a graph writes to what a value is computed from, be it at its end."""
    storages = {storage_of(node) for node in cone}
    return any(
        storage_of(source) in storages
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for source in node.all_input_nodes
    )


def _reduction_before(part: Part) -> Node | None:
    """What else than a function of elements Inductor would compute together with a part's operands:
    operands are then read for that before, or lie where they are read last."""
    ops = get_default_op_list()
    seen = set(part.operands)
    work = list(part.operands)
    while work:
        node = work.pop()
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if not is_generated(node) and not is_view(node) and node.target not in _SIMPLE:
            if ops.is_fusible(node):
                return node
            continue
        sources = [source for source in node.all_input_nodes if source not in seen]
        seen.update(sources)
        work += sources
    return None


#: Of elements, but not tagged as pointwise.
_SIMPLE = (
    *CASTS,
    aten.clone.default,
    aten._unsafe_view.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.arange.start_step,
    torch.ops.prims.iota.default,
    aten.index.Tensor,
    aten.gather.default,
)

#: What a gradient is written to memory for. Not all that Inductor has no code for, lest something
#: is taken for such an op that it does generate.
_EXTERN = (*MATMULS, aten.convolution_backward.default)


def _is_materialised(gradient: Node) -> bool:
    """Whether a gradient is written to memory whatever Inductor fuses."""
    readers = readers_of(gradient)
    return any(reader.op == "output" or reader.target in _EXTERN for reader in readers)


def _loss_of(part: Part) -> Node | None:
    """A number that the forward returns and computes from what the part's operands come from."""
    graph = part.tangent.graph
    backward = depends_on_tangents(graph)
    tangent: Tensor = part.tangent.meta["val"]
    inputs = {n for n in cone_of(part.operands) if n.op == "placeholder"}
    for node in graph_outputs(graph):
        if node in backward or node.op != "call_function" or not is_one_number(node):
            continue
        value: Tensor = node.meta["val"]
        alike = (value.shape, value.dtype) == (tangent.shape, tangent.dtype)
        if alike and inputs & cone_of([node]):
            return node
    return None


def _move(part: Part, loss: Node, *, owned: bool) -> None:
    """Computes the gradients in the forward for a tangent of 1, and scales them in the backward."""
    graph = loss.graph
    unit_of = _copy_in_the_forward(part)
    kept = loss
    for gradient in part.gradients:
        unit = unit_of[gradient]
        uses = list(gradient.users)
        with graph.inserting_before(gradient):
            both = graph.call_function(fused.keep_gradient.default, (kept, unit))
            unit_value = _like(gradient.meta["val"])
            context = {k: v for k, v in loss.meta.items() if k != "eager_input_vals"}
            both.meta = {**context, "val": (loss.meta["val"], unit_value)}
            kept = graph.call_function(operator.getitem, (both, 0))
            kept.meta = dict(context)
            saved = graph.call_function(operator.getitem, (both, 1))
            saved.meta = {**context, "val": unit_value}
            scaled = graph.call_function(fused.scale.default, (saved, part.tangent))
            scaled.meta = {**gradient.meta}
            if not owned:
                scaled.meta |= {SAVED: True, "val": _view(unit_value)}
        for user in uses:
            user.replace_input_with(gradient, scaled)
    (output,) = graph.find_nodes(op="output")
    output.replace_input_with(loss, kept)
    for node in reversed(part.nodes):
        if not node.users:
            graph.erase_node(node)


def _copy_in_the_forward(part: Part) -> dict[Node, Node]:
    """Copies a part for a tangent of 1; where each of its nodes now is computed."""
    graph = part.tangent.graph
    value: Tensor = part.tangent.meta["val"]
    first = part.nodes[0]
    with graph.inserting_before(first):
        options: dict[str, Any] = {
            "dtype": value.dtype,
            "device": value.device,
            "layout": torch.strided,
        }
        one = graph.call_function(aten.full.default, (list(value.shape), 1), options)
        one.meta = {**{k: v for k, v in first.meta.items() if k != "val"}, "val": value}
    copies: dict[Any, Node] = {part.tangent: one}
    for node in part.nodes:
        with graph.inserting_before(node):
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
        copies[node] = copy
    for node in reversed(part.nodes):  # what only a gradient that stays is computed by
        copy = copies[node]
        if not copy.users and node not in part.gradients:
            graph.erase_node(copy)
    return copies


def drop_markers(graph: Graph) -> None:
    """Puts in the place of markers what they return copies of, in a graph of a forward alone."""
    for node in graph.find_nodes(op="call_function", target=fused.keep_gradient.default):
        for item in list(node.users):
            item.replace_all_uses_with(node.args[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)
