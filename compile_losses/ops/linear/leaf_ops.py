"""The leaf ops of a loss of a linear layer's output: schemas, fakes and autograd formulas.

``fused::X_forward``         the loss
``fused::X_backward``        the gradients, from the logits computed again
``fused::X_with_grad``       the loss, and the gradients for a grad_output of one number, or for 1.
                             Differentiable: it is what autograd differentiates, in eager mode and
                             in AOTAutograd's graphs
``fused::X_rows_with_grad``  the same for reduction none, which the passes put into graphs: the
                             row_function makes the grad_output of each row of its loss and of what
                             is known (:mod:`compile_losses.ops.linear.row_function`).
                             Differentiable in eager mode, where all are 1 and only input needs a
                             gradient (:mod:`compile_losses.ops.linear.unit_gradients`)

They take the rows that count as well, as ``fused::counted_rows`` has counted them. Of the others
the gradients are 0, and the losses of such rows are those of equal logits, or 0 where they are
ignored. A call with such rows is not differentiable.

They take input [rows, hidden], linear_weight [classes, hidden] and, as their fourth argument,
linear_bias: these have gradients, and no other argument has. Gradients that are not needed are
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops.checks import REDUCTIONS, accumulation_type
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.row_chunks import Problem, RowChunks, Several
from compile_losses.ops.linear.unit_gradients import (
    NO_MORE,
    check_unit,
    has_unit_gradients,
    scaled_by_row,
    unit_function,
)
from compile_losses.ops.scale import scale, scale_
from compile_losses.ops.transforms import double_backward
from compile_losses.torch_internals.eager import (
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    retains_graph,
)
from compile_losses.torch_internals.ops import OpOverload, schema_of

NEEDS = "bool needs_grad_input, bool needs_grad_linear_weight, bool needs_grad_linear_bias"
#: The rows that count, see :mod:`compile_losses.ops.counted_rows`; by default all.
COUNTED = "Tensor? counted=None"


#: Places of the arguments with gradients.
_LAYER = (0, 1, 3)


@dataclass(frozen=True)
class Leaves:
    """The leaf ops of a loss, which take positional arguments.

    Attributes:
        with_grad: None for a loss with several results.
    """

    forward: OpOverload[..., Any]
    backward: OpOverload[..., Any]
    rows_with_grad: OpOverload[..., Any]
    formulas: _Autograd
    with_grad: Any = None

    def __call__(self, arguments: tuple[Any, ...], *, by_row: bool) -> Tensor:
        """The loss of these arguments, with its gradients if they can be computed with it.

        Args:
            by_row: whether the reduction is none.
        """
        if by_row:
            loss: Tensor = self.of_rows(arguments)
            return loss
        input = arguments[0]
        needs = [t is not None and t.requires_grad for t in map(arguments.__getitem__, _LAYER)]
        if not (torch.is_grad_enabled() and any(needs)) or input.dtype == torch.float16:
            return self.forward(*arguments)
        loss, *_ = self.with_grad(*arguments, *needs)
        return loss

    def of_rows(self, arguments: tuple[Any, ...], *, has_first: bool = True) -> Any:
        """The result, or the results, for each row, with the gradient of the first result if that
        can be computed with them.

        Args:
            has_first: whether the first result was asked for, and most likely no other has a
                gradient.
        """
        first = has_first and not self.formulas.others_had_gradients
        if not first or not has_unit_gradients(*map(arguments.__getitem__, _LAYER)):
            return self.forward(*arguments)
        found = self.rows_with_grad(*arguments, True, False, False, self.formulas.unit, [])
        results = tuple(found[: -len(_LAYER)])
        return results if self.with_grad is None else results[0]


@dataclass
class _Autograd:
    """What the autograd formulas of a loss's leaf ops share.

    Attributes:
        count, tensors: how many arguments they share, and how many of these are tensors.
        results: how many results have gradients.
        backward: the op.
        reference: the loss in torch's own ops, or those results of which there are several.
        unit: the text of the row function of gradients that are computed in eager code.
        others_had_gradients: whether a gradient ever came to another result than the first of such
            a call, as to an entropy that is a part of the loss. Then a gradient of the first alone
            would be computed in vain.
    """

    count: int
    tensors: int
    results: int
    backward: OpOverload[..., Any]
    reference: Callable[..., Any]
    unit: str
    others_had_gradients: bool = False

    def save(self, ctx: Any, arguments: tuple[Any, ...], *more: Tensor | None) -> None:
        # Otherwise an output without a gradient would get one of zeros, as large as a weight.
        ctx.set_materialize_grads(False)
        ctx.options = arguments[self.tensors :]
        ctx.save_for_backward(*arguments[: self.tensors], *more)

    def in_place_of_arguments(self, gradients: Any, needs: Any) -> tuple[Tensor | None, ...]:
        """Gradients of input, linear_weight and linear_bias, in the order of the arguments."""
        found: list[Tensor | None] = [None] * self.count
        for place, gradient, needed in zip(_LAYER, gradients, needs, strict=True):
            found[place] = gradient if needed else None
        return tuple(found)

    def _check_all_rows(self, counted: Sequence[Tensor | None]) -> None:
        """The dispatcher fills in that all rows count, and eager calls do not."""
        if any(each is not None for each in counted):
            name = schema_of(self.backward).name.removesuffix("_backward")
            raise RuntimeError(f"{name}: the rows that count are for calls that record no gradient")

    def setup_forward(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self._check_all_rows(inputs[self.count :])
        self.save(ctx, inputs[: self.count])
        if not isinstance(output, Tensor):
            ctx.mark_non_differentiable(*output[self.results :])

    def forward_vjp(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = gradients[: self.results]
        if all(gradient is None for gradient in given):
            return (None,) * self.count
        needs = [ctx.needs_input_grad[place] for place in _LAYER]
        found = self.backward(*given, *ctx.saved_tensors, *ctx.options, *needs)
        return self.in_place_of_arguments(found, needs)

    def setup_rows(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        arguments, needs = inputs[: self.count], inputs[self.count : self.count + 3]
        text, _, *counted = inputs[self.count + 3 :]
        self._check_all_rows(counted)
        check_unit(schema_of(self.backward).name, needs, text, self.unit)
        ctx.mark_non_differentiable(*output[self.results :])
        self.save(ctx, arguments, output[-len(_LAYER)])

    def rows_vjp(self, ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        first, *others = gradients[: self.results]
        # Unpacking compares versions: the inputs must not have changed since.
        *tensors, unit = ctx.saved_tensors
        needs = (True, False, False)
        if any(gradient is not None for gradient in others):
            self.others_had_gradients = True
        elif first is None:
            return (*(None,) * self.count, *NO_MORE)
        elif not torch.is_grad_enabled():
            overwrites = _are_ours_to_overwrite((unit,), first)
            found = (scaled_by_row(unit, first, overwrites=overwrites), None, None)
            return (*self.in_place_of_arguments(found, needs), *NO_MORE)
        found = self.backward(first, *others, *tensors, *ctx.options, *needs)
        return (*self.in_place_of_arguments(found, needs), *NO_MORE)

    def setup_backward(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        gradients, inputs = inputs[: self.results], inputs[self.results :]
        arguments, ctx.needs = inputs[: self.count], inputs[self.count : self.count + 3]
        self._check_all_rows(inputs[self.count + 3 :])
        unneeded = [g for g, needed in zip(output, ctx.needs, strict=True) if not needed]
        ctx.mark_non_differentiable(*unneeded)
        self.save(ctx, arguments, *gradients)

    def backward_vjp(self, ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """By torch's formulas, for the sum of the results times their gradients."""
        wanted = [c if needed else None for c, needed in zip(cotangents, ctx.needs, strict=True)]
        if all(cotangent is None for cotangent in wanted):
            return (None,) * (self.results + self.count + len(_LAYER))
        tensors, gradients = ctx.saved_tensors[: self.tensors], ctx.saved_tensors[self.tensors :]
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]
        places = [place for place in _LAYER if tensors[place] is not None]

        def total(*roots: Tensor) -> Tensor:
            factors, own = roots[: len(given)], dict(zip(places, roots[len(given) :], strict=True))
            arguments = [own.get(place, tensor) for place, tensor in enumerate(tensors)]
            found = self.reference(*arguments, *ctx.options)
            found = (found,) if isinstance(found, Tensor) else found
            products = [
                (found[place] * factor).sum()
                for place, factor in zip(given, factors, strict=True)
                if found[place] is not None
            ]
            return torch.stack(products).sum()

        roots = [*(gradients[place] for place in given), *(tensors[place] for place in places)]
        one = tensors[0].new_ones((), dtype=accumulation_type(tensors[0].dtype))
        with autocast_off(tensors[0]):
            none = [None] * len(given)
            _, *products = double_backward(total, one, roots, none + wanted[: len(places)])
        of_gradients: list[Tensor | None] = [None] * self.results
        for place, product in zip(given, products, strict=False):
            of_gradients[place] = product
        of_layer = [*products[len(given) :], *[None] * (len(_LAYER) - len(places))]
        every = (True,) * len(_LAYER)
        return *of_gradients, *self.in_place_of_arguments(of_layer, every), None, None, None


def declare_leaves(
    name: str,
    arguments: str,
    *,
    problem: Callable[..., Problem],
    check: Callable[..., None],
    reference: Callable[..., Any],
    several: Several | None = None,
) -> Leaves:
    """Declares the leaf ops of the loss ``name``.

    Args:
        arguments: of all of them, as their schemas spell them: tensors, then options. If the loss
            has one result, these are the reduction and others, the last of which is its dtype.
        problem: their kernels' problem, from these arguments and a grad_output.
        check: raises for bad arguments.
        reference: the loss in torch's own ops, of these arguments; or its results with gradients,
            None for one that nobody asked for.
        several: the results; by default there is one.
    """
    count, tensors = arguments.count(",") + 1, arguments.count("Tensor")
    results, gradients = "Tensor", "Tensor grad_output"
    if several is not None:
        results = ", ".join(["Tensor"] * several.count)
        gradients = ", ".join(f"Tensor? {gradient}" for gradient in several.gradients)
    forward = library.define(
        f"{name}_forward({arguments}, {COUNTED}) -> "
        f"{results if several is None else f'({results})'}"
    )
    backward = library.define(
        f"{name}_backward({gradients}, {arguments}, {NEEDS}, {COUNTED}) -> (Tensor, Tensor, Tensor)"
    )
    rows_with_grad = library.define(
        f"{name}_rows_with_grad({arguments}, {NEEDS}, str row_function, Tensor[] known, "
        f"{COUNTED}) -> ({results}, Tensor, Tensor, Tensor)"
    )
    chunks = RowChunks(name, count, tensors, problem, several)
    computed, with_gradients = 1, 1
    if several is not None:
        computed, with_gradients = several.count, len(several.gradients)

    def forward_fake(*rest: Any) -> Any:
        arguments = rest[:count]
        check(*arguments)
        if several is not None:
            return several.fake(*arguments)
        input, *_, dtype = arguments
        each = arguments[tensors] == REDUCTIONS["none"]
        return input.new_empty(input.shape[:1] if each else (), dtype=dtype)

    def backward_fake(*rest: Any) -> tuple[Tensor, ...]:
        rest = rest[with_gradients:]
        forward_fake(*rest)
        return gradients_fake(rest[:count], rest[count : count + 3])

    def with_grad_fake(*rest: Any) -> tuple[Tensor, ...]:
        found = forward_fake(*rest)
        found = (found,) if several is None else found
        return *found, *gradients_fake(rest[:count], rest[count : count + 3])

    for op, kernel, fake in (
        (forward, chunks.forward, forward_fake),
        (backward, chunks.backward, backward_fake),
        (rows_with_grad, chunks.rows_with_grad, with_grad_fake),
    ):
        library.implement(op, kernel, "CompositeExplicitAutograd")
        library.register_fake(op, fake)
    unit = unit_function(computed, with_gradients)
    formulas = _Autograd(count, tensors, with_gradients, backward, reference, unit)
    library.register_autograd(rows_with_grad, formulas.rows_vjp, formulas.setup_rows)
    library.register_autograd(forward, formulas.forward_vjp, formulas.setup_forward)
    library.register_autograd(backward, formulas.backward_vjp, formulas.setup_backward)
    if several is not None:
        return Leaves(forward, backward, rows_with_grad, formulas)
    with_grad = library.define(
        f"{name}_with_grad({arguments}, {NEEDS}, Tensor? grad_output=None, "
        f"{COUNTED}) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.implement(with_grad, chunks.with_grad, "CompositeExplicitAutograd")
    library.register_fake(with_grad, with_grad_fake)
    _differentiate_with_grad(with_grad, formulas)
    return Leaves(forward, backward, rows_with_grad, formulas, with_grad)


def _differentiate_with_grad(with_grad: OpOverload[..., Any], formulas: _Autograd) -> None:
    """Registers the formula of ``X_with_grad``, which has made the gradients."""
    nothing = (None,) * (formulas.count + 5)

    def setup_with_grad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *arguments, needs_input, needs_weight, needs_bias, grad_output, _ = inputs
        if grad_output is not None:
            raise RuntimeError(
                f"{schema_of(with_grad).name} is differentiable for a grad_output of 1 alone"
            )
        ctx.needs = (needs_input, needs_weight, needs_bias)
        _, *gradients = output
        ctx.mark_non_differentiable(*gradients)
        formulas.save(ctx, tuple(arguments), *gradients)

    def with_grad_vjp(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return nothing
        # Unpacking compares versions: the inputs must not have changed since the gradients were
        # made.
        *tensors, grad_input, grad_weight, grad_bias = ctx.saved_tensors
        gradients: Any = (grad_input, grad_weight, grad_bias)
        if torch.is_grad_enabled():  # create_graph
            gradients = formulas.backward(grad_output, *tensors, *ctx.options, *ctx.needs)
        elif _are_ours_to_overwrite(gradients, grad_output):
            for gradient, needed in zip(gradients, ctx.needs, strict=True):
                if needed:
                    scale_(gradient, grad_output)
        else:
            gradients = [
                scale(gradient, grad_output) if needed else gradient
                for gradient, needed in zip(gradients, ctx.needs, strict=True)
            ]
        return *formulas.in_place_of_arguments(gradients, ctx.needs), *nothing[-5:]

    library.register_autograd(with_grad, with_grad_vjp, setup_with_grad)


def gradients_fake(arguments: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    input, linear_weight, _, linear_bias, *_ = arguments
    return tuple(
        input.new_empty(tensor.shape if needed else 0)
        for tensor, needed in zip((input, linear_weight, linear_bias), needs, strict=True)
    )


def _are_ours_to_overwrite(gradients: tuple[Tensor, ...], grad_output: Tensor) -> bool:
    """Whether this backward is the last to read the saved gradients, which nobody else has.

    Without retain_graph autograd frees them when it returns, and refuses another backward. Tensors
    that are being traced keep to functional ops, from which the graph passes choose.
    """
    if any(type(tensor) is not Tensor for tensor in (*gradients, grad_output)):
        return False
    if is_functorch_wrapped_tensor(grad_output) or is_legacy_batchedtensor(grad_output):
        return False
    if torch.compiler.is_compiling():
        return False
    return not retains_graph()
