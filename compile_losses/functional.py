"""``torch.nn.functional``'s losses, computed by the fused ops.

Each function has the signature, results, gradients, warnings and classes of exceptions of torch's
function of the same name, and can be imported instead of it. Torch rounds some partial results to a
16-bit type; these functions do not.

Torch has no functions for ``softmax_kl_div``, ``softmax_js_div`` and ``softmax_finite_kl_div``.
They are the ops with named reductions, as ``linear_softmax_kl_div`` and ``linear_softmax_js_div``
of :mod:`compile_losses.linear` are. Torch has no functions for ``selective_log_softmax`` and
``softmax_entropy`` either. They read the logits once and store no log-probabilities. Nor has it any
for the losses of :mod:`compile_losses.contrastive`.

A call goes on to torch's own function if an operand is not a dense tensor of a floating dtype on
a device with kernels, or if a class or mode overrides torch's function. The ops call torch's
function inside ``torch.func`` and forward-mode differentiation, for which custom ops have no rules.

Between a loss and its backward do not change an argument without autograd's knowledge: through
``.data``, or in place through the result of ``detach()`` if its version counter is not checked. In
the backward these functions read their arguments again. In the following cases torch's functions
save other tensors and still give the right gradients, and these functions give wrong ones without a
warning:

- ``cross_entropy``, with either kind of target, if input changes (torch saves the
  log-probabilities; here the new logits are combined with the old rows' sums);
- ``l1_loss``, and weighted ``mse_loss``, if input or target changes (torch saves the difference);
- ``kl_div`` with ``log_target``, if input or target changes.

Change a copy instead, or call ``backward`` first. In the other cases torch's functions read the
changed argument as well. For a change that autograd knows of, it raises an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import compile_losses.ops  # noqa: F401  declares fused::*
from compile_losses.arguments import (
    are_classes,
    autocast_dtype,
    check_weight,
    is_integer,
    is_number,
    reduction_of,
    reduction_of_divergence,
    warn,
    warn_if_broadcast,
)
from compile_losses.contrastive import (
    contrastive_cross_entropy,
    contrastive_sigmoid_cross_entropy,
)
from compile_losses.linear import (
    linear_cross_entropy,
    linear_softmax_js_div,
    linear_softmax_kl_div,
)
from compile_losses.ops.checks import (
    REDUCTIONS,
    broadcast_shape,
    promoted_dtype,
    promotes,
    same_shape,
)
from compile_losses.ops.selective_log_softmax import reference as torchs_selective_log_softmax
from compile_losses.ops.softmax_entropy import reference as torchs_softmax_entropy
from compile_losses.overrides import has_kernels, overridden

__all__ = [
    "binary_cross_entropy_with_logits",
    "contrastive_cross_entropy",
    "contrastive_sigmoid_cross_entropy",
    "cross_entropy",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "linear_cross_entropy",
    "linear_softmax_js_div",
    "linear_softmax_kl_div",
    "mse_loss",
    "nll_loss",
    "selective_log_softmax",
    "smooth_l1_loss",
    "softmax_entropy",
    "softmax_finite_kl_div",
    "softmax_js_div",
    "softmax_kl_div",
]

MEAN_OF_KL_DIV = (
    "reduction='mean' divides the total by the number of elements, which is not the divergence of "
    "a batch of distributions: reduction='batchmean' divides by the batch size"
)

fused = torch.ops.fused
# Any, because the stubs do not have every weight.
F: Any = torch.nn.functional


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Mean squared error, as :func:`torch.nn.functional.mse_loss`; weight has input's shape."""
    operands = (input, target, weight)
    if overridden(*operands) or not has_kernels(*operands):
        return F.mse_loss(input, target, size_average, reduce, reduction, weight)
    warn_if_broadcast(input, target)
    enum = reduction_of(reduction, size_average, reduce)
    # torch composes weighted losses of ops that autocast does not handle on the CPU.
    autocasts = input.device.type != "cpu"
    return _weighted(fused.mse_loss, input, target, weight, enum, autocasts)


def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Mean absolute error, as :func:`torch.nn.functional.l1_loss`; weight has input's shape."""
    operands = (input, target, weight)
    if overridden(*operands) or not has_kernels(*operands):
        return F.l1_loss(input, target, size_average, reduce, reduction, weight)
    warn_if_broadcast(input, target)
    enum = reduction_of(reduction, size_average, reduce)
    # As for mse_loss; on other devices autocast handles the sum, but not the absolute value.
    autocasts = input.device.type != "cpu" and enum != REDUCTIONS["none"]
    return _weighted(fused.l1_loss, input, target, weight, enum, autocasts)


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """Smooth L1 loss, as :func:`torch.nn.functional.smooth_l1_loss`."""
    operands = (input, target)
    if overridden(*operands) or not has_kernels(*operands) or not is_number(beta):
        return F.smooth_l1_loss(input, target, size_average, reduce, reduction, beta)
    warn_if_broadcast(input, target)
    return fused.smooth_l1_loss(input, target, reduction_of(reduction, size_average, reduce), beta)


def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Huber loss, as :func:`torch.nn.functional.huber_loss`; weight has input's shape."""
    operands = (input, target, weight)
    if overridden(*operands) or not has_kernels(*operands) or not is_number(delta):
        return F.huber_loss(input, target, reduction, delta, weight)
    warn_if_broadcast(input, target)
    enum = reduction_of(reduction)
    # Target is not promoted with input: torch writes into a result of input's dtype.
    if weight is None:
        dtype = None if input.dtype == target.dtype else autocast_dtype(input)
        return fused.huber_loss(input, target, enum, delta, dtype=dtype)
    check_weight(input, weight)
    dtype = autocast_dtype(input)
    if promotes(weight, broadcast_shape("huber_loss", input, target)):
        dtype = torch.promote_types(dtype, weight.dtype)
    return fused.huber_loss(input, target, enum, delta, weight=weight, dtype=dtype)


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Kullback-Leibler divergence, as :func:`torch.nn.functional.kl_div`."""
    operands = (input, target)
    if overridden(*operands) or not has_kernels(*operands) or type(log_target) is not bool:
        return F.kl_div(input, target, size_average, reduce, reduction, log_target)
    legacy = size_average is not None or reduce is not None
    if reduction == "mean" and not legacy:
        warn(MEAN_OF_KL_DIV, 3)
    if reduction == "batchmean" and not legacy:
        return fused.kl_div(input, target, REDUCTIONS["batchmean"], log_target=log_target)
    enum = reduction_of(reduction, size_average, reduce)
    loss = fused.kl_div(input, target, enum, log_target=log_target)
    if reduction == "batchmean" and input.dim() > 0:
        loss = loss / input.size(0)
    return loss


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood, as :func:`torch.nn.functional.nll_loss`."""
    if (
        overridden(input, target, weight)
        or not has_kernels(input)
        or not are_classes(input, target)
        or not is_integer(ignore_index)
    ):
        return F.nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)
    if weight is not None and not torch.is_grad_enabled():
        weight = weight.detach()  # only where gradients are recorded may it not require one
    enum = reduction_of(reduction, size_average, reduce)
    return fused.nll_loss(input, target, weight, enum, ignore_index)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of logits and class indices or probabilities, as
    :func:`torch.nn.functional.cross_entropy`."""
    if (
        overridden(input, target, weight)
        or not has_kernels(input)
        or not (are_classes(input, target) or has_kernels(target))
        or not is_integer(ignore_index)
        or not is_number(label_smoothing)
    ):
        return F.cross_entropy(
            input,
            target,
            weight,
            size_average,
            ignore_index,
            reduce,
            reduction,
            label_smoothing,
        )
    if weight is not None and not torch.is_grad_enabled():
        weight = weight.detach()  # only where gradients are recorded may it not require one
    enum = reduction_of(reduction, size_average, reduce)
    return fused.cross_entropy(input, target, weight, enum, ignore_index, label_smoothing)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Binary cross entropy of logits, as
    :func:`torch.nn.functional.binary_cross_entropy_with_logits`."""
    operands = (input, target, weight, pos_weight)
    if overridden(*operands) or not has_kernels(*operands):
        return F.binary_cross_entropy_with_logits(
            input, target, weight, size_average, reduce, reduction, pos_weight
        )
    enum = reduction_of(reduction, size_average, reduce)
    return fused.binary_cross_entropy_with_logits(input, target, weight, pos_weight, enum)


def softmax_kl_div(
    input: Tensor,
    target: Tensor,
    reduction: str = "batchmean",
    *,
    temperature: float = 1.0,
    dim: int = -1,
) -> Tensor:
    """Kullback-Leibler divergence of two softmaxes, for distillation (Hinton et al., Distilling the
    Knowledge in a Neural Network, 2015)::

        F.kl_div(
            F.log_softmax(input / temperature, dim), F.softmax(target / temperature, dim),
            reduction=reduction,
        )

    Both arguments are differentiable. The result is not multiplied by the temperature's square.

    Args:
        input, target: logits of one shape, of any floating dtypes.
        reduction: ``"batchmean"``, ``"sum"``; ``"mean"`` over all classes of all rows; or
            ``"none"``, the divergence of each row, of the shape without ``dim``.

    Raises:
        RuntimeError: shapes or devices that differ; a temperature that is not positive.
        IndexError: dim is out of range.
        ValueError: unknown reduction.
        NotImplementedError: logits that are not floating point.
    """
    enum = reduction_of_divergence(reduction)
    return fused.softmax_kl_div(input, target, enum, temperature=temperature, dim=dim)


def softmax_js_div(
    input: Tensor,
    target: Tensor,
    reduction: str = "batchmean",
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    dim: int = -1,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of two softmaxes (Agarwal et al., On-Policy
    Distillation of Language Models, 2024): ``beta KL(q || m) + (1 - beta) KL(p || m)`` for
    p = softmax(input / temperature), q = softmax(target / temperature) and the mixture
    m = (1 - beta) p + beta q.

    Args:
        beta: between 0 and 1, both excluded.

    Other arguments and errors are the same as of :func:`softmax_kl_div`.

    Raises:
        RuntimeError: beta is not between 0 and 1.
    """
    enum = reduction_of_divergence(reduction)
    return fused.softmax_js_div(input, target, enum, beta=beta, temperature=temperature, dim=dim)


def softmax_finite_kl_div(
    input: Tensor,
    target: Tensor,
    reduction: str = "batchmean",
    *,
    entropy: bool = True,
    temperature: float = 1.0,
    dim: int = -1,
) -> Tensor:
    """Kullback-Leibler divergence of two softmaxes without the terms of infinite logits (Gu et al.,
    MiniLLM, 2024), for distillation with masked classes: ``q (log q - log p)``, added up over the
    classes whose logits are not infinite, for p = softmax(input / temperature) and q =
    softmax(target / temperature).

    Gradients have no nan where a logit is -inf. A row that has no softmax, since it holds a nan or
    +inf, or only -inf, has nan.

    Args:
        entropy: whether the terms have ``q log q``. Without it the result is the cross entropy of p
            with the probabilities q, and only infinite logits of input are left out, as in
            torchtune's forward divergence.

    Other arguments and errors are the same as of :func:`softmax_kl_div`.
    """
    enum = reduction_of_divergence(reduction)
    return fused.softmax_finite_kl_div(
        input, target, enum, entropy=entropy, temperature=temperature, dim=dim
    )


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities of chosen classes, as TRL's function of this name::

        F.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    Args:
        logits: [..., C], of a floating dtype.
        index: int64 in [0, C): [...], one class of each row, or [..., K], K of them.

    Returns:
        The log-probabilities, of index's shape and logits' dtype, differentiable with respect to
        the logits.

    Raises:
        RuntimeError: shapes, dtypes or devices other than these.
        IndexError: on the CPU, an index outside [0, C) (RuntimeError for [..., K], as in torch's
            gather). On CUDA the kernel stops with a device-side assertion.
    """
    if overridden(logits, index) or not has_kernels(logits):
        return torchs_selective_log_softmax(logits, index)
    return fused.selective_log_softmax(logits, index)


def softmax_entropy(logits: Tensor) -> Tensor:
    """Entropy of each row's softmax, in nats::

        -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)

    Classes with probability 0, for example if a mask made a logit -inf, add nothing; torch's own
    ops give nan.

    Args:
        logits: [..., C], of a floating dtype.

    Returns:
        The entropies, of shape [...] and logits' dtype. They are differentiable.

    Raises:
        RuntimeError: logits without dimensions.
        NotImplementedError: logits that are not floating point.
    """
    if overridden(logits) or not has_kernels(logits):
        return torchs_softmax_entropy(logits)
    return fused.softmax_entropy(logits)


def _weighted(
    op: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    autocasts: bool,
) -> Tensor:
    """An error loss. autocasts: whether autocast sets the dtype of torch's weighted loss."""
    if weight is None:
        return op(input, target, reduction)
    check_weight(input, weight)
    shape, mean = broadcast_shape(op.__name__, input, target), reduction == REDUCTIONS["mean"]
    dtype = None
    if not autocasts:
        promoting = (weight,) if mean or promotes(weight, shape) else ()
        dtype = promoted_dtype(input, target, *promoting)
    if mean and not same_shape(input.shape, shape):
        # torch divides by the weight's sum before it is broadcast, the op by its sum after
        return op(input, target, REDUCTIONS["sum"], weight=weight, dtype=dtype) / weight.sum()
    return op(input, target, reduction, weight=weight, dtype=dtype)
