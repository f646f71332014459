"""A slice of a product's rows goes before the product.

A language model's loss often reads ``logits[:, :-1]``. What it leaves out need not be computed, and
what the product makes then is read whole, as a region asks for. Gradients come back as a slice that
is put into zeros, and only the products' results are put there.

Each change is right by itself. If a region is not taken afterwards, the product has fewer rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import descendants, emit, erase_unused, replace_uses
from compile_losses.lower.node_relations import filled_with, is_turned_matrix
from compile_losses.lower.regions.steps import head_of, same
from compile_losses.op_traits import CASTS, RESHAPES
from compile_losses.torch_internals.ops import named_arguments

aten = torch.ops.aten


@dataclass(frozen=True)
class Slice:
    """Some of the rows of logits, [*sizes, classes].

    Attributes:
        sizes: as arguments of a view; None if these are a matrix's rows.
        dim: along which of them.
        start, end: as arguments of a slice.
        length: how many it takes along that; -1 if that is a symbol.
    """

    sizes: tuple[Any, ...] | None
    dim: int
    start: Any
    end: Any
    length: int

    @property
    def is_whole(self) -> bool:
        """Whether it takes all, as ``logits[:, :-1]`` does of its first dimension. Torch leaves out
        such a slice where the size is known."""
        return self.start in (0, None) and self.end in (sys.maxsize, None)

    def rows_of(self, place: Node, source: Node) -> Node:
        """Those of another matrix, [rows, features], as a matrix."""
        if self.sizes is None:
            return emit(place, aten.slice.Tensor, (source, 0, self.start, self.end))
        width = source.meta["val"].shape[1]
        shaped = emit(place, aten.view.default, (source, [*self.sizes, width]))
        part = emit(place, aten.slice.Tensor, (shaped, self.dim, self.start, self.end))
        return as_matrix(place, part)

    def in_shape(self, place: Node, matrix: Node) -> Node:
        """A matrix of these rows, in the shape that the slice has."""
        if self.sizes is None:
            return matrix
        sizes = (*self.sizes[: self.dim], self.length, *self.sizes[self.dim + 1 :])
        width = matrix.meta["val"].shape[1]
        return emit(place, aten.view.default, (matrix, [*sizes, width]))

    def put_into_zeros(self, place: Node, matrix: Node, zeros: Node) -> Node:
        """All rows as a matrix: those of the slice, and zeros of as many rows as others."""
        value = matrix.meta["val"]
        sizes, options = zeros.args[0], {**zeros.kwargs, "dtype": value.dtype}
        args = ([*sizes[:-1], value.shape[1]], 0)  # type: ignore[index,misc]
        base, part = emit(place, zeros.target, args, options), self.in_shape(place, matrix)
        put = (base, part, self.dim, self.start, self.end)
        whole = emit(place, aten.slice_scatter.default, put)
        if self.sizes is None:
            return whole
        return emit(place, aten.view.default, (whole, [-1, value.shape[1]]))


@dataclass(frozen=True)
class Reader:
    """What reads gradients of all rows: a product, or a sum over rows.

    Attributes:
        casts: of the gradients, before.
        is_turned: whether these are turned, too.
    """

    node: Node
    casts: tuple[Node, ...]
    is_turned: bool = False


def as_matrix(place: Node, tensor: Node) -> Node:
    value = tensor.meta["val"]
    if value.dim() == 2:
        return tensor
    dense = emit(place, aten.clone.default, (tensor,), {"memory_format": torch.contiguous_format})
    return emit(place, aten.view.default, (dense, [-1, value.shape[-1]]))


def slices_first(product: Node) -> Node:
    """Replaces a product by that of the rows that are read, if these are slices of slices; returns
    it, or the product itself."""
    while (fewer := _slice_first(product)) is not None:
        product = fewer
    return product


def _slice_first(product: Node) -> Node | None:
    """Returns None, and changes nothing, if more is read than one slice of the rows."""
    head = head_of(product)
    assert head is not None
    shaped = _in_its_shape(product)
    cuts = list(shaped.users)
    found = {_slice_of(cut, shaped, product) for cut in cuts}
    if len(found) != 1 or None in found:
        return None
    (rows,) = found
    assert rows is not None
    scattered = [n for n in sorted(descendants(cuts)) if _is_put_into_zeros(n, rows)]
    if rows.is_whole:
        for node in cuts:
            replace_uses(node, shaped)
        for node in scattered:
            replace_uses(node, named_arguments(node)["src"])
        erase_unused([*cuts, *scattered])
        return product
    readers = [list(_readers(node, product.meta["val"].shape[1])) for node in scattered]
    if not all(all(each is not None for each in some) for some in readers):
        return None
    cut = cuts[0]
    inputs = {head.input: rows.rows_of(cut, head.input)}
    args = (inputs[head.input], head.columns)
    if head.bias is not None:
        args = (head.bias, *args)  # type: ignore[assignment]
    fewer = emit(cut, product.target, args, like=product)
    logits = rows.in_shape(cut, fewer)
    for each in cuts:
        replace_uses(each, logits)
    for node, some in zip(scattered, readers, strict=True):
        for reader in some:
            assert reader is not None
            _read_rows(rows, node, reader, inputs)
    erase_unused(sorted({product, *scattered, *descendants([product, *scattered])}, reverse=True))
    return fewer


def _in_its_shape(product: Node) -> Node:
    """A product, or the only view of it that anything reads."""
    users = list(product.users)
    return users[0] if len(users) == 1 and users[0].target in RESHAPES else product


def _slice_of(node: Node, shaped: Node, product: Node) -> Slice | None:
    """Which rows a reader of a product takes; None if it is no slice of them."""
    whole, classes = shaped.meta["val"], product.meta["val"].shape[1]
    if node.target is not aten.slice.Tensor or not same(whole.shape[-1], classes):
        return None
    named = named_arguments(node)
    dim = named["dim"] % whole.dim()
    if named["step"] != 1 or dim == whole.dim() - 1 or whole.dim() < 2:
        return None
    sizes = None if shaped is product else tuple(shaped.args[1][:-1])  # type: ignore[arg-type,index]
    length = node.meta["val"].shape[dim]
    if not isinstance(length, int):
        length = -1
        if sizes is not None and -1 in (*sizes[:dim], *sizes[dim + 1 :]):
            return None
    return Slice(sizes, dim, named["start"], named["end"], length)


def _is_put_into_zeros(node: Node, rows: Slice) -> bool:
    """Whether rows of the slice are put into zeros, at their places."""
    if node.target is not aten.slice_scatter.default:
        return False
    named = named_arguments(node)
    base, rank = named["self"], node.meta["val"].dim()
    if base.target is not aten.full.default or filled_with(base) != 0 or named["step"] != 1:
        return False
    sizes = tuple(base.args[0][:-1])
    is_as_large = rank == 2 if rows.sizes is None else sizes == rows.sizes
    ends = named["start"], named["end"]
    return is_as_large and named["dim"] % rank == rows.dim and ends == (rows.start, rows.end)


def _readers(
    gradients: Node, classes: int, casts: tuple[Node, ...] = ()
) -> Iterator[Reader | None]:
    """What reads gradients of logits; None for what is no product of them and no sum over rows."""
    rank = gradients.meta["val"].dim()
    for user in gradients.users:
        if user.target in CASTS and user.kwargs.keys() <= {"dtype"}:
            yield from _readers(user, classes, (*casts, user))
        elif user.target is aten.clone.default or (
            user.target in RESHAPES and _is_matrix(user, classes)
        ):
            yield from _readers(user, classes, casts)
        elif rank == 2 and is_turned_matrix(user):
            for each in user.users:
                is_product = each.target is aten.mm.default and each.args[0] is user
                yield Reader(each, casts, True) if is_product else None
        elif user.target is aten.mm.default:
            yield Reader(user, casts) if user.args[0] is gradients else None
        elif user.target is aten.sum.dim_IntList:
            dims = sorted(dim % rank for dim in user.args[1])  # type: ignore[union-attr]
            yield Reader(user, casts) if dims == list(range(rank - 1)) else None
        else:
            yield None


def _is_matrix(node: Node, classes: int) -> bool:
    value = node.meta["val"]
    return value.dim() == 2 and same(value.shape[1], classes)


def _read_rows(rows: Slice, scattered: Node, reader: Reader, inputs: dict[Node, Node]) -> None:
    """Lets a reader read the gradients of the slice.

    Args:
        inputs: what has been cut of which matrix.
    """
    node, named = reader.node, named_arguments(scattered)
    part, target, args = named["src"], node.target, node.args
    for cast in reader.casts:
        part = emit(node, cast.target, (part, *cast.args[1:]), cast.kwargs)
    if target is aten.sum.dim_IntList:
        if args[0].meta["val"].dim() == 2:  # type: ignore[union-attr]
            part = as_matrix(node, part)
        result = emit(node, target, (part, *args[1:]), node.kwargs)
    elif reader.is_turned:
        other = inputs.get(args[1]) or rows.rows_of(node, args[1])  # type: ignore[arg-type]
        turned = emit(node, aten.permute.default, (as_matrix(node, part), [1, 0]))
        result = emit(node, target, (turned, other), node.kwargs)
    else:
        fewer = emit(node, target, (as_matrix(node, part), *args[1:]), node.kwargs)
        result = rows.put_into_zeros(node, fewer, named["self"])
    replace_uses(node, result)
