"""Spellings of softmaxes become the same polynomial, and other functions do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.graphs import dynamo, one, recognizer, returned, words


def polynomials(function, *inputs):
    found_by, _ = recognizer((found := dynamo(function, *inputs)).gm)
    values = [found_by.replay.of(node) for node in returned(found.gm.graph)]
    return [found_by.algebra.of(value) for value in values]


def given():
    return torch.randn(4, 5), torch.randint(5, (4,)), torch.randn(4, 5)


#: Two ways to write one function of logits x, class indices t and a teacher's logits y.
SAME = {
    "log_softmax": lambda x, t, y: (x.log_softmax(1), x - x.logsumexp(1, keepdim=True)),
    "logarithm of a softmax": lambda x, t, y: (x.softmax(1).log(), F.log_softmax(x, -1)),
    "softmax": lambda x, t, y: (x.softmax(1), (x - x.logsumexp(1, keepdim=True)).exp()),
    "quotient": lambda x, t, y: (
        (x.exp() / x.exp().sum(1, keepdim=True)).log(), x.log_softmax(1)
    ),
    "log of a sum": lambda x, t, y: (x.exp().sum(1).log(), x.logsumexp(1)),
    "gathered": lambda x, t, y: (
        x.log_softmax(1).gather(1, t[:, None]).squeeze(1),
        x.gather(1, t[:, None]).squeeze(1) - x.logsumexp(1),
    ),
    "indexed": lambda x, t, y: (
        x.log_softmax(1)[torch.arange(4), t], x[torch.arange(4), t] - x.logsumexp(1)
    ),
    "one-hot": lambda x, t, y: (
        (F.one_hot(t, 5).float() * x.log_softmax(1)).sum(1),
        x.log_softmax(1).gather(1, t[:, None]).squeeze(1),
    ),
    "distributed": lambda x, t, y: (
        y.softmax(1) * (y.log_softmax(1) - x.log_softmax(1)),
        y.softmax(1) * y.log_softmax(1) - y.softmax(1) * x.log_softmax(1),
    ),
    "xlogy": lambda x, t, y: (
        torch.xlogy(y.softmax(1), y.softmax(1)), y.softmax(1) * y.log_softmax(1)
    ),
    "lerp": lambda x, t, y: (torch.lerp(x, y, 0.25), 0.75 * x + 0.25 * y),
    "mixture": lambda x, t, y: (
        (0.5 * x.softmax(1) + 0.5 * y.softmax(1)).log(),
        torch.logaddexp(x.log_softmax(1), y.log_softmax(1)) - torch.tensor(2.0).log(),
    ),
    "stack": lambda x, t, y: (
        torch.stack([x.log_softmax(1), y.log_softmax(1)]).logsumexp(0),
        torch.logaddexp(x.log_softmax(1), y.log_softmax(1)),
    ),
    "negated": lambda x, t, y: (-x, 0 - x),
    "halves": lambda x, t, y: (x / 2, x * 0.5),
}  # fmt: skip
DIFFERENT = {
    "dimensions": lambda x, t, y: (x.log_softmax(1), x.log_softmax(0)),
    "tensors": lambda x, t, y: (x.log_softmax(1), y.log_softmax(1)),
    "temperature": lambda x, t, y: ((x / 2).log_softmax(1), x.log_softmax(1)),
    "indices": lambda x, t, y: (
        x.gather(1, t[:, None]).squeeze(1), x.gather(1, (t + 1)[:, None] % 5).squeeze(1)
    ),
    "sign": lambda x, t, y: (x - y, y - x),
    "rounded": lambda x, t, y: (torch.div(x, y, rounding_mode="floor"), x / y),
    "alpha": lambda x, t, y: (torch.add(x, y, alpha=2), x + y),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_same(name):
    one, other = polynomials(SAME[name], *given())
    assert one == other
    assert one.keys()


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(name):
    one, other = polynomials(DIFFERENT[name], *given())
    assert one != other


def test_logits():
    found = dynamo(lambda x, t, y: ((x / 2).log_softmax(1), x - y), *given())
    found_by, root = recognizer(found.gm)
    logits, dim = found_by.algebra.logits(found_by.replay.of(root), root)
    assert (words(logits), dim) == (str(one(found.gm.graph, "truediv")), 1)
    _, other = returned(found.gm.graph)
    assert found_by.algebra.logits(found_by.replay.of(other), other) is None


def test_a_value_that_comes_later():
    """Of equal tensors the one is taken that is there where the loss stands."""

    def step(x, t, y):
        first = (x + y).log_softmax(1)
        loss = first.sum()
        return loss, (x + y).log_softmax(1)

    found = dynamo(step, *given())
    found_by, root = recognizer(found.gm)
    _, later = returned(found.gm.graph)
    algebra, replay = found_by.algebra, found_by.replay
    algebra.of(replay.of(later))
    logits, _ = algebra.logits(replay.of(root.all_input_nodes[0]), root)
    assert logits.node < root
