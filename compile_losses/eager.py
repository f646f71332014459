"""The short way of an op in eager code, past machinery that costs several times a small kernel.

It is for plain tensors outside of any mode or transform; everything else takes the dispatcher's
way, through the formulas registered there, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def below_autograd(op: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """The op's own kernel, for plain tensors. Takes positional arguments."""
    handle, call_boxed = op._handle, torch._C._dispatch_call_boxed
    # As torch._C._AutoDispatchBelowAutograd, whose object alone costs half a microsecond.
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded

    def kernel(*inputs: Any) -> Any:
        before = is_excluded(AUTOGRAD)
        exclude(AUTOGRAD, True)
        try:
            return call_boxed(handle, *inputs)
        finally:
            exclude(AUTOGRAD, before)

    return kernel


class Leaf:
    """An op with its autograd formula. Takes positional arguments."""

    def __init__(
        self,
        op: torch._ops.OpOverload[..., Any],
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
        # As Function.apply, which first looks for functorch's levels and its dead wrappers.
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
        """The same for tensors that are :func:`plain`, and no others beside them."""
        if records_gradient(input, target):
            return self.differentiable(input, target, *others)
        return self.kernel(input, target, *others)


def records_gradient(input: Tensor, target: Tensor) -> bool:
    return torch.is_grad_enabled() and (input.requires_grad or target.requires_grad)


def in_a_mode() -> bool:
    """Whether calls are intercepted: by dispatch modes, functorch, dual numbers or tracing."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def plain(input: Tensor, target: Tensor) -> bool:
    """Whether a loss of both can take the short way, in input's dtype: they are plain tensors of
    one device, and there are neither modes nor autocast."""
    return (
        type(input) in PLAIN
        and type(target) in PLAIN
        and input.device == target.device
        and not torch._C._is_any_autocast_enabled()
        and not in_a_mode()
        and not is_functorch_wrapped_tensor(input)
        and not is_functorch_wrapped_tensor(target)
    )
