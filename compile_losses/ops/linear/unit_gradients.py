"""Gradients of rows that are computed with the rows' losses, where the layer has no gradient.

Of a frozen layer, as under LoRA, only the input has a gradient, and each row of it is that of the
row's own loss times the gradient that reaches this loss. So eager calls compute it for gradients of
1 with the loss, in two matrix products, and their backward multiplies. Compiled steps have the plan
"gradient in forward, scaled by row" (:mod:`compile_losses.lower.linear_losses`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compile_losses.eager import PLAIN
from compile_losses.ops.linear.row_function import encode
from compile_losses.ops.linear.steps import Operand
from compile_losses.torch_internals.eager import in_a_mode, keeps_saved_tensors_elsewhere

#: The gradients of what follows the arguments of a loss: needs, a function and nothing known.
NO_MORE: tuple[Any, ...] = (None, None, None, None, [])

_ONES = torch.ops.aten.ones_like.default


def unit_function(computed: int = 1, differentiable: int = 1) -> str:
    """The text of the function whose gradient of the first result is 1, and that has no other.

    Args:
        computed: how many results there are of each row.
        differentiable: how many of them can have gradients.
    """
    text = encode([(_ONES, [Operand(0)], {})], [computed, *[None] * (differentiable - 1)])
    assert text is not None
    return text


def has_unit_gradients(input: Tensor, *others: Tensor | None) -> bool:
    """Whether the gradients of rows of this input are computed with their losses.

    Not in float16, whose unit gradients underflow; not while a graph is traced, since the plan for
    the graph decides there; and not if hooks keep what is saved, as those of a checkpoint, which
    would compute the forward twice.

    Args:
        others: the layer's weight and bias.
    """
    tensors = (input, *(tensor for tensor in others if tensor is not None))
    return (
        torch.is_grad_enabled()
        and [tensor.requires_grad for tensor in tensors] == [True, *[False] * (len(tensors) - 1)]
        and input.dtype != torch.float16
        and all(type(tensor) in PLAIN for tensor in tensors)
        and not torch.compiler.is_compiling()
        and not in_a_mode()
        and not keeps_saved_tensors_elsewhere()
    )


def check_unit(backward: str, needs: tuple[Any, ...], text: str, unit: str) -> None:
    """Raises unless a call of fused::X_rows_with_grad has a gradient itself.

    Args:
        backward: the name of fused::X_backward.
        text: of its row function.
        unit: that of its unit function.
    """
    if needs != (True, False, False) or text != unit:
        name = backward.removesuffix("backward") + "rows_with_grad"
        raise RuntimeError(f"{name} is differentiable for gradients of 1, of the input alone")


def scaled_by_row(unit: Tensor, grad_output: Tensor, *, overwrites: bool) -> Tensor:
    """The gradient of the input, [rows, hidden], for a grad_output of [rows].

    Args:
        overwrites: whether the memory of unit may be taken.
    """
    result = unit if overwrites else torch.empty_like(unit)
    return torch.mul(unit, grad_output.unsqueeze(1), out=result)
