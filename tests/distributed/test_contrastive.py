"""Contrastive losses on two and four processes, with gloo, and on GPUs with NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.chosen import chosen
from tests.distributed.contrastive import CHECKS
from tests.distributed.processes import assert_passed, run


def world_of(name):
    return 4 if name.endswith("of_four") else 2


TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def reports(request, tmp_path_factory):
    folder, kind = tmp_path_factory.mktemp("contrastive"), request.param
    names = chosen(test_all_pairs, request)
    most = torch.cuda.device_count() if kind == "cuda" else 4
    for world in sorted({world_of(name) for name in names if world_of(name) <= most}):
        own = [name for name in names if world_of(name) == world]
        (folder / str(world)).mkdir()
        run("tests.distributed.contrastive", folder / str(world), kind, world, own)
    return folder


def marked(name):
    return pytest.param(name, marks=[pytest.mark.slow] if world_of(name) > 2 else [])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", map(marked, CHECKS))
def test_all_pairs(name, reports):
    world = world_of(name)
    if not (reports / str(world)).exists():
        pytest.skip(f"needs {world} CUDA devices")
    assert_passed(reports / str(world), name, world)
