"""One spec a loss: what it is in float64, inputs that hurt, spellings that must and must not match.

The suites iterate over ``SPECS``; a new loss is a new file here.
"""

from tests.specs import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    cross_entropy_probabilities,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
    softmax_js_div,
    softmax_kl_div,
)
from tests.specs import written as written_out
from tests.specs.spec import Spec

SPECS: dict[str, Spec] = {
    module.SPEC.name: module.SPEC
    for module in (
        mse_loss,
        l1_loss,
        smooth_l1_loss,
        huber_loss,
        kl_div,
        binary_cross_entropy_with_logits,
        cross_entropy,
        cross_entropy_probabilities,
        nll_loss,
        softmax_kl_div,
        softmax_js_div,
    )
}

# Spellings in torch's other functions have files of their own.
for _name in written_out.MODULES.keys() & SPECS.keys():
    _module = written_out.MODULES[_name]
    SPECS[_name].matches.extend(_module.MATCHES)
    SPECS[_name].near_misses.extend(_module.NEAR_MISSES)
