"""Losses of a linear layer's output that never hold that output.

Linear cross entropy has the signature of torch 2.13's function, with every version of torch. Torch
has no function for log-probabilities, nor for the divergences from a teacher, whose classes may be
all or the likeliest few.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

import compile_losses.ops  # noqa: F401  declares fused::*
from compile_losses.arguments import is_integer, is_number, reduction_of, reduction_of_divergence
from compile_losses.ops import checks

__all__ = [
    "LinearCrossEntropyLoss",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_softmax_js_div",
    "linear_softmax_kl_div",
    "linear_top_k_kl_div",
]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of ``linear(input, linear_weight, linear_bias)`` that never holds the logits.

    Signature and results are those of ``torch.nn.functional.linear_cross_entropy`` in torch 2.13,
    with two more arguments; :mod:`compile_losses.ops.linear_cross_entropy` has its formula and
    errors.

    Args:
        input: [hidden], [rows, hidden], or with more leading dimensions.
        linear_weight: [classes, hidden], or [classes, d1, ..., hidden] with input [rows, hidden].
        target: class indices, int64 or uint8, of input's leading shape (and d1, ...); or class
            probabilities of the logits' shape.
        linear_bias: of linear_weight's shape without hidden.
        weight: [classes], in the loss's dtype, or in any dtype with class probabilities. With class
            indices a weight that requires a gradient is an error, except in calls that torch
            computes in chunks (``options`` given, no label smoothing, int64 targets, linear_weight
            [classes, hidden]): as in torch, no gradient flows to it in these.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        ignore_index: class indices of this value are ignored; None is -100.
        label_smoothing: from 0 to 1.
        options: accepted for compatibility with torch. Chunks are always used, and their size is
            chosen from the shapes.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        z_loss: ``z_loss * logsumexp(logits) ** 2`` is added to the loss of each row (PaLM).
    """
    tensors = (input, linear_weight, target, linear_bias, weight)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            linear_cross_entropy,
            tensors,
            *tensors[:3],
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=options,
            softcap=softcap,
            z_loss=z_loss,
        )
    check_types(
        input=input, linear_weight=linear_weight, target=target, linear_bias=linear_bias,
        weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip
    enum = reduction_of(reduction)
    chunked = (
        options is not None
        and label_smoothing == 0
        and target.dtype == torch.int64
        and linear_weight.dim() == 2
    )
    if weight is not None and (chunked or not torch.is_grad_enabled()):
        weight = weight.detach()  # torch's chunked loss takes one that requires a gradient
    return torch.ops.fused.linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=enum,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
    )


def linear_log_probs(
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    return_argmax: bool = False,
    return_log_squares: bool = False,
    return_rank: bool = False,
    top_k: int = 0,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probabilities of chosen classes by a linear layer that never holds the logits, for losses
    of tokens such as those of PPO, GRPO and DPO::

        logits = F.linear(input, weight, bias) / temperature
        F.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    Log-probabilities and entropies are differentiable, with gradients for input, weight and bias.
    The other results have no gradient. The rows of DTensors may be sharded, or the classes,
    Shard(0) of weight and bias; the last three options are for whole classes.

    Args:
        input: [hidden], [rows, hidden], or with more leading dimensions.
        weight, bias: [classes, hidden] and [classes], in input's dtype.
        index: the class of each row, int64, of input's leading shape; or K classes of each row, of
            input's leading shape and then [K], in any order, and equal ones too. The
            log-probability of a negative index, such as the label -100, is 0.
        temperature: the logits are divided by it, after the soft-cap.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        return_entropy: whether the entropy of each row's softmax is returned as well.
        return_argmax: whether the likeliest class of each row is returned as well, int64.
        return_log_squares: whether ``log_softmax(logits, -1).mul(2).logsumexp(-1)`` is, the
            logarithm of the sum of squared probabilities.
        return_rank: whether the rank of each row's class is, int64: how many logits are larger
            than its own, so 0 of the likeliest; -1 where index is negative. For one class of each
            row.
        top_k: whether ``logits.topk(top_k)`` is, values and indices; 0 for neither. Which of
            several equal logits is taken is not said, as of torch's.

    Returns:
        The log-probabilities, of index's shape, in float32, or in float64 for float64. If more is
        asked for, a tuple with that after them: entropies, likeliest classes, logarithms of sums of
        squares and ranks, of input's leading shape, then values and indices of the top_k, of this
        shape and then [top_k].

    Raises:
        RuntimeError: shapes, dtypes or devices that don't go together; a temperature or a softcap
            that is not positive; a top_k that is not from 0 to the number of classes; a rank with K
            classes of each row; plain tensors among DTensors; weight sharded by features, or by
            classes with return_log_squares, return_rank or top_k.
        IndexError: on the CPU, an index that is not below the number of classes.
    """
    numbers = {"squares": return_log_squares, "rank": return_rank, "top_k": top_k}
    log_probs, *more = torch.ops.fused.linear_log_probs(
        input, weight, index, linear_bias=bias, temperature=temperature, softcap=softcap, **numbers
    )
    wanted = (return_entropy, return_argmax, return_log_squares, return_rank, top_k, top_k)
    results = [found for found, wants in zip(more, wanted, strict=True) if wants]
    return (log_probs, *results) if results else log_probs


def linear_softmax_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    reduction: str = "batchmean",
    *,
    linear_bias: Tensor | None = None,
    target_weight: Tensor | None = None,
    target_bias: Tensor | None = None,
    reverse: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    target_softcap: float | None = None,
) -> Tensor:
    """Kullback-Leibler divergence of a linear layer's output from a teacher's logits, for
    distillation (Hinton et al., Distilling the Knowledge in a Neural Network, 2015). Neither the
    output nor the logits of a teacher's layer are ever held::

        student = F.linear(input, linear_weight, linear_bias)
        teacher = target if target_weight is None else F.linear(target, target_weight, target_bias)
        F.kl_div(
            F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1),
            reduction=reduction,
        )

    The result is not multiplied by the temperature's square. Input, linear_weight and linear_bias
    are differentiable, the teacher is not. The rows of DTensors may be sharded, or the classes of
    both sides.

    Args:
        input: [hidden], [rows, hidden], or with more leading dimensions.
        linear_weight, linear_bias: [classes, hidden] and [classes], in input's dtype.
        target: the teacher's logits, of input's leading dimensions and then [classes]; with
            target_weight the input of the teacher's linear layer, of input's leading dimensions
            and then any number of features.
        target_weight, target_bias: [classes, target's features] and [classes], in target's dtype.
        reduction: ``"batchmean"``, which divides by the first of the logits' sizes; ``"sum"``;
            ``"mean"`` over all classes of all rows; or ``"none"``, the divergence of each row, of
            input's leading dimensions.
        reverse: whether to compute ``KL(student || teacher)``, as in MiniLLM (Gu et al., 2024).
        temperature: of both softmaxes.
        softcap: the student's logits become ``softcap * tanh(logits / softcap)`` before they are
            divided by the temperature (Gemma 2).
        target_softcap: the same for the teacher's logits, given or computed.

    Raises:
        RuntimeError: shapes, dtypes or devices that don't go together; a temperature or a soft-cap
            that is not positive; a teacher that requires a gradient where gradients are recorded;
            plain tensors among DTensors; classes of the teacher that are sharded otherwise than the
            student's, and sharded classes of logits with a soft-cap.
        ValueError: unknown reduction.
        NotImplementedError: tensors that are not floating point.
    """
    return torch.ops.fused.linear_softmax_kl_div(
        input,
        linear_weight,
        target,
        reduction_of_divergence(reduction),
        linear_bias=linear_bias,
        target_weight=target_weight,
        target_bias=target_bias,
        reverse=reverse,
        temperature=temperature,
        softcap=softcap,
        target_softcap=target_softcap,
    )


def linear_softmax_js_div(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    reduction: str = "batchmean",
    *,
    linear_bias: Tensor | None = None,
    target_weight: Tensor | None = None,
    target_bias: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    target_softcap: float | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of a linear layer's output and a teacher's logits:
    :func:`compile_losses.functional.softmax_js_div` of both. Neither the output nor the logits of a
    teacher's layer are ever held.

    Args:
        beta: between 0 and 1, both excluded.

    Other arguments and errors are the same as of :func:`linear_softmax_kl_div`.

    Raises:
        RuntimeError: beta is not between 0 and 1; DTensors whose classes are sharded.
    """
    return torch.ops.fused.linear_softmax_js_div(
        input,
        linear_weight,
        target,
        reduction_of_divergence(reduction),
        linear_bias=linear_bias,
        target_weight=target_weight,
        target_bias=target_bias,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        target_softcap=target_softcap,
    )


def linear_top_k_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    index: Tensor,
    reduction: str = "batchmean",
    *,
    linear_bias: Tensor | None = None,
    reverse: bool = False,
    renormalize: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Kullback-Leibler divergence of a linear layer's output from a sparse teacher: only its
    log-probabilities of K classes of each row are known, usually of the likeliest ones. The output
    is never held::

        student = F.log_softmax(F.linear(input, linear_weight, linear_bias) / temperature, -1)
        F.kl_div(student.gather(-1, index), target, reduction=reduction, log_target=True)

    That is the sum over k of ``p_k * (log p_k - log q_k)``, with the teacher's p and the student's
    q. The mass that both have outside of the K classes is left out, as is common in distillation
    from stored top-k log-probabilities: the sum may be negative, unless both are normalised over
    the K classes. With ``renormalize`` the student is; the teacher is taken as it is given. The
    result is not multiplied by the temperature's square. All floating tensors are differentiable.

    Args:
        input: [hidden], [rows, hidden], or with more leading dimensions.
        linear_weight, linear_bias: [classes, hidden] and [classes], in input's dtype.
        target: the teacher's log-probabilities, at its temperature, in any floating dtype, of
            input's leading dimensions and then [K]. A class of -inf adds nothing, unless reverse.
        index: their classes, int64, of target's shape. A negative index, as of padding, adds
            nothing, whatever its target.
        reduction: ``"batchmean"``, which divides by the first of target's sizes; ``"sum"``;
            ``"mean"`` over all K classes of all rows; or ``"none"``, the divergence of each row, of
            input's leading dimensions.
        reverse: whether to compute the sum of ``q_k * (log q_k - log p_k)``.
        renormalize: whether q is the student's softmax over the K classes alone.
        temperature: of the student's softmax.
        softcap: the student's logits become ``softcap * tanh(logits / softcap)`` before they are
            divided by the temperature.

    Returns:
        The divergence, in float32, or in float64 for float64 input.

    Raises:
        RuntimeError: shapes, dtypes or devices that don't go together; a temperature or a softcap
            that is not positive.
        ValueError: unknown reduction.
        NotImplementedError: tensors that are not floating point.
        IndexError: on the CPU, an index that is not below the number of classes.
    """
    name = "linear_top_k_kl_div"
    reduction_of_divergence(reduction)
    checks.check_floating(name, input=input, linear_weight=linear_weight, target=target)
    checks.check_same_device(name, input, target=target, index=index)
    leading = input.shape[:-1]
    given = index.dim() == input.dim() and checks.same_shape(index.shape, target.shape)
    if not given or not checks.same_shape(index.shape[:-1], leading):
        raise RuntimeError(
            f"{name}: expected index and target of one shape {[*leading, 'K']}, "
            f"got {list(index.shape)} and {list(target.shape)}"
        )
    log_probs, *_ = torch.ops.fused.linear_log_probs(
        input, linear_weight, index,
        linear_bias=linear_bias, temperature=temperature, softcap=softcap,
    )  # fmt: skip
    padding = index < 0
    if renormalize:
        # The least number and not -inf, of which nothing but padding would be nan.
        least = torch.finfo(log_probs.dtype).min
        log_probs = F.log_softmax(log_probs.masked_fill(padding, least), -1)
    target = target.to(log_probs.dtype)
    nothing = padding if reverse else padding | target.isneginf()
    target, log_probs = (rows.masked_fill(nothing, 0) for rows in (target, log_probs))
    pair = (target, log_probs) if reverse else (log_probs, target)
    terms = F.kl_div(*pair, reduction="none", log_target=True)
    if reduction == "none":
        return terms.sum(-1)
    if reduction == "mean":
        return terms.mean()
    return terms.sum() / (len(terms) if reduction == "batchmean" else 1)


def check_types(*, ignore_index: Any, label_smoothing: Any, **tensors: Any) -> None:
    for name, value in tensors.items():
        optional = name in ("linear_bias", "weight")
        if not isinstance(value, Tensor) and not (optional and value is None):
            raise TypeError(
                f"linear_cross_entropy: expected {name} to be a tensor, got {type(value).__name__}"
            )
    if ignore_index is not None and not is_integer(ignore_index):
        error = ValueError if type(ignore_index) is int else TypeError
        raise error(
            f"linear_cross_entropy: expected ignore_index to be an int of 64 bits or None, "
            f"got {ignore_index!r}"
        )
    if not is_number(label_smoothing):
        raise TypeError(
            f"linear_cross_entropy: expected label_smoothing to be a number, "
            f"got {label_smoothing!r}"
        )


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer and its cross entropy, as ``torch.nn.LinearCrossEntropyLoss`` in torch 2.13.

    Parameters have the names of torch's module (``linear.weight``, ``linear.bias``), so that state
    dicts go from one to the other.

    Args:
        in_features, num_classes: the sizes of the linear layer.
        out_features: (d1, ..., dK) of a K-dimensional loss.
        bias, device, dtype: as for ``torch.nn.Linear``; no bias by default.
        weight: a weight for each class.
        reduction, ignore_index, label_smoothing, options, softcap, z_loss: as for
            :func:`linear_cross_entropy`.

    Raises:
        RuntimeError: weight is not [num_classes]; label_smoothing is outside [0, 1].
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        softcap: float | None = None,
        z_loss: float = 0.0,
    ) -> None:
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise RuntimeError(
                f"expected weight shape to be {(num_classes,)}, got {tuple(weight.shape)}"
            )
        if not 0 <= label_smoothing <= 1:
            raise RuntimeError(
                f"expected label_smoothing to be in range [0, 1], got {label_smoothing}"
            )
        super().__init__()
        self.register_buffer("weight", weight)
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing, self.options = label_smoothing, options
        self.softcap, self.z_loss = softcap, z_loss
        outputs = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of input [rows, in_features] or [in_features]."""
        shape = (self.num_classes, *self.out_features)
        bias: Tensor | None = self.linear.bias
        return linear_cross_entropy(
            input,
            self.linear.weight.reshape(*shape, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.reshape(shape),
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
            softcap=self.softcap,
            z_loss=self.z_loss,
        )

    def extra_repr(self) -> str:
        names = (
            "num_classes", "out_features", "reduction", "ignore_index", "label_smoothing",
            "softcap", "z_loss",
        )  # fmt: skip
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
