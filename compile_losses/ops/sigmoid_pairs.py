"""The binary cross entropies of all numbers of a matrix, and their gradient in its place.

``fused::sigmoid_pairs_(input, target, bias, factor)`` takes logits [rows, columns], to which bias,
[columns], is added. Positive are the column of each row that target, int64 [rows], says, none if it
is negative; or those where target, bool [rows, columns], is True. It returns the sum of all losses,
in float64 for float64 logits and float32 otherwise, and writes over the logits the gradient of the
sum, times factor. Bias and factor, which holds one number, have the result's dtype.

Raises:
    RuntimeError: other shapes or dtypes; on the CPU, a target that is not below the number of
        columns. On CUDA the kernel stops with a device-side assertion.
    NotImplementedError: logits that are not floating point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.bodies import sigmoid_pairs as bodies
from compile_losses.ops import checks

NAME = "sigmoid_pairs_"

pairs_ = library.define(
    f"{NAME}(Tensor(a!) input, Tensor target, Tensor? bias, Tensor factor) -> Tensor"
)


def pairs_fake(input: Tensor, target: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
    checks.check_floating(NAME, input=input)
    if input.dim() != 2:
        raise RuntimeError(
            f"{NAME}: expected input of shape [rows, columns], got {list(input.shape)}"
        )
    shape = input.shape[:1] if target.dtype == torch.int64 else input.shape
    if target.dtype not in (torch.int64, torch.bool) or not checks.same_shape(target.shape, shape):
        raise RuntimeError(
            f"{NAME}: expected target to be int64 {list(input.shape[:1])} or bool "
            f"{list(input.shape)}, got {checks.describe(target)}"
        )
    dtype = checks.accumulation_type(input.dtype)
    if bias is not None and (
        bias.dtype != dtype or not checks.same_shape(bias.shape, input.shape[1:])
    ):
        raise RuntimeError(
            f"{NAME}: expected bias to be {dtype} {list(input.shape[1:])}, "
            f"got {checks.describe(bias)}"
        )
    if factor.dtype != dtype or factor.numel() != 1:
        raise RuntimeError(
            f"{NAME}: expected factor to hold one number in {dtype}, got {checks.describe(factor)}"
        )
    return input.new_empty((), dtype=dtype)


library.register_body(pairs_, pairs_fake, bodies.pairs)
library.register_not_differentiable(pairs_)
