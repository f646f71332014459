"""The demo: its words, its peaks, and what it says was gained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from compile_losses import demo
from compile_losses.demo import data, gains, problems
from compile_losses.demo.data import Case
from compile_losses.demo.language_models import GPT, next_token_loss
from compile_losses.demo.train import Result, Run
from compile_losses.programs.measuring import peak_memory
from compile_losses.report import Report
from compile_losses.sites import Site
from tests.constants import set_constants

MIB = 1 << 20
SITE = Site(
    "huber_loss", "rewritten", "", "model.py", 3,
    plan=("decomposed",), details=("decomposed: it is small",),
    bytes_moved=1000, bytes_held=500, stock_bytes_moved=2000, stock_bytes_held=500,
)  # fmt: skip


def result(name="model", *, speedup=1.0, saving=1.0):
    """Stock's turns take 1 to 4 seconds, ours by that factor less."""
    case = Case(name, "", torch.nn.Identity, lambda generator: (), 0.1, steps=5, warm_up=1)
    seconds = [100.0, 1.0, 2.0, 3.0, 4.0]
    stock = Run(1, [1.0], seconds, int(saving * MIB))
    return Result(case, stock, Run(1, [1.0], [time / speedup for time in seconds], MIB), 0.0)


def test_words():
    numbers = problems.words()
    assert problems.VOCABULARY == 16384
    assert numbers.min() == 0
    assert 0.9 * problems.VOCABULARY < numbers.max() < problems.VOCABULARY
    assert 50_000 < len(numbers) < 100_000
    # Words that are only in pairs of words, and pairs of which another pair took one, are not seen.
    assert len(numbers.unique()) > 0.6 * problems.VOCABULARY


def test_completions():
    sample = data.completions(torch.arange(50).repeat(20), batch=4, time=16)
    tokens, following, log_probs, advantages, mask = sample(torch.Generator().manual_seed(0))
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert log_probs.exp().sum(1).mean() == pytest.approx(16 / 50)
    assert advantages.shape == (4, 1)
    assert mask.sum(1).tolist() == [12] * 4


def test_problems():
    """All of them, and some as quick ones."""
    full, quick = problems.problems(False), problems.problems(True)
    names = [case.name for case in full]
    assert len(set(names)) == len(names) > len(quick)
    assert {case.name for case in quick} <= set(names)


def test_loss_outside_of_the_model(monkeypatch, capsys):
    """Both are graphs, between which the logits are lazy."""
    set_constants(monkeypatch, least_rows=8, logits_bytes=1)
    case = Case(
        "returned logits",
        "",
        lambda: GPT(32, 1, time=16, vocabulary=80),
        data.next_tokens(torch.arange(80), batch=4, time=16),
        learning_rate=0.1,
        steps=1,
        criterion=next_token_loss,
        options={"lazy_logits": True},
    )
    report = demo.explain(case, torch.device("cpu"))
    assert report.graphs == 2
    (site,) = report.losses
    assert site.op == "linear_cross_entropy"
    assert Path(site.file).name == "language_models.py", "its models are as a user's"
    assert demo.left(case, report) == []
    assert "returned logits" in capsys.readouterr().out


def test_peak_memory():
    """Of what is held at once, without what is there before."""
    before = torch.ones(MIB)

    def call():
        first = torch.ones(2 * MIB)
        second = first + 1
        del first
        return second + before[0]

    assert 16 * MIB <= peak_memory(call, torch.device("cpu")) < 17 * MIB


def test_speedup_is_that_of_turns():
    found = result(speedup=1.25)
    assert found.speedup == pytest.approx(1.25)
    found.stock.times[-1] *= 10  # somebody else's work
    assert found.speedup == pytest.approx(1.25)


def test_closing_line():
    results = [result("a", speedup=1.5), result("b"), result("c", speedup=2, saving=3.04)]
    expected = "Gained in this run: c: peak memory 1/3, 2.00 times as fast; a: 1.50 times as fast."
    assert gains.closing_line(results) == expected
    assert gains.closing_line([result("b", speedup=0.5)]) == "Gained in this run: nothing."


def test_says_why_there_is_no_gain():
    report = Report([SITE], graphs=1)
    time = "time (huber_loss moves 1 kB, stock's 2 kB)"
    memory = "memory (huber_loss holds 500 B, as stock's)"
    why = "decomposed: it is small"
    assert gains.without_gain(result("a"), report) == f"a: {time}, {memory}: {why}"
    assert gains.without_gain(result("a", saving=2), report) == f"a: {time}: {why}"
    assert gains.without_gain(result("a", speedup=2), report) == f"a: {memory}: {why}"
    assert gains.without_gain(result("a", speedup=2, saving=2), report) == ""


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--output", "no/such/folder/x.png"]])
def test_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        demo.main(arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_quick(tmp_path, capsys):
    assert demo.main(["--quick", "--device", "cpu", "--output", str(tmp_path / "figure.png")]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    gained = re.match("Gained in this run: GPT, 16k words: peak memory 1/([0-9.]+)", last)
    assert gained is not None
    assert float(gained[1].rstrip(".")) >= 2
