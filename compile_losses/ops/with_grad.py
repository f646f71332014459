"""``X_with_grad`` and ``X_with_grad_``: a loss and, in the same read, its gradient.

The gradient is that of input, for a grad_output of one element on the device, or of 1. The second
op writes it over input. Both are for compiled graphs only and are not differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops import checks
from compile_losses.ops.ahead import declare_ahead
from compile_losses.torch_internals.ops import OpOverload, schema_of

Op = OpOverload[..., Any]


class Bodies(Protocol):
    """The bodies of both ops, see :func:`compile_losses.library.register_body`."""

    def with_grad(self, results: tuple[Tensor, Tensor], /, *arguments: Any) -> None: ...
    def with_grad_(self, loss: Tensor, /, *arguments: Any) -> None: ...


def declare_with_grad(
    name: str, arguments: str, forward_fake: Callable[..., Any], bodies: Bodies
) -> tuple[Op, Op]:
    """Declares both ops of the loss ``name``, with their fakes and bodies, and those of ``ahead``.

    Args:
        arguments: what ``X_forward`` takes after input, as its schema spells it.
        forward_fake: the fake of ``X_forward``, whose first result is the loss.
    """
    given = f"{arguments}, Tensor? grad_output=None"
    with_grad = library.define(f"{name}_with_grad(Tensor input, {given}) -> (Tensor, Tensor)")
    with_grad_ = library.define(f"{name}_with_grad_(Tensor(a!) input, {given}) -> Tensor")
    count = len(schema_of(with_grad).arguments) - 1

    def in_place_fake(*arguments: Any, grad_output: Tensor | None = None) -> Tensor:
        for number in (grad_output, *arguments[count:]):
            checks.check_grad_output(name, arguments[0], number)
        result = forward_fake(*arguments[:count])
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        return loss

    def fake(*arguments: Any, **grad_output: Tensor | None) -> tuple[Tensor, Tensor]:
        return in_place_fake(*arguments, **grad_output), torch.empty_like(arguments[0])

    library.register_body(with_grad, fake, bodies.with_grad)
    library.register_body(with_grad_, in_place_fake, bodies.with_grad_)
    library.register_not_differentiable(with_grad)
    library.register_not_differentiable(with_grad_)
    forward: Op = getattr(torch.ops.fused, f"{name}_forward").default
    declare_ahead(name, arguments, forward, with_grad, forward_fake)
    return with_grad, with_grad_
