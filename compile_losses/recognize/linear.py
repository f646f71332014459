"""Cross entropy of a linear layer's output: both in one op, which never holds the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.chunk_size import chunk_rows
from compile_losses.recognize.guards import refusal
from compile_losses.recognize.logits import Logits, NotAbsorbedError, find_logits, is_product
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.shadow import Shadow, compute
from compile_losses.recognize.values import Value

aten = torch.ops.aten


def through_linear(match: Match, shadow: Shadow) -> Match:
    """A match of cross entropy, taken back through the linear layer that makes its logits.

    Returns:
        A match of linear_cross_entropy, or the given one, with the reason noted where there is a
        linear layer that can't be taken along.
    """
    if match.op != "cross_entropy" or refusal(match) is not None:
        return match
    try:
        logits = find_logits(match, shadow)
        if logits is None:
            return match
        _check_gain(match, logits)
        found = _match(match, logits)
        reason = refusal(found)
        if reason is None:
            return found
    except NotAbsorbedError as error:
        reason = str(error)
    match.notes.append(f"without its linear layer: {reason}")
    return match


def _check_gain(match: Match, logits: Logits) -> None:
    """Linear layer and loss together pay where a chunk is at most half of the logits.

    They take more launches than a kernel over the logits of one large product.
    """
    target, output = example(match.args[1]), example(logits.linear)
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise NotAbsorbedError("the target is not class indices")
    needs_grad = output.requires_grad
    output = getattr(output, "_local_tensor", output)  # of a DTensor the shard is what is held
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
    chunk = chunk_rows(hint, hidden, classes, output.dtype)
    if 2 * chunk > hint:
        size = hint * classes * output.dtype.itemsize / 2**20
        told = f"its {size:.1f} MiB of logits are one chunk: nothing is saved"
        if chunk < hint:
            told = f"chunks of its {size:.1f} MiB of logits would save less than half of them"
        raise NotAbsorbedError(told)


def _match(match: Match, logits: Logits) -> Match:
    """The match of both."""
    input, linear_weight, linear_bias = _operands(logits.linear)
    dtype = example(logits.linear).dtype
    input, linear_weight = _cast(input, dtype), _cast(linear_weight, dtype)
    linear_bias = linear_bias and _cast(linear_bias, dtype)
    if logits.factor != 1:
        input = _computed(aten.mul.Tensor, input, logits.factor)
        linear_bias = linear_bias and _computed(aten.mul.Tensor, linear_bias, logits.factor)
    for op, arguments in logits.moves:
        if op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            hidden = input.fake.shape[-1]
            input = _computed(aten.reshape.default, input, [*arguments[0], hidden])
        else:
            input = _computed(op, input, *arguments)
    rank = input.fake.dim()
    if logits.class_dim != (0 if rank == 1 else 1):
        raise NotAbsorbedError("its classes are not those of the loss")
    if rank > 2:
        input = _computed(aten.permute.default, input, [0, *range(2, rank), 1])
    _, target, weight, reduction, ignore_index, label_smoothing = match.args
    kwargs = {
        "linear_bias": linear_bias and linear_bias.argument,
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": logits.softcap,
        "dtype": _loss_dtype(match),
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
        (input.argument, linear_weight.argument, target),
        {name: value for name, value in kwargs.items() if value is not None},
        list(dict.fromkeys([*match.interior, *reversed(logits.nodes), logits.linear])),
        absorbed,
        match.steps,
        match.notes,
    )


def _loss_dtype(match: Match) -> torch.dtype:
    """The dtype of the cross entropy itself; the root's may come from the steps after it."""
    if not match.steps:
        return example(match.root).dtype  # float32 under autocast
    return match.kwargs.get("dtype", example(match.args[0]).dtype)


def _operands(linear: Node) -> tuple[Value, Value, Value | None]:
    names = ("input", "weight", "bias")
    given: dict[str, Any] = {**dict(zip(names, linear.args, strict=False)), **linear.kwargs}
    input, weight, bias = (given.get(name) for name in names)
    if not isinstance(input, Node) or not isinstance(weight, Node):
        raise NotAbsorbedError("its arguments are not those of a linear layer")
    if example(weight).dim() != 2 or not isinstance(bias, Node | None):
        raise NotAbsorbedError("its arguments are not those of a linear layer")
    linear_weight = _value(weight)
    if is_product(linear):
        linear_weight = _computed(aten.t.default, linear_weight)
    return _value(input), linear_weight, None if bias is None else _value(bias)


def _value(node: Node) -> Value:
    return Value(example(node), node, whole=True)


def _cast(value: Value, dtype: torch.dtype) -> Value:
    """An argument as the layer reads it: autocast casts each that has another dtype."""
    return value if value.fake.dtype == dtype else _computed(aten.to.dtype, value, dtype)


def _computed(op: Any, *args: Any) -> Value:
    value = compute(op, *args)
    if value is None:
        raise NotAbsorbedError(f"{op} can't be done before it")
    return value
