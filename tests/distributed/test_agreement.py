"""Ranks tell each other what they made of a graph; one that hears nothing goes on."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from compile_losses.distributed import agreement
from compile_losses.distributed.agreement import Agreement


@pytest.fixture
def store(monkeypatch):
    """A store of this process, which is rank 0."""
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(agreement, "PATIENCE", timedelta(seconds=0.1))
    return store


def key(rank, stage="rewritten"):
    return f"compile_losses/name/{stage}/{rank}"


def test_equal_outcomes(store):
    store.set(key(1), "mse_loss rewritten")
    assert Agreement([0, 1], "name").difference("rewritten", "mse_loss rewritten") is None


def test_other_outcomes(store):
    store.set(key(1), "")
    found = Agreement([0, 1], "name").difference("rewritten", "mse_loss rewritten")
    assert found == (
        "the ranks differ in what they made of its graph: rank 0: mse_loss rewritten; "
        "rank 1: nothing"
    )


def test_a_silent_rank_is_waited_for_once(store):
    alone = Agreement([0, 1], "name")
    assert alone.difference("rewritten", "a") is None
    assert not alone.is_heard
    store.set(key(1, "compiled"), "b")
    assert alone.difference("compiled", "a") is None
