"""The linear layer behind lazy logits: its output, for all rows or for some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compile_losses.op_traits import ALIASES, FOLLOWED, RESHAPES, SCALINGS, View

aten = torch.ops.aten

#: Ops of one tensor and numbers whose result is new, and which wait as the logits do: casts, copies
#: and what heads do to their output.
COPIES = frozenset(
    (aten._to_copy.default, aten.clone.default, aten.tanh.default, *SCALINGS),
)

#: One op after the head: the op, its arguments after the first, and those with names.
Step = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True, eq=False)
class Head:
    """``input @ weight.t() + bias`` in a dtype, to be computed later.

    Attributes:
        input, weight, bias: [..., hidden], [classes, hidden] and None or [classes].
        dtype: what each of them is cast to before.
        is_transposed: whether weight is [hidden, classes].
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    is_transposed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        both = (self.input, self.weight)
        return both if self.bias is None else (*both, self.bias)

    @property
    def classes(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 0]

    def with_tensors(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Head:
        return replace(self, input=input, weight=weight, bias=bias)

    def opened(self) -> Head:
        """The same, its tensors in the autograd graph."""
        return self

    def lies_in(self, held: Head) -> bool:
        """Whether its tensors lie where those of another head do, which nobody can give other data
        (``parameter.data = other``)."""
        pairs = zip(self.tensors, held.tensors, strict=True)
        return all(one.data_ptr() == other.data_ptr() for one, other in pairs)

    def output(self) -> Tensor:
        """The logits, as plain torch computes them; differentiable."""
        with torch.autocast(self.input.device.type, enabled=False):
            input, weight, *bias = (tensor.to(self.dtype) for tensor in self.tensors)
            weight = weight.t() if self.is_transposed else weight
            return torch.nn.functional.linear(input, weight, *bias)

    def gradients(self, grad: Tensor, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """The gradients of the tensors that need one, from the output's; differentiable."""
        found: list[Tensor | None] = [None] * len(needed)
        with torch.autocast(self.input.device.type, enabled=False):
            rows = grad.reshape(-1, grad.shape[-1])
            if needed[0]:
                weight = self.weight.to(self.dtype)
                of_input = grad @ (weight.t() if self.is_transposed else weight)
                found[0] = of_input.to(self.input.dtype)
            if needed[1]:
                input = self.input.to(self.dtype)
                of_weight = rows.t() @ input.reshape(-1, input.shape[-1])
                of_weight = of_weight.t() if self.is_transposed else of_weight
                found[1] = of_weight.to(self.weight.dtype)
            if self.bias is not None and needed[2]:
                found[2] = rows.sum(0).to(self.bias.dtype)
        return found


@dataclass(frozen=True, eq=False)
class PickedHead(Head):
    """A head of some rows, which are taken of another head's when it is opened.

    Attributes:
        whole: the other head, in the autograd graph; None only for the sake of defaults.
        pick: takes the rows of its input.
    """

    whole: Head | None = None
    pick: Callable[[Tensor], Tensor] | None = None

    def opened(self) -> Head:
        assert self.whole is not None
        assert self.pick is not None
        head = self.whole.opened()
        return replace(head, input=self.pick(head.input))


def apply(tensor: Tensor, steps: tuple[Step, ...]) -> Tensor:
    for function, args, kwargs in steps:
        tensor = function(tensor, *args, **dict(kwargs))
    return tensor


def picked(head: Head, steps: tuple[Step, ...]) -> tuple[Head, tuple[Step, ...]] | None:
    """A head of the rows that are left of its output after some steps.

    Returns:
        The head, and the steps that its output still needs, none of them a view; None if a view
        does not leave the classes whole and last.
    """
    input, rest = head.input, []
    for step, following in pairwise((*steps, None)):
        assert step is not None
        op, args, _ = step
        if op in COPIES:
            rest.append(step)
            continue
        if op in RESHAPES and following is not None and following[0] in RESHAPES:
            continue  # what it merges may be split again
        moved = _moved(input, op, args, head.classes)
        if moved is None:
            return None
        input = moved
    return replace(head, input=input), tuple(rest)


def gradient_before(head: Head, steps: tuple[Step, ...], grad: Tensor) -> Tensor:
    """The gradient of a head's input, from that of the input of ``picked(head, steps)``.

    Args:
        head: its tensors need no memory.
    """
    with torch.enable_grad():
        input = torch.empty_like(head.input, dtype=grad.dtype, device=grad.device)
        found = picked(replace(head, input=input.requires_grad_()), steps)
        assert found is not None
        (before,) = torch.autograd.grad(found[0].input, input, grad)
    return before


def _moved(input: Tensor, op: Any, args: tuple[Any, ...], classes: int) -> Tensor | None:
    """A view of the hidden state, whose last dimension has another size than the classes."""
    if op not in FOLLOWED:
        return input if op in ALIASES else None
    before = [*input.shape[:-1], classes]
    after = args[0] if op in RESHAPES else op(input, *args).shape
    place = View(op, (None, *args), before, after).place_of(len(before) - 1)
    if place is None or place != len(after) - 1:
        return None
    if op in RESHAPES:
        return input.reshape([*after[:-1], input.shape[-1]])
    moved: Tensor = op(input, *args)
    return moved
