"""One training step, in eager mode and compiled by the backend: the same loss and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import compile_losses
from compile_losses.report import Report

#: float32 on both sides, and the same operations outside the losses. Of all gradients together:
#: some parameters have gradients that are nothing but rounding errors (the bias of attention keys).
TOLERANCE = 1e-5


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step, and the gradient of every parameter that gets one."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = step()
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in found.items()}


def check_step(
    model: nn.Module,
    step: Callable[[], Tensor],
    rewritten: list[str],
    *,
    inner_backend: str = "aot_eager",
    compiled: Callable[[], Tensor] | None = None,
) -> Report:
    """Asserts that a compiled step does what the eager one does, with the losses rewritten.

    Args:
        model: holds the parameters; dropout off.
        step: runs the model on data of its own and returns the loss.
        rewritten: the fused ops expected, in any order. A loss that is declined fails the test.
        inner_backend: see the backend's options.
        compiled: what to run in place of the compiled step, where only a part of it is compiled.

    Returns:
        What explain says of the step.
    """
    loss, expected = gradients(model, step)
    report = compile_losses.explain(step)
    declined = [site for site in report.losses if site.status != "rewritten"]
    assert not declined, str(report)
    assert sorted(site.op for site in report.losses) == sorted(rewritten), str(report)
    torch._dynamo.reset()
    options = {"inner_backend": inner_backend}
    compiled = compiled or torch.compile(step, backend="compile_losses", options=options)
    ours, actual = gradients(model, compiled)
    torch.testing.assert_close(ours, loss, rtol=TOLERANCE, atol=TOLERANCE)
    assert actual.keys() == expected.keys()
    difference = sum((actual[name] - expected[name]).square().sum() for name in expected)
    size = sum(gradient.square().sum() for gradient in expected.values())
    assert size > 0
    assert difference.sqrt() <= TOLERANCE * size.sqrt(), f"{difference.sqrt()} of {size.sqrt()}"
    return report
