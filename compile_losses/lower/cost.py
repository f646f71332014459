"""What a loss costs in memory, as a kernel and as torch's own ops.

Two figures for each choice: the bytes that the loss's forward and backward move, with the writing
and reading back of what stands between the loss and its neighbours; and the most bytes that are
held for it at a time. They are estimates from shapes, made to compare the two choices. Inductor
fuses pointwise ops and small reductions with what reads them, so an argument that such ops compute
costs torch's own ops no more than reading what *they* read, and is never in memory; a kernel is
opaque, and its arguments are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.graphs import ancestors, is_view
from compile_losses.lower.node_relations import storage_of
from compile_losses.op_traits import CASTS, MATMULS, is_pointwise
from compile_losses.sites import megabytes
from compile_losses.torch_internals.inductor import OpTypes
from compile_losses.torch_internals.ops import OpOverload, schema_of
from compile_losses.torch_internals.tensors import size_hint

aten = torch.ops.aten

#: What a symbolic size without a hint counts as, Inductor's own assumption.
_UNKNOWN_SIZE = 8192
#: A backward reads an argument that takes so many times its size to compute again.
_SAVED = 1.5


@dataclass(frozen=True)
class Cost:
    """Bytes moved by forward and backward, and the most bytes held at a time."""

    moved: int
    held: int

    def __str__(self) -> str:
        return f"{megabytes(self.moved)} moved, {megabytes(self.held)} held"


@dataclass(frozen=True)
class Feed:
    """Where an argument of a loss comes from.

    Attributes:
        kind: of what computed it, in words.
        nbytes: its size.
        source: the bytes that a kernel reads which computes it on the way; None where it is in
            memory whatever reads it.
        buffer: the size of the buffer that it lies in.
        stored: whether it occupies memory that is not a graph input's.
    """

    kind: str
    nbytes: int
    source: int | None
    buffer: int
    stored: bool


@dataclass(frozen=True)
class Gradient:
    """A gradient that the backward computes; ``fused`` where a generated kernel consumes it."""

    nbytes: int
    fused: bool


def nbytes_of(value: Any) -> int:
    """The bytes of a fake tensor's distinct elements, symbols by their hints; else 0."""
    if not isinstance(value, Tensor):
        return 0
    numel = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        numel *= 1 if isinstance(stride, int) and stride == 0 else hint_of(size)
    return numel * value.element_size()


def hint_of(size: Any) -> int:
    """A size, of a symbol its hint: asking for its value would specialise the graph."""
    hint = size_hint(size)
    return _UNKNOWN_SIZE if hint is None else hint


def laid_out_alike(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape are walked along the same dimensions, innermost first."""

    def order(value: Tensor, dims: list[int]) -> list[int]:
        return sorted(dims, key=lambda d: hint_of(value.stride(d)))

    dims = [
        d
        for d, (a, b) in enumerate(zip(left.shape, right.shape, strict=True))
        if hint_of(a) > 1
        and hint_of(b) > 1
        and hint_of(left.stride(d))
        and hint_of(right.stride(d))
    ]
    return order(left, dims) == order(right, dims)


def behind_views(node: Any) -> Any:
    """What computed a value, behind views of it and behind the choice of one of several results."""
    passed = (aten._unsafe_view.default, operator.getitem)
    while isinstance(node, Node) and (is_view(node) or node.target in passed):
        node = node.args[0]
    return node


def feed_of(argument: Node, ops: OpTypes) -> Feed:
    """Where an argument of a loss comes from, and what it takes to read it there."""
    producer = behind_views(argument)
    nbytes = nbytes_of(argument.meta["val"])
    kind = _kind(producer, ops)
    if argument is not producer:
        kind = f"view of a {kind}"
    if producer.target is aten.convolution.default:
        # Inductor lays its result out as suits it, and on a GPU adds the bias in generated code: a
        # kernel's argument is one more buffer.
        return Feed(f"{kind}'s bias or layout", nbytes, nbytes, nbytes, True)
    if producer.op != "call_function" or not ops.is_fusible(producer):
        return Feed(kind, nbytes, None, nbytes, producer.op == "call_function")
    buffer = nbytes_of(producer.meta["val"]) or nbytes
    return Feed(kind, nbytes, _source_bytes(producer, ops), buffer, True)


def _kind(producer: Node, ops: OpTypes) -> str:
    """In words, what makes a tensor."""
    target: Any = producer.target
    if producer.op == "placeholder":
        return "graph input"
    if producer.op != "call_function":
        return "constant"
    if target in MATMULS:
        return "matrix product"
    if target is aten.convolution.default:
        return "convolution"
    if target in CASTS:
        return "cast"
    if target is aten.clone.default:
        return "copy"
    if isinstance(target, OpOverload):
        name = schema_of(target).name.partition("::")[2]
        return f"pointwise {name}" if is_pointwise(target) else str(name)
    return str(producer.name)


def _source_bytes(producer: Node, ops: OpTypes) -> int:
    """The size of what a fused kernel reads that computes ``producer``, each buffer once."""
    return sum(buffers_read([producer], ops).values())


def buffers_read(nodes: Iterable[Node], ops: OpTypes) -> dict[Any, int]:
    """What a fused kernel reads that computes ``nodes``: the sizes of the buffers."""
    nodes = list(nodes)
    frontier: dict[Any, int] = {}

    def is_read(source: Node) -> bool:
        node = behind_views(source)
        return not (node.op == "call_function" and ops.is_fusible(node))

    def computed(node: Node) -> Iterator[Node]:
        return (behind_views(n) for n in node.all_input_nodes if not is_read(n))

    seen = set(nodes)
    for node in ancestors(nodes, sources=computed):
        read = (source for source in node.all_input_nodes if source not in seen)
        frontier |= {storage_of(n): nbytes_of(n.meta.get("val")) for n in read if is_read(n)}
        seen.update(node.all_input_nodes)
    return frontier


def kernel_cost(
    feeds: Sequence[Feed],
    loss: int,
    gradients: Sequence[Gradient],
    *,
    in_forward: bool,
    in_place: bool,
) -> Cost:
    """As custom ops.

    Args:
        feeds: the arguments of the size of the loss's input.
        loss: the bytes of the loss that generated kernels read; 0 for a reduced one.
        gradients: what the backward computes; empty without a backward.
        in_forward: whether the gradient is computed with the loss.
        in_place: whether it is written over the input.
    """
    read = sum(feed.nbytes for feed in feeds)
    computed = [feed for feed in feeds if feed.source is not None]
    moved = read + loss + sum((feed.source or 0) + feed.buffer for feed in computed)
    if gradients and not in_forward:
        moved += read
    moved += sum(g.nbytes * (2 if g.fused else 1) for g in gradients)
    held = sum(feed.buffer for feed in feeds if feed.stored)
    # What reads the gradient writes its own result into a new buffer, or over the gradient.
    held += sum(g.nbytes for g in gradients if g.fused or not in_place)
    return Cost(moved, held)


def decomposed_cost(
    feeds: Sequence[Feed], gradients: Sequence[Gradient], passes: int, *, in_place: bool = False
) -> Cost:
    """As torch's own ops, which Inductor fuses with what feeds and what reads them.

    Args:
        feeds, gradients: as for :func:`kernel_cost`.
        passes: how often the forward reads its arguments.
        in_place: whether the first gradient is written over the input.
    """
    moved = held = 0
    for feed in feeds:
        source = feed.nbytes if feed.source is None else feed.source
        moved += passes * source
        # A backward computes its argument again, or reads it where that is cheaper.
        saved = feed.source is not None and source > _SAVED * feed.nbytes
        if gradients:
            moved += 2 * feed.nbytes if saved else source
        if feed.stored and (feed.source is None or (gradients and saved)):
            held += feed.nbytes
    written = [g.nbytes for g in gradients if not g.fused]
    return Cost(moved + sum(written), held + sum(written[in_place:]))
