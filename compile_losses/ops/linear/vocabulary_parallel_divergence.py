"""Kullback-Leibler divergence of a linear layer of a shard of the classes from a teacher's.

``fused::vocabulary_parallel_linear_divergence`` are the stats [rows, 6] of
:mod:`compile_losses.ops.vocabulary_parallel_divergence`, of all chunks of rows, so that one
collective is enough. ``fused::vocabulary_parallel_linear_divergence_gradient`` computes the logits
of student and teacher again, for the stats of the whole rows and the gradient [rows] of each row's
divergence. Input's gradient is this shard's part of it.

Input is [rows, hidden] and linear_weight [the shard's classes, hidden]; target is the teacher's
logits of these classes, or with target_weight [the shard's classes, features] the input of its
layer, [rows, features]. With reverse the student's logits are the target of the divergence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops.linear.chunk_size import part_rows
from compile_losses.ops.linear.leaf_ops import NEEDS, gradients_fake
from compile_losses.ops.linear.matrix_products import parts_of
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.row_divergences import Pair, TeacherLogits, tensors_beside
from compile_losses.ops.linear.vocabulary_parallel import chunks_of_shard, gradients_of_shard
from compile_losses.ops.row_pair import statistics
from compile_losses.ops.vocabulary_parallel_divergence import divergence as of_logits

NAME = "vocabulary_parallel_linear_divergence"
ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? target_weight,"
    " Tensor? target_bias, bool reverse, float temperature"
)

divergence = library.define(f"{NAME}({ARGUMENTS}) -> Tensor")
gradient = library.define(
    f"{NAME}_gradient(Tensor grad_output, Tensor stats, {ARGUMENTS}, {NEEDS}) "
    "-> (Tensor, Tensor, Tensor)"
)


def _beside(
    student: torch.dtype, teacher: TeacherLogits, reverse: bool, *, gradient: bool
) -> float:
    return tensors_beside(
        student,
        teacher.dtype,
        computed=teacher.computed,
        by_row=True,
        reverse=reverse,
        gradient=gradient,
    )


def divergence_kernel(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    target_weight: Tensor | None,
    target_bias: Tensor | None,
    reverse: bool,
    temperature: float,
) -> Tensor:
    teacher = TeacherLogits(target, target_weight, target_bias)
    pair = Pair("softmax_kl_div", reverse, (temperature,))
    beside = _beside(input.dtype, teacher, reverse, gradient=False)
    with autocast_off(input):
        found = [divergence_fake(input[:0], linear_weight, target[:0])]
        chunk, chunks = chunks_of_shard(input, linear_weight, linear_bias, beside)
        part = part_rows(chunk, input.device, beside)
        for each in chunks:
            for rows, logits in parts_of(each, part):
                found.append(of_logits(*pair.ordered(logits, teacher(rows)), temperature))
        return torch.cat(found)


def gradient_kernel(
    grad_output: Tensor,
    stats: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    target_weight: Tensor | None,
    target_bias: Tensor | None,
    reverse: bool,
    temperature: float,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    teacher = TeacherLogits(target, target_weight, target_bias)
    pair = Pair("softmax_kl_div", reverse, (temperature,))
    beside = _beside(input.dtype, teacher, reverse, gradient=True)

    def write_gradient(rows: slice, logits: Tensor) -> None:
        if logits.shape[1] > 0:
            pair.write_gradient(grad_output[rows], logits, teacher(rows), stats[rows])

    return gradients_of_shard(input, linear_weight, linear_bias, needs, write_gradient, beside)


def divergence_fake(input: Tensor, _: Any, target: Tensor, *rest: Any) -> Tensor:
    return statistics(input, target, input.shape[:1])


library.compose(divergence, divergence_kernel, divergence_fake)
library.compose(gradient, gradient_kernel, lambda *rest: gradients_fake(rest[2:], rest[-3:]))
