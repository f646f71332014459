"""The models of ``python -m benchmarks steps``: what their losses become, and their figures."""

from __future__ import annotations

import pytest
import torch

from benchmarks import steps
from benchmarks.clock import make_clock
from benchmarks.models import TASKS, Size

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "autocast"])
@pytest.mark.parametrize("name", TASKS)
def test_losses(name, dtype):
    task = TASKS[name]
    if task.library != "torch":
        pytest.importorskip(task.library, reason="pip install .[models]")
    torch._dynamo.reset()
    ops, reason = steps.losses_found(steps.Run(task, task.small, dtype, "ours", CPU), task.op)
    assert not reason, ops


def test_figures(chunks):
    size = Size(batch=2, length=64, width=16, layers=1, classes=2048)
    contenders = ["stock", "ours", "liger"]
    clock = make_clock(CPU)
    stock, ours, liger = steps.measure("distillation", size, "float32", contenders, clock, 0.0, 5)
    assert ours["ops"].startswith("linear_softmax_kl_div: ")
    assert ours["reason"] == ""
    assert float(ours["first_loss"]) != float(ours["last_loss"])
    assert float(ours["curve_difference"]) < 1e-5
    assert float(stock["noise"]) < 1e-5
    assert float(ours["ms"]) > 0
    assert 0 < float(ours["peak_mib"]) <= float(stock["peak_mib"])
    assert liger["reason"].startswith("not run")
