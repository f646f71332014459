"""Models that return logits beside their loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.program import programs

CLASSES, HIDDEN = 211, 16


class Model(nn.Module):
    """What most models are, with a place for what stands between a head and what is returned."""

    def __init__(self, after=None, loss=None, *, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=bias)
        self.after, self.loss = after or (lambda logits: logits), loss or shifted

    def forward(self, ids):
        logits = self.after(self.head(self.embedding(ids).tanh()))
        return {"loss": self.loss(logits, ids), "logits": logits}


def shifted(logits, ids):
    return F.cross_entropy(logits[..., :-1, :].float().flatten(0, 1), ids[..., 1:].flatten())


def ids():
    return torch.randint(CLASSES, (4, 33), generator=torch.Generator().manual_seed(0))


BETWEEN = {
    "nothing": None,
    "soft-cap": lambda logits: 5 * torch.tanh(logits / 5),
    "factor": lambda logits: logits * 0.5,
    "float": lambda logits: logits.float(),
    "view": lambda logits: logits.view(-1, 33, CLASSES),
}


class Outputs(nn.Module):
    """Several outputs of the same logits."""

    def __init__(self, function):
        super().__init__()
        self.model, self.function = Model(), function

    def forward(self, ids):
        out = self.model(ids)
        return {**out, **self.function(out["logits"])}


OUTPUTS = {
    "twice": lambda logits: {"same": logits},
    "last token": lambda logits: {"last": logits[:, -1]},
    "detached": lambda logits: {"detached": logits.detach()},
    "flat": lambda logits: {"flat": logits.view(-1, CLASSES)},
    "cast": lambda logits: {"double": logits.double()},
}


KEPT = {
    "maximum": (lambda x: {"best": x.max()}, "the logits have other users"),
    "smallest two": (
        lambda x: {"least": x.topk(2, largest=False).indices},
        "the logits have other users",
    ),
    "one class": (lambda x: {"first": x[..., :3].sum()}, "the logits have other users"),
    "a tensor's": (lambda x: {"more": x + x.detach().mean()}, "the logits have other users"),
}


def _step(after, outputs=None):
    """A model's step as a function of its weights."""

    def step(ids, embedding, weight, bias):
        logits = F.linear(F.embedding(ids, embedding).tanh(), weight, bias)
        logits = logits if after is None else after(logits)
        others = {} if outputs is None else outputs(logits)
        return shifted(logits, ids), logits, *others.values()

    return step


def weights():
    shapes = ((CLASSES, HIDDEN), (CLASSES, HIDDEN), (CLASSES,))
    return ids(), *(torch.randn(shape, requires_grad=True) for shape in shapes)


PROGRAMS = [
    *programs(__name__, {name: _step(after) for name, after in BETWEEN.items()}, weights),
    *programs(__name__, {name: _step(None, f) for name, f in OUTPUTS.items()}, weights),
    *programs(__name__, {f"kept: {n}": _step(None, f) for n, (f, _) in KEPT.items()}, weights),
]
