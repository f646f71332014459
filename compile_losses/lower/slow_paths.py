"""Losses whose kernels don't move their bytes at the memory's bandwidth, or have too few of them.

Costs are in bytes moved. A kernel that takes a slower path through its arguments counts as one that
moves more bytes, as many times more as it took longer when it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_losses.device_constants import constants_of
from compile_losses.lower.cost import hint_of, laid_out_alike, nbytes_of
from compile_losses.lower.fused_calls import Loss
from compile_losses.ops.checks import NARROW

_WITH_SHORT_ROWS = ("cross_entropy", "cross_entropy_probabilities")
_WITH_SHORT_PAIRS = ("cross_entropy_probabilities", "softmax_kl_div")

#: Losses of so little arithmetic that Inductor's loop over them is as fast on a CPU.
_SIMPLE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


@dataclass(frozen=True)
class SlowPath:
    """Why a kernel is slower, and how many times."""

    reason: str
    factor: float


def slow_path(loss: Loss) -> SlowPath | None:
    """The slow path that a loss's kernel takes; None where it reads as fast as memory allows."""
    input, tensors = _arguments(loss)
    if input.device.type == "cpu":
        return _slow_on_a_cpu(loss, input, tensors)
    if loss.is_elementwise:
        if _are_read_in_packets(input, loss.arguments.get("pos_weight"), tensors):
            return None
        return SlowPath("its arguments are not laid out alike, without gaps, in one dtype", 9)
    return _slow_rows(loss, input, tensors)


def is_small(loss: Loss) -> bool:
    """Whether the calls of a loss's ops would take longer than its kernels save."""
    input, others = _arguments(loss)
    largest = max(nbytes_of(tensor) for tensor in (input, *others))
    constants = constants_of(input.device)
    simple = loss.name in _SIMPLE
    return largest < (constants.small_simple_bytes if simple else constants.small_bytes)


def _arguments(loss: Loss) -> tuple[Tensor, list[Tensor]]:
    """A loss's input, and its other tensors."""
    others = [n.meta["val"] for n in loss.forward.all_input_nodes if n is not loss.input]
    return loss.input.meta["val"], [value for value in others if isinstance(value, Tensor)]


def _slow_on_a_cpu(loss: Loss, input: Tensor, others: Sequence[Tensor]) -> SlowPath | None:
    # Inductor goes through both in tiles.
    """The slow path of a kernel for a CPU; None if it has none."""
    if not all(laid_out_alike(input, t) for t in others if t.dim() == input.dim()):
        return SlowPath("its arguments are laid out in different orders", 2.5)
    if loss.backwards:
        return None
    if loss.name in _SIMPLE:
        return SlowPath("a loop of so little arithmetic is as fast without a call around it", 1.1)
    narrow = all(t.dtype in NARROW for t in (input, *others) if t.is_floating_point())
    if loss.name == "cross_entropy" and narrow and _has_classes_apart(loss, input):
        return SlowPath("its classes are not neighbours in memory", 2.5)
    return None


def _class_dim(loss: Loss, input: Tensor) -> int:
    dim: int = loss.arguments.get("dim", min(input.dim() - 1, 1))
    return dim


def _has_classes_apart(loss: Loss, input: Tensor, *pairs: Tensor) -> bool:
    """Whether a row's classes are not neighbours in memory."""
    dim = _class_dim(loss, input)
    apart = any(hint_of(t.stride(dim)) != 1 for t in (input, *pairs))
    return hint_of(input.shape[dim]) > 1 and apart


def _slow_rows(loss: Loss, input: Tensor, others: Sequence[Tensor]) -> SlowPath | None:
    """Of a kernel for a GPU that goes through rows of logits; None if it has no slow path."""
    pairs = [t for t in others if t.dim() == input.dim() and t.is_floating_point()]
    if _has_classes_apart(loss, input, *pairs):
        return SlowPath("its classes are not neighbours in memory", 4.5)
    classes = hint_of(input.shape[_class_dim(loss, input)])
    row = classes * input.element_size()
    constants = constants_of(input.device)
    is_short = loss.name in _WITH_SHORT_ROWS and row < constants.short_row_bytes
    if loss.name in _WITH_SHORT_PAIRS and not loss.backwards:
        is_short |= row < constants.short_pair_bytes or classes < constants.few_classes
    return SlowPath("its rows are short", 2) if is_short else None


def _are_read_in_packets(input: Tensor, pos_weight: object, others: Sequence[Tensor]) -> bool:
    """Whether a GPU kernel reads 16 bytes at a time: see csrc/cuda/elementwise.cuh."""
    if pos_weight is not None or not _is_dense(input):
        return False
    if input.dtype not in (*NARROW, torch.float32):
        return False
    dtypes = {t.dtype for t in others}  # of target, and of a weight
    if dtypes - {input.dtype} and (dtypes != {torch.float32} or input.dtype not in NARROW):
        return False
    return all(_layout(input) == _layout(t) for t in others)


def _layout(value: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides, less those of dimensions of one element."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return [(hint_of(size), hint_of(stride)) for size, stride in pairs if hint_of(size) != 1]


def _is_dense(value: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(_layout(value), key=lambda pair: pair[1]):
        if stride != expected:
            return False
        expected *= size
    return True
