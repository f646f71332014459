"""Loops over the samples of a batch, as log-probabilities of tokens are computed to save memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.report.explanation import explain_call
from tests.graphs import Compiled

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


def nll(x, t, **options):
    return F.cross_entropy(x, t, reduction="none", **options)


def calls_of_chunks(x, t):
    """Each chunk with a factor, and ignored classes."""
    parts = zip(x.view(-1, CLASSES).chunk(5), t.view(-1).chunk(5), strict=True)
    return torch.cat([nll(logits * 0.5, labels, ignore_index=3) for logits, labels in parts])


def calls_of_slices(x, t):
    """With further options, of slices of different length."""
    x, t, weight = x.view(-1, CLASSES), t.view(-1), torch.linspace(1, 2, CLASSES, dtype=x.dtype)
    bounds = [slice(0, 10), slice(10, 20), slice(20, None)]
    return torch.cat([nll(x[i], t[i], weight=weight, label_smoothing=0.1) for i in bounds])


def calls_of_transposed_samples(x, t):
    parts = zip(x.transpose(1, 2).split(3), t.split(3), strict=True)
    return torch.concat([nll(logits, labels) for logits, labels in parts])


def stacked_calls(x, t):
    return torch.stack([nll(row, labels) for row, labels in zip(x, t, strict=True)])


def stacked_calls_of_single_rows(x, t):
    x, t = x.view(-1, CLASSES), t.view(-1)
    return torch.stack([nll(row, label) for row, label in zip(x, t, strict=True)])


LOOPS = {
    f.__name__: f
    for f in (
        stacked_logsumexp, stacked_log_softmax, indexed_inside, of_a_temperature,
        sliced_logsumexp, split,
        chunks_of_tokens, unbound, by_index, scaled_inside, of_the_flipped, calls_of_chunks,
        calls_of_slices, calls_of_transposed_samples, stacked_calls, stacked_calls_of_single_rows,
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


def flat_chunks(x, t, count=4):
    return x.view(-1, CLASSES).chunk(count), t.view(-1).chunk(count)


def calls_of_overlapping_slices(x, t):
    return torch.cat([nll(x[i : i + 2].flatten(0, 1), t[i : i + 2].flatten()) for i in (0, 1, 2)])


def calls_without_the_last_chunk(x, t):
    parts = list(zip(*flat_chunks(x, t), strict=True))
    return torch.cat([nll(*part) for part in parts[:-1]])


def calls_in_another_order(x, t):
    parts = list(zip(*flat_chunks(x, t), strict=True))
    return torch.cat([nll(*part) for part in (*parts[1:], parts[0])])


def calls_with_labels_of_others(x, t):
    logits, labels = flat_chunks(x, t)
    return torch.cat([nll(*part) for part in zip(logits, labels[::-1], strict=True)])


def calls_with_labels_cut_otherwise(x, t):
    """The labels of each chunk begin one token later; the first token is the last one's."""
    logits, t = x.view(-1, CLASSES).chunk(4), torch.cat([t.view(-1), t.view(-1)])
    labels = [t[6 * i + 1 : 6 * i + 7] for i in range(4)]
    return torch.cat([nll(*part) for part in zip(logits, labels, strict=True)])


def calls_of_two_tensors(x, t):
    (logits, labels), (others, _) = flat_chunks(x, t), flat_chunks(x * 2, t)
    parts = zip([*logits[:2], *others[2:]], labels, strict=True)
    return torch.cat([nll(*part) for part in parts])


def calls_with_options_of_their_own(x, t):
    parts = zip(*flat_chunks(x, t), (3, 3, 3, 4), strict=True)
    return torch.cat([nll(a, b, ignore_index=ignored) for a, b, ignored in parts])


def calls_of_layers_of_their_own(x, t):
    weights = [torch.eye(CLASSES, dtype=x.dtype) * (i + 1) for i in range(4)]
    parts = zip(*flat_chunks(x, t), weights, strict=True)
    return torch.cat([nll(a @ weight, b) for a, b, weight in parts])


#: One computation of the whole is something else; parts of them may be losses.
OTHERS = {
    f.__name__: f
    for f in (
        out_of_order, some_samples, one_twice, labels_of_others, a_temperature_each,
        another_function, along_the_tokens, overlapping, concatenated_along_the_tokens,
        split_along_the_tokens, first_of_several, softmax_over_samples, logsumexp_of_the_tokens,
        calls_of_overlapping_slices, calls_without_the_last_chunk, calls_in_another_order,
        calls_with_labels_of_others, calls_with_labels_cut_otherwise, calls_of_two_tensors,
        calls_with_options_of_their_own, calls_of_layers_of_their_own,
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

    compiled = Compiled(step, inner_backend="eager")  # nothing but recognition is to be tried
    found = []
    for run in (compiled, step):
        loss = run(x, t)
        found.append((loss.detach(), *torch.autograd.grad(loss, x)))
    torch.testing.assert_close(*found)
    return compiled.sites


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOOPS)
def test_one_loss(name):
    (site,) = check(LOOPS[name], *batch())
    assert (site.op, site.status) == ("cross_entropy", "rewritten")


@pytest.mark.sampled(2)
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


def calls_changed_between(x, t):
    """Each chunk after the first was changed after the one before was read."""
    x, t, losses = (x * 1.0).view(-1, CLASSES), t.view(-1), []
    for logits, labels in zip(x.split(6), t.split(6), strict=True):
        losses.append(nll(logits, labels))
        x[-1].mul_(0.5)
    return torch.cat(losses)


def calls_with_changed_labels(x, t):
    x, t, losses = x.view(-1, CLASSES), t.flatten() * 1, []
    for logits, labels in zip(x.split(6), t.split(6), strict=True):
        losses.append(nll(logits, labels))
        t[-1] = (t[-1] + 1) % CLASSES
    return torch.cat(losses)


@pytest.mark.parametrize("function", [calls_changed_between, calls_with_changed_labels])
def test_calls_changed_between(function):
    x, t = batch()
    with torch.no_grad():
        compiled = torch.compile(function, backend="compile_losses")
        torch.testing.assert_close(compiled(x, t), function(x, t))
        sites = compile_losses.explain(function, x, t).losses
    assert len(sites) == 4
    assert "is changed in place by" in sites[-1].reason


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in LOOPS if "calls" in name])
def test_verified(name):
    x, t = batch()
    compiled = torch.compile(LOOPS[name], backend="compile_losses", options={"verify": True})
    torch.testing.assert_close(compiled(x, t), LOOPS[name](x, t))
    report = explain_call(LOOPS[name], (x, t), options={"verify": True})
    assert [site.op for site in report.losses] == ["cross_entropy"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        *("stacked_logsumexp", "stacked_log_softmax", "sliced_logsumexp"),
        *("stacked_calls", "calls_of_transposed_samples"),
    ],
)
def test_with_a_head(name, chunks):
    def step(h, w, t):
        return (LOOPS[name](F.linear(h, w), t).exp() * torch.arange(1.0, 1 + TOKENS)).sum()

    chunks(8)
    h, w = torch.randn(BATCH, TOKENS, 8), torch.randn(CLASSES, 8)
    leaves = h.requires_grad_(), w.requires_grad_()
    t = torch.randint(CLASSES, (BATCH, TOKENS))
    compiled, found = Compiled(step), []
    for run in (compiled, step):
        loss = run(*leaves, t)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found)
    (site,) = compiled.sites
    assert (site.op, site.plan[0]) == ("linear_cross_entropy", "gradient in forward by row")
