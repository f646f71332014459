"""Labels and unreduced losses that are changed in place, as libraries write them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.changed_memory import CLASSES, compiled, logits_and_classes, outcome, statuses


def label_smoother(x, t, epsilon=0.1):
    """transformers.LabelSmoother."""
    labels = t[:, None]
    log_probs = -F.log_softmax(x, dim=-1)
    padding_mask = labels.eq(-100)
    labels = torch.clamp(labels, min=0)
    nll_loss = log_probs.gather(dim=-1, index=labels)
    smoothed_loss = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll_loss.masked_fill_(padding_mask, 0.0)
    smoothed_loss.masked_fill_(padding_mask, 0.0)
    num = padding_mask.numel() - padding_mask.long().sum()
    return (1 - epsilon) * (nll_loss.sum() / num) + epsilon * smoothed_loss.sum() / (
        num * log_probs.shape[-1]
    )


def fairseq(x, t, epsilon=0.1):
    lprobs = F.log_softmax(x, -1)
    target = t.unsqueeze(-1)
    nll_loss = -lprobs.gather(dim=-1, index=target)
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    pad_mask = target.eq(1)
    nll_loss.masked_fill_(pad_mask, 0.0)
    smooth_loss.masked_fill_(pad_mask, 0.0)
    eps_i = epsilon / (lprobs.size(-1) - 1)
    return (1.0 - epsilon - eps_i) * nll_loss.sum() + eps_i * smooth_loss.sum()


def open_nmt(x, t):
    one_hot = torch.full((CLASSES,), 0.1 / (CLASSES - 2))
    one_hot[1] = 0
    model_prob = one_hot.repeat(t.size(0), 1)
    model_prob.scatter_(1, t.unsqueeze(1), 0.9)
    model_prob.masked_fill_((t == 1).unsqueeze(1), 0)
    return F.kl_div(F.log_softmax(x, -1), model_prob, reduction="sum")


def annotated(x, t):
    x = x.log_softmax(-1)
    true_dist = x.data.clone()
    true_dist.fill_(0.1 / (CLASSES - 2))
    true_dist.scatter_(1, t.data.unsqueeze(1), 0.9)
    true_dist[:, 0] = 0
    true_dist.masked_fill_((t == 0)[:, None], 0.0)
    return F.kl_div(x, true_dist.clone().detach(), reduction="sum") / 5


def dpo(x, t):
    labels = t.clone()
    loss_mask = labels != 3
    labels[labels == 3] = 0
    per_token = torch.gather(x.log_softmax(-1), dim=1, index=labels.unsqueeze(1)).squeeze(1)
    return -F.logsigmoid((per_token * loss_mask).sum())


def dpo_mean(x, t):
    labels = t.clone()
    labels[labels == 3] = 0
    per_token = torch.gather(x.log_softmax(-1), dim=1, index=labels.unsqueeze(1)).squeeze(1)
    return -per_token.mean()


def bert_masking(x, t):
    labels = t.clone()
    masked = t % 2 == 0
    labels[~masked] = -100
    t[masked] = 0
    return F.cross_entropy(x * 1.0 + 0 * t[:, None], labels)


def losses_dropped(x, t):
    loss = F.mse_loss(x, t[:, None].float().expand_as(x), reduction="none")
    loss[t == 2] = 0
    return loss.mean()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_code", "kernels_for_small_losses")
@pytest.mark.parametrize("way", ["backend", "enable"])
@pytest.mark.parametrize(
    ("function", "op"),
    [
        (label_smoother, "cross_entropy"),
        (fairseq, "cross_entropy"),
        (open_nmt, "kl_div"),
        (annotated, "kl_div"),
        (dpo, "cross_entropy"),
        (dpo_mean, "cross_entropy"),
        (bert_masking, "cross_entropy"),
        (losses_dropped, "mse_loss"),
    ],
)
def test_changed_in_place(function, op, way):
    inputs = logits_and_classes()
    assert statuses(function, inputs) == [(op, "rewritten")]
    # Not stock's compiled function: of torch 2.15, it reads labels after they were changed.
    expected = outcome(function, inputs)
    torch.testing.assert_close(outcome(compiled(function, way), inputs), expected)
