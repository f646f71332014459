"""One spec a loss: what it is in float64, inputs that hurt, spellings that must and must not match.

The suites iterate over ``SPECS``; a new loss is a new file here.
"""

from tests.specs import cross_entropy, huber_loss, kl_div, mse_loss, smooth_l1_loss
from tests.specs.spec import Spec

SPECS: dict[str, Spec] = {
    module.SPEC.name: module.SPEC
    for module in (mse_loss, smooth_l1_loss, huber_loss, kl_div, cross_entropy)
}
