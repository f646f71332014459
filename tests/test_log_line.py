"""The line of log after the first compilation of a loss."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.report import log_line
from compile_losses.sites import Site


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch, no_code):
    monkeypatch.setattr(log_line, "_told", False)
    monkeypatch.setenv("COMPILE_LOSSES_LOG", "1")
    monkeypatch.delenv("RANK", raising=False)


def step(function, way="backend"):
    torch._dynamo.reset()
    x = torch.randn(4096, 64, requires_grad=True)
    if way == "backend":
        torch.compile(function, backend="compile_losses")(x).backward()
        return
    with compile_losses.enable():
        torch.compile(function)(x).backward()


def cross_entropy(x):
    return F.cross_entropy(x.tanh(), torch.zeros(len(x), dtype=torch.int64))


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "compile_losses.summary"]


@pytest.mark.parametrize("way", ["backend", "enable"])
def test_once_a_process(way, caplog):
    step(lambda x: x.exp().sum(), way)  # no loss: nothing is said yet
    assert lines(caplog) == []
    step(lambda x: F.mse_loss(x, x.detach() + 1), way)
    assert lines(caplog) == ["compile_losses: 1 loss, 1 rewritten, as stock"]
    step(cross_entropy, way)
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("variable", ["COMPILE_LOSSES_LOG=0", "RANK=1"])
def test_off(variable, caplog, monkeypatch):
    monkeypatch.setenv(*variable.split("="))
    step(cross_entropy)
    assert lines(caplog) == []


def test_off_by_the_level(caplog):
    with caplog.at_level(logging.ERROR, logger="compile_losses"):
        step(cross_entropy)
    assert lines(caplog) == []


def test_without_a_configuration_of_logging(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    step(cross_entropy)
    assert capsys.readouterr().err.count("compile_losses: 1 loss, 1 rewritten") == 1
    assert logging.getLogger("compile_losses.summary").handlers == []


@pytest.fixture
def no_counts(monkeypatch):
    monkeypatch.setattr(log_line, "dynamo_counters", defaultdict(Counter))
    compile_losses.counters().clear()


def test_the_end_of_a_program_without_a_loss(caplog, no_counts, monkeypatch):
    log_line.tell_if_none()
    assert lines(caplog)[-1].startswith("compile_losses: nothing was compiled")
    log_line.dynamo_counters["stats"]["unique_graphs"] = 2
    log_line.tell_if_none()
    assert lines(caplog)[-1].startswith("compile_losses: no loss in 2 compiled graphs")
    monkeypatch.setenv("COMPILE_LOSSES", "0")
    log_line.tell_if_none()
    assert len(lines(caplog)) == 2


@pytest.mark.parametrize("variable", [None, "COMPILE_LOSSES_LOG=0", "RANK=1"])
def test_the_end_of_a_program_with_a_loss(variable, caplog, no_counts, monkeypatch):
    if variable is None:
        step(cross_entropy)
    else:
        monkeypatch.setenv(*variable.split("="))
    caplog.clear()
    log_line.tell_if_none()
    assert lines(caplog) == []


def test_a_failed_compilation_is_not_told(caplog):
    def fails(gm, _):
        raise ValueError("no such thing")

    options = {"inner_backend": fails}
    with pytest.raises(Exception, match="no such thing"):
        torch.compile(cross_entropy, backend="compile_losses", options=options)(torch.rand(3, 4))
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("moved", "held", "text"),
    [
        (50, 10**9, "1 loss, 1 rewritten, 1 GB less"),
        (50, 2 * 10**9, "1 loss, 1 rewritten, as much memory, less traffic"),
        (100, 2 * 10**9, "1 loss, 1 rewritten, as stock"),
        (None, None, "1 loss, 1 rewritten"),  # from a cache
    ],
)
def test_words(moved, held, text):
    stock = (None, None) if moved is None else (100, 2 * 10**9)
    site = Site("mse_loss", "rewritten", "", "", 0, 0, (), (), moved, held, *stock)
    assert log_line.line([site]) == text
