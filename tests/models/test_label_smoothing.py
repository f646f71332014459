"""The label smoothing of transformers' Trainer, over a head whose logits nothing else reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.rows import problem
from tests.heads import IN_THE_FORWARD, check, check_accuracy

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(dtype):
    check_accuracy(smoothed(True), problem(dtype))
