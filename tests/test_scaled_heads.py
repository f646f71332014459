"""Heads in 16 bits whose logits are scaled in float32, under torch.compile.

Torch rounds the logits and then scales them, the op scales them and then rounds them. Each logit is
rounded once, so that errors are alike, and not in each call the same.
"""

from __future__ import annotations

import pytest
import torch

import compile_losses
from tests.corpus.rows import problem
from tests.corpus.scaled import ACROSS_ROWS, BY_ROW, NEAR_MISSES, narrow_problem, temperature
from tests.graphs import Compiled
from tests.heads import (
    AGAIN,
    IN_THE_FORWARD,
    LOGITS,
    OP,
    check,
    check_accuracy,
    errors_on_similar,
    outcome,
)

pytestmark = pytest.mark.usefixtures("chunks", "kernels_for_small_losses")
no_code = pytest.mark.usefixtures("no_code")

#: Of bfloat16 logits.
TOLERANCE = 5e-2


@pytest.mark.sampled(2)
@no_code
@pytest.mark.parametrize("name", BY_ROW)
def test_in_the_forward(name):
    (site,) = check(BY_ROW[name], narrow_problem(), tolerance=TOLERANCE, verify=True)
    assert site.plan[0] == IN_THE_FORWARD
    assert "a factor of" in site.reason
    assert "not verified" not in site.notes


@no_code
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("options", "plan"), [({}, LOGITS), ({"prefer_memory": True}, AGAIN)])
@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_across_rows(name, options, plan):
    inputs = narrow_problem()
    (site,) = check(ACROSS_ROWS[name], inputs, tolerance=TOLERANCE, **options)
    assert site.plan[0] == plan


@pytest.mark.sampled(2)
@no_code
@pytest.mark.parametrize("name", {**BY_ROW, **ACROSS_ROWS})
def test_accuracy(name):
    function, inputs = {**BY_ROW, **ACROSS_ROWS}[name], narrow_problem()
    check_accuracy(function, inputs, like=errors_on_similar(function, inputs, outcome))


@pytest.mark.sampled(2)
@no_code
@pytest.mark.parametrize("name", {**BY_ROW, **ACROSS_ROWS})
def test_in_float64(name):
    """There is no cast, and the layer's input has the factor."""
    assert len(check({**BY_ROW, **ACROSS_ROWS}[name], problem())) <= 1


@no_code
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    function, reason = NEAR_MISSES[name]
    compiled, inputs = Compiled(function, inner_backend="eager"), narrow_problem()
    pair = outcome(compiled, inputs), outcome(function, inputs)
    torch.testing.assert_close(*pair, rtol=TOLERANCE, atol=TOLERANCE)
    assert not any(site.op.startswith("linear_") for site in compiled.sites)
    assert any(reason in site.reason for site in compiled.sites)


@no_code
def test_float16():
    """Scaled logits may leave its range, where torch's float32 has room."""
    inputs = [t.detach() if t.is_floating_point() else t for t in problem(torch.float16)]
    (site,) = compile_losses.explain(temperature, *inputs).losses
    assert "scaled in float32" in site.reason


@no_code
def test_a_marked_size():
    compiled = Compiled(temperature)
    for tokens in (18, 23):
        inputs = problem(torch.bfloat16, tokens=tokens)
        for tensor, dim in ((inputs[0], 1), (inputs[2], 1)):
            torch._dynamo.mark_dynamic(tensor, dim)
        pair = outcome(compiled, inputs), outcome(temperature, inputs)
        torch.testing.assert_close(*pair, rtol=TOLERANCE, atol=TOLERANCE)
    assert [site.op for site in compiled.sites] == [OP]


def test_code_of_held_logits():
    """Inductor has no lowering for some ops that an interpreter runs."""
    name = "preferences"
    (site,) = check(ACROSS_ROWS[name], narrow_problem(), tolerance=TOLERANCE)
    assert site.plan[0] == LOGITS
