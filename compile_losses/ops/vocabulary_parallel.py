"""Cross entropy of logits whose classes are sharded: what each shard computes on its own.

``fused::vocabulary_parallel_parts``     what a shard knows of each row, in one read of its logits
``fused::vocabulary_parallel_merge``     the loss and each row's statistics, from all shards' parts
``fused::vocabulary_parallel_gradient``  the gradient of a shard's logits, from these statistics
``fused::vocabulary_parallel_gradient_`` the same, written over the logits

Between the first two the parts of all shards are gathered: the only communication. Input holds
classes [first_class, first_class + its own number) of ``classes``; it is [C], [N, C] or
[N, C, d1, ...] as that of ``cross_entropy``, and target and weight are those of all classes. Parts
are [rows, 3]: the shard's largest logit, the sum of the exponentials relative to it, and the
target's logit, 0 in shards that do not hold it; with label smoothing [rows, 4], the last being
the weighted sum of (largest - logit). shard_weights [shards], needed with label smoothing, is the
sum of each shard's class weights. Stats are those of ``cross_entropy_forward``. With a softcap
parts and gradients are those of the loss of ``softcap * tanh(input / softcap)``. The gradients of
both ops may also be those of each row's squared logsumexp, as in a z-loss: with grad_squares, one
number or one for each row. Ignored rows have none.

The layout of the parts follows Megatron's vocabulary-parallel cross entropy (Shoeybi et al.,
https://arxiv.org/abs/1909.08053), with the online softmax's sum beside its maximum so that one
collective is enough.

Raises:
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index. On CUDA the
        kernel stops with a device-side assertion.
    RuntimeError: shapes, dtypes or reductions other than these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.class_targets import Shards
from compile_losses.ops import checks

OPTIONS = "SymInt ignore_index, float label_smoothing"
SHARD = "SymInt first_class, SymInt classes"

parts = library.define(
    f"vocabulary_parallel_parts(Tensor input, Tensor target, Tensor? weight, {SHARD}, {OPTIONS}, "
    "float? softcap=None) -> Tensor"
)
merge = library.define(
    "vocabulary_parallel_merge(Tensor parts, Tensor target, Tensor? weight, Tensor? shard_weights, "
    f"SymInt classes, int reduction, {OPTIONS}, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)
AFTER_INPUT = (
    f"Tensor target, Tensor? weight, Tensor stats, {SHARD}, int reduction, {OPTIONS}, "
    "float? softcap=None, Tensor? grad_squares=None"
)
gradient = library.define(
    f"vocabulary_parallel_gradient(Tensor grad_output, Tensor input, {AFTER_INPUT}) -> Tensor"
)
gradient_ = library.define(
    f"vocabulary_parallel_gradient_(Tensor grad_output, Tensor(a!) input, {AFTER_INPUT}) -> ()"
)


def parts_fake(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first_class: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None = None,
) -> Tensor:
    columns = 4 if label_smoothing > 0 else 3
    dtype = checks.accumulation_type(input.dtype)
    return input.new_empty((target.numel(), columns), dtype=dtype)


def merge_fake(
    parts: Tensor,
    target: Tensor,
    weight: Tensor | None,
    shard_weights: Tensor | None,
    classes: int,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    each = reduction == checks.REDUCTIONS["none"]
    loss = parts.new_empty(target.shape if each else (), dtype=dtype)
    return loss, parts.new_empty((target.numel(), 2)), parts.new_empty(())


_BODIES = Shards()
library.register_body(parts, parts_fake, _BODIES.parts)
library.register_body(merge, merge_fake, _BODIES.merge)
library.register_body(
    gradient, lambda grad_output, input, *rest: torch.empty_like(input), _BODIES.gradient
)
library.register_body(gradient_, lambda *_: None, _BODIES.gradient_)
for op in (parts, merge, gradient, gradient_):
    library.register_not_differentiable(op)
