"""Writes the list of passes into the pages that show it: ``python -m tests.pass_list``."""

from __future__ import annotations

import re

from compile_losses.passes import PASSES, STAGES
from tests import ROOT

PAGES = [ROOT / "docs" / name for name in ("architecture.md", "passes.md")]
_PLACE = re.compile(r"(<!-- list of passes -->\n).*?(<!-- end of list -->\n)", re.DOTALL)
#: The graphs of each stage.
_GRAPHS = dict(
    zip(
        STAGES,
        ("Dynamo's graph", "the joint graph, or that of an inference", "forward and backward"),
        strict=True,
    )
)


def filled(text: str) -> str:
    """A page with the list as it is."""
    rows = [
        f"| `{each.name}`{' *' * each.is_needed} | {_GRAPHS[each.stage]} | {each.does} |"
        for each in PASSES
    ]
    table = "\n".join(["| pass | graph | what it does |", "| --- | --- | --- |", *rows])
    return _PLACE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
