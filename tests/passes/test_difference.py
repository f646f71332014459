"""Which losses of a difference a body may be, with which scale and parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.spellings.difference import find_difference
from tests.passes.graphs import dynamo, recognizer


def found(function):
    found_by, root = recognizer(dynamo(function, torch.randn(4), torch.randn(4)).gm)
    return [
        (one.family.op, round(one.parameter, 6), round(one.scale, 6), str(one.input.node))
        for one in find_difference(found_by.replay.of(root), found_by.replay)
    ]


BODIES = {
    "square": (lambda x, t: (x - t) ** 2, [("mse_loss", 0.0, 1.0, "l_x_")]),
    "scaled": (lambda x, t: 0.5 * (t - x).square(), [("mse_loss", 0.0, 0.5, "l_t_")]),
    "negative": (lambda x, t: -(x - t).abs(), [("l1_loss", 0.0, -1.0, "l_x_")]),
    "huber": (
        lambda x, t: torch.where((d := (x - t).abs()) <= 0.5, 0.5 * d**2, 0.5 * (d - 0.25)),
        [("smooth_l1_loss", 0.5, 0.5, "l_x_"), ("huber_loss", 0.5, 1.0, "l_x_")],
    ),
    "a call": (
        lambda x, t: F.huber_loss(x, t, reduction="none", delta=2.0),
        [("smooth_l1_loss", 2.0, 2.0, "l_x_"), ("huber_loss", 2.0, 1.0, "l_x_")],
    ),
    "pieces that do not meet": (
        lambda x, t: torch.where((d := (x - t).abs()) <= 0.5, 0.5 * d**2, 0.5 * (d - 0.2)), [],
    ),
    "clamped far away": (lambda x, t: ((x - t) ** 2).clamp(max=1e8), []),
    "another gradient": (lambda x, t: (x - t).abs().detach() * (x - t).abs(), []),
    "cube": (lambda x, t: (x - t) ** 3, []),
    "two differences": (lambda x, t: (x - t) * (x - 1), []),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_families(name):
    function, expected = BODIES[name]
    assert found(function) == expected
