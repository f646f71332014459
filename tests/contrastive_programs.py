"""Losses of the products of all pairs of two batches of embeddings, by rows and by columns.

Each program takes what :func:`problem` makes, and returns a number.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

PAIRS, MORE, WIDTH = 40, 56, 8


def problem(dtype=torch.float64, *, device="cpu", texts=PAIRS):
    """Two batches of embeddings, a learned logarithm of a scale, labels of rows and of columns, a
    weight of each row, and soft labels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype).requires_grad_()

    rows = torch.randint(texts, (PAIRS,), generator=generator)
    columns = torch.randint(PAIRS, (texts,), generator=generator)
    rows[::7], columns[3] = -100, -100
    scale = torch.tensor(0.7, dtype=dtype, device=device).requires_grad_()
    weights = torch.rand(PAIRS, generator=generator, dtype=torch.float64).to(device, dtype)
    soft = torch.randn(PAIRS, texts, generator=generator, dtype=torch.float64).softmax(-1)
    return (
        normal(PAIRS, WIDTH),
        normal(texts, WIDTH),
        scale,
        rows.to(device),
        columns.to(device),
        weights,
        soft.to(device, dtype),
    )


def own(logits):
    return torch.arange(logits.shape[0], device=logits.device)


def both(logits, **options):
    by_rows = F.cross_entropy(logits, own(logits), **options)
    return (by_rows + F.cross_entropy(logits.T, own(logits), **options)) / 2


def open_clip(a, b, scale, *_):
    """Of gathered features: an embedding is scaled."""
    return both(scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T)


def transformers_clip(a, b, scale, *_):
    """The product is scaled."""
    a, b = (x / x.norm(p=2, dim=-1, keepdim=True) for x in (a, b))
    by_text = torch.matmul(b, a.t()) * scale.exp()
    return both(by_text.t())


def scaled_after(a, b, scale, *_):
    """The learned factor comes first, and the product is scaled."""
    return both(scale.exp().clamp(max=100) * (F.normalize(a) @ F.normalize(b).T))


def widened(a, b, scale, *_):
    """The product is cast before it is scaled."""
    return both((a @ b.T).to(scale.dtype) * scale)


def divided(a, b, scale, *_):
    return both(a @ b.T / scale.exp())


def symmetric_ranking(a, b, scale, *_):
    """sentence-transformers' MultipleNegativesSymmetricRankingLoss: a factor that is no tensor."""
    scores = torch.mm(F.normalize(a), F.normalize(b).transpose(0, 1)) * 20.0
    labels = torch.arange(len(scores), device=scores.device)
    forward_loss = F.cross_entropy(scores, labels)
    backward_loss = F.cross_entropy(scores[:, 0 : len(b)].t(), labels)
    return (forward_loss + backward_loss) / 2


def hard_negatives(a, b, scale, *_):
    """The columns of the own texts alone choose among the rows."""
    scores = 20.0 * (F.normalize(a) @ F.normalize(b).T)
    own_texts = scores[:, : len(a)]
    return F.cross_entropy(scores, own(a)) + F.cross_entropy(own_texts.t(), own(a))


def temperature(a, b, scale, *_):
    """Divided by a number that is learned, and by one that is not."""
    return both(a @ b.T / scale.exp()) + both(b @ a.T / 0.5)


def smoothed(a, b, scale, *_):
    return both(a @ b.T * scale, label_smoothing=0.1)


def labelled(a, b, scale, rows, columns, *_):
    """Labels that are ignored, of other numbers of rows and columns."""
    logits = a @ b.T
    return F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, columns, reduction="sum")


def weighted(a, b, scale, rows, columns, weights, soft):
    """Numbers of each row, and soft labels by columns."""
    logits = scale.exp() * a @ b.T
    each = F.cross_entropy(logits, rows, reduction="none")
    return (each * weights).sum() / weights.sum() + F.cross_entropy(logits.T, soft.T)


def log_softmaxes(a, b, scale, *_):
    """As written with dimensions, and picked from the diagonal."""
    logits = a @ b.T * scale
    picked = F.log_softmax(logits, dim=1).diagonal() + F.log_softmax(logits, dim=0).diagonal()
    return -picked.mean()


def logsumexps(a, b, scale, *_):
    logits = a @ b.T
    return logits.logsumexp(1).mean() + logits.logsumexp(0).mean() - 2 * logits.diagonal().mean()


def dual_softmax(a, b, scale, *_):
    """LoFTR's (Sun et al., 2021): probabilities in both directions, multiplied."""
    similarity = a @ b.T / 0.3
    matches = F.softmax(similarity, 1) * F.softmax(similarity, 0)
    return -(matches.diagonal() + 1e-6).log().mean()


def several(a, b, scale, rows, columns, *_):
    """More than one loss in a direction, and numbers that are read besides."""
    logits = a @ b.T * scale
    z_loss = logits.logsumexp(1).square().mean()
    return both(logits) + F.cross_entropy(logits, rows) + 1e-3 * z_loss + logits.diagonal().mean()


def widths(a, b, scale, *_):
    """Matryoshka's: several matrices."""
    return sum(both(scale * a[:, :width] @ b[:, :width].T) for width in (4, WIDTH))


def with_accuracy(a, b, scale, *_):
    logits = scale.exp() * a @ b.T
    with torch.no_grad():
        hits = (logits.argmax(1) == own(logits)).to(a.dtype).mean()
    return both(logits) + 0 * hits


#: Of one matrix of products, which one call reads; for each of them the number of matrices.
TAKEN = {
    open_clip: 1,
    transformers_clip: 1,
    scaled_after: 1,
    widened: 1,
    divided: 1,
    symmetric_ranking: 1,
    hard_negatives: 1,
    temperature: 2,
    smoothed: 1,
    labelled: 1,
    weighted: 1,
    log_softmaxes: 1,
    logsumexps: 1,
    dual_softmax: 1,
    several: 1,
    widths: 2,
    with_accuracy: 1,
}
#: Those whose matrix is scaled, cast or cut as a whole, before its columns are read.
APART = [
    *(open_clip, transformers_clip, scaled_after, widened, divided, smoothed, labelled, weighted),
    *(symmetric_ranking, hard_negatives, with_accuracy),
]
#: Those that take other numbers of rows and columns.
UNEQUAL = [labelled, weighted, logsumexps]


def one_direction(a, b, scale, *_):
    logits = a @ b.T * scale
    return F.cross_entropy(logits, own(logits))


def two_scales(a, b, scale, *_):
    """Each direction has a matrix of its own."""
    logits = a @ b.T
    by_rows = F.cross_entropy(logits * scale, own(logits))
    return by_rows + F.cross_entropy(logits.T * 3.0, own(logits))


def masked(a, b, scale, *_):
    """The matrix would have to be written once more."""
    logits = a @ b.T * scale
    return both(logits.masked_fill(logits > 4, -math.inf))


def scaled_by_rows(a, b, scale, rows, columns, weights, soft):
    logits = a @ b.T * weights[:, None]
    return both(logits)


LEFT = [one_direction, two_scales, masked, scaled_by_rows]


def autocast(function):
    """The function under autocast to bfloat16."""

    def narrow(*inputs):
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            return function(*inputs)

    return narrow
