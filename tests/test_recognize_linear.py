"""From a linear layer and the cross entropy of its output to one op, and when not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from tests.constants import set_constants
from tests.corpus.heads import (
    CLASSES,
    CROSS_ENTROPY_ALONE,
    HIDDEN,
    MATCHES,
    ROWS,
    cut,
    flat,
    head,
    logits_changed_in_place,
    no_grad_layer,
)
from tests.heads import check_alone, compare, only_site, step
from tests.heads import small_chunks as small_chunks  # a fixture of this file, too


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATCHES)
def test_matches(name, dtype):
    if dtype == torch.bfloat16 and name in ("options", "autocast of the loss"):
        pytest.skip(reason="torch itself refuses these in bfloat16")
    inputs = head(dtype)
    narrow = dtype == torch.bfloat16 or "autocast" in name
    tolerance = {"rtol": 5e-2, "atol": 3e-2} if narrow else {}
    (site,) = compare(MATCHES[name], inputs, **tolerance)
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten"), site
    assert "absorbed a linear layer" in site.reason


@pytest.mark.parametrize("name", CROSS_ENTROPY_ALONE)
def test_cross_entropy_alone(name):
    function, reason = CROSS_ENTROPY_ALONE[name]
    check_alone(function, reason, head())


@pytest.mark.parametrize("function", [logits_changed_in_place, cut, no_grad_layer])
def test_never_taken_along(function):
    inputs = head()
    for site in compare(function, inputs):
        assert site.op == "cross_entropy"


def test_float16_computes_its_logits_once():
    inputs = head(torch.float16)
    site = only_site(MATCHES["flattened"], inputs)
    assert "gradients in float16" in site.reason


@pytest.mark.kernels
def test_small_logits_stay(monkeypatch):
    """One chunk would hold them all; the reason says how large they are."""
    monkeypatch.undo()
    site = only_site(MATCHES["flattened"], head())
    assert (site.op, site.status) == ("cross_entropy", "rewritten")
    assert "0.0 MiB of logits are one chunk" in site.reason
    for classes, op in ((20_000, "cross_entropy"), (30_000, "linear_cross_entropy")):
        torch._dynamo.reset()  # or the number of classes is dynamic
        big = torch.randn(3000, 4, requires_grad=True), torch.randn(classes, 4, requires_grad=True)
        site = only_site(lambda h, w, t: F.cross_entropy(h @ w.t(), t), (*big, torch.arange(3000)))
        assert site.op == op
        assert ("prefer_memory" in site.reason) == (op == "cross_entropy"), site.reason


@pytest.mark.parametrize("way", ["option", "environment"])
def test_memory_is_preferred(way, monkeypatch):
    set_constants(monkeypatch, least_rows=9)
    inputs, function = head(), MATCHES["flattened"]
    site = only_site(function, inputs)
    assert site.op == "cross_entropy"
    assert "chunks would save 0.0 of its 0.0 MiB of logits" in site.reason
    options = {"inner_backend": "aot_eager"}
    if way == "environment":
        monkeypatch.setenv("COMPILE_LOSSES_PREFER_MEMORY", "1")
        assert only_site(function, inputs).op == "linear_cross_entropy"
    else:
        options["prefer_memory"] = True
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="compile_losses", options=options)
    with torch.profiler.profile() as profiled:
        compiled(*inputs)
    assert any("linear_cross_entropy" in event.name for event in profiled.events())


@pytest.mark.kernels
def test_shifted_rows_are_two_chunks(monkeypatch):
    """A label less than twice a chunk's rows is no reason to keep the logits."""
    monkeypatch.undo()
    h, w = torch.randn(2047, 4, requires_grad=True), torch.randn(50_000, 4, requires_grad=True)
    site = only_site(lambda h, w, t: F.cross_entropy(h @ w.t(), t), (h, w, torch.arange(2047)))
    assert site.op == "linear_cross_entropy"


def test_torchs_own_function():
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        pytest.skip(reason="torch has no linear_cross_entropy before 2.13")

    def loss(h, w, b, labels):
        return function(h.view(-1, HIDDEN), w, labels.view(-1), linear_bias=b)

    inputs = head()
    (site,) = compare(loss, inputs)
    assert site.op == "linear_cross_entropy"


def test_dynamic_shapes():
    compiled = torch.compile(
        MATCHES["shifted"],
        backend="compile_losses",
        options={"inner_backend": "aot_eager"},
        dynamic=True,
    )
    for rows in (6, 9, 30):
        h, w, b, _ = head()
        h = torch.randn(2, rows, HIDDEN, requires_grad=True)
        inputs = (h, w, b, torch.randint(CLASSES, (2, rows)))
        torch.testing.assert_close(step(compiled, inputs), step(MATCHES["shifted"], inputs))


def test_sizes_of_the_logits_are_no_users():
    def function(h, w, t):
        logits = h @ w.t()
        return F.cross_entropy(logits, t, reduction="sum") / logits.size(0)

    h, w, t = torch.randn(12, HIDDEN), torch.randn(CLASSES, HIDDEN), torch.randint(CLASSES, (12,))
    torch._dynamo.mark_dynamic(h, 0)
    torch._dynamo.mark_dynamic(t, 0)
    inputs = h.requires_grad_(), w.requires_grad_(), t
    (site,) = compare(function, inputs)
    assert site.op == "linear_cross_entropy"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x, labels):
        return flat(self.head(torch.tanh(self.trunk(x))), labels)


def test_inductor():
    """Both doors; three steps that accumulate gradients, with a factor."""
    inputs, labels = torch.randn(*ROWS, HIDDEN), torch.randint(CLASSES, ROWS)
    results = []
    for door in (None, "backend", "enable"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Model()
        if door == "backend":
            model.compile(backend="compile_losses")
        if door == "enable":
            with compile_losses.enable():
                model.compile()
                model(inputs, labels).backward()
                model.zero_grad()
        for factor in (1.0, 3.0, -0.5):
            (model(inputs, labels) * factor).backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_every_size_may_be_dynamic():
    """The plan asks for no size: that would make a number of what the user marked as a symbol."""
    x, w, t = torch.randn(8, 16), torch.randn(100, 16, requires_grad=True), torch.randint(100, (8,))
    for tensor in (x, w):
        torch._dynamo.mark_dynamic(tensor, 1)
    op = torch.ops.fused.linear_cross_entropy
    compiled = torch.compile(lambda x, w, t: op(x, w, t), backend="compile_losses")
    results = [
        (value, *torch.autograd.grad(value, w)) for value in (compiled(x, w, t), op(x, w, t))
    ]
    torch.testing.assert_close(*results)
