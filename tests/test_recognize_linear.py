"""From a linear layer and the cross entropy of its output to one op, and when not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from tests.constants import set_constants
from tests.graphs import Compiled

ROWS, HIDDEN, CLASSES = (2, 6), 8, 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of four rows, so that small logits are worth the op."""
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)


def head(dtype=torch.float32):
    hidden = torch.randn(*ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, HIDDEN).to(dtype).requires_grad_()
    bias = torch.randn(CLASSES).to(dtype).requires_grad_()
    labels = torch.randint(CLASSES, ROWS)
    labels[0, 1] = -100
    return hidden, weight, bias, labels


def flat(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


def causal_lm(h, w, b, labels):
    """transformers' ForCausalLMLoss."""
    logits = F.linear(h[:, slice(0, None), :], w).float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.view(-1, CLASSES)
    return F.cross_entropy(logits, labels.view(-1), ignore_index=-100, reduction="sum") / 7


def shifted_logits(h, w, b, labels):
    """The older spelling: the logits are shifted."""
    logits = F.linear(h, w, b)[..., :-1, :].contiguous()
    return flat(logits, labels[..., 1:].contiguous())


def soft_capped(h, w, b, labels):
    logits = torch.tanh(F.linear(h, w) / 30.0) * 30.0
    return flat(logits.float(), labels)


def autocast_inside(h, w, b, labels):
    with torch.autocast("cpu", torch.bfloat16):
        return flat(F.linear(h, w, b), labels)


def autocast_of_the_layer(h, w, b, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(h, w, b)
    return flat(logits.float(), labels)


def autocast_after_a_layer(h, w, b, labels):
    """The head's input is bfloat16 already, its weight and bias are not."""
    with torch.autocast("cpu", torch.bfloat16):
        return flat(F.linear(F.linear(h, w[:8]).relu(), w, b), labels)


def autocast_of_the_loss(h, w, b, labels):
    logits = F.linear(h, w, b)
    with torch.autocast("cpu", torch.bfloat16):
        return flat(logits, labels)


MATCHES = {
    "two casts that change nothing": (
        lambda h, w, b, t: flat(F.linear(h, w).contiguous().float().contiguous(), t)
    ),
    "flattened": lambda h, w, b, t: flat(F.linear(h, w, b), t),
    "reshape": lambda h, w, b, t: F.cross_entropy(F.linear(h, w).reshape(12, 50), t.reshape(12)),
    "flatten": lambda h, w, b, t: F.cross_entropy(F.linear(h, w).flatten(0, 1), t.flatten()),
    "flattened before": lambda h, w, b, t: F.cross_entropy(F.linear(h.view(-1, 8), w), t.view(-1)),
    "causal": causal_lm,
    "shifted": shifted_logits,
    "soft-cap": soft_capped,
    "soft-cap by reciprocal": lambda h, w, b, t: flat(
        torch.tanh(F.linear(h, w, b) * (1 / 3)) * 3.0, t
    ),
    "factor and soft-cap": lambda h, w, b, t: flat(
        5.0 * torch.tanh(F.linear(h, w, b) * 0.5 / 5.0), t
    ),
    "factor": lambda h, w, b, t: flat(F.linear(h, w, b) * 0.3, t),
    "temperature": lambda h, w, b, t: flat(F.linear(h, w, b) / 0.7, t),
    "matmul": lambda h, w, b, t: flat(h @ w.t(), t),
    "method": lambda h, w, b, t: flat(h.matmul(w.T), t),
    "classes second": lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b).transpose(1, 2), t),
    "permuted": lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b).permute(1, 2, 0), t.t()),
    "one position": lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b)[:, -1], t[:, -1] % 50),
    "every other": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w, b)[:, ::2].reshape(-1, 50), t[:, ::2].reshape(-1)
    ),
    "one dimension more": lambda h, w, b, t: flat(F.linear(h, w, b).unsqueeze(1).squeeze(1), t),
    "options": lambda h, w, b, t: flat(
        F.linear(h, w, b), t, weight=torch.linspace(1, 2, 50), label_smoothing=0.1
    ),
    "frozen head": lambda h, w, b, t: flat(F.linear(h, w.detach()), t),
    "frozen trunk": lambda h, w, b, t: flat(F.linear(h.detach(), w, b), t),
    "tied": lambda h, w, b, t: flat(F.linear(h + F.embedding(t.clamp(min=0), w), w), t),
    "without gradients": lambda h, w, b, t: flat(
        F.linear(h.detach(), w.detach(), b.detach()), t, reduction="none"
    ),
    "written out": lambda h, w, b, t: (
        -F.log_softmax(F.linear(h, w, b).float(), -1)
        .gather(-1, t.clamp(min=0).unsqueeze(-1))
        .mean()
    ),
    "autocast inside": autocast_inside,
    "autocast of the layer": autocast_of_the_layer,
    "autocast after a layer": autocast_after_a_layer,
    "autocast of the loss": autocast_of_the_loss,
}


def step(function, inputs):
    loss = function(*inputs)
    leaves = [t for t in inputs if t.requires_grad]
    if not loss.requires_grad:
        return (loss,)
    return loss, *torch.autograd.grad(loss.sum() * 3, leaves, allow_unused=True)


def compare(function, inputs, **tolerance):
    """Compares a compiled step with torch's; returns its sites."""
    compiled = Compiled(function, inner_backend="aot_eager")
    torch.testing.assert_close(step(compiled, inputs), step(function, inputs), **tolerance)
    return compiled.sites


def only_site(function, inputs):
    (site,) = compile_losses.explain(function, *inputs).losses
    return site


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


def returned(h, w, b, labels):
    logits = F.linear(h, w, b)
    return flat(logits, labels) + logits.square().sum()


def changed_in_place(h, w, b, labels):
    h = h * 1
    logits = F.linear(h, w.detach(), b)
    h.add_(1)
    return flat(logits, labels)


def logits_changed_in_place(h, w, b, labels):
    logits = F.linear(h, w, b)
    logits[..., 0] = -torch.inf
    return flat(logits, labels.clamp(min=1))


def cut(h, w, b, labels):
    return flat(F.linear(h, w, b).detach() + 0 * h.sum(), labels)


def no_grad_layer(h, w, b, labels):
    with torch.no_grad():
        logits = F.linear(h, w, b)
    return flat(logits, labels) * h.sum()


CROSS_ENTROPY_ALONE = {
    "live logits": (returned, "the logits have other users"),
    "rows taken apart": (
        lambda h, w, b, t: F.cross_entropy(F.linear(h, w).view(-1, 25), t.view(-1).repeat(2) % 9),
        "takes the classes of a row apart",
    ),
    "changed hidden states": (changed_in_place, "changed in place"),
}  # fmt: skip


def check_alone(function, reason, inputs, **tolerance):
    """The loss alone is fused; without a reason there is no layer that was seen."""
    (site,) = compare(function, inputs, **tolerance)
    assert (site.op, site.status) == ("cross_entropy", "rewritten"), site
    if reason is None:
        assert "without its linear layer" not in site.reason
    else:
        assert "without its linear layer: " in site.reason
        assert reason in site.reason, site.reason


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
