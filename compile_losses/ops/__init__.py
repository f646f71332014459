"""The ops, one file a loss. Importing this package loads the kernels and declares ``fused::*``."""

from compile_losses.ops import (  # noqa: F401
    binary_cross_entropy_with_logits,
    cross_entropy,
    cross_entropy_probabilities,
    huber_loss,
    keep_gradient,
    kl_div,
    l1_loss,
    linear_cross_entropy,
    linear_log_probs,
    linear_row_statistics,
    linear_softmax_js_div,
    linear_softmax_kl_div,
    mse_loss,
    nll_loss,
    row_statistics,
    scale,
    selective_log_softmax,
    smooth_l1_loss,
    softmax_entropy,
    softmax_js_div,
    softmax_kl_div,
    vocabulary_parallel,
)
from compile_losses.ops.linear import vocabulary_parallel as _linear_vocabulary_parallel  # noqa: F401
