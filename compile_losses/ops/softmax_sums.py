"""What a softmax by rows and a softmax by columns of one matrix need, in one read of it.

``fused::softmax_sums(input, factor)`` takes a matrix x of shape [rows, columns], of any strides; it
is copied where neither rows nor columns are dense. With a factor, which holds one number, it stands
for ``x * factor``, which is not stored, and not rounded to its dtype. The results are, in float64
for float64 input and float32 otherwise:

- ``row_largest``: ``x.amax(1)``, [rows].
- ``row_sum``: ``(x - row_largest[:, None]).exp().sum(1)``, [rows].
- ``column_largest``, ``column_sum``: the same of the columns, [columns].

Of a dimension without elements the largest is -inf and the sum 0. The op has no gradient: in a
graph after autograd it takes the place of reductions (:mod:`compile_losses.lower.two_softmaxes`).

Raises:
    RuntimeError: other shapes; a factor that does not hold one number.
    NotImplementedError: a matrix or factor that is not floating point.
"""

from __future__ import annotations

from torch import Tensor

from compile_losses import library
from compile_losses.bodies import softmax_sums as bodies
from compile_losses.ops import checks

NAME = "softmax_sums"

sums = library.define(
    "softmax_sums(Tensor input, Tensor? factor) -> (Tensor row_largest, Tensor row_sum, "
    "Tensor column_largest, Tensor column_sum)"
)


def sums_fake(input: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    checks.check_floating(NAME, input=input)
    if input.dim() != 2:
        raise RuntimeError(
            f"{NAME}: expected input of shape [rows, columns], got {list(input.shape)}"
        )
    if factor is not None:
        checks.check_floating(NAME, factor=factor)
        if factor.numel() != 1:
            raise RuntimeError(
                f"{NAME}: expected factor to hold one number, got shape {list(factor.shape)}"
            )
    rows, columns = input.shape
    dtype = checks.accumulation_type(input.dtype)
    of_rows = [input.new_empty(rows, dtype=dtype) for _ in range(2)]
    of_columns = [input.new_empty(columns, dtype=dtype) for _ in range(2)]
    return of_rows[0], of_rows[1], of_columns[0], of_columns[1]


library.register_body(sums, sums_fake, bodies.sums)
library.register_not_differentiable(sums)
