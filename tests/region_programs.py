"""Losses of a head's logits that have no op with the head, and such that only look alike.

Each program takes what :func:`problem` makes, and returns a number, or a tuple that begins with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS, CLASSES, HIDDEN, RANK = 72, 50, 16, 4


def problem(dtype=torch.float64, *, batch=3, tokens=24, device="cpu"):
    """Hidden states, a weight, a bias, an adapter's two weights, labels, a mask, soft labels and a
    second head's weight."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0, trained=True):
        drawn = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype).requires_grad_(trained)

    labels = torch.randint(CLASSES, (batch, tokens), generator=generator)
    labels[:, ::5] = -100
    mask = torch.rand(batch, tokens, generator=generator, dtype=torch.float64) < 0.7
    return (
        normal(batch, tokens, HIDDEN),
        normal(CLASSES, HIDDEN, scale=0.5),
        normal(CLASSES),
        normal(RANK, HIDDEN),
        normal(CLASSES, RANK),
        labels.to(device),
        mask.to(device, dtype),
        normal(batch, tokens, CLASSES, trained=False).softmax(-1),
        normal(CLASSES, HIDDEN, scale=0.5),
    )


def flat(logits, labels):
    return logits.flatten(0, -2), labels.flatten()


def picked(log_p, labels):
    return log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def adapted(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """LoRA on a frozen head."""
    logits = F.linear(h, w.detach()) + 2.0 * F.linear(F.linear(h, lora_a), lora_b)
    return F.cross_entropy(*flat(logits, labels))


def clamped(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    return F.cross_entropy(*flat(F.linear(h, w, b).clamp(-2, 2), labels))


def normalised(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w, b)
    return F.cross_entropy(*flat(logits / (0.1 + logits.std(-1, keepdim=True)), labels))


def capped_otherwise(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w)
    return F.cross_entropy(*flat(3 * logits * torch.rsqrt(logits.square() + 9), labels))


def with_margin(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """AM-softmax."""
    cosine = F.linear(F.normalize(h, dim=-1), F.normalize(w, dim=-1))
    target = labels.clamp(min=0)
    return F.cross_entropy(*flat(8 * (cosine - 0.35 * F.one_hot(target, CLASSES)), target))


def with_scattered_margin(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """The margin has no rounding error: torch 2.11 makes float32 of the scattered number."""
    logits = F.linear(h, w)
    target = labels.clamp(min=0)
    chosen = torch.zeros_like(logits).scatter_(-1, target[..., None], 1.0)
    return F.cross_entropy(*flat(4 * (logits - 0.25 * chosen), target))


def penalised(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """A penalty on confidence."""
    logits = F.linear(h, w)
    squares = logits.softmax(-1).square().sum(-1)
    each = F.cross_entropy(*flat(logits, labels), reduction="none").view_as(mask)
    return ((each + 0.1 * squares) * mask).sum() / mask.sum()


def smoothed_by_hand(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    log_p = F.linear(h, w, b).log_softmax(-1)
    return -(0.9 * picked(log_p, labels) + 0.1 * log_p.clamp(min=-20).mean(-1)).mean()


def of_soft_labels(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    return F.cross_entropy(F.linear(h, w, b).flatten(0, 1), soft.flatten(0, 1))


def of_a_teacher_by_hand(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    log_p = F.log_softmax(F.linear(h, w) / 0.7, -1)
    return -((soft * log_p).sum(-1) * mask).sum() / mask.sum()


def two_temperatures(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w)
    return F.cross_entropy(*flat(logits, labels)) + F.cross_entropy(*flat(logits / 2, labels))


def two_teachers(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    log_p = F.linear(h, w).log_softmax(-1)
    teachers = [F.linear(h.detach(), each.detach()).softmax(-1) for each in (other, other * 0.9)]
    return sum(F.kl_div(log_p, each, reduction="batchmean") for each in teachers)


def both_ways(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """R-Drop: both rows of logits have gradients."""
    one, two = (F.linear(h, each).log_softmax(-1) for each in (w, other))
    there = F.kl_div(one, two, reduction="none", log_target=True).sum(-1)
    back = F.kl_div(two, one, reduction="none", log_target=True).sum(-1)
    return -(picked(one, labels) + picked(two, labels)).mean() + (there + back).mean()


def with_the_largest(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w, b)
    return F.cross_entropy(*flat(logits, labels)) + 0.1 * logits.max(-1).values.mean()


def poly(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w, b)
    each = F.cross_entropy(*flat(logits, labels), reduction="none").view_as(mask)
    return (each + 1 - picked(logits.softmax(-1).clamp(min=0.01), labels)).mean()


def hinge(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """No softmax at all."""
    logits = F.linear(h, w, b)
    own = logits.gather(-1, labels.clamp(min=0)[..., None])
    return (F.relu(1 + logits - own).sum(-1) * mask).mean()


def of_each_class(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    return F.binary_cross_entropy(torch.sigmoid(F.linear(h, w, b)), soft)


def of_classes(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """A number for each class, and a temperature of each row."""
    logits = F.linear(h, w) * (1 + mask[..., None]) + b * 2
    return F.cross_entropy(*flat(logits.clamp(-5, 5), labels))


def with_metrics(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w, b).clamp(-3, 3)
    metrics = logits.detach()
    hits = (metrics.argmax(-1) == labels).double().mean()
    spread = metrics.amax(-1) - metrics.amin(-1)
    return F.cross_entropy(*flat(logits, labels)), hits, spread, metrics.var(-1).mean()


def of_learned_weights(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """The backward reads what each row lost."""
    each = F.linear(h, w, b).clamp(-3, 3).logsumexp(-1)
    return (each * (h * lora_a[0]).sum(-1).exp()).mean()


def of_a_part_that_is_unused(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w, b)
    logits.detach().square().mean()
    return F.cross_entropy(*flat(logits.clamp(-3, 3), labels))


def scaled_by_learned_rows(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """The gradient of each row's scale is a number of the row."""
    scales = F.linear(h, lora_a[:1]).exp()
    return F.cross_entropy(*flat((F.linear(h, w) * scales).clamp(-3, 3), labels))


def of_a_learned_temperature(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """The gradient of the temperature is a number of all logits."""
    logits = F.linear(h, w, b) * lora_a[0, 0].exp()
    return F.cross_entropy(*flat(logits.clamp(-9, 9), labels))


def contrastive(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """InfoNCE: a product of two batches, and a learned temperature that is bounded, as CLIP's."""
    one = F.normalize(h.flatten(0, 1), dim=-1)
    two = F.normalize((h * lora_a[0]).flatten(0, 1), dim=-1)
    scale = lora_a[1, 0].exp().clamp(max=100)
    positives = (one * two).sum(-1) * scale
    return ((one @ two.t() * scale).clamp(max=50).logsumexp(-1) - positives).mean()


def without_themselves(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """NT-Xent of SimCLR: a batch with itself, without the diagonal."""
    views = F.normalize(h.flatten(0, 1), dim=-1)
    own = torch.eye(len(views), dtype=torch.bool, device=h.device)
    similar = (views @ views.t() / 0.5).masked_fill(own, float("-inf"))
    return F.cross_entropy(similar, torch.arange(len(views), device=h.device).roll(1))


def of_each_pair(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """SigLIP, with its learned temperature and offset."""
    one, two = h.flatten(0, 1), (h * lora_a[0]).flatten(0, 1)
    logits = one @ two.t() * lora_a[1, 0].exp() + b[0]
    signs = 2 * torch.eye(len(one), dtype=h.dtype, device=h.device) - 1
    return -F.logsigmoid(signs * logits).sum() / len(one)


#: Their gradients are made in the forward.
def confident(logits, labels):
    """Cross entropy of bounded logits, whose labels all count, with a confidence penalty."""
    log_p = logits.clamp(-3, 3).log_softmax(-1)
    return (0.1 * (log_p.exp() * log_p).sum(-1) - picked(log_p, labels)).mean()


def of_shifted_rows(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    return confident(F.linear(h, w, b)[:, :-1], labels[:, 1:])


def of_a_slice_of_a_slice(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    return confident(F.linear(h, w, b)[1:, :-1], labels[1:, 1:].clamp(min=0))


def of_some_rows(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """Those of a matrix, without a bias; float32 from there on."""
    logits = F.linear(h.flatten(0, 1), w)[5:70]
    return confident(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten()[5:70]
    )


def of_rows_at_other_places(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """A teacher's rows begin one later, as a draft model's steps have them."""
    teacher = F.linear(h.detach(), other.detach())[:, 1:].softmax(-1)
    student = F.linear(h, w, b)[:, :-1].softmax(-1)
    return (mask[:, 1:] * (1 - torch.minimum(student, teacher).sum(-1))).sum() / mask[:, 1:].sum()


IN_THE_FORWARD = (
    *(
        adapted,
        clamped,
        normalised,
        capped_otherwise,
        with_margin,
        with_scattered_margin,
        penalised,
    ),
    *(smoothed_by_hand, of_soft_labels, of_a_teacher_by_hand, two_temperatures, two_teachers),
    *(both_ways, with_the_largest, poly, hinge, of_each_class, of_classes, with_metrics),
    *(of_learned_weights, of_a_part_that_is_unused, scaled_by_learned_rows),
    *(of_shifted_rows, of_a_slice_of_a_slice, of_some_rows, of_rows_at_other_places),
    *(of_a_learned_temperature, contrastive, without_themselves, of_each_pair),
)


def of_all_rows(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """The gradient of each row depends on the mean of all."""
    each = -picked(F.linear(h, w, b).clamp(-3, 3).log_softmax(-1), labels)
    return each.mean().log() + (each - each.mean()).square().mean()


def several_tangents(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    each = -picked(F.linear(h, w, b).clamp(-3, 3).log_softmax(-1), labels)
    return each.mean(), (each * mask).sum()


def spread(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """Each row's own gradient reads the mean of all."""
    return F.linear(h, w, b).clamp(-3, 3).logsumexp(-1).std()


def centred(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """A column is made of numbers of all rows."""
    each = F.linear(h, w, b).clamp(-3, 3).logsumexp(-1)
    return (each - each.mean()).pow(4).mean()


#: The backward computes their logits again.
AGAIN = (of_all_rows, several_tangents, spread, centred)


def returned(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w, b).clamp(-3, 3)
    return F.cross_entropy(*flat(logits, labels)), logits


def of_two_slices(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    logits = F.linear(h, w, b)
    return confident(logits[:, :-1], labels[:, 1:]) + confident(logits[:, 1:], labels[:, 1:])


def of_every_other_row(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    return confident(F.linear(h, w, b)[:, ::2], labels[:, ::2])


def across_rows(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """A softmax over the tokens."""
    logits = F.linear(h, w, b)
    return -picked(logits.softmax(1).log(), labels).mean()


def turned_rows(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """The rows stand in another order when the mask meets them."""
    log_p = F.linear(h, w, b).clamp(-3, 3).log_softmax(-1).transpose(0, 1)
    return (log_p.amax(-1) * mask.t()).sum()


def standardised(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """Numbers of all rows go into each."""
    logits = F.linear(h, w, b)
    return F.cross_entropy(*flat(logits - logits.mean(), labels))


def shifted(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """Each row reads the one before."""
    logits = F.linear(h, w, b)
    return F.cross_entropy(*flat(logits + logits.roll(1, 1), labels))


def sorted_rows(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    return F.linear(h, w, b).sort(-1).values[..., :3].mean()


def hidden_layer(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """Another layer reads what looks like logits."""
    return F.linear(F.gelu(F.linear(h, w, b)), w.t()).tanh().sum((0, 1)).amax()


def stacked(h, w, b, lora_a, lora_b, labels, mask, soft, other):
    """One head's logits are made of another's."""
    logits = F.linear(h, w)
    logits = logits + F.linear(torch.relu(logits), w @ w.t())
    return F.cross_entropy(*flat(logits.clamp(-3, 3), labels))


#: With a part of the reason.
LEFT = {
    returned: "returned",
    across_rows: None,
    turned_rows: None,
    standardised: None,
    shifted: None,
    sorted_rows: None,
    of_two_slices: None,
    of_every_other_row: None,
    hidden_layer: None,
    stacked: None,
}
