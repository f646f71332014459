"""Recognition in steps: what a fault has changed is undone, and its step is left out."""

from __future__ import annotations

import pytest
import torch

from compile_losses.graphs import emit, erase
from compile_losses.guard import Failure
from compile_losses.recognize.steps import Graphs, Steps
from tests.passes.graphs import aten, dynamo, returned, text

pytestmark = [pytest.mark.planted, pytest.mark.filterwarnings("ignore")]


def begun():
    gm = dynamo(lambda x: x.exp() + 1, torch.randn(3)).gm
    return gm, Steps(Graphs(gm.graph, gm), strict=False)


def put(gm):
    (root,) = returned(gm.graph)
    emit(root, aten.neg.default, (root.all_input_nodes[0],))


def test_a_step_that_fails_is_undone_and_left_out():
    gm, steps = begun()
    before = text(gm.graph)
    turns = []

    def bad():
        steps.changes()
        put(gm)
        raise ValueError("a fault")

    def turn():
        turns.append(text(gm.graph))
        found = steps.run("bad", bad)
        steps.run("good", lambda: (steps.changes(), put(gm)))
        return found

    found = steps.repeat(turn)
    assert isinstance(found, Failure)
    assert "a fault" in found.reason
    assert turns == [before, before]
    assert list(steps.failures) == ["bad"]
    assert text(gm.graph).count("aten.neg") == 1


def test_without_a_change_there_is_no_second_turn():
    _, steps = begun()
    turns = []

    def turn():
        turns.append(1)
        return steps.run("bad", lambda: 1 / 0)

    assert isinstance(steps.repeat(turn), Failure)
    assert len(turns) == 1


def test_a_graph_that_is_none_is_found_by_its_step():
    gm, steps = begun()
    before = text(gm.graph)
    (root,) = returned(gm.graph)

    def breaks():
        steps.changes()
        root.args = (root, 1)  # a node that reads itself

    def turn():
        steps.run("breaks", breaks)
        return steps.run("good", lambda: "fine")

    assert steps.repeat(turn) == "fine"
    assert list(steps.failures) == ["breaks"]
    assert text(gm.graph) == before


def test_strict():
    gm, _ = begun()
    steps = Steps(Graphs(gm.graph, gm), strict=True)
    with pytest.raises(ZeroDivisionError):
        steps.repeat(lambda: steps.run("bad", lambda: 1 / 0))


def test_restored():
    gm, _ = begun()
    graphs, before = Graphs(gm.graph, gm), text(gm.graph)
    put(gm)
    graphs.restore()
    assert text(gm.graph) == before
    gm.graph.lint()
    put(gm)
    erase(next(node for node in gm.graph.nodes if node.target is aten.neg.default))
    graphs.check()
