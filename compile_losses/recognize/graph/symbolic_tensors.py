"""Tensors of a graph, and tensors that a rewrite computes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.distributed import are_dtensors
from compile_losses.graphs import emit, value_of
from compile_losses.torch_internals.ops import OpOverload, tree_leaves, tree_map
from compile_losses.torch_internals.tensors import FakeTensor, FakeTensorMode, shard_of


@dataclass(eq=False)
class Value:
    """A tensor of the replay.

    Attributes:
        fake: its dtype, shape and so on.
        node: the Dynamo node during which it was computed.
        op: the ATen op that made it; None if the replay goes no further.
        args, kwargs: the op's arguments; tensors are Values.
        whole: whether it is all that its node returns.
        is_new: whether no node of the graph computes it; node is then an argument's node.
    """

    fake: Tensor
    node: Node
    op: OpOverload[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    is_new: bool = False

    @property
    def rank(self) -> int:
        """The number of dimensions, at least 1: torch takes -1 and 0 of a tensor without any."""
        return max(self.fake.dim(), 1)

    @property
    def argument(self) -> Node | Value:
        """The argument of a rewrite: the node, or this Value, which the rewrite computes."""
        return self.node if self.whole else self


def whole(node: Node) -> Value:
    """The Value of all that a node returns, without its op."""
    return Value(example(node), node, whole=True)


@dataclass(frozen=True)
class Size:
    """The size of a tensor in one dimension, number or symbol."""

    node: Node
    dim: int


def fake_mode(value: Any) -> FakeTensorMode | None:
    """The mode of a fake tensor, or of a DTensor whose shards are fakes."""
    if are_dtensors(value):
        value = shard_of(value)
    return value.fake_mode if isinstance(value, FakeTensor) else None


def example(argument: Any) -> Any:
    """The fake tensor or number recorded for a node in tracing; a constant stands for itself."""
    if isinstance(argument, Value):
        return argument.fake
    if isinstance(argument, Size):
        return example(argument.node).shape[argument.dim]
    if isinstance(argument, Node):
        return value_of(argument)
    return argument


def examples(arguments: Any) -> Any:
    """Any nesting of arguments with their examples in their places."""
    return tree_map(example, arguments)


def sources(arguments: Any) -> Iterator[Node]:
    """The nodes that any nesting of arguments is computed from."""
    for argument in tree_leaves(arguments):
        if isinstance(argument, Value) and not argument.whole:
            yield from sources((argument.args, argument.kwargs))
        elif isinstance(argument, Value | Size | Node):
            yield argument if isinstance(argument, Node) else argument.node


def computed_at(arguments: Any) -> Iterator[Node]:
    """The nodes that compute Values which a rewrite computes once more."""
    for argument in tree_leaves(arguments):
        if isinstance(argument, Value) and not argument.whole:
            if not argument.is_new:
                yield argument.node
            yield from computed_at((argument.args, argument.kwargs))


def put(argument: Any, place: Node, call: Callable[..., Node] | None = None) -> Any:
    """Puts the nodes that an argument needs before a node, from which they inherit; the argument
    as a node takes it.

    Args:
        call: puts the call of an op there, given its arguments; by default with the fake that the
            replay has, which has no gradients.
    """
    if isinstance(argument, Size):
        return emit(place, "size", (argument.node, argument.dim), value=example(argument))
    if not isinstance(argument, Value) or argument.whole:
        return argument.node if isinstance(argument, Value) else argument
    assert argument.op is not None
    args, kwargs = tree_map(lambda each: put(each, place, call), (argument.args, argument.kwargs))
    if call is not None:
        return call(argument.op, args, kwargs)
    return emit(place, argument.op, args, kwargs, value=example(argument))


def has_gradient(argument: Node | Value) -> bool:
    """Whether a tensor has a gradient when the rewrite reads or computes it."""
    return any(getattr(example(node), "requires_grad", False) for node in sources((argument,)))


def computed_alike(one: Any, other: Any) -> bool:
    """Whether two arguments are computed in the same way from the same nodes."""
    if isinstance(one, Value) and isinstance(other, Value):
        if one is other:
            return True
        if one.whole or other.whole:
            return one.whole and other.whole and one.node is other.node
        return (
            one.op is other.op
            and one.kwargs == other.kwargs
            and computed_alike(one.args, other.args)
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(computed_alike, one, other))
    if isinstance(one, SymInt) or isinstance(other, SymInt):
        return statically_known_true(one == other)
    return type(one) is type(other) and one == other
