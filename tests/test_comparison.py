"""compare(): stock and ours on a user's step."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import compile_losses
from compile_losses.__main__ import main
from compile_losses.comparison import compare_call

pytestmark = pytest.mark.usefixtures("no_code")


def problem():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3), torch.randn(6, 4), torch.randint(3, (6,))


def differentiated(returned, clears):
    """A whole step of training, as users write it."""
    model, x, t = problem()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        return returned(loss)

    return model, step


@pytest.mark.parametrize("enabled", [False, True])
def test_forward(enabled):
    """The loss is differentiated; with enable() on, stock's is stock's all the same."""
    model, x, t = problem()
    weight = model.weight.detach().clone()
    before = dict(compile_losses.counters()["rewritten"])
    if enabled:
        with compile_losses.enable():
            found = compare_call(lambda x: F.cross_entropy(model(x), t), (x,), steps=2)
    else:
        found = compare_call(lambda x: F.cross_entropy(model(x), t), (x,), steps=2)
    after = compile_losses.counters()["rewritten"]
    assert after["cross_entropy"] - before.get("cross_entropy", 0) == 1
    expected = F.cross_entropy(model(x), t).item()
    assert found.stock.loss == pytest.approx(expected, rel=1e-6)
    assert found.ours.loss == pytest.approx(expected, rel=1e-6)
    assert found.gradient_difference < 1e-6
    assert [len(side.times) for side in (found.stock, found.ours)] == [2, 2]
    assert min(found.stock.peak_memory, found.ours.peak_memory) > 0
    assert [site.op for site in found.report.losses] == ["cross_entropy"]
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("returned", "clears"),
    [
        (lambda loss: loss, False),
        (lambda loss: {"loss": loss, "other": torch.zeros(3)}, True),
        (lambda loss: loss.item(), False),
        (lambda loss: None, False),
    ],
    ids=["loss", "cleared", "number", "nothing"],
)
def test_whole_step(returned, clears):
    _, step = differentiated(returned, clears)
    found = compare_call(step, steps=1)
    tells = returned(torch.tensor(1.0)) is not None
    assert (found.loss_difference is not None) == tells
    text = str(found)
    assert "peak memory" in text
    assert "cross_entropy" in text
    assert ("loss  " in text.split("\n\n")[0]) == tells


def test_weights_are_put_back():
    """So that both sides differentiate at the same place, with an optimizer in the step."""
    _, step = differentiated(lambda loss: loss, False)
    found = compare_call(step, steps=1)
    assert found.loss_difference < 1e-6
    assert found.gradient_difference < 1e-5


def test_other_numbers_are_told(monkeypatch):
    """A wrong gradient is seen."""
    from compile_losses.programs import user_step

    expected = [torch.ones(3), None]
    assert user_step.difference(expected, [torch.ones(3), None]) == 0
    assert user_step.difference(expected, [1.5 * torch.ones(3), None]) == pytest.approx(0.5)
    assert user_step.difference(expected, [torch.ones(3), torch.ones(2)]) == float("inf")
    assert user_step.difference([None], [None]) is None


SCRIPT = """
import torch
import torch.nn.functional as F

x, t = torch.randn(64, 8, requires_grad=True), torch.rand(64, 8)

def step():
    return F.mse_loss(x, t)
"""


def test_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    options = ["--options", '{"except": ["mse_loss"]}']
    assert main(["compare", "train.py:step", "--steps", "1", "--json", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"]["sites"][0]["status"] == "declined"
    assert told["stock"]["loss"] == told["ours"]["loss"]
    with pytest.raises(SystemExit, match="steps: expected at least 1, got 0"):
        main(["compare", "train.py:step", "--steps", "0"])


def test_another_length_in_each_step():
    """As for torch.compile itself sizes become symbols: no measured step compiles anew."""
    model, x, t = problem()
    x, t = x.repeat(10, 1), t.repeat(10)
    lengths = itertools.count(4)

    @torch.compiler.disable
    def batch():
        length = next(lengths)
        return x[:length], t[:length]

    def step():
        inputs, classes = batch()
        return F.cross_entropy(model(inputs), classes)

    before = counters["stats"]["unique_graphs"]
    compare_call(step, steps=4)
    assert counters["stats"]["unique_graphs"] - before <= 6
    assert next(lengths) > 20
