"""The expressions of symbolic sizes, and their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import SymBool, SymFloat, SymInt
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
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


def emit(graph: Graph, expression: Expression, known: Mapping[Expression, Node]) -> Node:
    """A node that computes an expression, at the graph's insertion point.

    Without it what is made of the sizes of late tensors alone would be taken for late.

    Args:
        known: the nodes that hold the expression's symbols.
    """
    tracer = _Tracer(graph)
    symbols = {symbol: Proxy(known[symbol], tracer) for symbol in expression.free_symbols}
    node: Node = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
    return node


class _Tracer(GraphAppendingTracer):
    """Gives each node that it makes its value."""

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        target: Any = node.target
        given, named = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        node.meta["val"] = target(*given, **named)
        return node
