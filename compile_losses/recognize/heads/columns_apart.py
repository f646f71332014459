"""Products that are read by rows and, transposed, by columns: two products, if memory is preferred.

CLIP's losses read ``logits = scale * a @ b.T`` and ``logits.T``. What reads the second reads
``scale * b @ a.T`` instead, and of a slice of columns these rows. Then each loss finds a linear
layer of its own, whose logits nobody holds, and two losses become one call
(:mod:`compile_losses.recognize.heads.two_way`). Forward and backward have four products in the
place of three, and six if there is no such call. So this is left to the option ``prefer_memory``,
to products of several chunks, and to those that torch could not hold together with their gradient.
If logits are held all the same, it is undone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.device_constants import exceeds_memory
from compile_losses.graphs import emit, erase_unused, replace_uses
from compile_losses.op_traits import CASTS, SCALINGS, TURNS
from compile_losses.ops.two_way_cross_entropy import rows_of_chunk
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, same_sizes
from compile_losses.recognize.graph.memory import may_be_left_out
from compile_losses.recognize.graph.symbolic_tensors import Value, example, put, whole
from compile_losses.recognize.heads.head import NotAbsorbedError
from compile_losses.recognize.heads.logits import Way, followed_by, way_to
from compile_losses.torch_internals.ops import tree_leaves, tree_map
from compile_losses.torch_internals.tensors import FakeTensor, size_hint

#: Ops that do the same to each number of a matrix.
_OF_EACH = (*SCALINGS, *CASTS, aten.alias.default)
#: Of a product that is computed twice. With fewer less memory is saved than the time is worth.
FEWEST_CHUNKS = 4


def read_columns_apart(graph: Graph, *, prefer_memory: bool = True) -> list[Node]:
    """Has what reads a transposed product read the product of its operands in the other order.

    Args:
        prefer_memory: by default any large product is taken, else those alone that do not fit a
            device's memory together with their gradient.

    Returns:
        The products that were there, and those that were put beside them.
    """
    products: list[Node] = []
    replay = AtenReplay()
    _turn_back(graph, replay)
    #: For each matrix that is read by columns, what has its columns as rows.
    made: dict[Node, Node] = {}
    for node in list(graph.nodes):
        source = _transposed(node, replay)
        way = None if source is None else _way_to_product(source, replay)
        if source is None or way is None or not _is_wanted(node, source, way):
            continue
        if not prefer_memory and not _exceeds_memory(example(way.head.node)):
            continue
        if source not in made:
            with torch.set_grad_enabled(example(source).requires_grad):
                product, made[source] = _made_again(source, way)
            products += [way.head.node, product]
        read = made[source]
        if example(source).requires_grad and not example(node).requires_grad:
            read = emit(node, aten.detach.default, (read,))
        replace_uses(node, read)
        erase_unused([node, *way.nodes])
    return products


def _turn_back(graph: Graph, replay: AtenReplay) -> None:
    """Has what is transposed twice read as it was before."""
    for node in list(graph.nodes):
        inner = _transposed(node, replay)
        source = None if inner is None else _transposed(inner, replay)
        if source is None or example(node).requires_grad != example(source).requires_grad:
            continue
        if may_be_left_out(node, [node, source]):
            replace_uses(node, source)
            erase_unused([node])


def _transposed(node: Node, replay: AtenReplay) -> Node | None:
    """The matrix that a node transposes; None if it does anything else."""
    # Most nodes are known by their shapes, and are not replayed.
    if not any(_is_turned(example(source), example(node)) for source in node.all_input_nodes):
        return None
    value = replay.of(node)
    if value.op not in TURNS or value.node is not node:
        return None
    source = value.args[0]
    return source.node if source.whole and _is_turned(source.fake, value.fake) else None


def _is_turned(before: Any, after: Any) -> bool:
    """Whether a matrix has the sizes and strides of another one that is transposed."""
    if type(before) is not FakeTensor or type(after) is not FakeTensor:
        return False
    return (
        before.layout == after.layout == torch.strided
        and before.dim() == after.dim() == 2
        and same_sizes(before.shape[::-1], after.shape)
        and same_sizes(before.stride()[::-1], after.stride())
    )


def _way_to_product(matrix: Node, replay: AtenReplay) -> Way | None:
    """The way from a matrix back to its product, which is scaled or cast in between."""
    try:
        way = way_to(matrix, replay)
    except NotAbsorbedError:
        return None
    if way is None or way.head.bias is not None or way.head.input.fake.dim() != 2:
        return None
    return way if all(_is_cut(step) or is_of_each(step) for step in way.steps) else None


def _is_cut(step: Value) -> bool:
    """Whether an op takes a slice of a matrix's rows or columns."""
    return step.op is aten.slice.Tensor and step.args[0].fake.dim() == 2


def is_of_each(step: Value) -> bool:
    """Whether an op does the same to each number of a matrix, and has no other matrix."""
    matrix = followed_by(step)
    others = [a for a in tree_leaves((step.args, step.kwargs)) if isinstance(a, Value)]
    return (
        step.op in _OF_EACH
        and matrix is not None
        and same_sizes(matrix.fake.shape, step.fake.shape)
        and all(each is matrix or statically_known_true(each.fake.numel() == 1) for each in others)
    )


def _is_wanted(node: Node, source: Node, way: Way) -> bool:
    """Whether a transposed matrix may be made again, and its product is read by rows, too, and
    large. With columns alone it needs no second one."""
    products = (*way.nodes, way.head.node)
    inside = {node, *way.nodes}
    if all(user in inside for made in products for user in made.users):
        return False
    if not _is_large(source, way):
        return False
    operands = [n for made in (node, *products) for n in made.all_input_nodes]
    return may_be_left_out(node, [node, *operands])


def _exceeds_memory(product: torch.Tensor) -> bool:
    """Whether a device has too little memory for a product and its gradient."""
    sizes = [size for size in map(size_hint, product.shape) if size is not None]
    if len(sizes) < product.dim():
        return False
    return exceeds_memory(product.device, 2 * math.prod(sizes) * product.element_size())


def _is_large(source: Node, way: Way) -> bool:
    """Whether a chunk of the rows, and one of the columns that are read, is a small part of a
    product."""
    product, read = example(way.head.node), example(source)
    shapes = (*product.shape, *read.shape[::-1], way.head.input.fake.shape[1])
    sizes = [size for size in map(size_hint, shapes) if size is not None]
    if len(sizes) < len(shapes):
        return False
    *of_both, hidden = sizes

    def chunk(rows: int, classes: int) -> int:
        return rows_of_chunk(rows, hidden, classes, product.dtype, product.device)

    return all(
        FEWEST_CHUNKS * chunk(many, others) <= many for many, others in (of_both[:2], of_both[2:])
    )


def _made_again(source: Node, way: Way) -> tuple[Node, Node]:
    """Puts the product of the operands in the other order, and the steps after it, behind the
    matrix: there gradients are recorded as they were for it.

    Returns:
        The product, and what the last step makes of it.
    """
    behind = partial(emit, source.next, like=source)

    def emitted(argument: Any) -> Any:
        return put(argument, source.next, behind)

    rows, columns = emitted(way.head.weight), emitted(way.head.input)
    product = made = behind(aten.mm.default, (rows, behind(aten.t.default, (columns,))))
    for step in reversed(way.steps):
        if _is_cut(step):
            _, dim, *bounds = (*step.args, 0)[: max(2, len(step.args))]
            made = behind(step.op, (made, 1 - dim % 2, *map(emitted, bounds)))
            continue
        given = {followed_by(step): whole(made)}
        args, kwargs = tree_map(
            lambda a, given=given: emitted(given.get(a, a) if isinstance(a, Value) else a),
            (step.args, step.kwargs),
        )
        made = behind(step.op, args, kwargs)
    return product, made


def are_gone(products: list[Node]) -> bool:
    """Whether nothing of a graph reads these any more."""
    return not any(node.users for node in products)
