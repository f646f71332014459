"""The report of ``explain``: the losses that were rewritten or not, and why.

The modules beside it make a report, or tell what is in one.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from compile_losses.report.html_page import page
from compile_losses.report.no_losses import why_none
from compile_losses.sites import GAINED, UNRECOGNISED, Site, first_line, number_of, shorten

_COLUMNS = ("status", "gain", "op", "where", "plan", "bytes / stock", "notes")


@dataclass(frozen=True)
class Result:
    """A number that a graph returns, or calls ``backward`` on, and that needs a gradient.

    Attributes:
        file, line: where it is computed, as in :class:`~compile_losses.sites.Site`.
        graph: the index of its graph.
        found: the losses that it is computed from: the ops of the sites with their status.
    """

    file: str
    line: int
    graph: int
    found: tuple[str, ...]


@dataclass
class Report:
    """The losses of one function, in the order in which they run.

    Attributes:
        sites: the losses found; after the losses of each graph its unrecognised numbers, one site
            for each line.
        results: the numbers that need a gradient, with the losses found below each; only from
            ``explain``.
        graphs: the number of graphs that Dynamo made of the function.
        foreign: calls in which recognition does not look, and that may be a loss if none was found.
        graph_breaks: Dynamo's reasons for more than one graph.
        without_kernels: for each type of device that has tensors of a loss and no kernels, what
            computes there, and why there are none.
        left_alone: known heads of imported libraries of which no call is met, and why.
        errors: why the plan of a graph is unknown, or why recognition did not run.
    """

    sites: list[Site] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    graphs: int = 0
    foreign: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    without_kernels: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, as for ``json.dumps``."""
        result = asdict(self)
        for site, own in zip(result["sites"], self.sites, strict=True):
            del site["mark"]
            site["gain"] = own.gain
            site["plan"], site["details"] = list(site["plan"]), list(site["details"])
        return result

    def to_html(self) -> str:
        """A page that needs no other file: the losses with their source lines and plans."""
        return page(self)

    @property
    def losses(self) -> list[Site]:
        """The sites without the unrecognised ones."""
        return [site for site in self.sites if site.status != UNRECOGNISED]

    @property
    def summary(self) -> str:
        losses = self.losses
        header = f"{number_of(self.graphs, 'graph')}, {number_of(len(losses), 'loss', 'losses')}"
        rewritten = [site for site in losses if site.status == "rewritten"]
        header += f", {len(rewritten)} rewritten"
        if rewritten and all(site.gain for site in rewritten):
            header += f", {sum(site.gain == GAINED for site in rewritten)} {GAINED}"
        others = len(self.sites) - len(losses)
        return f"{header}, {others} {UNRECOGNISED}" if others else header

    @property
    def remarks(self) -> list[str]:
        """Further lines of the report."""
        lines = []
        if not self.losses:
            lines += why_none(self.graphs, len(self.graph_breaks), len(self.results), self.foreign)
        if len(self.results) > 1 and self.losses != self.sites:
            lines += [
                f"returned, {shorten(result.file)}:{result.line}: {', '.join(result.found)}"
                for result in self.results
            ]
        breaks = dict.fromkeys(map(first_line, self.graph_breaks))
        lines += [f"graph break: {reason}" for reason in breaks]
        lines += [f"no kernels on {each}" for each in self.without_kernels]
        lines += [f"left as it is: {head}" for head in self.left_alone]
        return lines + self.errors

    def __str__(self) -> str:
        lines = [self.summary]
        if self.sites:
            rows: list[tuple[str, ...]] = [
                (
                    site.status,
                    site.gain,
                    site.op,
                    f"{shorten(site.file)}:{site.line}",
                    ", ".join(site.plan),
                    site.traffic,
                    site.notes,
                )
                for site in self.sites
            ]
            lines += _table(_COLUMNS, rows)
        return "\n".join(lines + self.remarks)


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
