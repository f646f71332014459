"""Losses of logits that the caller holds: at most one gradient is held ahead of its backward."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from compile_losses.ops import ahead
from compile_losses.programs.measuring import peak_memory

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")

fused = torch.ops.fused
ROWS, CLASSES, COUNT = 64, 1000, 3
LOGITS = ROWS * CLASSES * 4
OPTIONS = (None, 1, -100, 0.0, torch.float32)


def softened(student, teacher):
    p, q = F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1)
    return 4 * F.kl_div(p, q, reduction="batchmean")


def of_classes():
    return torch.randint(CLASSES, (ROWS,))


def of_probabilities():
    return torch.rand(ROWS, CLASSES).softmax(-1)


LOSSES = {
    "classes": (F.cross_entropy, of_classes),
    "a part": (lambda x, t: 0.25 * F.cross_entropy(x, t, reduction="sum"), of_classes),
    "probabilities": (F.cross_entropy, of_probabilities),
    "distillation": (softened, of_probabilities),
    "divergence": (lambda x, t: F.kl_div(x.exp().log(), t, reduction="sum"), of_probabilities),
    "log-probabilities": (lambda x, t: F.kl_div(x, t, reduction="sum"), of_probabilities),
    "squares": (F.mse_loss, of_probabilities),
}


class Logits(torch.autograd.Function):
    """Stands for a model that makes logits: nothing else of their size is made before a loss."""

    @staticmethod
    def forward(ctx, bias, logits):
        return logits + bias

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sum(0), None


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    monkeypatch.setattr(ahead, "_HELD", {})


def steps(loss, bias, batches, *, holds, last_first=False):
    """All forwards, and then all backwards."""
    losses, held = [], []
    for logits, target in batches:
        made = Logits.apply(bias, logits)
        losses.append(loss(made, target))
        if holds:
            held.append(made)
        del made
    found = [each.item() for each in losses]
    if last_first:
        losses.reverse()
    while losses:
        losses.pop(0).backward()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("count", [1, COUNT])
@pytest.mark.parametrize("name", LOSSES)
def test_memory_is_stocks(name, count, holds, last_first):
    function, make_target = LOSSES[name]
    torch.manual_seed(0)
    batches = [(torch.randn(ROWS, CLASSES), make_target()) for _ in range(count)]
    peaks, results = [], []
    for backend in ("inductor", "compile_losses"):
        torch._dynamo.reset()
        bias = torch.zeros(CLASSES, requires_grad=True)
        loss = torch.compile(function, backend=backend)
        run = partial(steps, loss, bias, batches, holds=holds, last_first=last_first)
        run()
        bias.grad = None
        peaks.append(peak_memory(run, torch.device("cpu")))
        results.append([bias.grad, torch.tensor(run())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert peaks[0] >= (count + 1 if holds else 1) * LOGITS, "what is compared is measured"
    assert peaks[1] <= peaks[0] + LOGITS / 4


def calls(count):
    """Arguments of a loss, different each time."""
    return [(torch.randn(ROWS, CLASSES), of_classes(), *OPTIONS) for _ in range(count)]


def in_a_backward(elements, given, factor, *, retain_graph=False):
    """The gradient that an op computes for an element in a backward."""
    found = []

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(*elements)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            for element, arguments in zip(ctx.saved_tensors, given, strict=True):
                found.append(fused.cross_entropy_ahead_gradient(factor, element, *arguments))
            return gradient

    loss = Loss.apply(torch.zeros((), requires_grad=True))
    loss.backward(retain_graph=retain_graph)
    return found


def held(elements):
    return [element.untyped_storage().nbytes() >= LOGITS for element in elements]


def test_one_gradient_at_a_time():
    given, factor = calls(3), torch.tensor(3.0)
    results = [fused.cross_entropy_ahead(*each) for each in given]
    losses, elements = zip(*results, strict=True)
    assert held(elements) == [True, False, False]
    expected = [fused.cross_entropy_with_grad(*each) for each in given]
    assert all(torch.equal(a, b) for a, (b, _) in zip(losses, expected, strict=True))
    memory = elements[0].data_ptr()
    found = in_a_backward(elements, given, factor)
    assert found[0].data_ptr() == memory
    for gradient, (_, unit) in zip(found, expected, strict=True):
        assert torch.equal(gradient, 3 * unit)
    # What stood for the gradient does not lie in it any more: a compiled graph may write to it.
    assert held(elements) == [False] * 3
    assert held([fused.cross_entropy_ahead(*given[0])[1]]) == [True]


def test_given_up_for_another_backward():
    """Where the last forward is the first to be differentiated."""
    given, factor = calls(2), torch.tensor(0.5)
    elements = [fused.cross_entropy_ahead(*each)[1] for each in given]
    assert held(elements) == [True, False]
    found = in_a_backward(elements[::-1], given[::-1], factor)
    assert held(elements) == [False, False]
    for gradient, each in zip(found, given[::-1], strict=True):
        assert torch.equal(gradient, fused.cross_entropy_with_grad(*each)[1] / 2)


def test_retained():
    """A gradient stays as it is for a second backward."""
    (given,), factor = calls(1), torch.tensor(2.0)
    _, element = fused.cross_entropy_ahead(*given)
    expected = 2 * fused.cross_entropy_with_grad(*given)[1]
    for retain_graph in (True, True, False):
        (found,) = in_a_backward([element], [given], factor, retain_graph=retain_graph)
        assert torch.equal(found, expected)
        assert held([element]) == [retain_graph]


def test_freed_with_what_the_backward_saved():
    first, second, third = calls(3)
    _, element = fused.cross_entropy_ahead(*first)
    assert held([fused.cross_entropy_ahead(*second)[1]]) == [False]
    del element
    assert held([fused.cross_entropy_ahead(*third)[1]]) == [True]


def test_copies_stand_for_nothing():
    """Nor does an element that lies in memory as large as a gradient's."""
    (given,), factor = calls(1), torch.tensor(1.0)
    expected = fused.cross_entropy_with_grad(*given)[1]
    _, element = fused.cross_entropy_ahead(*given)
    for other in (element.clone(), torch.zeros(ROWS, CLASSES)[0, 0]):
        (found,) = in_a_backward([other], [given], factor)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 2)])
def test_few_logits(shape):
    given = torch.randn(shape), torch.zeros(shape[0], dtype=torch.int64), *OPTIONS
    _, element = fused.cross_entropy_ahead(*given)
    (found,) = in_a_backward([element], [given], torch.tensor(1.0))
    assert torch.equal(found, fused.cross_entropy_with_grad(*given)[1])


def test_layouts():
    """The gradient has the strides of with_grad's, whether it was computed ahead or not."""
    wide = torch.randn(CLASSES, 2 * ROWS)
    for input in (wide[:, ::2].t(), wide.t()[:ROWS], torch.randn(4, CLASSES, 16)):
        shape = (len(input), *input.shape[2:])
        given = input, torch.randint(CLASSES, shape), *OPTIONS
        _, expected = fused.cross_entropy_with_grad(*given)
        elements = [fused.cross_entropy_ahead(*given)[1] for _ in range(2)]
        for found in in_a_backward(elements, [given] * 2, torch.tensor(1.0)):
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()


def differentiate(function, x, *others):
    (gradient,) = torch.autograd.grad(function(x, *others), x)
    return gradient


def test_surroundings():
    """Hooks, checkpoints, threads and several graphs: in all of them the gradient is right."""
    loss = torch.compile(F.cross_entropy, backend="compile_losses")
    x, t = torch.randn(ROWS, CLASSES, requires_grad=True), of_classes()
    expected = differentiate(F.cross_entropy, x, t)

    def check(gradient):
        torch.testing.assert_close(gradient, expected)

    check(differentiate(loss, x, t))
    with torch.autograd.graph.save_on_cpu():
        value = loss(x, t)
        assert not ahead._HELD.get(x.device) or ahead._HELD[x.device].expired()
    check(torch.autograd.grad(value, x)[0])
    check(differentiate(lambda *given: checkpoint(loss, *given, use_reentrant=False), x, t))
    values = [loss(x, t) for _ in range(3)]
    for value in values[1:]:
        check(torch.autograd.grad(value, x)[0])
    check(torch.autograd.grad(values[0], x)[0])
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(differentiate(loss, x, t))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for gradient in found:
        check(gradient)


def test_kept_in_the_backward_where_memory_is_preferred(graphs):
    options = {"prefer_memory": True}
    loss = torch.compile(F.cross_entropy, backend="compile_losses", options=options)
    x, t = torch.randn(ROWS, CLASSES, requires_grad=True), of_classes()
    torch.testing.assert_close(differentiate(loss, x, t), differentiate(F.cross_entropy, x, t))
    assert "cross_entropy_ahead" not in graphs["joint"][0]
    assert "cross_entropy_backward" in graphs["joint"][0]
