"""Heads whose numbers of rows are symbols: the sites and plans are those of fixed sizes.

Completions of another length in each step make them symbols from the second length on.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from tests import (
    test_row_gradients,
    test_shared_classes,
    test_shared_distillation,
    test_shared_logits,
    test_shared_numbers,
    test_shared_picks,
    test_shared_ranks,
)
from tests.corpus.rows import problem
from tests.graphs import Compiled
from tests.heads import IN_THE_FORWARD, LOGITS

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


def distillation(tokens):
    return test_shared_distillation.problem(rows=(4, tokens))


def programs():
    """Each with its inputs of so many tokens, and with what its first plan is for fixed sizes."""
    groups = (
        (test_row_gradients.BY_ROW, problem, IN_THE_FORWARD),
        (test_row_gradients.ACROSS_ROWS, problem, LOGITS),
        (test_shared_logits.BY_ROW, problem, IN_THE_FORWARD),
        (test_shared_numbers.BY_ROW, problem, IN_THE_FORWARD),
        (test_shared_ranks.BY_ROW, problem, IN_THE_FORWARD),
        (test_shared_classes.BY_ROW, problem, IN_THE_FORWARD),
        (test_shared_classes.PREFERENCES, problem, LOGITS),
        (test_shared_picks.BY_ROW, test_shared_picks.sparse_problem, IN_THE_FORWARD),
        (test_shared_distillation.FORMS, distillation, IN_THE_FORWARD),
    )
    for functions, inputs, plan in groups:
        for name, function in functions.items():
            yield pytest.param(function, inputs, plan, id=f"{function.__module__[11:]}-{name}")


def outcome(function, inputs):
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [t for t in inputs if t.requires_grad]
    weights = torch.linspace(0.5, 1, results[0].numel(), dtype=results[0].dtype)
    total = (results[0] * weights.view(results[0].shape)).sum()
    return [*(r.detach() for r in results), *torch.autograd.grad(total, leaves, allow_unused=True)]


def assert_equal_plans(function, inputs, plan, lengths, *, mark):
    compiled = Compiled(function)
    for tokens in lengths:
        given = inputs(tokens=tokens)
        for tensor in given if mark else ():
            for dim, size in enumerate(tensor.shape):
                if size == tokens:
                    torch._dynamo.mark_dynamic(tensor, dim)
        expected = outcome(function, given)
        try:
            found = outcome(compiled, given)
        except ConstraintViolationError:  # some functions fix their sizes in torch's own tracing
            with pytest.raises(ConstraintViolationError):
                outcome(torch.compile(function, backend="eager"), given)
            return
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    heads = [site for site in compiled.sites if site.op.startswith("linear_")]
    assert heads
    for site in heads:
        assert site.status == "rewritten", site.reason
        assert site.plan[0] == plan, site.details


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("function", "inputs", "plan"), list(programs()))
def test_a_marked_size(function, inputs, plan):
    assert_equal_plans(function, inputs, plan, (18, 23), mark=True)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "inputs", "plan"), list(programs()))
def test_another_length_in_each_step(function, inputs, plan):
    assert_equal_plans(function, inputs, plan, (18, 23, 20, 31, 19), mark=False)


def test_grpo_with_another_length_in_each_step():
    """Log-probabilities and entropies in chunks of rows, as TRL has both."""
    function = test_shared_logits.grpo_with_logged_entropy
    assert_equal_plans(function, problem, IN_THE_FORWARD, (18, 23, 20, 31, 19), mark=False)


def test_a_size_that_is_read_of_a_late_tensor():
    """The gradient of a slice of the losses is expanded to a size of the slice."""

    def step(h, w, labels, *_):
        each = F.cross_entropy(F.linear(h, w).flatten(0, 1), labels.flatten(), reduction="none")
        some = each.view(labels.shape)[:, 2:]
        return some.sum() / (some.shape[0] * some.shape[1] + some.numel())

    assert_equal_plans(step, problem, IN_THE_FORWARD, (18, 23), mark=True)
