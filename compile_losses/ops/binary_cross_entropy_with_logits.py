"""Binary cross entropy of logits.

``torch.ops.fused.binary_cross_entropy_with_logits(input, target, weight=None, pos_weight=None,
reduction=1, *, dtype=None)`` equals ``torch.nn.functional.binary_cross_entropy_with_logits``:
(1 - target) softplus(input) + pos_weight target softplus(-input), times weight. Target has input's
shape, and its dtype is the loss's; both weights broadcast to that shape. The mean divides by the
number of elements. Logits of any size give neither overflow nor cancellation.

Raises:
    ValueError: target has another shape than input; unknown reduction.
    RuntimeError: weight or pos_weight requires a gradient, does not broadcast, or is complex.
    NotImplementedError: input or target is not floating point.
"""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import declare
from compile_losses.ops.weights import Weights


def reference(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: int,
) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        input, target, weight, reduction=reduction_name(reduction), pos_weight=pos_weight
    )


declare(
    "binary_cross_entropy_with_logits",
    reference,
    weights=Weights(("weight", "pos_weight"), keyword_only=False),
    like_target=True,
    exact_target=True,
)
