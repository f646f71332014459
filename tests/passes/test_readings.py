"""Readers of logits that need a few statistics of each row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.heads.readings import reading_of
from tests.passes import decisions
from tests.passes.graphs import dynamo, put_ops, recognizer, words

READERS = {
    "cross entropy": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "logsumexp": lambda x, t: x.logsumexp(-1),
    "entropy": lambda x, t: (x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "picked": lambda x, t: x.log_softmax(-1).gather(-1, t[:, None]).squeeze(-1),
    "several": lambda x, t: x.log_softmax(-1).gather(-1, torch.stack([t, t], -1)),
    "argmax": lambda x, t: x.argmax(-1),
    "amax": lambda x, t: x.amax(-1),
    "sum of log-probabilities": lambda x, t: x.log_softmax(-1).sum(-1),
    "wider sum": lambda x, t: (-x.bfloat16().log_softmax(-1)).sum(-1, dtype=torch.float32),
    "sum in integers": lambda x, t: x.log_softmax(-1).sum(-1, dtype=torch.int64),
    "mean of all log-probabilities": lambda x, t: x.log_softmax(-1).mean(),
    "entropy over all": lambda x, t: (x.softmax(-1) * -x.log_softmax(-1).float() / 2).sum((0, 1)),
    "sum over the rows": lambda x, t: (x.softmax(-1) * x.log_softmax(-1)).sum(0),
    "probability": lambda x, t: (-x.softmax(-1)).gather(-1, t[:, None]),
    "of a one-hot target": lambda x, t: (F.one_hot(t, 5) * x.softmax(-1)).sum(-1),
    "a sum": lambda x, t: x.sin().sum(-1),
    "probabilities": lambda x, t: x.softmax(-1),
    "of the rows": lambda x, t: x.logsumexp(0),
}


@pytest.mark.parametrize("name", READERS)
def test_readings(name):
    found = dynamo(READERS[name], torch.randn(4, 5), torch.zeros(4).long())
    put_ops(found.gm)
    found_by, root = recognizer(found.gm)
    reading = reading_of(root, found_by.replay)
    decisions.check("readings", name, ["nothing" if reading is None else told(reading)])


def told(reading):
    terms = f"{dict(sorted(reading.terms.items()))}"
    if reading.exponential is not None:
        terms = f"{reading.exponential} exp {terms}"
    if reading.over_rows is not None:
        terms = f"{reading.over_rows} of {terms}"
    return (
        f"{reading.what} of {words(reading.logits)} along {reading.dim}: {terms}, "
        f"target {reading.target and words(reading.target)}, "
        f"picks {reading.picks and words(reading.picks)}"
    )
