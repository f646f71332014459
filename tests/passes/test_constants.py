"""Numbers that a graph holds as tensors."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.graph.constants import constant
from tests.passes.graphs import dynamo, recognizer

CONSTANTS = {
    "tensor": (lambda x: x * torch.tensor(0.5), 0.5),
    "function": (lambda x: x * torch.log1p(-torch.tensor(0.5)), -0.6931471805599453),
    "arithmetic": (lambda x: x * (1 - torch.tensor(0.25)), 0.75),
    "narrow": (lambda x: x * torch.tensor(0.5, dtype=torch.bfloat16), None),
    "integer": (lambda x: x * torch.tensor(3), None),
    "of a tensor": (lambda x: x * x.amax(), None),
    "vector": (lambda x: x * torch.tensor([0.5]), None),
    "infinite": (lambda x: x * torch.tensor(float("inf")), None),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name):
    function, expected = CONSTANTS[name]
    found_by, root = recognizer(dynamo(function, torch.randn(3)).gm)
    value = found_by.replay.of(root)
    assert constant(value.args[1], torch.float32, found_by.replay) == expected
    assert constant(True, torch.float32, found_by.replay) is None
    assert constant(2, torch.float32, found_by.replay) == 2.0
