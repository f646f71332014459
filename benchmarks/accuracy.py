"""Checks every contender against float64 before it is timed. By one rule: its error may be at most
twice eager torch's in the same dtype, or a few ulp if eager torch's is smaller."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from benchmarks.cases import Case, Pass

ULPS = 4
BLOCK = 1 << 24  # elements worked on at a time in float64


@dataclass(frozen=True)
class Reference:
    """The loss and the gradient of its first input in float64."""

    loss: float
    gradient: Tensor
    largest: float  # the largest absolute value of the gradient


@dataclass(frozen=True)
class Errors:
    """The errors of a result against the reference.

    The gradient has two measures. In a cross entropy the targets' entries are so much larger than
    the others that an absolute measure depends only on them.
    """

    loss: float
    gradient_largest: float = 0.0  # largest absolute error
    gradient_relative: float = 0.0  # mean over the elements of |error| / |reference|


def _blocks(tensor: Tensor) -> list[slice]:
    rows = tensor.shape[0]
    step = max(1, BLOCK // max(1, tensor[0].numel()))
    return [slice(first, first + step) for first in range(0, rows, step)]


def reference(case: Case, inputs: tuple[Tensor, ...]) -> Reference:
    first = inputs[0]
    divisor = case.divisor(*inputs)
    gradient = torch.empty(first.shape, dtype=torch.float64, device=first.device)
    total = largest = 0.0
    for rows in _blocks(first):
        block = [t[rows].double() if t.is_floating_point() else t[rows] for t in inputs]
        block[0] = block[0].detach().requires_grad_()
        loss = case.total(*block)
        (derivative,) = torch.autograd.grad(loss, block[0])
        torch.div(derivative, divisor, out=gradient[rows])
        largest = max(largest, gradient[rows].abs().max().item())
        total += loss.item()
    return Reference(total / divisor, gradient, largest)


@torch.no_grad()
def errors(result: tuple[Tensor, Tensor | None], expected: Reference) -> Errors:
    loss, gradient = result
    loss_error = abs(loss.double().item() - expected.loss)
    if gradient is None:
        return Errors(loss_error)
    tiny = torch.finfo(gradient.dtype).tiny
    largest = torch.zeros((), dtype=torch.float64, device=gradient.device)
    total = torch.zeros_like(largest)
    for rows in _blocks(gradient):
        truth = expected.gradient[rows]
        error = (gradient[rows].double() - truth).abs_()
        largest = torch.maximum(largest, error.max())  # keeps nan; Python's max would not
        total += error.div_(truth.abs().clamp_(min=tiny)).sum()
    return Errors(loss_error, largest.item(), total.item() / gradient.numel())


def complaint(
    result: tuple[Tensor, Tensor | None],
    which: Pass,
    input: Tensor,
    expected: Reference,
    eager: Errors,
) -> str | None:
    """Why a result is refused, or ``None``."""
    gradient = result[1]
    if which == "fwd_bwd":
        if gradient is None:
            return "no gradient"
        if gradient.shape != input.shape or gradient.dtype != input.dtype:
            return f"gradient is {gradient.dtype} {list(gradient.shape)}"
    ulp = torch.finfo(input.dtype).eps
    scales = Errors(abs(expected.loss), expected.largest, 1.0)
    mine = errors(result, expected)
    for measure in (field.name for field in fields(Errors)):
        error = getattr(mine, measure)
        bound = max(2 * getattr(eager, measure), ULPS * ulp * getattr(scales, measure))
        if not error <= bound:
            return f"wrong: {measure} error {error:.2e}, allowed {bound:.2e}"
    return None
