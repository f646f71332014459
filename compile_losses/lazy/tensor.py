"""A linear layer's output that is computed when it is first read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compile_losses.lazy.head import COPIES, SAME, VIEWS, Head, Step, apply, picked
from compile_losses.lazy.source import Memory, Source
from compile_losses.ops.linear.chunk_size import chunk_rows
from compile_losses.torch_internals.eager import NO_TORCH_FUNCTION, not_compiled
from compile_losses.torch_internals.ops import schema_of, tree_map_only
from compile_losses.torch_internals.tensors import (
    FakeTensor,
    has_hooks,
    make_wrapper,
    without_dispatch,
)

aten = torch.ops.aten

#: Views that a tensor becomes itself, and the op of the same result.
_IN_PLACE_VIEWS = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
}
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
#: Ops that make a few numbers of each row, with the place of the dimensions among their arguments
#: and the default of these.
_BY_ROW: dict[Any, tuple[int, Any]] = {
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), (0, None)),
    **dict.fromkeys((aten.max.dim, aten.min.dim), (0, None)),
    **dict.fromkeys((aten.amax.default, aten.logsumexp.default, aten.sum.dim_IntList), (0, [])),
    aten.topk.default: (1, -1),
}
#: A read of at most this part of the rows computes these alone, and for this reader alone. All such
#: reads together compute at most this many times all rows.
_LARGEST_PART = 0.25
_MOST_TIMES = 2


class LazyLogits(Tensor):
    """A linear layer's output, computed when it is first read.

    Casts, views, slices, copies and soft-caps of it are lazy as well. All other ops compute the
    numbers, once for all views, and return plain tensors. A few rows are computed without the
    others, and so are numbers of each row, such as argmax. To autograd it is a tensor like any
    other.

    Raises:
        RuntimeError: in reading, if hidden state, weight or bias were changed in place before.
    """

    #: The head whose output it is made of; None if that is no longer known.
    _head: Head | None
    #: The head in the autograd graph, if gradients go to it from this tensor.
    _origin: Head | None
    #: Whether the head still holds what it did; None in tracing.
    _source: Source | None
    _memory: Memory
    #: The views that lead from the memory's tensor to this one.
    _views: tuple[Step, ...]
    #: All ops that lead from the head's output to this tensor.
    steps: tuple[Step, ...]

    # A class without one would get the result of every function as one of its own.
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        device: torch.device,
        memory: Memory,
        *,
        head: Head | None = None,
        origin: Head | None = None,
        source: Source | None = None,
        views: tuple[Step, ...] = (),
        steps: tuple[Step, ...] = (),
    ) -> LazyLogits:
        """
        Args:
            like: has the dtype, shape, strides and offset.
        """
        self: LazyLogits = make_wrapper(cls, like, device)
        self._head, self._origin, self._source = head, origin, source
        self._memory, self._views, self.steps = memory, views, steps
        return self

    @classmethod
    @not_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], LazyLogits):
            late = args[0]._without_numbers(func, args[1:], kwargs)
            if late is not None:
                return late
        schema = schema_of(func)
        shared = [
            kwargs.get(argument.name, args[place] if place < len(args) else None)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
        ]
        tree_map_only(LazyLogits, lambda lazy: lazy._memory.share(), shared)
        result = func(*_plain(args), **_plain(kwargs))
        is_written = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
        return shared[0] if is_written == [True] else result

    def _without_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that does not need all numbers of this tensor; else None."""
        if func in _IN_PLACE_VIEWS:
            return self._become(func, args, kwargs)
        if self._memory.made is not None:
            return None
        if can_wait(func, args, kwargs):
            return self._then(func, args, kwargs)
        if func in _SPLITS:
            return self._split(func, args, kwargs)
        return self._by_row(func, args, kwargs) if func in _BY_ROW else None

    def _then(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits:
        """The result of an op, to be computed later."""
        step: Step = (func, args, tuple(sorted(kwargs.items())))
        before, views = self._memory, (*self._views, step)
        # In tracing the origin holds nothing, and goes along.
        is_recorded = torch.is_grad_enabled() and func is not aten.detach.default
        is_copy = func in COPIES
        return LazyLogits(
            func(_shape_of(self), *args, **kwargs),
            self.device,
            Memory(lambda: apply(before.read(), views), before) if is_copy else before,
            head=self._head,
            origin=self._origin if is_recorded or self._source is None else None,
            source=self._source,
            views=() if is_copy else views,
            steps=self.steps if func in SAME and not kwargs else (*self.steps, step),
        )

    def _split(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LazyLogits]:
        """Slices of it, one after the other."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts, at = [], 0
        for part in func(_shape_of(self), *args, **kwargs):
            parts.append(self._then(aten.slice.Tensor, (dim, at, at + part.shape[dim]), {}))
            at += part.shape[dim]
        return parts

    def _become(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits:
        """Another view, in place."""
        with without_dispatch():
            func(self, *args, **kwargs)
        step: Step = (_IN_PLACE_VIEWS[func], args, tuple(sorted(kwargs.items())))
        self._views, self.steps = (*self._views, step), (*self.steps, step)
        return self

    def _by_row(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op's numbers of each row, a chunk of rows at a time; None if it makes others."""
        place, default = _BY_ROW[func]
        dims = args[place] if len(args) > place else default
        (dim,) = dims if isinstance(dims, list) and len(dims) == 1 else (dims,)
        found = self._picked() if dim in (-1, self.dim() - 1) else None
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

    def _picked(self) -> tuple[Head, tuple[Step, ...]] | None:
        """A head of this tensor's rows, and the steps after its output; see ``picked``.

        None if gradients are recorded: the backward reads the numbers once more, and may compare
        them with results. A product of other sizes rounds differently.
        """
        is_recorded = self.requires_grad and torch.is_grad_enabled()
        if is_recorded or self._source is None or not self._memory.is_unread():
            return None
        self._source.check()
        return picked(self._source.head, self.steps)

    def _few_rows(self) -> Tensor | None:
        """The numbers, if they are those of few rows; else None."""
        found = self._picked()
        if found is None or self._source is None:
            return None
        head, steps = found
        rows, all_rows = (h.input.shape[:-1].numel() for h in (head, self._source.head))
        read = self._source.rows + rows
        if rows > _LARGEST_PART * all_rows or read > _MOST_TIMES * all_rows:
            return None
        self._source.rows = read
        return apply(head.output(), steps)

    def plain(self) -> Tensor:
        """The numbers, in a plain tensor at this one's place in the autograd graph."""
        plain: Tensor = _Plain.apply(self)
        return plain

    @property
    def numbers(self) -> Tensor:
        """The numbers, in a plain tensor of the same memory, without gradients."""
        with torch.no_grad():
            return apply(self._memory.share(), self._views)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [f"{tuple(self.shape)}", f"dtype={self.dtype}", f"device={str(self.device)!r}"]
        if self.grad_fn is not None:
            parts.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        return f"LazyLogits({', '.join(parts)})"

    # Methods of torch.Tensor that are no ops, or that need memory.

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def __array__(self, dtype: Any = None) -> Any:
        return self.plain().__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.plain().__dlpack__(**options)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __format__(self, specification: str) -> str:
        return self.plain().__format__(specification)

    # Tracing takes it apart into the head, as long as nobody has read it, and puts it together.

    @property
    def hidden(self) -> Tensor | None:
        return None if self._head is None else self._head.input

    @property
    def weight(self) -> Tensor | None:
        return None if self._head is None else self._head.weight

    @property
    def bias(self) -> Tensor | None:
        return None if self._head is None else self._head.bias

    def unread_head(self) -> Head | None:
        """The head, in the autograd graph, if this tensor can still be computed of it unseen."""
        if self._head is None:
            return None
        # In tracing it is what it was when tracing began.
        if self._source is not None and (self._memory.made is not None or has_hooks(self)):
            return None
        return self._origin if self.requires_grad else self._head

    def opened(self) -> Head:
        """The head, in the autograd graph, in the place of this tensor.

        Raises:
            RuntimeError: its tensors were changed in place.
        """
        head = self._origin if self.requires_grad else self._head
        assert head is not None
        if self._source is not None:
            self._source.check()
        return head

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        head = self.unread_head()
        if head is None:
            return ["numbers"], None
        names = ["hidden", "weight", "bias"][: len(head.tensors)]
        needs_grad = tuple(tensor.requires_grad for tensor in head.tensors)
        return names, (head.dtype, head.is_transposed, needs_grad, self.steps)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> LazyLogits:
        if context is None:
            numbers = inner["numbers"]
            memory = Memory(lambda: numbers)
            memory.read()
            return LazyLogits(_shape_of(numbers), numbers.device, memory)
        dtype, is_transposed, needs_grad, steps = context
        head = Head(inner["hidden"], inner["weight"], inner.get("bias"), dtype, is_transposed)
        leaves = zip(head.tensors, needs_grad, strict=True)
        origin = head.with_tensors(*(t.detach().requires_grad_(needs) for t, needs in leaves))
        result = apply(_first(head, origin), steps)
        assert isinstance(result, LazyLogits)
        return result


def can_wait(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op needs no numbers yet: a view, or a copy on the same device.

    Args:
        args, kwargs: those after the first.
    """
    return (
        (func in VIEWS or func in COPIES)
        and _is_known(args)
        and all(
            name in ("dtype", "memory_format", "implicit") or not value
            for name, value in kwargs.items()
        )
    )


def _is_known(argument: Any) -> bool:
    """Whether an op's argument is made of numbers and the like, which compare by their values."""
    if isinstance(argument, list | tuple):
        return all(map(_is_known, argument))
    return argument is None or isinstance(argument, int | float | torch.dtype | torch.SymInt)


def _shape_of(tensor: Tensor) -> Tensor:
    """A tensor without memory that looks the same."""
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    return empty.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _first(head: Head, origin: Head | None = None, source: Source | None = None) -> LazyLogits:
    """The output of a head."""

    def make() -> Tensor:
        if source is not None:
            source.check()
        return head.output()

    like = torch.empty((*head.input.shape[:-1], head.classes), dtype=head.dtype, device="meta")
    return LazyLogits(
        like, head.input.device, Memory(make), head=head, origin=origin, source=source
    )


def _numbers(lazy: LazyLogits) -> Tensor:
    rows = lazy._few_rows()
    return apply(lazy._memory.read(), lazy._views) if rows is None else rows


def _plain(arguments: Any) -> Any:
    return tree_map_only(LazyLogits, _numbers, arguments)


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits) -> Tensor:
        alias: Tensor = aten.alias.default(lazy.numbers)
        return alias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Lazy(torch.autograd.Function):
    """The head's place in the autograd graph: a linear layer's."""

    @staticmethod
    def forward(ctx: Any, head: Head, *tensors: Tensor) -> LazyLogits:
        ctx.save_for_backward(*tensors)
        ctx.described = (head.dtype, head.is_transposed)
        held = head.with_tensors(*(tensor.detach() for tensor in tensors))
        return _first(held, head, Source(held))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, *bias = ctx.saved_tensors
        head = Head(input, weight, bias[0] if bias else None, *ctx.described)
        return (None, *head.gradients(grad, ctx.needs_input_grad[1:]))


def plain(value: Any) -> Any:
    """A plain tensor for lazy logits, at their place in the autograd graph; else the value."""
    return value.plain() if isinstance(value, LazyLogits) else value


def lazy_logits(head: Head) -> Tensor:
    """A head's output, computed when it is read.

    Args:
        head: its tensors are in the autograd graph, to which gradients go.
    """
    # Tracing calls what is compiled, too, and only asks for shapes.
    if any(isinstance(tensor, FakeTensor) for tensor in head.tensors):
        return head.output()
    result: Tensor = _Lazy.apply(head, *head.tensors)
    return result
