"""A short way to call an op in eager and in compiled code. The dispatcher takes longer than several
small kernels.

It is for plain tensors outside of any mode or transform. Other calls go through the dispatcher and
the formulas registered with it, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compile_losses.torch_internals.eager import (
    count_function_modes,
    in_a_mode,
    is_any_autocast_enabled,
    is_functorch_wrapped_tensor,
)
from compile_losses.torch_internals.ops import (
    AUTOGRAD_KEY,
    OpOverload,
    call_boxed,
    call_of,
    exclude,
    handle_of,
    is_excluded,
    replace_call,
)

PLAIN = (Tensor, torch.nn.Parameter)


def below_autograd(op: OpOverload[..., Any]) -> Callable[..., Any]:
    """The op's own kernel, for plain tensors. Takes positional arguments."""
    handle = handle_of(op)

    def kernel(*inputs: Any) -> Any:
        # The same as BelowAutograd; creating its object would take half a microsecond.
        before = is_excluded(AUTOGRAD_KEY)
        exclude(AUTOGRAD_KEY, True)
        try:
            return call_boxed(handle, *inputs)
        finally:
            exclude(AUTOGRAD_KEY, before)

    return kernel


def shorten_calls_without_gradients(op: OpOverload[..., Any]) -> None:
    """Has calls of an op go below autograd at once where they can record no gradient, as its
    kernel for autograd would do there. Compiled code calls ops so: it runs with gradients
    switched off, and takes tensors out of their classes.

    That kernel is a function in Python. Getting to it and from there takes longer than the rest of
    a call.
    """
    original, kernel = call_of(op), below_autograd(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or torch.is_grad_enabled() or in_a_mode() or count_function_modes():
            return original(*args, **kwargs)
        for value in args:
            if isinstance(value, Tensor) and type(value) not in PLAIN:
                return original(*args)
        return kernel(*args)

    replace_call(op, call)


class Leaf:
    """An op with its autograd formula. Takes positional arguments."""

    def __init__(
        self,
        op: OpOverload[..., Any],
        backward: Callable[..., Any],
        setup_context: Callable[..., Any],
    ) -> None:
        kernel = below_autograd(op)

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = kernel(*inputs)
                setup_context(ctx, inputs, output)
                ctx.set_materialize_grads(False)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                for grad in grads:
                    if grad is not None:
                        return backward(ctx, *grads)
                return (None,) * len(ctx.needs_input_grad)

        self.op = op
        self.kernel = kernel
        # The same as Function.apply, without its search for functorch's levels and dead wrappers.
        self.differentiable = super(torch.autograd.Function, Direct).apply

    def __call__(self, *inputs: Any) -> Any:
        if in_a_mode():
            return self.op(*inputs)
        requires_grad = False
        for value in inputs:
            if isinstance(value, Tensor):
                if type(value) not in PLAIN or is_functorch_wrapped_tensor(value):
                    return self.op(*inputs)
                requires_grad = requires_grad or value.requires_grad
        if requires_grad and torch.is_grad_enabled():
            return self.differentiable(*inputs)
        return self.kernel(*inputs)

    def of_plain(self, input: Tensor, target: Tensor, *others: Any) -> Any:
        """The same if all tensors are :func:`plain`."""
        if records_gradient(input, target):
            return self.differentiable(input, target, *others)
        return self.kernel(input, target, *others)


def records_gradient(input: Tensor, target: Tensor) -> bool:
    return torch.is_grad_enabled() and (input.requires_grad or target.requires_grad)


def plain(input: Tensor, target: Tensor) -> bool:
    """Whether a loss of both can take the short way, in input's dtype: they are plain tensors on
    one device, and neither a mode nor autocast is active."""
    return (
        type(input) in PLAIN
        and type(target) in PLAIN
        and input.device == target.device
        and not is_any_autocast_enabled()
        and not in_a_mode()
        and not is_functorch_wrapped_tensor(input)
        and not is_functorch_wrapped_tensor(target)
    )
