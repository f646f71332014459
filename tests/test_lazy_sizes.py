"""Views of lazy logits that are given to graphs whose sizes change from call to call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.lazy import LazyLogits
from compile_losses.torch_internals.dynamo import counters
from tests.constants import set_constants

HIDDEN, CLASSES = 4, 20
SIZES = ((4, 6), (4, 7), (5, 8), (6, 9))

#: Views, and whether one graph is compiled for all sizes that change.
VIEWS = {
    "flat": (lambda x: x.view(-1, CLASSES), True),
    "flat, of sizes": (lambda x: x.view(x.shape[0] * x.shape[1], CLASSES), True),
    "cast, flat": (lambda x: x.float().flatten(0, 1), True),
    "flat, rows": (lambda x: x.view(-1, CLASSES)[1:], True),
    "shifted, flat": (lambda x: x[:, :-1].contiguous().view(-1, CLASSES), True),
    "shifted, cast, flat": (lambda x: x[..., :-1, :].float().view(-1, CLASSES), True),
    "one row more": (lambda x: x.view(x.shape[0], 1, x.shape[1], CLASSES), True),
    "marked rows": (lambda x: x[labels(x) > 5].view(1, -1, CLASSES), True),
    "last row": (lambda x: x[-1, -1].unsqueeze(0), False),
    "corner": (lambda x: x[-2:, -2:], False),
}
#: Views whose numbers a graph is given.
OTHERS = {
    "diagonal": lambda x: x.diagonal().t(),
    "windows": lambda x: x.unfold(1, 2, 2).transpose(-1, -2),
    "memory": lambda x: x.as_strided((x.shape[1], CLASSES), (CLASSES, 1)),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=2, least_elements=1, logits_bytes=1, part_of_weight=0)


def labels(x):
    return (torch.arange(x.numel() // x.shape[-1]) * 7 % CLASSES).view(x.shape[:-1])


def loss(x, y):
    return F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1))


def leaves(rows):
    generator = torch.Generator().manual_seed(0)
    shapes = (*rows, HIDDEN), (CLASSES, HIDDEN)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in made]


def compiled(function):
    options = {"lazy_logits": True, "inner_backend": "aot_eager"}
    return torch.compile(function, backend="compile_losses", options=options)


def by_backward(loss, h, w, x):
    loss.backward()
    return [h.grad, w.grad]


def by_grad(loss, h, w, x):
    return torch.autograd.grad(loss, (h, w))


def of_the_logits(loss, h, w, x):
    return torch.autograd.grad(loss, (x, h, w))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gradients", [by_backward, by_grad, of_the_logits])
@pytest.mark.parametrize("name", VIEWS)
def test_sizes_that_change(name, gradients):
    view, is_general = VIEWS[name]
    head, reader = compiled(F.linear), compiled(loss)
    graphs = []
    for rows in SIZES:
        h, w = leaves(rows)
        x = view(head(h, w))
        assert isinstance(x, LazyLogits)
        before = counters["stats"]["unique_graphs"]
        value = reader(x, labels(x))
        graphs.append(counters["stats"]["unique_graphs"] - before)
        assert x.is_unread()
        found = gradients(value, h, w, x)
        h, w = leaves(rows)
        x = view(F.linear(h, w))
        expected = loss(x, labels(x))
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        wanted = gradients(expected, h, w, x)
        torch.testing.assert_close(list(found), list(wanted), rtol=1e-5, atol=1e-6)
    assert not (is_general and graphs[-1]), graphs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reading", ["eager", "aot_eager", "ours"])
@pytest.mark.parametrize("name", [*VIEWS, *OTHERS])
def test_all_views_and_other_compilers(name, reading):
    view = OTHERS[name] if name in OTHERS else VIEWS[name][0]
    head = compiled(F.linear)
    reader = compiled(loss) if reading == "ours" else torch.compile(loss, backend=reading)
    for rows in SIZES:
        h, w = leaves(rows)
        x = view(head(h, w))
        found = torch.autograd.grad(reader(x, labels(x)), (h, w))
        h, w = leaves(rows)
        x = view(F.linear(h, w))
        expected = torch.autograd.grad(loss(x, labels(x)), (h, w))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
