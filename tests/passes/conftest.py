"""Tests of passes: a graph in, decisions and a graph out."""

from __future__ import annotations

import pytest

from tests.corpus.capture import take_small_as_large


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are worth what large ones are, while a pass runs and what it made is run.

    By the test's own patch: two that are undone in another order would leave constants behind.
    """
    take_small_as_large(monkeypatch)
