"""Contrastive losses on two and four processes, with gloo."""

from __future__ import annotations

import pytest

from tests.distributed.chosen import chosen
from tests.distributed.contrastive import CHECKS
from tests.distributed.processes import assert_passed, run


def world_of(name):
    return 4 if name.endswith("of_four") else 2


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrastive")
    names = chosen(test_all_pairs, request)
    for world in sorted(set(map(world_of, names))):
        own = [name for name in names if world_of(name) == world]
        (folder / str(world)).mkdir()
        run("tests.distributed.contrastive", folder / str(world), "cpu", world, own)
    return folder


def marked(name):
    return pytest.param(name, marks=[pytest.mark.slow] if world_of(name) > 2 else [])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", map(marked, CHECKS))
def test_all_pairs(name, reports):
    world = world_of(name)
    assert_passed(reports / str(world), name, world)
