"""Linear layers of student and teacher and the divergence of their outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.program import programs

ROWS, HIDDEN, OF_TEACHER, CLASSES = (2, 6), 8, 12, 50
KL, JS = "linear_softmax_kl_div", "linear_softmax_js_div"
BOTH, STUDENT = "the linear layers of student and teacher", "a linear layer"


def problem(dtype=torch.float32):
    """Hidden states, weight and bias of the student, then of a teacher that is not frozen."""
    student = torch.randn(*ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN), torch.randn(CLASSES)
    teacher = torch.randn(*ROWS, OF_TEACHER), torch.randn(CLASSES, OF_TEACHER)
    tensors = [t.to(dtype) for t in (*student, *teacher, torch.randn(CLASSES))]
    return [t.requires_grad_(i != 3) for i, t in enumerate(tensors)]


def taught(t, tw, tb=None):
    """A teacher's logits, as all libraries have them."""
    with torch.no_grad():
        return F.linear(t, tw, tb)


def soft_targets(student, teacher, temperature=2.0, reduction="batchmean"):
    """Of transformers' examples, and of DistilBERT's."""
    loss = nn.KLDivLoss(reduction=reduction)
    return loss(
        F.log_softmax(student / temperature, dim=-1), F.softmax(teacher / temperature, dim=-1)
    ) * (temperature**2)


def question_answering(h, w, b, t, tw, tb):
    return soft_targets(F.linear(h, w, b), taught(t, tw, tb))


def of_tokens(h, w, b, t, tw, tb):
    """DistilBERT's: all tokens in one dimension."""
    student, teacher = F.linear(h, w, b), taught(t, tw, tb)
    return soft_targets(student.view(-1, CLASSES), teacher.view(-1, CLASSES))


def of_shifted_logits(h, w, b, t, tw, tb):
    student, teacher = F.linear(h, w, b), taught(t, tw, tb)
    return soft_targets(student[:, :-1].contiguous(), teacher[:, :-1].contiguous())


def generalized(student, teacher, beta, temperature=0.9):
    """TRL's GKD."""
    student, teacher = student / temperature, teacher / temperature
    log_p, log_q = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    if beta == 0:
        each = F.kl_div(log_p, log_q, reduction="none", log_target=True)
    elif beta == 1:
        each = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    else:
        weight = torch.tensor(beta, dtype=log_p.dtype)
        log_m = torch.logsumexp(
            torch.stack([log_p + torch.log(1 - weight), log_q + torch.log(weight)]), dim=0
        )
        of_teacher = F.kl_div(log_m, log_q, reduction="none", log_target=True)
        of_student = F.kl_div(log_m, log_p, reduction="none", log_target=True)
        each = weight * of_teacher + (1 - weight) * of_student
    return each.sum() / each.size(0)


def gkd(beta):
    return lambda h, w, b, t, tw, tb: generalized(F.linear(h, w), taught(t, tw), beta)


def reverse_written_out(h, w, b, t, tw, tb):
    """MiniLLM's divergence, over all classes."""
    log_p = F.linear(h, w, b).log_softmax(-1)
    log_q = taught(t, tw, tb).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def in_float32(h, w, b, t, tw, tb):
    """torchtune's and Minitron's: softmaxes in float32 of logits that may be narrower."""
    log_p = F.log_softmax(F.linear(h, w), dim=-1, dtype=torch.float32)
    log_q = F.log_softmax(taught(t, tw), dim=-1, dtype=torch.float32)
    return F.kl_div(log_p, log_q, reduction="sum", log_target=True)


def in_chunks(h, w, b, t, tw, tb):
    """torchtune's loop over chunks of hidden states; here of one."""
    (chunk,), (of_teacher,) = h.chunk(1, dim=1), t.chunk(1, dim=1)
    return soft_targets(F.linear(chunk, w), taught(of_teacher, tw))


def autocast(h, w, b, t, tw, tb):
    with torch.autocast("cpu", torch.bfloat16):
        student, teacher = F.linear(h, w, b), taught(t, tw, tb)
    return soft_targets(student.float(), teacher.float())


def detached_inputs(h, w, b, t, tw, tb):
    """A frozen teacher, whose layer is not in a region without gradients."""
    return soft_targets(F.linear(h, w, b), F.linear(t, tw.detach(), tb.detach()))


@torch.no_grad()
def evaluated(h, w, b, t, tw, tb):
    return question_answering(h, w, b, t, tw, tb)


def changed_teacher(h, w, b, t, tw, tb):
    """Its weights follow the student's after the loss, as a mean teacher's do."""
    tw = tw.detach() * 1
    loss = soft_targets(F.linear(h, w), taught(t, tw))
    tw.mul_(0.9)
    return loss


def changed_teacher_between(h, w, b, t, tw, tb):
    t = t * 1
    teacher = taught(t, tw)
    t.add_(1)
    return soft_targets(F.linear(h, w), teacher)


def other_temperatures(h, w, b, t, tw, tb):
    """They go into the layers' inputs."""
    student, teacher = F.linear(h, w, b) / 2, taught(t, tw, tb) / 3
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


#: The function, the op, and whether the teacher's layer is taken along.
MATCHES = {
    "question answering": (question_answering, KL, BOTH),
    "tokens": (of_tokens, KL, BOTH),
    "shifted": (of_shifted_logits, KL, BOTH),
    "GKD, forward": (gkd(0), KL, BOTH),
    "GKD, reverse": (gkd(1), KL, BOTH),
    "GKD": (gkd(0.3), JS, BOTH),
    "reverse, written out": (reverse_written_out, KL, BOTH),
    "in float32": (in_float32, KL, BOTH),
    "in chunks": (in_chunks, KL, BOTH),
    "autocast": (autocast, KL, BOTH),
    "detached": (detached_inputs, KL, BOTH),
    "other temperatures": (other_temperatures, KL, BOTH),
    "sum": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w), taught(t, tw), reduction="sum"),
        KL, BOTH,
    ),
    "mean": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w), taught(t, tw), reduction="mean"),
        KL, BOTH,
    ),
    "teacher in the student's place": (
        lambda h, w, b, t, tw, tb: soft_targets(taught(t, tw), F.linear(h, w)), KL, BOTH,
    ),
    "frozen head": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w.detach()), taught(t, tw)), KL, BOTH,
    ),
    "frozen trunk": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h.detach(), w, b), taught(t, tw)),
        KL, BOTH,
    ),
    "one weight for both": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w), taught(h.detach() * 2, w)),
        KL, BOTH,
    ),
    "without gradients": (evaluated, KL, BOTH),
    "a teacher of more classes": (
        lambda h, w, b, t, tw, tb: soft_targets(
            F.linear(h, w), taught(t, torch.cat([tw, tw]))[..., :CLASSES]
        ),
        KL, BOTH,
    ),
    "a changed teacher": (changed_teacher, KL, STUDENT),
    "a teacher changed between": (changed_teacher_between, KL, STUDENT),
    "given logits": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w), t.repeat(1, 1, 5)[..., :CLASSES]),
        KL, STUDENT,
    ),
    "teacher of other readers": (
        lambda h, w, b, t, tw, tb: (lambda s, q: soft_targets(s, q) + q.max())(
            F.linear(h, w), taught(t, tw)
        ),
        KL, STUDENT,
    ),
    "teacher with a soft-cap": (
        lambda h, w, b, t, tw, tb: soft_targets(
            F.linear(h, w), 5 * torch.tanh(taught(t, tw) / 5)
        ),
        KL, STUDENT,
    ),
    "teacher's logits detached": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w), F.linear(t, tw).detach()),
        KL, STUDENT,
    ),
}  # fmt: skip


def detached_student(h, w, b, t, tw, tb):
    return soft_targets(F.linear(h, w).detach() + 0 * h.sum(), taught(t, tw))


def changed_between(h, w, b, t, tw, tb):
    h = h * 1
    student = F.linear(h, w.detach())
    h.add_(1)
    return soft_targets(student, taught(t, tw))


#: The divergence alone is an op; a part of the reason.
DIVERGENCE_ALONE = {
    "a teacher that is trained": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w), F.linear(t, tw)),
        "both rows of logits need a gradient",
    ),
    "two heads of one trunk": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w), F.linear(h, w * 2)),
        "both rows of logits need a gradient",
    ),
    "live logits": (
        lambda h, w, b, t, tw, tb: (lambda s: soft_targets(s, taught(t, tw)) + s.square().sum())(
            F.linear(h, w)
        ),
        "the logits have other users",
    ),
    "a self-distilling student": (
        lambda h, w, b, t, tw, tb: (lambda s: soft_targets(s, s.detach().flip(0)))(F.linear(h, w)),
        "made of the logits as well",
    ),
    "classes in the middle": (
        lambda h, w, b, t, tw, tb: F.kl_div(
            F.linear(h, w).transpose(1, 2).log_softmax(1), taught(t, tw).transpose(1, 2).softmax(1),
            reduction="batchmean",
        ),
        "not the last dimension",
    ),
    "changed hidden states": (changed_between, "changed in place"),
    "squares": (
        lambda h, w, b, t, tw, tb: soft_targets(F.linear(h, w).square(), taught(t, tw)),
        "is none of",
    ),
}  # fmt: skip

PROGRAMS = [
    *programs(__name__, MATCHES, problem),
    *programs(__name__, {f"alone: {n}": f for n, f in DIVERGENCE_ALONE.items()}, problem),
]
