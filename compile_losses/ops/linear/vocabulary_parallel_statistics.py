"""Row statistics of a linear layer of a shard of the classes: linear_weight [its classes, hidden].

``fused::vocabulary_parallel_linear_statistics`` are the numbers of
:mod:`compile_losses.ops.vocabulary_parallel_statistics`, [5, rows], of all chunks of rows, so that
one collective is enough. ``fused::vocabulary_parallel_linear_statistics_gradient`` computes the
logits again, as :mod:`compile_losses.ops.linear.vocabulary_parallel` does: four matrix products in
all, and no rank holds more than a chunk of rows of its own logits.

Input is [rows, hidden] and target int64 [rows], those of all shards; linear_bias is [the shard's
classes]. stats [rows, 3] are those of the whole rows. Gradients of the negative log-likelihood and
of the entropy are [rows], or None. Input's gradient is this shard's part of it.

Raises:
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index. On CUDA the
        kernel stops with a device-side assertion.
"""

from __future__ import annotations

from torch import Tensor

from compile_losses import library
from compile_losses.ops.checks import accumulation_type
from compile_losses.ops.linear.leaf_ops import NEEDS, gradients_fake
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.vocabulary_parallel import chunks_of_shard, gradients_of_shard
from compile_losses.ops.vocabulary_parallel import SHARD
from compile_losses.ops.vocabulary_parallel_statistics import (
    NUMBERS,
    OwnClasses,
    gradient_of,
    numbers_of,
)

NAME = "vocabulary_parallel_linear_statistics"
TENSORS = "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias"
OPTIONS = f"{SHARD}, SymInt ignore_index, float? softcap"

statistics = library.define(f"{NAME}({TENSORS}, {OPTIONS}) -> Tensor")
gradient = library.define(
    f"{NAME}_gradient(Tensor? grad_nll, Tensor? grad_entropy, {TENSORS}, Tensor stats, {OPTIONS}, "
    f"{NEEDS}) -> (Tensor, Tensor, Tensor)"
)


def statistics_kernel(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    first_class: int,
    classes: int,
    ignore_index: int,
    softcap: float | None,
) -> Tensor:
    own = OwnClasses(first_class, len(linear_weight), classes)
    with autocast_off(input):
        found = statistics_fake(input)
        _, chunks = chunks_of_shard(input, linear_weight, linear_bias)
        for rows, _, logits in chunks:
            found[:, rows] = numbers_of(logits, target[rows], own, ignore_index, softcap)
        return found


def gradient_kernel(
    grad_nll: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    stats: Tensor,
    first_class: int,
    classes: int,
    ignore_index: int,
    softcap: float | None,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    own = OwnClasses(first_class, len(linear_weight), classes)

    def write_gradient(rows: slice, logits: Tensor) -> None:
        of_nll, of_entropy = (None if g is None else g[rows] for g in (grad_nll, grad_entropy))
        gradient_of(
            of_nll, None, of_entropy, logits, target[rows], stats[rows], own, ignore_index, softcap,
            overwrites=True,
        )  # fmt: skip

    return gradients_of_shard(input, linear_weight, linear_bias, needs, write_gradient)


def statistics_fake(input: Tensor, *_: Tensor | int | float | None) -> Tensor:
    return input.new_empty((NUMBERS, len(input)), dtype=accumulation_type(input.dtype))


library.compose(statistics, statistics_kernel, statistics_fake)
library.compose(gradient, gradient_kernel, lambda *rest: gradients_fake(rest[2:], rest[-3:]))
