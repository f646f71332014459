"""Losses of tensors that a program writes to, compared with torch's."""

from __future__ import annotations

import torch

import compile_losses

ROWS, CLASSES = 12, 6


def logits_and_classes():
    x = torch.randn(ROWS, CLASSES, requires_grad=True)
    return x, torch.randint(CLASSES, (ROWS,))


def outcome(function, inputs):
    """The loss, the gradients and what the inputs are afterwards; or the error."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    leaves = [t for t in inputs if t.requires_grad]
    try:
        loss = function(*inputs)
        gradients = torch.autograd.grad(3 * loss, leaves, allow_unused=True)
    except Exception as error:
        return error
    return [loss.detach(), *gradients, *(t.detach() for t in inputs)]


def compiled(function, way):
    torch._dynamo.reset()
    if way == "backend":
        return torch.compile(function, backend="compile_losses")
    if way == "stock":
        return torch.compile(function)

    def enabled(*inputs):
        with compile_losses.enable():
            return torch.compile(function)(*inputs)

    return enabled


def statuses(function, inputs):
    torch._dynamo.reset()
    report = compile_losses.explain(function, *[t.detach().clone() for t in inputs])
    assert not report.errors
    return [(site.op, site.status) for site in report.sites]
