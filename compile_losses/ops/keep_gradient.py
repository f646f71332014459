"""A gradient that was computed with the loss, for the backward to find.

``torch.ops.fused.keep_gradient(loss, gradient)`` returns copies of both. In a joint graph it marks
a gradient that the forward computes: the partitioner may not compute the op again, and the forward
returns its other result. The last pass puts its arguments back in its place.
"""

import torch

from compile_losses import library

keep_gradient = library.define("keep_gradient(Tensor loss, Tensor gradient) -> (Tensor, Tensor)")
library.compose(
    keep_gradient,
    lambda loss, gradient: (loss.clone(), gradient.clone()),
    lambda loss, gradient: (torch.empty_like(loss), torch.empty_like(gradient)),
)
