"""Elementwise losses as plain ATen where Inductor fuses them better than a kernel could.

A custom op is opaque: what feeds it is written to memory first. When a pointwise op or a small
reduction produces an argument of an elementwise loss, Inductor computes both in one kernel and
never stores what lies between; an unreduced loss is itself such a pointwise op. There the op and
its gradient are replaced by what torch itself would have put into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._functorch.partitioners import OpTypes, get_default_op_list
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compile_losses.lower.aliases import is_view
from compile_losses.lower.calls import fused_call
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.elementwise import REFERENCES

aten = torch.ops.aten


def inline(graph: Graph) -> list[tuple[Node, str]]:
    """Inlines what Inductor fuses with its neighbours.

    Returns:
        The producers, or the losses, that decided it, with the reason in words.
    """
    reasons = []
    ops = get_default_op_list()
    for node in list(graph.nodes):
        loss, part = fused_call(node) or ("", "")
        if loss not in REFERENCES or part not in ("forward", "backward"):
            continue
        is_forward = part == "forward"
        reason = _fusible(node, is_forward, ops)
        if reason is None:
            continue
        function = _forward(loss, node) if is_forward else _backward(loss, node)
        if _splice(graph, node, function):
            reasons.append(reason)
    return reasons


def _fusible(node: Node, is_forward: bool, ops: OpTypes) -> tuple[Node, str] | None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    reduction = names.index("reduction")
    if node.args[reduction] == REDUCTIONS["none"]:
        return node, "an unreduced loss is pointwise"
    for argument in node.args[names.index("input") : reduction]:
        producer = argument
        while isinstance(producer, Node) and (
            is_view(producer) or producer.target is aten._unsafe_view.default
        ):
            producer = producer.args[0]
        if not isinstance(producer, Node) or producer.op != "call_function":
            continue
        if ops.is_fusible(producer):
            return producer, f"{producer.name} is computed in the same kernel"
    return None


def _forward(loss: str, node: Node) -> Callable[..., Any]:
    arguments: list[Any] = list(node.args)
    dtype: torch.dtype = arguments.pop()

    def forward(*tensors: Tensor) -> Tensor:
        return REFERENCES[loss](*_put(arguments, [tensor.to(dtype) for tensor in tensors]))

    return forward


def _backward(loss: str, node: Node) -> Callable[..., Any]:
    results = len(node.target._schema.returns)  # type: ignore[union-attr]
    arguments, needs = node.args[1:-results], node.args[-results:]

    def backward(grad_output: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        shape = torch.broadcast_shapes(tensors[0].shape, tensors[1].shape)
        leaves = [
            tensor.expand(shape).detach().requires_grad_(bool(needed))
            for tensor, needed in zip(tensors, needs, strict=False)
        ]
        with torch.enable_grad():
            all_tensors = [*leaves, *tensors[len(leaves) :]]
            cast = [tensor.to(grad_output.dtype) for tensor in all_tensors]
            result = REFERENCES[loss](*_put(arguments, cast))
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(result, wanted, grad_output))
        return tuple(
            next(found) if leaf is not None and leaf.requires_grad else grad_output.new_empty(0)
            for leaf, _ in zip_longest(leaves, needs)
        )

    return backward


def _put(arguments: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """A call's arguments with tensors in the places of its tensor nodes."""
    following = iter(tensors)
    return [
        next(following) if isinstance(a, Node) and isinstance(a.meta["val"], Tensor) else a
        for a in arguments
    ]


def _splice(graph: Graph, node: Node, function: Callable[..., Any]) -> bool:
    """Puts what function does to a call's tensors in the place of the call."""
    tensors = [a for a in node.args if isinstance(a, Node) and isinstance(a.meta["val"], Tensor)]
    values = [tensor.meta["val"] for tensor in tensors]
    with values[0].fake_mode:
        traced = make_fx(function, decomposition_table=select_decomp_table())(*values)
    if any(n.op == "get_attr" for n in traced.graph.nodes) or len(tensors) != len(
        traced.graph.find_nodes(op="placeholder")
    ):
        return False
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True))
    results: Any = None
    context = {k: v for k, v in node.meta.items() if k not in ("val", "eager_input_vals")}
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
                copies[inner].meta = {**context, "val": inner.meta.get("val")}
            elif inner.op == "output":
                results = torch.fx.node.map_arg(inner.args[0], copies.__getitem__)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)
    return True
