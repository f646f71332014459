"""Arguments that a program, or the dispatcher, leaves out because they are the defaults.

Recognition and the passes find arguments of an op by their places. Each op is called here with
fewer arguments, with all of them, and with None in the place of what it would take by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graphs import Compiled

#: The sum of all elements, times a number.
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum()": lambda a: a.sum(),
    "sum(None)": lambda a: torch.sum(a, dim=None),
    "sum(None, keepdim)": lambda a: torch.sum(a, None, True).squeeze(),
    "sum([])": lambda a: a.sum([]),
    "sum(0).sum()": lambda a: a.sum(0).sum(),
    "sum(-1).mean()": lambda a: a.sum(-1).mean(),
    "sum(dim=-1, keepdim).mean()": lambda a: a.sum(dim=-1, keepdim=True).mean(),
    "mean()": lambda a: a.mean(),
    "mean(None)": lambda a: torch.mean(a, None),
    "mean(None, keepdim)": lambda a: torch.mean(a, dim=None, keepdim=True).view(()),
    "mean([])": lambda a: a.mean([]),
    "mean(all)": lambda a: a.mean(list(range(a.dim())), False),
    "multiple": lambda a: torch.rsub(a, 0, alpha=3).mean(),
    "added multiple": lambda a: torch.add(a, a, alpha=2).mean(),
    "subtracted multiple": lambda a: torch.sub(a.sum(), a.sum(), alpha=3),
    "dtype": lambda a: a.sum(dtype=torch.float32) / 7,
    "norm": lambda a: torch.linalg.vector_norm(a),
    "square of a norm": lambda a: torch.linalg.vector_norm(a, 2) ** 2,
    "amax": lambda a: a.amax(),
    "amax([])": lambda a: a.amax([], True).sum(),
    "logsumexp": lambda a: a.reshape(-1).logsumexp(0),
    "max": lambda a: a.max() + a.reshape(-1).max(0).values,
    "argmax": lambda a: a.sum() + a.argmax() + a.argmax(keepdim=True).sum(),
}


def entropy(x: Tensor) -> Tensor:
    log_p = F.log_softmax(x, -1)
    return -(log_p.exp() * log_p)


#: Losses of each element of x, with a target t of numbers from 0 to 1.
BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda x, t: (x - t) ** 2,
    "absolute": lambda x, t: torch.sub(x, t).abs(),
    "huber": lambda x, t: F.huber_loss(x, t, reduction="none"),
    "bounded": lambda x, t: F.hardtanh(x - t) ** 2,
    "clamped": lambda x, t: torch.clamp(x, max=0).square() + torch.clamp(t - x, 0).square(),
    "charbonnier": lambda x, t: ((x - t) ** 2 + 1e-3).sqrt(),
    "divergence": lambda x, t: F.kl_div(F.log_softmax(x, -1), t, reduction="none"),
    "entropy": lambda x, t: entropy(x) + 0 * t,
    "binary": lambda x, t: F.softplus(x) - x * t,
    "binary, stable": lambda x, t: x.clamp(min=0) - x * t + torch.log1p(torch.exp(-x.abs())),
    "classes": lambda x, t: -F.log_softmax(x, -1).gather(-1, t.argmax(-1, True)),
    "classes of a slice": lambda x, t: (
        -F.log_softmax(x[..., :], -1).gather(-1, t[:].max(-1).indices.unsqueeze(-1))
    ),
    "stacked": lambda x, t: torch.stack([(x - t) ** 2, (x - t).abs()]),
    "joined": lambda x, t: torch.cat([(x - t) ** 2, (x - t).abs()]),
    "scaled": lambda x, t: torch.rsub(x, t, alpha=2) ** 2 + torch.add(x, t, alpha=-1).abs(),
    "swapped": lambda x, t: (x.flatten().unsqueeze(0) - t.flatten()[None]).squeeze() ** 2,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "shape",
    [(4, 6), *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(8,), (1, 8)])],
    ids=str,
)
def test_a_loss_is_right(body, shape):
    """Each body is reduced in all of the ways at once. A fault would end the compilation."""
    x, t = torch.randn(shape, requires_grad=True), torch.rand(shape) * 0.8 + 0.1

    def losses(x: Tensor, t: Tensor) -> list[Tensor]:
        return [reduce(BODIES[body](x, t)) for reduce in REDUCTIONS.values()]

    compiled = Compiled(losses, fullgraph=True, inner_backend="eager")
    found, expected = compiled(x, t), losses(x, t)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, x), gradients(expected, x))
    assert not any("internal error" in site.notes for site in compiled.sites)


def gradients(losses: list[Tensor], x: Tensor) -> list[Tensor]:
    return [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
