"""The report of ``explain`` as an HTML page."""

from __future__ import annotations

import linecache
from html import escape
from typing import TYPE_CHECKING

import torch

from compile_losses.sites import Site, megabytes, shorten

if TYPE_CHECKING:
    from compile_losses.report import Report

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #222; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem;
  border-bottom: 1px solid #ddd; }
td.number { white-space: nowrap; text-align: right; }
code { font: 13px/1.5 ui-monospace, monospace; }
.rewritten { color: #17643a; } .declined { color: #8a4b08; }
.unrecognised { color: #8a1c1c; }
small { color: #666; display: block; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } th, td { border-color: #444; } small { color: #999; }
  .rewritten { color: #7fd1a3; } .declined { color: #e0a35c; } .unrecognised { color: #e58a8a; }
}
"""
_COLUMNS = ("loss", "source", "plan", "bytes moved", "torch's own ops", "notes")


def page(report: Report) -> str:
    """All text of the user's program is escaped; the page refers to no other file."""
    rows = "\n".join(map(_row, report.sites))
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    table = f"<table>\n<tr>{head}</tr>\n{rows}\n</table>" if report.sites else ""
    remarks = "\n".join(f"<p>{escape(remark)}</p>" for remark in report.remarks)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Losses: {escape(report.summary)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(report.summary)}</h1>
{table}
{remarks}
<small>compile_losses.explain, torch {escape(torch.__version__)}. Bytes are estimates from shapes:
moved by the loss's forward and backward, and held for it at a time.</small>
</body>
</html>
"""


def _row(site: Site) -> str:
    source = linecache.getline(site.file, site.line).strip()
    where = f"{shorten(site.file)}:{site.line}"
    cells = [
        f'<td><code>{escape(site.op)}</code><small class="{escape(site.status)}">'
        f"{escape(', '.join(filter(None, (site.status, site.gain))))}</small></td>",
        f"<td><code>{escape(source)}</code><small>{escape(where)}, graph {site.graph}</small></td>",
        f"<td>{escape(', '.join(site.plan))}</td>",
        _bytes(site.bytes_moved, site.bytes_held),
        _bytes(site.stock_bytes_moved, site.stock_bytes_held),
        f"<td>{'<br>'.join(escape(note) for note in (site.reason, *site.details) if note)}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _bytes(moved: int | None, held: int | None) -> str:
    if moved is None or held is None:
        return "<td></td>"
    return f'<td class="number">{megabytes(moved)}<small>{megabytes(held)} held</small></td>'
