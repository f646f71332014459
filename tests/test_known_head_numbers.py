"""What the rows of known heads compute, without the libraries: torch's results and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.known_heads import liger, trl, verl

ROWS, HIDDEN, CLASSES = 6, 8, 10


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(CLASSES, HIDDEN, generator=generator, requires_grad=True)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[1] = target[4] = -100
    return hidden, weight, target


def assert_same(found, expected, hidden, weight):
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs)
        factors = torch.arange(1.0, 1 + ours.numel()).view(ours.shape)
        both = [
            torch.autograd.grad((r * factors).sum(), (hidden, weight), retain_graph=True)
            for r in (ours, torchs)
        ]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "lse_square_scale": 0.1}], ids=str)
def test_liger(reduction, options):
    hidden, weight, target = problem()
    found, *rest = liger.linear_cross_entropy(
        hidden, weight, target, reduction=reduction, label_smoothing=0.1, **options
    )
    assert rest == [None] * 3
    logits = F.linear(hidden, weight)
    if options:
        logits = 2 * torch.tanh(logits / 2)
    losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    losses = losses + options.get("lse_square_scale", 0) * torch.where(
        target == -100, 0, logits.logsumexp(1) ** 2
    )
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / 4}[reduction]
    assert_same([found], [expected], hidden, weight)


def test_a_mean_of_nothing_is_0():
    hidden, weight, target = problem()
    loss, *_ = liger.linear_cross_entropy(hidden, weight, torch.full_like(target, -100))
    assert loss == 0


def log_probs_and_entropy(logits, target):
    logarithms = logits.log_softmax(-1)
    chosen = logarithms.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return chosen, -(logarithms.exp() * logarithms).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_verl(temperature):
    hidden, weight, target = problem()
    target = target.clamp(min=0)
    expected = log_probs_and_entropy(F.linear(hidden, weight) / temperature, target)
    found = verl.log_probs_of_labels(hidden, weight, target, temperature)
    assert_same(found, expected, hidden, weight)
    by_sequence = hidden.view(2, 3, HIDDEN), weight, target.view(2, 3)
    found = verl.log_probs_for_ppo(*by_sequence, temperature)
    assert_same(found, [each.view(2, 3) for each in expected], hidden, weight)


def test_trl():
    hidden, weight, target = problem()
    target = target.clamp(min=0)
    logits = 3 * torch.tanh(2 * F.linear(hidden, weight) / 3) / 0.5
    log_probs, entropy, squares, mean, first = trl.log_probs(
        hidden, weight, None, target, 0.5, 16, final_logit_softcapping=3.0, logit_scale=2.0
    )
    assert_same([log_probs, entropy], log_probs_and_entropy(logits, target), hidden, weight)
    torch.testing.assert_close(squares, (logits.softmax(-1) ** 2).sum(-1).log())
    torch.testing.assert_close(mean, logits.mean(-1))
    assert first.tolist() == (logits.argmax(-1) == target).tolist()
    log_probs, *others = trl.log_probs(hidden, weight, None, target, 0.5, 16, outputs=())
    assert others == [None] * 4
