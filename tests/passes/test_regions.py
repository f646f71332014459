"""What is a function of each row of a product, and what is none; the calls that take its place."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.regions import take_regions
from tests.constants import set_constants
from tests.passes.graphs import aten, fused, indexed, of_aten, one, text

BATCH, TOKENS, CLASSES, HIDDEN = 2, 3, 5, 4
ROWS = BATCH * TOKENS
F64 = torch.float64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=2, logits_bytes=1)
    monkeypatch.setattr("compile_losses.ops.linear_region.torch.compile", lambda graph, **_: graph)


def tensors():
    """Hidden states, columns of a weight, a number of each row, one of each class, labels."""
    generator = torch.Generator().manual_seed(0)
    h, w, row, of_class = (
        torch.randn(*shape, generator=generator, dtype=F64)
        for shape in ((ROWS, HIDDEN), (HIDDEN, CLASSES), (ROWS,), (CLASSES,))
    )
    return h, w, row, of_class, torch.randint(CLASSES, (ROWS,), generator=generator)


def in_batch(z):
    return z.view(BATCH, TOKENS, CLASSES)


#: Of logits z, numbers of each row, of each class, and labels: what has a number of each row.
OF_ROWS = {
    "sum": lambda z, r, c, y: z.sum(1),
    "mean, kept": lambda z, r, c, y: z.mean(-1, True),
    "largest": lambda z, r, c, y: z.amax([1]),
    "its place": lambda z, r, c, y: z.argmax(1),
    "of both": lambda z, r, c, y: sum(t.double() for t in torch.max(z, 1)),
    "spread": lambda z, r, c, y: torch.ops.aten.var.correction(z, [1], correction=0),
    "logsumexp": lambda z, r, c, y: z.logsumexp(1),
    "functions": lambda z, r, c, y: (z.tanh().exp() - z.clamp(-1, 1)).sum(1),
    "columns": lambda z, r, c, y: (z * r[:, None]).sum(1),
    "classes": lambda z, r, c, y: (z * c + c[None]).sum(1),
    "both": lambda z, r, c, y: (z + r[:, None] * c).abs().sum(1),
    "a number": lambda z, r, c, y: (z * r.sum() + c.amax()).sum(1),
    "narrower": lambda z, r, c, y: z.to(torch.bfloat16).float().sum(1),
    "softmax": lambda z, r, c, y: (z - z.amax(1, True)).exp().sum(1).log(),
    "by index": lambda z, r, c, y: z.gather(1, y[:, None]).squeeze(1),
    "one hot": lambda z, r, c, y: (z * (y[:, None] == torch.arange(CLASSES))).sum(1),
    "scattered": lambda z, r, c, y: (z * torch.zeros_like(z).scatter(1, y[:, None], 2.0)).sum(1),
    "of a batch": lambda z, r, c, y: in_batch(z).exp().sum(2),
    "of a batch, by rows": lambda z, r, c, y: (in_batch(z).sum(2) * r.view(BATCH, TOKENS)).exp(),
    "of each sample": lambda z, r, c, y: (in_batch(z) * r[:BATCH, None, None]).sum(2),
    "of each token": lambda z, r, c, y: (in_batch(z) * r[:TOKENS, None]).sum(2),
    "classes second": lambda z, r, c, y: in_batch(z).transpose(1, 2).exp().sum(1),
    "index of the second": lambda z, r, c, y: (
        in_batch(z).transpose(1, 2).gather(1, y.view(BATCH, 1, TOKENS))
    ),
    "classes first": lambda z, r, c, y: z.t().exp().sum(0),
    "spread out": lambda z, r, c, y: (z.sum(1, True).expand(ROWS, CLASSES) * z).sum(1),
    "of all": lambda z, r, c, y: z.exp().sum(),
    "mean of all": lambda z, r, c, y: in_batch(z).square().mean(),
    "known logits": lambda z, r, c, y: (z * (r[:, None] + c).cos()).sum(1),
    "some classes": lambda z, r, c, y: z[:, 1:].exp().sum(1),
    "classes by index": lambda z, r, c, y: z[:, y % CLASSES].sum(1),
    "classes from the end": lambda z, r, c, y: (z[:, y % CLASSES - 2].exp()).sum(1),
    "classes selected": lambda z, r, c, y: (z.index_select(1, y % CLASSES) * r[:, None]).amax(1),
    "classes of a batch": lambda z, r, c, y: in_batch(z)[..., :3].exp().sum(2),
    "classes second, some": lambda z, r, c, y: in_batch(z).transpose(1, 2)[:, 1:4].sum(1),
    "classes put": lambda z, r, c, y: (
        torch.zeros_like(z).index_add(1, y % CLASSES, z[:, y % CLASSES]).square().sum(1)
    ),
    "classes written": lambda z, r, c, y: z.slice_scatter(z[:, 2:4] * 2, 1, 1, 3).exp().sum(1),
    "some classes of each kind": lambda z, r, c, y: z[:, 1:].amax(1) + z[:, :3].sum(1) * z.sum(1),
    "looked up from the end": lambda z, r, c, y: z.sum(1) * c[z.argmax(1) - 2],
    "looked up": lambda z, r, c, y: z.sum(1) * c[z.argmax(1)],
    "some rows": lambda z, r, c, y: z[1:].sum(1),
    "some tokens": lambda z, r, c, y: in_batch(z)[:, :-1].sum(2),
}

#: What mixes rows, or has other numbers than one of each row.
OF_NO_ROWS = {
    "sum over rows": lambda z, r, c, y: z.sum(0),
    "cumulated": lambda z, r, c, y: z.cumsum(0).sum(1),
    "rolled": lambda z, r, c, y: z.roll(1, 0).sum(1),
    "flipped": lambda z, r, c, y: z.flip(0).sum(1),
    "every other row": lambda z, r, c, y: z[::2].sum(1),
    "two slices of rows": lambda z, r, c, y: z[1:].sum(1) * z[:-1].sum(1),
    "rows by index": lambda z, r, c, y: z[y.clamp(max=ROWS - 1)].sum(1),
    "tokens first": lambda z, r, c, y: in_batch(z).transpose(0, 1).sum(2),
    "every other class": lambda z, r, c, y: z[:, ::2].sum(1),
    "of pairs": lambda z, r, c, y: z.view(ROWS * CLASSES // 10, 10).sum(1),
    "sorted": lambda z, r, c, y: z.sort(1).values[:, 0],
    "of all to each": lambda z, r, c, y: (z - z.mean()).exp().sum(1),
    "of a sample": lambda z, r, c, y: in_batch(z).sum((1, 2)),
    "softmax of tokens": lambda z, r, c, y: (in_batch(z) - in_batch(z).amax(1, True)).sum(2),
    "random": lambda z, r, c, y: (z * torch.rand_like(z)).sum(1),
    "another product": lambda z, r, c, y: (z.tanh() @ c[:, None]).sum(1),
    "returned": lambda z, r, c, y: z.tanh(),
}


def planned(function):
    """A graph before and after the pass, and its decisions."""
    given = tensors()
    before = of_aten(lambda h, w, *known: function(h @ w, *known), *given)
    after = of_aten(lambda h, w, *known: function(h @ w, *known), *given)
    graph = indexed(after, losses=(), prefer_memory=True)
    take_regions(graph)
    after.graph.lint()
    after.recompile()
    return before, after, graph.decisions


@pytest.mark.parametrize("name", OF_ROWS)
def test_of_rows(name):
    before, after, decisions = planned(OF_ROWS[name])
    one(after.graph, fused.linear_region.default)
    assert not after.graph.find_nodes(op="call_function", target=aten.mm.default)
    given = tensors()
    torch.testing.assert_close(after(*given), before(*given), rtol=1e-12, atol=1e-12)
    assert [d.choice for d in decisions] == ["logits by chunks"]


@pytest.mark.parametrize("name", OF_NO_ROWS)
def test_of_no_rows(name):
    before, after, decisions = planned(OF_NO_ROWS[name])
    assert text(after.graph) == text(before.graph)
    assert decisions == []


def test_without_the_option():
    gm = of_aten(lambda h, w: (h @ w).exp().sum(1), *tensors()[:2])
    before = text(gm.graph)
    take_regions(indexed(gm, losses=(), prefer_memory=False))
    assert text(gm.graph) == before


def joint(factor):
    """A loss with its gradients, as in a joint graph; the factor is what the gradient of a row is
    multiplied by."""

    def function(h, w, row, of_class, y, tangents_1):
        z = h @ w
        shifted = z - z.amax(1, True)
        sums = shifted.exp().sum(1, True)
        each = sums.log() - shifted.gather(1, y[:, None])
        loss = (each.squeeze(1) * row).sum()
        softmax = shifted.exp() / sums
        of_each = (factor(each, row) * tangents_1)[:, None]
        of_z = softmax * of_each
        of_z = of_z - torch.zeros_like(z).scatter(1, y[:, None], 1.0) * of_each
        return loss, of_z @ w.t(), h.t() @ of_z, of_z.sum(0)

    return of_aten(function, *tensors(), torch.ones((), dtype=F64))


def test_gradients_of_one_tangent_are_made_in_the_forward():
    before, after = joint(lambda each, row: row), joint(lambda each, row: row)
    graph = indexed(after, losses=(), prefer_memory=True)
    take_regions(graph)
    after.graph.lint()
    after.recompile()
    assert [d.choice for d in graph.decisions] == ["logits by chunks, gradient in forward"]
    call = one(after.graph, fused.linear_region.default)
    tangent = next(n for n in after.graph.nodes if n.name.startswith("tangents"))
    assert not any(user < call for user in tangent.users)
    given = *tensors(), torch.tensor(1.7, dtype=F64)
    torch.testing.assert_close(after(*given), before(*given), rtol=1e-12, atol=1e-12)


def test_gradients_that_depend_on_all_rows_are_made_in_the_backward():
    factors = [lambda each, row: row * each.mean() for _ in range(2)]
    before, after = map(joint, factors)
    graph = indexed(after, losses=(), prefer_memory=True)
    take_regions(graph)
    after.graph.lint()
    after.recompile()
    (decision,) = graph.decisions
    assert decision.choice.endswith("its gradients depend on numbers of all rows")
    assert len(after.graph.find_nodes(op="call_function", target=fused.linear_region.default)) == 2
    given = *tensors(), torch.tensor(1.7, dtype=F64)
    torch.testing.assert_close(after(*given), before(*given), rtol=1e-12, atol=1e-12)
