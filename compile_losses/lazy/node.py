"""Lazy logits and their head's place in the autograd graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses.lazy.automatic import Call
from compile_losses.lazy.gradient import parts_of
from compile_losses.lazy.head import Head
from compile_losses.lazy.path import HeadFunction
from compile_losses.lazy.source import ALL_KEPT, Source
from compile_losses.lazy.tensor import LazyLogits, first_output
from compile_losses.torch_internals.tensors import FakeTensor


@dataclass(frozen=True, eq=False)
class Wishes:
    """How lazy a head's output is.

    Attributes:
        remedy: how a user keeps all logits.
        call: the call that returns it, with ``"auto"``.
    """

    remedy: str = ALL_KEPT
    call: Call | None = None


class _Lazy(HeadFunction):
    """A linear layer, to autograd."""

    @staticmethod
    def forward(ctx: Any, head: Head, wishes: Wishes, *tensors: Tensor) -> LazyLogits:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:2])  # a bias may be changed, as that of torch's layer
        ctx.head = head.with_tensors(*(tensor.to("meta") for tensor in tensors))
        held = head.with_tensors(*(tensor.detach() for tensor in tensors))
        source, call = Source(held, wishes.remedy), wishes.call
        made = first_output(held, head, source, None if call is None else call.computed)
        if call is not None:
            call.watch(source, head.weight)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        if grad is None:  # a graph that took the head in the place of the logits gives it its own
            return (None,) * (2 + len(needed))
        parts, rest = parts_of(grad)
        if rest is not None:
            head = ctx.head.with_tensors(*ctx.saved_tensors, ctx.head.bias)
            parts.append(tuple(head.gradients(rest, needed)))
        return (None, None, *map(_sum, zip(*parts, strict=True)))


def _sum(grads: tuple[Tensor | None, ...]) -> Tensor | None:
    total: Tensor | None = None
    for grad in grads:
        total = grad if total is None else total if grad is None else total + grad
    return total


def lazy_logits(head: Head, wishes: Wishes = Wishes()) -> Tensor:
    """A head's output, computed when it is read.

    Args:
        head: its tensors are in the autograd graph, to which gradients go.
    """
    # Tracing calls what is compiled, too, and only asks for shapes. A tensor of inference mode
    # could not become one of numbers later; Dynamo does not show this mode to a backend.
    is_traced = any(isinstance(tensor, FakeTensor) for tensor in head.tensors)
    if is_traced or torch.is_inference_mode_enabled():
        return head.output()
    result: Tensor = _Lazy.apply(head, wishes, *head.tensors)
    return result
