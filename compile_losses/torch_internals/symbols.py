"""The expressions of symbolic sizes, and their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import SymBool, SymFloat, SymInt
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
