"""The label smoothing of transformers' Trainer, over a head whose logits nothing else reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.rows import problem
from tests.graphs import Compiled
from tests.heads import IN_THE_FORWARD, OP, check, check_accuracy, outcome

trainer_pt_utils = pytest.importorskip(
    "transformers.trainer_pt_utils", reason="pip install .[models]"
)

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


def smoothed(shift_labels):
    def step(h, w, labels, *_):
        output = {"logits": F.linear(h, w)}
        return trainer_pt_utils.LabelSmoother(epsilon=0.1)(
            output, labels, shift_labels=shift_labels
        )

    return step


@pytest.mark.parametrize("shift_labels", [False, True], ids=["as they are", "shifted"])
def test_label_smoother(shift_labels):
    """It sums in float32, also log-probabilities in float64."""
    (site,) = check(smoothed(shift_labels), problem(torch.float32), tolerance=2e-5)
    assert site.plan[0] == IN_THE_FORWARD


def test_lengths_that_change():
    """From the second one on it is a symbol."""
    compiled = Compiled(smoothed(True))
    for tokens in (9, 12, 7):
        inputs = problem(torch.float32, tokens=tokens)
        torch.testing.assert_close(
            outcome(compiled, inputs), outcome(smoothed(True), inputs), rtol=2e-5, atol=2e-5
        )
    assert [site.op for site in compiled.sites] == [OP] * len(compiled.sites)


def test_another_sum():
    """A sum in float64 is of the logits as torch has them: the numbers are torch's."""

    def step(h, w, labels, *_):
        log_p = F.linear(h, w).log_softmax(-1)
        picked = log_p.gather(-1, labels[..., None].clamp(min=0)).mean()
        return -picked - 0.1 * log_p.sum(-1, dtype=torch.float64).mean()

    check(step, problem(torch.float32), tolerance=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(dtype):
    check_accuracy(smoothed(True), problem(dtype))
