"""A loss of a linear layer's output gets its logits back, as torch computes it.

That is for a loss which recognition took with its layer and which is faster with its logits: an
unreduced loss whose gradients no forward can compute.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import emit, replace
from compile_losses.lower.fused_calls import fused_call, fused_op
from compile_losses.lower.row_gradients import values_of
from compile_losses.ops import row_numbers
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.row_divergences import Pair
from compile_losses.ops.linear.row_statistics import DIVERGENCE, ENTROPY, TOP_VALUES
from compile_losses.ops.linear_row_statistics import TEACHER, pair_of
from compile_losses.torch_internals.ops import named_arguments, schema_of

aten = torch.ops.aten


def grad_outputs_of(backward: Node) -> list[Node | None]:
    """The gradients that a backward is given of what its forward computes of each row."""
    names = [argument.name for argument in schema_of(backward.target).arguments]
    return list(backward.args[: names.index("input")])  # type: ignore[arg-type]


def name_of(node: Node) -> str:
    """The loss that a call of a fused op belongs to."""
    name, _ = fused_call(node) or ("", "")
    return name


def leaf_arguments(node: Node) -> tuple[Any, ...]:
    """Those that a loss's leaf ops share, of a call of any of them."""
    named = named_arguments(node)
    names = [a.name for a in schema_of(fused_op(name_of(node), "forward")).arguments]
    return tuple(named[name] for name in names if name != "counted")


def take_logits_back(node: Node, backwards: list[Node]) -> None:
    """Losses and gradients of logits that are held, as without this op."""
    input, weight, _, bias, *_ = leaf_arguments(node)
    kind = _KINDS.get(name_of(node), _Divergence)
    scale = named_arguments(node).get("scale", 1.0)
    loss: _Losses = kind(node, _linear(node, input, weight, bias, scale))
    (first, *others) = loss.values
    replace(node, loss.values if others or first is None else first)
    for backward in backwards:
        of_logits = loss.gradient(backward)
        gradients: dict[Any, Node] = {}
        for index in {item.args[1] for item in backward.users}:
            if index == 0:
                gradients[index] = emit(backward, aten.mm.default, (of_logits, weight))
            elif index == 1:
                rows = emit(backward, aten.permute.default, (of_logits, [1, 0]))
                gradients[index] = emit(backward, aten.mm.default, (rows, input))
            else:
                gradients[index] = emit(backward, aten.sum.dim_IntList, (of_logits, [0]))
        replace(backward, gradients)


def _linear(node: Node, input: Node, weight: Node, bias: Node | None, scale: float = 1.0) -> Node:
    """A layer's output times a scale, which is rounded once."""
    columns = emit(node, aten.permute.default, (weight, [1, 0]))
    if bias is None and scale == 1:
        return emit(node, aten.mm.default, (input, columns))
    factors = {} if scale == 1 else {"beta": scale, "alpha": scale}
    if bias is None:
        value = weight.meta["val"]
        like = {"dtype": value.dtype, "device": value.device}
        bias = emit(node, aten.full.default, ([value.shape[0]], 0), like)
    return emit(node, aten.addmm.default, (bias, input, columns), factors)


def results_of(node: Node, place: Node) -> list[Node]:
    """The results of a call with several, emitted before a node."""
    values = enumerate(node.meta["val"])
    return [emit(place, operator.getitem, (node, i), value=value) for i, value in values]


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
            target = emit(node, torch.ops.prims.convert_element_type.default, (target, torch.int64))
        self.tensors = (logits, target, of_classes)
        self.options = (reduction, ignore_index, label_smoothing)
        args = (*self.tensors, *self.options, dtype, self.softcap)
        forward = emit(node, fused_op("cross_entropy", "forward"), args)
        loss, stats, total_weight = results_of(forward, node)
        self.values = [loss]
        self.statistics = (stats, total_weight)

    def gradient(self, backward: Node) -> Node:
        args = (backward.args[0], *self.tensors, *self.statistics, *self.options, self.softcap)
        return emit(backward, fused_op("cross_entropy", "backward"), args)


class _Statistics(_Losses):
    """All statistics of each row of logits."""

    def __init__(self, node: Node, logits: Node) -> None:
        named = named_arguments(node)
        self.logits, self.target, self.picks = logits, named["target"], named["picks"]
        self.scale: float = named["scale"]
        self.options = (named["ignore_index"], named["softcap"])
        rows = (logits, self.target, *self.options, named["squares"])
        forward = emit(node, fused_op("row_statistics", "forward"), rows)
        *values, self.stats, log_squares = results_of(forward, node)
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
            of_teacher = emit(node, fused_op("row_statistics", "forward"), args)
            loss = emit(node, aten.add.Tensor, (loss, results_of(of_teacher, node)[ENTROPY]))
        log_probs = None
        if self.picks is not None:
            args = (logits, self.picks, self.stats, named["softcap"])
            log_probs = emit(node, fused_op("row_picks", "forward"), args)
        variance = None
        if named["variance"]:
            of_rows, _ = _capped(node, logits, named["softcap"])
            cast = torch.ops.prims.convert_element_type.default
            wide = emit(node, cast, (of_rows, self.stats.meta["val"].dtype))
            variance = emit(node, aten.var.correction, (wide, [1]), {"correction": 0})
        numbers = _numbers(node, logits, named)
        more = (loss, log_probs, log_squares, variance, *numbers)
        self.values = [*values[:DIVERGENCE], *more, *values[DIVERGENCE:]]

    def gradient(self, backward: Node) -> Node:
        *given, of_divergence, of_picks = (
            each
            if each is None or self.scale == 1
            else emit(backward, aten.mul.Tensor, (each, self.scale))
            for each in grad_outputs_of(backward)
        )
        parts = []
        if self.picks is not None and of_picks is not None:
            args = (of_picks, *given, self.logits, self.picks, self.target, self.stats)
            op = fused_op("row_picks", "backward")
            parts.append(emit(backward, op, (*args, *self.options)))
        elif any(gradient is not None for gradient in given):
            args = (*given, self.logits, self.target, self.stats, *self.options)
            parts.append(emit(backward, fused_op("row_statistics", "backward"), args))
        if self.compared is not None and of_divergence is not None:
            of_student = self.compared.gradient(of_divergence, backward)
            if self.tanh is not None:
                args = (of_student, self.tanh)
                of_student = emit(backward, aten.tanh_backward.default, args)
            parts.append(of_student)
        return parts[0] if len(parts) == 1 else emit(backward, aten.add.Tensor, tuple(parts))


def _numbers(node: Node, logits: Node, named: dict[str, Any]) -> list[Node | None]:
    """What has no gradient of each row: the rank, the largest logits, and their classes."""
    ranked, top_k, softcap = (named[name] for name in ("ranked", "top_k", "softcap"))
    found: list[Node | None] = [None] * 3
    if ranked is None and not top_k:
        return found
    dtype = values_of(node)[TOP_VALUES].dtype

    def call(op: Any, *arguments: Any) -> Any:
        made = emit(node, op, arguments)
        return results_of(made, node) if isinstance(made.meta["val"], tuple | list) else made

    if softcap is not None:
        wide = call(torch.ops.prims.convert_element_type.default, logits, dtype)
        logits, _ = _capped(node, wide, softcap)
    if ranked is not None:
        found[0] = row_numbers.rank_of(logits, ranked, named["ties"], call)
    if top_k:
        values, found[2] = row_numbers.top_of(logits, top_k, call)
        found[1] = call(torch.ops.prims.convert_element_type.default, values, dtype)
    return found


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
        return emit(backward, aten.tanh_backward.default, (of_student, self.tanh))


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
        forward = emit(node, pair.op("forward"), (*self.rows, *self.options, dtype))
        self.loss, self.statistics = results_of(forward, node)

    def gradient(self, grad_output: Any, backward: Node) -> Node:
        """Of the logits."""
        needs = (not self.pair.reverse, self.pair.reverse)
        args = (grad_output, *self.rows, self.statistics, *self.options, *needs)
        both = emit(backward, self.pair.op("backward"), args)
        index = int(self.pair.reverse)
        return emit(backward, operator.getitem, (both, index), value=both.meta["val"][index])


def _capped(node: Node, logits: Node, softcap: float | None) -> tuple[Node, Node | None]:
    """Logits with a soft-cap, and the tanh that is in it."""
    if softcap is None:
        return logits, None
    tanh = emit(node, aten.tanh.default, (emit(node, aten.div.Tensor, (logits, softcap)),))
    return emit(node, aten.mul.Tensor, (tanh, softcap)), tanh


def _teacher(node: Node, target: Node, weight: Node | None, bias: Node | None) -> Node:
    """A teacher's logits, given or computed."""
    return target if weight is None else _linear(node, target, weight, bias)


_KINDS: dict[str, type[_Losses]] = {
    "linear_cross_entropy": _CrossEntropy,
    "linear_row_statistics": _Statistics,
}
