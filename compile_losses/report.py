"""What was rewritten, what was not, and why: the answer that ``explain`` gives."""

from __future__ import annotations

import os
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from compile_losses.guard import Failure, attempt, is_restart
from compile_losses.lower.cost import megabytes
from compile_losses.lower.decision import Decision

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<function>\w+))?')
_TORCH = os.path.join(os.path.realpath(os.path.dirname(torch.__file__)), "")
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        os.path.dirname(torch.__file__),
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        sysconfig.get_paths()["stdlib"],
    }
)

UNRECOGNISED = "unrecognised"
#: So many lines of a graph are listed for what was not recognised in them.
_MOST_LINES = 8


@dataclass(frozen=True)
class Site:
    """One loss in a user's program.

    Attributes:
        op: the fused op, or the torch function that was left alone; ``"elementwise"`` for what is
            neither, and whose gradient may be computed with it; of what was not recognised, the
            function that reduces a tensor to a number.
        status: ``"rewritten"``; ``"declined"``; or ``"unrecognised"``, for what is part of a number
            that the function returns or differentiates, and may be a loss that nobody knew.
        reason: why it was declined, or what was absorbed into the op; may be empty.
        file, line: the innermost frame of the user's own code, outside installed libraries; that
            of a library's model where there is none.
        graph: the index of the graph it lies in, counted from 0.
        plan: what Inductor's graphs make of a rewritten loss, in steps; empty where that is not
            known for certain.
        details: the reasons for the plan.
        bytes_moved, bytes_held: an estimate of the bytes that the loss's forward and backward move,
            and of the most that are held for it at a time; None where it is not known.
        stock_bytes_moved, stock_bytes_held: the same for torch's own ops.
        mark: the loss's number in the process; it identifies the loss in lower graphs.
    """

    op: str
    status: str
    reason: str
    file: str
    line: int
    graph: int = 0
    plan: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    bytes_moved: int | None = None
    bytes_held: int | None = None
    stock_bytes_moved: int | None = None
    stock_bytes_held: int | None = None
    mark: int | None = field(default=None, repr=False, compare=False)

    @property
    def traffic(self) -> str:
        """The bytes moved, against those of torch's own ops."""
        if self.bytes_moved is None or self.stock_bytes_moved is None:
            return ""
        return f"{megabytes(self.bytes_moved)} / {megabytes(self.stock_bytes_moved)}"

    @property
    def notes(self) -> str:
        return "; ".join(note for note in (self.reason, *self.details) if note)


@dataclass(frozen=True)
class Result:
    """A number that a graph returns, or calls ``backward`` on, and that needs a gradient.

    Attributes:
        file, line: where it is computed, as of a :class:`Site`.
        graph: the index of its graph.
        found: what it is made of: the ops of the sites with their status.
    """

    file: str
    line: int
    graph: int
    found: tuple[str, ...]


@dataclass
class Report:
    """The losses of one function, in the order in which they run.

    Attributes:
        sites: the losses found; behind those of each graph what was not recognised in it, one site
            for each line.
        results: the numbers that need a gradient, with what was found below each; of ``explain``.
        graphs: how many graphs Dynamo made of the function.
        graph_breaks: Dynamo's reasons for making more than one.
        errors: why the plan of a graph is not known, or its losses were not looked for.
    """

    sites: list[Site] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    graphs: int = 0
    graph_breaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, as for ``json.dumps``."""
        result = asdict(self)
        for site in result["sites"]:
            del site["mark"]
            site["plan"], site["details"] = list(site["plan"]), list(site["details"])
        return result

    def to_html(self) -> str:
        """A page that needs no other file: the losses with their source lines and plans."""
        from compile_losses.page import page

        return page(self)

    @property
    def losses(self) -> list[Site]:
        """The sites less what was not recognised."""
        return [site for site in self.sites if site.status != UNRECOGNISED]

    @property
    def summary(self) -> str:
        losses = self.losses
        header = f"{_count(self.graphs, 'graph')}, {_count(len(losses), 'loss', 'losses')}"
        header += f", {sum(site.status == 'rewritten' for site in losses)} rewritten"
        others = len(self.sites) - len(losses)
        return f"{header}, {others} {UNRECOGNISED}" if others else header

    @property
    def remarks(self) -> list[str]:
        """What else is to be said, in lines."""
        lines = []
        if self.graphs == 0 and not self.sites:
            lines.append("Dynamo compiled nothing: is the function disabled or skipped?")
        if len(self.results) > 1 and self.losses != self.sites:
            lines += [
                f"returned, {shorten(result.file)}:{result.line}: {', '.join(result.found)}"
                for result in self.results
            ]
        lines += [f"graph break: {_first_line(reason)}" for reason in self.graph_breaks]
        return lines + self.errors

    def __str__(self) -> str:
        lines = [self.summary]
        if self.sites:
            rows: list[tuple[str, ...]] = [
                (
                    site.status,
                    site.op,
                    f"{shorten(site.file)}:{site.line}",
                    ", ".join(site.plan),
                    site.traffic,
                    site.notes,
                )
                for site in self.sites
            ]
            lines += _table(("status", "op", "where", "plan", "bytes / stock", "notes"), rows)
        return "\n".join(lines + self.remarks)


def source_of(node: Node) -> tuple[str, int]:
    """The file and line of the user's code that made a node, as Dynamo recorded it.

    Where a library's model is compiled by itself no line is the user's. The nearest to it is then
    in the ``forward`` of that model, and not in the functions that it calls for its loss.
    """
    return line_in(node.meta.get("stack_trace") or "")


def line_in(trace: str) -> tuple[str, int]:
    """The file and line of the user's code in a stack trace, as for :func:`source_of`."""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return "<unknown>", 0
    paths = [os.path.realpath(frame["file"]) for frame in frames]
    own = [f for f, path in zip(frames, paths, strict=True) if not path.startswith(_LIBRARIES)]
    models = [
        frame
        for frame, path in zip(frames, paths, strict=True)
        if frame["function"] == "forward" and not path.startswith(_TORCH)
    ]
    frame = (own or models or frames)[-1]
    return frame["file"], int(frame["line"])


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Runs ``function(*args, **kwargs)`` once under Dynamo and reports on every loss in it.

    Nothing that was compiled before is used or thrown away, so the answer is the same whatever is
    cached. The function really runs, once and with its side effects, its rewritten graphs
    without a compiler. Each graph is also compiled by Inductor up to the point where code would be
    generated, for the plan; its inputs' gradients are those that ``args`` ask for.

    Every number that is returned, or on which ``backward`` is called, and that needs a gradient is
    followed back to the losses found in it. Where a sum, mean or norm in it holds none of them, its
    line is listed with the status ``"unrecognised"``: it may be a loss that is not known, and is
    not counted as one.

    Args:
        function: any callable or module, compiled or not.

    Returns:
        A :class:`Report`; print it, or read ``.sites``.
    """
    from torch._dynamo.utils import counters

    from compile_losses.backend import decide
    from compile_losses.recognize import rewrite
    from compile_losses.recognize.logits import OUTSIDE

    report = Report()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        rewrite(gm, lowers=True)
        found: Report = gm.meta["compile_losses"]
        decisions: list[Decision] = []
        failure = ""
        rewritten = any(site.status == "rewritten" for site in found.sites)
        if rewritten or _is_trained(gm, example_inputs):
            try:
                decisions = decide(gm, example_inputs)
            except Exception as error:  # the graphs without a compiler still run
                if is_restart(error):
                    raise
                if rewritten:
                    failure = f"no plan: {_first_line(f'{type(error).__name__}: {error}')}"
        report.errors += [*found.errors, *filter(None, [failure])]
        sites = [_planned(site, decisions) for site in found.sites]
        for site in _with_elementwise(sites, decisions):
            if failure and site.status == "rewritten":
                site = replace(site, details=(failure,))
            if report.graphs > 0 and OUTSIDE in site.reason:
                site = replace(site, reason=f"{site.reason}, after a graph break")
            report.sites.append(replace(site, graph=report.graphs))
        unknown = attempt(lambda: _add_results(report, gm.graph))
        if isinstance(unknown, Failure):
            report.errors.append(f"what is not recognised is not known: {unknown.reason}")
        report.graphs += 1
        if any(isinstance(node.target, HigherOrderOperator) for node in gm.graph.nodes):
            # Some of these ops are right only where AOTAutograd has traced them.
            return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)
        return gm.forward

    breaks = dict(counters["graph_break"])
    # A fresh backend never meets a cached graph; it must not meet the limit on cached graphs
    # either.
    with torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16):
        torch.compile(_uncompiled(function), backend=backend)(*args, **kwargs)
    report.sites = [_located(site, function) for site in report.sites]
    report.graph_breaks = [
        reason for reason, count in counters["graph_break"].items() if count > breaks.get(reason, 0)
    ]
    return report


def _planned(site: Site, decisions: Sequence[Decision]) -> Site:
    """A site with what was decided about it, found by its mark."""
    own = [d for d in decisions if site.mark is not None and d.site == site.mark]
    if site.status != "rewritten" or not own:
        return site
    compared = [d for d in own if d.cost is not None and d.stock is not None]
    # An op that was written out and then moved has two, of which the last counts.
    compared = [d for d in compared if d.loss == "elementwise"] or compared
    if len(compared) == 1:
        cost, stock = compared[0].cost, compared[0].stock
        assert cost is not None
        assert stock is not None
        site = replace(
            site,
            bytes_moved=cost.moved,
            bytes_held=cost.held,
            stock_bytes_moved=stock.moved,
            stock_bytes_held=stock.held,
        )
    details = [f"{d.choice}: {d.reason}" for d in own if d.reason]
    return replace(site, plan=tuple(d.choice for d in own), details=tuple(details))


def _is_trained(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph may have a backward."""
    tensors = [t for t in (*example_inputs, *gm.parameters()) if isinstance(t, torch.Tensor)]
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _with_elementwise(sites: Sequence[Site], decisions: Sequence[Decision]) -> list[Site]:
    """Sites, and those of losses that are no op: each is that which was declined in its line, or
    one of its own."""
    result = list(sites)
    for decision in (d for d in decisions if d.loss == "elementwise"):
        file, line = line_in(decision.trace)
        there = [
            i
            for i, site in enumerate(result)
            if (
                site.mark == decision.site
                if decision.site is not None
                else (site.file, site.line) == (file, line)
            )
        ]
        declined = [i for i in there if result[i].status == "declined"]
        if decision.cost is None or decision.stock is None:
            if not there:
                result.append(Site("elementwise", "declined", decision.reason, file, line))
            continue
        if there and not declined and decision.site is not None:
            continue  # an op that was written out, of whose plan it is one more step
        if not declined:
            result.append(Site("elementwise", "rewritten", "", file, line))
        index = declined[0] if declined else -1
        result[index] = replace(
            result[index],
            status="rewritten",
            reason="",
            plan=(f"elementwise, {decision.choice}",),
            bytes_moved=decision.cost.moved,
            bytes_held=decision.cost.held,
            stock_bytes_moved=decision.stock.moved,
            stock_bytes_held=decision.stock.held,
        )
    return result


def _add_results(report: Report, graph: Graph) -> None:
    """Adds what a graph returns to a report that has its sites, and what no site covers."""
    from compile_losses.recognize.returned import of_parameters, returned_numbers

    own = [site for site in report.sites if site.graph == report.graphs]
    lines = {(site.file, site.line) for site in own if site.op == "elementwise"}
    known = {site.mark: site for site in own if site.mark is not None}
    reductions: dict[tuple[str, int, bool], list[Node]] = {}
    for returned in returned_numbers(graph, set(known)):
        below = [site for mark, site in known.items() if mark in returned.marks]
        found = [f"{site.op} ({site.status})" for site in below]
        for node in reversed(returned.reductions):  # the walk to them starts at the end
            file, line = source_of(node)
            if (file, line) in lines:
                found.append("elementwise")
                continue
            found.append(f"{_function_of(node)} ({UNRECOGNISED})")
            there = reductions.setdefault((file, line, of_parameters(node)), [])
            there += [node] if node not in there else []
        file, line = source_of(returned.node)
        report.results.append(Result(file, line, report.graphs, tuple(_counted(found))))
    for i, ((file, line, parameters), nodes) in enumerate(reductions.items()):
        if i == _MOST_LINES:
            more = f"and {_count(len(reductions) - i, 'line')} more like it"
            last = report.sites[-1]
            report.sites[-1] = replace(last, reason=f"{last.reason}; {more}")
            break
        names = ", ".join(_counted(map(_function_of, nodes)))
        reason = "of parameters alone" if parameters else "no loss that is known was found in it"
        reason = f"{names}: {reason}" if len(nodes) > 1 else reason
        op = _function_of(nodes[0])
        report.sites.append(Site(op, UNRECOGNISED, reason, file, line, graph=report.graphs))


def _function_of(node: Node) -> str:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).partition(".")[0]


def _counted(names: Iterable[str]) -> list[str]:
    """Each name once, with how often it was there."""
    counts = Counter(names)
    return [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]


def _located(site: Site, function: Callable[..., Any]) -> Site:
    """A function of torch's, explained by itself, has no frame of the user's: its line counts."""
    code = getattr(function, "__code__", None)
    if site.line > 0 or code is None:
        return site
    return replace(site, file=code.co_filename, line=code.co_firstlineno)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(function, torch._dynamo.eval_frame.OptimizedModule):
        return function._orig_mod
    if isinstance(function, torch.nn.Module) and function._compiled_call_impl is not None:
        return function._call_impl
    return torch._dynamo.eval_frame.innermost_fn(function)


def shorten(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "unknown"


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]], notes: int = 60) -> list[str]:
    """Aligned columns; the last one is wrapped."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    lines = []
    for row in [header, tuple("-" * w for w in [*widths, len(header[-1])]), *rows]:
        wrapped = textwrap.wrap(row[-1], notes) or [""]
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append("  ".join([*cells, wrapped[0]]).rstrip())
        margin = " " * (sum(widths) + 2 * len(widths))
        lines += [margin + text for text in wrapped[1:]]
    return lines
