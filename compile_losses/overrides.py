"""Which calls of a loss the ops take, and which are left to torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from compile_losses import implementations
from compile_losses.distributed import are_dtensors
from compile_losses.library import DEVICES
from compile_losses.ops.checks import FLOATING
from compile_losses.torch_internals.eager import NO_TORCH_FUNCTION, DeviceContext, function_modes

DISABLED: Any = NO_TORCH_FUNCTION
DEFAULT: Any = Tensor.__torch_function__


def has_kernels(*operands: Any) -> bool:
    """Whether kernels compute with such operands: dense tensors of floating dtypes.

    For DTensors torch's ops may take their place, since torch refuses some losses of DTensors.
    """
    # Not all(), because every eager call runs this.
    for operand in operands:
        if operand is not None and not (
            isinstance(operand, Tensor)
            and operand.dtype in FLOATING
            and operand.layout == torch.strided
            and (operand.device.type in DEVICES or _is_computed(operand))
            and not operand.is_nested
        ):
            return False
    return True


def _is_computed(operand: Tensor) -> bool:
    if not are_dtensors(operand):
        return False
    # A self-test can't be traced, and the device of a graph's DTensors is known.
    return torch.compiler.is_compiling() or implementations.none_on(operand.device) is None


def overridden(*operands: Any) -> bool:
    """Whether an operand's class, or an active mode, has a ``__torch_function__`` of its own.

    The function of torch.Tensor does not count: it gives results the class of the operands, and
    does so for ops as well. Nor does the mode of torch.device contexts, which is for functions that
    create tensors.
    """
    if not has_torch_function(operands):
        return False
    modes = function_modes()
    if not all(isinstance(mode, DeviceContext) for mode in modes):
        return True
    for operand in operands:
        override = getattr(type(operand), "__torch_function__", None)
        if getattr(override, "__func__", override) not in (None, DISABLED, DEFAULT.__func__):
            return True
    return False
