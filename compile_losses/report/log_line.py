"""The line of log about the first losses that a process compiles, and collectors of all of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch.fx import GraphModule

from compile_losses import switches
from compile_losses.lower.decision import Decision
from compile_losses.report import Report
from compile_losses.report.planned_sites import planned
from compile_losses.sites import GAINED, Site, megabytes, number_of
from compile_losses.torch_internals.dynamo import counters as dynamo_counters

_log = logging.getLogger("compile_losses.summary")
_log.setLevel(logging.INFO)  # whatever the level of other people's logs is

#: The decisions of the compilation that is to be told.
_decisions: ContextVar[list[Decision] | None] = ContextVar("compile_losses_decisions", default=None)
_told = False
#: Each is called with a rewritten graph; the result is called with the decisions about that graph.
collectors: list[Callable[[GraphModule], Callable[[Sequence[Decision]], None]]] = []


@contextmanager
def compilation(gm: GraphModule) -> Iterator[None]:
    """Around the compilation of a rewritten graph, which is collected. Logs a line after the first
    one with losses."""
    global _told
    report: Report | None = gm.meta.get("compile_losses")
    is_first = not _told and report is not None and bool(report.losses) and _is_wanted()
    if report is None or not (is_first or collectors):
        yield
        return
    ends = [collector(gm) for collector in collectors]
    decisions: list[Decision] = []
    with switches.holding(_decisions, decisions):
        yield
    for end in ends:
        end(decisions)
    if is_first and not _told:
        _told = True
        _tell(f"compile_losses: {line(planned(report.losses, decisions))}")


def note(decisions: Sequence[Decision]) -> None:
    """Keeps the decisions of a pass for the line."""
    noted = _decisions.get()
    if noted is not None:
        noted += decisions


def line(sites: Sequence[Site]) -> str:
    """The number of losses, and an estimate of the memory that they hold less than stock's."""
    rewritten = [site for site in sites if site.status == "rewritten"]
    parts = [number_of(len(sites), "loss", "losses"), f"{len(rewritten)} rewritten"]
    known = [site for site in rewritten if site.gain]
    saved = sum(site.bytes_saved for site in known)
    if saved:
        parts.append(f"{megabytes(saved)} less")
    elif any(site.gain == GAINED for site in known):
        parts.append("as much memory, less traffic")
    elif known:
        parts.append("as stock")
    return ", ".join(parts)


def tell_if_none() -> None:
    """At the end of a program: logs a line if it compiled no loss."""
    counted = switches.counters()
    has_losses = _told or counted["rewritten"] or counted["declined"]
    if has_losses or not switches.is_on() or not _is_wanted():
        return
    graphs = dynamo_counters["stats"]["unique_graphs"]
    if graphs:
        seen = f"no loss in {number_of(graphs, 'compiled graph')}"
        _tell(f"compile_losses: {seen}; python -m compile_losses explain FILE:FUNCTION says why")
    else:
        _tell(
            "compile_losses: nothing was compiled, and so nothing was rewritten. Compile the model "
            "by torch.compile; Trainer does so with torch_compile=True, accelerate launch with "
            "--dynamo_backend inductor"
        )


def _is_wanted() -> bool:
    """Whether COMPILE_LOSSES_LOG=0 or the logger's level don't forbid it; of the first rank."""
    parent = logging.getLogger("compile_losses").level
    is_first = os.environ.get("RANK", "0") == "0"
    return switches.is_set("COMPILE_LOSSES_LOG", "1") and parent <= logging.INFO and is_first


def _tell(text: str) -> None:
    if _log.hasHandlers():
        _log.info("%s", text)
        return
    handler = logging.StreamHandler()  # nobody has configured logging: to standard error
    _log.addHandler(handler)
    try:
        _log.info("%s", text)
    finally:
        _log.removeHandler(handler)
