"""What a loss takes into its op of what comes before it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.match import Match
from compile_losses.recognize.spellings.absorb import absorb
from tests.passes.graphs import dynamo, one, words


def narrow():
    return torch.rand(4, 5, dtype=torch.bfloat16).requires_grad_(), torch.rand(4, 5)


def absorbed(function, name, *inputs):
    """The arguments of a loss that is one call, after absorption, and what it took."""
    gm = dynamo(function, *inputs).gm
    node = one(gm.graph, name)
    match = Match(node, name, (*node.args[:2], 1))
    absorb(match)
    return [words(a) for a in match.args], match.kwargs, match.absorbed, match.interior


CAST = ["a cast from bfloat16"]
CASTS = {
    "float": (lambda x, t: F.mse_loss(x.float(), t), CAST),
    "to": (lambda x, t: F.mse_loss(x.to(torch.float32), t), CAST),
    "type": (lambda x, t: F.mse_loss(x.type(torch.float32), t), CAST),
    "of the target": (lambda x, t: F.mse_loss(t, x.float()), CAST),
    "wider": (lambda x, t: F.mse_loss(x.double(), t.double()), []),
    "read again": (lambda x, t: F.mse_loss(y := x.float(), t) + y.sum(), []),
    "moved, too": (lambda x, t: F.mse_loss(x.to("cpu", torch.float32), t), []),
    "cut off": (lambda x, t: F.mse_loss(x.detach().float(), t), CAST),
    "changed in between": (lambda x, t: F.mse_loss(x.float().mul_(2), t), []),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts(name):
    function, expected = CASTS[name]
    _, kwargs, found, _ = absorbed(function, "mse_loss", *narrow())
    assert found == expected
    assert kwargs == ({"dtype": torch.float32} if expected else {})


def test_the_cast_becomes_superfluous():
    args, _, _, interior = absorbed(lambda x, t: F.mse_loss(x.float(), t), "mse_loss", *narrow())
    assert args == ["l_x_", "l_t_", "1"]
    assert [node.name for node in interior] == ["float_1"]


LOGARITHMS = {
    "method": (lambda x, t: F.kl_div(x.log(), t), ["the logarithm"]),
    "function": (lambda x, t: F.kl_div(torch.log(x), t), ["the logarithm"]),
    "read again": (lambda x, t: F.kl_div(y := x.log(), t) + y.sum(), []),
    "another function": (lambda x, t: F.kl_div(x.log2(), t), []),
    "of the target": (lambda x, t: F.kl_div(x, t.log()), []),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms(name):
    function, expected = LOGARITHMS[name]
    inputs = torch.rand(4, 5, requires_grad=True), torch.rand(4, 5)
    _, kwargs, found, _ = absorbed(function, "kl_div", *inputs)
    assert found == expected
    assert kwargs == ({"log_input": False} if expected else {})
