"""What was rewritten, what was not, and why: the answer that ``explain`` gives."""

from __future__ import annotations

import os
import re
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        os.path.dirname(torch.__file__),
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        sysconfig.get_paths()["stdlib"],
    }
)


@dataclass(frozen=True)
class Site:
    """One loss in a user's program.

    Attributes:
        op: the fused op, or the torch function that was left alone.
        status: ``"rewritten"`` or ``"declined"``.
        reason: why it was declined, or what was absorbed into the op; may be empty.
        file, line: the innermost frame of the user's own code, outside installed libraries.
        graph: the index of the graph it lies in, counted from 0.
    """

    op: str
    status: str
    reason: str
    file: str
    line: int
    graph: int = 0


@dataclass
class Report:
    """The losses of one function, in the order in which they run.

    Attributes:
        sites: the losses found.
        graphs: how many graphs Dynamo made of the function.
        graph_breaks: Dynamo's reasons for making more than one.
    """

    sites: list[Site] = field(default_factory=list)
    graphs: int = 0
    graph_breaks: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        header = f"{_count(self.graphs, 'graph')}, {_count(len(self.sites), 'loss', 'losses')}"
        rewritten = sum(site.status == "rewritten" for site in self.sites)
        lines = [f"{header}, {rewritten} rewritten"]
        if self.sites:
            rows: list[tuple[str, ...]] = [
                (site.status, site.op, f"{_shorten(site.file)}:{site.line}", site.reason)
                for site in self.sites
            ]
            lines += _table(("status", "op", "where", "notes"), rows)
        elif self.graphs == 0:
            lines.append("Dynamo compiled nothing: is the function disabled or skipped?")
        lines += [f"graph break: {_first_line(reason)}" for reason in self.graph_breaks]
        return "\n".join(lines)


def source_of(node: Node) -> tuple[str, int]:
    """The file and line of the user's code that made a node, as Dynamo recorded it."""
    frames = [
        (match["file"], int(match["line"]))
        for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
    ]
    if not frames:
        return "<unknown>", 0
    own = [frame for frame in frames if not os.path.realpath(frame[0]).startswith(_LIBRARIES)]
    return (own or frames)[-1]


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Runs ``function(*args, **kwargs)`` once under Dynamo and reports on every loss in it.

    Nothing that was compiled before is used or thrown away, so the answer is the same whatever is
    cached. The function really runs, once and with its side effects, its rewritten graphs
    without a compiler.

    Args:
        function: any callable or module, compiled or not.

    Returns:
        A :class:`Report`; print it, or read ``.sites``.
    """
    from torch._dynamo.utils import counters

    from compile_losses.recognize import rewrite

    report = Report()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        rewrite(gm)
        found: Report = gm.meta["compile_losses"]
        report.sites += [replace(site, graph=report.graphs) for site in found.sites]
        report.graphs += 1
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


def _shorten(file: str) -> str:
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
