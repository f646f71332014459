"""How an elementwise loss ``X`` of an input and a target becomes ops.

``fused::X``             public: checks, autocast and type promotion, then ``X_forward``
``fused::X_forward``     the loss
``fused::X_backward``    gradients of input and target, recomputed from them
``fused::X_with_grad``   the loss and, in the same read, input's gradient for a grad_output of one
                         element on the device, or of 1
``fused::X_with_grad_``  the same, the gradient written over input

The last two are for compiled graphs only and are not differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops import checks
from compile_losses.ops.transforms import double_backward, needs_torch

#: Each loss in torch's own ops, called as ``reference(input, target, reduction, *parameters)``.
REFERENCES: dict[str, Callable[..., Tensor]] = {}


@dataclass(frozen=True)
class Parameter:
    """An argument of a loss besides input, target and reduction, as its schema spells it."""

    type: str
    name: str
    default: str
    keyword_only: bool = False

    @property
    def declaration(self) -> str:
        return f"{self.type} {self.name}"

    @property
    def declaration_with_default(self) -> str:
        return f"{self.declaration}={self.default}"


def declare(
    name: str,
    reference: Callable[..., Tensor],
    parameters: Sequence[Parameter] = (),
    *,
    check: Callable[..., None] = lambda *_: None,
    batchmean: bool = False,
    like_target: bool = False,
) -> None:
    """Declares the five ops of the loss ``name``.

    Args:
        name: the loss's name in ``torch.nn.functional``.
        reference: the loss in torch's own ops, see REFERENCES; used inside functorch, for second
            derivatives, and where Inductor is to fuse the loss with what feeds it.
        parameters: the loss's own arguments.
        check: raises for bad values of the parameters; called with them.
        batchmean: whether ``reduction=3`` is allowed.
        like_target: whether an unreduced loss follows target's strides instead of input's.
    """
    REFERENCES[name] = reference
    positional = [p for p in parameters if not p.keyword_only]
    keyword = [p for p in parameters if p.keyword_only]
    public_arguments = ", ".join(
        [
            "Tensor input, Tensor target, int reduction=1",
            *(p.declaration_with_default for p in positional),
            "*",
            *(p.declaration_with_default for p in keyword),
            "ScalarType? dtype=None",
        ]
    )
    own = "".join(f", {p.declaration}" for p in parameters)
    tail = f"Tensor target, int reduction{own}"
    known = "ScalarType dtype, Tensor? grad_output=None"
    public = library.define(f"{name}({public_arguments}) -> Tensor")
    forward = library.define(f"{name}_forward(Tensor input, {tail}, ScalarType dtype) -> Tensor")
    backward = library.define(
        f"{name}_backward(Tensor grad_output, Tensor input, {tail}, bool needs_grad_input, "
        "bool needs_grad_target) -> (Tensor, Tensor)"
    )
    with_grad = library.define(
        f"{name}_with_grad(Tensor input, {tail}, {known}) -> (Tensor, Tensor)"
    )
    with_grad_ = library.define(f"{name}_with_grad_(Tensor(a!) input, {tail}, {known}) -> Tensor")

    def check_all(input: Tensor, target: Tensor, reduction: int, *values: Any) -> torch.Size:
        checks.check_reduction(name, reduction, batchmean=batchmean)
        checks.check_floating(name, input=input, target=target)
        checks.check_same_device(name, input, target=target)
        check(*values)
        return checks.broadcast_shape(name, input, target)

    def public_kernel(
        input: Tensor,
        target: Tensor,
        reduction: int = 1,
        *values: Any,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> Tensor:
        values = (
            *values,
            *(named.get(p.name, _value(p.default)) for p in parameters[len(values) :]),
        )
        check_all(input, target, reduction, *values)
        dtype = checks.loss_dtype(dtype, input, target)
        if needs_torch(input, target):
            return reference(input.to(dtype), target.to(dtype), reduction, *values)
        return forward(input, target, reduction, *values, dtype)

    library.implement_public(public, public_kernel)

    def forward_fake(input: Tensor, target: Tensor, reduction: int, *rest: Any) -> Tensor:
        *values, dtype = rest
        shape = check_all(input, target, reduction, *values)
        if reduction != checks.REDUCTIONS["none"]:
            return input.new_empty((), dtype=dtype)
        return torch.empty_like((target if like_target else input).expand(shape), dtype=dtype)

    library.register_fake(forward, forward_fake)

    def backward_fake(
        grad_output: Tensor, input: Tensor, target: Tensor, reduction: int, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        *values, needs_input, needs_target = rest
        shape = check_all(input, target, reduction, *values)

        def gradient(tensor: Tensor, needed: bool) -> Tensor:
            return torch.empty_like(tensor.expand(shape)) if needed else tensor.new_empty(0)

        return gradient(input, needs_input), gradient(target, needs_target)

    library.register_fake(backward, backward_fake)

    forward_arguments = len(forward._schema.arguments)

    def with_grad_in_place_fake(*arguments: Any, grad_output: Tensor | None = None) -> Tensor:
        for given in (grad_output, *arguments[forward_arguments:]):
            checks.check_grad_output(name, arguments[0], given)
        return forward_fake(*arguments[:forward_arguments])

    def with_grad_fake(*arguments: Any, **grad_output: Tensor | None) -> tuple[Tensor, Tensor]:
        loss = with_grad_in_place_fake(*arguments, **grad_output)
        return loss, torch.empty_like(arguments[0])

    library.register_fake(with_grad, with_grad_fake)
    library.register_fake(with_grad_, with_grad_in_place_fake)
    library.register_not_differentiable(with_grad)
    library.register_not_differentiable(with_grad_)

    def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, target, *ctx.options, _ = inputs
        ctx.save_for_backward(input, target)

    def forward_vjp(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, target = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        gradients = backward(grad_output, input, target, *ctx.options, *needs)
        reduced = (
            gradient.sum_to_size(tensor.shape) if needed else None
            for gradient, tensor, needed in zip(gradients, (input, target), needs, strict=True)
        )
        return (*reduced, *(None for _ in ctx.options), None)

    library.register_autograd(forward, forward_vjp, setup_forward)

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        grad_output, input, target, *ctx.options, needs_input, needs_target = inputs
        ctx.needs = (needs_input, needs_target)
        ctx.save_for_backward(grad_output, input, target)

    def backward_vjp(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad_output, input, target = ctx.saved_tensors
        shape = checks.broadcast_shape(name, input, target)
        products = double_backward(
            lambda x, y: reference(x, y, *ctx.options),
            grad_output,
            (input, target),
            [c if needed else None for c, needed in zip(cotangents, ctx.needs, strict=True)],
            shape,
        )
        return (*products, *(None for _ in ctx.options), None, None)

    library.register_autograd(backward, backward_vjp, setup_backward)


def _value(literal: str) -> Any:
    return {"True": True, "False": False}.get(literal) if literal.isalpha() else float(literal)
