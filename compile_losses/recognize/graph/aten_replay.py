"""A Dynamo graph seen as ATen ops.

Dynamo keeps what the user wrote: ``(a - b) ** 2``, ``.pow(2)`` and ``torch.square`` are different
nodes. The replay runs a node on the fake values that tracing recorded and notes the ATen ops of the
run, so that a recogniser has one spelling to look for. Nodes are replayed only when asked for.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from compile_losses.distributed import are_dtensors
from compile_losses.recognize.graph.memory import function_of
from compile_losses.recognize.graph.symbolic_tensors import (
    Value,
    example,
    examples,
    fake_mode,
    whole,
)
from compile_losses.recognize.graph.unrolled import JOINS, rejoined
from compile_losses.torch_internals.eager import TorchDispatchMode
from compile_losses.torch_internals.ops import (
    HigherOrderOperator,
    OpOverload,
    packet_of,
    schema_of,
    tree_leaves,
    tree_map_only,
    with_defaults,
)
from compile_losses.torch_internals.symbols import expression_of
from compile_losses.torch_internals.tensors import FakeTensor, size_hint

aten = torch.ops.aten

#: Ops whose results are the same whenever their arguments are: no random numbers, no state.
_REPEATABLE = {
    *(aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.pow, aten.abs, aten.log, aten.exp),
    *(aten._softmax, aten._log_softmax, aten.logsumexp, aten.clamp, aten.remainder),
    *(aten._to_copy, aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.permute),
    *(aten.transpose, aten.t, aten.slice, aten.select, aten.expand, aten.alias),
    *(aten.lt, aten.where, aten.reciprocal),
}


#: Ops that reduce all dimensions if they are given none.
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)

#: How many ops further up two tensors are compared.
_DEEPEST = 8

#: What torch 2.11 calls where a DTensor is redistributed, by its module and name.
_REDISTRIBUTION = ("torch._dynamo.variables.tensor", "prim_redistribute")


#: They give a fake's sizes as numbers, which specialises its symbols, as torch 2.11's linear
#: would.
_NUMBERS = {
    *(aten.size.default, aten.stride.default, aten.storage_offset.default, aten.numel.default)
}


class _NotReplayableError(Exception):
    """A replayed op would write to a tensor of the graph, or fix a size that is a symbol."""


class _Recorder(TorchDispatchMode):
    def __init__(self, values: dict[int, Value], node: Node) -> None:
        super().__init__()
        self.values = values
        self.node = node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if schema_of(func).is_mutable or (func in _NUMBERS and _is_symbolic(args[0])):
            raise _NotReplayableError
        result = func(*args, **kwargs)
        first, whole = result, func
        if func is aten.log_sigmoid_forward.default:  # with a buffer for its backward
            first, whole = result[0], aten.log_sigmoid.default
        if isinstance(first, Tensor):
            given = _over_all_dimensions(func, with_defaults(func, args))
            named = tree_map_only(Tensor, self.value_of, (given, kwargs))
            self.values[id(first)] = Value(first, self.node, whole, *named)
        return result

    def value_of(self, tensor: Tensor) -> Value:
        """A constant, or one of several results of an op, is opaque: no recogniser knows its op."""
        opaque = Value(tensor, self.node, aten.lift_fresh.default)
        return self.values.setdefault(id(tensor), opaque)


class AtenReplay:
    """One graph as ATen ops, replayed a node at a time.

    Attributes:
        replayed: how many nodes were replayed: the cost of recognition.
    """

    def __init__(self) -> None:
        self._of_node: dict[Node, Value] = {}
        self._keys: dict[Value, Hashable] = {}
        self._first: dict[Hashable, Value] = {}
        self.replayed = 0

    def of(self, node: Node) -> Value:
        """The Value that a node with a tensor result holds."""
        if node not in self._of_node:
            value = self._replay(node)
            value.whole = value.whole or value.node is node
            self._of_node[node] = value
        return self._of_node[node]

    def looked_at(self, node: Node) -> bool:
        return node in self._of_node

    def forget(self, nodes: Iterable[Node]) -> None:
        """Has nodes replayed anew, which now are made of others."""
        for node in nodes:
            self._of_node.pop(node, None)

    def resolve(self, value: Value) -> Value:
        """From a Value that stands for a whole node to the Value of the op that made it."""
        return self.of(value.node) if value.op is None else value

    def same(self, left: Any, right: Any) -> bool:
        """Whether two Values certainly hold the same numbers."""
        return (
            isinstance(left, Value)
            and isinstance(right, Value)
            and self.key(left) == self.key(right)
        )

    def key(self, value: Value, depth: int = 0) -> Hashable:
        """Equal for tensors that are computed in the same way from the same tensors."""
        value = self.resolve(value)
        if value not in self._keys:
            self._keys[value] = self._key(value, depth)
        return self._keys[value]

    def _key(self, value: Value, depth: int) -> Hashable:
        """A node, an op with the keys of its arguments, or of an op that is not known the Value
        itself."""
        if value.op is None:
            return value.node
        if depth == _DEEPEST or packet_of(value.op) not in _REPEATABLE:
            return value
        parts = tree_map_only(Value, lambda v: self.key(v, depth + 1), (value.args, value.kwargs))
        # A second computation without gradients has the same numbers, but is another tensor.
        differentiable = getattr(example(value.node), "requires_grad", False)
        # The first of equal Values stands for all, so that keys do not grow with the graph.
        return self._first.setdefault((value.op, hashable(parts), differentiable), value)

    def _replay(self, node: Node) -> Value:
        """The Value that a node holds, by a run on fakes; without an op if it can't be replayed."""
        leaf = whole(node)
        if (source := expanded_source(node)) is not None:
            if same_sizes(example(source).shape, leaf.fake.shape):
                return self.of(source)
            shape = list(leaf.fake.shape)
            return Value(leaf.fake, node, aten.expand.default, (whole(source), shape))
        if (source := kept_source(node)) is not None:
            return self.of(source)
        if node.op not in ("call_function", "call_method"):
            return leaf
        if isinstance(node.target, HigherOrderOperator):
            return leaf
        inputs = [n for n in node.all_input_nodes if isinstance(example(n), Tensor)]
        if not inputs or not all(_is_replayable(example(n)) for n in inputs):
            return leaf
        # Keyed by identity: the fakes of this node's inputs, then the fakes that the replay makes.
        values = {id(example(n)): whole(n) for n in inputs}
        args, kwargs = map_arg((node.args, node.kwargs), example)
        self.replayed += 1
        try:
            with _quietly(example(inputs[0])), _Recorder(values, node):
                result = _call(node, args, kwargs)
        except Exception:  # a node that can't be replayed is opaque
            return leaf
        value = values.get(id(result)) if isinstance(result, Tensor) else None
        # Autocast regions are nodes of the graph and not in force here, so that the replay would
        # miss their casts.
        if value is None or result.dtype != leaf.fake.dtype:
            return leaf
        if value.op is None:  # a node that returns an argument, such as float() of float32
            return self.of(value.node)
        return value if value.op not in JOINS else rejoined(value, self.resolve, compute) or value


def _over_all_dimensions(op: OpOverload[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An op's arguments, with all dimensions of a reduction named that names none."""
    if op not in _REDUCTIONS or args[1]:
        return args
    return args[0], list(range(args[0].dim())), *args[2:]


def expanded_source(node: Node) -> Node | None:
    """The tensor that a node is an expansion of, if it is one of ``broadcast_tensors``; else
    None."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    tensors, index = node.args[0], node.args[1]
    if tensors.target is not torch.broadcast_tensors or not isinstance(index, int):
        return None
    found = tensors.args[index] if index < len(tensors.args) else None
    return found if isinstance(found, Node) and isinstance(example(found), Tensor) else None


def kept_source(node: Node) -> Node | None:
    """The DTensor that a node redistributes to the placements that it has; None of another node.

    ``parallelize_module`` puts such a call after each layer. It is a method's; in torch 2.11 it is
    that of a function of Dynamo's, which has the placements in it.
    """
    function = node.op == "call_function" and (
        getattr(node.target, "__module__", None),
        getattr(node.target, "__name__", None),
    )
    if (node.op, node.target) != ("call_method", "redistribute") and function != _REDISTRIBUTION:
        return None
    source = node.args[0]
    if not isinstance(source, Node) or not are_dtensors(example(source), example(node)):
        return None
    before, after = example(source), example(node)
    same = before.device_mesh == after.device_mesh and before.placements == after.placements
    return source if same and before.dtype == after.dtype else None


def compute(op: OpOverload[..., Any], *args: Any) -> Value | None:
    """A tensor that is in no graph yet, or None if the op refuses its arguments."""
    first = next(a for a in tree_leaves(args) if isinstance(a, Value))
    try:
        with _quietly(first.fake):
            return Value(op(*examples(args)), first.node, op, args, is_new=True)
    except Exception:
        return None


@contextmanager
def _quietly(fake: Tensor) -> Iterator[None]:
    """Runs ops on fakes once more: no gradients, no new symbols, no warning a second time."""
    mode = fake_mode(fake)
    assert mode is not None
    env = mode.shape_env
    no_new_symbols = env.ignore_fresh_unbacked_symbols() if env else nullcontext()
    with mode, torch.no_grad(), no_new_symbols, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_symbolic(tensor: Tensor) -> bool:
    return any(
        isinstance(number, torch.SymInt)
        for number in (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    )


def _is_replayable(tensor: Tensor) -> bool:
    return type(tensor) is FakeTensor or (are_dtensors(tensor) and fake_mode(tensor) is not None)


def hashable(argument: Any) -> Hashable:
    """An argument of an op in a form that compares by value; what can't be hashed by identity."""
    if isinstance(argument, list | tuple):
        return tuple(map(hashable, argument))
    if isinstance(argument, dict):
        return tuple(sorted((key, hashable(item)) for key, item in argument.items()))
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return (type(argument), expression_of(argument))  # hashing one itself may specialise it
    try:
        hash(argument)
    except TypeError:
        return id(argument)
    return (type(argument), argument)


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        receiver, *rest = args
        return getattr(receiver, str(node.target))(*rest, **kwargs)
    return function_of(node)(*args, **kwargs)


def same_sizes(left: Any, right: Any) -> bool:
    """Whether two shapes are certainly equal; comparing symbols by == would add guards."""
    return len(left) == len(right) and all(
        statically_known_true(a == b) for a, b in zip(left, right, strict=True)
    )


def equal_sizes(left: Any, right: Any) -> bool:
    """Whether two shapes are equal; if need be, by a guard that they stay equal.

    It is for sizes that a loss requires to be equal and torch does not: gather takes an index of
    fewer rows.
    """
    if len(left) != len(right):
        return False
    pairs = [pair for pair in zip(left, right, strict=True) if not same_sizes(*zip(pair))]
    symbols = [size for pair in pairs for size in pair if isinstance(size, torch.SymInt)]
    if any(size_hint(size) is None for size in symbols):
        return False
    return all(size_hint(a) == size_hint(b) for a, b in pairs) and all(
        bool(a == b) for a, b in pairs
    )
