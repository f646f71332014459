"""From the user's spelling of a loss to its fused op, on the graph that Dynamo captured."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

import compile_losses.ops  # noqa: F401  declares what the graphs will call
from compile_losses.lower.decision import mark
from compile_losses.recognize.guards import refusal
from compile_losses.recognize.linear import through_linear
from compile_losses.recognize.match import Decline, Match
from compile_losses.recognize.verify import verify as compare
from compile_losses.recognize.verify import verify_by_default
from compile_losses.recognize.written import Recognizer
from compile_losses.report import Report, Site, source_of

__all__ = ["rewrite", "rewrite_graph"]


def rewrite(gm: GraphModule, *, verify: bool | None = None) -> GraphModule:
    """Replaces the losses in a Dynamo graph by ``torch.ops.fused.*``.

    Args:
        gm: a graph module as Dynamo hands it to a backend; changed in place.
        verify: whether to evaluate every loss and its rewrite on random numbers first, and to
            leave alone what differs; by default if COMPILE_LOSSES_VERIFY=1 is in the environment.

    Returns:
        ``gm``, recompiled, with a :class:`compile_losses.report.Report` in
        ``gm.meta["compile_losses"]``. Whatever is not certain to be the same is left alone.
    """
    gm.meta["compile_losses"] = rewrite_graph(gm.graph, verify=verify)
    gm.graph.lint()
    gm.recompile()
    return gm


def rewrite_graph(graph: Graph, *, verify: bool | None = None) -> Report:
    """As :func:`rewrite`, for the graph alone."""
    verify = verify_by_default() if verify is None else verify
    sites: list[Site] = []
    taken: set[Node] = set()
    recognizer = Recognizer(graph)
    # From the end: the outermost spelling of a loss claims the nodes inside it.
    for node in reversed(graph.nodes):
        if node in taken:
            continue
        refused: tuple[Match | Decline, str] | None = None
        for candidate in recognizer.candidates(node):
            found = candidate
            if isinstance(found, Match):
                found = through_linear(found, recognizer.shadow)
            reason = found.reason if isinstance(found, Decline) else refusal(found)
            if verify and reason is None:
                assert isinstance(found, Match)
                reason, note = compare(found)
                found.notes += [note] if note else []
            if reason is None:
                assert isinstance(found, Match)
                sites.append(_site(found, None, mark(found.root)))
                taken.update(found.replace())
                break
            refused = refused or (found, reason)
        else:
            if refused is not None:
                found, reason = refused
                sites.append(_site(found, reason, mark(found.root)))
                taken.update(found.interior if isinstance(found, Match) else ())
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
