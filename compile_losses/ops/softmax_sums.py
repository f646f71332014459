"""What a softmax by rows and one by columns of a matrix need, in one read of it; their gradient.

``fused::softmax_sums(input, factor)`` takes a matrix x of shape [rows, columns], of any strides; it
is copied where neither rows nor columns are dense. With a factor, which holds one number, it stands
for ``x * factor``, which is not stored, and not rounded to its dtype. The results are, in float64
for float64 input and float32 otherwise:

- ``row_largest``: ``x.amax(1)``, [rows].
- ``row_sum``: ``(x - row_largest[:, None]).exp().sum(1)``, [rows].
- ``column_largest``, ``column_sum``: the same of the columns, [columns].

Of a dimension without elements the largest is -inf and the sum 0. The op has no gradient: in a
graph after autograd it takes the place of reductions (:mod:`compile_losses.lower.two_softmaxes`).

If the matrix is a part of the rows of a larger one, from ``first_row`` on, and each row and column
has a target, int64, two more ops are for the cross entropies of all rows and columns. What belongs
to rows has the size of all rows; the targets of columns are rows of the larger matrix.

``fused::softmax_sums_add_(input, row_largest, row_sum, row_own, row_target, column_largest,
column_sum, column_own, column_target, first_row, ignore_index)`` writes the results of these rows,
adds these rows to the results of the columns so far, and picks the numbers of the targets that lie
in these rows. Where the largest is infinite the sum may be anything. Targets that are neither
ignore_index nor exist are refused on a CPU by the caller.

``fused::softmax_sums_gradient_(input, row_largest, row_sum, row_factor, row_target, column_largest,
column_sum, column_factor, column_target, first_row, label_smoothing)`` writes over the rows the
gradient of all cross entropies. The factors, in the dtype of the sums, are the gradients of the
loss of each row and each column, and 0 of those that are ignored.

Raises:
    RuntimeError: other shapes; a factor that does not hold one number.
    NotImplementedError: a matrix or factor that is not floating point.
"""

from __future__ import annotations

from typing import Any

import torch
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

_LARGEST = "Tensor{1} {0}_largest, Tensor{2} {0}_sum, Tensor{3} {0}_{4}, Tensor {0}_target"
_WRITTEN = [_LARGEST.format(s, *marks, "own") for s, marks in (
    ("row", ("(b!)", "(c!)", "(d!)")), ("column", ("(e!)", "(f!)", "(g!)")),
)]  # fmt: skip
_READ = [_LARGEST.format(side, "", "", "", "factor") for side in ("row", "column")]
add_ = library.define(
    f"softmax_sums_add_(Tensor input, {', '.join(_WRITTEN)}, SymInt first_row, "
    "SymInt ignore_index) -> ()"
)
gradient_ = library.define(
    f"softmax_sums_gradient_(Tensor(a!) input, {', '.join(_READ)}, SymInt first_row, "
    "float label_smoothing) -> ()"
)


def some_rows_fake(input: Tensor, *arguments: Any) -> None:
    checks.check_floating(NAME, input=input)
    if input.dim() != 2:
        raise RuntimeError(
            f"{NAME}: expected input of shape [rows, columns], got {list(input.shape)}"
        )
    dtype = checks.accumulation_type(input.dtype)
    sizes = (arguments[0].shape[0], input.shape[1])
    for what, size, given in zip(
        ("rows", "columns"), sizes, (arguments[:4], arguments[4:8]), strict=True
    ):
        for tensor, expected in zip(given, (dtype, dtype, dtype, torch.int64), strict=True):
            if tensor.dtype != expected or not checks.same_shape(tensor.shape, torch.Size([size])):
                raise RuntimeError(
                    f"{NAME}: expected the numbers and targets of {what} as tensors of shape "
                    f"{[size]} in {dtype} and int64, got {checks.describe(tensor)}"
                )


for op, body in ((add_, bodies.add), (gradient_, bodies.gradient)):
    library.register_body(op, some_rows_fake, body)
    library.register_not_differentiable(op)
