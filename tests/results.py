"""What a function and its compiled self return, with gradients."""

from __future__ import annotations

import pytest
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


def count_fused_calls(function):
    with torch.profiler.profile() as profile:
        function()
    return sum(event.name.startswith("fused::") for event in profile.events())


def spellings(cases):
    def param(name, spelling):
        fails = torch.__version__ < spelling.since
        skip = pytest.mark.skipif(fails, reason=f"torch itself fails before {spelling.since}")
        return pytest.param(name, spelling, id=f"{name}: {spelling.name}", marks=skip)

    return pytest.mark.parametrize(("name", "spelling"), [param(*case) for case in cases])
