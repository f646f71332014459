"""Bodies of one difference, evaluated: their values, and where their pieces meet."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.spellings.piecewise import Evaluation, NotPiecewiseError, subtraction
from tests.passes.graphs import dynamo, recognizer

POINTS = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64)


def evaluated(function):
    found = dynamo(lambda x, t: (x - t, function(x - t)), torch.randn(5), torch.randn(5)).gm
    found_by, difference = recognizer(found)
    pair = subtraction(found_by.replay.of(difference), found_by.replay)
    (output,) = found.graph.find_nodes(op="output")
    evaluation = Evaluation(pair, found_by.replay, POINTS)
    values, _ = evaluation.of(found_by.replay.of(output.args[0][1]))
    return values, {round(point, 6) for point in evaluation.breakpoints}


BODIES = {
    "square": (lambda d: d * d, {0.0}),
    "absolute": (lambda d: d.abs() + 1, {0.0}),
    "bounded": (lambda d: d.clamp(-1, 2), {0.0, 1.0, -1.0, 2.0, -2.0}),
    "relu": (lambda d: torch.relu(d - 1), {0.0, 1.0, -1.0}),
    "compared": (lambda d: torch.where(2 * d.abs() < 3, d, 0 * d), {0.0, 1.5, -1.5}),
    "the smaller": (lambda d: torch.minimum(d.abs(), d * d.new_full((), 0.5) + 1), None),
    "mask": (lambda d: (d > 0.25).float() * d, {0.0, 0.25, -0.25}),
    "negative": (lambda d: -d / 4, {0.0}),
    "a root": (lambda d: d.abs().sqrt(), None),
    "a comparison of squares": (lambda d: torch.where(d * d < 4, d, 0 * d), None),
    "a cube": (lambda d: d.pow(2.5), None),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name):
    function, expected = BODIES[name]
    if expected is None:
        with pytest.raises(NotPiecewiseError):
            evaluated(function)
        return
    values, breakpoints = evaluated(function)
    assert breakpoints == expected
    torch.testing.assert_close(values, function(POINTS), check_dtype=False)


SUBTRACTIONS = {
    "operator": (lambda x, t: x - t, ["l_x_", "l_t_"]),
    "turned round": (lambda x, t: torch.rsub(x, t), ["l_t_", "l_x_"]),
    "of a negative": (lambda x, t: x + (-t), ["l_x_", "l_t_"]),
    "times minus one": (lambda x, t: x + t * -1, ["l_x_", "l_t_"]),
    "sum": (lambda x, t: x + t, None),
    "with a factor": (lambda x, t: torch.sub(x, t, alpha=2), None),
    "of a number": (lambda x, t: x - 1, None),
}


@pytest.mark.parametrize("name", SUBTRACTIONS)
def test_subtractions(name):
    function, expected = SUBTRACTIONS[name]
    found_by, root = recognizer(dynamo(function, torch.randn(5), torch.randn(5)).gm)
    pair = subtraction(found_by.replay.of(root), found_by.replay)
    assert (None if pair is None else [str(value.node) for value in pair]) == expected
