"""The optional tensors of an elementwise loss, which weight its elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses.ops import checks


@dataclass(frozen=True)
class Weights:
    """Which weights a loss has. Each broadcasts to the shape of the unreduced loss.

    Attributes:
        names: of the arguments. The first multiplies the loss of each element.
        keyword_only: whether the public op takes them by keyword alone.
        differentiable: whether gradients flow to the first one; else one that requires a gradient
            is an error.
        normalize: whether the mean divides by the sum of the first one, expanded to the loss's
            shape, instead of by the number of elements.
    """

    names: tuple[str, ...] = ()
    keyword_only: bool = True
    differentiable: bool = False
    normalize: bool = False

    @property
    def differentiable_arguments(self) -> tuple[str, ...]:
        """The tensors of the loss that have a gradient."""
        return ("input", "target", *(self.names[:1] if self.differentiable else ()))

    def declarations(self, default: str = "") -> list[str]:
        return [f"Tensor? {name}{default}" for name in self.names]

    def check(
        self, op: str, shape: torch.Size, input: Tensor, given: Sequence[Tensor | None]
    ) -> None:
        for name, weight in zip(self.names, given, strict=True):
            if weight is None:
                continue
            checks.check_same_device(op, input, **{name: weight})
            if weight.is_complex() or (name == "pos_weight" and weight.dtype == torch.bool):
                raise RuntimeError(
                    f"{op}: expected {name} to be of real numbers, got {checks.describe(weight)}"
                )
            if not checks.same_shape(weight.shape, shape) and not _broadcasts_to(weight, shape):
                raise RuntimeError(
                    f"{op}: expected {name} to broadcast to {list(shape)}, "
                    f"got shape {list(weight.shape)}"
                )
            if weight.requires_grad and not self.differentiable and torch.is_grad_enabled():
                raise RuntimeError(f"{op}: expected {name} not to require grad")

    def promoting(
        self, given: Sequence[Tensor | None], shape: torch.Size, *, normalizes: bool
    ) -> list[Tensor]:
        """The weights whose dtypes promote the loss's, as in torch: a number does not promote a
        tensor, but the weights' sum does promote the loss that it divides."""
        if not self.differentiable or given[0] is None or not given[0].is_floating_point():
            return []
        return [given[0]] if normalizes or checks.promotes(given[0], shape) else []

    def to_floating(
        self, given: Sequence[Tensor | None], dtype: torch.dtype
    ) -> list[Tensor | None]:
        """The weights, integers and masks as floating-point numbers."""
        return [w if w is None or w.is_floating_point() else w.to(dtype) for w in given]

    def total(self, weight: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The sum of a weight expanded to ``shape``, in ordinary ops of torch."""
        repeats = self.repeats(weight, shape)
        total = weight.sum(dtype=dtype)
        return total if isinstance(repeats, int) and repeats == 1 else total * repeats

    def repeats(self, weight: Tensor, shape: torch.Size) -> int:
        """How often each element stands in a weight expanded to ``shape``."""
        repeats = 1
        missing = len(shape) - weight.dim()
        for d, size in enumerate(shape):
            if d < missing or weight.shape[d - missing] != size:
                repeats = repeats * size
        return repeats


def _broadcasts_to(weight: Tensor, shape: torch.Size) -> bool:
    try:
        return checks.same_shape(torch.broadcast_shapes(shape, weight.shape), shape)
    except RuntimeError:
        return False


NO_WEIGHTS = Weights()


def weighted(
    reference: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """A loss in torch's ops with a weight before its reduction, as torch weights it."""

    def loss(
        input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, *values: Any
    ) -> Tensor:
        if weight is None:
            return reference(input, target, reduction, *values)
        losses = reference(input, target, checks.REDUCTIONS["none"], *values) * weight
        if reduction == checks.REDUCTIONS["none"]:
            return losses
        return losses.mean() if reduction == checks.REDUCTIONS["mean"] else losses.sum()

    return loss
