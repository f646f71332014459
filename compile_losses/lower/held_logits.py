"""A loss of a linear layer's output gets its logits back, as torch computes it.

That is for losses that recognition took through their layer and that are better off with the
logits: an unreduced loss whose gradients no forward can compute.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from compile_losses.lower.calls import fused_call, fused_op
from compile_losses.torch_internals.graphs import EAGER_VALUES
from compile_losses.torch_internals.ops import named_arguments, schema_of

aten = torch.ops.aten

_NEEDS = ("needs_grad_input", "needs_grad_linear_weight", "needs_grad_linear_bias")


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


def put_values(node: Node, values: Sequence[Node]) -> None:
    """Puts values in the place of what a call computes of each row, one or several."""
    if len(values) == 1:
        node.replace_all_uses_with(values[0])
    for item in list(node.users):
        item.replace_all_uses_with(values[item.args[1]])  # type: ignore[index]
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def grad_outputs_of(backward: Node) -> list[Node | None]:
    """The gradients that a backward is given of what its forward computes of each row."""
    count = len(schema_of(backward.target).arguments)
    count -= len(leaf_arguments(backward)) + len(_NEEDS)
    return list(backward.args[:count])  # type: ignore[arg-type]


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
    kind = _KINDS.get(name_of(node), _Divergence)
    with graph.inserting_before(node):
        loss: _Losses = kind(node, _linear(node, input, weight, bias))
    put_values(node, loss.values)
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


class _Losses:
    """Of logits, emitted where the graph inserts.

    Attributes:
        values: the loss of each row, or all that is computed of it.
    """

    values: list[Node]

    def __init__(self, node: Node, logits: Node) -> None:
        raise NotImplementedError

    def gradient(self, backward: Node) -> Node:
        """Of the logits."""
        raise NotImplementedError


class _CrossEntropy(_Losses):
    """Of logits and class indices."""

    def __init__(self, node: Node, logits: Node) -> None:
        _, _, target, _, of_classes, *options = leaf_arguments(node)
        reduction, ignore_index, label_smoothing, self.softcap, _, dtype = options
        if target.meta["val"].dtype != torch.int64:
            target = call(torch.ops.prims.convert_element_type.default, (target, torch.int64), node)
        self.tensors = (logits, target, of_classes)
        self.options = (reduction, ignore_index, label_smoothing)
        args = (*self.tensors, *self.options, dtype, self.softcap)
        forward = call(fused_op("cross_entropy", "forward"), args, node)
        *self.values, stats, total_weight = _results(forward, node)
        self.statistics = (stats, total_weight)

    def gradient(self, backward: Node) -> Node:
        args = (backward.args[0], *self.tensors, *self.statistics, *self.options, self.softcap)
        return call(fused_op("cross_entropy", "backward"), args, backward)


class _Statistics(_Losses):
    """All statistics of each row of logits."""

    def __init__(self, node: Node, logits: Node) -> None:
        _, _, target, _, *options = leaf_arguments(node)
        self.logits, self.target, self.options = logits, target, options
        forward = call(fused_op("row_statistics", "forward"), (logits, target, *options), node)
        *self.values, self.stats = _results(forward, node)

    def gradient(self, backward: Node) -> Node:
        args = (self.logits, self.target, self.stats, *self.options)
        return call(
            fused_op("row_statistics", "backward"), (*grad_outputs_of(backward), *args), backward
        )


class _Divergence(_Losses):
    """Of logits and a teacher's."""

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
        *self.values, self.statistics = _results(forward, node)

    def gradient(self, backward: Node) -> Node:
        needs = (not self.reverse, self.reverse)
        args = (backward.args[0], *self.pair, self.statistics, *self.options, *needs)
        both = call(fused_op(self.name, "backward"), args, backward)
        index = int(self.reverse)
        return call(operator.getitem, (both, index), backward, both.meta["val"][index])


_KINDS: dict[str, type[_Losses]] = {
    "linear_cross_entropy": _CrossEntropy,
    "linear_row_statistics": _Statistics,
}
