"""One weight, many heads: their gradients of the weight are one sum."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F

from compile_losses.lower.one_weight import ONE_GRADIENT
from compile_losses.ops.linear import joined_calls
from tests.accuracy import assert_accurate
from tests.graphs import Compiled, recorded
from tests.heads import small_chunks  # noqa: F401

fused = torch.ops.fused

BATCH, TOKENS, HIDDEN, CLASSES, DEPTHS = 3, 24, 16, 150, 3


def problem(dtype=torch.float64, *, seed=0):
    """Hidden states, a weight, a trunk's weight, labels, a mask and a teacher's weight."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, trained=True):
        drawn = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_(trained)

    labels = torch.randint(CLASSES, (BATCH, TOKENS), generator=generator)
    labels[:, ::5] = -100
    mask = torch.rand(BATCH, TOKENS, generator=generator, dtype=torch.float64) < 0.7
    return (
        normal(BATCH, TOKENS, HIDDEN),
        normal(CLASSES, HIDDEN, scale=0.5),
        normal(HIDDEN, HIDDEN, scale=0.3),
        labels,
        mask.to(dtype),
        normal(CLASSES, HIDDEN, scale=0.5, trained=False),
    )


def trunk(h, t):
    return h + torch.tanh(h @ t)


def depths(h, t):
    """The hidden states of each depth, each made of the last."""
    for depth in range(DEPTHS):
        yield depth, h
        h = trunk(h, t)


def shifted(labels, depth):
    return F.pad(labels[:, depth:], (0, depth), value=-100).flatten()


def predicted(h, w, t, labels, mask, teacher):
    """Multi-token prediction: a cross entropy of each depth, those after the first weighted."""
    losses = [
        F.cross_entropy(F.linear(x, w).flatten(0, 1), shifted(labels, d)) for d, x in depths(h, t)
    ]
    return losses[0] + 0.3 / (DEPTHS - 1) * sum(losses[1:])


def predicted_of_slices(h, w, t, labels, mask, teacher):
    """The last tokens have no label, and their logits are cut off."""
    total = 0.0
    for depth, x in depths(h, t):
        logits = F.linear(x, w)[:, : TOKENS - depth]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels[:, depth:].flatten())
    return total / DEPTHS


def clamped(h, w, t, labels, mask, teacher):
    """A loss that only regions take, with other numbers of rows at each depth."""
    losses = [
        F.cross_entropy(F.linear(x, w).clamp(-2, 2).flatten(0, 1), shifted(labels, d)) * (d + 1)
        for d, x in depths(h, t)
    ]
    return sum(losses) / 7


def of_each_token(h, w, t, labels, mask, teacher):
    """Masked means of losses of tokens, with another mask at each depth."""
    total = 0.0
    for depth, x in depths(h, t):
        each = F.cross_entropy(F.linear(x, w).flatten(0, 1), shifted(labels, depth).clamp(min=0),
                               reduction="none").view_as(mask)  # fmt: skip
        total = total + (each * mask.roll(depth, 1)).sum() / mask.sum()
    return total


def both_kinds(h, w, t, labels, mask, teacher):
    """One head's loss is an op, the other's a region."""
    known = F.cross_entropy(F.linear(h, w).flatten(0, 1), labels.flatten())
    other = F.linear(trunk(h, t), w).clamp(-2, 2)
    return known + 0.1 * F.cross_entropy(other.flatten(0, 1), labels.flatten())


def turned(h, w, t, labels, mask, teacher):
    """The weight stands as [hidden, classes]."""
    columns = w.t().contiguous()
    losses = [
        F.cross_entropy((x @ columns).clamp(-2, 2).flatten(0, 1), shifted(labels, d))
        for d, x in depths(h, t)
    ]
    return sum(losses)


def tied(h, w, t, labels, mask, teacher):
    """The weight is the embedding's, too."""
    x = h + F.embedding(labels.clamp(min=0), w)
    return predicted(x, w, t, labels, mask, teacher)


def total_variation(h, w, t, labels, mask, teacher):
    """A divergence of each depth from the teacher's row."""
    total = 0.0
    for depth, x in depths(h, t):
        target = F.linear(h.detach().roll(-depth, 1), teacher).softmax(-1)
        total = total + 0.5 * (F.linear(x, w).softmax(-1) - target).abs().sum(-1).mean()
    return total


def read_twice(h, w, t, labels, mask, teacher):
    """R-Drop: two hidden states of one student, whose rows are compared."""
    one, two = (F.linear(x, w).log_softmax(-1) for x in (h, trunk(h, t)))
    there = F.kl_div(one, two, reduction="none", log_target=True).sum(-1)
    back = F.kl_div(two, one, reduction="none", log_target=True).sum(-1)
    return (there + back).mean()


def preferred(h, w, t, labels, mask, teacher):
    """Chosen and rejected rows; the gradients of a row depend on other rows."""

    def likelihood(x):
        log_p = F.linear(x, w).log_softmax(-1)
        return (log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * mask).sum(-1)

    return -F.logsigmoid(likelihood(h) - likelihood(trunk(h, t))).mean()


def normed(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def deepseek(h, w, t, labels, mask, teacher):
    """As DeepSeek-V3's report has it (section 2.2): depth k has the hidden states of the last depth
    and the embeddings of the tokens k later, and one token less; embedding and head are shared."""
    tokens = labels.clamp(min=0)

    def loss(x, k):
        logits = F.linear(normed(x), w)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, k + 1 :].flatten())

    main, later = loss(h, 0), 0.0
    for k in range(1, DEPTHS):
        joined = torch.cat([normed(h[:, :-1]), normed(F.embedding(tokens[:, k:], teacher))], -1)
        h = trunk(joined.unflatten(-1, (2, HIDDEN)).sum(-2), t)
        later = later + loss(h, k)
    return main + 0.3 / (DEPTHS - 1) * later


def with_biases(h, w, t, labels, mask, teacher):
    """One bias, whose gradients stay apart, and are added up."""
    bias = t.sum() * teacher[:, 0]
    total = 0.0
    for d, x in depths(h, t):
        logits = F.linear(x, w, bias).flatten(0, 1)
        total = total + F.cross_entropy(logits, shifted(labels, d))
    return total


def by_step(h, w, t, labels, mask, teacher):
    """As in trainers of one layer that is called for each step: losses of each token, classes in
    the second dimension, labels that are written where a mask is 0, and the accuracy of each."""
    valid, total, hits = TOKENS - DEPTHS, 0.0, []
    for d, x in depths(h[:, :valid], t):
        logits = F.linear(x, w)
        target, kept = labels[:, d : d + valid].clone(), mask[:, d : d + valid]
        target[kept == 0] = -100
        each = F.cross_entropy(logits.permute(0, 2, 1), target, reduction="none")
        count = (target != -100).sum()
        total = total + 0.6**d * each.sum() / count.clamp(min=1)
        hits.append((logits.argmax(-1) == target).sum() / count)
    return total + 0 * torch.stack(hits).sum()


JOINED = (
    *(predicted, predicted_of_slices, clamped, of_each_token, both_kinds, turned, tied),
    *(total_variation, read_twice, preferred, deepseek, with_biases, by_step),
)


#: Those of losses that are known by name, whose logits are held nowhere.
BY_DEFAULT = (
    *(predicted, predicted_of_slices, of_each_token, tied),
    *(deepseek, with_biases, by_step),
)


def several_tangents(h, w, t, labels, mask, teacher):
    """Whoever gets the losses may add them up in any way."""
    return tuple(
        F.cross_entropy(F.linear(x, w).flatten(0, 1), shifted(labels, d)) for d, x in depths(h, t)
    )


def learned_weights(h, w, t, labels, mask, teacher):
    """The factor of one loss is made of the other's."""
    one, two = (
        F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten()) for x in (h, trunk(h, t))
    )
    return one + two * one.detach().exp()


def given_targets(h, w, t, labels, mask, teacher):
    """Soft labels as large as logits would be held until the last head."""
    total = 0.0
    for depth, x in depths(h, t):
        soft = (h.detach().roll(depth, 1).sum(-1, keepdim=True) * teacher[:, 0]).tanh()
        soft = torch.cumsum(soft, -1).softmax(-1)
        total = total + (F.linear(x, w).clamp(-2, 2).log_softmax(-1) * soft).sum(-1).mean()
    return total


APART = (several_tangents, learned_weights, given_targets)


def outcome(function, inputs):
    leaves = [t for t in inputs if t.requires_grad]
    found = function(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    total = sum((place + 1) * each for place, each in enumerate(found))
    return [*found, *torch.autograd.grad(total * 0.5, leaves)]


def compared(function, monkeypatch, *, prefer_memory=True):
    """A function that was compiled and does what torch does, and its joint graphs."""
    inputs = problem()
    with recorded(monkeypatch) as graphs:
        compiled = Compiled(function, prefer_memory=prefer_memory)
        found = outcome(compiled, inputs)
    torch.testing.assert_close(found, outcome(function, inputs), rtol=1e-11, atol=1e-11)
    return compiled, graphs["joint"]


@pytest.mark.usefixtures("no_code")
class TestPrograms:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("function", JOINED)
    def test_one_gradient_of_the_weight(self, function, monkeypatch):
        compiled, (graph,) = compared(function, monkeypatch)
        assert graph.count("fused.joined_heads") == 1
        assert not re.search(
            r"target=torch\.ops\.fused\.linear_\w+(region|with_grad|backward)", graph
        )
        assert any(ONE_GRADIENT in choice for choice in compiled.choices)

    @pytest.mark.parametrize("function", APART)
    def test_gradients_that_stay_apart(self, function, monkeypatch):
        compiled, graphs = compared(function, monkeypatch)
        assert "joined_heads" not in graphs[0]
        assert not any(ONE_GRADIENT in choice for choice in compiled.choices)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("function", BY_DEFAULT)
    def test_without_an_option(self, function, monkeypatch):
        compiled, (graph,) = compared(function, monkeypatch, prefer_memory=False)
        assert graph.count("fused.joined_heads") == 1
        assert any(ONE_GRADIENT in choice for choice in compiled.choices)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("function", [f for f in JOINED if f not in BY_DEFAULT])
    def test_what_takes_the_option(self, function, monkeypatch):
        """Other losses hold their logits, or their heads are of two kinds."""
        _, (graph,) = compared(function, monkeypatch, prefer_memory=False)
        assert "joined_heads" not in graph

    @pytest.mark.parametrize("function", [predicted, clamped, preferred])
    def test_bfloat16(self, function):
        inputs = problem(torch.bfloat16)
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        exact = [e if i.is_floating_point() else i for e, i in zip(exact, inputs, strict=True)]
        compiled = Compiled(function, prefer_memory=True)
        found = zip(outcome(compiled, inputs), outcome(function, inputs), outcome(function, exact),
                    strict=True)  # fmt: skip
        for each in found:
            assert_accurate(*each)
        assert any(ONE_GRADIENT in choice for choice in compiled.choices)

    @pytest.mark.parametrize("function", [predicted, clamped])
    def test_autocast(self, function):
        def under(*inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return function(*inputs)

        inputs = problem(torch.float32)
        compiled = Compiled(under, prefer_memory=True)
        truth = outcome(function, problem())
        for each in zip(outcome(compiled, inputs), outcome(under, inputs), truth, strict=True):
            assert_accurate(*each)
        assert any(ONE_GRADIENT in choice for choice in compiled.choices)

    def test_backward_runs_twice(self):
        inputs = problem()
        leaves = list(inputs[:3])
        loss = Compiled(predicted, prefer_memory=True)(*inputs)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss * 2, leaves)
        torch.testing.assert_close(second, tuple(2 * each for each in first))

    def test_a_gradient_that_is_read_besides(self):
        """One depth's gradient of the weight has a reader of its own."""

        def function(h, w, t, labels, mask, teacher):
            ours = w * 1.0
            first = F.cross_entropy(F.linear(h, ours).flatten(0, 1), labels.flatten())
            later = F.cross_entropy(F.linear(trunk(h, t), w).flatten(0, 1), labels.flatten())
            return first + later + (ours * teacher).sum()

        inputs = problem()
        compiled = Compiled(function, prefer_memory=True)
        torch.testing.assert_close(
            outcome(compiled, inputs), outcome(function, inputs), rtol=1e-11, atol=1e-11
        )


def example():
    """Two calls of different ops and numbers of rows, and a weight's gradient by each."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (20, 13))
    w = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(9, (20,), generator=generator)
    region = {
        "products": [{"input": 0, "columns": 0, "bias": None}],
        "known": [],
        "steps": [],
        "columns": [],
        "row_products": [{"value": 0, "other": 1}],
        "sums": [{"value": 0, "other": 0, "is_turned": False, "classes": 9}],
        "totals": [],
        "dtypes": ["float64"] * 2,
    }
    known = [{"value": i} for i in range(3)]
    options = [None, None, 2, -100, 0.0, None, 0.0, {"dtype": "float64"}, True, True, False]
    loss = ["fused.linear_cross_entropy_with_grad.default", [*known, *options], {}]
    rows = ["fused.linear_region.default",
            [[{"value": 3}], [{"value": 4}, {"value": 1}], json.dumps(region)], {}]  # fmt: skip
    calls = [
        {"step": loss, "places": [2], "rows": 0},
        {"step": rows, "places": [1], "rows": 3},
    ]
    each = fused.linear_cross_entropy_with_grad(
        x, w, target, None, None, 2, -100, 0.0, None, 0.0, torch.float64, True, True, False
    )
    z = y @ w.t()
    expected = [each[0], each[1], each[3], z @ w, each[2] + z.t() @ y]
    inputs = [x, w, target, y, w.t()], json.dumps({"calls": calls, "dtype": "float64"})
    return expected, inputs


@pytest.mark.usefixtures("no_code")
class TestOp:
    def test_values(self):
        expected, inputs = example()
        torch.testing.assert_close(fused.joined_heads(*inputs), expected)

    def test_no_rows(self):
        _, ((x, w, target, y, columns), text) = example()
        *_, total = fused.joined_heads([x[:0], w, target[:0], y[:0], columns], text)
        assert total.shape == w.shape
        assert not total.any()

    def test_opcheck(self):
        _, inputs = example()
        torch.library.opcheck(fused.joined_heads.default, inputs)

    def test_text_is_read_back(self):
        _, (_, text) = example()
        calls = joined_calls.parsed(text)
        assert joined_calls.parsed(calls.text()) == calls

    def test_other_calls_are_refused(self):
        _, (tensors, text) = example()
        other = text.replace("fused.linear_region.default", "aten.mm.default")
        with pytest.raises(ValueError, match=r"aten\.mm\.default, which is no step"):
            fused.joined_heads(tensors, other)
