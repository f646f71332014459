"""A gradient that was computed with the loss, for the backward to find.

``torch.ops.fused.keep_gradient(loss, gradient, buffer=None)`` returns copies of the first two. In a
joint graph it marks a gradient that the forward computes: the partitioner may not compute the op
again, and the forward returns its other result. The last pass puts its arguments back in its place.
``buffer`` is a node of the forward over which the gradient may be written; nothing else reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses import library

keep_gradient = library.define(
    "keep_gradient(Tensor loss, Tensor gradient, Tensor? buffer=None) -> (Tensor, Tensor)"
)


def _copies(loss: Tensor, gradient: Tensor, buffer: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return loss.clone(), gradient.clone()


def _fake(loss: Tensor, gradient: Tensor, buffer: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(loss), torch.empty_like(gradient)


library.compose(keep_gradient, _copies, _fake)
