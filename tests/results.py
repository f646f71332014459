"""What a function and its compiled self return, with gradients."""

from __future__ import annotations

import torch


def run(function, inputs):
    """The result and the gradients of the inputs' leaves."""
    result = function(*inputs)
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves or not result.requires_grad:
        return result.detach(), ()
    return result.detach(), torch.autograd.grad(result.sum(), leaves, allow_unused=True)


def compile_with(function, inner, dynamic):
    return torch.compile(
        function,
        backend="compile_losses",
        fullgraph=True,
        dynamic=dynamic,
        options={"inner_backend": inner},
    )
