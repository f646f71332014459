"""One training step, in eager mode and compiled by the backend: the same loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import compile_losses
from compile_losses import options, recognize
from compile_losses.report import Report
from tests.graphs import interpreted

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


@contextmanager
def reported() -> Iterator[Report]:
    """What is found in the graphs that the backend compiles meanwhile; see explain for the rest."""
    report, breaks = Report(), dict(counters["graph_break"])

    def rewrite_graph(graph: torch.fx.Graph, **given: Any) -> Report:
        found = recognize.rewrite_graph(graph, **given)
        report.sites += found.sites
        report.errors += found.errors
        report.graphs += 1
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "rewrite_graph", rewrite_graph)
        yield report
    report.graph_breaks = [
        reason for reason, count in counters["graph_break"].items() if count > breaks.get(reason, 0)
    ]


def check_step(
    model: nn.Module,
    step: Callable[[], Tensor],
    rewritten: list[str],
    *,
    compiled: Callable[[], Tensor] | None = None,
    code: bool = False,
    explained: bool = False,
) -> Report:
    """Asserts that a compiled step does what the eager one does, with the losses rewritten.

    Args:
        model: holds the parameters; dropout off.
        step: runs the model on data of its own and returns the loss.
        rewritten: the fused ops expected, in any order. A loss that is declined fails the test.
        compiled: what to run in place of the compiled step, where only a part of it is compiled.
        code: whether Inductor's code is run, and not the graphs that its passes and ours leave.
        explained: whether explain is to say the same as the compilation.

    Returns:
        What is said of the compiled graphs.
    """
    loss, expected = gradients(model, step)
    torch._dynamo.reset()
    compiled = compiled or torch.compile(step, backend="compile_losses")
    with (
        pytest.MonkeyPatch.context() as patch,
        nullcontext() if code else interpreted(patch),
        reported() as report,
    ):
        ours, actual = gradients(model, compiled)
    torch.testing.assert_close(ours, loss, rtol=TOLERANCE, atol=TOLERANCE)
    assert actual.keys() == expected.keys()
    difference = sum((actual[name] - expected[name]).square().sum() for name in expected)
    size = sum(gradient.square().sum() for gradient in expected.values())
    assert size > 0
    assert difference.sqrt() <= TOLERANCE * size.sqrt(), f"{difference.sqrt()} of {size.sqrt()}"
    for told in (report, *([compile_losses.explain(step)] if explained else [])):
        declined = [site for site in told.losses if site.status != "rewritten"]
        assert not declined, str(told)
        assert sorted(site.op for site in told.losses) == sorted(rewritten), str(told)
        assert not told.errors, str(told)
    return report
