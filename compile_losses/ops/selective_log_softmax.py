"""Log-probabilities of chosen classes.

``torch.ops.fused.selective_log_softmax(logits, index)`` equals
``F.log_softmax(logits, -1).gather(-1, index)``: logits [..., C], index int64, [..., K] for K
classes of each row or [...] for one. The result has index's shape and logits' dtype. It is made of
``row_statistics``: the logits are read once, and log-probabilities of other classes are never
stored. DTensors may be sharded by rows or by classes; gradients with sharded classes can't be
differentiated again.

Raises:
    RuntimeError: index has another shape or dtype; with K classes of a row, one is outside [0, C);
        one of both is a plain tensor and the other a DTensor.
    IndexError: on the CPU, an index of one class a row outside [0, C). On CUDA the kernel stops
        with a device-side assertion.
    NotImplementedError: logits that are not floating point.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.distributed import mesh_of
from compile_losses.ops import checks, row_statistics
from compile_losses.ops.transforms import needs_torch

NAME = "selective_log_softmax"

#: Of no index at all: those that are out of bounds are errors, each of them.
NONE_IGNORED = -(2**63)

public = library.define("selective_log_softmax(Tensor logits, Tensor index) -> Tensor")


def is_single(logits: Tensor, index: Tensor) -> bool:
    """Whether index has one class for each row of logits; refuses other shapes than its own."""
    rows = logits.shape[:-1]
    single = logits.dim() > 0 and checks.same_shape(index.shape, rows)
    if not single and not (index.dim() > 0 and checks.same_shape(index.shape[:-1], rows)):
        raise RuntimeError(
            f"{NAME}: expected index of shape {list(rows)} or {[*rows, 'K']} for logits of shape "
            f"{list(logits.shape)}, got {list(index.shape)}"
        )
    return single


def reference(logits: Tensor, index: Tensor) -> Tensor:
    single = is_single(logits, index)
    logarithms = F.log_softmax(logits, -1).to(logits.dtype)
    if single:
        return logarithms.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return logarithms.gather(-1, index)


def public_kernel(logits: Tensor, index: Tensor) -> Tensor:
    mesh = mesh_of(NAME, logits=logits, index=index)
    if mesh is None and needs_torch(logits, index):
        return reference(logits, index)
    checks.check_floating(NAME, logits=logits)
    checks.check_same_device(NAME, logits, index=index)
    if index.dtype != torch.int64:
        raise RuntimeError(f"{NAME}: expected index to be int64, got {checks.describe(index)}")
    single = is_single(logits, index)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        return reference(logits, index)
    if mesh is not None:
        from compile_losses.distributed import statistics

        return statistics.selective_log_softmax(
            public_kernel, NAME, mesh, logits, index, single=single, ignore_index=NONE_IGNORED
        )
    rows = logits.reshape(-1, logits.shape[-1])
    if single:
        nll, *_ = row_statistics.direct_forward(rows, index.reshape(-1), NONE_IGNORED, None)
        return (-nll).to(logits.dtype).view(index.shape)
    _, logsumexp, *_ = row_statistics.direct_forward(rows, None, NONE_IGNORED, None)
    picked = logits.gather(-1, index).to(logsumexp.dtype)
    return (picked - logsumexp.view(*logits.shape[:-1], 1)).to(logits.dtype)


library.implement_public(public, public_kernel)
