"""Log-probabilities of K picked classes of each row of logits, beside the row's statistics.

- ``fused::row_picks_forward``: ``log_softmax(z, -1).gather(-1, picks)``, from the saved numbers of
  ``row_statistics_forward``.
- ``fused::row_picks_backward``: the gradient of the logits, for gradients of these
  log-probabilities and of the statistics.

Input is [rows, classes], picks int64 [rows, K] with K of at least 1; a row may pick a class several
times. With a softcap ``z = softcap * tanh(input / softcap)``, otherwise ``z = input``. The
log-probabilities are [rows, K], in float64 for float64 input and float32 otherwise. Stats, target
and the gradients of statistics are those of :mod:`compile_losses.ops.row_statistics`.

Everything is in ATen's ops. The gradient of a picked class is computed as a whole in the wide dtype
and rounded once. The gradients of equal classes of a row are added up before one number is written
in their place. So the order of all sums is fixed, without atomics. The ops are for calls that
record no gradient.

Raises:
    IndexError: on the CPU, a pick outside [0, classes). On CUDA the kernel stops with a device-side
        assertion.
    RuntimeError: picks of another shape or dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.blocks import is_traced
from compile_losses.ops import checks, row_statistics
from compile_losses.ops.checks import accumulation_type

NAME = "row_picks"

forward = library.define(
    f"{NAME}_forward(Tensor input, Tensor picks, Tensor stats, float? softcap) -> Tensor"
)
backward = library.define(
    f"{NAME}_backward(Tensor grad_log_probs, {row_statistics.GRADS}, Tensor input, Tensor picks, "
    f"{row_statistics.SAVED}) -> Tensor"
)


def check(op: str, picks: Tensor, rows: int) -> None:
    """Refuses picks that are not K classes of each row."""
    shape = picks.shape
    if picks.dtype != torch.int64 or len(shape) != 2 or shape[0] != rows or shape[1] == 0:
        raise RuntimeError(
            f"{op}: expected picks to be int64 of shape [{rows}, K] with K at least 1, "
            f"got {checks.describe(picks)}"
        )


def check_bounds(op: str, picks: Tensor, classes: int) -> None:
    """Refuses classes that do not exist. On other devices than the CPU, and in compiled code,
    ATen's kernels do."""
    if is_traced() or picks.device.type != "cpu" or picks.numel() == 0:
        return
    for pick in map(int, picks.aminmax()):
        if not 0 <= pick < classes:
            raise IndexError(f"{op}: pick {pick} is out of bounds for {classes} classes")


def picked_logits(logits: Tensor, picks: Tensor, softcap: float | None) -> Tensor:
    """z at picks, in the wide dtype."""
    picked = logits.gather(1, picks).to(accumulation_type(logits.dtype))
    return picked if softcap is None else picked.div_(softcap).tanh_().mul_(softcap)


def log_probs_of(picked: Tensor, stats: Tensor) -> Tensor:
    """Log-probabilities of z at picks.

    The logsumexp is subtracted in two parts: their rounded sum would cost digits of large logits.
    """
    largest, logarithm = stats[:, 0:1], stats[:, 1:2]
    return (picked - largest).sub_(logarithm)


def sums_of_equal(picks: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Picks, sorted in each row, and beside each of them the sum of the values of its class.

    Equal picks have the same sum, bit by bit. A segmented scan adds up: after the step of width w
    a place holds the sum of the last 2w values up to it that belong to its class.
    """
    picks, order = picks.sort(dim=1, stable=True)
    values, width = values.gather(1, order), 1
    while width < picks.shape[1]:
        same = picks[:, width:] == picks[:, :-width]
        sums = values.clone()
        sums[:, width:] += torch.where(same, values[:, :-width], 0)
        values, width = sums, 2 * width
    last = torch.searchsorted(picks, picks, right=True).sub_(1)
    return picks, values.gather(1, last)


def gradient_at_picks(
    grad_log_probs: Tensor,  # [rows, K]
    grads: tuple[Tensor | None, ...],  # of the statistics, [rows] each
    logits: Tensor,
    target: Tensor | None,
    picks: Tensor,
    stats: Tensor,
    ignore_index: int,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Picks, in some order, and the gradient of their logits, both [rows, K]; equal picks have the
    same gradient.

    The formula is that of csrc/losses/row_statistics.h and the picks' own term.
    """
    dtype = accumulation_type(logits.dtype)
    picks, own = sums_of_equal(picks, grad_log_probs.to(dtype))
    nll, logsumexp, entropy, total = (_column(grad, dtype) for grad in grads)
    z = picked_logits(logits, picks, softcap)
    log_probs = log_probs_of(z, stats)
    probabilities = log_probs.exp()
    factor = -grad_log_probs.to(dtype).sum(1, keepdim=True)
    if nll is not None and target is not None:
        nll = nll.masked_fill(target.unsqueeze(1) == ignore_index, 0)
        factor, own = factor + nll, own - nll * (picks == target.unsqueeze(1))
    if logsumexp is not None:
        factor = factor + logsumexp
    if entropy is not None:
        # Bounded: a class of probability 0 has a gradient of 0.
        factor = factor - entropy * (log_probs.clamp(min=-1e30) + stats[:, 2:3])
    if total is not None:
        own = own + total
    gradient = own.addcmul(probabilities, factor)
    if softcap is not None:
        gradient = gradient * (1 - (z / softcap).square_())
    return picks, gradient


def _column(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A gradient as [rows, 1]; None is 0, as an empty one."""
    if gradient is None or gradient.numel() == 0:
        return None
    return gradient.to(dtype).unsqueeze(1)


def without_picks(
    grad_log_probs: Tensor, grads: tuple[Tensor | None, ...], dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """The gradients of the statistics, as the classes that are not picked see them: all
    log-probabilities have the logsumexp in them."""
    nll, logsumexp, *rest = grads
    of_picks = -grad_log_probs.to(dtype).sum(1)
    if logsumexp is not None and logsumexp.numel() > 0:
        of_picks = of_picks + logsumexp.to(dtype)
    return nll, of_picks, *rest


def backward_(
    grad_log_probs: Tensor,
    grads: tuple[Tensor | None, ...],
    logits: Tensor,
    target: Tensor | None,
    picks: Tensor,
    stats: Tensor,
    ignore_index: int,
    softcap: float | None,
) -> None:
    """The gradient of the logits, written over them."""
    options = (ignore_index, softcap)
    chosen = gradient_at_picks(grad_log_probs, grads, logits, target, picks, stats, *options)
    grads = without_picks(grad_log_probs, grads, stats.dtype)
    row_statistics.backward_(*grads, logits, target, stats, *options)
    _put(logits, *chosen)


def _put(gradient: Tensor, picks: Tensor, chosen: Tensor) -> None:
    gradient.scatter_(1, picks, chosen.to(gradient.dtype))


def _check(input: Tensor, picks: Tensor, stats: Tensor) -> None:
    checks.check_floating(NAME, input=input)
    checks.check_same_device(NAME, input, picks=picks, stats=stats)
    check(NAME, picks, input.shape[0])


def _forward(input: Tensor, picks: Tensor, stats: Tensor, softcap: float | None) -> Tensor:
    _check(input, picks, stats)
    check_bounds(NAME, picks, input.shape[1])
    return log_probs_of(picked_logits(input, picks, softcap), stats)


def _forward_fake(input: Tensor, picks: Tensor, stats: Tensor, softcap: float | None) -> Tensor:
    _check(input, picks, stats)
    return input.new_empty(picks.shape, dtype=accumulation_type(input.dtype))


def _backward(grad_log_probs: Tensor, *rest: Any) -> Tensor:
    grads, (input, picks, target, stats, *options) = rest[:4], rest[4:]
    _check(input, picks, stats)
    check_bounds(NAME, picks, input.shape[1])
    chosen = gradient_at_picks(grad_log_probs, grads, input, target, picks, stats, *options)
    grads = without_picks(grad_log_probs, grads, stats.dtype)
    gradient = row_statistics.backward(*grads, input, target, stats, *options)
    _put(gradient, *chosen)
    return gradient


def _backward_fake(grad_log_probs: Tensor, *rest: Any) -> Tensor:
    input, picks, _, stats, *_ = rest[4:]
    _check(input, picks, stats)
    return input.new_empty(input.shape)


library.compose(forward, _forward, _forward_fake)
library.compose(backward, _backward, _backward_fake)
