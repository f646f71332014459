"""Reads of a lazy tensor that need the numbers of few rows, or few numbers of each row, and picks
of rows, which are lazy as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compile_losses.lazy.head import Head, PickedHead, Step, apply, picked
from compile_losses.op_traits import EXTREMES, named_dims
from compile_losses.ops.linear.chunk_size import chunk_rows

aten = torch.ops.aten

#: Ops that make a few numbers of each row.
_BY_ROW = (*EXTREMES, aten.logsumexp.default, aten.sum.dim_IntList)
#: A read of at most this part of the rows computes these alone, and for this reader alone. All such
#: reads together compute at most this many times all rows.
_LARGEST_PART = 0.25
_MOST_TIMES = 2


def _own_rows(lazy: Any) -> tuple[Head, tuple[Step, ...]] | None:
    """A head of a tensor's rows, and the steps after its output; see ``picked``.

    None if gradients are recorded: the backward reads the numbers once more, and may compare
    them with results. A product of other sizes rounds differently.
    """
    is_recorded = lazy.requires_grad and torch.is_grad_enabled()
    if is_recorded or lazy.source is None or not lazy.is_unread():
        return None
    lazy.source.check()
    return picked(lazy.source.head, lazy.steps)


def by_row(lazy: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op's numbers of each row, a chunk of rows at a time; None if it makes others.

    Args:
        lazy: a lazy tensor.
        args, kwargs: of the op, after the tensor.
    """
    if func not in _BY_ROW:
        return None
    ((place, default),) = named_dims(func)
    place -= 1  # the tensor is none of the arguments here
    dims = args[place] if len(args) > place else default
    (dim,) = dims if isinstance(dims, list) and len(dims) == 1 else (dims,)
    found = _own_rows(lazy) if dim in (-1, lazy.dim() - 1) else None
    if found is None:
        return None
    head, steps = found
    shape, hidden = head.input.shape[:-1], head.input.shape[-1]
    input = head.input.reshape(-1, hidden)
    chunk = chunk_rows(len(input), hidden, head.classes, head.dtype, input.device)
    if chunk >= len(input):
        return None
    args = (*args[:place], [-1] if isinstance(dims, list) else -1, *args[place + 1 :])
    parts = [
        func(apply(replace(head, input=rows).output(), steps), *args, **kwargs)
        for rows in input.split(chunk)
    ]
    is_one = isinstance(parts[0], Tensor)
    columns = [parts] if is_one else zip(*parts, strict=True)
    joined = [torch.cat(column) for column in columns]
    results = [column.reshape(*shape, *column.shape[1:]) for column in joined]
    return results[0] if is_one else tuple(results)


def few_rows(lazy: Any) -> Tensor | None:
    """The numbers of a lazy tensor, if they are those of few rows; else None."""
    found = _own_rows(lazy)
    if found is None or lazy.source is None:
        return None
    head, steps = found
    rows, all_rows = (h.input.shape[:-1].numel() for h in (head, lazy.source.head))
    read = lazy.source.rows + rows
    if rows > _LARGEST_PART * all_rows or read > _MOST_TIMES * all_rows:
        return None
    lazy.source.rows = read
    return apply(head.output(), steps)


@dataclass(frozen=True)
class Picked:
    """Rows of a lazy tensor that an index takes.

    Attributes:
        func, args: the op, and its arguments after the tensor. Nobody else has tensors of these.
        head, steps: a head of these rows, and what follows its output.
        origin: the same head in the autograd graph; None if no gradient goes there.
    """

    func: Any
    args: tuple[Any, ...]
    head: Head
    steps: tuple[Step, ...]
    origin: Head | None


def mask_of_rows(lazy: Any, func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The mask of rows by which an op takes the elements of some rows, all classes of each.

    Args:
        lazy: a lazy tensor of [..., classes].
        args: of the op, after the tensor.

    Returns:
        A mask of [...]. None if the op does something else, or if its mask has an element for each
        class: whether these are equal is not looked at. A mask that is expanded has one element.
    """
    is_selected = func is aten.masked_select.default
    if not is_selected and (func is not aten.index.Tensor or len(args[0]) != 1):
        return None
    (mask,) = args if is_selected else args[0]
    if type(mask) is not Tensor or mask.dtype != torch.bool or not 0 < mask.dim() <= lazy.dim():
        return None
    if mask.device != lazy.device or not (is_selected or mask.shape == lazy.shape):
        return None
    *rows, classes = lazy.shape
    if mask.shape[-1] != 1 and (mask.stride(-1) != 0 or mask.shape[-1] != classes):
        return None
    mask = mask[..., 0]
    sizes = rows[len(rows) - mask.dim() :]
    is_broadcast = all(size in (1, of) for size, of in zip(mask.shape, sizes, strict=True))
    return mask.expand(rows) if is_broadcast else None


def picked_rows(lazy: Any, func: Any, args: tuple[Any, ...], is_recorded: bool) -> Picked | None:
    """The rows that an op takes of a lazy tensor; None if it does something else.

    Args:
        lazy: a lazy tensor.
        args: of the op, after the tensor.
        is_recorded: whether the result is in the autograd graph.
    """
    source = lazy.source
    if lazy.is_traced or source is None or source.before_changes is not None:
        return None
    own = _own_indices(lazy, func, args) if lazy.is_unread() else None
    if own is None or picked(source.head, lazy.steps) is None:
        return None
    source.check()
    of, steps = source.head, lazy.steps

    def pick(input: Tensor) -> Tensor:
        source.check()  # the rows are taken when the head is opened, of what it holds then
        found = picked(replace(of, input=input), steps)
        assert found is not None
        rows: Tensor = func(found[0].input, *own)
        return rows

    found = picked(of, steps)
    assert found is not None
    head = replace(of, input=pick(of.input))
    whole, origin = lazy._origin, None
    if whole is not None and is_recorded:
        shown = head.input.detach().requires_grad_(whole.input.requires_grad)
        origin = PickedHead(
            shown, whole.weight, whole.bias, whole.dtype, whole.is_transposed, whole, pick
        )
    return Picked(func, own, head, found[1], origin)


def _own_indices(lazy: Any, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Copies of the indices by which an op takes rows, masks as places; None if it takes none."""
    rows = lazy.dim() - 1
    if func is aten.index_select.default:
        dim, index = args
        return (dim % lazy.dim(), index.clone()) if dim % lazy.dim() < rows else None
    if func is not aten.index.Tensor:
        return None
    indices: list[Tensor | None] = []
    for index in args[0]:
        if index is None:
            indices.append(None)
        elif type(index) is not Tensor:
            return None
        elif index.dtype not in (torch.bool, torch.uint8):
            indices.append(index.clone())
        else:
            at = len(indices)
            if index.shape != lazy.shape[at : at + index.dim()] or index.dim() == 0:
                return None
            indices += index.nonzero(as_tuple=True)
    return (indices,) if len(indices) <= rows else None
