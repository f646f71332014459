"""Binary cross entropy written out, at the logits at which its spellings may differ."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import compile_losses
from tests.accuracy import assert_accurate
from tests.results import compile_with, run
from tests.specs.written.binary_cross_entropy_with_logits import MATCHES, NEAR_MISSES

LOGITS = (0.0, -0.0, 1.0, -1.0, 19.9, 20.1, 30.0, 100.0, -30.0, -100.0, 1e30, -1e30)
#: Spellings of a logit and a label.
PLAIN = [s for s in MATCHES if s.function.__code__.co_argcount <= 3 and len(s.inputs()) == 2]
PLAIN = [s for s in PLAIN if s.inputs()[1].dim() == 2]


def elements(spelling):
    """A compiled spelling, and eager's, of one logit and one label of the spelling's dtypes."""
    x, t = spelling.inputs()
    compiled = compile_with(spelling.function, "eager", False)

    def both(logit, label):
        inputs = (
            torch.tensor([[logit]], dtype=x.dtype, requires_grad=True),
            torch.tensor([[label]]).to(t.dtype),
        )
        return run(compiled, inputs), run(spelling.function, inputs)

    return both, x.dtype, t.dtype


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spelling", PLAIN, ids=lambda spelling: spelling.name)
def test_logits(spelling):
    """Value and gradient are eager's where a logit is 0, and where it is large."""
    both, logit_dtype, label_dtype = elements(spelling)
    narrow = torch.bfloat16 in (logit_dtype, label_dtype)
    for logit, label in itertools.product(LOGITS, (0.0, 1.0, 0.25)):
        if abs(logit) > 1e20 and label_dtype != torch.float32:
            continue
        ours, eager = both(logit, label)
        torch.testing.assert_close(
            ours,
            eager,
            rtol=1e-2 if narrow else 1e-6,
            atol=1e-2 if narrow else 1e-5,  # differences of logits and their products cancel
            msg=lambda text, at=(logit, label): f"logit and label {at}: {text}",
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spelling", PLAIN, ids=lambda spelling: spelling.name)
def test_infinite_logits(spelling):
    """No spelling has a finite loss then, nor has the op; gradients are eager's."""
    both, _, _ = elements(spelling)
    for logit, label in itertools.product((math.inf, -math.inf), (0.0, 1.0, 0.25)):
        (value, gradients), (expected, wanted) = both(logit, label)
        assert not expected.isfinite()
        assert not value.isfinite()
        for ours, eager in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours[~eager.isnan()], eager[~eager.isnan()])


@pytest.mark.parametrize("name", ["clamp", "relu", "clamp_min"])
def test_gradient_of_a_bound(name):
    """Why these stay: where a logit is 0, as of a head of zeros, their gradient is another."""
    (spelling,) = (s for s in NEAR_MISSES if s.name == name)
    x, t = torch.zeros(6, 10, requires_grad=True), torch.rand(6, 10).round()
    _, (gradient,) = run(spelling.function, (x, t))
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    _, (right,) = run(loss, (x, t))
    assert not torch.allclose(gradient, right)
    actual = run(compile_with(spelling.function, "aot_eager", False), (x, t))
    torch.testing.assert_close(actual, run(spelling.function, (x, t)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["logsigmoid", "softplus", "stable", "masked mean"])
def test_accuracy(name, dtype):
    (spelling,) = (s for s in MATCHES if s.name == name)
    torch.manual_seed(0)
    x, *rest = spelling.inputs()
    x = (x.detach() * 5).to(dtype).requires_grad_()
    inputs = x, *(t.to(dtype) for t in rest)
    report = compile_losses.explain(spelling.function, *inputs)
    assert [site.status for site in report.sites] == ["rewritten"]
    actual = run(compile_with(spelling.function, "aot_eager", False), inputs)
    eager = run(spelling.function, inputs)
    exact_inputs = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in inputs)
    exact = run(spelling.function, exact_inputs)
    assert_accurate(actual[0], eager[0], exact[0], "loss")
    assert_accurate(actual[1][0], eager[1][0], exact[1][0], "gradient")
