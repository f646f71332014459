"""Entropy of each row's softmax.

``torch.ops.fused.softmax_entropy(logits)`` is ``-sum(p * log(p))`` over the last dimension of
p = softmax(logits), classes with p = 0 left out: logits [..., C], the result [...] in logits'
dtype. It is made of ``row_statistics``: the logits are read once, and probabilities are never
stored. DTensors may be sharded by rows or by classes; gradients with sharded classes can't be
differentiated again.

Raises:
    RuntimeError: logits without dimensions.
    NotImplementedError: logits that are not floating point.
"""

from __future__ import annotations

from torch import Tensor

from compile_losses import library
from compile_losses.distributed import mesh_of
from compile_losses.ops import checks, row_statistics
from compile_losses.ops.transforms import needs_torch

NAME = "softmax_entropy"

public = library.define("softmax_entropy(Tensor logits) -> Tensor")


def reference(logits: Tensor) -> Tensor:
    wide = logits.float() if logits.dtype in checks.NARROW else logits
    return row_statistics.entropy_of(wide).to(logits.dtype)


def public_kernel(logits: Tensor) -> Tensor:
    mesh = mesh_of(NAME, logits=logits)
    if mesh is None and needs_torch(logits):
        return reference(logits)
    checks.check_floating(NAME, logits=logits)
    if logits.dim() == 0:
        raise RuntimeError(f"{NAME}: expected logits to have at least 1 dimension, got 0")
    if logits.shape[-1] == 0:
        return reference(logits)
    if mesh is not None:
        from compile_losses.distributed import statistics

        return statistics.softmax_entropy(public_kernel, NAME, mesh, logits)
    rows = logits.reshape(-1, logits.shape[-1])
    _, _, entropy, *_ = row_statistics.direct_forward(rows, None, 0, None)
    return entropy.to(logits.dtype).view(logits.shape[:-1])


library.implement_public(public, public_kernel)
