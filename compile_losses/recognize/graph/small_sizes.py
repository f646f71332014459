"""Small sizes in the place of large ones, the same for every tensor and number of a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from compile_losses.torch_internals.tensors import size_hint

_FEW_ELEMENTS = 2**13
_KEPT = 12
_SMALL = (13, 17, 11, 19, 7, 23, 5, 29, 3, 31)


class NoSizeError(Exception):
    """A size that is not known, or too many different ones."""


class Sizes:
    """A replacement for each size of some tensors.

    Attributes:
        elements: of the largest tensor, as traced.
        smaller: whether anything is replaced.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._shapes = [
            [_hint(size) for size in tensor.shape]
            for tensor in tensors
            if isinstance(tensor, Tensor)
        ]
        self.elements = max(map(math.prod, self._shapes), default=1)
        self._replaced: dict[int, int] = {}
        self.smaller = self.elements > _FEW_ELEMENTS
        if self.smaller:
            self._shrink()

    def unchanged(self) -> Sizes:
        """The sizes as traced."""
        same = Sizes([])
        same.elements = self.elements
        return same

    def _shrink(self) -> None:
        """Chooses a small size for each large one, and for each product of some in a shape."""
        large = sorted({size for shape in self._shapes for size in shape if size > _KEPT})
        if len(large) > len(_SMALL):
            raise NoSizeError("too many different sizes")
        single = dict(zip(large, _SMALL, strict=False))
        for shape in self._shapes:
            for many in range(1, len(shape) + 1):
                for chosen in combinations(shape, many):
                    product = math.prod(chosen)
                    if product > _KEPT:
                        self._replaced.setdefault(
                            product, math.prod(single.get(size, size) for size in chosen)
                        )
        self._replaced.update(single)

    def of(self, number: Any) -> Any:
        """The replacement of a size, or of a number that is one; anything else as it is."""
        if isinstance(number, torch.SymInt):
            number = _hint(number)
        if isinstance(number, torch.SymFloat | torch.SymBool):
            raise NoSizeError(f"the value of {number} is not known")
        if isinstance(number, bool) or not isinstance(number, int | float):
            return number
        if isinstance(number, float) and not number.is_integer():
            return number
        replaced = self._replaced.get(int(number))
        return number if replaced is None else type(number)(replaced)


def _hint(size: Any) -> int:
    hint = size_hint(size)
    if hint is None:
        raise NoSizeError(f"the size {size} is not known")
    return hint
