"""A loss of a linear layer's output gets its logits back, as torch computes it.

That is for losses that recognition took through their layer and that are better off with the
logits: an unreduced loss whose gradients no forward can compute.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from compile_losses.lower.calls import fused_call, fused_op, named_arguments
from compile_losses.torch_internals.graphs import EAGER_VALUES
from compile_losses.torch_internals.ops import schema_of

aten = torch.ops.aten


def call(op: Any, args: tuple[Any, ...], like: Node, value: Any = None) -> Node:
    """A call where the graph inserts."""
    new = like.graph.call_function(op, args)
    new.meta = {k: v for k, v in like.meta.items() if k not in ("val", EAGER_VALUES)}
    if value is None:
        (fake, *_) = (v for n in new.all_input_nodes if isinstance(v := n.meta["val"], Tensor))
        with fake.fake_mode:  # type: ignore[attr-defined]
            value = op(*map_arg(args, lambda n: n.meta["val"]))
    new.meta["val"] = value
    return new


def put(backward: Node, gradients: dict[Any, Node]) -> None:
    """Puts gradients in the place of those of a backward."""
    for item in list(backward.users):
        item.replace_all_uses_with(gradients[item.args[1]])
        backward.graph.erase_node(item)
    backward.graph.erase_node(backward)


def name_of(node: Node) -> str:
    """The loss that a call of a fused op belongs to."""
    name, _ = fused_call(node) or ("", "")
    return name


def leaf_arguments(node: Node) -> tuple[Any, ...]:
    """Those that a loss's leaf ops share, of a call of any of them."""
    named = named_arguments(node)
    return tuple(named[a.name] for a in schema_of(fused_op(name_of(node), "forward")).arguments)


def take_logits_back(node: Node, backwards: list[Node]) -> None:
    """Losses and gradients of logits that are held, as without this op."""
    graph = node.graph
    input, weight, _, bias, *_ = leaf_arguments(node)
    kind = _CrossEntropy if name_of(node) == "linear_cross_entropy" else _Divergence
    with graph.inserting_before(node):
        loss = kind(node, _linear(node, input, weight, bias))
    node.replace_all_uses_with(loss.value)
    graph.erase_node(node)
    for backward in backwards:
        with graph.inserting_before(backward):
            of_logits = loss.gradient(backward)
            gradients: dict[Any, Node] = {}
            for index in {item.args[1] for item in backward.users}:
                if index == 0:
                    gradients[index] = call(aten.mm.default, (of_logits, weight), backward)
                elif index == 1:
                    rows = call(aten.permute.default, (of_logits, [1, 0]), backward)
                    gradients[index] = call(aten.mm.default, (rows, input), backward)
                else:
                    gradients[index] = call(aten.sum.dim_IntList, (of_logits, [0]), backward)
        put(backward, gradients)


def _linear(node: Node, input: Node, weight: Node, bias: Node | None) -> Node:
    columns = call(aten.permute.default, (weight, [1, 0]), node)
    if bias is None:
        return call(aten.mm.default, (input, columns), node)
    return call(aten.addmm.default, (bias, input, columns), node)


def _results(node: Node, like: Node) -> list[Node]:
    return [call(operator.getitem, (node, i), like, v) for i, v in enumerate(node.meta["val"])]


class _CrossEntropy:
    """Of logits, emitted where the graph inserts.

    Attributes:
        value: the loss of each row.
    """

    def __init__(self, node: Node, logits: Node) -> None:
        _, _, target, _, of_classes, *options = leaf_arguments(node)
        reduction, ignore_index, label_smoothing, self.softcap, _, dtype = options
        if target.meta["val"].dtype != torch.int64:
            target = call(torch.ops.prims.convert_element_type.default, (target, torch.int64), node)
        self.tensors = (logits, target, of_classes)
        self.options = (reduction, ignore_index, label_smoothing)
        args = (*self.tensors, *self.options, dtype, self.softcap)
        forward = call(fused_op("cross_entropy", "forward"), args, node)
        self.value, *self.statistics = _results(forward, node)

    def gradient(self, backward: Node) -> Node:
        args = (backward.args[0], *self.tensors, *self.statistics, *self.options, self.softcap)
        return call(fused_op("cross_entropy", "backward"), args, backward)


class _Divergence:
    """Of logits and a teacher's, likewise."""

    def __init__(self, node: Node, logits: Node) -> None:
        named = named_arguments(node)
        target, weight, bias = (named[n] for n in ("target", "target_weight", "target_bias"))
        teacher = target if weight is None else _linear(node, target, weight, bias)
        self.reverse = bool(named.get("reverse", False))
        own = (named["beta"],) if "beta" in named else ()
        self.pair = (teacher, logits) if self.reverse else (logits, teacher)
        self.options = (named["reduction"], *own, named["temperature"], -1)
        self.name = name_of(node).removeprefix("linear_")
        forward = call(
            fused_op(self.name, "forward"), (*self.pair, *self.options, named["dtype"]), node
        )
        self.value, self.statistics = _results(forward, node)

    def gradient(self, backward: Node) -> Node:
        needs = (not self.reverse, self.reverse)
        args = (backward.args[0], *self.pair, self.statistics, *self.options, *needs)
        both = call(fused_op(self.name, "backward"), args, backward)
        index = int(self.reverse)
        return call(operator.getitem, (both, index), backward, both.meta["val"][index])
