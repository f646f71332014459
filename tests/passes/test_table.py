"""Losses that are one call: the op's arguments for torch's, and what the ops don't have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.match import Match
from compile_losses.recognize.spellings.table import TABLE, bind, recognize_call
from tests.passes.graphs import aten, dynamo, recognizer, words


def pair():
    return torch.randn(4, 6, requires_grad=True), torch.rand(4, 6)


def classes():
    return torch.randn(4, 6, requires_grad=True), torch.randint(6, (4,))


def found(function, *inputs):
    _, root = recognizer(dynamo(function, *inputs).gm)
    match = recognize_call(root)
    if not isinstance(match, Match):
        return None if match is None else match.reason
    return match.op, words(match.args), match.kwargs


WITHOUT = next(loss.without for loss in TABLE if loss.name == "binary_cross_entropy")

CALLS = {
    "mse": (lambda x, t: F.mse_loss(x, t), pair, ("mse_loss", "[l_x_, l_t_, 1]", {})),
    "by keyword": (
        lambda x, t: F.mse_loss(target=t, input=x, reduction="sum"), pair,
        ("mse_loss", "[l_x_, l_t_, 2]", {}),
    ),
    "legacy": (
        lambda x, t: F.l1_loss(x, t, size_average=False), pair, ("l1_loss", "[l_x_, l_t_, 2]", {}),
    ),
    "legacy, none": (
        lambda x, t: F.l1_loss(x, t, reduce=False), pair, ("l1_loss", "[l_x_, l_t_, 0]", {}),
    ),
    "an option": (
        lambda x, t: F.huber_loss(x, t, delta=0.5), pair,
        ("huber_loss", "[l_x_, l_t_, 1, 0.5]", {}),
    ),
    "aten": (
        lambda x, t: aten.mse_loss.default(x, t, 2), pair, ("mse_loss", "[l_x_, l_t_, 2]", {}),
    ),
    "class indices": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=2, label_smoothing=0.1), classes,
        ("cross_entropy", "[l_x_, l_t_, None, 1, 2, 0.1]", {}),
    ),
    "logarithms": (
        lambda x, t: F.kl_div(x, t, reduction="batchmean", log_target=True), pair,
        ("kl_div", "[l_x_, l_t_, 3]", {"log_target": True}),
    ),
    "no op": (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), pair, WITHOUT),
    "contradictory": (
        lambda x, t: F.kl_div(x, t, size_average=True, reduction="batchmean"), pair,
        "size_average or reduce together with reduction='batchmean': without them it has an op",
    ),
    "of a number": (
        lambda x, t: aten.mse_loss.default(x, 1.0) if x.dim() == 3 else x.sum(), pair, None,
    ),
    "dtypes": (
        lambda x, t: F.huber_loss(x, t.double()), pair,
        "input and target have different dtypes: with a cast of one before, it has an op",
    ),
    "weight": (
        lambda x, t: F.mse_loss(x, t, weight=t), pair,
        ("mse_loss", "[l_x_, l_t_, 1]", {"weight": "l_t_", "dtype": torch.float32}),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    function, inputs, expected = CALLS[name]
    told = found(function, *inputs())
    if isinstance(told, tuple) and "weight" in told[2]:
        told[2]["weight"] = words(told[2]["weight"])
    assert told == expected


def test_every_spelling_of_a_loss_has_its_row():
    """torch.nn.functional's function, ATen's ops, and torch's own function."""
    for loss in TABLE:
        functions = loss.functions
        assert getattr(F, loss.name) in functions
        assert getattr(aten, loss.aten) in functions
        assert getattr(aten, loss.aten).default in functions
        assert all("input" in signature.parameters for signature in functions.values())


def test_other_calls_are_none():
    _, root = recognizer(dynamo(lambda x, t: (x - t).sum(), *pair()).gm)
    assert bind(root) is None
    assert recognize_call(root) is None
