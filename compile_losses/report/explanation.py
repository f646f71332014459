"""``explain``: runs a function once and collects the report on its losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from compile_losses import implementations, switches
from compile_losses.backend import given_to, rewritten
from compile_losses.guard import Failure, attempt, is_restart
from compile_losses.inductor_passes import installed_rewrite
from compile_losses.known_heads import doors
from compile_losses.lower.decision import WITHOUT_OP, Decision
from compile_losses.lower.regions import BY_CHUNKS
from compile_losses.options import Settings
from compile_losses.recognize.graph.returned_numbers import (
    of_parameters,
    reads_a_function,
    returned_numbers,
)
from compile_losses.recognize.heads.head import NotAbsorbedError, find_head
from compile_losses.recognize.heads.known_heads import refused_heads
from compile_losses.recognize.heads.logits import OUTSIDE
from compile_losses.report import Report, Result, dry_run
from compile_losses.report.no_losses import broken_in, foreign_calls
from compile_losses.report.planned_sites import planned
from compile_losses.sites import (
    UNRECOGNISED,
    Site,
    first_line,
    function_of,
    number_of,
    shorten,
    source_of,
)
from compile_losses.torch_internals.dynamo import (
    break_after,
    counters,
    lookup_backend,
    uncompiled,
    without_earlier_sizes,
    without_recompile_limits,
)
from compile_losses.torch_internals.ops import HigherOrderOperator

#: At most so many lines of a graph are listed as unrecognised.
_MOST_LINES = 8


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Runs ``function(*args, **kwargs)`` once under Dynamo and reports on every loss in it.

    Earlier compilations are neither used nor thrown away, so the answer does not depend on caches.
    The function really runs, once and with its side effects; its rewritten graphs run without a
    compiler. For the plan, Inductor also compiles each graph up to the point where it would
    generate code; ``args`` decide which of the graph's inputs need gradients.

    A number that is returned, or on which ``backward`` is called, is followed back to its losses if
    it needs a gradient. If a sum, mean or norm in it contains no loss, its line is listed with the
    status ``"unrecognised"``. It may be a loss that is not known, and is not counted as one.

    Args:
        function: any callable or module, compiled or not. If it is compiled for this backend, the
            report is for its ``mode`` and its ``options``.

    Returns:
        A :class:`Report`; print it, or read ``.sites``.
    """
    return explain_call(function, args, kwargs)


def explain_call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Report:
    """As :func:`explain`, for a compilation with this ``mode`` and these ``options``; without
    either, with those of the compiled function, or of ``enable``, if it is on.

    Raises:
        RuntimeError: an unknown mode, option or loss.
    """
    if mode is None and options is None:
        mode, options = given_to(function)
    settings = Settings.of(mode, options)
    first = installed_rewrite()
    if options is None and first is not None:  # as torch.compile compiles it now
        settings = replace(first.settings, inductor=settings.inductor)
    report = Report()
    if not switches.is_on():
        report.errors.append("COMPILE_LOSSES=0: compiled in this environment, nothing is rewritten")

    #: Where each graph so far ended, if it did not end with the function.
    ends: list[tuple[str, int]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        compiled = rewritten(gm, example_inputs, settings, add)
        end = break_after(gm)
        if end is not None:
            ends.append(end)
            inside = broken_in(end)
            if inside is not None and inside not in report.foreign:
                report.foreign.append(inside)
        return compiled

    backend.settings = settings  # type: ignore[attr-defined]  # which is asked before it is called

    def add(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Adds a rewritten graph to the report, and returns a function that runs the graph."""
        found = gm.meta["compile_losses"]
        if found.sites:
            found_now = [*report.without_kernels, *_without_kernels(example_inputs)]
            report.without_kernels = list(dict.fromkeys(found_now))
        decisions: list[Decision] = []
        failure = ""
        is_rewritten = any(site.status == "rewritten" for site in found.sites)
        if is_rewritten or _is_trained(gm, example_inputs):
            try:
                decisions = dry_run.decide(gm, example_inputs, settings)
                found = _with_hints(found, gm, example_inputs, settings)
            except Exception as error:  # the graphs without a compiler still run
                if is_restart(error):
                    raise
                if is_rewritten:
                    failure = f"no plan: {first_line(f'{type(error).__name__}: {error}')}"
        add_graph(report, gm.graph, found, decisions, failure, ends[-1] if ends else None)
        if any(isinstance(node.target, HigherOrderOperator) for node in gm.graph.nodes):
            # Some of these ops are right only if AOTAutograd has traced them.
            return lookup_backend("aot_eager")(gm, example_inputs)
        return gm.forward

    before = _reasons()
    refused_heads()  # of earlier compilations
    with without_recompile_limits(), without_earlier_sizes():
        torch.compile(uncompiled(function), backend=backend)(*args, **(kwargs or {}))
    report.sites += refused_heads()  # after which there was no graph
    report.sites = [_located(site, function) for site in report.sites]
    report.graph_breaks = _graph_breaks(before)
    report.left_alone = [f"{head}: {reason}" for head, reason in doors.left.items()]
    return report


def _with_hints(
    found: Report, gm: torch.fx.GraphModule, example_inputs: list[Any], settings: Settings
) -> Report:
    """A report that says of held logits whether preferring memory would hold none of them."""
    if settings.request.prefer_memory or not settings.request.lowers:
        return found
    if not any(map(_may_hold_logits, found.sites)) or not any(map(_is_product, gm.graph.nodes)):
        return found
    decisions = dry_run.decide(gm, example_inputs, replace(settings, prefer_memory=True))
    taken = {each.site for each in decisions if each.choice.startswith(BY_CHUNKS)} - {None}
    with switches.through(settings.door):
        hint = f"{switches.how_to_set(switches.PREFER_MEMORY)} holds none of its logits"
    sites = [
        replace(site, reason="; ".join(filter(None, (site.reason, hint))))
        if site.mark in taken and _may_hold_logits(site)
        else site
        for site in found.sites
    ]
    return replace(found, sites=sites)


def _may_hold_logits(site: Site) -> bool:
    """Whether a loss reads logits, perhaps of a head, and no hint is there yet."""
    is_alone = site.status == "rewritten" and not site.op.startswith("linear_")
    return is_alone and switches.PREFER_MEMORY not in site.reason


def _is_product(node: Node) -> bool:
    """Whether a node is a linear layer."""
    try:
        return find_head(node) is not None
    except NotAbsorbedError:
        return False


def _without_kernels(tensors: Iterable[Any]) -> list[str]:
    """What computes on the devices of tensors that have no kernels, and why."""
    devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return [
        f"{device.type}: {implementations.choose(device)}"
        for device in sorted(devices, key=str)
        if not implementations.has_kernels(device)
    ]


def add_graph(
    report: Report,
    graph: Graph,
    found: Report,
    decisions: Sequence[Decision],
    failure: str = "",
    end: tuple[str, int] | None = None,
) -> None:
    """Adds a rewritten Dynamo graph to a report.

    Args:
        found: what recognition said of the graph.
        decisions: those of the passes on AOTAutograd's graphs.
        failure: why there are none.
        end: the graph break before the graph, if it is known.
    """
    report.errors += [*found.errors, *filter(None, [failure])]
    for site in planned(found.sites, decisions):
        if failure and site.status == "rewritten":
            site = replace(site, details=(failure,))
        if report.graphs > 0 and OUTSIDE in site.reason:
            where = "a graph break"
            if end is not None:
                where = f"the graph break in {shorten(end[0])}:{end[1]}"
            reason = site.reason.replace(OUTSIDE, f"{OUTSIDE}, after {where}")
            site = replace(site, reason=reason)
        report.sites.append(replace(site, graph=report.graphs))
    found_calls = attempt(lambda: foreign_calls(graph))
    if not isinstance(found_calls, Failure):
        report.foreign += [call for call in found_calls if call not in report.foreign]
    unknown = attempt(lambda: _add_results(report, graph))
    if isinstance(unknown, Failure):
        report.errors.append(f"what is not recognised is not known: {unknown.reason}")
    report.graphs += 1


def _reasons() -> tuple[Counter[str], Counter[str]]:
    """How often Dynamo has broken a graph, and met what it can't trace, by its reasons."""
    return Counter(counters["graph_break"]), Counter(counters["unimplemented"])


def _graph_breaks(before: tuple[Counter[str], Counter[str]]) -> list[str]:
    """Why Dynamo broke graphs since then, or gave up a function that would break in a loop."""
    breaks, untraced = (now - then for now, then in zip(_reasons(), before, strict=True))
    texts = "\n".join(breaks)
    return [*breaks, *(reason for reason in untraced if first_line(reason) not in texts)]


def _is_trained(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph may have a backward."""
    tensors = [t for t in (*example_inputs, *gm.parameters()) if isinstance(t, torch.Tensor)]
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _add_results(report: Report, graph: Graph) -> None:
    """Adds to a report with a graph's sites its returned numbers, and lines that no site covers."""
    own = [site for site in report.sites if site.graph == report.graphs]
    lines = {(site.file, site.line): site.op for site in own if site.op in WITHOUT_OP}
    known = {site.mark: site for site in own if site.mark is not None}
    reductions: dict[tuple[str, int, bool], list[Node]] = {}
    for returned in returned_numbers(graph, set(known)):
        below = [site for mark, site in known.items() if mark in returned.marks]
        found = [f"{site.op} ({site.status})" for site in below]
        for node in reversed(returned.reductions):  # they were found from the end
            file, line = source_of(node)
            if (file, line) in lines:
                found.append(lines[file, line])
                continue
            found.append(f"{function_of(node)} ({UNRECOGNISED})")
            there = reductions.setdefault((file, line, of_parameters(node)), [])
            there += [node] if node not in there else []
        file, line = source_of(returned.node)
        report.results.append(Result(file, line, report.graphs, tuple(_counted(found))))
    for i, ((file, line, parameters), nodes) in enumerate(reductions.items()):
        if i == _MOST_LINES:
            more = f"and {number_of(len(reductions) - i, 'line')} more like it"
            last = report.sites[-1]
            report.sites[-1] = replace(last, reason=f"{last.reason}; {more}")
            break
        names = ", ".join(_counted(map(function_of, nodes)))
        reason = "of parameters alone" if parameters else "no loss that is known was found in it"
        if any(map(reads_a_function, nodes)):
            reason += "; it reads an autograd.Function, which is left as it is"
        reason = f"{names}: {reason}" if len(nodes) > 1 else reason
        op = function_of(nodes[0])
        report.sites.append(Site(op, UNRECOGNISED, reason, file, line, graph=report.graphs))


def _counted(names: Iterable[str]) -> list[str]:
    """Each name once, with its count."""
    counts = Counter(names)
    return [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]


def _located(site: Site, function: Callable[..., Any]) -> Site:
    """A torch function that is explained by itself has no user frame; then its own line counts."""
    code = getattr(function, "__code__", None)
    if site.line > 0 or code is None:
        return site
    return replace(site, file=code.co_filename, line=code.co_firstlineno)
