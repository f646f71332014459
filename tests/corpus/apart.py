"""Logits of several heads that are put together and taken apart again."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.heads import CLASSES, ROWS, flat, head
from tests.corpus.program import programs


def heads_of(h, w, b):
    """The logits of two heads, [2, 6, classes] each."""
    return F.linear(h, w, b), F.linear(h, w.flip(0))


def stacked(dim):
    return lambda h, w, b: torch.stack(heads_of(h, w, b), dim)


def joined(dim):
    return lambda h, w, b: torch.cat(heads_of(h, w, b), dim)


def of_both(whole, take):
    """The sum of the losses of both parts."""

    def step(h, w, b, t):
        logits = whole(h, w, b)
        return flat(take(logits, 0).contiguous(), t) + 2 * flat(take(logits, 1).contiguous(), t)

    return step


def musicgen(h, w, b, t):
    """As transformers has it: the codebooks' logits of the last tokens."""
    lm_logits = torch.stack(heads_of(h, w, b), dim=1)
    logits = lm_logits[:, :, -5:]
    loss = torch.zeros([])
    for codebook in range(2):
        of_codebook = logits[:, codebook].contiguous().view(-1, logits.shape[-1])
        loss = loss + F.cross_entropy(of_codebook, t[:, 1:].reshape(-1))
    return loss / 2


def three_heads(h, w, b, t):
    """Of which the loss reads two."""
    logits = torch.stack((*heads_of(h, w, b), F.linear(h, w)), -2)
    return flat(logits[..., 0, :].contiguous(), t) + flat(logits[..., -1, :].contiguous(), t)


BATCH = ROWS[0]
MATCHES = {
    "stacked first": of_both(stacked(0), lambda x, k: x[k]),
    "stacked second": of_both(stacked(1), lambda x, k: x[:, k]),
    "stacked before the classes": of_both(stacked(-2), lambda x, k: x[:, :, k]),
    "stacked, negative places": of_both(stacked(1), lambda x, k: x[:, k - 2]),
    "stacked, select": of_both(stacked(1), lambda x, k: x.select(1, k)),
    "stacked, unbind": of_both(stacked(1), lambda x, k: x.unbind(1)[k]),
    "stacked, iterated": of_both(stacked(0), lambda x, k: [*x][k]),
    "joined rows": of_both(joined(0), lambda x, k: x[k * BATCH : (k + 1) * BATCH]),
    "joined rows, chunk": of_both(joined(0), lambda x, k: x.chunk(2)[k]),
    "joined rows, split": of_both(joined(1), lambda x, k: torch.split(x, [6, 6], dim=1)[k]),
    "joined rows, narrow": of_both(joined(1), lambda x, k: x.narrow(1, 6 * k, 6)),
    "joined classes": of_both(joined(-1), lambda x, k: x[..., k * CLASSES : (k + 1) * CLASSES]),
    "joined classes, chunk": of_both(joined(-1), lambda x, k: x.chunk(2, -1)[k]),
    "musicgen": musicgen,
    "three heads": three_heads,
}  # fmt: skip


def returned(h, w, b, t):
    logits = torch.stack(heads_of(h, w, b), 1)
    return flat(logits[:, 0].contiguous(), t), logits


def a_part_returned(h, w, b, t):
    """Its memory holds both parts."""
    logits = torch.stack(heads_of(h, w, b), 1)
    return flat(logits[:, 0].contiguous(), t), logits[:, 1]


def written(h, w, b, t):
    logits = torch.stack(heads_of(h, w, b), 1)
    logits[:, :, :, 0] = -3
    return flat(logits[:, 0].contiguous(), t)


def a_part_written(h, w, b, t):
    one, other = heads_of(h, w, b)
    logits = torch.stack((one, other), 1)
    one[..., 0] = -3  # after it was copied
    return flat(logits[:, 0].contiguous(), t) + 0 * one.sum()


def no_gradient(h, w, b, t):
    """What is taken out has a gradient, and the part has none."""
    logits = torch.stack((F.linear(h, w).detach(), F.linear(h, w)), 1)
    return flat(logits[:, 0].contiguous(), t) + flat(logits[:, 1].contiguous(), t)


def of_no_grad(h, w, b, t):
    parts = heads_of(h, w, b)
    with torch.no_grad():
        logits = torch.stack(parts, 1)
    return flat(logits[:, 0].contiguous(), t) + h.sum()


def promoted(h, w, b, t):
    """A concatenation is in the wider dtype."""
    logits = torch.cat((F.linear(h, w), F.linear(h.double(), w.double())))
    return flat(logits[:BATCH], t)


def laid_out_otherwise(h, w, b, t):
    parts = [part.transpose(0, 1) for part in heads_of(h, w, b)]
    return flat(torch.stack(parts, 0)[0], t.t().contiguous())


NEAR_MISSES = {
    "returned": returned,
    "a part returned": a_part_returned,
    "summed": lambda h, w, b, t: flat(torch.stack(heads_of(h, w, b), 1).sum(1), t),
    "also read whole": lambda h, w, b, t: (
        flat((x := torch.stack(heads_of(h, w, b), 1))[:, 0].contiguous(), t) + x.square().mean()
    ),
    "rows of two parts": lambda h, w, b, t: flat(joined(0)(h, w, b)[1:3], t),
    "too few rows": lambda h, w, b, t: flat(joined(0)(h, w, b)[:1], t[:1]),
    "every other row": lambda h, w, b, t: flat(joined(0)(h, w, b)[::2].contiguous(), t),
    "cut twice": lambda h, w, b, t: flat(joined(0)(h, w, b)[1:][1:3], t),
    "two places": lambda h, w, b, t: flat(stacked(1)(h, w, b)[:, 0:1].contiguous(), t),
    "by an index": lambda h, w, b, t: flat(
        stacked(0)(h, w, b)[torch.tensor([0])].contiguous(), t
    ),
    "as strided": lambda h, w, b, t: flat(
        stacked(0)(h, w, b)[0].as_strided((2, 6, CLASSES), (CLASSES, 2 * CLASSES, 1), 50)
        .contiguous(), t
    ),
    "written": written,
    "a part written": a_part_written,
    "no gradient": no_gradient,
    "without gradients": of_no_grad,
    "promoted": promoted,
    "laid out otherwise": laid_out_otherwise,
}  # fmt: skip

PROGRAMS = [*programs(__name__, MATCHES, head), *programs(__name__, NEAR_MISSES, head)]
