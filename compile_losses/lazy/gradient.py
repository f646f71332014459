"""The gradient of logits on its way to their head, computed if somebody takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from compile_losses.lazy.memory import Memory
from compile_losses.lazy.tensor import LazyLogits, shape_of
from compile_losses.op_traits import SCALINGS, VIEWS
from compile_losses.torch_internals.eager import at_end_of_backward, backward_number
from compile_losses.torch_internals.ops import tree_map_only

aten = torch.ops.aten

#: What the backwards of the ops that wait do to a gradient. All of them are linear in it.
_BACKWARDS = VIEWS | {
    *(aten._to_copy.default, aten.clone.default, aten.tanh_backward.default, *SCALINGS),
    *(aten.slice_backward.default, aten.select_backward.default, aten.sum.dim_IntList),
    aten._reshape_alias.default,
}

#: Gradients of a head's input, weight and bias, in this order.
Parts = tuple[Tensor | None, ...]


class LazyGradient(LazyLogits):
    """The gradient of logits that a compiled graph took the head of.

    The graph has computed the gradients of hidden state, weight and bias already. On the way
    through the autograd graph they come along, as ``parts``. So the head's backward needs no
    numbers, and only somebody who takes this gradient out of the backward does.

    Attributes:
        parts: the gradients of the head's tensors, one set for each graph.
        rest: the gradient from elsewhere that was added; None if there is none.
        number: the backward in which it goes to the head. In others it is like any tensor.
    """

    parts: list[Parts]
    rest: Tensor | None
    number: int

    @staticmethod
    def of(
        like: Tensor,
        device: torch.device,
        make: Callable[[], Tensor],
        parts: list[Parts],
        rest: Tensor | None = None,
    ) -> LazyGradient:
        """
        Args:
            like: has the dtype, shape and strides.
            make: computes the gradient, the rest included.
        """

        def laid_out() -> Tensor:
            made = make()
            if made.stride() == like.stride():
                return made
            return torch.empty_like(like, device=device).copy_(made)

        self = LazyGradient(like, device, Memory(laid_out))
        assert isinstance(self, LazyGradient)
        self.parts, self.rest, self.number = parts, rest, backward_number()
        if self.number not in _alive:
            _alive[self.number] = []
            at_end_of_backward(partial(_compute_taken, self.number))
        _alive[self.number].append(ref(self))
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.add.Tensor and len(args) == 2 and not kwargs:
            added = _added(*args)
            if added is not None:
                return added
        is_passed = func in _BACKWARDS and args and _is_on_its_way(args[0])
        if is_passed and kwargs.get("device") in (None, args[0].device):
            return args[0]._passed(func, args[1:], kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def is_on_its_way(self) -> bool:
        """Whether the backward runs in which it goes to the head."""
        return self.number == backward_number() != -1

    def _passed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyGradient:
        """What an op of a backward makes of it."""

        def call(tensor: Tensor) -> Tensor:
            plain = tree_map_only(LazyLogits, lambda lazy: lazy.numbers, args)
            result: Tensor = func(tensor, *plain, **kwargs)
            return result

        shapes = tree_map_only(Tensor, shape_of, args)
        on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        like = func(shape_of(self), *shapes, **on_meta)
        rest = None if self.rest is None else call(self.rest)
        return LazyGradient.of(like, self.device, lambda: call(self.numbers), self.parts, rest)


#: The gradients of each backward that runs.
_alive: dict[int, list[ref[LazyGradient]]] = {}


def _compute_taken(number: int) -> None:
    """Computes the gradients that a backward is about to return; the others are gone."""
    for each in _alive.pop(number):
        grad = each()
        if grad is not None:
            grad._memory.read()


def _is_on_its_way(value: Any) -> bool:
    return isinstance(value, LazyGradient) and value.is_on_its_way()


def _added(first: Tensor, second: Tensor) -> LazyGradient | None:
    """The sum of two gradients of a tensor, as autograd adds them up."""
    both = first, second
    if not any(map(_is_on_its_way, both)) or first.shape != second.shape:
        return None
    if first.dtype != second.dtype:
        return None
    parts: list[Parts] = []
    rests: list[Tensor] = []
    for each in both:
        taken, rest = parts_of(each)
        parts += taken
        rests += [] if rest is None else [rest]

    def make() -> Tensor:
        one, other = (each.numbers if isinstance(each, LazyLogits) else each for each in both)
        return one + other

    rest = None if not rests else rests[0] if len(rests) == 1 else rests[0] + rests[1]
    return LazyGradient.of(shape_of(first), first.device, make, parts, rest)


def parts_of(grad: Tensor) -> tuple[list[Parts], Tensor | None]:
    """The gradients of a head's tensors that come along with one of its output, and the rest."""
    if isinstance(grad, LazyGradient) and grad.is_on_its_way():
        return list(grad.parts), grad.rest
    return [], grad
