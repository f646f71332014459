"""As many graphs as stock torch.compile where a number or a size changes from call to call."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import compile_losses
from compile_losses import options
from tests.constants import plan_small_as_large

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZES = ((6, 10), (7, 11), (9, 9), (12, 5))


def positive(*shape):
    return torch.rand(shape) * 0.5 + 0.4


def classes(rows, cols, *more):
    return torch.randint(cols, (rows, *more))


class Found:
    """How many losses were rewritten in what a test compiles."""

    def __init__(self, monkeypatch):
        self.rewritten = 0
        rewrite_graph = options.rewrite_graph

        def counted(*args, **kwargs):
            report = rewrite_graph(*args, **kwargs)
            self.rewritten += sum(site.status == "rewritten" for site in report.sites)
            return report

        monkeypatch.setattr(options, "rewrite_graph", counted)


@pytest.fixture
def graphs_of(monkeypatch, no_code):
    """The number of graphs of a function with stock torch.compile and in both ways, and where its
    loss is decomposed for its size."""
    found = Found(monkeypatch)

    def graphs(function, calls, way, dynamic):
        torch._dynamo.reset()
        counters.clear()
        with (
            compile_losses.enable() if way == "enable" else nullcontext(),
            pytest.MonkeyPatch.context() as patch,
        ):
            if way != "as shipped":
                plan_small_as_large(patch)
            name = "compile_losses" if way in ("backend", "as shipped") else "inductor"
            compiled = torch.compile(function, backend=name, dynamic=dynamic, fullgraph=True)
            for call in calls:
                compiled(*call).sum().backward()
        return counters["stats"]["unique_graphs"]

    def compare(function, calls, dynamic=None):
        expected = graphs(function, calls, "stock", dynamic)
        assert found.rewritten == 0
        for count, way in enumerate(("backend", "enable", "as shipped"), 1):
            assert graphs(function, calls, way, dynamic) == expected, way
            assert found.rewritten >= count, "nothing was rewritten"
        return expected

    return compare


def linear(x, weight, target, **options):
    return F.cross_entropy(x @ weight, target, **options)


#: A function of tensors and a number, the tensors, the numbers.
NUMBERS = {
    "cross_entropy, ignore_index": (
        lambda x, t, i: F.cross_entropy(x, t, ignore_index=i),
        (positive(6, 10), classes(6, 10)),
        range(1, 11),  # more than the recompile limit
    ),
    "module": (
        lambda x, t, i: nn.CrossEntropyLoss(ignore_index=i)(x, t),
        (positive(6, 10), classes(6, 10)),
        (-7, -8, -9, -10),
    ),
    "nll_loss, ignore_index": (
        lambda x, t, i: F.nll_loss(x, t, ignore_index=i),
        (positive(6, 10), classes(6, 10)),
        (1, 2, 3, 4),
    ),
    "nll_loss of log_softmax, ignore_index": (
        lambda x, t, i: F.nll_loss(x.log_softmax(1), t, ignore_index=i),
        (positive(6, 10), classes(6, 10)),
        (1, 2, 3, 4),
    ),
    "probabilities, ignore_index": (
        lambda x, t, i: F.cross_entropy(x, t, ignore_index=i),
        (positive(6, 10), positive(6, 10)),
        (-1, -2, -3, -4),
    ),
    "linear, ignore_index": (
        lambda x, w, t, i: linear(x, w, t, ignore_index=i),
        (positive(6, 4), positive(4, 10), classes(6, 10)),
        (1, 2, 3, 4),
    ),
    "cross_entropy, label_smoothing": (
        lambda x, t, i: F.cross_entropy(x, t, label_smoothing=i),
        (positive(6, 10), classes(6, 10)),
        (0.1, 0.2, 0.3, 0.4),
    ),
    "probabilities, label_smoothing": (
        lambda x, t, i: F.cross_entropy(x, t, label_smoothing=i),
        (positive(6, 10), positive(6, 10)),
        (0.1, 0.2, 0.3, 0.4),
    ),
    "linear, label_smoothing": (
        lambda x, w, t, i: linear(x, w, t, label_smoothing=i),
        (positive(6, 4), positive(4, 10), classes(6, 10)),
        (0.1, 0.2, 0.3, 0.4),
    ),
    "smooth_l1_loss, beta": (
        lambda x, y, i: F.smooth_l1_loss(x, y, beta=i),
        (positive(6, 10), positive(6, 10)),
        (0.1, 0.2, 0.3, 0.4),
    ),
    "smooth_l1_loss, integers as beta": (
        lambda x, y, i: F.smooth_l1_loss(x, y, beta=i),
        (positive(6, 10), positive(6, 10)),
        (2, 3, 4, 5),
    ),
    "huber_loss, delta": (
        lambda x, y, i: F.huber_loss(x, y, delta=i),
        (positive(6, 10), positive(6, 10)),
        (0.1, 0.2, 0.3, 0.4),
    ),
    "huber_loss, integers as delta": (
        lambda x, y, i: F.huber_loss(x, y, delta=i),
        (positive(6, 10), positive(6, 10)),
        (2, 3, 4, 5),
    ),
    "softcap": (
        lambda x, t, i: F.cross_entropy(i * torch.tanh(x / i), t),
        (positive(6, 10), classes(6, 10)),
        (10.0, 20.0, 30.0, 40.0),
    ),
    "linear, softcap": (
        lambda x, w, t, i: F.cross_entropy(i * torch.tanh(x @ w / i), t),
        (positive(6, 4), positive(4, 10), classes(6, 10)),
        (10.0, 20.0, 30.0, 40.0),
    ),
    "factor of the logits": (
        lambda x, t, i: F.cross_entropy(x * i, t),
        (positive(6, 10), classes(6, 10)),
        (10.0, 20.0, 30.0, 40.0),
    ),
    "temperature": (
        lambda x, t, i: F.kl_div(
            F.log_softmax(x / i, -1), F.softmax(t / i, -1), reduction="batchmean"
        ),
        (positive(6, 10), positive(6, 10)),
        (1.5, 2.5, 3.5, 4.5),
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "dynamic",
    [pytest.param(None, id="automatic"), pytest.param(True, id="dynamic", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, dynamic, graphs_of):
    function, (input, *others), numbers = NUMBERS[name]
    graphs_of(function, [(input.requires_grad_(), *others, n) for n in numbers], dynamic)


def calls(*make):
    """What a function is called with, for each of SIZES."""
    return [tuple(m(rows, cols) for m in make) for rows, cols in SIZES]


def rows_and_cols(rows, cols):
    return positive(rows, cols)


BROADCAST = {
    "equal": (rows_and_cols, rows_and_cols),
    "column": (rows_and_cols, lambda n, c: positive(n, 1)),
    "row": (rows_and_cols, lambda n, c: positive(c)),
    "number": (rows_and_cols, lambda n, c: positive()),
    "both": (lambda n, c: positive(n, 1), lambda n, c: positive(1, c)),
    "input's row": (lambda n, c: positive(c), rows_and_cols),
    "column and numbers": (lambda n, c: positive(n, 1), lambda n, c: positive(n)),
    "batches": (lambda n, c: positive(n + c, n, c), rows_and_cols),
}
PAIRS = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "kl_div": lambda a, b: F.kl_div(a, b, reduction="batchmean"),
    "kl_div, none": lambda a, b: F.kl_div(a, b, reduction="none"),
}


def weighted(name):
    return lambda a, b, w: getattr(F, name)(a, b, weight=w)


def weighted_after(loss):
    return lambda a, b, w: (w * loss(a, b, reduction="none")).mean()


BCE = F.binary_cross_entropy_with_logits
SHAPES = {
    **{f"{n}, {b}": (PAIRS[n], calls(*BROADCAST[b])) for n in PAIRS for b in BROADCAST},
    **{
        f"{n}, weight": (weighted(n), calls(rows_and_cols, rows_and_cols, rows_and_cols))
        for n in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
    },
    **{
        f"{n}, a column of weights after it": (
            weighted_after(getattr(F, n)),
            calls(rows_and_cols, rows_and_cols, lambda n, c: positive(n, 1)),
        )
        for n in ("mse_loss", "l1_loss", "huber_loss")
    },
    "binary_cross_entropy": (BCE, calls(rows_and_cols, rows_and_cols)),
    "binary_cross_entropy, a row of weights": (
        weighted("binary_cross_entropy_with_logits"),
        calls(rows_and_cols, rows_and_cols, lambda n, c: positive(c)),
    ),
    "binary_cross_entropy, pos_weight": (
        lambda a, b, p: BCE(a, b, pos_weight=p),
        calls(rows_and_cols, rows_and_cols, lambda n, c: positive(c)),
    ),
    "cross_entropy": (F.cross_entropy, calls(rows_and_cols, classes)),
    "cross_entropy, weight": (
        F.cross_entropy,
        calls(rows_and_cols, classes, lambda n, c: positive(c)),
    ),
    "cross_entropy, smoothed": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        calls(rows_and_cols, classes),
    ),
    "cross_entropy, images": (
        F.cross_entropy,
        calls(lambda n, c: positive(n, c, n + 3), lambda n, c: classes(n, c, n + 3)),
    ),
    "cross_entropy, one row": (
        F.cross_entropy,
        calls(lambda n, c: positive(c), lambda n, c: classes(n, c)[0]),
    ),
    "probabilities": (F.cross_entropy, calls(rows_and_cols, rows_and_cols)),
    "probabilities, weight": (
        F.cross_entropy,
        calls(rows_and_cols, rows_and_cols, lambda n, c: positive(c)),
    ),
    "nll_loss": (F.nll_loss, calls(rows_and_cols, classes)),
    "nll_loss, weight": (F.nll_loss, calls(rows_and_cols, classes, lambda n, c: positive(c))),
    "nll_loss, images": (
        F.nll_loss,
        calls(lambda n, c: positive(n, c, n + 3), lambda n, c: classes(n, c, n + 3)),
    ),
    "linear": (
        linear,
        calls(lambda n, c: positive(n, 4), lambda n, c: positive(4, c), classes),
    ),
    "distillation": (
        lambda a, b: F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction="batchmean"),
        calls(rows_and_cols, rows_and_cols),
    ),
    "distillation, none": (
        lambda a, b: F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction="none").sum(-1),
        calls(rows_and_cols, rows_and_cols),
    ),
}


#: Where the shapes that broadcast differ in their number of dimensions, and one of each loss.
OFTEN = (
    "mse_loss, column", "kl_div, row", "kl_div, both", "kl_div, none, batches", "nll_loss",
    "binary_cross_entropy, pos_weight", "cross_entropy, weight", "probabilities", "linear",
    "distillation",
)  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("marked", [False, True], ids=["automatic", "marked"])
@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in SHAPES]
)
def test_shapes(name, marked, graphs_of):
    function, found = SHAPES[name]
    for call in found:
        call[0].requires_grad_()
        for tensor in call if marked else ():
            for dim, size in enumerate(tensor.shape):
                if size > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    graphs_of(function, found)
