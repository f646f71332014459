"""Binary cross entropies that are written out: the target, the weights, and why some stay torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.spellings.logistic import find_logistic
from tests.passes.graphs import dynamo, recognizer, words


def found(function):
    inputs = torch.randn(4, requires_grad=True), torch.rand(4), torch.rand(4)
    found_by, root = recognizer(dynamo(function, *inputs).gm)
    return [
        (
            words(one.input.argument), words(one.target.argument), round(one.scale, 6),
            [words(weight.argument) for weight in one.weights],
            one.pos_weight and words(one.pos_weight.argument), bool(one.reason),
        )
        for one in find_logistic(found_by.replay.of(root), found_by.replay)
    ]  # fmt: skip


LOSS = [("l_x_", "l_t_", 1.0, [], None, False)]
AT_ZERO = [("l_x_", "l_t_", 1.0, [], None, True)]
BODIES = {
    "softplus": (lambda x, t, w: F.softplus(x) - x * t, LOSS),
    "of both signs": (lambda x, t, w: t * F.softplus(-x) + (1 - t) * F.softplus(x), LOSS),
    "logsigmoid": (lambda x, t, w: -t * F.logsigmoid(x) - (1 - t) * F.logsigmoid(-x), LOSS),
    "logaddexp": (lambda x, t, w: torch.logaddexp(x, torch.zeros_like(x)) - x * t, LOSS),
    "stable": (
        lambda x, t, w: torch.maximum(x, torch.zeros_like(x)) - x * t
        + torch.log1p(torch.exp(-x.abs())), LOSS,
    ),
    "clamped": (lambda x, t, w: x.clamp(min=0) - x * t + (1 + (-x.abs()).exp()).log(), AT_ZERO),
    "relu": (lambda x, t, w: x.relu() - x * t + (1 + (-x.abs()).exp()).log(), AT_ZERO),
    "a clamp that cancels": (
        lambda x, t, w: x.clamp(min=0) - torch.where(x >= 0, x, 0.0) + F.softplus(x) - x * t, LOSS,
    ),
    "a relu that cancels": (
        lambda x, t, w: x.relu() - torch.where(x > 0, x, 0.0) + F.softplus(x) - x * t, LOSS,
    ),
    "what differs at 0": (
        lambda x, t, w: x.relu() - torch.where(x >= 0, x, 0.0) + F.softplus(x) - x * t, AT_ZERO,
    ),
    "twice": (lambda x, t, w: 2 * (F.softplus(x) - x * t), [("l_x_", "l_t_", 2.0, [], None, False)]),
    "weighted": (
        lambda x, t, w: w * (F.softplus(x) - x * t),
        [("l_x_", "l_t_", 1.0, ["l_w_"], None, False)],
    ),
    "positive weight": (
        lambda x, t, w: w * t * F.softplus(-x) + (1 - t) * F.softplus(x),
        [("l_x_", "l_t_", 1.0, [], "l_w_", False)],
    ),
    "a sigmoid's logarithm": (lambda x, t, w: -t * x.sigmoid().log(), []),
    "that overflows": (lambda x, t, w: (1 + x.exp()).log() - x * t, []),
    "without its logit": (lambda x, t, w: F.softplus(x) - t, []),
    "another slope": (lambda x, t, w: F.softplus(x, beta=2) - x * t, []),
    "of labels times logits": (lambda x, t, w: -F.logsigmoid(t * x), []),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name):
    function, expected = BODIES[name]
    assert found(function) == expected


def test_torchs_softplus_is_a_line_above_its_threshold():
    (one,) = found(lambda x, t, w: F.softplus(x, threshold=5) - x * t)
    assert one[-1]
