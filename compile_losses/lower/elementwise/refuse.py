"""Why the gradients of an elementwise loss stay in the backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses import implementations
from compile_losses.device_constants import constants_of
from compile_losses.graphs import ancestors, is_view
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import buffers_read, nbytes_of
from compile_losses.lower.elementwise.find import Part
from compile_losses.lower.elementwise.over import buffers_for
from compile_losses.lower.gradient_in_forward import is_returned
from compile_losses.lower.node_relations import is_generated, readers_of, storage_of
from compile_losses.op_traits import CASTS, MATMULS
from compile_losses.torch_internals.graphs import RECOMPUTE
from compile_losses.torch_internals.inductor import (
    activation_memory_budget,
    config,
    get_default_op_list,
)
from compile_losses.torch_internals.ops import (
    OpOverload,
    draws_random_numbers,
    schema_of,
)

aten = torch.ops.aten


def pays(gradient: Node) -> bool:
    """Whether a gradient is large, Inductor adds up the loss and writes the gradient in one loop on
    this device, and a factor of 1 leaves the gradient as it is: with a kernel, or on a CPU."""
    value: Tensor = gradient.meta["val"]
    constants = constants_of(value.device)
    if not constants.moves_gradients or nbytes_of(value) < constants.least_gradient_bytes:
        return False
    return value.device.type == "cpu" or implementations.has_kernels(value.device)


def refusal(graph: AtenGraph, part: Part, losses: Iterable[Node], overwrites: bool) -> str | None:
    """Why the gradients of a part stay in the backward, or None; see overwrites_buffers.

    Args:
        losses: the loss, and the sums that it is computed by.
    """
    nodes = (part.tangent, *part.nodes)
    if any(node.meta["val"].dtype == torch.float16 for node in nodes):
        return "a unit gradient would underflow in float16 before the loss scale reaches it"
    if len({node.meta["val"].device for node in nodes}) > 1:
        return "it is computed on several devices"
    if any(n.meta.get(RECOMPUTE) is not None for n in (*losses, *part.nodes, *part.operands)):
        return "inside a checkpointed region, which runs its forward twice"
    if activation_memory_budget() < 1:
        return "with an activation memory budget, for which the forward may run twice"
    cone = set(ancestors(part.operands))
    backward = cone - set(ancestors(graph.forward_outputs))
    if any(draws_random_numbers(node.target) for node in backward):
        return "random numbers are drawn in the backward"
    if _is_written(graph.graph, cone):
        return "an operand is changed in place"
    if (reduction := _reduction_before(part)) is not None:
        return f"its operands are computed by {reduction.name} in the same loop"
    if not overwrites and config.triton.cudagraphs:
        return "a CUDA graph of the backward could no longer run twice (retain_graph)"
    if not overwrites and not all(map(is_returned, part.gradients)):
        return "AOTAutograd would give it to the backward for good, which could not run twice then"
    return None


def memory_for(graph: AtenGraph, moved: Part) -> list[Node] | str:
    """The nodes that gradients are written over; or why they would take memory that torch does not
    take. No nodes where torch takes new memory for them, too: for the difference of two inputs as
    early as here, for a function of one input only in the backward."""
    read = buffers_read(moved.nodes, get_default_op_list())
    held = [*graph.graph.find_nodes(op="placeholder"), *graph.forward_outputs]
    made = read.keys() - set(map(storage_of, held))
    if not made and graph.request.prefer_memory:
        return "memory is preferred, and what it is computed from may be kept in any case"
    if not made:
        return []
    buffers: list[Node] | str = "Inductor's code for this device may not"
    if constants_of(moved.tangent.meta["val"].device).writes_over:
        buffers = buffers_for(graph, moved, made)
    if not isinstance(buffers, str):
        return buffers
    return (
        "torch writes the gradient over what it is computed from, which the forward made; in the "
        f"forward {buffers}"
    )


def refusal_to_share(moved: Part, whole: Part) -> str | None:
    """Why moving some gradients of a part would take more reads or memory than torch does; None if
    it would not."""
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


def _is_written(graph: Graph, cone: set[Node]) -> bool:
    """Whether a graph writes to a source of a value, be it at the end of the graph."""
    storages = {storage_of(node) for node in cone}
    return any(
        storage_of(source) in storages
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
        for source in node.all_input_nodes
    )


def _reduction_before(part: Part) -> Node | None:
    """An op that is no function of elements and that Inductor computes together with a part's
    operands. For such an op the operands are read before, or are in the cache. None if there is
    none."""
    ops = get_default_op_list()

    def is_computed(node: Node) -> bool:
        return node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)

    def is_simple(node: Node) -> bool:
        return is_generated(node) or is_view(node) or node.target in _SIMPLE

    before = ancestors(part.operands, past=lambda node: is_computed(node) and is_simple(node))
    fused = (n for n in before if is_computed(n) and not is_simple(n) and ops.is_fusible(n))
    return next(fused, None)


#: Of elements, but not tagged as pointwise.
_SIMPLE = (
    *(*CASTS, aten.clone.default, aten._unsafe_view.default, aten.full.default),
    *(aten.scalar_tensor.default, aten.arange.start_step, torch.ops.prims.iota.default),
    *(aten.index.Tensor, aten.gather.default),
)

#: Ops whose arguments are written to memory. The list is short on purpose: Inductor may generate
#: code for any other op.
_EXTERN = (*MATMULS, aten.convolution_backward.default)


def is_materialised(gradient: Node) -> bool:
    """Whether a gradient is written to memory whatever Inductor fuses."""
    readers = readers_of(gradient)
    return any(reader.op == "output" or reader.target in _EXTERN for reader in readers)
