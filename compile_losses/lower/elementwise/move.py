"""Gradients of elementwise losses, from the backward to the forward of a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
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
from compile_losses.lower.cost import CASTS, MATMULS, Cost, buffers_read, nbytes_of
from compile_losses.lower.decision import Decision, log, site_of
from compile_losses.lower.elementwise.find import Part, cone_of, find_parts, is_one_number
from compile_losses.lower.elementwise.rows import find_sums, sum_in_rows
from compile_losses.lower.hoist import (
    SAVED,
    _like,
    _retrace_views,
    _view,
    is_returned,
    overwrites_buffers,
)

aten = torch.ops.aten
fused = torch.ops.fused

#: In bytes of the largest gradient: with fewer, calls take longer than one read saves.
SMALL = 1 << 20
#: Whether to do it on a CPU, where Inductor adds up and writes a gradient in two loops.
ON_CPU = False


def move_gradients(graph: Graph) -> list[Decision]:
    """Moves every gradient of an elementwise loss that may be; says of each loss whether."""
    decisions = []
    parts = find_parts(graph)
    overwrites = bool(parts) and overwrites_buffers(graph)
    for part in parts:
        decision = _decide(part, overwrites)
        if decision is not None:
            log.debug("%s", decision)
            decisions.append(decision)
    return decisions


def _decide(part: Part, overwrites: bool) -> Decision | None:
    """Moves the gradients of a part, or says why not; None where that is nobody's concern."""
    materialised = [gradient for gradient in part.gradients if _is_materialised(gradient)]
    moved = part.of(materialised)
    loss = _loss_of(moved)
    if not materialised or loss is None or is_small(moved) or not pays_on(moved):
        return None
    values: list[Tensor] = [gradient.meta["val"] for gradient in materialised]
    sums = find_sums(loss, values, cone_of(moved.operands))
    nodes = [loss] if isinstance(sums, str) else [loss, *(found.node for found in sums)]
    reason = refusal(moved, nodes, overwrites) or refusal_to_share(moved, part)
    if isinstance(sums, str) or reason is not None:
        why = reason or str(sums)
        site, trace = site_of(nodes[-1]), _trace(reversed(nodes))
        return Decision(site, "elementwise", "gradient in backward", why, trace=trace)
    first = sums[0].node
    site, trace = site_of(first), _trace([first, loss])
    read = sum(buffers_read(moved.nodes, get_default_op_list()).values())
    written = sum(map(nbytes_of, values))
    _move(moved, sum_in_rows(sums, loss), owned=overwrites)
    cost, stock = Cost(read + written, written), Cost(2 * read + written, written)
    return Decision(site, "elementwise", "gradient in forward", cost=cost, stock=stock, trace=trace)


def _trace(nodes: Iterable[Node]) -> str:
    return next((t for node in nodes if (t := node.meta.get("stack_trace"))), "")


def is_small(part: Part) -> bool:
    """Whether calls would take longer than they save."""
    return max(nbytes_of(gradient.meta["val"]) for gradient in part.gradients) < SMALL


def pays_on(part: Part) -> bool:
    """Whether the device is one on which Inductor adds up and writes a gradient in one loop, and
    for which there is a kernel that scales it."""
    device: torch.device = part.gradients[0].meta["val"].device
    if device.type == "cpu" and not ON_CPU:
        return False
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("fused::scale_", key)


def refusal(part: Part, losses: Iterable[Node], overwrites: bool) -> str | None:
    """Why the gradients of a part stay in the backward, or None; see overwrites_buffers.

    Args:
        losses: the loss, and the sums that it is computed by.
    """
    nodes = (part.tangent, *part.nodes)
    if any(node.meta["val"].dtype == torch.float16 for node in nodes):
        return "a unit gradient would underflow in float16 before the loss scale reaches it"
    if len({node.meta["val"].device for node in nodes}) > 1:
        return "it is computed on several devices"
    if any(n.meta.get("recompute") is not None for n in (*losses, *part.nodes, *part.operands)):
        return "inside a checkpointed region, which runs its forward twice"
    if functorch_config.activation_memory_budget < 1:
        return "with an activation memory budget, for which the forward may run twice"
    cone = cone_of(part.operands)
    if any(map(_is_random, cone - cone_of(_values(part.tangent.graph)))):
        return "random numbers are drawn in the backward"
    if _is_written(part.tangent.graph, cone):
        return "an operand is changed in place"
    if (reduction := _reduction_before(part)) is not None:
        return f"its operands are computed by {reduction.name} in the same loop"
    if not overwrites and config.triton.cudagraphs:
        return "a CUDA graph of the backward could no longer run twice (retain_graph)"
    if not overwrites and not all(map(is_returned, part.gradients)):
        return "AOTAutograd would give it to the backward for good, which could not run twice then"
    return None


def refusal_to_share(moved: Part, whole: Part) -> str | None:
    """Why moving some gradients of a part would take more reads or memory than torch does."""
    ops = get_default_op_list()
    read = buffers_read(moved.nodes, ops)
    written = sum(nbytes_of(gradient.meta["val"]) for gradient in moved.gradients)
    if written > sum(read.values()):
        return "the gradients take more memory than what they are computed from"
    others = whole.of(gradient for gradient in whole.gradients if gradient not in moved.gradients)
    own = {moved.tangent, *moved.nodes}
    again = buffers_read([node for node in others.nodes if node not in own], ops)
    shared = sum(size for buffer, size in again.items() if buffer in read)
    if 2 * shared > written:
        return "another gradient, which is computed in what reads it, reads the same operands"
    return None


def _values(graph: Graph) -> list[Node]:
    """What the forward returns."""
    backward = depends_on_tangents(graph)
    return [node for node in graph_outputs(graph) if node not in backward]


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
    """The number that the forward returns and computes from what the part's operands come from; of
    several that which has most operands of the part in common, and then the first without a
    gradient in the forward."""
    tangent: Tensor = part.tangent.meta["val"]
    operands = set(part.operands)
    inputs = {node for node in cone_of(operands) if node.op == "placeholder"}
    found: dict[Node, tuple[int, bool]] = {}
    for node in _values(part.tangent.graph):
        if node.op != "call_function" or not is_one_number(node):
            continue
        value: Tensor = node.meta["val"]
        cone = cone_of([node])
        if (value.shape, value.dtype) == (tangent.shape, tangent.dtype) and inputs & cone:
            found[node] = len(operands & cone), node.target is not operator.getitem
    return max(found, key=found.__getitem__, default=None)


def _move(part: Part, loss: Node, *, owned: bool) -> None:
    """Computes the gradients in the forward for a tangent of 1, and scales them in the backward."""
    graph = loss.graph
    context = {k: v for k, v in loss.meta.items() if k not in ("val", "eager_input_vals")}
    unit_of = _copy_in_the_forward(part, context)
    kept = loss
    for gradient in part.gradients:
        unit = unit_of[gradient]
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
            if not owned:  # as in hoist
                scaled.meta |= {SAVED: True, "val": _view(unit_value)}
        for user in uses:
            user.replace_input_with(gradient, scaled)
        _retrace_views(scaled)
    (output,) = graph.find_nodes(op="output")
    output.replace_input_with(loss, kept)
    _erase_unused(part.nodes)


def _copy_in_the_forward(part: Part, context: dict[str, Any]) -> dict[Node, Node]:
    """Copies a part for a tangent of 1; where each of its nodes now is computed."""
    graph = part.tangent.graph
    value: Tensor = part.tangent.meta["val"]
    options: dict[str, Any] = {
        "dtype": value.dtype,
        "device": value.device,
        "layout": torch.strided,
    }
    with graph.inserting_before(part.nodes[0]):
        one = graph.call_function(aten.full.default, (list(value.shape), 1), options)
    one.meta = {**context, "val": value}
    copies: dict[Any, Node] = {part.tangent: one}
    for node in part.nodes:
        with graph.inserting_before(node):
            copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        copies[node].meta = {**context, "val": node.meta["val"]}
    return copies


def _erase_unused(nodes: Sequence[Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)


def drop_markers(graph: Graph) -> None:
    """Puts in the place of markers what they return copies of, in a graph of a forward alone."""
    for node in graph.find_nodes(op="call_function", target=fused.keep_gradient.default):
        for item in list(node.users):
            item.replace_all_uses_with(node.args[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)
