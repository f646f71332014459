"""The expressions of symbolic sizes, and their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import SymInt
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

#: A sympy expression, which is equal to another of the same size, and can be a key.
Expression: TypeAlias = Any


def expression_of(size: SymInt) -> Expression:
    """What a size is of the symbols of the inputs. Without it equal sizes are taken for others."""
    return size.node.expr


def symbols_of(*sizes: SymInt) -> set[Expression]:
    """The symbols in some sizes. Without them a size would be computed of what is not there."""
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}


def emit(graph: Graph, expression: Expression, known: Mapping[Expression, Node]) -> Node:
    """A node that computes an expression, at the graph's insertion point.

    Without it what is made of the sizes of late tensors alone would be taken for late.

    Args:
        known: the nodes that hold the expression's symbols.
    """
    before = set(graph.nodes)
    tracer = GraphAppendingTracer(graph)
    symbols = {symbol: Proxy(known[symbol], tracer) for symbol in expression.free_symbols}
    node: Node = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
    for new in graph.nodes:
        if new not in before:
            new.meta["val"] = _value(new)
    return node


def _value(node: Node) -> Any:
    def value(argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, Node) else argument

    target: Any = node.target
    args = map(value, node.args)
    if node.op == "call_method":
        first, *rest = args
        return getattr(first, target)(*rest)
    return target(*args, **{name: value(a) for name, a in node.kwargs.items()})
