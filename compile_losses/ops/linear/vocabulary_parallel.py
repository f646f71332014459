"""Linear cross entropy of a shard of the classes: linear_weight [shard's classes, hidden].

``fused::vocabulary_parallel_linear_parts`` are the parts of ``vocabulary_parallel``, of all chunks
of rows, so that one collective is enough for any number of chunks. For the gradient,
``fused::vocabulary_parallel_linear_gradient`` computes the logits again: it needs the statistics of
all shards, and no rank holds more than a chunk of rows of its own logits. There are four matrix
products in all, against three with a whole linear_weight.

Input is [rows, hidden] and target [rows], those of all shards; weight is of all classes. Input's
gradient is this shard's part of it. grad_output is one number (reduction sum) or one for each row
(none), and so is grad_squares, for the squared logsumexp of a z-loss, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops import checks, vocabulary_parallel
from compile_losses.ops.linear.chunk_size import chunk_rows, part_rows, sums_in_float32
from compile_losses.ops.linear.leaf_ops import NEEDS, gradients_fake
from compile_losses.ops.linear.matrix_products import Chunk, Gradients, add_chunks, chunks_of_logits
from compile_losses.ops.linear.reference import autocast_off

ARGUMENTS = "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight"
OPTIONS = f"{vocabulary_parallel.OPTIONS}, float? softcap"

parts = library.define(
    f"vocabulary_parallel_linear_parts({ARGUMENTS}, {vocabulary_parallel.SHARD}, {OPTIONS}) "
    "-> Tensor"
)
gradient = library.define(
    f"vocabulary_parallel_linear_gradient(Tensor grad_output, Tensor? grad_squares, {ARGUMENTS}, "
    f"Tensor stats, {vocabulary_parallel.SHARD}, int reduction, {OPTIONS}, {NEEDS}) "
    "-> (Tensor, Tensor, Tensor)"
)


def chunks_of_shard(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    beside: float = 0,
    *,
    sums_weight: bool = False,
) -> tuple[int, Iterator[Chunk]]:
    """How many rows a chunk has, and the chunks of logits.

    Args:
        beside: how many tensors of the logits' size are held besides them.
        sums_weight: whether the gradient of linear_weight is summed over the chunks.
    """
    chunk = chunk_rows(
        len(input), input.shape[1], len(linear_weight), input.dtype, input.device,
        beside=beside, sums_weight=sums_weight,
    )  # fmt: skip
    return chunk, chunks_of_logits(input, linear_weight, linear_bias, chunk)


def gradients_of_shard(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    needs: Sequence[bool],
    write_gradient: Callable[[slice, Tensor], None],
    beside: float = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the layer, from the logits computed again; empty if they are not needed.

    Args:
        write_gradient: writes the gradient of some rows' logits over these.
        beside: as of chunks_of_shard.
    """
    with autocast_off(input):
        chunk, chunks = chunks_of_shard(
            input, linear_weight, linear_bias, beside, sums_weight=needs[1]
        )
        gradients = Gradients(
            linear_weight, len(input), needs, _wide(input),
            wide=sums_in_float32(len(input), chunk, input.dtype),
        )  # fmt: skip
        add_chunks(gradients, chunks, part_rows(chunk, input.device, beside), write_gradient)
        return gradients.result()


def parts_kernel(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *options: Any,
) -> Tensor:
    with autocast_off(input):
        _, chunks = chunks_of_shard(input, linear_weight, linear_bias)
        found = [parts_fake(input[:0], linear_weight, target, linear_bias, weight, *options)]
        for rows, _, logits in chunks:
            found.append(vocabulary_parallel.parts(logits, target[rows], weight, *options))
        return torch.cat(found)


def gradient_kernel(
    grad_output: Tensor,
    grad_squares: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    stats: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    options, needs = rest[:-3], rest[-3:]
    by_row = options[2] == checks.REDUCTIONS["none"]

    def write_gradient(rows: slice, logits: Tensor) -> None:
        of_squares = grad_squares
        if grad_squares is not None and grad_squares.dim() > 0:
            of_squares = grad_squares[rows]
        vocabulary_parallel.gradient_(
            grad_output[rows] if by_row else grad_output, logits, target[rows], weight, stats[rows],
            *options, of_squares,
        )  # fmt: skip

    return gradients_of_shard(input, linear_weight, linear_bias, needs, write_gradient)


def _wide(input: Tensor) -> torch.dtype:
    return checks.accumulation_type(input.dtype)


def parts_fake(input: Tensor, *rest: Any) -> Tensor:
    label_smoothing: float = rest[-2]
    return input.new_empty((len(input), 4 if label_smoothing > 0 else 3), dtype=_wide(input))


library.compose(parts, parts_kernel, parts_fake)
library.compose(gradient, gradient_kernel, lambda *rest: gradients_fake(rest[2:], rest[-3:]))
