"""Kullback-Leibler divergence of a linear layer's output from a teacher's, for distillation,
without ever holding the logits.

``torch.ops.fused.linear_softmax_kl_div(input, linear_weight, target, reduction=3, *,
linear_bias=None, target_weight=None, target_bias=None, reverse=False, temperature=1.0,
softcap=None, target_softcap=None, dtype=None)`` is KL(softmax(teacher / temperature) ||
softmax(student / temperature)), with ``reverse`` KL(student || teacher). It is not multiplied by
T^2. Student, teacher, arguments, reductions and errors are in
:mod:`compile_losses.ops.linear.divergence`.
"""

from compile_losses.ops.elementwise import Parameter
from compile_losses.ops.linear.divergence import declare
from compile_losses.ops.softmax_kl_div import reference

declare(
    "softmax_kl_div",
    reference,
    Parameter("bool", "reverse", "False", keyword_only=True),
    lambda reverse: (reverse, ()),
)
