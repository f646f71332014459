"""Log-probabilities and entropies of DTensors are torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_losses import functional
from compile_losses.ops.row_statistics import entropy_of
from tests.distributed.world import WORLD


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("picks", [None, 3])
def test_selective_log_softmax(picks, placement):
    mesh = init_device_mesh("cpu", (WORLD,))
    local = torch.randn(4, 9, dtype=torch.float64)
    index = torch.randint(9, (4,) if picks is None else (4, picks))
    logits = DTensor.from_local(local, mesh, [placement]).requires_grad_()
    result = functional.selective_log_softmax(logits, DTensor.from_local(index, mesh, [placement]))
    logarithms = F.log_softmax(local, -1)
    expected = logarithms.gather(1, index.view(4, -1)).view(index.shape)
    torch.testing.assert_close(result.to_local(), expected)
    result.sum().backward()
    assert logits.grad.to_local().isfinite().all()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_softmax_entropy(placement):
    mesh = init_device_mesh("cpu", (WORLD,))
    local = torch.randn(4, 9, dtype=torch.float64)
    result = functional.softmax_entropy(DTensor.from_local(local, mesh, [placement]))
    torch.testing.assert_close(result.to_local(), entropy_of(local))
