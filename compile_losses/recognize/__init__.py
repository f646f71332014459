"""From the user's spelling of a loss to its fused op, on the graph that Dynamo captured."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from torch.fx import Graph, GraphModule

import compile_losses.ops  # noqa: F401  declares what the graphs will call
from compile_losses.guard import Failure, attempt
from compile_losses.recognize.returned_logits import Lazily
from compile_losses.recognize.rewriting import Rewriting
from compile_losses.recognize.steps import Graphs, Steps
from compile_losses.report import Report
from compile_losses.request import Request
from compile_losses.sites import Site

__all__ = ["rewrite", "rewrite_graph"]


def rewrite(
    gm: GraphModule,
    *,
    verify: bool | None = None,
    strict: bool | None = None,
    prefer_memory: bool | None = None,
    losses: Container[str] | None = None,
    lowers: bool = False,
    lazily: Lazily | None = None,
) -> GraphModule:
    """Replaces the losses in a Dynamo graph by ``torch.ops.fused.*``.

    Args:
        gm: a graph module as Dynamo hands it to a backend; changed in place.
        verify: whether to evaluate every loss and its rewrite on random numbers first. A loss whose
            rewrite differs is left alone. By default if COMPILE_LOSSES_VERIFY=1 is in the
            environment.
        strict: whether to raise an error inside this package, instead of leaving a loss to torch;
            by default if COMPILE_LOSSES_STRICT=1 is in the environment.
        prefer_memory: whether a loss is taken together with its linear layer even if that saves
            less than half of the logits, or computes them twice, which may cost time; by default
            if COMPILE_LOSSES_PREFER_MEMORY=1 is in the environment.
        losses: the names of the ops to rewrite to; by default those that COMPILE_LOSSES_ONLY and
            COMPILE_LOSSES_EXCEPT leave, which are all.
        lowers: whether ``lower.plan`` will work on AOTAutograd's graph of ``gm``, as it does under
            the backend. If so, unreduced losses are taken together with their linear layer, too.
        lazily: collects the outputs that the caller has to make lazy: logits of losses that were
            taken together with their linear layer. By default returned logits stay.

    Returns:
        ``gm``, recompiled, with a :class:`compile_losses.report.Report` in
        ``gm.meta["compile_losses"]``. A loss is left alone if its rewrite is not certain to be the
        same.
    """
    request = Request.of(
        losses=losses,
        prefer_memory=prefer_memory,
        verify=verify,
        strict=strict,
        lowers=lowers,
        lazily=lazily,
    )
    gm.meta["compile_losses"] = rewrite_graph(gm.graph, request=request, module=gm)
    return gm


def rewrite_graph(
    graph: Graph, *, request: Request | None = None, module: GraphModule | None = None
) -> Report:
    """As :func:`rewrite`, for a graph and the graphs of its higher-order ops.

    Args:
        request: by default what the environment asks for.
        module: whose graph it is; recompiled if the graph changes.
    """
    asked = Request.of() if request is None else request
    strict, lazily = asked.strict, asked.lazily
    steps = attempt(lambda: Steps(Graphs(graph, module), strict), strict=strict)
    if isinstance(steps, Failure):
        return failed(steps)
    turns: list[Rewriting] = []

    def turn() -> None:
        own = None if lazily is None else replace(lazily, outputs=[])
        turns.append(Rewriting(steps, replace(asked, lazily=own)))
        turns[-1].run(graph)

    failure = steps.repeat(turn)
    if isinstance(failure, Failure):
        return failed(failure, turns[-1].sites[::-1] if turns else ())
    report = Report(turns[-1].sites[::-1], graphs=1)
    if steps.unexplained is not None:
        report.errors.append(f"looked for losses twice: {steps.unexplained.reason}")
    report.errors += [
        f"{name}: {left.reason}" for name, left in steps.failures.items() if isinstance(name, str)
    ]
    found = turns[-1].request.lazily
    if lazily is not None and found is not None:
        lazily.outputs += found.outputs
    return report


def failed(failure: Failure, sites: Sequence[Site] = ()) -> Report:
    """The report of a graph that is left to torch, with the sites that were found before."""
    found = [
        replace(site, status="declined", reason=failure.reason)
        if site.status == "rewritten"
        else site
        for site in sites
    ]
    return Report(found, graphs=1, errors=[f"losses are left to torch: {failure.reason}"])
