"""Every program of the corpus: what the passes decide, and that they change no number."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.corpus import PROGRAMS
from tests.corpus.capture import captured, inputs_for, parts, put_in_place, recognised
from tests.passes import decisions
from tests.passes.outcomes import assert_same, results_of, with_gradients

#: Of the spellings, which ``test_recognize`` compiles as well, every so many.
SOME = 4
SPELLINGS = [name for name in PROGRAMS if name.startswith("spellings")]
SHARDED = [name for name in PROGRAMS if name.startswith("sharded")]
RECOGNISED = [name for name in PROGRAMS if name not in {*SPELLINGS, *SHARDED}]
RECOGNISED += SPELLINGS[::SOME]


def test_sharded():
    """The losses of DTensors; no rank computes them alone."""
    for name in SHARDED:
        _, report = recognised(PROGRAMS[name])
        decisions.check("recognised_sharded", name, decisions.told(report))


@pytest.mark.parametrize("name", RECOGNISED)
def test_recognised(name):
    """The losses of Dynamo's graph, and why some stay torch's; numbers and gradients stay."""
    program = PROGRAMS[name]
    before = captured(program)
    after, report = recognised(program)
    decisions.check(f"recognised_{name.split(':')[0]}", name, decisions.told(report))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, right = (with_gradients(each.gm, each.inputs) for each in (after, before))
    given = [x.dtype for x in after.inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    given += [torch.bfloat16] * ("autocast" in name)
    narrowest = min(given, key=lambda dtype: -torch.finfo(dtype).eps, default=torch.float64)
    assert_same(found, right, narrowest)


#: Those whose losses are planned in more ways than one.
MODULES = (
    "rows",
    "shared",
    "numbers",
    "scaled",
    "picks",
    "distilled",
    "finite",
    "classes",
    "elementwise",
    "plain",
)
#: Their probabilities would be any numbers.
DRAWN = "classes: drawn_by_probabilities"
PLANNED = [
    name
    for name in PROGRAMS
    if (name.startswith(MODULES) and name != DRAWN) or name in SPELLINGS[:: 3 * SOME]
]


@pytest.mark.parametrize("name", PLANNED)
def test_planned(name):
    """The plan of the joint graph; its numbers stay, and those of the graphs it is cut into."""
    cut = parts(PROGRAMS[name])
    decisions.check("planned", name, decisions.planned(cut.decisions))
    inputs = inputs_for(cut.joint)
    assert_same(results_of(cut.planned, inputs), results_of(cut.joint, inputs))
    found = []
    for graph, donated in ((cut.forward, ()), (cut.backward, cut.donated)):
        if graph is not None:
            inputs = inputs_for(graph)
            right = results_of(graph, inputs)
            found += put_in_place(graph, donated)
            assert_same(results_of(graph, inputs), right)
    decisions.check("in_place", name, decisions.planned(found))
