"""From the user's spelling of a loss to its fused op, on the graph that Dynamo captured."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

import compile_losses.ops  # noqa: F401  declares what the graphs will call
from compile_losses.lower.decision import mark
from compile_losses.recognize.guards import refusal
from compile_losses.recognize.linear import through_linear
from compile_losses.recognize.match import Decline, Match
from compile_losses.recognize.shadow import Shadow
from compile_losses.recognize.squared_error import recognize_squared_error
from compile_losses.recognize.table import recognize_call
from compile_losses.report import Report, Site, source_of

__all__ = ["rewrite", "rewrite_graph"]


def rewrite(gm: GraphModule) -> GraphModule:
    """Replaces the losses in a Dynamo graph by ``torch.ops.fused.*``.

    Args:
        gm: a graph module as Dynamo hands it to a backend; changed in place.

    Returns:
        ``gm``, recompiled, with a :class:`compile_losses.report.Report` in
        ``gm.meta["compile_losses"]``. Whatever is not certain to be the same is left alone.
    """
    gm.meta["compile_losses"] = rewrite_graph(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def rewrite_graph(graph: Graph) -> Report:
    """As :func:`rewrite`, for the graph alone."""
    sites: list[Site] = []
    taken: set[Node] = set()
    shadow = Shadow()
    # From the end: the outermost spelling of a loss claims the nodes inside it.
    for node in reversed(graph.nodes):
        if node in taken:
            continue
        found = recognize_call(node) or recognize_squared_error(node, shadow)
        if found is None:
            continue
        if isinstance(found, Match):
            found = through_linear(found, shadow)
        reason = found.reason if isinstance(found, Decline) else refusal(found)
        sites.append(_site(found, reason, mark(found.root)))
        if isinstance(found, Match):
            taken.update(found.interior)
            if reason is None:
                found.replace()
    return Report(sites[::-1], graphs=1)


def _site(found: Match | Decline, reason: str | None, mark: int) -> Site:
    file, line = source_of(found.root)
    if reason is not None:
        name = found.op if isinstance(found, Match) else found.name
        return Site(name, "declined", reason, file, line, mark=mark)
    assert isinstance(found, Match)
    absorbed = [f"absorbed {' and '.join(found.absorbed)}"] if found.absorbed else []
    notes = "; ".join([*absorbed, *found.notes])
    return Site(found.op, "rewritten", notes, file, line, mark=mark)
