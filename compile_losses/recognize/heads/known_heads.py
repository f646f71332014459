"""Calls of known heads of other libraries, which are ops of ours in a graph already.

:mod:`compile_losses.known_heads.doors` puts them there while the graph is traced, and notes the
calls that it leaves to the library.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from compile_losses.known_heads import HEADS, KnownHead
from compile_losses.known_heads.doors import take_refused
from compile_losses.sites import Site, functions_of, mark, source_of
from compile_losses.torch_internals.ops import OpOverload, OpOverloadPacket

_FUNCTIONS = {(h.compute.__code__.co_filename, h.compute.__name__): h for h in HEADS}


def known_heads(graph: Graph) -> list[Site]:
    """The sites of a graph's calls of known heads, and of those that were refused before it.

    The node of each call is marked, so that the plan never gives it logits that the library does
    not hold either.
    """
    sites = []
    for node in graph.nodes:
        head = _head_of(node)
        if head is not None:
            file, line = source_of(node)
            number = mark(node, without_logits=True)
            op = str(node.target).split(".")[1].removesuffix("_forward")
            sites.append(Site(op, "rewritten", str(head), file, line, mark=number))
    return sites + refused_heads()


def refused_heads() -> list[Site]:
    """The sites of the calls that were left to a library since this was asked before."""
    return [Site(name, "declined", reason, *place) for name, reason, place in take_refused()]


def _head_of(node: Node) -> KnownHead | None:
    """The head of whose call a node is the op; None if it is another call.

    The op may be one overload, or as in most programs the name that stands for all.
    """
    is_op = isinstance(node.target, OpOverload | OpOverloadPacket)
    if not is_op or not str(node.target).startswith("fused."):
        return None
    heads = (_FUNCTIONS.get(function) for function in functions_of(node))
    return next((head for head in heads if head is not None), None)
