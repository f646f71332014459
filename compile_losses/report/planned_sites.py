"""The sites of a report with what the passes on AOTAutograd's graphs decided about their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compile_losses.lower.decision import WITHOUT_OP, Decision
from compile_losses.lower.regions import BY_CHUNKS
from compile_losses.recognize.heads.with_head import HELD
from compile_losses.sites import Site, line_in


def planned(sites: Sequence[Site], decisions: Sequence[Decision]) -> list[Site]:
    """The sites of a graph with the decisions of the passes about its losses."""
    return _with_others([_planned(site, decisions) for site in sites], decisions)


def _planned(site: Site, decisions: Sequence[Decision]) -> Site:
    """A site with the decisions about it, which have its mark."""
    own = [d for d in decisions if site.mark is not None and d.site == site.mark]
    if site.status != "rewritten" or not own:
        return site
    compared = [d for d in own if d.cost is not None and d.stock is not None]
    # An op that was decomposed and then moved has two decisions; the last one counts.
    compared = [d for d in compared if d.loss == "elementwise"] or compared
    if len(compared) == 1:
        site = replace(site, **_costs(compared[0]))
    details = [f"{d.choice}: {d.reason}" for d in own if d.reason]
    site = replace(site, plan=tuple(d.choice for d in own), details=tuple(details))
    # What was not taken together with its linear layer may be taken after autograd.
    is_region = any(d.choice.startswith(BY_CHUNKS) for d in own)
    return replace(site, reason="") if is_region and HELD in site.reason else site


def _costs(decision: Decision) -> dict[str, Any]:
    """The fields of a site for what a decision has compared."""
    cost, stock = decision.cost, decision.stock
    assert cost is not None
    assert stock is not None
    ours = {"bytes_moved": cost.moved, "bytes_held": cost.held}
    return {**ours, "stock_bytes_moved": stock.moved, "stock_bytes_held": stock.held}


def _with_others(sites: Sequence[Site], decisions: Sequence[Decision]) -> list[Site]:
    """Sites, and sites of losses without an op. Such a loss takes the site that was declined in its
    line, or gets a site of its own."""
    result = list(sites)
    for decision in (d for d in decisions if d.loss in WITHOUT_OP):
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
                result.append(Site(decision.loss, "declined", decision.reason, file, line))
            for index in declined:
                result[index] = replace(
                    result[index], details=(f"{decision.choice}: {decision.reason}",)
                )
            continue
        if there and not declined and decision.site is not None:
            continue  # a decomposed op; this is one more step of its plan
        if not declined:
            result.append(Site(decision.loss, "rewritten", "", file, line))
        index = declined[0] if declined else -1
        result[index] = replace(
            result[index],
            status="rewritten",
            reason="",
            plan=(f"{decision.loss}, {decision.choice}",),
            details=(decision.reason,) if decision.reason else (),
            **_costs(decision),
        )
    return result
