"""A small test of the ops on a device, which decides whether they are used there.

Each kind of op computes a loss and its gradient of a few numbers on the device. They are compared
with torch's own loss on the CPU, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: The largest difference of a number near 1 from float64.
TOLERANCE = 1e-4
_ROWS, _HIDDEN, _CLASSES = 5, 4, 7

Pair = tuple[Tensor, Tensor]


def failure(device: torch.device) -> str | None:
    """Why the ops are not used on a device; None if all numbers are right."""
    try:
        with torch.no_grad(), torch.inference_mode(False):
            for name, test in TESTS.items():
                for ours, expected in test(device):
                    error = (ours.cpu().double() - expected).abs().max().item()
                    if not error < TOLERANCE:
                        return f"a test of {name} on it found a difference of {error:.2g}"
    except Exception as error:
        text = " ".join(str(error).split())
        return f"a test of {name} on it failed: {type(error).__name__}: {text[:200]}"
    return None


def _numbers(*shape: int, seed: int) -> Tensor:
    """Numbers between -2 and 2. No generator is asked, whose next numbers are the program's."""
    count = torch.Size(shape).numel()
    places = torch.arange(count, dtype=torch.float64)
    return (2 * (places * 12.9898 + seed * 78.233).sin()).view(shape)


def _differentiated(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def _cross_entropy(device: torch.device) -> Iterator[Pair]:
    from compile_losses.ops import cross_entropy

    x, target = _numbers(_ROWS, _CLASSES, seed=1), torch.tensor([0, 6, -100, 3, 2])
    options = (None, 1, -100, 0.1)
    expected = _differentiated(lambda x: cross_entropy.reference(x, target, *options), x)
    ours = x.float().to(device), target.to(device)
    yield from zip(cross_entropy.with_grad(*ours, *options, torch.float32), expected, strict=True)


def _statistics(device: torch.device) -> Iterator[Pair]:
    from compile_losses.ops import row_statistics

    x, target = _numbers(_ROWS, _CLASSES, seed=2), torch.tensor([1, -1, 0, 5, 6])
    factors = _numbers(4, _ROWS, seed=3)

    def loss(x: Tensor) -> Tensor:
        nll, *others = row_statistics.reference(x, target, -1, 3.0)
        assert nll is not None
        return torch.stack([nll, *others]) * factors

    weighted, gradient = _differentiated(loss, x)
    logits, classes = x.float().to(device), target.to(device)
    grads = factors.float().to(device).unbind()
    *found, _, _, stats, _ = row_statistics.forward(logits, classes, -1, 3.0)
    yield torch.stack(found).cpu().double() * factors, weighted
    row_statistics.backward_(*grads, logits, classes, stats, -1, 3.0)
    yield logits, gradient


def _divergence(device: torch.device) -> Iterator[Pair]:
    from compile_losses.ops import softmax_kl_div

    x, t = _numbers(_ROWS, _CLASSES, seed=4), _numbers(_ROWS, _CLASSES, seed=5)
    options = (2, 1.5, -1)
    expected = _differentiated(lambda x: softmax_kl_div.reference(x, t, *options), x)
    op = torch.ops.fused.softmax_kl_div_with_grad.default
    ours = op(x.float().to(device), t.float().to(device), *options, torch.float32)
    yield from zip(ours, expected, strict=True)


def _head(device: torch.device) -> Iterator[Pair]:
    from compile_losses.ops.linear.reference import reference

    x, weight = _numbers(_ROWS, _HIDDEN, seed=6), _numbers(_CLASSES, _HIDDEN, seed=7)
    target = torch.tensor([0, 6, -100, 3, 2])
    options = (None, None, 2, -100, 0.0, None, 0.0)
    value, of_input = _differentiated(
        lambda x: reference(x, weight, target, *options, torch.float64), x
    )
    _, of_weight = _differentiated(
        lambda w: reference(x, w, target, *options, torch.float64), weight
    )
    op = torch.ops.fused.linear_cross_entropy_with_grad.default
    given = x.float().to(device), weight.float().to(device), target.to(device)
    ours = op(*given, *options, torch.float32, True, True, False)
    yield from zip(ours[:3], (value, of_input, of_weight), strict=True)


#: By what is tested.
TESTS: dict[str, Callable[[torch.device], Iterator[Pair]]] = {
    "cross entropy": _cross_entropy,
    "statistics of rows": _statistics,
    "a divergence": _divergence,
    "linear cross entropy": _head,
}
