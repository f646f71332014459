"""A Dynamo graph seen as ATen ops.

Dynamo keeps what the user wrote: ``(a - b) ** 2``, ``.pow(2)`` and ``torch.square`` are different
nodes. The shadow replays a node on the values that tracing recorded and notes which ATen ops that
takes, so that a recogniser has one spelling to look for. Nodes are replayed only when asked for.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from compile_losses.recognize.match import example


@dataclass(eq=False)
class Value:
    """A tensor of the shadow.

    Attributes:
        fake: its dtype, shape and so on.
        node: the Dynamo node during which it was computed.
        op: the ATen op that made it, None where the shadow does not look further.
        args, kwargs: the op's arguments; tensors are Values.
    """

    fake: Tensor
    node: Node
    op: OpOverload[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class _MutationError(Exception):
    """A replayed op would write to a tensor of the graph."""


class _Recorder(TorchDispatchMode):
    def __init__(self, values: dict[int, Value], node: Node) -> None:
        super().__init__()
        self.values = values
        self.node = node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise _MutationError
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            named = tree_map_only(Tensor, self.value_of, (args, kwargs))
            self.values[id(result)] = Value(result, self.node, func, *named)
        return result

    def value_of(self, tensor: Tensor) -> Value:
        """A constant, or one of several results of an op, is opaque: no recogniser knows its op."""
        opaque = Value(tensor, self.node, torch.ops.aten.lift_fresh.default)
        return self.values.setdefault(id(tensor), opaque)


class Shadow:
    """The ATen view of one graph, built as it is looked at."""

    def __init__(self) -> None:
        self._of_node: dict[Node, Value] = {}

    def of(self, node: Node) -> Value:
        """The Value that a node with a tensor result holds."""
        if node not in self._of_node:
            self._of_node[node] = self._replay(node)
        return self._of_node[node]

    def _replay(self, node: Node) -> Value:
        leaf = Value(example(node), node)
        if node.op not in ("call_function", "call_method"):
            return leaf
        if isinstance(node.target, HigherOrderOperator):
            return leaf
        inputs = [n for n in node.all_input_nodes if isinstance(example(n), Tensor)]
        if not inputs or not all(type(example(n)) is FakeTensor for n in inputs):
            return leaf
        # Keyed by identity: the fakes of this node's inputs, then of whatever the replay makes.
        values = {id(example(n)): Value(example(n), n) for n in inputs}
        args, kwargs = map_arg((node.args, node.kwargs), example)
        fake_mode = example(inputs[0]).fake_mode
        shape_env = fake_mode.shape_env
        no_new_symbols = shape_env.ignore_fresh_unbacked_symbols() if shape_env else nullcontext()
        try:
            with fake_mode, torch.no_grad(), no_new_symbols, _Recorder(values, node):
                result = _call(node, args, kwargs)
        except Exception:  # whatever can't be replayed is opaque, and nothing more
            return leaf
        value = values.get(id(result)) if isinstance(result, Tensor) else None
        # Autocast regions are nodes of the graph and not in force here: their casts would be
        # missed.
        if value is None or value.op is None or result.dtype != leaf.fake.dtype:
            return leaf
        return value

    def resolve(self, value: Value) -> Value:
        """Looks through a Value that stands for a whole node."""
        return self.of(value.node) if value.op is None else value


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        receiver, *rest = args
        return getattr(receiver, str(node.target))(*rest, **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
