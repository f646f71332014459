"""The memory of gradients whose operands the forward made: they are written over these.

Stock writes the gradient over the operand in the backward::

    forward:  y = x @ w; loss = sum(f(y, t))                    saved: y
    backward: y <- grad_loss * df_dy(y, t)

The forward can do so as soon as it has read the operand for the loss, in the same loop::

    forward:  y = x @ w; loss, y <- sum(f(y, t)), df_dy(y, t)   saved: y
    backward: y <- scale(y, grad_loss)

``keep_gradient`` holds the operand in the joint graph. In the forward's graph the write takes the
marker's place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.graphs import emit, move_before, replace
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import behind_views
from compile_losses.lower.dead_buffers import overwritable, readers_of_buffer, with_views
from compile_losses.lower.elementwise.find import Part
from compile_losses.lower.node_relations import is_generated, storage_of
from compile_losses.op_traits import CASTS, MATMULS, MEANS, TOTALS
from compile_losses.ops.checks import same_shape
from compile_losses.torch_internals.inductor import store_in_place

aten = torch.ops.aten
fused = torch.ops.fused

_WRITE = fused.write_over.default
_MARKER = fused.keep_gradient.default
_OF_ELEMENTS = (*CASTS, aten.clone.default)
_SUMS = (*TOTALS, *MEANS)


def buffers_for(graph: AtenGraph, part: Part, read: Iterable[Any]) -> list[Node] | str:
    """For each gradient of a part the node of the forward over which it may be written; or why one
    has none.

    Args:
        read: the memory that the gradients are computed from.
    """
    made = set(read)
    free: list[Node] = []
    refused = "none of it is a matrix product or a convolution"
    for node in graph.graph.nodes:
        if node in graph.backward or storage_of(node) not in made or not _is_made(node):
            continue
        others = _readers(node, graph.backward, set(part.nodes)).others
        if others:
            refused = f"{others[0].name} reads {node.name}, too"
        else:
            free += with_views(node)
    found: list[Node] = []
    for gradient in part.gradients:
        taken = set(map(storage_of, found))
        buffer = next((n for n in free if storage_of(n) not in taken and _fits(n, gradient)), None)
        if buffer is None:
            return refused if not free else f"none of it has the layout of {gradient.name}"
        found.append(buffer)
    return found


def _is_made(node: Node) -> bool:
    """Whether an extern kernel writes a node's value to memory of its own. The result of generated
    code may never be in memory; such code adds the bias of a convolution on a GPU."""
    if node.target is aten.convolution.default:
        return node.args[2] is None or node.meta["val"].device.type == "cpu"
    return node.target in MATMULS


@dataclass
class _Readers:
    """What reads a value.

    Attributes:
        elements: the nodes that Inductor computes of it element by element.
        sums: the sums of these.
        others: any other node.
    """

    elements: dict[Node, None] = field(default_factory=dict)
    sums: dict[Node, None] = field(default_factory=dict)
    others: list[Node] = field(default_factory=list)


def _readers(made: Node, backward: Collection[Node] = (), own: Collection[Node] = ()) -> _Readers:
    """What needs a value besides the gradient that is written over it. A node of the backward is
    another reader: it may compute other values of the value again. Writes of other gradients and
    their markers are none: these gradients are among the elements.

    Args:
        own: the nodes of the backward that become the gradient.
    """
    found = _Readers()
    work = [made]
    while work:
        for reader in readers_of_buffer(work.pop()):
            if reader in own or reader.op == "output" or reader.target in (_WRITE, _MARKER):
                continue
            if reader in backward:
                found.others.append(reader)
            elif reader.target in _SUMS:
                found.sums[reader] = None
            elif not is_generated(reader) and reader.target not in _OF_ELEMENTS:
                found.others.append(reader)
            elif reader not in found.elements:
                found.elements[reader] = None
                work.append(reader)
    return found


def _fits(buffer: Node, gradient: Node) -> bool:
    """Whether a gradient has the elements of a buffer, in their places."""
    into: Tensor = buffer.meta["val"]
    value: Tensor = gradient.meta["val"]
    return (
        into.dtype == value.dtype
        and same_shape(into.shape, value.shape)
        and into.stride() == value.stride()
    )


def drop_markers(graph: AtenGraph) -> None:
    """Replaces each marker by its arguments, in a graph of a forward alone. A gradient that has a
    buffer is written over it, if it still may."""
    for node in graph.graph.find_nodes(op="call_function", target=_MARKER):
        loss, gradient, *rest = node.args
        if rest and _write_over(rest[0], gradient, node):
            gradient = rest[0]
        replace(node, (loss, gradient))


def _write_over(buffer: Any, gradient: Any, marker: Node) -> bool:
    """Writes a gradient over a buffer if nothing reads the buffer afterwards; whether it did.

    Inductor ends a loop over rows before it writes over what a sum in that loop reads. So the write
    comes before the sums, and what they add up is computed before the write.
    """
    made = behind_views(buffer)
    readers = _readers(made)
    last = set(readers_of_buffer(buffer))
    if readers.others or overwritable(buffer, last, made_by=[made.target]) is not None:
        return False
    order = {node: place for place, node in enumerate(marker.graph.nodes)}
    place = min([*readers.sums, marker], key=order.__getitem__)
    if not move_before([*readers.elements, gradient], place):
        return False
    store_in_place(_WRITE)
    emit(place, _WRITE, (buffer, gradient), like=marker, value=None)
    return True
