"""The expressions of symbolic sizes, and their nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

#: A sympy expression, which is equal to another of the same size, and can be a key.
Expression: TypeAlias = Any


def expression_of(size: SymInt | SymFloat | SymBool) -> Expression:
    """What a size is of the symbols of the inputs. Without it equal sizes are taken for others."""
    return size.node.expr


def symbols_of(*sizes: SymInt) -> set[Expression]:
    """The symbols in some sizes. Without them a size would be computed of what is not there."""
    return {symbol for size in sizes for symbol in expression_of(size).free_symbols}


def specialise(sizes: Iterable[int | SymInt], made: Tensor) -> None:
    """Makes numbers of sizes, if Dynamo can't take a tensor as an input that is made of them all.

    Dynamo reads sizes, strides and offset of an input, in this order. It raises an error if one of
    them has two symbols that it does not know yet.

    Args:
        sizes: those that the tensor's sizes, strides and offset are made of.
    """
    known: set[Expression] = set()
    for size in (*made.size(), *made.stride(), made.storage_offset()):
        if not isinstance(size, SymInt):
            continue
        for each in sizes:
            new = symbols_of(size) - known
            if len(new) > 1 and isinstance(each, SymInt) and symbols_of(each) & new:
                int(each)
        if expression_of(size).is_Symbol:
            known.add(expression_of(size))


def computed(
    expression: Expression, known: Mapping[Expression, Node], emit: Callable[..., Node]
) -> Node:
    """A node that computes an expression.

    Without it what is made of the sizes of late tensors alone would be taken for late.

    Args:
        known: the nodes that hold the expression's symbols.
        emit: puts a call of a function into the graph, given the function and its arguments.
    """
    (graph, *_) = (node.graph for node in known.values())
    tracer = _Tracer(graph, emit)
    symbols = {symbol: Proxy(known[symbol], tracer) for symbol in expression.free_symbols}
    node: Node = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
    return node


class _Tracer(GraphAppendingTracer):
    """Has each of its nodes put into the graph by a function."""

    def __init__(self, graph: Graph, emit: Callable[..., Node]) -> None:
        super().__init__(graph)
        self.emit = emit

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any) -> Node:
        assert kind == "call_function", kind
        return self.emit(target, args, kwargs)
