"""Which tensors a graph writes to after they were made."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from compile_losses.recognize.values import example

_written: WeakKeyDictionary[Graph, frozenset[int | None]] = WeakKeyDictionary()


def is_written(value: Tensor, graph: Graph) -> bool:
    """Whether the graph writes to this example value, through any view of it.

    Tracing bumps the version of what is written to. But ``tensor.data`` has a version of its own,
    and what an op takes in a list, as ``torch._foreach_mul_`` does, keeps its version.
    """
    if value._version > 0:
        return True
    if graph not in _written:
        written = [example(node) for node in graph.nodes if _has_new_version(example(node))]
        for node in graph.nodes:
            written += map(example, tree_leaves(_written_lists(node)))
        _written[graph] = frozenset(map(_storage, written)) - {None}
    return _storage(value) in _written[graph]


def _has_new_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference() and value._version > 0


def _written_lists(node: Node) -> list[Any]:
    """The lists of tensors that an op may write to: by its schema or, without one, by its name."""
    if node.op != "call_function":
        return []
    lists = [
        argument
        for argument in (*node.args, *node.kwargs.values())
        if isinstance(argument, list | tuple)
    ]
    if not lists:
        return []
    target: Any = node.target
    if isinstance(target, OpOverloadPacket):
        schemas = [getattr(target, overload)._schema for overload in target.overloads()]
    elif isinstance(target, OpOverload):
        schemas = [target._schema]
    else:
        name = getattr(target, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        out = node.kwargs.get("out")
        return lists if in_place else [out] if isinstance(out, list | tuple) else []
    return lists if any(schema.is_mutable for schema in schemas) else []


def _storage(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
        return None
    return value.untyped_storage()._cdata
