"""A linear layer's output that is computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from compile_losses.lazy.head import COPIES, Head, Step, apply, gradient_before, picked
from compile_losses.lazy.memory import Memory
from compile_losses.lazy.methods import Methods
from compile_losses.lazy.path import Path, nodes_to_head
from compile_losses.lazy.rows import by_row, few_rows, mask_of_rows, picked_rows
from compile_losses.lazy.source import Source
from compile_losses.op_traits import ALIASES, RESHAPES, VIEWS, is_one_view
from compile_losses.torch_internals.dynamo import leave_to_eager
from compile_losses.torch_internals.eager import NO_TORCH_FUNCTION, not_compiled
from compile_losses.torch_internals.ops import schema_of, tree_map_only
from compile_losses.torch_internals.symbols import specialise
from compile_losses.torch_internals.tensors import (
    FunctionalTensor,
    autograd_node,
    make_wrapper,
    refuse_pointer,
    set_data,
    with_memory_of,
    without_dispatch,
)
from compile_losses.traced import settings_here

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
#: Ops that take rows by an index, or by a mask.
_PICKS = (aten.index.Tensor, aten.index_select.default, aten.masked_select.default)


class LazyLogits(Methods):
    """A linear layer's output, computed when it is first read.

    Casts, views, slices, copies and soft-caps of it are lazy as well. All other ops compute the
    numbers, once for all views, and return plain tensors. A few rows are computed without the
    others, and so are numbers of each row, such as argmax. To autograd it is a tensor like any
    other.

    Attributes:
        source: whether the head still holds what it did; None if the head is not known.
        steps: all ops that lead from the head's output to this tensor.
        made_by: in tracing, the tensor and the op that it was made of, if any.
        is_replaced: whether it became another tensor since, in place.
        is_functional: whether another backend's AOTAutograd traces it. What that makes of it, but
            for views, are plain tensors: their gradients will be.

    Raises:
        RuntimeError: in reading, if hidden state, weight or bias were changed in place before.
    """

    #: The head whose output it is made of; None if that is no longer known.
    _head: Head | None
    #: The head in the autograd graph, if gradients go to it from this tensor.
    _origin: Head | None
    #: What tracing was shown, of which it keeps no reference.
    _shown: Tensor | None
    #: The head that tracing is shown and the steps after it, and how many were before it.
    _reshaped: tuple[Head, tuple[Step, ...]] | None
    _count: int
    #: Whether the next alias is to be a plain tensor.
    _is_asked: bool = False
    source: Source | None
    steps: tuple[Step, ...]
    made_by: tuple[LazyLogits, Step] | None
    is_replaced: bool
    is_functional: bool

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
        before: Path | None = None,
        is_traced: bool = False,
    ) -> LazyLogits:
        """
        Args:
            like: has the dtype, shape, strides and offset.
            before: the path of the tensor that it is made of.
            is_traced: whether it stands for a tensor in tracing, whose numbers nobody knows.
        """
        self: LazyLogits = make_wrapper(cls, like, device)
        self._head, self._origin, self.source = head, origin, source
        self._memory, self._views, self.steps = memory, views, steps
        self.path = Path(self, before)
        self.is_traced, self.made_by, self.is_replaced = is_traced, None, False
        self.is_functional = False
        self._shown, self._reshaped, self._count = None, None, 0
        if not is_traced:
            refuse_pointer(self)
            memory.hold(self)
        return self

    @classmethod
    @not_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], LazyLogits):
            # A lazy tensor of inference mode could not become one of numbers.
            if not args[0].is_functional and not torch.is_inference_mode_enabled():
                late = args[0]._without_numbers(func, args[1:], kwargs)
                if late is not None:
                    return late
            elif args[0].is_functional and is_one_view(func):
                return with_memory_of(args, args[0]._then(func, args[1:], kwargs), func, kwargs)
        schema = schema_of(func)
        shared = [
            kwargs.get(argument.name, args[place] if place < len(args) else None)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
        ]
        if schema.is_mutable:
            tree_map_only(LazyLogits, LazyLogits._refuse_foreign_write, shared)
        tree_map_only(LazyLogits, lambda lazy: lazy._memory.share(), shared)
        plain = _plain(args)
        result = func(*plain, **_plain(kwargs))
        is_written = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
        if is_written != [True]:
            return result
        is_other = func.overloadpacket is aten.set_  # in memory of another tensor
        if isinstance(args[0], LazyLogits) and (is_other or _layout(args[0]) != _layout(plain[0])):
            args[0]._become(plain[0])
        return shared[0]

    def _refuse_foreign_write(self) -> None:
        """In tracing by another backend, to which this is a head: its graph would write to numbers
        that nobody keeps. Dynamo leaves the op to eager code."""
        is_head = self._head is not None and self._memory.made is None
        if self.is_traced and not self.is_functional and is_head and settings_here() is None:
            leave_to_eager("a write to lazy logits")

    def _without_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that does not need all numbers of this tensor; else None."""
        if func is aten.alias.default and self._is_asked:
            return aten.alias.default(self.numbers)
        if func is aten.detach_.default:
            return self
        if func in _IN_PLACE_VIEWS:
            return self._become_view(func, args, kwargs)
        is_read = self._memory.made is not None
        waits = is_one_view(func) or (func in COPIES and not is_read)
        if waits and _are_known(args, kwargs):
            return self._then(func, args, kwargs)
        if func in _SPLITS:
            return self._split(func, args, kwargs)
        if func is aten.unbind.int:
            dim = args[0] if args else kwargs.get("dim", 0)
            return [self._then(aten.select.int, (dim, i), {}) for i in range(self.size(dim))]
        if is_read:
            return None
        if func in _PICKS and not kwargs:
            return self._pick(func, args)
        return by_row(self, func, args, kwargs)

    def _pick(self, func: Any, args: tuple[Any, ...]) -> LazyLogits | None:
        """Some of the rows; None if an index takes something else."""
        mask = mask_of_rows(self, func, args)
        if mask is not None:
            rows = self._pick(aten.index.Tensor, ([mask],))
            return None if rows is None else rows._then(aten.view.default, ([-1],), {})
        found = picked_rows(self, func, args, torch.is_grad_enabled())
        if found is None or self.source is None:
            return None
        before, views = self._memory, self._views

        def make() -> Tensor:
            rows: Tensor = func(apply(before.read(), views), *found.args)
            return rows

        on_meta = tree_map_only(Tensor, lambda index: index.to("meta"), found.args)
        return LazyLogits(
            func(shape_of(self), *on_meta),
            self.device,
            Memory(make, before),
            head=found.head,
            origin=found.origin,
            source=Source(found.head, self.source.remedy),
            steps=found.steps,
            before=self.path,
        )

    def _then(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits:
        """The result of an op, to be computed later."""
        step: Step = (func, args, tuple(sorted(kwargs.items())))
        before, views = self._memory, (*self._views, step)
        # In tracing the origin holds nothing, and goes along.
        is_recorded = torch.is_grad_enabled() and func is not aten.detach.default
        is_copy = func in COPIES
        like = func(shape_of(self), *args, **kwargs)
        # A step that changes nothing would be a reason to compile the next graph anew.
        is_same = func in ALIASES or (
            func is aten.clone.default and not self.is_traced and _layout(like) == _layout(self)
        )
        made = LazyLogits(
            like,
            self.device,
            Memory(lambda: apply(before.read(), views), before) if is_copy else before,
            head=self._head,
            origin=self._origin if is_recorded or self.is_traced else None,
            source=self.source,
            views=() if is_copy else views,
            steps=self.steps if is_same else (*self.steps, step),
            before=self.path,
            is_traced=self.is_traced,
        )
        if self.is_traced:
            made.made_by, made.is_functional = (self, step), self.is_functional
            if self._shown is not None and not is_copy:  # its mode may be gone when it is asked for
                made._shown = func(self._shown, *args, **kwargs)
        return made

    def _split(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LazyLogits]:
        """Slices of it, one after the other."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts, at = [], 0
        for part in func(shape_of(self), *args, **kwargs):
            parts.append(self._then(aten.slice.Tensor, (dim, at, at + part.shape[dim]), {}))
            at += part.shape[dim]
        return parts

    def _become_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits:
        """Another view, in place."""
        with without_dispatch():
            func(self, *args, **kwargs)
        step: Step = (_IN_PLACE_VIEWS[func], args, tuple(sorted(kwargs.items())))
        self._views, self.steps = (*self._views, step), (*self.steps, step)
        self._shown, self._reshaped, self.is_replaced = None, None, True
        return self

    def _become(self, other: Tensor) -> None:
        """Another tensor, in place: its numbers, sizes and strides."""
        like = make_wrapper(LazyLogits, other, other.device)
        set_data(self, like)
        self.take_over(other)

    def take_over(self, other: Tensor) -> None:
        """Takes over the numbers of a tensor whose sizes it has already, and forgets its head."""
        if isinstance(other, LazyLogits):
            self._memory, self._views = other._memory, other._views
        else:
            self._memory, self._views = Memory.of(other.detach()), ()
        self._head = self._origin = self.source = self.made_by = None
        self._shown, self._reshaped, self.steps, self.is_replaced = None, None, (), True
        if not self.is_traced:
            self._memory.hold(self)

    def lie_in(self, made: Tensor) -> None:
        """Shows torch the memory's tensor, once it is there."""
        with torch.no_grad():
            set_data(self, apply(made, self._views))

    def is_unread(self) -> bool:
        """Whether neither its numbers nor those that it is made of have been computed."""
        return self._memory.is_unread()

    def plain(self) -> Tensor:
        """The numbers, in a plain tensor at this one's place in the autograd graph.

        To autograd it is a view of this tensor, so that it counts the same writes.
        """
        self._is_asked = True
        try:
            plain: Tensor = aten.alias.default(self)
        finally:
            self._is_asked = False
        return plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [f"{tuple(self.shape)}", f"dtype={self.dtype}", f"device={str(self.device)!r}"]
        node = autograd_node(self)
        if node is not None:
            parts.append(f"grad_fn=<{type(node).__name__}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        return f"LazyLogits({', '.join(parts)})"

    # Tracing takes it apart into the head, as long as nobody has read it, and puts it together.

    @property
    def shown(self) -> Tensor:
        """The numbers, in a tensor of this one's own, which it keeps."""
        if self._shown is None:
            with torch.no_grad():
                self._shown = aten.alias.default(self.numbers)
        return self._shown

    @property
    def hidden(self) -> Tensor | None:
        return None if self._head is None else self.reshaped()[0].input

    @property
    def weight(self) -> Tensor | None:
        return None if self._head is None else self._head.weight

    @property
    def bias(self) -> Tensor | None:
        return None if self._head is None else self._head.bias

    def unread_head(self) -> Head | None:
        """The head, in the autograd graph, if it can take this tensor's place unseen.

        None if the numbers are known or unknown to come from a head, if a gradient has to go
        through this tensor and those that it is made of, if a step is none of the known views and
        copies, or if a parameter was given other data. None as well with ``"auto"``, which
        raises no errors about gradients.
        """
        if self.source is not None and self.source.before_changes is not None:
            return None
        # A size of others, such as a diagonal's, may be the least of two, which Dynamo can't name.
        if not self.is_traced and not all(op in VIEWS or op in COPIES for op, *_ in self.steps):
            return None
        if self._head is None or self.is_traced or not self.requires_grad:
            # In tracing it is what it was when tracing began.
            is_known = not self.is_traced and self._memory.made is not None
            return None if is_known else self._origin if self.requires_grad else self._head
        if self._origin is None or self._memory.made is not None or not self.path.is_free():
            return None
        if not self._origin.lies_in(self._head) or nodes_to_head(self) is None:
            return None
        return self._origin

    def reshaped(self) -> tuple[Head, tuple[Step, ...]]:
        """The head that tracing is shown, outside of the autograd graph, and the steps after it.

        If steps give the rows another shape, it is a head of rows of that shape. Dynamo takes no
        input one size of which is made of two sizes of another, and would compile a graph for each
        size that a step names.
        """
        assert self._head is not None
        if self._reshaped is None:
            self._count = 0 if self.is_traced else self._count_moved(self._head)
            self._reshaped = self._moved(self._head) if self._count else (self._head, self.steps)
        return self._reshaped

    def _count_moved(self, head: Head) -> int:
        """How many steps can be taken of the head's input, the last of which is a reshape.

        Their result has to lie in memory as the output of a head does.
        """
        head = head.with_tensors(*map(shape_of, head.tensors))
        ends = [at + 1 for at, (op, *_) in enumerate(self.steps) if op in RESHAPES]
        for count in reversed(ends):
            found = picked(head, self.steps[:count])
            if found is None:
                continue
            shape = (*found[0].input.shape[:-1], head.classes)
            like = torch.empty(shape, dtype=head.dtype, device="meta")
            if _layout(apply(like, (*found[1], *self.steps[count:]))) == _layout(self):
                return count
        return 0

    def _moved(self, head: Head) -> tuple[Head, tuple[Step, ...]]:
        """A head of the rows that tracing is shown, and the steps that its output still needs."""
        found = picked(head, self.steps[: self._count])
        assert found is not None
        return found[0], (*found[1], *self.steps[self._count :])

    def opened(self) -> Head:
        """The head, in the autograd graph, in the place of this tensor.

        Raises:
            RuntimeError: its tensors were changed in place.
        """
        head = self._origin if self.requires_grad else self._head
        assert head is not None
        if self.source is not None:
            self.source.check()
        opened = head.opened()
        return opened if self.reshaped()[0] is self._head else self._moved(opened)[0]

    def gradient_before_reshapes(self) -> Callable[[Tensor], Tensor] | None:
        """Makes the gradient of the head's input of that of the opened head's; None if both are
        the same."""
        if self._head is None or self.reshaped()[0] is self._head:
            return None
        like = self._head.with_tensors(*map(shape_of, self._head.tensors))
        return partial(gradient_before, like, self.steps[: self._count])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        head = self.unread_head()
        if head is None:
            return ["shown"], self.storage_offset()
        names = ["hidden", "weight", "bias"][: len(head.tensors)]
        needs_grad = tuple(tensor.requires_grad for tensor in head.tensors)
        return names, (head.dtype, head.is_transposed, needs_grad, self.reshaped()[1])

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> LazyLogits:
        is_traced = any(type(tensor) not in (Tensor, Parameter) for tensor in inner.values())
        is_functional = any(isinstance(tensor, FunctionalTensor) for tensor in inner.values())
        if not isinstance(context, tuple):
            numbers, layout = inner["shown"], (outer_size, outer_stride, context)
            if not is_traced and (numbers.stride(), numbers.storage_offset()) != layout[1:]:
                numbers = _laid_out(numbers, *layout)
            like = torch.empty(0, dtype=numbers.dtype, device="meta").as_strided(*layout)
            memory = Memory.of(numbers)
            shown = LazyLogits(like, numbers.device, memory, is_traced=is_traced)
            shown._shown = numbers if is_traced else None
            shown.is_functional = is_functional
            return shown
        dtype, is_transposed, needs_grad, steps = context
        head = Head(inner["hidden"], inner["weight"], inner.get("bias"), dtype, is_transposed)
        leaves = zip(head.tensors, needs_grad, strict=True)
        origin = head.with_tensors(*(t.detach().requires_grad_(needs) for t, needs in leaves))
        if is_traced and not is_functional:
            specialise(head.input.shape, apply(first_output(head), steps))
        first = first_output(head, origin) if is_traced else first_output(head, None, Source(head))
        last = apply(first, steps)
        assert isinstance(last, LazyLogits)
        # To autograd it is no view of the head's output, which tracing does not know.
        made = LazyLogits(
            shape_of(last),
            last.device,
            last._memory,
            head=last._head,
            origin=last._origin,
            source=last.source,
            views=last._views,
            steps=last.steps,
            is_traced=is_traced,
        )
        made.is_functional = is_functional
        return made


def can_wait(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op between a head and its loss needs no numbers yet: a view, or a copy.

    Args:
        args, kwargs: those after the first.
    """
    return (func in VIEWS or func in COPIES) and _are_known(args, kwargs)


def _are_known(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op's arguments compare by their values, and leave its result on its device."""
    return _is_known(args) and all(
        name in ("dtype", "memory_format", "implicit") or not value
        for name, value in kwargs.items()
    )


def _is_known(argument: Any) -> bool:
    """Whether an op's argument is made of numbers and the like, which compare by their values."""
    if isinstance(argument, list | tuple):
        return all(map(_is_known, argument))
    return argument is None or isinstance(argument, int | float | torch.dtype | torch.SymInt)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def _laid_out(numbers: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    """The same numbers in another layout: a functional graph makes anew what was written to."""
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    made = numbers.new_empty(offset + extent if numbers.numel() else 0)
    return made.as_strided(size, stride, offset).copy_(numbers)


def shape_of(tensor: Tensor) -> Tensor:
    """A tensor without memory that looks the same."""
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    return empty.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def first_output(
    head: Head,
    origin: Head | None = None,
    source: Source | None = None,
    computed: Callable[[], None] | None = None,
) -> LazyLogits:
    """The output of a head; without a source in tracing.

    Args:
        computed: is called once the logits are computed.
    """

    def make() -> Tensor:
        if source is not None:
            source.check()
        output = head.output()
        if computed is not None:
            computed()
        return output

    memory = Memory(make)
    if source is not None:
        source.memory = ref(memory)

    like = torch.empty((*head.input.shape[:-1], head.classes), dtype=head.dtype, device="meta")
    return LazyLogits(
        like,
        head.input.device,
        memory,
        head=head,
        origin=origin,
        source=source,
        is_traced=source is None,
    )


def _numbers(lazy: LazyLogits) -> Tensor:
    rows = few_rows(lazy)
    return apply(lazy._memory.read(), lazy._views) if rows is None else rows


def _plain(arguments: Any) -> Any:
    return tree_map_only(LazyLogits, _numbers, arguments)


def plain(value: Any) -> Any:
    """A plain tensor for lazy logits, at their place in the autograd graph; else the value."""
    return value.plain() if isinstance(value, LazyLogits) else value
