"""What statistics of logits that are held cost."""

from __future__ import annotations

import torch

from compile_losses.lower.statistics import plan_statistics
from tests.passes.graphs import fused, indexed, of_aten


def decisions_on(gm):
    graph = indexed(gm)
    plan_statistics(graph)
    return graph.decisions


def test_costs_of_statistics():
    def joint(y, t, tangents_1):
        *values, stats, _ = fused.row_statistics_forward(y, t, -100, None)
        g = tangents_1.expand(4)
        return values[2], fused.row_statistics_backward(
            None, None, g, None, y, t, stats, -100, None
        )

    gm = of_aten(joint, torch.randn(4, 5), torch.randint(5, (4,)), torch.tensor(1.0))
    (decision,) = decisions_on(gm)
    assert (decision.cost.moved, decision.stock.moved) == (3 * 80, 5 * 80)
    assert decision.cost.held == decision.stock.held == 80
    gm = of_aten(
        lambda y, t: fused.row_statistics_forward(y, t, -100, None)[2],
        torch.randn(4, 5),
        torch.randint(5, (4,)),
    )
    (decision,) = decisions_on(gm)
    assert (decision.cost.moved, decision.stock.moved, decision.cost.held) == (80, 160, 0)
