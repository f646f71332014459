"""docs/conformance.md has a row for every option and a column for every mode, and no other."""

from __future__ import annotations

import json
import re

from tests.conformance import table
from tests.conformance.compare import LOSSES
from tests.conformance.ledger import MODES, OPTIONS


def structure(page: str) -> list[str]:
    """The page without its numbers."""
    return [re.sub(r"\| (\d[\d,]*|-) (?=\|)", "| # ", line) for line in page.splitlines()]


def test_page_is_not_stale():
    assert structure(table.PAGE.read_text()) == structure(table.page()), "run `make conformance`"


def test_every_loss_has_rows():
    assert set(OPTIONS) == set(LOSSES)


def test_every_option_was_compared():
    counts = json.loads((table.FOLDER / "cpu.json").read_text())["counts"]
    for loss, options in OPTIONS.items():
        for option in options:
            compared = counts[loss].get(option, {})
            assert compared.get("gradients") or compared.get("errors"), f"{loss}, {option}"
        for mode in MODES:
            assert counts[loss]["all"].get(mode), f"{loss} was not compared under {mode}"
