"""Cross entropy with class indices, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, OneHotCategorical

from tests.specs.inputs import (
    classes,
    cubes,
    half_classes,
    half_tokens,
    masked_tokens,
    pixels,
    plain_classes,
    square_classes,
    tokens,
)
from tests.specs.spec import Spelling


def gathered(x, t):
    return x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)


def policy_gradient(x, t, advantage):
    return -(gathered(x, t) * advantage).mean()


def importance_ratio(x, t):
    log_p = gathered(x, t)
    return torch.exp(log_p - log_p.detach()).mean()


def masked_mean(x, t, mask):
    return -(gathered(x, t) * mask).sum() / mask.sum()


def per_sequence(x, t, mask):
    return -((gathered(x, t) * mask).sum(-1) / mask.sum(-1)).mean()


def direct_preference(x, t, mask):
    """DPO's log-probability of a sequence, twice."""
    chosen = (gathered(x, t) * mask).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - chosen.detach())).mean()


def shifted_log_probabilities(x, t):
    log_p = F.log_softmax(x, dim=-1)
    return -log_p[:, :-1].gather(2, t[:, 1:].unsqueeze(2)).squeeze(2).mean()


def shifted_logits(x, t):
    logits, labels = x[:, :-1], t[:, 1:]
    return F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), labels)


def flattened_log_probabilities(x, t):
    log_p = F.log_softmax(x, -1)
    return F.nll_loss(log_p.view(-1, log_p.size(-1)), t.view(-1))


def with_module(x, t):
    return nn.NLLLoss(ignore_index=3)(nn.LogSoftmax(dim=1)(x), t)


def selective(x, t):
    """TRL's selective_log_softmax."""
    picked = torch.gather(x, dim=-1, index=t.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(x, dim=-1)


def of_categorical(x, t):
    return Categorical(logits=x).log_prob(t)


def reinforce(x, t, mask):
    policy = Categorical(logits=x)
    return -(policy.log_prob(t) * mask).sum() / mask.sum()


def broadcast_without_gradients(x, t):
    """What has the shape already is returned as it is, with its gradient."""
    log_p = x.log_softmax(-1)
    with torch.no_grad():
        index, log_p = torch.broadcast_tensors(t.unsqueeze(-1), log_p)
    return -log_p.gather(-1, index[..., :1]).mean() + 0 * x.sum()


def of_one_hot_categorical(x, t):
    return -OneHotCategorical(logits=x).log_prob(F.one_hot(t, 10).float()).mean()


def num_items(x, t):
    count = (t != -100).sum()
    return F.cross_entropy(x.view(-1, 10), t.view(-1), reduction="sum") / count


def num_items_of_log_probabilities(x, t):
    return -gathered(x, t).sum() / t.numel()


def two_dimensional_arange(x, t):
    rows, columns = torch.arange(2)[:, None], torch.arange(3)
    return -x.log_softmax(-1)[rows, columns, t].mean()


def negative_index(x, t):
    return -x.log_softmax(-1)[torch.arange(6), t - 10].mean()


def log_softmax_used_elsewhere(x, t):
    log_p = F.log_softmax(x, -1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return F.nll_loss(log_p, t) + 0 * entropy


def perplexity(x, t):
    return torch.exp(F.nll_loss(F.log_softmax(x, 1), t))


def by_hand(x, t):
    exponentials = torch.exp(x)
    probabilities = exponentials / exponentials.sum(dim=1, keepdim=True)
    return -torch.log(probabilities[range(len(t)), t]).mean()


MATCHES = [
    Spelling("Categorical", lambda x, t: -of_categorical(x, t).mean(), classes),
    Spelling("Categorical, each", of_categorical, tokens),
    Spelling("Categorical, sum", lambda x, t: -of_categorical(x, t).sum(), tokens),
    Spelling("Categorical of a policy", reinforce, masked_tokens),
    Spelling("broadcast without gradients", broadcast_without_gradients, classes),
    Spelling(
        "none, then nanmean",
        lambda x, t: F.cross_entropy(x, t, reduction="none").nanmean(),
        classes,
    ),
    Spelling("OneHotCategorical", of_one_hot_categorical, classes),
    Spelling("nll of log_softmax", lambda x, t: F.nll_loss(F.log_softmax(x, -1), t), classes),
    Spelling("nll of method", lambda x, t: F.nll_loss(x.log_softmax(dim=1), t), classes),
    Spelling("nll sum", lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="sum"), classes),
    Spelling("nll none", lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="none"), classes),
    Spelling(
        "nll none, mean",
        lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="none").mean(),
        classes,
    ),
    Spelling("nll of log(softmax)", lambda x, t: F.nll_loss(torch.log(x.softmax(1)), t), classes),
    Spelling("nll of pixels", lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), pixels),
    Spelling(
        "nll of torch.log_softmax", lambda x, t: F.nll_loss(torch.log_softmax(x, 1), t), classes
    ),
    Spelling("nn.NLLLoss of nn.LogSoftmax", with_module, classes),
    Spelling("nll of a view", flattened_log_probabilities, tokens),
    Spelling("nll of a transpose", shifted_logits, tokens),
    Spelling("nll of float()", lambda x, t: F.nll_loss(x.float().log_softmax(1), t), half_classes),
    Spelling(
        "nll of log_softmax in float32",
        lambda x, t: F.nll_loss(F.log_softmax(x, 1, dtype=torch.float32), t),
        half_classes,
    ),
    Spelling("gather, mean", lambda x, t: -x.log_softmax(1).gather(1, t[:, None]).mean(), classes),
    Spelling(
        "gather, view",
        lambda x, t: -x.log_softmax(1).gather(1, t.view(-1, 1)).view(-1).mean(),
        classes,
    ),
    Spelling("gather, sum", lambda x, t: -gathered(x, t).sum(), tokens),
    Spelling("gather, negated mean", lambda x, t: (-gathered(x, t)).mean(), tokens),
    Spelling("gather times -1", lambda x, t: (gathered(x, t) * -1).mean(), tokens),
    Spelling("gather over the batch", lambda x, t: -gathered(x, t).sum() / len(x), tokens),
    Spelling("token log-probabilities", gathered, tokens),
    Spelling("kept dimension", lambda x, t: x.log_softmax(1).gather(1, t[:, None]), classes),
    Spelling("gather of float()", lambda x, t: gathered(x.float(), t).mean(), half_tokens),
    Spelling(
        "take_along_dim",
        lambda x, t: -x.log_softmax(1).take_along_dim(t[:, None], 1).mean(),
        classes,
    ),
    Spelling(
        "gather of the log", lambda x, t: -x.softmax(1).log().gather(1, t[:, None]).mean(), classes
    ),
    Spelling(
        "log of the gather", lambda x, t: -x.softmax(1).gather(1, t[:, None]).log().mean(), classes
    ),
    Spelling(
        "classes first", lambda x, t: -x.t().log_softmax(0).gather(0, t[None]).mean(), classes
    ),
    Spelling(
        "gather of pixels", lambda x, t: -x.log_softmax(1).gather(1, t[:, None]).mean(), pixels
    ),
    Spelling("as many rows as classes", lambda x, t: -gathered(x, t).mean(), square_classes),
    Spelling("shifted log-probabilities", shifted_log_probabilities, tokens),
    Spelling("masked mean", masked_mean, masked_tokens),
    Spelling("mean per sequence", per_sequence, masked_tokens),
    Spelling("policy gradient", policy_gradient, masked_tokens),
    Spelling("importance ratio", importance_ratio, tokens),
    Spelling("direct preference", direct_preference, masked_tokens),
    Spelling("logsumexp less gather", lambda x, t: -selective(x, t).mean(), tokens),
    Spelling("gather less logsumexp", selective, tokens),
    Spelling(
        "logsumexp kept",
        lambda x, t: (x.logsumexp(1, keepdim=True) - x.gather(1, t[:, None])).mean(),
        classes,
    ),
    Spelling(
        "log of a sum of exp",
        lambda x, t: (x.exp().sum(1).log() - x.gather(1, t[:, None]).squeeze(1)).mean(),
        classes,
    ),
    Spelling("softmax by hand", by_hand, classes),
    Spelling("arange", lambda x, t: -x.log_softmax(1)[torch.arange(len(t)), t].mean(), classes),
    Spelling("range", lambda x, t: -x.log_softmax(1)[range(6), t].mean(), classes),
    Spelling(
        "arange of the log",
        lambda x, t: -torch.log(x.softmax(1)[torch.arange(6), t]).sum(),
        classes,
    ),
    Spelling(
        "arange of logits", lambda x, t: (x.logsumexp(1) - x[torch.arange(6), t]).mean(), classes
    ),
    Spelling("two aranges", two_dimensional_arange, tokens),
    Spelling("index from the end", negative_index, classes),
    Spelling("one_hot", lambda x, t: -(F.one_hot(t, 10) * x.log_softmax(1)).sum(1).mean(), classes),
    Spelling(
        "one_hot of float",
        lambda x, t: -(F.one_hot(t, 10).float() * x.log_softmax(1)).sum() / 6,
        classes,
    ),
    Spelling(
        "one_hot, each row",
        lambda x, t: (-F.one_hot(t, 10) * x.log_softmax(-1)).sum(dim=-1),
        classes,
    ),
    Spelling(
        "one_hot, mean",
        lambda x, t: -(x.log_softmax(1) * F.one_hot(t, x.size(1)).to(x.dtype)).mean(),
        classes,
    ),
    Spelling("sum over num_items", num_items, tokens),
    Spelling("sum over numel", num_items_of_log_probabilities, tokens),
    Spelling("none, sum", lambda x, t: F.cross_entropy(x, t, reduction="none").sum() / 6, classes),
    Spelling("log_softmax used elsewhere", log_softmax_used_elsewhere, classes),
    Spelling("perplexity", perplexity, classes),
]


def changed_log_probabilities(x, t):
    log_p = F.log_softmax(x, -1)
    log_p.mul_(2)
    return -log_p.gather(-1, t.unsqueeze(-1)).mean()


def changed_logits(x, t):
    x = x * 1
    largest = x.logsumexp(1)
    x.add_(1)
    return (largest - x.gather(1, t[:, None]).squeeze(1)).mean()


def cut_log_probabilities(x, t):
    with torch.no_grad():
        log_p = F.log_softmax(x, -1)
    return -log_p.gather(1, t[:, None]).mean() + x.sum() * 0


def cut_logsumexp(x, t):
    """The same logits are computed twice, once without gradients."""
    with torch.no_grad():
        logsumexp = x.abs().logsumexp(1)
    return (logsumexp - x.abs().gather(1, t[:, None]).squeeze(1)).mean()


def two_tensors(x, t):
    return ((x * 2).logsumexp(1) - x.gather(1, t[:, None]).squeeze(1)).mean()


def negative_rows(x, t):
    return -x.log_softmax(1)[torch.arange(6).flip(0), t].mean()


def permuted(x, t):
    """The classes come to lie first, where nll_loss looks for the batch."""
    return F.nll_loss(x.log_softmax(-1).permute(2, 1, 0), t)


def mean_of_probabilities(x, t):
    return -torch.log(x.softmax(-1).gather(1, t[:, None]).mean())


def one_class_for_all(x, t):
    """Expanded along the rows."""
    index, log_p = torch.broadcast_tensors(t[:1].unsqueeze(-1), x.log_softmax(-1))
    return -log_p.gather(-1, index[..., :2]).mean()


NEAR_MISSES = [
    Spelling("one class for all", one_class_for_all, classes),
    Spelling(
        "Categorical of probabilities",
        lambda x, t: -Categorical(probs=x.softmax(-1)).log_prob(t).mean(),
        classes,
    ),
    Spelling(
        "gather over rows",
        lambda x, t: -x.log_softmax(0).gather(1, t[:, None]).mean(),
        square_classes,
    ),
    Spelling(
        "softmax over rows",
        lambda x, t: -x.log_softmax(1).gather(0, t[None]).mean(),
        square_classes,
    ),
    Spelling(
        "eps inside the log",
        lambda x, t: -(x.softmax(1).gather(1, t[:, None]) + 1e-9).log().mean(),
        classes,
    ),
    Spelling(
        "clamped probability",
        lambda x, t: -x.softmax(1).gather(1, t[:, None]).clamp(1e-9).log().mean(),
        classes,
    ),
    Spelling("probability", lambda x, t: -x.softmax(1).gather(1, t[:, None]).mean(), classes),
    Spelling("log of the mean", mean_of_probabilities, classes),
    Spelling("sigmoid", lambda x, t: -F.logsigmoid(x).gather(1, t[:, None]).mean(), classes),
    Spelling(
        "focal",
        lambda x, t: (-((1 - x.softmax(1)) ** 2) * x.log_softmax(1)).gather(1, t[:, None]).mean(),
        classes,
    ),
    Spelling(
        "entropy",
        lambda x, t: -(x.softmax(1) * x.log_softmax(1)).sum(1).mean() + 0 * t.sum(),
        classes,
    ),
    Spelling("z-loss", lambda x, t: (x.logsumexp(1) ** 2).mean() + 0 * t.sum(), classes),
    Spelling(
        "logsumexp plus gather",
        lambda x, t: (x.logsumexp(1) + x.gather(1, t[:, None]).squeeze(1)).mean(),
        classes,
    ),
    Spelling(
        "twice the logsumexp",
        lambda x, t: (2 * x.logsumexp(1) - x.gather(1, t[:, None]).squeeze(1)).mean(),
        classes,
    ),
    Spelling("of other logits", two_tensors, classes),
    Spelling(
        "broadcast by mistake",
        lambda x, t: (x.logsumexp(1) - x.gather(1, t[:, None])).mean(),
        classes,
    ),
    Spelling(
        "unsqueezed the wrong way",
        lambda x, t: (x.logsumexp(1).unsqueeze(0) - x.gather(1, t[:, None])).mean(),
        square_classes,
    ),
    Spelling(
        "one_hot of one class",
        lambda x, t: -(F.one_hot(t * 0, 1) * x.log_softmax(1)).sum(1).mean(),
        classes,
    ),
    Spelling(
        "one_hot of more classes",
        lambda x, t: -(F.one_hot(t, 10).float() * x[:, :1].log_softmax(1)).sum(1).mean(),
        classes,
    ),
    Spelling("cut off on one side", cut_logsumexp, classes),
    Spelling("sum of a number", lambda x, t: x[0].logsumexp(0).sum(0) + 0 * t.sum(), classes),
    Spelling(
        "softmax of a number", lambda x, t: x.sum().softmax(0).t().sum() + 0 * t.sum(), classes
    ),
    Spelling("rows in another order", negative_rows, classes),
    Spelling("all pairs of rows", lambda x, t: -x.log_softmax(1)[:, t].mean(), classes),
    Spelling(
        "two picks",
        lambda x, t: -x.log_softmax(1).gather(1, t[:, None].expand(6, 2)).mean(),
        classes,
    ),
    Spelling("some rows", lambda x, t: -x.log_softmax(1).gather(1, t[:4, None]).mean(), classes),
    Spelling(
        "changed log-probabilities", changed_log_probabilities, plain_classes, "changed in place"
    ),
    Spelling("changed logits", changed_logits, plain_classes, "changed in place"),
    Spelling("gradient cut", cut_log_probabilities, classes, "without gradients"),
    Spelling(
        "detached",
        lambda x, t: -x.log_softmax(1).detach().gather(1, t[:, None]).mean() + x.sum() * 0,
        classes,
    ),
]

#: nll_loss of something else than a log_softmax of the classes stays an nll_loss.
OTHER_LIKELIHOODS = [
    Spelling("of probabilities", lambda x, t: F.nll_loss(x.softmax(1), t), classes),
    Spelling("over rows", lambda x, t: F.nll_loss(x.log_softmax(0), t), square_classes),
    Spelling("clamped", lambda x, t: F.nll_loss(x.log_softmax(1).clamp(-5), t), classes),
    Spelling("eps", lambda x, t: F.nll_loss(torch.log(x.softmax(1) + 1e-8), t), classes),
    Spelling("as it is", F.nll_loss, classes),
    Spelling("permute for transpose", permuted, cubes),
]
