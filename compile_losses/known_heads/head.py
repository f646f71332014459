"""A row of the table of known heads, and what its rows have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses.eager import PLAIN
from compile_losses.overrides import has_kernels


@dataclass(frozen=True, eq=False)
class KnownHead:
    """A function of another library that computes a loss, or numbers of rows, of a linear layer.

    Attributes:
        package: the distribution that has it.
        versions: the releases for which the row was tested, as ``"1.16"`` for all of 1.16.
        module: where it is defined.
        name: an ``autograd.Function`` there, of which ``apply`` is met.
        loss: the op by whose name the options ``losses`` and ``except`` choose it.
        compute: the same results by our ops, differentiable as theirs are, or the reason why theirs
            computes the call. It has the parameters of their ``forward`` after ``ctx``, with the
            same defaults. Dynamo traces it, and so it reads no data, and a reason is a constant.
    """

    package: str
    versions: tuple[str, ...]
    module: str
    name: str
    loss: str
    compute: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.package}'s {self.name}"

    def is_tested(self, version: str) -> bool:
        return any(f"{version}.".startswith(f"{tested}.") for tested in self.versions)

    def differs(self, forward: Callable[..., Any]) -> str | None:
        """What a function's arguments have that the row does not know; None if it knows them."""
        theirs, ours = _parameters(forward)[1:], _parameters(self.compute)
        if theirs == ours:
            return None
        shown = ", ".join(name for name, _ in theirs)
        return f"its arguments ({shown}) are not those of the releases that were tested"


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default) for parameter in parameters]


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of a layer's product: autocast's, or that of its input."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def refuse_layer(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    most: tuple[int, int] | None = None,
) -> str | None:
    """Why a layer and its targets are left to the library; None if they need not be.

    Args:
        most: the rows and classes of the logits that the library holds at a time, and for which it
            casts a weight of another dtype than the product's, where we cast all of it.
    """
    for tensor in (hidden, weight, bias, target):
        if tensor is not None and type(tensor) not in PLAIN:
            return "a tensor is of a class of its own"
    if hasattr(weight, "ds_id"):
        return "DeepSpeed gathers the weight in its backward"
    if not has_kernels(hidden, weight, bias):
        return "there are no kernels for its dtypes, or its device"
    if hidden.dim() != 2 or weight.dim() != 2 or target.dim() != 1:
        return "its shapes are not [rows, hidden], [classes, hidden] and [rows]"
    if target.dtype != torch.int64:
        return "its targets are not int64"
    if weight.dtype == product_dtype(hidden):
        return None
    # Here alone, because it makes a graph one for some numbers of rows.
    if most is None or weight.numel() > min(hidden.shape[0], most[0]) * most[1]:
        return "its weight is cast for the product, and the copy would be larger than its buffers"
    return None
