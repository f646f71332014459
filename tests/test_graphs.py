"""The tools for graphs: new nodes, their values, what leads where, and kept answers."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed._functional_collectives  # which loads their ops
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from compile_losses import graphs
from compile_losses.torch_internals.graphs import EAGER_VALUES, EXAMPLE

aten = torch.ops.aten


@pytest.fixture(params=["val", EXAMPLE])
def chain(request):
    """x -> neg -> (add, split) -> output, with values under either name."""
    graph, record = Graph(), request.param
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta = {record: torch.empty(4, 2), "stack_trace": "the user's", "custom": {"mark": 1}}
        neg = graph.call_function(aten.neg.default, (x,))
        neg.meta = {**x.meta, EAGER_VALUES: ((), {}), "recompute": 3}
        add = graph.call_function(aten.add.Tensor, (neg, x))
        add.meta = dict(x.meta)
        split = graph.call_function(aten.split.Tensor, (neg, 2))
        split.meta = {record: (torch.empty(2, 2), torch.empty(2, 2))}
        first = graph.call_function(operator.getitem, (split, 0))
        first.meta = {record: torch.empty(2, 2)}
        graph.output((add, first))
    return graph, x, neg, add, split, first


def test_emit(chain):
    graph, x, neg, add, *_ = chain
    before = graphs.version_of(graph)
    node = graphs.emit(add, aten.sum.dim_IntList, (neg, [1]), like=neg)
    assert list(graph.nodes).index(node) == list(graph.nodes).index(add) - 1
    assert graphs.value_of(node).shape == (4,)
    assert node.meta["stack_trace"] == "the user's"
    assert node.meta["custom"] == {"mark": 1}
    assert node.meta["recompute"] == 3
    assert EAGER_VALUES not in node.meta
    assert ("val" in node.meta) == ("val" in x.meta)
    assert graphs.version_of(graph) != before


def test_emit_a_method_with_a_value(chain):
    _, x, _, add, *_ = chain
    node = graphs.emit(add, "size", (x, 0), value=4, given_as=((x,), {}))
    assert (node.op, graphs.value_of(node)) == ("call_method", 4)
    assert node.meta[EAGER_VALUES] == ((x,), {})


def test_of_an_input_only_the_place_is_inherited(chain):
    graph, x, *_ = chain
    node = graphs.emit(graph, aten.neg.default, (x,), like=x)
    assert node.meta.keys() - {"val", EXAMPLE} == {"stack_trace"}


def test_reach(chain):
    _, x, neg, _, split, first = chain
    assert list(graphs.ancestors([first])) == [first, split, neg, x]
    assert list(graphs.ancestors([first], until={neg})) == [first, split]
    assert list(graphs.ancestors([first], past=lambda n: n is not neg)) == [first, split, neg]
    assert {n.op for n in set(graphs.descendants([split])) - {split, first}} == {"output"}
    assert graphs.between([neg], first) == {split}
    assert graphs.between([x], first) == {neg, split}
    assert graphs.between([x], first, until={neg}) == set()
    assert graphs.later_sources([first], split) == [split, first]


def test_replace(chain):
    graph, _, neg, add, split, first = chain
    one = graphs.emit(split, aten.slice.Tensor, (neg, 0, 0, 2))
    graphs.replace(split, (one, None))
    assert split not in graph.nodes
    assert first not in graph.nodes
    graphs.replace(add, neg)
    (output,) = graph.find_nodes(op="output")
    assert output.args == ((neg, one),)
    assert graphs.erase_unused([neg]) == []
    graph.lint()


def test_what_fails_is_undone(chain):
    graph, _, neg, add, *_ = chain
    nodes = list(graph.nodes)

    def fails():
        with graphs.undone_if_it_fails(add):
            graphs.emit(add, aten.neg.default, (neg,))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert list(graph.nodes) == nodes


def test_retraced_views():
    graph = Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 2)
        view = graph.call_function(aten.view.default, (x, [8]))
        view.meta["val"] = torch.empty(8)
    graphs.retrace_views(x)
    assert view.meta["val"]._is_view()
    shared = graphs.view_like(x.meta["val"])
    assert shared.untyped_storage()._cdata == x.meta["val"].untyped_storage()._cdata
    fresh = graphs.fresh_like(x.meta["val"])
    assert fresh.untyped_storage()._cdata != x.meta["val"].untyped_storage()._cdata


def test_answers_are_kept_until_the_graph_changes(chain):
    graph, _, neg, add, *_ = chain
    asked = []

    def number(given):
        asked.append(given)
        return len(given.nodes)

    indexed = graphs.Indexed(graph)
    many = len(graph.nodes)
    assert [indexed.ask(number), indexed.ask(number)] == [many, many]
    assert len(asked) == 1
    node = graphs.emit(add, aten.neg.default, (neg,))
    assert indexed.ask(number) == many + 1
    graphs.erase(node)
    assert indexed.ask(number) == many
    assert len(asked) == 3


def test_each_tool_counts_as_a_change(chain):
    graph, x, neg, add, split, _ = chain

    def changed(action):
        before = graphs.version_of(graph)
        action()
        return graphs.version_of(graph) != before

    assert changed(lambda: graphs.annotate(add, "custom", {}))
    assert changed(lambda: graphs.forget(neg, EAGER_VALUES))
    assert changed(lambda: graphs.give(add, (neg, neg)))
    assert changed(lambda: graphs.give(add, alpha=2))
    assert changed(lambda: graphs.give_value(split, None))
    assert changed(lambda: graphs.change_input(add, neg, x))
    assert changed(lambda: graphs.replace_uses(add, neg))
    assert changed(lambda: graphs.erase_unused([add]))
    copies = {}
    assert changed(lambda: graphs.copy_nodes([neg], copies, lambda _: split, neg))
    assert changed(lambda: graphs.move_before([copies[neg]], neg))
    assert add.kwargs == {"alpha": 2}


@pytest.mark.parametrize("passes", [False, True])
def test_collectives_keep_their_order(passes):
    """A count of all ranks moves to before a loss, but not past what is summed before it."""
    functional, graph = torch.ops._c10d_functional, Graph()
    x = graph.placeholder("x")
    loss = graph.call_function(aten.sum.default, (x,))
    if passes:
        graph.call_function(functional.all_reduce.default, (x, "sum", "0"))
    first = graph.call_function(functional.all_reduce.default, (x, "sum", "0"))
    second = graph.call_function(functional.all_reduce.default, (first, "sum", "0"))
    count = graph.call_function(functional.wait_tensor.default, (second,))
    assert graphs.move_before([count], loss) is not passes
    assert (count < loss) is not passes
    assert first < second
