"""A loss of a linear layer's output gets its logits back, as torch computes it.

That is for a loss which recognition took with its layer and which is faster with its logits: an
unreduced loss whose gradients no forward can compute.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from compile_losses.lower.fused_calls import fused_call, fused_op
from compile_losses.lower.row_gradients import values_of
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.row_divergences import Pair
from compile_losses.ops.linear.row_statistics import DIVERGENCE, ENTROPY
from compile_losses.ops.linear_row_statistics import TEACHER, pair_of
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
    """Replaces the gradients of a backward."""
    for item in list(backward.users):
        item.replace_all_uses_with(gradients[item.args[1]])
        backward.graph.erase_node(item)
    backward.graph.erase_node(backward)


def put_values(node: Node, values: Sequence[Node | None]) -> None:
    """Replaces the one or several results of a call by values.

    Args:
        values: None where nobody reads it.
    """
    replaced = {node: values[0]}
    if len(values) > 1:
        replaced = {item: values[item.args[1]] for item in node.users}  # type: ignore[index]
    for old, value in replaced.items():
        if value is not None:
            old.replace_all_uses_with(value)
    for old in {**replaced, node: None}:
        node.graph.erase_node(old)


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
        values: the loss of each row, or all that is computed of it; None for what is empty.
    """

    values: list[Node | None]

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
        loss, stats, total_weight = _results(forward, node)
        self.values = [loss]
        self.statistics = (stats, total_weight)

    def gradient(self, backward: Node) -> Node:
        args = (backward.args[0], *self.tensors, *self.statistics, *self.options, self.softcap)
        return call(fused_op("cross_entropy", "backward"), args, backward)


class _Statistics(_Losses):
    """All statistics of each row of logits."""

    def __init__(self, node: Node, logits: Node) -> None:
        named = named_arguments(node)
        self.logits, self.target, self.picks = logits, named["target"], named["picks"]
        self.options = (named["ignore_index"], named["softcap"])
        args = (logits, self.target, *self.options)
        forward = call(fused_op("row_statistics", "forward"), args, node)
        *values, self.stats = _results(forward, node)
        self.compared: _Compared | None = None
        pair = pair_of(named["divergence"], named["beta"], named["temperature"])
        if pair is not None:
            layer, softcap = (named[name] for name in TEACHER), named["teacher_softcap"]
            student, self.tanh = _capped(node, logits, named["softcap"])
            teacher, _ = _capped(node, _teacher(node, *layer), softcap)
            options = (REDUCTIONS["none"], values_of(node)[DIVERGENCE].dtype)
            self.compared = _Compared(pair, student, teacher, *options, node)
        loss = None if self.compared is None else self.compared.loss
        if loss is not None and named["divergence"] == "cross_entropy":
            args = (teacher, None, named["ignore_index"], None)
            of_teacher = call(fused_op("row_statistics", "forward"), args, node)
            loss = call(aten.add.Tensor, (loss, _results(of_teacher, node)[ENTROPY]), node)
        log_probs = None
        if self.picks is not None:
            args = (logits, self.picks, self.stats, named["softcap"])
            log_probs = call(fused_op("row_picks", "forward"), args, node)
        self.values = [*values[:DIVERGENCE], loss, log_probs, None, *values[DIVERGENCE:]]

    def gradient(self, backward: Node) -> Node:
        *given, of_divergence, of_picks = grad_outputs_of(backward)
        parts = []
        if self.picks is not None and of_picks is not None:
            args = (of_picks, *given, self.logits, self.picks, self.target, self.stats)
            op = fused_op("row_picks", "backward")
            parts.append(call(op, (*args, *self.options), backward))
        elif any(gradient is not None for gradient in given):
            args = (*given, self.logits, self.target, self.stats, *self.options)
            parts.append(call(fused_op("row_statistics", "backward"), args, backward))
        if self.compared is not None and of_divergence is not None:
            of_student = self.compared.gradient(of_divergence, backward)
            if self.tanh is not None:
                args = (of_student, self.tanh)
                of_student = call(aten.tanh_backward.default, args, backward)
            parts.append(of_student)
        return parts[0] if len(parts) == 1 else call(aten.add.Tensor, tuple(parts), backward)


class _Divergence(_Losses):
    """Of logits and a teacher's."""

    def __init__(self, node: Node, logits: Node) -> None:
        named = named_arguments(node)
        layer = (named[name] for name in ("target", "target_weight", "target_bias"))
        teacher, _ = _capped(node, _teacher(node, *layer), named["target_softcap"])
        logits, self.tanh = _capped(node, logits, named["softcap"])
        own = (named["beta"],) if "beta" in named else ()
        pair = Pair(
            name_of(node).removeprefix("linear_"),
            bool(named.get("reverse", False)),
            (*own, named["temperature"]),
        )
        options = (named["reduction"], named["dtype"])
        self.compared = _Compared(pair, logits, teacher, *options, node)
        self.values = [self.compared.loss]

    def gradient(self, backward: Node) -> Node:
        of_student = self.compared.gradient(backward.args[0], backward)
        if self.tanh is None:
            return of_student
        return call(aten.tanh_backward.default, (of_student, self.tanh), backward)


class _Compared:
    """A divergence of logits from a teacher's, emitted where the graph inserts.

    Attributes:
        loss: as its reduction says.
    """

    def __init__(
        self,
        pair: Pair,
        logits: Node,
        teacher: Node,
        reduction: int,
        dtype: torch.dtype,
        node: Node,
    ) -> None:
        self.pair, self.rows = pair, pair.ordered(logits, teacher)
        self.options = (reduction, *pair.options, -1)
        forward = call(pair.op("forward"), (*self.rows, *self.options, dtype), node)
        self.loss, self.statistics = _results(forward, node)

    def gradient(self, grad_output: Any, backward: Node) -> Node:
        """Of the logits."""
        needs = (not self.pair.reverse, self.pair.reverse)
        args = (grad_output, *self.rows, self.statistics, *self.options, *needs)
        both = call(self.pair.op("backward"), args, backward)
        index = int(self.pair.reverse)
        return call(operator.getitem, (both, index), backward, both.meta["val"][index])


def _capped(node: Node, logits: Node, softcap: float | None) -> tuple[Node, Node | None]:
    """Logits with a soft-cap, and the tanh that is in it."""
    if softcap is None:
        return logits, None
    tanh = call(aten.tanh.default, (call(aten.div.Tensor, (logits, softcap), node),), node)
    return call(aten.mul.Tensor, (tanh, softcap), node), tanh


def _teacher(node: Node, target: Node, weight: Node | None, bias: Node | None) -> Node:
    """A teacher's logits, given or computed."""
    return target if weight is None else _linear(node, target, weight, bias)


_KINDS: dict[str, type[_Losses]] = {
    "linear_cross_entropy": _CrossEntropy,
    "linear_row_statistics": _Statistics,
}
