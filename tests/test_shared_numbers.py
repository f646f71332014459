"""Readers of a head's logits that are expressions in each row's numbers, under torch.compile."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.numbers import BY_ROW, NEAR_MISSES
from tests.corpus.rows import problem
from tests.heads import IN_THE_FORWARD, check, check_accuracy

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_in_the_forward(name):
    (site,) = check(BY_ROW[name], problem(), verify=True)
    assert site.plan[0] == IN_THE_FORWARD
    assert site.reason.startswith("absorbed a linear layer")
    assert "not verified" not in site.notes


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BY_ROW)
def test_accuracy(name, dtype):
    check_accuracy(BY_ROW[name], problem(dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    assert check(function, problem()) == []
