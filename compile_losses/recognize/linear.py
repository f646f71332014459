"""Cross entropy of a linear layer's output: both in one op, which never holds the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg

from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.chunk_size import chunk_rows
from compile_losses.recognize.guards import refusal
from compile_losses.recognize.logits import Logits, NotAbsorbedError, find_logits, is_product
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.shadow import Shadow

aten = torch.ops.aten


def through_linear(match: Match, shadow: Shadow) -> Match:
    """A match of cross entropy, taken back through the linear layer that makes its logits.

    Returns:
        A match of linear_cross_entropy, or the given one, with the reason noted where there is a
        linear layer that can't be taken along.
    """
    if match.op != "cross_entropy" or refusal(match) is not None:
        return match
    added: list[Node] = []
    try:
        logits = find_logits(match, shadow)
        if logits is None:
            return match
        _check_gain(match, logits)
        found = _match(match, logits, added)
        reason = refusal(found)
        if reason is None:
            return found
    except NotAbsorbedError as error:
        reason = str(error)
    for node in reversed(added):
        node.graph.erase_node(node)
    match.notes.append(f"without its linear layer: {reason}")
    return match


def _check_gain(match: Match, logits: Logits) -> None:
    """Linear layer and loss together pay where the logits are more than one chunk of rows."""
    target, output = example(match.args[1]), example(logits.linear)
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise NotAbsorbedError("the target is not class indices")
    needs_grad = output.requires_grad
    if needs_grad and match.args[3] == REDUCTIONS["none"]:
        raise NotAbsorbedError("the gradients of an unreduced loss would need the logits twice")
    if needs_grad and output.dtype == torch.float16:
        raise NotAbsorbedError("gradients in float16 would need the logits twice")
    hidden = example(logits.linear.args[0]).shape[-1]
    classes = output.shape[-1]
    rows = output.numel() // classes if isinstance(classes, int) and classes else 0
    hint = rows if isinstance(rows, int) else rows.node.hint
    if not isinstance(hidden, int) or not isinstance(classes, int) or hint is None:
        raise NotAbsorbedError("its sizes are not known")
    if chunk_rows(hint, hidden, classes, output.dtype) >= hint:
        size = hint * classes * output.dtype.itemsize / 2**20
        raise NotAbsorbedError(f"its {size:.1f} MiB of logits are one chunk: nothing is saved")


def _match(match: Match, logits: Logits, added: list[Node]) -> Match:
    """The match of both, with the nodes that it needs added before the root."""
    build = _Builder(match.root, added)
    input, linear_weight, linear_bias = _operands(logits.linear, build)
    dtype = example(logits.linear).dtype
    if dtype != example(input).dtype:  # the layer is under autocast
        input = build(aten._to_copy.default, input, dtype=dtype)
        linear_weight = build(aten._to_copy.default, linear_weight, dtype=dtype)
        linear_bias = linear_bias and build(aten._to_copy.default, linear_bias, dtype=dtype)
    if logits.factor != 1:
        input = build(aten.mul.Tensor, input, logits.factor)
        linear_bias = linear_bias and build(aten.mul.Tensor, linear_bias, logits.factor)
    for op, arguments in logits.moves:
        if op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            hidden = example(input).shape[-1]
            input = build(aten.reshape.default, input, [*arguments[0], hidden])
        else:
            input = build(op, input, *arguments)
    rank = example(input).dim()
    if logits.class_dim != (0 if rank == 1 else 1):
        raise NotAbsorbedError("its classes are not those of the loss")
    if rank > 2:
        input = build(aten.permute.default, input, [0, *range(2, rank), 1])
    _, target, weight, reduction, ignore_index, label_smoothing = match.args
    kwargs = {
        "linear_bias": linear_bias,
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": logits.softcap,
        "dtype": example(match.root).dtype,
    }
    absorbed = ["a linear layer", *match.absorbed]
    if logits.cast is not None:
        absorbed.append(f"a cast from {str(dtype).removeprefix('torch.')}")
    if logits.factor != 1:
        absorbed.append(f"a factor of {logits.factor:g}")
    if logits.softcap is not None:
        absorbed.append(f"a soft-cap of {logits.softcap:g}")
    return Match(
        match.root,
        "linear_cross_entropy",
        (input, linear_weight, target),
        {name: value for name, value in kwargs.items() if value is not None},
        [*match.interior, *reversed(logits.nodes), logits.linear],
        absorbed,
        match.steps,
        match.notes,
    )


def _operands(linear: Node, build: _Builder) -> tuple[Node, Node, Node | None]:
    names = ("input", "weight", "bias")
    given: dict[str, Any] = {**dict(zip(names, linear.args, strict=False)), **linear.kwargs}
    input, weight, bias = (given.get(name) for name in names)
    if not isinstance(input, Node) or not isinstance(weight, Node):
        raise NotAbsorbedError("its arguments are not those of a linear layer")
    if example(weight).dim() != 2 or not isinstance(bias, Node | None):
        raise NotAbsorbedError("its arguments are not those of a linear layer")
    for node in (input, weight, bias):  # they are read later than the layer read them
        if node is not None and (example(node).is_inference() or example(node)._version > 0):
            raise NotAbsorbedError(f"{node.name} may be changed in place in this graph")
    if is_product(linear):
        weight = build(aten.t.default, weight)
    return input, weight, bias


class _Builder:
    """Adds calls before a node, with the values that tracing would have recorded."""

    def __init__(self, root: Node, added: list[Node]) -> None:
        self.root, self.added = root, added

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        with self.root.graph.inserting_before(self.root):
            node = self.root.graph.call_function(op, args, kwargs)
        self.added.append(node)
        node.meta = {k: v for k, v in self.root.meta.items() if k != "example_value"}
        values, keywords = map_arg((args, kwargs), example)
        with next(v for v in values if isinstance(v, FakeTensor)).fake_mode:
            node.meta["example_value"] = op(*values, **keywords)
        return node
