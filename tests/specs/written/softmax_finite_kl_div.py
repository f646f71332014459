"""Distillation without the terms of infinite logits, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import distillation, soft_targets, square_logits
from tests.specs.spec import Spelling

MASK = torch.arange(6) % 3 > 0


def given_distillation():
    """Logits without gradients: torch's gradient of the reverse divergence is nan at infinities."""
    student, teacher = distillation()
    return student.detach(), teacher


def with_infinities(student, teacher):
    """Infinite logits in either row and in both."""
    student = torch.where(teacher > 0.8, -torch.inf, student)
    return student, torch.where(teacher.roll(1, 0) > 0.5, -torch.inf, teacher)


def forward_terms(student, teacher, inf_mask):
    teacher_probs = F.softmax(teacher, dim=-1, dtype=torch.float32)
    student_logprobs = F.log_softmax(student, dim=-1, dtype=torch.float32)
    return torch.masked_fill(teacher_probs * student_logprobs, inf_mask, 0)


def reverse_terms(student, teacher, inf_mask):
    student_probs = F.softmax(student, dim=-1, dtype=torch.float32)
    student_logprobs = F.log_softmax(student, dim=-1, dtype=torch.float32)
    teacher_logprobs = F.log_softmax(teacher, dim=-1, dtype=torch.float32)
    cross = torch.masked_fill(student_probs * teacher_logprobs, inf_mask, 0)
    return cross - torch.masked_fill(student_probs * student_logprobs, inf_mask, 0)


def of_tokens(terms):
    """The mean over the tokens that count."""
    x, mask = torch.sum(terms, dim=-1).view(-1), MASK.int()
    return -torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


def forward(student, teacher):
    """DistiLLM's and torchtune's forward divergence."""
    student, teacher = with_infinities(student, teacher)
    inf_mask = torch.isinf(student)
    teacher_probs = F.softmax(teacher, dim=-1, dtype=torch.float32)
    student_logprobs = F.log_softmax(student, dim=-1, dtype=torch.float32)
    prod_probs = torch.masked_fill(teacher_probs * student_logprobs, inf_mask, 0)
    x, mask = torch.sum(prod_probs, dim=-1).view(-1), MASK.int()
    return -torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


def reverse(student, teacher):
    """DistiLLM's reverse divergence."""
    student, teacher = with_infinities(student, teacher)
    inf_mask = torch.isinf(student) | torch.isinf(teacher)
    return of_tokens(reverse_terms(student, teacher, inf_mask))


def reverse_in_place(student, teacher):
    """MiniLLM's and torchtune's reverse divergence."""
    inf_mask = torch.isinf(student) | torch.isinf(teacher)
    student_prob = F.softmax(student, dim=-1, dtype=torch.float32)
    teacher_logprob = F.log_softmax(teacher, dim=-1, dtype=torch.float32)
    student_logprob = F.log_softmax(student, dim=-1, dtype=torch.float32)
    prod_probs = torch.masked_fill(student_prob * teacher_logprob, inf_mask, 0)
    prod_probs -= torch.masked_fill(student_prob * student_logprob, inf_mask, 0)
    return of_tokens(prod_probs)


def finite_gradients(student, teacher):
    mask = student.isinf().logical_or(teacher.isinf())
    return -reverse_terms(student, teacher, mask).sum(-1).mean()


def subtracted_entropy(student, teacher):
    """The divergence of the student from the teacher, of both rows' finite logits."""
    student, teacher = with_infinities(student, teacher)
    return -reverse_terms(teacher, student, student.isinf() | teacher.isinf()).sum() / 6


def of_temperature(student, teacher):
    """The mask tests logits before they are divided."""
    masked = student.masked_fill(teacher > 1, -torch.inf)
    return -forward_terms(masked / 2, teacher / 2, masked.isinf()).sum(-1).mean() * 4


def each_row(student, teacher):
    masked = student.masked_fill(teacher > 1, -torch.inf)
    return -forward_terms(masked, teacher, masked.detach().isinf()).sum(-1)


def rows_without_a_softmax(student, teacher):
    """A row without any finite logit, a row with a nan, and rows with +inf, without gradients."""
    rows, classes = torch.arange(6)[:, None], torch.arange(10)
    student = torch.where(rows == 1, -torch.inf, student)
    student = torch.where((rows == 2) & (classes == 4), torch.nan, student)
    student = torch.where((rows == 3) & (classes == 4), torch.inf, student)
    teacher = torch.where((rows == 4) & (classes == 4), torch.inf, teacher)
    each = -forward_terms(student, teacher, student.isinf()).sum(-1)
    return torch.nan_to_num(each, nan=100.0, posinf=1000.0, neginf=2000.0)


MATCHES = [
    Spelling("forward", forward, distillation),
    Spelling("reverse", reverse, given_distillation),
    Spelling("reverse in place", reverse_in_place, distillation),
    Spelling("reverse, finite", finite_gradients, distillation),
    Spelling("subtracted entropy", subtracted_entropy, given_distillation),
    Spelling("temperature", of_temperature, distillation),
    Spelling("each row", each_row, distillation),
    Spelling("rows without a softmax", rows_without_a_softmax, given_distillation),
]


def forward_of(student, teacher, mask):
    """The forward divergence with another mask."""
    return -forward_terms(student, teacher, mask).sum(-1).mean()


def reverse_of(student, teacher, mask):
    return -reverse_terms(student, teacher, mask).sum(-1).mean()


def one_unmasked(student, teacher):
    mask = student.isinf() | teacher.isinf()
    p, log_q, log_p = student.softmax(-1), teacher.log_softmax(-1), student.log_softmax(-1)
    return -(torch.masked_fill(p * log_q, mask, 0) - p * log_p).sum(-1).mean()


def different_masks(student, teacher):
    p, log_q, log_p = student.softmax(-1), teacher.log_softmax(-1), student.log_softmax(-1)
    cross = torch.masked_fill(p * log_q, teacher.isinf(), 0)
    return -(cross - torch.masked_fill(p * log_p, student.isinf(), 0)).sum(-1).mean()


def before_the_product(student, teacher):
    """A teacher without a softmax makes this one's row nan, even if no class is left."""
    log_p = student.log_softmax(-1).masked_fill(student.isinf(), 0)
    return -(teacher.softmax(-1) * log_p).sum(-1).mean()


def overwritten_term(student, teacher):
    """The first terms are read once more, after they have been written over."""
    mask = student.isinf() | teacher.isinf()
    p, log_q, log_p = student.softmax(-1), teacher.log_softmax(-1), student.log_softmax(-1)
    terms = torch.masked_fill(p * log_q, mask, 0)
    before = terms
    terms -= torch.masked_fill(p * log_p, mask, 0)
    return -terms.sum(-1).mean() + before.amax()


OTHER_MASK = "its mask of infinities makes it another loss"

NEAR_MISSES = [
    Spelling(
        "mask of the teacher's infinities",
        lambda s, t: forward_of(s, t, t.isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "mask of both's infinities",
        lambda s, t: forward_of(s, t, s.isinf() | t.isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling("mask of nan", lambda s, t: forward_of(s, t, s.isnan()), distillation, OTHER_MASK),
    Spelling(
        "mask of infinities and nan",
        lambda s, t: forward_of(s, t, s.isinf() | s.isnan()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "mask of what is finite",
        lambda s, t: forward_of(s, t, ~s.isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling("mask of +inf", lambda s, t: forward_of(s, t, s.isposinf()), distillation, OTHER_MASK),
    Spelling("mask of -inf", lambda s, t: forward_of(s, t, s.isneginf()), distillation, OTHER_MASK),
    Spelling(
        "mask of another tensor",
        lambda s, t: forward_of(s, t, s.roll(1, 0).isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "mask of multiplied logits",
        lambda s, t: forward_of(s, t, (s * 3).isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "mask of one class",
        lambda s, t: forward_of(s, t, s[:, :1].isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "mask of infinities of both",
        lambda s, t: forward_of(s, t, s.isinf() & t.isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "reverse, mask of the student's infinities",
        lambda s, t: reverse_of(s, t, s.isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "reverse, mask of only the teacher's infinities",
        lambda s, t: reverse_of(s, t, t.isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "reverse, mask of nan as well",
        lambda s, t: reverse_of(s, t, s.isinf() | t.isinf() | s.isnan()),
        distillation,
        OTHER_MASK,
    ),
    Spelling(
        "reverse, mask of another tensor as well",
        lambda s, t: reverse_of(s, t, s.isinf() | t.isinf() | t.roll(1, 0).isinf()),
        distillation,
        OTHER_MASK,
    ),
    Spelling("one term without a mask", one_unmasked, distillation, OTHER_MASK),
    Spelling("different masks", different_masks, distillation, OTHER_MASK),
    Spelling("before the product", before_the_product, distillation, OTHER_MASK),
    Spelling("what is not finite", lambda s, t: forward_of(s, t, ~s.isfinite()), distillation),
    Spelling("read once more", overwritten_term, distillation),
    Spelling(
        "filled with another number",
        lambda s, t: -(t.softmax(-1) * s.log_softmax(-1)).masked_fill(s.isinf(), 1).sum(-1).mean(),
        distillation,
    ),
    Spelling(
        "softmax over rows",
        lambda s, t: -(t.softmax(0) * s.log_softmax(-1)).masked_fill(s.isinf(), 0).sum(-1).mean(),
        square_logits,
        OTHER_MASK,
    ),
    Spelling(
        "given probabilities",
        lambda s, q: -(q * s.log_softmax(-1)).masked_fill(s.isinf(), 0).sum(-1).mean(),
        soft_targets,
        OTHER_MASK,
    ),
]
