"""Recipes of docs/distributed.md on two and four processes, with gloo."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.distributed.chosen import chosen
from tests.distributed.processes import assert_passed, run
from tests.distributed.trainers import CHECKS

#: How many ranks a check has where it has more than two.
RANKS = {"tensor_parallel_of_fsdp2": 4, "pipeline_of_fsdp2": 4}
#: Those with models of transformers take as long as all others.
SLOW = ("trainer", "sft_trainer")
#: The packages that some need.
NEEDS = {"accelerate": "accelerate", "trainer": "accelerate", "sft_trainer": "trl"}
NEEDS |= {"lightning": "lightning", "fabric": "lightning"}
NEEDS |= {"deepspeed": "deepspeed", "deepspeed_of_shards": "deepspeed"}


def marked(name):
    package = NEEDS.get(name, "torch")
    missing = f"needs {package}: pip install .[models], or {package} by itself"
    is_missing = pytest.mark.skipif(find_spec(package) is None, reason=missing)
    return pytest.param(name, marks=[is_missing, *([pytest.mark.slow] if name in SLOW else [])])


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    names = chosen(test_recipe, request)
    for world in sorted({RANKS.get(name, 2) for name in names}):
        own = [name for name in names if RANKS.get(name, 2) == world]
        (folder / str(world)).mkdir()
        run("tests.distributed.trainers", folder / str(world), "cpu", world, own)
    return folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", map(marked, CHECKS))
def test_recipe(name, reports):
    world = RANKS.get(name, 2)
    assert_passed(reports / str(world), name, world)
