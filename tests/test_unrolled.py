"""Loops over the samples of a batch, as log-probabilities of tokens are computed to save memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses

BATCH, TOKENS, CLASSES = 4, 6, 11

pytestmark = pytest.mark.usefixtures("no_code", "kernels_for_small_losses")


def pick(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def picked(logits, labels):
    return torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)


def stacked_logsumexp(x, t):
    """TRL's and verl's, in float32."""
    return picked(x, t) - torch.stack([torch.logsumexp(row, dim=-1) for row in x])


def stacked_log_softmax(x, t):
    """The same in a 16-bit dtype."""
    index = t.unsqueeze(-1)
    rows = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=labels)
        for row, labels in zip(x, index, strict=True)
    ]
    return torch.stack(rows).squeeze(-1)


def indexed_inside(x, t):
    rows = zip(x, t, strict=True)
    return torch.stack([row.log_softmax(-1).gather(-1, i[:, None])[:, 0] for row, i in rows])


def of_a_temperature(x, t):
    return stacked_logsumexp(x / 0.7, t)


def sliced_logsumexp(x, t):
    """OpenRLHF's: of a view, in slices, of which the last is shorter."""
    flat = x.reshape(-1, CLASSES)
    parts = [torch.logsumexp(flat[i : i + 7], dim=-1) for i in range(0, len(flat), 7)]
    return picked(x, t) - torch.cat(parts).view(*t.shape)


def split(x, t):
    parts = zip(x.split(3), t.split(3), strict=True)
    return torch.cat([pick(logits, labels) for logits, labels in parts])


def chunks_of_tokens(x, t):
    parts = zip(torch.chunk(x.view(-1, CLASSES), 5), t.view(-1).chunk(5), strict=True)
    return torch.cat([pick(logits, labels) for logits, labels in parts], dim=0)


def unbound(x, t):
    return torch.stack([pick(logits, labels) for logits, labels in zip(x.unbind(), t, strict=True)])


def by_index(x, t):
    return torch.stack([pick(x[i], t[i]) for i in range(BATCH)], dim=0)


def scaled_inside(x, t):
    return torch.stack([pick(row * 2.0, labels) for row, labels in zip(x, t, strict=True)])


def of_the_flipped(x, t):
    """Another order, of both: they are tensors of their own."""
    return torch.stack([pick(a, b) for a, b in zip(x.flip(0), t.flip(0), strict=True)])


LOOPS = {
    f.__name__: f
    for f in (
        stacked_logsumexp, stacked_log_softmax, indexed_inside, of_a_temperature, sliced_logsumexp, split,
        chunks_of_tokens, unbound, by_index, scaled_inside, of_the_flipped,
    )
}  # fmt: skip


def out_of_order(x, t):
    return torch.stack([pick(x[i], t[i]) for i in (0, 2, 1, 3)])


def some_samples(x, t):
    return torch.stack([pick(x[i], t[i]) for i in range(BATCH - 1)])


def one_twice(x, t):
    return torch.stack([pick(x[i], t[i]) for i in (0, 1, 2, 2)])


def labels_of_others(x, t):
    return torch.stack([pick(x[i], t[(i + 1) % BATCH]) for i in range(BATCH)])


def a_temperature_each(x, t):
    return torch.stack([pick(x[i] / (i + 1), t[i]) for i in range(BATCH)])


def another_function(x, t):
    rows = [torch.logsumexp(row, -1) for row in x[:-1]]
    return picked(x, t) - torch.stack([*rows, x[-1].exp().sum(-1)])


def along_the_tokens(x, t):
    return torch.stack([pick(x[i], t[i]) for i in range(BATCH)], dim=1)


def overlapping(x, t):
    return torch.cat([pick(x[0:2], t[0:2]), pick(x[1:3], t[1:3])])


def concatenated_along_the_tokens(x, t):
    return torch.cat([pick(x[i], t[i]) for i in range(BATCH)])


def split_along_the_tokens(x, t):
    parts = zip(x.split(3, 1), t.split(3, 1), strict=True)
    return torch.cat([pick(logits, labels) for logits, labels in parts])


def first_of_several(x, t):
    index = torch.stack([t, t], -1)
    rows = zip(x, index, strict=True)
    return torch.stack([row.log_softmax(-1).gather(-1, i)[:, 0] for row, i in rows])


def softmax_over_samples(x, t):
    """Dimension 0 of a part is not that of the whole."""
    return picked(x, t) - torch.cat([part.logsumexp(0) for part in x.split(2)]).mean()


def logsumexp_of_the_tokens(x, t):
    return x[..., 0] - torch.stack([row[:, 0].logsumexp(0) for row in x]).unsqueeze(-1)


#: One computation of the whole is something else; parts of them may be losses.
OTHERS = {
    f.__name__: f
    for f in (
        out_of_order, some_samples, one_twice, labels_of_others, a_temperature_each,
        another_function, along_the_tokens, overlapping, concatenated_along_the_tokens,
        split_along_the_tokens, first_of_several, softmax_over_samples, logsumexp_of_the_tokens,
    )
}  # fmt: skip


def batch(dtype=torch.float64):
    x = torch.randn(BATCH, TOKENS, CLASSES, dtype=dtype, requires_grad=True)
    return x, torch.randint(CLASSES, (BATCH, TOKENS))


def check(function, x, t):
    """Each number has a weight of its own, so that their order counts."""

    def step(x, t):
        result = function(x, t)
        weights = torch.arange(1.0, 1 + result.numel(), dtype=x.dtype)
        return (result.exp() * weights.view(result.shape)).sum()

    compiled = torch.compile(step, backend="compile_losses")
    found = []
    for run in (compiled, step):
        loss = run(x, t)
        found.append((loss.detach(), *torch.autograd.grad(loss, x)))
    torch.testing.assert_close(*found)
    return compile_losses.explain(step, x, t).losses


@pytest.mark.parametrize("name", LOOPS)
def test_one_loss(name):
    (site,) = check(LOOPS[name], *batch())
    assert (site.op, site.status) == ("cross_entropy", "rewritten")


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops(name):
    """Of a sample each at most."""
    x, t = batch()
    for site in check(OTHERS[name], x, t):
        assert site.stock_bytes_moved is None or site.stock_bytes_moved < 3 * x.nbytes


def changed_between(x, t):
    """The third sample is changed after the first two were read, and before it is."""
    x, rows = x * 1.0, []
    for i in range(BATCH):
        rows.append(torch.logsumexp(x[i], -1))
        if i == 1:
            x[0].mul_(0.5)
            x[2].mul_(0.5)
    return picked(x, t) - torch.stack(rows)


def test_changed_between():
    x, t = batch()
    with torch.no_grad():
        compiled = torch.compile(changed_between, backend="compile_losses")
        torch.testing.assert_close(compiled(x, t), changed_between(x, t))


@pytest.mark.parametrize("name", ["stacked_logsumexp", "stacked_log_softmax", "sliced_logsumexp"])
def test_with_a_head(name, chunks):
    def step(h, w, t):
        return (LOOPS[name](F.linear(h, w), t).exp() * torch.arange(1.0, 1 + TOKENS)).sum()

    chunks(8)
    h, w = torch.randn(BATCH, TOKENS, 8), torch.randn(CLASSES, 8)
    leaves = h.requires_grad_(), w.requires_grad_()
    t = torch.randint(CLASSES, (BATCH, TOKENS))
    (site,) = compile_losses.explain(step, *leaves, t).losses
    assert (site.op, site.plan[0]) == ("linear_cross_entropy", "gradient in forward by row")
    found = []
    for run in (torch.compile(step, backend="compile_losses"), step):
        loss = run(*leaves, t)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found)
