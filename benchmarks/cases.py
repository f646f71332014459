"""The cases: one record for each, with its inputs, torch expression and fused calls.

The first input is the prediction: gradients are taken with respect to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Pass = Literal["fwd", "fwd_bwd"]
PASSES: tuple[Pass, ...] = ("fwd", "fwd_bwd")
Size = tuple[tuple[int, int], torch.dtype]  # (rows, cols), dtype

MEAN, SUM, BATCHMEAN = 1, 2, 3  # values of the ops' reduction argument
TEMPERATURE, BETA = 2.0, 0.5  # of distillation


@dataclass(frozen=True)
class Case:
    """One loss as users write it, and the calls of this package's ops for it.

    Attributes:
        name: the name of the case in results.
        op: the stem of the fused op.
        make_inputs: random inputs for (shape, dtype, device).
        expression: the loss in torch's functions.
        fused: the same through the public op.
        options: the arguments of the op's leaves ``X_forward`` and ``X_with_grad`` between the
            inputs and the loss's dtype.
        total: the unreduced loss summed, for the float64 reference, which is computed in blocks of
            rows.
        divisor: from the inputs, the number by which the reduction divides that sum.
        weighted: whether the last input is a weight. The leaves' sums are divided by its sum.
        factor: the leaves' losses are multiplied by it.
        reference: the sizes of the published tables, by device type.
        small: sizes for a quick look.
        growth: sizes of the plot of bandwidth against size or row width, by device type. The
            number that differs between the sizes is the axis.
    """

    name: str
    op: str
    make_inputs: Callable[[tuple[int, int], torch.dtype, torch.device], tuple[Tensor, ...]]
    expression: Callable[..., Tensor]
    fused: Callable[..., Tensor]
    options: tuple[Any, ...]
    total: Callable[..., Tensor]
    divisor: Callable[..., float]
    reference: dict[str, tuple[Size, ...]]
    small: tuple[Size, ...]
    weighted: bool = False
    factor: float = 1.0
    growth: dict[str, tuple[Size, ...]] = field(default_factory=dict)

    def sizes(self, size: str, device: torch.device) -> tuple[Size, ...]:
        if size == "growth":
            return self.growth.get(device.type, ())
        return self.small if size == "small" else self.reference[device.type]

    def forward_kernel(self, *inputs: Tensor) -> Tensor:
        """The loss by the op's leaf, which has no autograd formula."""
        leaf = getattr(torch.ops.fused, f"{self.op}_forward")
        result = leaf(*inputs, *self.options, inputs[0].dtype)
        loss = result[0] if isinstance(result, (tuple, list)) else result
        return loss if self._unscaled else loss * self._scale(inputs)

    def gradient_kernel(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the unit gradient of the first input, in one read."""
        leaf = getattr(torch.ops.fused, f"{self.op}_with_grad")
        if self._unscaled:
            return leaf(*inputs, *self.options, inputs[0].dtype)
        scale = self._scale(inputs)
        loss, gradient = leaf(*inputs, *self.options, inputs[0].dtype, grad_output=scale)
        return loss * scale, gradient

    @property
    def _unscaled(self) -> bool:
        return not self.weighted and self.factor == 1

    def _scale(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The factor of the leaf's loss, on the device."""
        if self.weighted:
            return self.factor * inputs[-1].sum().reciprocal()
        return torch.full((), self.factor, device=inputs[0].device)


def bytes_moved(inputs: tuple[Tensor, ...], which: Pass) -> int:
    """The fewest bytes: each input read once and, with the backward, the gradient written once."""
    read = sum(tensor.nbytes for tensor in inputs)
    return read + inputs[0].nbytes if which == "fwd_bwd" else read


def _normal_pair(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(2))


def _probability_pair(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    return tuple(tensor.softmax(-1) for tensor in _normal_pair(shape, dtype, device))


def _weighted_pair(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    return (*_normal_pair(shape, dtype, device), torch.rand(shape, dtype=dtype, device=device))


def _logits_and_labels(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    logits, other = _normal_pair(shape, dtype, device)
    return logits, (other > 0).to(dtype)


def _logits_and_classes(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    rows, cols = shape
    logits = torch.randn(shape, dtype=dtype, device=device)
    return logits, torch.randint(cols, (rows,), device=device)


def _logits_and_probabilities(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    logits, others = _normal_pair(shape, dtype, device)
    return logits, others.softmax(-1)


def _distillation(student: Tensor, teacher: Tensor, reduction: str = "batchmean") -> Tensor:
    """Knowledge distillation (Hinton, Vinyals, Dean, 2015), scaled by T^2 as in the paper."""
    log_p = F.log_softmax(student / TEMPERATURE, -1)
    q = F.softmax(teacher / TEMPERATURE, -1)
    return F.kl_div(log_p, q, reduction=reduction) * TEMPERATURE * TEMPERATURE


def _jensen_shannon(student: Tensor, teacher: Tensor, reduction: str = "batchmean") -> Tensor:
    """TRL's generalized_jsd_loss (Agarwal et al., 2024), with both softmaxes of equal weight."""
    log_p = F.log_softmax(student / TEMPERATURE, -1)
    log_q = F.log_softmax(teacher / TEMPERATURE, -1)
    beta = torch.tensor(BETA, dtype=log_p.dtype, device=log_p.device)
    mixture = torch.logsumexp(
        torch.stack([log_p + torch.log1p(-beta), log_q + torch.log(beta)]), dim=0
    )
    kl_teacher = F.kl_div(mixture, log_q, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, log_p, reduction="none", log_target=True)
    total = (beta * kl_teacher + (1 - beta) * kl_student).sum()
    return total / student.size(0) if reduction == "batchmean" else total


def _mse(predictions: Tensor, targets: Tensor) -> Tensor:
    return torch.mean((predictions - targets) ** 2)


def _kl_div(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.kl_div(torch.log(predictions), targets, reduction="batchmean")


def _growing_tensors(largest: int) -> tuple[Size, ...]:
    """Pairs of float32 tensors, 64 KB to ``largest`` bytes a pair, in powers of two."""
    sizes = (1 << k for k in range(16, largest.bit_length()))
    return tuple(((nbytes // 8 // 128, 128), torch.float32) for nbytes in sizes)


def _growing_rows(numel: int) -> tuple[Size, ...]:
    """bfloat16 logits of about ``numel`` elements: powers of two, and vocabularies."""
    widths = sorted([*(1 << k for k in range(5, 19)), 32000, 50257, 128256, 151936])
    return tuple(((numel // width, width), torch.bfloat16) for width in widths)


_MSE: dict[str, Any] = {
    "op": "mse_loss",
    "make_inputs": _normal_pair,
    "fused": lambda input, target: torch.ops.fused.mse_loss(input, target),
    "options": (None, MEAN),  # weight, reduction
    "total": lambda input, target: F.mse_loss(input, target, reduction="sum"),
    "divisor": lambda input, *_: input.numel(),
    "reference": {
        "cuda": (((32768, 32768), torch.float32),),
        "cpu": (((8192, 8192), torch.float32),),
    },
    "small": (((1024, 1024), torch.float32),),
}
_L1 = _MSE | {
    "op": "l1_loss",
    "fused": lambda input, target: torch.ops.fused.l1_loss(input, target),
    "total": lambda input, target: F.l1_loss(input, target, reduction="sum"),
}
_WEIGHTED_MSE = _MSE | {
    "make_inputs": _weighted_pair,
    "fused": lambda input, target, weight: torch.ops.fused.mse_loss(input, target, weight=weight),
    "options": (SUM,),
    "total": lambda *inputs: F.mse_loss(*inputs[:2], reduction="sum", weight=inputs[2]),
    "divisor": lambda input, target, weight: weight.sum(dtype=torch.float64).item(),
    "weighted": True,
}
_SMOOTH_L1 = _MSE | {
    "op": "smooth_l1_loss",
    "fused": lambda input, target: torch.ops.fused.smooth_l1_loss(input, target),
    "options": (None, MEAN, 1.0),
    "total": lambda input, target: F.smooth_l1_loss(input, target, reduction="sum"),
}
_HUBER = _MSE | {
    "op": "huber_loss",
    "fused": lambda input, target: torch.ops.fused.huber_loss(input, target),
    "options": (None, MEAN, 1.0),
    "total": lambda input, target: F.huber_loss(input, target, reduction="sum"),
}
_BINARY_CROSS_ENTROPY = _MSE | {
    "op": "binary_cross_entropy_with_logits",
    "make_inputs": _logits_and_labels,
    "fused": lambda input, target: torch.ops.fused.binary_cross_entropy_with_logits(input, target),
    "options": (None, None, MEAN),  # weight, pos_weight, reduction
    "total": lambda input, target: F.binary_cross_entropy_with_logits(
        input, target, reduction="sum"
    ),
}

CASES = {
    case.name: case
    for case in (
        Case("mse", expression=_mse, **_MSE),
        Case(
            "mse_loss",
            expression=lambda input, target: F.mse_loss(input, target),
            growth={"cuda": _growing_tensors(8 << 30), "cpu": _growing_tensors(1 << 30)},
            **_MSE,
        ),
        Case(
            "weighted_mse_loss",
            expression=lambda input, target, weight: F.mse_loss(input, target, weight=weight),
            **_WEIGHTED_MSE,
        ),
        Case("l1_loss", expression=lambda input, target: F.l1_loss(input, target), **_L1),
        Case(
            "smooth_l1_loss",
            expression=lambda input, target: F.smooth_l1_loss(input, target),
            **_SMOOTH_L1,
        ),
        Case(
            "huber_loss",
            expression=lambda input, target: F.huber_loss(input, target),
            **_HUBER,
        ),
        Case(
            "binary_cross_entropy_with_logits",
            expression=lambda input, target: F.binary_cross_entropy_with_logits(input, target),
            **_BINARY_CROSS_ENTROPY,
        ),
        Case(
            "kl_div",
            op="kl_div",
            make_inputs=_probability_pair,
            expression=_kl_div,
            fused=lambda input, target: torch.ops.fused.kl_div(
                input, target, BATCHMEAN, log_input=False
            ),
            options=(BATCHMEAN, False, False),  # log_target, log_input
            total=lambda input, target: F.kl_div(input.log(), target, reduction="sum"),
            divisor=lambda input, *_: input.shape[0],
            reference={
                "cuda": (((16384, 16384), torch.float32),),
                "cpu": (((8192, 8192), torch.float32),),
            },
            small=(((1024, 1024), torch.float32),),
        ),
        Case(
            "cross_entropy",
            op="cross_entropy",
            make_inputs=_logits_and_classes,
            expression=lambda input, target: F.cross_entropy(input, target),
            fused=lambda input, target: torch.ops.fused.cross_entropy(input, target),
            options=(None, MEAN, -100, 0.0),  # weight, reduction, ignore_index, label_smoothing
            total=lambda input, target: F.cross_entropy(input, target, reduction="sum"),
            divisor=lambda input, *_: input.shape[0],
            reference={
                "cuda": (
                    ((32768, 4096), torch.float32),
                    ((16384, 32000), torch.bfloat16),
                    ((8192, 128256), torch.bfloat16),
                    ((4096, 151936), torch.bfloat16),
                    ((131072, 1024), torch.bfloat16),
                ),
                "cpu": (
                    ((8192, 4096), torch.float32),
                    ((2048, 32000), torch.float32),
                    ((1024, 128256), torch.bfloat16),
                ),
            },
            small=(((512, 1000), torch.float32), ((256, 32000), torch.bfloat16)),
            growth={"cuda": _growing_rows(1 << 28), "cpu": _growing_rows(1 << 25)},
        ),
        Case(
            "cross_entropy_probabilities",
            op="cross_entropy_probabilities",
            make_inputs=_logits_and_probabilities,
            expression=lambda input, target: F.cross_entropy(input, target),
            fused=lambda input, target: torch.ops.fused.cross_entropy(input, target),
            options=(None, MEAN, 0.0),  # weight, reduction, label_smoothing
            total=lambda input, target: F.cross_entropy(input, target, reduction="sum"),
            divisor=lambda input, *_: input.shape[0],
            reference={
                "cuda": (((32768, 4096), torch.float32), ((8192, 32000), torch.bfloat16)),
                "cpu": (((8192, 4096), torch.float32), ((1024, 32000), torch.float32)),
            },
            small=(((512, 1000), torch.float32),),
        ),
        Case(
            "distillation",
            op="softmax_kl_div",
            make_inputs=_normal_pair,
            expression=_distillation,
            fused=lambda input, target: (
                torch.ops.fused.softmax_kl_div(input, target, temperature=TEMPERATURE)
                * TEMPERATURE**2
            ),
            options=(BATCHMEAN, TEMPERATURE, -1),  # reduction, temperature, dim
            total=lambda input, target: _distillation(input, target, "sum"),
            divisor=lambda input, *_: input.shape[0],
            factor=TEMPERATURE**2,
            reference={
                "cuda": (((8192, 32000), torch.bfloat16),),
                "cpu": (((1024, 32000), torch.float32),),
            },
            small=(((256, 4096), torch.float32),),
        ),
        Case(
            "jensen_shannon",
            op="softmax_js_div",
            make_inputs=_normal_pair,
            expression=_jensen_shannon,
            fused=lambda input, target: torch.ops.fused.softmax_js_div(
                input, target, beta=BETA, temperature=TEMPERATURE
            ),
            options=(BATCHMEAN, BETA, TEMPERATURE, -1),  # reduction, beta, temperature, dim
            total=lambda input, target: _jensen_shannon(input, target, "sum"),
            divisor=lambda input, *_: input.shape[0],
            reference={
                "cuda": (((8192, 32000), torch.bfloat16),),
                "cpu": (((1024, 32000), torch.float32),),
            },
            small=(((256, 4096), torch.float32),),
        ),
    )
}
