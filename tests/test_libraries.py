"""The table of what is taken of other libraries' code."""

from __future__ import annotations

import pytest

from benchmarks import libraries, pages
from compile_losses.sites import Site


def site(op, status="rewritten", reason=""):
    return Site(op, status, reason, "step.py", 1)


def test_the_worst_loss_counts():
    head, alone = site("linear_cross_entropy", reason="absorbed a linear layer"), site("mse_loss")
    left = site("binary_cross_entropy", "declined", "it has no op")
    assert libraries.outcome_of([]) == (libraries.UNSEEN, "")
    assert libraries.outcome_of([head]) == (libraries.WITH_HEAD, "")
    assert libraries.outcome_of([head, alone]) == (libraries.ALONE, "")
    assert libraries.outcome_of([alone, left, head]) == (libraries.LEFT, "it has no op")


@pytest.mark.skipif(not pages.RESULTS.exists(), reason="benchmarks/results is in a checkout alone")
def test_the_table_has_every_program():
    rows = pages.rows_of(libraries.OUTPUT.name)
    assert [(r["kind"], r["program"]) for r in rows] == [
        (p.kind, str(p)) for p in libraries.PROGRAMS
    ]
    assert "/" not in pages.libraries()
