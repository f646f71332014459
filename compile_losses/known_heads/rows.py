"""Numbers of rows of a linear layer's output, as other libraries name them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile_losses.ops import linear_row_statistics
from compile_losses.ops.linear.row_statistics import ARGMAX, ENTROPY, LOG_SQUARES, NLL, TOTAL


class Rows(NamedTuple):
    """One number a row, [rows] each.

    Attributes:
        log_probs: of the targets.
        entropy: of the softmax.
        log_squares: ``log(sum(p ** 2))``, without a gradient; None if it was not asked for.
        mean: of the logits, without a gradient.
        is_first: whether the target is the first of the largest logits.
    """

    log_probs: Tensor
    entropy: Tensor
    log_squares: Tensor | None
    mean: Tensor
    is_first: Tensor


def rows_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    squares: bool = False,
) -> Rows:
    """The numbers of ``softcap(scale * linear(hidden, weight, bias)) / temperature``.

    Args:
        hidden, weight, bias, target: [rows, hidden], [classes, hidden], [classes] and [rows].
        dtype: of the product.
    """
    # softcap(x) / T is tanh with the height softcap / T of x / T.
    factor = scale / temperature
    cap = None if softcap is None else softcap / temperature
    layer = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    # Where sizes are symbols, Dynamo makes inputs of a graph of numbers that are defaults.
    no_teacher: Any = ((None, None, None), None, 0.5, 1.0, None)
    arguments = linear_row_statistics.in_order(
        *layer, target, bias, ignore_index, cap, *no_teacher, squares=squares, scale=factor
    )
    found = linear_row_statistics.statistics(*arguments)
    nll = found[NLL]
    # No comparison with nan holds, of which argmax finds the first.
    is_first = (found[ARGMAX] == target) & (nll == nll)
    mean = found[TOTAL].detach() / weight.shape[0]
    return Rows(-nll, found[ENTROPY], found[LOG_SQUARES] if squares else None, mean, is_first)
