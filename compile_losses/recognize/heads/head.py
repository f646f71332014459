"""The linear layer that makes logits, in any spelling."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.recognize.graph.aten_replay import aten, compute
from compile_losses.recognize.graph.autocast import autocast_dtype, cast_by
from compile_losses.recognize.graph.symbolic_tensors import Value, whole
from compile_losses.recognize.match import example
from compile_losses.torch_internals.ops import nn_functions

_LINEAR = (nn_functions.linear, torch.nn.functional.linear, aten.linear.default)
#: input @ weight.t(); as methods, by their names.
_PRODUCTS = (
    *(operator.matmul, torch.matmul, torch.mm, aten.matmul.default, aten.mm.default),
    *("matmul", "mm", "__matmul__"),
)
_INNER = (torch.inner, aten.inner.default, "inner")
_ADDMM = (torch.addmm, aten.addmm.default, "addmm")
_EINSUM = (torch.einsum, torch.functional.einsum, aten.einsum.default)


class NotAbsorbedError(Exception):
    """Why a linear layer can't be computed together with the loss of its output."""


@dataclass
class Head:
    """``input @ weight.t() + bias``: [..., hidden], [classes, hidden] and None or [classes].

    Attributes:
        node: the one that holds the result.
    """

    node: Node
    input: Value
    weight: Value
    bias: Value | None


def find_head(node: Node) -> Head | None:
    """The linear layer whose output a node holds, its arguments in the output's dtype; None if it
    is no layer's.

    Raises:
        NotAbsorbedError: torch refuses the arguments' dtypes when it runs the layer, as its fakes
            do not. Autocast casts each argument of another dtype.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    found = _operands(node)
    if found is None:
        return None
    (input, weight, bias), dtype = found, example(node).dtype
    _check_dtypes(node, [part.fake.dtype for part in found if part is not None])
    return Head(node, _cast(input, dtype), _cast(weight, dtype), bias and _cast(bias, dtype))


def _check_dtypes(node: Node, dtypes: list[torch.dtype]) -> None:
    """Raises NotAbsorbedError for operands of several dtypes that no autocast makes one."""
    if len(set(dtypes)) == 1:
        return
    autocast = autocast_dtype(node, example(node).device.type)
    if len({cast_by(autocast, dtype) for dtype in dtypes}) > 1:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise NotAbsorbedError(f"a linear layer of {names} without autocast, which torch refuses")


def _operands(node: Node) -> tuple[Value, Value, Value | None] | None:
    """Input, weight as [classes, hidden] and bias of a layer; None if a node is no layer."""
    target: Any = node.target
    if target in _LINEAR:
        return _linear(node)
    if target in _EINSUM:
        return _einsum(node)
    if target in _ADDMM:
        operands = _tensors(node, 3)
        if not operands or operands[0].fake.dim() != 1:
            return None
        bias, input, weight = operands
        return input, computed(aten.t.default, weight), bias
    if target not in _PRODUCTS and target not in _INNER:
        return None
    operands = _tensors(node, 2)
    if not operands or operands[1].fake.dim() != 2:
        return None
    input, weight = operands
    return input, weight if target in _INNER else computed(aten.t.default, weight), None


def _linear(node: Node) -> tuple[Value, Value, Value | None]:
    """The same of a call of ``linear``.

    Raises:
        NotAbsorbedError: its arguments are not those of a layer.
    """
    names = ("input", "weight", "bias")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    input, weight, bias = (given.get(name) for name in names)
    if not isinstance(input, Node) or not isinstance(weight, Node):
        raise NotAbsorbedError("its arguments are not those of a linear layer")
    if example(weight).dim() != 2 or not isinstance(bias, Node | None):
        raise NotAbsorbedError("its arguments are not those of a linear layer")
    return whole(input), whole(weight), None if bias is None else whole(bias)


def _einsum(node: Node) -> tuple[Value, Value, Value | None] | None:
    """``bth,vh->btv``, and ``...h,vh->...v``: the last dimension becomes the classes. None of
    another equation."""
    equation, *given = node.args
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = list(given[0])
    if not isinstance(equation, str) or len(given) != 2:
        return None
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not all(isinstance(argument, Node) for argument in given):
        return None
    tensors = [
        (term, whole(n)) for term, n in zip(terms, given, strict=True) if isinstance(n, Node)
    ]
    for (of_input, input), (of_weight, weight) in (tensors, tensors[::-1]):
        rows, hidden, classes = of_input[:-1], of_input[-1:], result[-1:]
        names = rows.replace("...", "") + hidden + classes
        if result != rows + classes or len(set(names)) != len(names) or weight.fake.dim() != 2:
            continue
        if of_weight == hidden + classes:
            return input, computed(aten.t.default, weight), None
        if of_weight == classes + hidden:
            return input, weight, None
    return None


def _tensors(node: Node, many: int) -> list[Value]:
    """The arguments of a node that takes so many tensors and nothing else."""
    nodes = [argument for argument in node.args if isinstance(argument, Node)]
    if len(node.args) != many or len(nodes) != many or node.kwargs:
        return []
    if not all(isinstance(example(argument), Tensor) for argument in nodes):
        return []
    return [whole(argument) for argument in nodes]


def _cast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.fake.dtype == dtype else computed(aten.to.dtype, value, dtype)


def computed(op: Any, *args: Any) -> Value:
    """The result of an op, which the rewrite computes ahead of the loss.

    Raises:
        NotAbsorbedError: the op refuses its arguments.
    """
    value = compute(op, *args)
    if value is None:
        raise NotAbsorbedError(f"{op} refuses what would be computed before the loss")
    return value
