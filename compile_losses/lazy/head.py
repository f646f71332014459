"""The linear layer behind lazy logits: its output, for all rows or for some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compile_losses.torch_internals.ops import schema_of

aten = torch.ops.aten

#: Ops whose result is another view of the same memory, as between a head and its loss.
VIEWS = frozenset(
    (
        *(aten.alias.default, aten.detach.default, aten.view.default, aten._unsafe_view.default),
        *(aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default),
        *(aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim),
        *(aten.squeeze.dims, aten.expand.default),
    )
)
#: Ops of one tensor and numbers whose result is new, and which wait as the logits do: casts, copies
#: and what heads do to their output.
COPIES = frozenset(
    (
        *(aten._to_copy.default, aten.clone.default, aten.tanh.default, aten.neg.default),
        *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar),
    )
)
#: Ops whose result is the same view.
SAME = (aten.alias.default, aten.detach.default)

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


@cache
def is_view(op: Any) -> bool:
    """Whether an op's result is another view of the memory of its first argument."""
    schema = schema_of(op)
    first = schema.arguments[0].alias_info if schema.arguments else None
    aliases = [result.alias_info for result in schema.returns]
    return (
        len(aliases) == 1
        and None not in (first, *aliases)
        and not any(alias.is_write for alias in (first, *aliases))
        and str(schema.returns[0].type) == "Tensor"
        and all(argument.alias_info is None for argument in schema.arguments[1:])
    )


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
    for step in steps:
        op, args, _ = step
        if op in COPIES:
            rest.append(step)
            continue
        moved = _moved(input, op, args, head.classes)
        if moved is None:
            return None
        input = moved
    return replace(head, input=input), tuple(rest)


def _moved(input: Tensor, op: Any, args: tuple[Any, ...], classes: int) -> Tensor | None:
    """A view of the hidden state, whose last dimension has another size than the classes."""
    ndim, last = input.dim(), input.dim() - 1
    if op in (aten.view.default, aten._unsafe_view.default):
        sizes = list(args[0])
        is_of_rows = bool(sizes) and sizes[-1] == classes
        return input.reshape([*sizes[:-1], input.shape[-1]]) if is_of_rows else None
    if op in (aten.alias.default, aten.detach.default):
        dims = []
    elif op in (aten.slice.Tensor, aten.select.int):
        dims = [args[0] if args else 0]
    elif op is aten.transpose.int:
        dims = [args[0], args[1]]
    elif op is aten.unsqueeze.default:
        dims = [] if args[0] % (ndim + 1) != ndim else [last]
    elif op is aten.permute.default:
        dims = [] if args[0][-1] % ndim == last else [last]
    else:
        return None
    moved: Tensor | None = None if last in [dim % ndim for dim in dims] else op(input, *args)
    return moved
