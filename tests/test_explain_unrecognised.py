"""What explain() says of numbers that need a gradient and that no loss it knows makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import compile_losses


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


MODEL = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
X, T = torch.randn(4, 8), torch.rand(4, 8)


def sites(function, *inputs):
    """The sites' ops with their status, and the report."""
    report = compile_losses.explain(function, *inputs)
    assert not report.errors
    return [(site.op, site.status) for site in report.sites], report


def line_of(fragment):
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(fragment))


def test_custom_loss():
    def step(x, t):
        error = MODEL(x) - t
        return error.cosh().log().mean()  # of a hyperbolic cosine

    found, report = sites(step, X, T)
    assert found == [("mean", "unrecognised")]
    assert (report.sites[0].file, report.sites[0].line) == (
        __file__,
        line_of("# of a hyperbolic cosine"),
    )
    assert report.summary == "1 graph, 0 losses, 0 rewritten, 1 unrecognised"
    assert "unrecognised" in str(report)
    assert "unrecognised" in report.to_html()
    assert report.to_dict()["sites"][0]["status"] == "unrecognised"
    (result,) = report.results
    assert result.found == ("mean (unrecognised)",)


def test_beside_a_loss():
    found, report = sites(lambda x, t: F.mse_loss(MODEL(x), t) + 0.1 * MODEL(x).exp().sum(), X, T)
    assert found == [("mse_loss", "rewritten"), ("sum", "unrecognised")]
    assert report.summary == "1 graph, 1 loss, 1 rewritten, 0 gained, 1 unrecognised"
    assert report.results[0].found == ("mse_loss (rewritten)", "sum (unrecognised)")


def test_declined_is_not_unrecognised():
    found, report = sites(lambda x, t: F.binary_cross_entropy(MODEL(x).sigmoid(), t), X, T)
    assert found == [("binary_cross_entropy", "declined")]
    assert report.summary == "1 graph, 1 loss, 0 rewritten"
    assert report.results[0].found == ("binary_cross_entropy (declined)",)


def test_what_is_done_to_an_unreduced_loss():
    """Focal loss, a masked mean, weights that are learned: the loss is below the sum."""

    def focal(x, t):
        each = F.binary_cross_entropy_with_logits(MODEL(x), t, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    found, _ = sites(focal, X, T)
    assert found == [("binary_cross_entropy_with_logits", "rewritten")]


def test_numbers_that_are_stacked():
    def step(x, t):
        h = MODEL(x)
        return torch.stack([F.mse_loss(h, t), F.l1_loss(h, t), h.logsumexp(0).mean()]).sum()

    found, report = sites(step, X, T)
    assert found == [("mse_loss", "rewritten"), ("l1_loss", "rewritten"), ("mean", "unrecognised")]
    assert sorted(report.results[0].found) == [
        "l1_loss (rewritten)",
        "mean (unrecognised)",
        "mse_loss (rewritten)",
    ]


def test_several_results():
    def step(x, t):
        h = MODEL(x)
        return {"loss": F.mse_loss(h, t), "spread": h.std(), "seen": h.mean().detach()}, h

    found, report = sites(step, X, T)
    assert found == [("mse_loss", "rewritten"), ("std", "unrecognised")]
    assert [result.found for result in report.results] == [
        ("mse_loss (rewritten)",),
        ("std (unrecognised)",),
    ]
    assert sum(line.startswith("returned, ") for line in str(report).splitlines()) == 2


def test_penalties_take_one_line():
    def step(x, t):
        penalty = sum(p.abs().sum() for p in MODEL.parameters())
        return F.mse_loss(MODEL(x), t) + 1e-4 * penalty

    found, report = sites(step, X, T)
    assert found == [("mse_loss", "rewritten"), ("sum", "unrecognised")]
    assert report.sites[1].reason == "4 x sum: of parameters alone"


def test_many_terms(tmp_path):
    """Those of one line are one site, and only some lines are listed."""

    def step(x):
        h = MODEL(x)
        total = h.tanh().sum()
        for i in range(20):
            total = total + (h * i).tanh().sum()
        return total

    _, report = sites(step, X)
    assert [site.reason.partition(":")[0] for site in report.sites] == [
        "no loss that is known was found in it",
        "20 x sum",
    ]
    lines = "\n".join(f"    total = total + (h * {i}).exp().mean()" for i in range(20))
    source = f"def step(x):\n    h, total = MODEL(x), 0\n{lines}\n    return total\n"
    file = tmp_path / "losses.py"
    file.write_text(source)
    namespace = {"MODEL": MODEL}
    exec(compile(source, str(file), "exec"), namespace)
    _, report = sites(namespace["step"], X)
    assert len(report.sites) == 8
    assert report.sites[-1].reason.endswith("and 12 lines more like it")


def test_bodies():
    """Of a checkpointed region."""

    def unknown(x):
        return checkpoint(lambda x: MODEL(x).exp().mean(), x, use_reentrant=False)

    def known(x, t):
        return checkpoint(lambda x: F.mse_loss(MODEL(x), t), x, use_reentrant=False)

    assert sites(unknown, X)[0] == [("mean", "unrecognised")]
    assert sites(known, X, T)[0] == [("mse_loss", "rewritten")]


def test_backward_inside():
    def step(x):
        loss = MODEL(x).exp().mean()
        loss.backward()
        return loss.detach()

    assert sites(step, X)[0] == [("mean", "unrecognised")]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda: MODEL(X), id="no number"),
        pytest.param(lambda: MODEL(X).mean().detach(), id="detached"),
        pytest.param(torch.no_grad()(lambda: MODEL(X).mean()), id="without gradients"),
        pytest.param(lambda: X.mean(), id="of data"),
        pytest.param(lambda: (MODEL(X).mean() > 0, MODEL(X).argmax()), id="not floating"),
    ],
)
def test_nothing_to_say(function):
    assert sites(function)[0] == []


def test_graph_stays_as_it_is():
    """Only the report knows: a backend's rewrite adds nothing."""

    def step(x, t):
        return (MODEL(x) - t).cosh().log().mean()

    reports = []

    def backend(gm, example_inputs):
        reports.append(compile_losses.rewrite(gm).meta["compile_losses"])
        return gm.forward

    torch.compile(step, backend=backend)(X, T)
    assert reports[0].sites == reports[0].results == []


class _Squares(torch.autograd.Function):
    """As libraries write heads without logits: a result of each row, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum(-1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad.unsqueeze(-1)


def test_of_an_autograd_function():
    def step(x, t):
        each = _Squares.apply(MODEL(x))
        return each.masked_fill(t[:, 0] > 0.5, 0).sum() / 4

    found, report = sites(step, X, T)
    assert found == [("sum", "unrecognised")]
    assert "it reads an autograd.Function" in report.sites[0].reason


@pytest.mark.parametrize("reduce", [torch.max, torch.min])
def test_of_one_of_several_results(reduce):
    found, report = sites(lambda x, t: reduce(MODEL(x), -1).values.mean(), X, T)
    assert found == [("mean", "unrecognised")]
    assert "Function" not in report.sites[0].reason


def test_after_a_checkpoint():
    """The reduction reads the one result of a graph inside the graph."""

    def step(x, t):
        return checkpoint(MODEL, x, use_reentrant=False).cosh().mean()

    assert sites(step, X, T)[0] == [("mean", "unrecognised")]
