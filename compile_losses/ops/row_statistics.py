"""Statistics of rows of logits, of which losses and metrics are made.

- ``fused::row_statistics_forward``: every statistic, in one read of the logits.
- ``fused::row_statistics_backward``: the gradient of the logits, for gradients of the statistics.
- ``fused::row_statistics_backward_``: the same, written over the logits.

Input is [rows, classes], of any strides; it is copied where the classes do not lie side by side.
With a softcap its rows stand for ``z = softcap * tanh(input / softcap)``, otherwise for
``z = input``. Results are [rows], in float64 for float64 input and float32 otherwise:

- ``nll``: ``logsumexp(z) - z[target]``, 0 where target is ignore_index; empty without a target.
- ``logsumexp``: ``torch.logsumexp(z, -1)``.
- ``entropy``: that of ``p = softmax(z)``, ``-sum(p * log(p))``, classes with p = 0 left out.
- ``total``: ``z.sum(-1)``.
- ``maximum``: ``z.amax(-1)``.
- ``argmax``: ``z.argmax(-1)``, int64: the first of equal ones, and of nans.
- ``stats``: [rows, 3], what the backward reads: the maximum, the logarithm of the summed
  exponentials relative to it, and the entropy.
- ``log_squares``: ``log(sum(p ** 2))``; empty unless ``squares`` asks for it, which changes no bit
  of the others.

The gradients of the first four are [rows], of any floating dtypes and strides; None, like an empty
one, is 0. The others have none. Probabilities are never stored.

Raises:
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index. On CUDA the
        kernel stops with a device-side assertion.
    RuntimeError: other shapes and dtypes; no classes; a softcap that is not positive.
    NotImplementedError: logits that are not floating point.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.bodies import row_statistics as bodies
from compile_losses.ops import checks
from compile_losses.ops.transforms import double_backward

NAME = "row_statistics"
GRADS = "Tensor? grad_nll, Tensor? grad_logsumexp, Tensor? grad_entropy, Tensor? grad_total"
SAVED = "Tensor? target, Tensor stats, SymInt ignore_index, float? softcap"

# log_squares is the last, so that code that was compiled without it finds the others.
forward = library.define(
    "row_statistics_forward(Tensor input, Tensor? target, SymInt ignore_index, float? softcap, "
    "bool squares=False) -> (Tensor nll, Tensor logsumexp, Tensor entropy, Tensor total, "
    "Tensor maximum, Tensor argmax, Tensor stats, Tensor log_squares)"
)
backward = library.define(f"row_statistics_backward({GRADS}, Tensor input, {SAVED}) -> Tensor")
backward_ = library.define(f"row_statistics_backward_({GRADS}, Tensor(a!) input, {SAVED}) -> ()")

Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    input: Tensor, target: Tensor | None, ignore_index: int, softcap: float | None
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The differentiable statistics, in torch's own ops."""
    z = capped(input, softcap)
    nll = None
    if target is not None:
        nll = F.cross_entropy(z, target, ignore_index=ignore_index, reduction="none")
    return nll, torch.logsumexp(z, -1), entropy_of(z), z.sum(-1)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def entropy_of(logits: Tensor) -> Tensor:
    logarithms = F.log_softmax(logits, -1)
    probabilities = logarithms.exp()
    return -(probabilities * logarithms.masked_fill(probabilities == 0, 0)).sum(-1)


def check(input: Tensor, target: Tensor | None, softcap: float | None) -> None:
    checks.check_floating(NAME, input=input)
    checks.check_same_device(NAME, input, target=target)
    if input.dim() != 2 or input.shape[1] == 0:
        raise RuntimeError(
            f"{NAME}: expected input of shape [rows, classes] with at least 1 class, "
            f"got {list(input.shape)}"
        )
    if target is not None and (target.dtype != torch.int64 or target.shape != input.shape[:1]):
        raise RuntimeError(
            f"{NAME}: expected target to be int64 of shape {[input.shape[0]]}, "
            f"got {checks.describe(target)}"
        )
    checks.check_softcap(NAME, softcap)


def forward_fake(
    input: Tensor,
    target: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    squares: bool = False,
) -> Statistics:
    check(input, target, softcap)
    rows, dtype = input.shape[0], checks.accumulation_type(input.dtype)
    nll = input.new_empty(0 if target is None else rows, dtype=dtype)
    log_squares = input.new_empty(rows if squares else 0, dtype=dtype)
    logsumexp, entropy, total, maximum = (input.new_empty(rows, dtype=dtype) for _ in range(4))
    argmax, stats = (
        input.new_empty(rows, dtype=torch.int64),
        input.new_empty((rows, 3), dtype=dtype),
    )
    return nll, logsumexp, entropy, total, maximum, argmax, stats, log_squares


library.register_body(forward, forward_fake, bodies.forward)


def backward_fake(
    grad_nll: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_entropy: Tensor | None,
    grad_total: Tensor | None,
    input: Tensor,
    target: Tensor | None,
    stats: Tensor,
    ignore_index: int,
    softcap: float | None,
) -> Tensor:
    check(input, target, softcap)
    return input.new_empty(input.shape)


def backward_fake_(*arguments: Any) -> None:
    input, target, _, _, softcap = arguments[4:]
    check(input, target, softcap)


library.register_body(backward, backward_fake, bodies.backward)
library.register_body(backward_, backward_fake_, bodies.backward_)


def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
    input, target, ctx.ignore_index, ctx.softcap, *_ = inputs
    *_, stats, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[4:])
    ctx.save_for_backward(input, target, stats)


def forward_vjp(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    gradient = None
    if any(grad is not None for grad in grads[:4]):
        options = (ctx.ignore_index, ctx.softcap)
        gradient = direct_backward(*grads[:4], *ctx.saved_tensors, *options)
    return gradient, None, None, None, None


direct_forward = library.register_autograd(forward, forward_vjp, setup_forward)


def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *grads, input, target, _, ctx.ignore_index, ctx.softcap = inputs
    ctx.save_for_backward(*grads, input, target)


def backward_vjp(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    *grads, input, target = ctx.saved_tensors
    dtype = checks.accumulation_type(input.dtype)
    given = [i for i, g in enumerate(grads) if g is not None and g.shape == input.shape[:1]]
    if target is None:
        given = [i for i in given if i > 0]
    products: list[Tensor | None] = [None] * 9
    if not given:
        return tuple(products)

    def statistics(x: Tensor) -> Tensor:
        all_of_them = reference(x.to(dtype), target, ctx.ignore_index, ctx.softcap)
        return torch.stack([s for i in given if (s := all_of_them[i]) is not None])

    with torch.enable_grad():
        stacked = torch.stack([grads[i].to(dtype) for i in given])
    of_grads, products[4] = double_backward(statistics, stacked, (input,), (cotangent,))
    if of_grads is not None:
        for i, product in zip(given, of_grads, strict=True):
            products[i] = product.to(grads[i].dtype)
    return tuple(products)


direct_backward = library.register_autograd(backward, backward_vjp, setup_backward)
library.register_not_differentiable(backward_)
