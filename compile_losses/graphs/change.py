"""The changes of a graph. No other module makes nodes, erases them or writes what is recorded of
them.

A Dynamo graph records the value of a node as its example, a graph of AOTAutograd's as ``val``. A
new node gets its value under the name that the node it inherits from has it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from compile_losses.distributed import are_dtensors
from compile_losses.graphs.indexed import changed
from compile_losses.graphs.reach import is_movable, later_sources
from compile_losses.op_traits import shares_memory
from compile_losses.torch_internals.graphs import EAGER_VALUES, EXAMPLE, GRAPH_ARGUMENT
from compile_losses.torch_internals.ops import communicates, schema_of, tree_leaves
from compile_losses.torch_internals.tensors import FakeTensor, shard_of

#: No value is given for a new node: it is computed.
_COMPUTED: Any = object()
#: What a node does not inherit: values of its own, and how it was called in eager mode.
_OWN = ("val", EXAMPLE, EAGER_VALUES)
#: The arguments that tracing recorded of a call, see :func:`emit`.
GIVEN_AS = EAGER_VALUES


def value_of(node: Node) -> Any:
    """The fake tensor, number or sequence of these that is recorded of a node."""
    return node.meta.get(EXAMPLE, node.meta.get("val"))


def emit(
    place: Node | Graph,
    target: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: Node | None = None,
    value: Any = _COMPUTED,
    given_as: Any = None,
) -> Node:
    """Puts a call into a graph.

    Args:
        place: the node before which it is put, or a graph, at the end of which it is put.
        target: a function; or, as a string, the name of a method of the first argument.
        like: the node from which it inherits its place in the user's program, its loss's mark and
            what the partitioner was asked; by default ``place``.
        value: what it returns, as fakes; by default ``target`` computes it of its arguments'.
        given_as: its arguments in eager mode, as fakes, to whose strides Inductor brings them.
    """
    source = place if like is None and isinstance(place, Node) else like
    assert source is not None, "a node at the end of a graph is like no other"
    kwargs = dict(kwargs or {})
    if value is _COMPUTED:
        value = _compute(target, args, kwargs, source)
    graph = place.graph if isinstance(place, Node) else place
    with graph.inserting_before(place) if isinstance(place, Node) else nullcontext():
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = graph.create_node(kind, target, tuple(args), kwargs)
    _record(node, source, value)
    if given_as is not None:
        node.meta[EAGER_VALUES] = given_as
    changed(graph)
    return node


def in_dtype(node: Node, dtype: torch.dtype, place: Node, *, like: Node | None = None) -> Node:
    """A tensor of an ATen graph in a dtype: the node, or a cast of it that is put before a place.

    Args:
        like: as that of :func:`emit`.
    """
    if node.meta["val"].dtype == dtype:
        return node
    return emit(place, torch.ops.prims.convert_element_type.default, (node, dtype), like=like)


def _compute(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], like: Node) -> Any:
    """What a call returns, as a fake."""
    values, named = map_arg((tuple(args), dict(kwargs)), value_of)
    mode = next(map(_mode_of, filter(_is_fake, tree_leaves((values, named, value_of(like))))), None)
    with nullcontext() if mode is None else mode:
        return target(*values, **named)


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor) or are_dtensors(value)


def _mode_of(value: Any) -> Any:
    return getattr(shard_of(value), "fake_mode", None)


def _record(node: Node, like: Node, value: Any) -> None:
    if like.op == "placeholder":  # what it has besides is about an input
        inherited = {k: v for k, v in like.meta.items() if k == "stack_trace"}
    else:
        inherited = {k: v for k, v in like.meta.items() if k not in _OWN}
    node.meta = {**inherited, EXAMPLE if EXAMPLE in like.meta else "val": value}


def emit_input(graph: Graph, name: str, value: Any) -> Node:
    """Adds an input to a Dynamo graph that is being built, with its example."""
    node = graph.placeholder(name)
    node.meta[EXAMPLE] = value
    changed(graph)
    return node


def straight_line(
    inputs: int,
    calls: Iterable[tuple[Any, Sequence[Any], Mapping[str, Any]]],
    given: Callable[[Any, Sequence[Node]], Any],
    results: Iterable[int],
) -> GraphModule:
    """A function that calls ops one after the other.

    Args:
        inputs: how many it has. They are its first values, and each call makes one more.
        calls: the ops with their arguments.
        given: what a call is given for an argument, by the values so far.
        results: the places of the values that it returns.
    """
    graph = Graph()
    values = [graph.placeholder(f"value_{i}") for i in range(inputs)]
    for op, args, kwargs in calls:
        named = {name: given(argument, values) for name, argument in kwargs.items()}
        values.append(graph.call_function(op, tuple(given(a, values) for a in args), named))
    graph.output(tuple(values[place] for place in results))
    return GraphModule({}, graph)


def copy_nodes(
    nodes: Iterable[Node],
    copies: dict[Node, Node],
    place: Callable[[Node], Node],
    like: Node,
) -> None:
    """Copies nodes with their values, of the same graph or of another one.

    Args:
        nodes: in their order.
        copies: what the copies read in the place of what the nodes read, if that is another node;
            they are added.
        place: the node before which the copy of each node is put.
        like: as for :func:`emit`.
    """
    for node in nodes:
        before = place(node)
        with before.graph.inserting_before(before):
            copy = before.graph.node_copy(node, lambda n: copies.get(n, n))
        copies[node] = copy
        _record(copy, like, node.meta.get("val"))
        changed(before.graph)


def replace_uses(node: Node, by: Node, *, but: Node | None = None) -> None:
    """Has all that reads a node read another one.

    Args:
        but: a reader that stays.
    """
    node.replace_all_uses_with(by, lambda user: user is not but)
    changed(node.graph)


def replace(node: Node, by: Node | Sequence[Any] | Mapping[Any, Node]) -> None:
    """Puts other nodes in the place of a call's results, and erases the call.

    Args:
        node: the call.
        by: of a call with one result, the node that holds it now. Of a call with several, whose
            users each take one of them, those nodes by the results' places, where any is read.
    """
    if isinstance(by, Node):
        replace_uses(node, by)
    else:
        for item in list(node.users):
            if item.users:
                replace_uses(item, by[item.args[1]])  # type: ignore[index]
            erase(item)
    erase(node)


def erase(*nodes: Node) -> None:
    """Erases nodes that nothing uses, each before the next."""
    for node in nodes:
        node.graph.erase_node(node)
        changed(node.graph)


def erase_unused(nodes: Iterable[Node]) -> list[Node]:
    """Erases those of some nodes that nothing uses, one after the other; which these are."""
    erased = []
    for node in nodes:
        if not node.users:
            erase(node)
            erased.append(node)
    return erased


def change_input(user: Node, old: Node, new: Node) -> None:
    """Has a node read another one in the place of one."""
    user.replace_input_with(old, new)
    changed(user.graph)


def give(node: Node, args: Sequence[Any] | None = None, **kwargs: Any) -> None:
    """Gives a call other positional arguments, or more keyword arguments than it has.

    What tracing recorded of its arguments is forgotten.
    """
    if args is not None:
        node.args = tuple(args)
    if kwargs:
        node.kwargs = {**node.kwargs, **kwargs}
    forget(node, EAGER_VALUES)
    changed(node.graph)


def annotate(node: Node, key: str, value: Any) -> None:
    """Notes something of a node for torch, or for a later pass; not its value."""
    assert key not in ("val", EXAMPLE, GRAPH_ARGUMENT)
    node.meta[key] = value
    changed(node.graph)


def give_value(node: Node, value: Any) -> None:
    """Records another value of a node."""
    node.meta[EXAMPLE if EXAMPLE in node.meta else "val"] = value
    changed(node.graph)


def forget(node: Node, key: str) -> None:
    """Takes back what is noted of a node."""
    node.meta.pop(key, None)
    changed(node.graph)


@contextmanager
def undone_if_it_fails(place: Node) -> Iterator[None]:
    """Erases what was put before a node if that ends in an exception."""
    before = place.prev
    try:
        yield
    except Exception:
        while place.prev is not before:
            erase(place.prev)
        raise


def move_before(
    nodes: list[Node], first: Node, may_move: Callable[[Node], bool] | None = None
) -> bool:
    """Moves what ``nodes`` are computed by to before ``first``; False where that can't be done.

    Collectives keep their order among each other. The ranks match them by it, and another rank may
    have another plan.

    Args:
        may_move: whether a node may move; by default calls of ops that give the same anywhere and
            what they return, the graph's constants and collectives.
    """
    late = later_sources(nodes, first)
    if first in late or not all(map(may_move or _may_move, late)):
        return False
    if not _keeps_order_of_collectives(late, first):
        return False
    for node in late:
        first.prepend(node)
    changed(first.graph)
    return True


def _may_move(node: Node) -> bool:
    is_item = node.target is operator.getitem  # of what a call returns
    return node.op == "get_attr" or is_item or is_movable(node) or _is_functional_collective(node)


def _is_functional_collective(node: Node) -> bool:
    return communicates(node.target) and not schema_of(node.target).is_mutable


def _keeps_order_of_collectives(moved: Sequence[Node], first: Node) -> bool:
    """Whether nodes that move to before ``first``, in their order, pass no other collective."""
    collectives = [node for node in moved if communicates(node.target)]
    if not collectives:
        return True
    passed, node = [], first
    while node is not collectives[-1]:
        passed.append(node)
        node = node.next
    return all(node in collectives for node in passed if communicates(node.target))


def fresh_like(fake: Any) -> Tensor:
    """A fake tensor of the same layout in memory of its own."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def view_like(fake: Any) -> Tensor:
    """A fake tensor in the same memory."""
    with fake.fake_mode:
        view: Tensor = fake.view_as(fake)
        return view


def is_view(node: Node) -> bool:
    """Whether a node's result lies in its argument's memory."""
    return shares_memory(node.target)


def retrace_views(node: Node) -> None:
    """Makes the recorded values of a node's views share the memory of the node's value."""
    for user in node.users:
        if is_view(user):
            args, kwargs = map_arg((user.args, user.kwargs), value_of)
            with value_of(node).fake_mode:
                give_value(user, user.target(*args, **kwargs))  # type: ignore[operator]
            retrace_views(user)
