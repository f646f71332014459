"""Losses as people write them: spellings that must match, and near misses that must not."""

from tests.specs.written import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    cross_entropy_probabilities,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    smooth_l1_loss,
    softmax_js_div,
    softmax_kl_div,
)

#: By the name of the spec that they extend.
MODULES = {
    "mse_loss": mse_loss,
    "l1_loss": l1_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "huber_loss": huber_loss,
    "kl_div": kl_div,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "cross_entropy": cross_entropy,
    "cross_entropy_probabilities": cross_entropy_probabilities,
    "softmax_kl_div": softmax_kl_div,
    "softmax_js_div": softmax_js_div,
}
