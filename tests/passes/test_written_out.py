"""What a loss that is written out may be: the ops' arguments, and what is done with the result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.match import Match
from tests.passes import decisions
from tests.passes.graphs import dynamo, name_of, recognizer, words


def pair():
    return torch.randn(4, 6, requires_grad=True), torch.rand(4, 6)


def classes():
    return torch.randn(4, 6, requires_grad=True), torch.randint(6, (4,))


def rows():
    return torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)


def told(candidate):
    """A candidate in words, without the graph's names of what else is there."""
    if not isinstance(candidate, Match):
        return f"{candidate.name}: {candidate.reason}"
    given = [words(a) for a in candidate.args]
    given += [f"{name}={words(a)}" for name, a in sorted(candidate.kwargs.items())]
    steps = [f" {name_of(function)}{words(list(rest))}" for function, rest in candidate.steps]
    inside = ", ".join(sorted(node.name for node in candidate.interior))
    return f"{candidate.op}({', '.join(given)}){''.join(steps)} instead of {inside or 'a call'}"


#: Of each module that knows a family.
BODIES = {
    "difference: mse": (lambda x, t: ((x - t) ** 2).mean(), pair),
    "difference: mse of a sum": (lambda x, t: 0.25 * (x + (-t)).square().sum(), pair),
    "difference: mse of rows": (lambda x, t: (x - t).pow(2).sum(1).mean(), pair),
    "difference: weighted": (lambda x, t: (t * (x - 1).square()).mean(), pair),
    "difference: l1": (lambda x, t: (t - x).abs().sum(), pair),
    "difference: huber": (
        lambda x, t: torch.where((d := (x - t).abs()) <= 0.5, 0.5 * d**2, 0.5 * (d - 0.25)).mean(),
        pair,
    ),
    "difference: smooth l1": (
        lambda x, t: torch.where((d := (x - t).abs()) < 0.3, d**2 / 0.6, d - 0.15).mean(), pair,
    ),
    "difference: another bound": (
        lambda x, t: torch.where((d := (x - t).abs()) < 0.3, d**2 / 0.6, d - 0.2).mean(), pair,
    ),
    "difference: cubes": (lambda x, t: ((x - t) ** 3).mean(), pair),
    "logistic: binary": (lambda x, t: (F.softplus(x) - x * t).mean(), pair),
    "logistic: of a sigmoid": (
        lambda x, t: -(t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x)).mean(), pair,
    ),
    "logistic: stable": (
        lambda x, t: (x.clamp(min=0) - x * t + torch.log1p(torch.exp(-x.abs()))).mean(), pair,
    ),
    "logistic: positive weight": (
        lambda x, t: -(2 * t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x)).mean(), pair,
    ),
    "logistic: without the target": (lambda x, t: F.softplus(x).mean() + 0 * t.sum(), pair),
    "probabilities: cross entropy": (
        lambda x, t: -x.log_softmax(1).gather(1, t[:, None]).mean(), classes,
    ),
    "probabilities: by logsumexp": (
        lambda x, t: (x.logsumexp(1) - x.gather(1, t[:, None]).squeeze(1)).sum(), classes,
    ),
    "probabilities: one-hot": (
        lambda x, t: -(F.one_hot(t, 6) * x.log_softmax(1)).sum() / 4, classes,
    ),
    "probabilities: smoothed": (
        lambda x, t: (0.9 * -x.log_softmax(1).gather(1, t[:, None]).squeeze(1)
                      - 0.1 * x.log_softmax(1).mean(1)).mean(), classes,
    ),
    "probabilities: soft targets": (
        lambda x, t: -(t.softmax(1) * x.log_softmax(1)).sum(1).mean(), rows,
    ),
    "probabilities: kl_div": (
        lambda x, t: (t.exp() * (t - x)).sum() / 4, lambda: [r.log_softmax(1) for r in rows()],
    ),
    "divergence: forward": (
        lambda x, t: (t.softmax(1) * (t.log_softmax(1) - x.log_softmax(1))).sum(1).mean(), rows,
    ),
    "divergence: reverse": (
        lambda x, t: (x.softmax(1) * (x.log_softmax(1) - t.log_softmax(1))).sum(), rows,
    ),
    "divergence: temperature": (
        lambda x, t: 4 * F.kl_div((x / 2).log_softmax(1), (t / 2).softmax(1), reduction="sum"),
        rows,
    ),
    "divergence: Jensen-Shannon": (
        lambda x, t: sum(
            0.5 * (p.exp() * (p - (0.5 * (x.softmax(1) + t.softmax(1))).log())).sum(1).mean()
            for p in (x.log_softmax(1), t.log_softmax(1))
        ),
        rows,
    ),
    "divergence: over two dimensions": (
        lambda x, t: (t.softmax(0) * (t.log_softmax(1) - x.log_softmax(1))).sum(1).mean(), rows,
    ),
    "left out: at infinities": (
        lambda x, t: -torch.masked_fill(
            t.softmax(1) * x.log_softmax(1), x.isinf(), 0
        ).sum(1).mean(),
        rows,
    ),
    "left out: nan": (lambda x, t: F.cross_entropy(x, t, reduction="none").nanmean(), classes),
    "joined: chunks": (
        lambda x, t: torch.cat([
            F.cross_entropy(a, b, reduction="none")
            for a, b in zip(x.chunk(2), t.chunk(2), strict=True)
        ]),
        classes,
    ),
    "joined: out of order": (
        lambda x, t: torch.cat([
            F.cross_entropy(a, b, reduction="none")
            for a, b in zip(x.chunk(2)[::-1], t.chunk(2), strict=True)
        ]),
        classes,
    ),
    "joined: not all": (
        lambda x, t: torch.cat([
            F.cross_entropy(x[i : i + 1], t[i : i + 1], reduction="none") for i in range(3)
        ]),
        classes,
    ),
    "table: options": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=3, label_smoothing=0.1), classes,
    ),
    "table: sum": (lambda x, t: F.smooth_l1_loss(x, t, reduction="sum", beta=0.5), pair),
    "table: legacy": (lambda x, t: F.mse_loss(x, t, size_average=False), pair),
    "table: no op": (lambda x, t: F.soft_margin_loss(x, t), pair),
    "absorb: a cast": (lambda x, t: F.mse_loss(x.bfloat16().float(), t), pair),
    "absorb: a logarithm": (lambda x, t: F.kl_div(x.log(), t, reduction="sum"), pair),
    "absorb: of both": (
        lambda x, t: F.mse_loss(x.bfloat16().float(), t.bfloat16().float()), pair,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BODIES)
def test_candidates(name):
    """Every reading of the last node that has one, first that which takes most into its op."""
    function, inputs = BODIES[name]
    gm = dynamo(function, *inputs()).gm
    found_by, _ = recognizer(gm)
    candidates = (list(found_by.candidates(node)) for node in reversed(gm.graph.nodes))
    found = [told(each) for each in next(filter(None, candidates), [])]
    decisions.check("candidates", name, found or ["nothing"])


def test_nothing_is_a_loss():
    """Integers, other shapes and other functions are none."""
    for function in (
        lambda x, t: (x - t).square(),
        lambda x, t: (x > t).sum(),
        lambda x, t: (x - t).square().amax(),
        lambda x, t: (x - t).square().cumsum(0),
    ):
        found_by, root = recognizer(dynamo(function, *pair()).gm)
        assert list(found_by.candidates(root)) == []
