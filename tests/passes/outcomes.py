"""What graphs compute, before a pass and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

#: Of numbers of about 1. The passes change the order of sums.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-4,
    torch.float16: 8e-3,
    torch.bfloat16: 6e-2,
}


def fresh(inputs: Sequence[Any]) -> list[Any]:
    """Copies of a graph's inputs, which it may write to."""
    return [_copy(given) if isinstance(given, Tensor) else given for given in inputs]


def _copy(given: Tensor) -> Tensor:
    made = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype)
    return made.copy_(given.detach()).requires_grad_(given.requires_grad)


def results_of(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """What a graph returns; tensors as copies, so that it may write over them later."""
    torch.manual_seed(0)
    found = gm(*fresh(inputs))
    found = found if isinstance(found, tuple | list) else (found,)
    return [each.clone() if isinstance(each, Tensor) else each for each in found]


def with_gradients(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """What a graph returns, and the gradients of a number that is made of it."""
    torch.manual_seed(0)
    given = fresh(inputs)
    found = gm(*given)
    total: Any = 0.0
    for i, each in enumerate(found):
        if each.requires_grad:
            weights = torch.linspace(0.5, 1 + i, each.numel(), dtype=each.dtype)
            total = total + (each * weights.view(each.shape)).sum()
    leaves = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
    differs = isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if differs else ()
    return [*(each.detach() for each in found), *gradients]


def assert_same(
    found: Sequence[Any], expected: Sequence[Any], narrowest: torch.dtype = torch.float64
) -> None:
    """Compares results.

    Args:
        narrowest: the dtype by which they may differ, where one is computed in between.
    """
    for i, (ours, right) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(right, Tensor):
            assert ours == right, i
            continue
        tolerance = max(_TOLERANCE[d] for d in (right.dtype, narrowest) if d in _TOLERANCE)
        tolerance = tolerance if right.is_floating_point() else 0.0
        torch.testing.assert_close(
            ours,
            right,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, i=i: f"result {i}: {text}",
        )
