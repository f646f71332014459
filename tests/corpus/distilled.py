"""A student's head whose logits a divergence from a teacher reads, and other losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs

ROWS, HIDDEN, OF_TEACHER, CLASSES = (4, 18), 8, 12, 37
BOTH, STUDENT = "absorbed the linear layers of student and teacher", "absorbed a linear layer"


def problem(dtype=torch.float64, *, frozen=False, rows=ROWS, device="cpu"):
    """Hidden states and weight of a student and of a teacher, which is not frozen, and labels of
    which some are ignored."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    h, w, t, tw = draw(*rows, HIDDEN), draw(CLASSES, HIDDEN), draw(*rows, OF_TEACHER), None
    tw = draw(CLASSES, OF_TEACHER).requires_grad_()
    labels = torch.randint(CLASSES, rows, generator=generator).to(device)
    labels[:, ::7] = -100
    return h.requires_grad_(), w.requires_grad_(not frozen), t, tw, labels


def taught(t, tw):
    with torch.no_grad():
        return F.linear(t, tw)


def soft(student, teacher, temperature=2.0, reduction="batchmean"):
    """Of Hinton et al., 2015."""
    log_p, q = F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1)
    return F.kl_div(log_p, q, reduction=reduction) * temperature**2


def hard(student, labels, **options):
    return F.cross_entropy(student.view(-1, student.shape[-1]), labels.reshape(-1), **options)


def hard_and_soft(h, w, t, tw, labels):
    """As of transformers' examples of distillation."""
    student = F.linear(h, w)
    return 0.3 * hard(student, labels) + 0.7 * soft(student, taught(t, tw))


def of_given_logits(h, w, t, tw, labels):
    """Of a teacher whose logits another loss reads, too."""
    student, teacher = F.linear(h, w), taught(t, tw)
    return hard(student, labels) + soft(student, teacher), hard(teacher, labels)


def distil_bert(h, w, t, tw, labels):
    """All tokens in one dimension, with the labels' cross entropy of the same rows."""
    student, teacher = F.linear(h, w).view(-1, CLASSES), taught(t, tw).view(-1, CLASSES)
    return 5 * soft(student, teacher) + 2 * F.cross_entropy(student, labels.view(-1))


def of_shifted_logits(h, w, t, tw, labels):
    student, teacher = (x[:, :-1].contiguous() for x in (F.linear(h, w), taught(t, tw)))
    return hard(student, labels[:, 1:]) + soft(student, teacher, 1.0)


def minitron(h, w, t, tw, labels):
    """The reverse divergence of masked tokens, with a metric beside it."""
    student, teacher = F.linear(h, w), taught(t, tw)
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    each = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    mask = (labels != -100).to(each.dtype)
    with torch.no_grad():
        hits = (student.argmax(-1) == labels).to(each.dtype).sum()
    return (each * mask).sum() / mask.sum() + 0.5 * hard(student, labels), hits


def jensen_shannon(h, w, t, tw, labels, beta=0.3):
    """TRL's GKD, with a bonus for entropy."""
    student, teacher = F.linear(h, w), taught(t, tw)
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    beta = torch.tensor(beta, dtype=log_p.dtype)
    mixed = torch.stack([log_p + torch.log(1 - beta), log_q + torch.log(beta)])
    log_m = torch.logsumexp(mixed, dim=0)
    of_teacher = F.kl_div(log_m, log_q, reduction="none", log_target=True)
    of_student = F.kl_div(log_m, log_p, reduction="none", log_target=True)
    each = beta * of_teacher + (1 - beta) * of_student
    entropy = -(log_p.exp() * log_p).sum(-1)
    return each.sum() / each.size(0) - 0.01 * entropy.mean()


def mean_over_classes(h, w, t, tw, labels):
    student = F.linear(h, w)
    z_loss = torch.logsumexp(student, -1).square().mean()
    return soft(student, taught(t, tw), 0.5, "mean") + 1e-2 * z_loss


def classes_in_the_middle(h, w, t, tw, labels):
    student, teacher = (x.transpose(1, 2) for x in (F.linear(h, w), taught(t, tw)))
    divergence = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="sum")
    return divergence + F.cross_entropy(student, labels, label_smoothing=0.1)


def scaled_and_biased(h, w, t, tw, labels):
    bias, of_teacher = w.sum(1), tw.sum(1)
    student, teacher = F.linear(h, w, bias) * 0.5, taught(t, tw) * 2 + of_teacher.detach()
    return hard(student, labels, reduction="sum") + soft(student, teacher)


def soft_targets(h, w, t, tw, labels):
    """Cross entropy with the teacher's probabilities, alone."""
    student, q = F.linear(h, w).flatten(0, 1), F.softmax(taught(t, tw), -1).flatten(0, 1)
    return F.cross_entropy(student, q)


def soft_targets_by_hand(h, w, t, tw, labels):
    """Of masked tokens, beside labels."""
    student = F.linear(h, w)
    q, log_p = F.softmax(taught(t, tw), -1), F.log_softmax(student, -1)
    each, mask = -(q * log_p).sum(-1), (labels != -100).to(q.dtype)
    return (each * mask).sum() / mask.sum() + hard(student, labels)


def sharpened(h, w, t, tw, labels):
    """As of DINO: another temperature, and a centre that is taken off the teacher's logits."""
    q = ((taught(t, tw) - tw.detach().mean(1)) / 0.25).softmax(-1)
    return F.cross_entropy((F.linear(h, w) / 0.5).flatten(0, 1), q.flatten(0, 1), reduction="sum")


def soft_caps(h, w, t, tw, labels):
    """As of a student and a teacher of Gemma 2."""
    student, teacher = (c * torch.tanh(x / c) for c, x in ((5, F.linear(h, w)), (7, taught(t, tw))))
    return hard(student, labels) + soft(student, teacher)


def a_soft_cap(h, w, t, tw, labels):
    """A divergence alone."""
    return soft(5 * torch.tanh(F.linear(h, w) / 5), taught(t, tw))


FORMS = {
    f.__name__: f
    for f in (
        hard_and_soft, of_given_logits, distil_bert, of_shifted_logits, minitron, jensen_shannon,
        mean_over_classes, classes_in_the_middle, scaled_and_biased, soft_targets,
        soft_targets_by_hand, sharpened, soft_caps, a_soft_cap,
    )
}  # fmt: skip


def a_trained_teacher(h, w, t, tw, labels):
    student = F.linear(h, w)
    return hard(student, labels) + soft(student, F.linear(t, tw))


def itself(h, w, t, tw, labels):
    student = F.linear(h, w)
    return hard(student, labels) + soft(student, student.detach() * 2)


def two_teachers(h, w, t, tw, labels):
    student = F.linear(h, w)
    return soft(student, taught(t, tw)) + soft(student, taught(t.flip(0), tw))


def some_rows(h, w, t, tw, labels):
    student = F.linear(h, w)
    of_some = soft(student[:, :9], taught(t, tw)[:, :9])
    return hard(student, labels) + of_some


def written_teacher(h, w, t, tw, labels):
    student, t = F.linear(h, w), t * 1
    teacher = taught(t, tw)
    divergence = soft(student, teacher)
    t.add_(1)
    return hard(student, labels) + divergence + soft(student, taught(t, tw))


def targets_of_another_kind(h, w, t, tw, labels):
    """Probabilities that are no softmax of logits, and smoothed ones."""
    student, q = F.linear(h, w).flatten(0, 1), taught(t, tw).softmax(-1).flatten(0, 1)
    mixed = F.cross_entropy(student, 0.5 * q + 0.5 / CLASSES)
    return mixed + F.cross_entropy(F.linear(h, 2 * w).flatten(0, 1), q, label_smoothing=0.1)


def trained_targets(h, w, t, tw, labels):
    student, q = F.linear(h, w).flatten(0, 1), F.linear(t, tw).softmax(-1).flatten(0, 1)
    return F.cross_entropy(student, q)


def a_soft_cap_of_a_temperature_of_1(h, w, t, tw, labels):
    """The factor of the soft-cap is taken for a temperature, which cross entropy has not."""
    student, teacher = (5 * torch.tanh(x / 5) for x in (F.linear(h, w), taught(t, tw)))
    return hard(student, labels) + soft(student, teacher, 1.0)


def a_detached_student(h, w, t, tw, labels):
    student = F.linear(h, w)
    return hard(student, labels) + soft(student.detach(), taught(t, tw))


NEAR_MISSES = (
    a_trained_teacher, itself, two_teachers, some_rows, written_teacher,
    a_soft_cap_of_a_temperature_of_1, a_detached_student, targets_of_another_kind, trained_targets,
)  # fmt: skip

PROGRAMS = [*programs(__name__, FORMS, problem), *programs(__name__, NEAR_MISSES, problem)]
