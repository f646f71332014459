"""How a loss ``X`` of rows of logits, or of log-probabilities, becomes leaf ops.

``fused::X_forward``         the loss, and tensors of a few numbers a row that the backward reads
``fused::X_backward``        the gradient of input, or those of input and target, each empty where
                             it is not needed
``fused::X_weight_backward`` the gradient of the weight of each class, of losses that have one
``fused::X_value``           the loss alone, in input's dtype, for eager calls that record no
                             gradient: to return several tensors takes as long as the loss of a
                             few rows

They take input first, then the loss's other tensors, then its options. Second derivatives are those
of torch's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.eager import Leaf
from compile_losses.ops.transforms import double_backward
from compile_losses.torch_internals.ops import OpOverload, schema_of

Op = OpOverload[..., Any]


@dataclass(frozen=True)
class RowOps:
    """The leaf ops of a loss.

    Attributes:
        forward: the op.
        direct_forward: the same, with a shorter way in eager code.
    """

    forward: Op
    direct_forward: Leaf


@dataclass(frozen=True)
class Signature:
    """The arguments of a loss, as its schemas spell them.

    Attributes:
        name: the loss.
        tensors: those after input.
        options: those after the tensors.
        last: of ``X_forward`` behind its dtype, and of the backward behind the options.
        saved: the names of what ``X_forward`` returns besides the loss.
    """

    name: str
    tensors: str
    options: str
    last: str = ""
    saved: Sequence[str] = ("stats",)

    @property
    def after_input(self) -> str:
        """The arguments of ``X_forward`` after input."""
        return f"{self.tensors}, {self.options}, ScalarType dtype{self.last}"

    def of_backward(self, needs: str = "") -> str:
        """The arguments of a gradient's op.

        Args:
            needs: the last of them.
        """
        saved = ", ".join(f"Tensor {name}" for name in self.saved)
        given = f"{self.tensors}, {saved}, {self.options}{self.last}{needs}"
        return f"Tensor grad_output, Tensor input, {given}"


def declare_row_loss(
    signature: Signature,
    reference: Callable[..., Tensor],
    check: Callable[..., None],
    forward_fake: Callable[..., tuple[Tensor, ...]],
    bodies: Any,
    *,
    of_target: bool = False,
    of_weight: bool = False,
) -> RowOps:
    """Declares the leaf ops of a loss, with their fakes, bodies and autograd formulas.

    Args:
        reference: the loss in torch's own ops, of input, the other tensors and the options.
        check: raises for bad arguments; called with those of ``reference``.
        forward_fake: the fake of ``X_forward``.
        bodies: their bodies, by the names of the ops without that of the loss.
        of_target: whether target has a gradient.
        of_weight: whether the weight of each class has one.
    """
    name, saves = signature.name, len(signature.saved)
    given = f"Tensor input, {signature.after_input}"
    forward = library.define(f"{name}_forward({given}) -> (Tensor{', Tensor' * saves})")
    flags = ", bool needs_grad_input, bool needs_grad_target" if of_target else ""
    gradients = "(Tensor, Tensor)" if of_target else "Tensor"
    backward = library.define(f"{name}_backward({signature.of_backward(flags)}) -> {gradients}")
    dtype_at = [argument.name for argument in schema_of(forward).arguments].index("dtype")
    #: The number of tensors, of input on.
    tensors = 1 + signature.tensors.count("Tensor")
    #: Of the arguments of X_forward after input, and of those of X_backward.
    no_gradients = (None,) * (len(schema_of(forward).arguments) - 1)
    none_of_backward = (None,) * len(schema_of(backward).arguments)
    weight_backward: Op | None = None
    if of_weight:
        given = signature.of_backward().replace("Tensor? weight", "Tensor weight")
        weight_backward = library.define(f"{name}_weight_backward({given}) -> Tensor")

    def check_backward(arguments: Sequence[Any]) -> None:
        check(*arguments[1 : 1 + tensors], *arguments[1 + tensors + saves :])

    def backward_fake(*arguments: Any) -> Any:
        _, input, target = arguments[:3]
        if not of_target:
            check_backward(arguments)
            return torch.empty_like(input)
        *given, needs_input, needs_target = arguments
        check_backward(given)
        return (
            torch.empty_like(input) if needs_input else input.new_empty(0),
            torch.empty_like(target) if needs_target else target.new_empty(0),
        )

    def weight_backward_fake(*arguments: Any) -> Tensor:
        check_backward(arguments)
        weight: Tensor = arguments[3]
        return weight.new_empty(weight.shape)

    library.register_body(forward, forward_fake, bodies.forward)
    library.register_body(backward, backward_fake, bodies.backward)

    def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = (*inputs[tensors:dtype_at], *inputs[dtype_at + 1 :])
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:tensors], *output[1:])

    def gradients_alone(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradient = direct_backward(grad_output, *ctx.saved_tensors, *ctx.options)
        return (gradient, *no_gradients)

    def gradients_of_both(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        arguments = (grad_output, *ctx.saved_tensors, *ctx.options)
        needs_input, needs_target, *others = ctx.needs_input_grad
        grad_input, grad_target, grad_weight = None, None, None
        if needs_input or needs_target:
            grad_input, grad_target = direct_backward(*arguments, needs_input, needs_target)
        if weight_backward is not None and others[0]:
            grad_weight = weight_backward(*arguments)
        gradients = (
            grad_input if needs_input else None,
            grad_target if needs_target else None,
            grad_weight,
        )
        return (*gradients, *no_gradients[2:])

    def products(ctx: Any, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The products with respect to grad_output and the arguments that have a cotangent."""
        grad_output, *given = ctx.saved_tensors
        dtype = grad_output.dtype
        count = len(cotangents) if given[len(cotangents) - 1] is not None else 2

        def torchs(*differentiated: Tensor) -> Tensor:
            every = (*differentiated, *given[count:])
            return reference(*(_cast(each, dtype) for each in every), *ctx.options)

        return double_backward(torchs, grad_output, given[:count], cotangents[:count])

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given, options = inputs[: 1 + tensors], inputs[1 + tensors + saves :]
        ctx.needs = (True,)
        if of_target:
            *options, needs_input, needs_target = options  # type: ignore[assignment]
            ctx.needs = (needs_input, needs_target)
        ctx.options = options
        ctx.save_for_backward(*given)

    def backward_vjp(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        needed = [c if needs else None for c, needs in zip(cotangents, ctx.needs, strict=True)]
        if of_weight:
            needed.append(None)
        found = products(ctx, needed)
        return (*found, *none_of_backward[len(found) :])

    def setup_weight_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.options = inputs[1 + tensors + saves :]
        ctx.save_for_backward(*inputs[: 1 + tensors])

    def weight_backward_vjp(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        found = products(ctx, (None, None, cotangent))
        return (*found, *none_of_backward[len(found) + 2 :])  # which has no flags

    forward_vjp = gradients_of_both if of_target else gradients_alone
    direct_forward = library.register_autograd(forward, forward_vjp, setup_forward)
    direct_backward = library.register_autograd(backward, backward_vjp, setup_backward)
    if weight_backward is not None:
        library.register_body(weight_backward, weight_backward_fake, bodies.weight_backward)
        library.register_autograd(weight_backward, weight_backward_vjp, setup_weight_backward)
    return RowOps(forward, direct_forward)


def declare_value(
    signature: Signature,
    forward_fake: Callable[..., tuple[Tensor, ...]],
    body: Callable[..., None],
) -> Callable[..., Any]:
    """Declares ``X_value`` of a loss without weights of classes; returns the op below autograd."""
    arguments = f"Tensor input, Tensor target, {signature.options}"
    value = library.define(f"{signature.name}_value({arguments}) -> Tensor")

    def value_fake(input: Tensor, target: Tensor, *options: Any) -> Tensor:
        return forward_fake(input, target, None, *options, input.dtype)[0]

    library.register_body(value, value_fake, body)
    return library.register_not_differentiable(value)


def _cast(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Logits, probabilities and weights in another dtype; class indices as they are."""
    return value.to(dtype) if value is not None and value.is_floating_point() else value
