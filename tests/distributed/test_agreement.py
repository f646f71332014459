"""Ranks tell each other what they made of a graph; one that hears nothing goes on."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from compile_losses.backend import _as_others
from compile_losses.distributed import agreement
from compile_losses.distributed.agreement import Agreement, Past
from compile_losses.guard import Failure


@pytest.fixture
def store(monkeypatch):
    """A store of this process, which is rank 0."""
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(agreement, "PATIENCE", timedelta(seconds=0.1))
    return store


def key(rank, stage="rewritten", turn=0):
    return f"compile_losses/name.{turn}/{stage}/{rank}"


def agreement_of(past=None):
    return Agreement([0, 1], "name", past or Past())


def test_equal_outcomes(store):
    store.set(key(1), "mse_loss rewritten")
    assert agreement_of().difference("rewritten", "mse_loss rewritten") is None


def test_other_outcomes(store):
    store.set(key(1), "")
    found = agreement_of().difference("rewritten", "mse_loss rewritten")
    assert found == (
        "the ranks differ in what they made of its graph: rank 0: mse_loss rewritten; "
        "rank 1: nothing"
    )


def test_a_silent_rank_is_waited_for_once(store):
    alone = agreement_of()
    assert alone.difference("rewritten", "a") is None
    assert alone.conflict("rewritten", "a") is None
    store.set(key(1, "compiled"), "b")
    assert alone.difference("compiled", "a") is None


def test_one_that_compiled_alone_is_heard_the_next_time(store):
    past = Past()
    agreement_of(past).difference("rewritten", "a")
    assert not store.check([key(0)])  # or the others would take it for what is made the next time
    store.set(key(1), "b")
    assert "rank 0: c; rank 1: b" in agreement_of(past).difference("rewritten", "c")
    store.set(key(1, turn=1), "c")
    assert agreement_of(past).difference("rewritten", "c") is None
    assert past.left is None


@pytest.mark.parametrize("failing", ["rewritten", "compiled"])
def test_one_that_compiles_alone_does_as_before(store, failing):
    past = Past()
    together = agreement_of(past)
    for stage in ("rewritten", "compiled"):
        store.set(key(1, stage), "mse_loss rewritten")
        assert together.difference(stage, "mse_loss rewritten") is None
        assert together.conflict(stage, "mse_loss rewritten") is None
    alone = agreement_of(past)
    for stage in ("rewritten", "compiled"):
        fails = stage == failing
        outcome = "internal error" if fails else "mse_loss rewritten"
        assert alone.difference(stage, outcome, fails=fails) is None
        conflict = alone.conflict(stage, outcome)
        told = "made of it: internal error; the others still run: mse_loss rewritten"
        assert told in conflict if fails else conflict is None


@pytest.mark.parametrize("other", ["", "internal error"])
def test_one_that_compiles_alone_leaves_what_all_left(store, other):
    past = Past()
    store.set(key(1), "internal error")
    together = agreement_of(past)
    difference = together.difference("rewritten", other, fails=other != "")
    alone = agreement_of(past)
    reason = alone.difference("rewritten", "mse_loss rewritten")
    assert reason == (difference or "internal error")
    assert alone.conflict("rewritten", "mse_loss rewritten") is None


def test_another_outcome_than_before_is_an_error(store):
    """The others would wait for collectives that this rank does not call."""
    past = Past()
    store.set(key(1), "mse_loss rewritten")
    agreement_of(past).difference("rewritten", "mse_loss rewritten")
    with pytest.raises(RuntimeError, match=r"rank 0 .* alone .*: planted; the others still run"):
        _as_others("rewritten", agreement_of(past), Failure("planted"), SimpleNamespace(meta={}))
