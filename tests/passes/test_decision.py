"""What a pass decided, in words."""

from __future__ import annotations

import pytest

from compile_losses.lower.cost import Cost
from compile_losses.lower.decision import Decision

COST, STOCK = Cost(1_000_000, 2_000), Cost(3_000_000, 4_000)
WORDS = {
    "choice": (Decision(1, "mse_loss", "kernel"), "mse_loss: kernel"),
    "reason": (Decision(1, "l1_loss", "kernel", "of inputs"), "l1_loss: kernel (of inputs)"),
    "cost": (
        Decision(None, "kl_div", "decomposed", "small", COST, STOCK),
        f"kl_div: decomposed (small); {COST}, torch's own ops {STOCK}",
    ),
    "one cost": (Decision(None, "kl_div", "kernel", cost=COST), "kl_div: kernel"),
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name):
    decision, expected = WORDS[name]
    assert str(decision) == expected
