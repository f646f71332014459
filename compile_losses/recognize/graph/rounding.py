"""How far rounding may carry the results of a program from what they are.

A number near zero may be what is left of large ones: 1 - p, where a softmax p is nearly one, is off
by the rounding of 1. To see of what size the numbers were, the program runs again with a small
random factor on the result of each of its ops, written in the smaller ops that Inductor knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_losses import op_traits
from compile_losses.torch_internals.eager import TorchDispatchMode
from compile_losses.torch_internals.inductor import select_decomp_table
from compile_losses.torch_internals.ops import tree_map

#: By how much a factor may differ from one. What is left of numbers of size 1 and is larger than
#: this, as 1 - p above, keeps its sign.
_NOISE = 1e-10
#: How many roundings of the largest number an op, with all that it does inside, may be off by.
_ROUNDINGS = 64


class _Noise(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = select_decomp_table()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_smaller = self.ops.get(func)
        if in_smaller is not None:
            with self:
                result = in_smaller(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        # The largest of some numbers is looked for among them by its gradient.
        is_exact = op_traits.shares_memory(func) or func in op_traits.EXTREMES
        return result if is_exact else tree_map(self._with_noise, result)

    def _with_noise(self, result: Any) -> Any:
        if not isinstance(result, Tensor) or result.dtype != torch.float64:
            return result
        drawn = torch.rand(result.shape, generator=self.generator, dtype=torch.float64)
        return result * (1 + _NOISE * (2 * drawn - 1))


def rounding(program: Callable[[], Sequence[Tensor]], results: Sequence[Tensor]) -> list[float]:
    """The errors that float64 may cause in the results of a program, one for each of its results.

    Args:
        program: runs it on the same numbers as gave ``results``.

    Returns:
        For each result the largest error among its numbers; 0 where that can't be told.
    """
    with _Noise():
        noisy = program()
    errors = [
        float((one - other).abs().max()) if one.numel() else 0.0
        for one, other in zip(noisy, results, strict=True)
    ]
    scale = _ROUNDINGS * torch.finfo(torch.float64).eps / _NOISE
    return [scale * error if error < float("inf") else 0.0 for error in errors]
