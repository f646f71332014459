"""Several classes of each row that losses pick of a head's logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_losses.linear import linear_top_k_kl_div
from tests.corpus.program import programs
from tests.corpus.rows import BATCH, CLASSES, TOKENS, problem
from tests.corpus.shared import entropy_of

COUNT = 5


def sparse_problem(dtype=torch.float64, *, frozen=False, tokens=TOKENS, count=COUNT):
    """Hidden states, weight, labels, a mask, a teacher's log-probabilities and their classes."""
    h, w, labels, mask, *_ = problem(dtype, frozen=frozen, tokens=tokens)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(BATCH, tokens, CLASSES, generator=generator, dtype=torch.float64)
    teacher, index = F.log_softmax(2 * logits, -1).topk(count, -1)
    index[:, ::3, -1] = index[:, ::3, 0]  # equal classes of a row
    return h, w, labels, mask, teacher.to(dtype), index


def masked_mean(each, mask):
    return (each * mask).sum() / mask.sum()


def cross_entropy_of_picks(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    return -(teacher.exp() * log_probs).sum(-1).mean()


def divergence_of_picks(h, w, labels, mask, teacher, index):
    """Of a teacher's stored log-probabilities."""
    log_probs = F.log_softmax(F.linear(h, w) / 2, dim=-1)
    student = torch.gather(log_probs, dim=-1, index=index)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def unreduced_divergence(h, w, labels, mask, teacher, index):
    student = F.linear(h, w).log_softmax(-1).gather(-1, index)
    each = F.kl_div(student, teacher, reduction="none", log_target=True)
    return masked_mean(each.sum(-1), mask)


def less_logsumexp(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    student = logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def with_hard_labels(h, w, labels, mask, teacher, index):
    """And the accuracy and an entropy, all of the same logits."""
    logits = F.linear(h, w)
    hard = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
    student = F.log_softmax(logits, -1).gather(-1, index)
    soft = (teacher.exp() * (teacher - student)).sum(-1)
    with torch.no_grad():
        hits = (logits.argmax(-1) == labels).double().mean()
    return 0.5 * hard + 0.5 * masked_mean(soft, mask) - 0.01 * entropy_of(logits).mean(), hits


def renormalised(h, w, labels, mask, teacher, index):
    """Both over the support: the logsumexp over all classes has no part in that."""
    student = F.log_softmax(F.linear(h, w).gather(-1, index), -1)
    teacher = F.log_softmax(teacher, -1)
    return masked_mean((teacher.exp() * (teacher - student)).sum(-1), mask)


def renormalised_log_probs(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w) / 0.7, -1).gather(-1, index)
    student = student - student.logsumexp(-1, keepdim=True)
    teacher = teacher - teacher.logsumexp(-1, keepdim=True)
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / mask.sum()


def reversed_divergence(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    return masked_mean((student.exp() * (student - teacher)).sum(-1), mask)


def with_a_tail(h, w, labels, mask, teacher, index):
    """The mass of all other classes is one class more."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index[..., 1:])
    tails = [torch.log1p(-x.exp().sum(-1).clamp(max=0.999)) for x in (student, teacher[..., 1:])]
    kept = (teacher[..., 1:].exp() * (teacher[..., 1:] - student)).sum(-1)
    return masked_mean(kept + tails[1].exp() * (tails[1] - tails[0]), mask)


def with_a_tail_beside(h, w, labels, mask, teacher, index):
    """The same in one tensor, as TRL has it."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index[..., 1:])

    def with_tail(log_probs):
        total = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([log_probs, torch.log(-torch.expm1(total))], -1)

    student, teacher = with_tail(student), with_tail(teacher[..., 1:])
    return masked_mean((teacher.exp() * (teacher - student)).sum(-1), mask)


def capped(h, w, labels, mask, teacher, index):
    logits = 5 * torch.tanh(F.linear(h, w) / 5)
    return -(teacher.exp() * F.log_softmax(logits, -1).gather(-1, index)).sum(-1).mean()


def of_shifted_rows(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)[:, :-1]
    student = F.log_softmax(logits, -1).gather(-1, index[:, 1:])
    hard = F.cross_entropy(logits.reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
    return hard - masked_mean((teacher[:, 1:].exp() * student).sum(-1), mask[:, 1:])


def of_flat_rows(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w).view(-1, CLASSES), -1)
    student = student.gather(1, index.flatten(0, 1))
    return -(teacher.flatten(0, 1).exp() * student).sum() / mask.sum()


def along_a_dimension(h, w, labels, mask, teacher, index):
    """torch.take_along_dim is a gather."""
    student = torch.take_along_dim(F.linear(h, w).log_softmax(-1), index, -1)
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def of_one_support(h, w, labels, mask, teacher, index):
    """The same classes of every row, expanded."""
    student = F.log_softmax(F.linear(h, w), -1)
    student = student.gather(-1, index[:1, :1].expand(BATCH, h.shape[1], -1))
    return -masked_mean(student.exp().sum(-1).log(), mask)


def both_ways(h, w, labels, mask, teacher, index):
    """The logits are read twice, at the same classes."""
    logits = F.linear(h, w)
    student = F.log_softmax(logits, -1).gather(-1, index)
    picked = logits.gather(-1, index)
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    return masked_mean(forward, mask) + 1e-3 * masked_mean(picked.square().sum(-1), mask)


def of_the_function(h, w, labels, mask, teacher, index):
    return linear_top_k_kl_div(h, w, teacher, index, temperature=1.5, renormalize=True)


def other_picks(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w), -1)
    other = (index + 1) % CLASSES
    return (log_probs.gather(-1, index) - 0.1 * log_probs.gather(-1, other)).square().mean()


def picks_of_some_rows(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    some = F.log_softmax(logits[:, 3:], -1).gather(-1, index[:, 3:])
    return entropy_of(logits).mean() - (teacher[:, 3:].exp() * some).mean()


def probabilities_of_picks(h, w, labels, mask, teacher, index):
    student = F.softmax(F.linear(h, w), -1).gather(-1, index)
    return (student - teacher.exp()).square().mean()


#: What the forward can compute the gradients of.
def of_two_parts(h, w, labels, mask, teacher, index):
    """The first classes of each row beside the last, one of them by itself."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    first, second, rest = student.split([1, 1, COUNT - 2], -1)
    again = torch.cat([rest, first, second], -1).softmax(-1)
    return masked_mean((again * teacher).sum(-1) + (first * second)[..., 0], mask)


BY_ROW = {
    f.__name__: f
    for f in (
        cross_entropy_of_picks, divergence_of_picks, unreduced_divergence, less_logsumexp,
        with_hard_labels, renormalised, renormalised_log_probs, reversed_divergence, with_a_tail,
        with_a_tail_beside,
        capped, of_shifted_rows, of_flat_rows, along_a_dimension, of_one_support, both_ways,
        other_picks, picks_of_some_rows, probabilities_of_picks, of_two_parts,
    )
}  # fmt: skip


def of_other_rows(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    each = (student.exp() * teacher).sum(-1)
    return (each - each.mean()).square().mean()


def across_the_picks(h, w, labels, mask, teacher, index):
    """Each number depends on its neighbours in the row."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    return masked_mean(student.exp().cumsum(-1).square().sum(-1), mask)


def of_its_own_logits(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w), -1)
    own = log_probs.topk(COUNT, -1).indices
    return -masked_mean((teacher.exp() * log_probs.gather(-1, own)).sum(-1), mask)


def beside_its_own_argmax(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    best = logits.argmax(-1, keepdim=True)
    index = torch.cat([index[..., 1:], best], -1)
    return -masked_mean(F.log_softmax(logits, -1).gather(-1, index).sum(-1), mask)


def fewer_rows(h, w, labels, mask, teacher, index):
    """gather leaves out the last rows of each sequence, and the last sequence."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index[:-1, :-2])
    return -(teacher[:-1, :-2].exp() * student).sum()


def along_the_tokens(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    some = index.transpose(1, 2)[:, :3] % TOKENS  # [batch, 3, tokens]
    student = F.log_softmax(logits, -1).gather(1, some)
    return student.square().mean() + torch.logsumexp(logits, -1).mean()


def softmax_over_the_tokens(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w), 1).gather(-1, index)
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def logsumexp_over_the_tokens(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    student = logits.gather(-1, index) - logits.logsumexp(1, keepdim=True)[..., :COUNT]
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def classes_in_the_middle(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w).transpose(1, 2), 1)
    student = log_probs.gather(1, index.transpose(1, 2))
    return -(teacher.transpose(1, 2).exp() * student).sum(1).mean()


def another_temperature(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    soft = F.log_softmax(logits / 2, -1).gather(-1, index)
    hard = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return hard - masked_mean((teacher.exp() * soft).sum(-1), mask)


def shifted(h, w, labels, mask, teacher, index):
    picked = (F.linear(h, w) + 1.5).gather(-1, index)
    return (picked - teacher).square().mean()


def written_between(h, w, labels, mask, teacher, index):
    """The classes that are picked last are others, in the memory of the first."""
    logits, index = F.linear(h, w), index.clone()
    with torch.no_grad():
        first = F.log_softmax(logits, -1).gather(-1, index)
        index.add_(1).remainder_(CLASSES)
        last = F.log_softmax(logits, -1).gather(-1, index)
    return torch.logsumexp(logits, -1).mean(), first, last


def with_the_logits(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    student = F.log_softmax(logits, -1).gather(-1, index)
    return -(teacher.exp() * student).sum(-1).mean(), logits


def scattered(h, w, labels, mask, teacher, index):
    """A dense teacher that is 0 but for a few classes."""
    log_probs = F.log_softmax(F.linear(h, w), -1)
    dense = torch.zeros_like(log_probs).scatter(-1, index, teacher.exp())
    return -(dense * log_probs).sum(-1).mean()


NEAR_MISSES = (
    of_its_own_logits, beside_its_own_argmax, fewer_rows, along_the_tokens,
    softmax_over_the_tokens, logsumexp_over_the_tokens, classes_in_the_middle,
    another_temperature, shifted, written_between, with_the_logits,
)  # fmt: skip

OTHERS = (of_the_function, of_other_rows, across_the_picks)

PROGRAMS = [
    *programs(__name__, BY_ROW, sparse_problem),
    *programs(__name__, (*OTHERS, *NEAR_MISSES), sparse_problem),
]
