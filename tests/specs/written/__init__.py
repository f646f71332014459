"""Losses as people write them: spellings that must match, and near misses that must not."""

from tests.specs.written import cross_entropy, huber_loss, kl_div, l1_loss, mse_loss, smooth_l1_loss

#: By the name of the op that they are spellings of.
MODULES = {
    "mse_loss": mse_loss,
    "l1_loss": l1_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "huber_loss": huber_loss,
    "kl_div": kl_div,
    "cross_entropy": cross_entropy,
}
