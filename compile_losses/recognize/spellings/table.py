"""The table of losses that are one call: torch.nn.functional's and ATen's, with every option.

A row says which functions mean the loss, and how their arguments, bound to names, become those of
the fused op. A loss without an op is a row as well, so that the report can say why it has none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from compile_losses.ops.checks import REDUCTIONS
from compile_losses.recognize.match import Decline, Match, example
from compile_losses.recognize.spellings.absorb import absorb
from compile_losses.torch_internals.ops import legacy_get_string, nn_functions, schema_of

Arguments = Mapping[str, Any]


class UnsupportedError(Exception):
    """A loss whose options the fused op does not have; the message says which."""


@dataclass(frozen=True)
class Loss:
    """A row of the table.

    Attributes:
        name: the op's name, and that of torch.nn.functional's function.
        aten: the name of the ATen op.
        convert: from bound arguments to the op's positional and keyword arguments; raises
            UnsupportedError. None if there is no op.
        without: why there is none.
    """

    name: str
    aten: str
    convert: Callable[[Arguments], tuple[tuple[Any, ...], dict[str, Any]]] | None
    without: str = ""

    @property
    def functions(self) -> dict[Any, inspect.Signature]:
        """Every callable that a graph may hold for this loss, with its signature."""
        functional = getattr(F, self.name)
        found = {functional: inspect.signature(functional)}
        packet = getattr(torch.ops.aten, self.aten)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if not schema_of(op).is_mutable:
                found[op] = _signature(schema_of(op))
        found[packet] = _signature(schema_of(packet.default))
        for module in (nn_functions, torch):
            if hasattr(module, self.aten):
                found[getattr(module, self.aten)] = found[packet]
        return found


def _signature(schema: Any) -> inspect.Signature:
    """The signature of an op, whose first argument is called input as in torch.nn.functional."""
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    return inspect.Signature(
        [
            inspect.Parameter(
                "input" if argument.name == "self" else argument.name,
                kinds[argument.kwarg_only],
                default=argument.default_value
                if argument.has_default_value()
                else inspect.Parameter.empty,
            )
            for argument in schema.arguments
        ]
    )


def reduction_of(arguments: Arguments) -> int:
    """The reduction as the ops spell it, torch's legacy arguments included."""
    value = arguments["reduction"]
    size_average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if size_average is not None or reduce is not None:
        if value == "batchmean":
            raise UnsupportedError(
                "size_average or reduce together with reduction='batchmean': without them it has "
                "an op"
            )
        value = legacy_get_string(size_average, reduce, emit_warning=False)
    if isinstance(value, int):
        return value
    if value not in REDUCTIONS:
        raise UnsupportedError(f"reduction={value!r}")
    return REDUCTIONS[value]


def _element_weight(a: Arguments, reduction: int, *, normalizes: bool) -> dict[str, Any]:
    """The weight of each element, under torch's conditions."""
    weight = a.get("weight")
    if weight is None:
        return {}
    values = [example(a[name]) for name in ("input", "target", "weight")]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise UnsupportedError("weight is not a tensor of the graph")
    input, target, given = (value.shape for value in values)
    if given != input:
        raise UnsupportedError("torch refuses a weight of another size than input's")
    normalized = normalizes and reduction == REDUCTIONS["mean"]
    if normalized and torch.broadcast_shapes(input, target) != input:
        raise UnsupportedError("torch divides by the weight's sum before it is broadcast")
    return {"weight": weight}


def _error_loss(a: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    reduction = reduction_of(a)
    options = _element_weight(a, reduction, normalizes=True)
    return (a["input"], a["target"], reduction), options


def _smooth_l1_loss(a: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (a["input"], a["target"], reduction_of(a), a["beta"]), {}


def _huber_loss(a: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments, if both tensors have one dtype."""
    dtypes = {getattr(example(a[name]), "dtype", None) for name in ("input", "target")}
    if len(dtypes) > 1:  # torch's kernel keeps input's, its fake promotes
        raise UnsupportedError(
            "input and target have different dtypes: with a cast of one before, it has an op"
        )
    reduction = reduction_of(a)
    options = _element_weight(a, reduction, normalizes=False)
    return (a["input"], a["target"], reduction, a["delta"]), options


def _kl_div(a: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"log_target": True} if a["log_target"] else {}
    return (a["input"], a["target"], reduction_of(a)), options


def _binary_cross_entropy_with_logits(a: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (a["input"], a["target"], a["weight"], a["pos_weight"], reduction_of(a)), {}


def _cross_entropy(a: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = (a["weight"], reduction_of(a), a["ignore_index"], a["label_smoothing"])
    return (a["input"], a["target"], *options), {}


def _nll_loss(a: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = (a["weight"], reduction_of(a), a["ignore_index"])
    return (a["input"], a["target"], *options), {}


TABLE = [
    Loss("mse_loss", "mse_loss", _error_loss),
    Loss("l1_loss", "l1_loss", _error_loss),
    Loss("smooth_l1_loss", "smooth_l1_loss", _smooth_l1_loss),
    Loss("huber_loss", "huber_loss", _huber_loss),
    Loss("kl_div", "kl_div", _kl_div),
    Loss("cross_entropy", "cross_entropy_loss", _cross_entropy),
    Loss("nll_loss", "nll_loss_nd", _nll_loss),
    Loss(
        "binary_cross_entropy_with_logits",
        "binary_cross_entropy_with_logits",
        _binary_cross_entropy_with_logits,
    ),
    Loss(
        "binary_cross_entropy",
        "binary_cross_entropy",
        None,
        "torch bounds the logarithms of its rounded probabilities at -100, which no op does: if a "
        "sigmoid makes them, F.binary_cross_entropy_with_logits of what the sigmoid is given has "
        "an op, and keeps its gradient where the sigmoid rounds to 0 or 1",
    ),
]

_ROWS = {
    function: (loss, signature) for loss in TABLE for function, signature in loss.functions.items()
}


#: A row of the table and the arguments that a node calls it with, by name.
Call = tuple[Loss, Arguments]


def bind(node: Node) -> Call | Decline | None:
    """The row that a node is a call of, and its arguments by name; None if it is another call."""
    if node.op != "call_function" or node.target not in _ROWS:
        return None
    loss, signature = _ROWS[node.target]
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError as error:
        return Decline(node, loss.name, f"its arguments do not fit its signature: {error}")
    bound.apply_defaults()
    return loss, bound.arguments


def recognize_call(node: Node) -> Match | Decline | None:
    """A loss that is one call of torch's, after absorption of casts and logarithms before it; None
    if a node is none."""
    bound = bind(node)
    if bound is None or isinstance(bound, Decline):
        return bound
    loss, arguments = bound
    if loss.convert is None:
        return Decline(node, loss.name, loss.without)
    try:
        args, kwargs = loss.convert(arguments)
    except UnsupportedError as error:
        return Decline(node, loss.name, str(error))
    match = Match(node, loss.name, args, kwargs)
    if not all(isinstance(argument, Node) for argument in args[:2]):
        return Decline(node, loss.name, "input and target are not both tensors of the graph")
    absorb(match)
    # Torch's weighted losses are several ops, for which autocast settles the dtype otherwise.
    if "weight" in kwargs and isinstance(example(node), torch.Tensor):
        match.kwargs["dtype"] = example(node).dtype
    return match
