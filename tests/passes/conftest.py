"""Tests of passes: a graph in, decisions and a graph out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.corpus.capture import small_as_large


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    """Small tensors are worth what large ones are, while a pass runs and what it made is run."""
    with small_as_large():
        yield
