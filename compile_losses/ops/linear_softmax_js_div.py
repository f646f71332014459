"""Generalised Jensen-Shannon divergence of a linear layer's output and a teacher's, for
distillation, without ever holding the logits.

``torch.ops.fused.linear_softmax_js_div(input, linear_weight, target, reduction=3, *,
linear_bias=None, target_weight=None, target_bias=None, beta=0.5, temperature=1.0, softcap=None,
target_softcap=None, dtype=None)`` is :mod:`softmax_js_div <compile_losses.ops.softmax_js_div>` of
the student's logits as input and the teacher's as target. Student, teacher, arguments, reductions
and errors are in :mod:`compile_losses.ops.linear.divergence`.

Raises:
    RuntimeError: beta is not between 0 and 1.
"""

from compile_losses.ops.linear.divergence import declare
from compile_losses.ops.softmax_js_div import BETA, check, reference

declare("softmax_js_div", reference, BETA, lambda beta: (False, (beta,)), check=check)
