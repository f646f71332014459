"""Small graphs for tests of one pass, and what they hold as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.recognize.graph.memory import look_at
from compile_losses.recognize.graph.symbolic_tensors import Size, Value
from compile_losses.recognize.match import Match
from compile_losses.recognize.spellings.written_out import Recognizer
from compile_losses.request import Request
from tests.corpus.capture import Captured, Parts, captured, parts
from tests.corpus.program import Program

aten = torch.ops.aten
fused = torch.ops.fused


def dynamo(function: Callable[..., Any], *inputs: Any) -> Captured:
    """The graph that Dynamo makes of a function."""
    return captured(Program("", function, lambda: inputs))


def compiled(function: Callable[..., Any], *inputs: Any) -> Parts:
    """AOTAutograd's graphs of a function, recognised and planned."""
    return parts(Program("", function, lambda: inputs))


def of_aten(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """A function as ATen ops, each node with its fake.

    Inputs have the names of the function's arguments: those that begin with ``tangents`` are the
    gradients from outside, as in a joint graph.
    """
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*inputs)


def indexed(gm: GraphModule, **options: Any) -> AtenGraph:
    """An ATen graph as the passes of the plan take it, with what is asked of them."""
    return AtenGraph(gm.graph, Request.of(**options))


def returned(graph: Graph) -> list[Node]:
    """The nodes that a graph returns."""
    (output,) = graph.find_nodes(op="output")
    return list(output.all_input_nodes)


def recognizer(gm: GraphModule) -> tuple[Recognizer, Node]:
    """A recogniser of a graph, and the first node that the graph returns."""
    look_at(gm.graph)
    return Recognizer(gm.graph), returned(gm.graph)[0]


def put_ops(gm: GraphModule) -> None:
    """Puts ops in the place of cross entropies, as it is done before steps on whole graphs."""
    found_by, _ = recognizer(gm)
    for node in reversed(gm.graph.nodes):
        for found in found_by.candidates(node):
            if isinstance(found, Match) and found.op == "cross_entropy":
                found.replace()
                break
    gm.recompile()


def one(graph: Graph, target: Any) -> Node:
    """The only node that calls an op, or a function or method of that name."""
    found = [n for n in graph.nodes if n.target == target or name_of(n.target) == target]
    assert len(found) == 1, found
    return found[0]


def name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def text(graph: Graph) -> str:
    """A line for each call and for what is returned."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_plain(node.args[0])}")
        elif node.op not in ("placeholder", "get_attr"):
            given = [str(_plain(a)) for a in node.args]
            given += [f"{k}={_plain(a)}" for k, a in node.kwargs.items()]
            lines.append(f"{node.name} = {name_of(node.target)}({', '.join(given)})")
    return re.sub(r"device\(type='(\w+)'\)", r"\1", "\n".join(lines))


def _plain(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


def words(argument: Any) -> str:
    """How an argument of a rewrite is computed."""
    if isinstance(argument, Size):
        return f"size({argument.node}, {argument.dim})"
    if isinstance(argument, Value) and argument.op is not None and not argument.whole:
        given = [words(a) for a in argument.args]
        given += [f"{k}={words(a)}" for k, a in argument.kwargs.items()]
        return f"{name_of(argument.op).removeprefix('aten.')}({', '.join(given)})"
    if isinstance(argument, Value | Node):
        return str(argument.node if isinstance(argument, Value) else argument)
    if isinstance(argument, tuple | list):
        return f"[{', '.join(map(words, argument))}]"
    return f"{argument:.12g}" if isinstance(argument, float) else str(argument)


def evaluate(argument: Any, known: dict[Node, Any]) -> Any:
    """The numbers of an argument of a rewrite, of those of some nodes."""

    def of(each: Any) -> Any:
        if isinstance(each, Value) and each.op is not None and not each.whole:
            args, kwargs = tree_map(of, (each.args, each.kwargs), is_leaf=_is_leaf)
            return each.op(*args, **kwargs)
        if isinstance(each, Value | Node):
            return known[each.node if isinstance(each, Value) else each]
        return each

    return of(argument)


def _is_leaf(argument: Any) -> bool:
    return isinstance(argument, Value | Node)


def numbers(found: Captured) -> dict[Node, Any]:
    """The numbers of each node of a Dynamo graph, of the examples of its inputs."""
    kept: dict[Node, Any] = {}

    class Keeping(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            kept[n] = super().run_node(n)
            return kept[n]

    with torch.no_grad():
        Keeping(found.gm).run(*(g.detach() if isinstance(g, Tensor) else g for g in found.inputs))
    return kept
