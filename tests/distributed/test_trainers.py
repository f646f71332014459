"""Recipes of docs/distributed.md on two and four processes, with gloo."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.distributed import sharded_sequences, trainers
from tests.distributed.chosen import chosen
from tests.distributed.processes import assert_passed, run

#: The modules that have checks.
MODULES = (trainers, sharded_sequences)
#: How many ranks a check has where it has more than two.
RANKS = {"tensor_parallel_of_fsdp2": 4, "pipeline_of_fsdp2": 4}
RANKS |= {"one_rank_of_two_dimensions_fails": 4, "one_part_of_two_dimensions_counts_nothing": 4}
#: Those with models of transformers take as long as all others.
SLOW = "trainer"
#: The packages that checks with a word in their names need.
NEEDS = {"accelerate": "accelerate", "trainer": "accelerate", "sft_trainer": "trl"}
NEEDS |= {"accelerate_": "transformers"}
NEEDS |= {"lightning": "lightning", "fabric": "lightning"}
NEEDS |= {"deepspeed": "deepspeed", "sequence_parallel": "deepspeed"}


def marked(name):
    needed = {package for word, package in NEEDS.items() if word in name}
    missing = " and ".join(sorted(each for each in needed if find_spec(each) is None))
    reason = f"needs {missing}: pip install .[models], or by name"
    marks = [pytest.mark.skipif(missing != "", reason=reason)]
    return pytest.param(name, marks=[*marks, *([pytest.mark.slow] if SLOW in name else [])])


def place_of(name, folder):
    """Of a check's reports: a folder for those that run one after the other."""
    module = next(module for module in MODULES if name in module.CHECKS)
    return folder / f"{module.__name__}.{RANKS.get(name, 2)}"


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    together = {}
    for name in chosen(test_recipe, request):
        together.setdefault(place_of(name, folder), []).append(name)
    for place, names in together.items():
        place.mkdir()
        run(place.stem, place, "cpu", RANKS.get(names[0], 2), names)
    return folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [marked(name) for module in MODULES for name in module.CHECKS])
def test_recipe(name, reports):
    assert_passed(place_of(name, reports), name, RANKS.get(name, 2))
