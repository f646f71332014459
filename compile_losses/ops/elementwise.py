"""How an elementwise loss ``X`` of an input and a target becomes ops.

``fused::X``             public: checks, autocast and type promotion, then ``X_forward``
``fused::X_forward``     the loss
``fused::X_backward``    gradients of input, target and weight, recomputed from them
``fused::X_with_grad``   the loss and, in the same read, input's gradient for a grad_output of one
                         element on the device, or of 1
``fused::X_with_grad_``  the same, the gradient written over input

The last two are for compiled graphs only and are not differentiable. All but the public op take
the tensors first, ``input, target`` and the loss's optional weights, then its options. Their
reduction mean divides by the number of elements, with a weight too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.elementwise import Elementwise
from compile_losses.distributed import mesh_of
from compile_losses.eager import plain
from compile_losses.ops import checks
from compile_losses.ops.transforms import double_backward, needs_torch
from compile_losses.ops.weights import NO_WEIGHTS, Weights
from compile_losses.ops.with_grad import declare_with_grad
from compile_losses.torch_internals.ops import compute_elementwise_output_strides, schema_of

MEAN, SUM = checks.REDUCTIONS["mean"], checks.REDUCTIONS["sum"]


@dataclass(frozen=True)
class Parameter:
    """An argument of a loss besides its tensors and reduction, as its schema spells it."""

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
    weights: Weights = NO_WEIGHTS,
    check: Callable[..., None] = lambda *_: None,
    batchmean: bool = False,
    like_target: bool = False,
    like_input: bool = False,
    exact_target: bool = False,
    numbers_promote: bool = True,
) -> None:
    """Declares the five ops of the loss ``name``.

    Args:
        name: the loss's name in ``torch.nn.functional``.
        reference: the loss in torch's own ops, with X_forward's arguments less its dtype; used
            inside functorch, for second derivatives, where Inductor is to fuse the loss with what
            feeds it, and where there are no kernels.
        parameters: the loss's own arguments.
        weights: its optional tensors.
        check: raises for bad values of the parameters; called with them.
        batchmean: whether ``reduction=3`` is allowed.
        like_target: whether an unreduced loss follows target's strides instead of input's.
        like_input: whether it follows input's even where input is broadcast, and not target's.
        exact_target: whether target must have input's shape, and its dtype is the loss's.
        numbers_promote: whether an input or target without dimensions promotes the other like any
            tensor: torch's function expands both before it computes. Where torch composes the loss
            of ops, it does not.
    """
    reduction_and = ["int reduction=1", *_declarations(parameters, keyword_only=False)]
    public_arguments = [
        "Tensor input, Tensor target",
        *([] if weights.keyword_only else weights.declarations("=None")),
        *reduction_and,
        "*",
        *(weights.declarations("=None") if weights.keyword_only else []),
        *_declarations(parameters, keyword_only=True),
        "ScalarType? dtype=None",
    ]
    own = [*weights.declarations(), "int reduction", *(p.declaration for p in parameters)]
    tail = ", ".join(["Tensor target", *own])
    roots = weights.differentiable_arguments
    needs = ", ".join(f"bool needs_grad_{root}" for root in roots)
    public = library.define(f"{name}({', '.join(public_arguments)}) -> Tensor")
    forward = library.define(f"{name}_forward(Tensor input, {tail}, ScalarType dtype) -> Tensor")
    backward = library.define(
        f"{name}_backward(Tensor grad_output, Tensor input, {tail}, {needs}) "
        f"-> ({', '.join('Tensor' for _ in roots)})"
    )
    #: How many tensors come first in a leaf op's arguments.
    tensors = 2 + len(weights.names)

    def check_all(
        input: Tensor, target: Tensor, given: Sequence[Tensor | None], *options: Any
    ) -> torch.Size:
        reduction, *values = options
        checks.check_reduction(name, reduction, batchmean=batchmean)
        checks.check_floating(name, input=input, target=target)
        checks.check_same_device(name, input, target=target)
        check(*values)
        if exact_target and not checks.same_shape(input.shape, target.shape):
            raise ValueError(
                f"{name}: expected target to have input's shape {list(input.shape)}, "
                f"got {list(target.shape)}"
            )
        shape = checks.broadcast_shape(name, input, target)
        weights.check(name, shape, input, given)
        return shape

    names = [argument.name for argument in schema_of(public).arguments]
    defaults = {
        a.name: a.default_value for a in schema_of(public).arguments if a.has_default_value()
    }
    #: What X_forward takes between target and dtype, by default.
    options = (
        *(defaults[n] for n in (*weights.names, "reduction", *(p.name for p in parameters))),
    )
    #: How many of them come first that the public op takes by keyword alone, or by position.
    by_keyword = len(weights.names) if weights.keyword_only else 0
    by_position = len(weights.names) - by_keyword

    def public_kernel(input: Tensor, target: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if (
            named
            or not plain(input, target)
            or input.dtype != target.dtype
            or input.dtype not in checks.FLOATING
            or input.shape != target.shape
        ):
            return general(input, target, *arguments, **named)
        for weight in arguments[:by_position]:
            if weight is not None:
                return general(input, target, *arguments)
        given: tuple[Any, ...] = options[:by_keyword] + arguments
        given += options[len(given) :]
        reduction, *values = given[len(weights.names) :]
        checks.check_reduction(name, reduction, batchmean=batchmean)
        check(*values)
        return direct_forward.of_plain(input, target, *given, input.dtype)

    def general(*arguments: Any, **named: Any) -> Tensor:
        a = {**defaults, **dict(zip(names, arguments, strict=False)), **named}
        input, target, reduction, dtype = a["input"], a["target"], a["reduction"], a["dtype"]
        given = [a[weight] for weight in weights.names]
        values = [a[p.name] for p in parameters]
        mesh = mesh_of(name, input=input, target=target, **{n: a[n] for n in weights.names})
        shape = check_all(input, target, given, reduction, *values)

        def loss(reduction: int, dtype: torch.dtype) -> Tensor:
            return direct_forward(input, target, *given, reduction, *values, dtype)

        def torch_loss(reduction: int, dtype: torch.dtype) -> Tensor:
            cast = (None if t is None else t.to(dtype) for t in (input, target, *given))
            return reference(*cast, reduction, *values)

        normalizes = weights.normalize and reduction == MEAN and given[0] is not None
        promoting = [t for t in (input, target) if numbers_promote or checks.promotes(t, shape)]
        promoting += weights.promoting(given, shape, normalizes=normalizes)
        dtype = checks.loss_dtype(dtype, *([target] if exact_target else promoting))
        given = weights.to_floating(given, dtype)
        if mesh is not None:
            from compile_losses.distributed.elementwise import elementwise

            def part(*arguments: Any) -> Tensor:
                *parts, reduction, dtype = arguments
                return direct_forward(*parts, reduction, *values, dtype)

            divisors = {"mean": math.prod(shape), "batchmean": checks.batch_of(input)}
            return elementwise(
                name,
                mesh,
                part,
                {"input": input, "target": target, **dict(zip(weights.names, given, strict=True))},
                shape,
                reduction,
                dtype,
                divisors.get(checks.reduction_name(reduction)),
                weight_repeats=weights.repeats(a["weight"], shape) if normalizes else None,
                like=target if like_target else input,
            )
        function = torch_loss if needs_torch(input, target, *given) else loss
        if not normalizes:
            return function(reduction, dtype)
        # In float32 at least: sums of float16 overflow where their quotient does not.
        accumulation = checks.accumulation_type(dtype)
        total = function(SUM, accumulation)
        return (total / weights.total(a["weight"], shape, accumulation)).to(dtype)

    library.implement_public(public, public_kernel)

    def forward_fake(input: Tensor, target: Tensor, *rest: Any) -> Tensor:
        *options, dtype = rest[tensors - 2 :]
        shape = check_all(input, target, rest[: tensors - 2], *options)
        if options[0] != checks.REDUCTIONS["none"]:
            return input.new_empty((), dtype=dtype)
        if like_input:
            return torch.empty_like(input.expand(shape), dtype=dtype)
        first, second = (target, input) if like_target else (input, target)
        return _empty_pointwise(first, second, shape, dtype, computed=like_target)

    bodies = Elementwise(name, reference, weights.names)
    library.register_body(forward, forward_fake, bodies.forward)

    def backward_fake(grad_output: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        arguments, needed = rest[: -len(roots)], rest[-len(roots) :]
        input, target, *given = arguments[:tensors]
        shape = check_all(input, target, given, *arguments[tensors:])
        # What is yet to be summed over the broadcast dimensions is not rounded before.
        wide = checks.accumulation_type(checks.promoted_dtype(grad_output, input, target))
        return tuple(
            torch.empty_like(
                tensor.expand(shape),
                dtype=tensor.dtype if checks.same_shape(tensor.shape, shape) else wide,
            )
            if need and tensor is not None
            else (input if tensor is None else tensor).new_empty(0)
            for tensor, need in zip(arguments, needed, strict=False)
        )

    library.register_body(backward, backward_fake, bodies.backward)

    declare_with_grad(name, f"{tail}, ScalarType dtype", forward_fake, bodies)

    #: The gradients of X_forward's arguments after the roots.
    not_differentiable = (None,) * (tensors - len(roots) + 1 + len(parameters) + 1)

    def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.options = inputs[tensors:-1]

    def forward_vjp(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[: len(roots)]
        gradients = direct_backward(grad_output, *saved, *ctx.options, *needs)
        reduced = [
            sum_to_shape(gradient, tensor) if needed else None
            for gradient, tensor, needed in zip(gradients, saved, needs, strict=False)
        ]
        return (*reduced, *not_differentiable)

    direct_forward = library.register_autograd(forward, forward_vjp, setup_forward)

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[: 1 + tensors])
        ctx.options, ctx.needs = inputs[1 + tensors : -len(roots)], inputs[-len(roots) :]

    def backward_vjp(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad_output, *saved = ctx.saved_tensors
        count = sum(tensor is not None for tensor in saved[: len(roots)])

        # A loss may be narrower than its arguments, which lose no digits here.
        wide = checks.promoted_dtype(*(t for t in ctx.saved_tensors if t is not None))

        def loss(*arguments: Tensor) -> Tensor:
            cast = [None if t is None else t.to(wide) for t in (*arguments, *saved[count:])]
            reduction, *values = ctx.options
            if reduction == checks.REDUCTIONS["batchmean"]:  # the arguments are expanded here
                result = reference(*cast, SUM, *values) / checks.batch_of(saved[0])
            else:
                result = reference(*cast, reduction, *values)
            return result.to(grad_output.dtype)

        products = double_backward(
            loss,
            grad_output,
            saved[:count],
            [c if need else None for c, need in zip(cotangents, ctx.needs, strict=True)][:count],
            checks.broadcast_shape(name, *saved[:2]),
        )
        others = tensors - count + len(ctx.options) + len(roots)
        return (*products, *(None for _ in range(others)))

    direct_backward = library.register_autograd(backward, backward_vjp, setup_backward)


def _empty_pointwise(
    first: Tensor, second: Tensor, shape: torch.Size, dtype: torch.dtype, *, computed: bool
) -> Tensor:
    """As the kernels' function of this name: with the strides of torch's pointwise ops."""
    # Only tracing and meta tensors ask for it, and the module imports sympy.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    decides = computed or not any(guard_or_false(stride == 0) for stride in first.stride())
    if decides and checks.same_shape(first.shape, shape):
        return torch.empty_like(first, dtype=dtype)
    tensors = first.expand(shape), second.expand(shape)
    strides = compute_elementwise_output_strides(*tensors)
    if computed:
        tensors = torch.empty_like(first).expand(shape), first.new_empty_strided(shape, strides)
        strides = compute_elementwise_output_strides(*tensors)
    return first.new_empty_strided(shape, strides, dtype=dtype)


def sum_to_shape(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The gradient of a tensor that was broadcast."""
    if checks.same_shape(gradient.shape, tensor.shape):
        return gradient
    return gradient.sum_to_size(tensor.shape).to(tensor.dtype)


def _declarations(parameters: Sequence[Parameter], *, keyword_only: bool) -> list[str]:
    return [p.declaration_with_default for p in parameters if p.keyword_only == keyword_only]
