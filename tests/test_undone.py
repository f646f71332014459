"""What a fault has done to a graph is undone: torch gets the graph as it was, for each pass and in
each of the ways in, and other losses stay rewritten where that is safe."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo import lookup_backend
from torch._inductor.utils import fresh_cache

import compile_losses
from compile_losses import guard, inductor_passes, lazy
from compile_losses.guard import Snapshot
from compile_losses.lazy import LazyLogits
from compile_losses.recognize import returned_logits, rewriting
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.recognize.heads import head as heads
from compile_losses.recognize.match import Match
from tests.faults import Faults, PlantedError


@contextmanager
def told(message: str) -> Iterator[None]:
    """Tells the user once."""
    guard._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(messages) == 1, messages
    assert message in messages[0]


# Snapshots


def some_graph() -> fx.Graph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(torch.add, (x, y), {"alpha": 2})
    both.meta["note"] = "both"
    sine = graph.call_function(torch.sin, (both,))
    unused = graph.call_method("relu_", (sine,))
    unused.type = torch.Tensor
    graph.output((sine, both))
    return graph


def erased(graph: fx.Graph) -> None:
    x, _, both, sine, unused, output = graph.nodes
    output.args = ((x, x),)
    for node in (unused, sine, both):
        graph.erase_node(node)


def replaced(graph: fx.Graph) -> None:
    x, y, both, sine, *_ = graph.nodes
    with graph.inserting_before(sine):
        other = graph.call_function(torch.mul, (x, y))
    both.replace_all_uses_with(other)
    graph.erase_node(both)


def moved(graph: fx.Graph) -> None:
    x, _, both, sine, *_ = graph.nodes
    x.prepend(sine)
    sine.append(both)


def cyclic(graph: fx.Graph) -> None:
    """New nodes that read each other can't be erased one by one."""
    x, _, both, *_ = graph.nodes
    with graph.inserting_before(x):
        one = graph.call_function(torch.sin, (both,))
        other = graph.call_function(torch.cos, (one,))
    one.args = (other,)
    both.args = (one, other)


def of_other_meta(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.meta["note"] = "other"
    next(iter(graph.nodes)).meta.clear()


def of_no_argument(graph: fx.Graph) -> None:
    x, y, both, *_ = graph.nodes
    with graph.inserting_before(both):
        graph.call_function(torch.mul, (x, Value(torch.ones(1), y)))


DAMAGES = (erased, replaced, moved, cyclic, of_other_meta, of_no_argument)


def picture(graph: fx.Graph) -> list[tuple]:
    return [
        (
            n.name,
            n.op,
            n.target,
            str(n.args),
            str(n.kwargs),
            n.type,
            dict(n.meta),
            [*map(str, n.users)],
        )
        for n in graph.nodes
    ]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_snapshot_restores_a_graph(damage):
    graph = some_graph()
    before = picture(graph)
    snapshot = Snapshot(graph)
    assert snapshot.is_intact()
    for _ in range(2):  # a restored graph is restored again
        damage(graph)
        assert snapshot.is_intact() is (damage is of_other_meta)
        snapshot.restore()
        assert picture(graph) == before
        assert snapshot.is_intact()
        graph.lint()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(moved, "used before it has been defined"), (of_no_argument, "no graph can hold")],
)
def test_a_snapshot_checks_a_graph(damage, message):
    graph = some_graph()
    snapshot = Snapshot(graph)
    snapshot.check()
    damage(graph)
    with pytest.raises((RuntimeError, TypeError), match=message):
        snapshot.check()


# Recognition: two losses, and a fault in one of them


def misplaced(node: fx.Node) -> None:
    """A node before what it reads, which nobody notices but the check of the whole graph."""
    next(iter(node.graph.nodes)).prepend(node)


def unprintable(node: fx.Node) -> None:
    node.args = (Value(torch.ones(1), node), *node.args[1:])


def raising(node: fx.Node) -> None:
    raise PlantedError("after the change")


HARM = {misplaced: "used before", unprintable: "no graph can hold", raising: "after the change"}


def first_of_ours(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if "fused" in str(node.target))


@pytest.fixture(params=HARM, ids=lambda harm: harm.__name__)
def harmed(request, monkeypatch) -> str:
    """Each mse_loss does harm to the graph once it is rewritten; what the user is told."""

    def harmful(match: Match) -> list[fx.Node]:
        graph = match.root.graph
        found = replace(match)
        if match.op == "mse_loss":
            op = torch.ops.fused.mse_loss.default
            request.param(*graph.find_nodes(op="call_function", target=op))
        return found

    replace = Match.replace
    monkeypatch.setattr(Match, "replace", harmful)
    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")
    return HARM[request.param]


def two_losses(x, t, labels):
    return F.mse_loss(x, t) + F.cross_entropy(x, labels)


def of_two_losses():
    return torch.randn(64, 8, requires_grad=True), torch.randn(64, 8), torch.randint(8, (64,))


#: The ways of a graph into the first pass: with torch.compile's own backend, two of them.
WAYS: dict[str, Callable[[], str | Callable]] = {
    "backend": lambda: "compile_losses",
    "enable": lambda: "inductor",
    "slot": lambda: lookup_backend("inductor"),
}


def check(function: Callable, inputs: tuple, way: str) -> None:
    torch._dynamo.reset()
    with nullcontext() if way == "backend" else compile_losses.enable():
        loss = torch.compile(function, backend=WAYS[way](), fullgraph=True)(*inputs)
        (gradient,) = torch.autograd.grad(3 * loss, inputs[0])
    expected = function(*inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * expected, inputs[0])[0])


@pytest.mark.sampled(2)
@pytest.mark.planted
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_with_a_fault_is_torchs(way, harmed, no_code):
    counts = compile_losses.counters()
    counts.clear()
    with told(harmed), fresh_cache():
        check(two_losses, of_two_losses(), way)
    assert counts["rewritten"] == {"cross_entropy": 1}
    assert counts["declined"] == {"mse_loss": 1}


@pytest.mark.planted
def test_the_report_of_a_fault(harmed):
    with told(harmed):
        report = compile_losses.explain(two_losses, *of_two_losses())
    sites = {site.op: site for site in report.losses}
    assert sites["cross_entropy"].status == "rewritten"
    assert sites["mse_loss"].status == "declined"
    assert harmed in sites["mse_loss"].reason
    assert not report.errors


@pytest.mark.planted
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_strict_raises(strict, way, harmed, monkeypatch):
    """By the environment, and by the option, which counts before it."""
    if strict:
        monkeypatch.setenv("COMPILE_LOSSES_STRICT", "1")
        with pytest.raises(Exception, match=harmed):
            check(two_losses, of_two_losses(), way)
    else:
        with pytest.raises(Exception, match=harmed):
            torch.compile(two_losses, backend="compile_losses", options={"strict": True})(
                *of_two_losses()
            )


def captured(function: Callable, *inputs) -> fx.GraphModule:
    found = []
    torch._dynamo.reset()
    with torch._dynamo.config.patch(use_lazy_graph_module=False):
        torch.compile(function, backend=lambda gm, _: found.append(gm) or gm.forward)(*inputs)
    return found[0]


def checkpointed(x, t, labels):
    inner = torch.utils.checkpoint.checkpoint(F.mse_loss, x, t, use_reentrant=False)
    return inner + F.cross_entropy(x, labels)


@pytest.mark.planted
@pytest.mark.parametrize("function", [two_losses, checkpointed])
@pytest.mark.parametrize("faulty", ["lint", "recompile"])
def test_a_graph_that_can_never_be_checked_is_torchs(faulty, function, monkeypatch):
    """If torch refuses whatever the passes made, it gets its own graph."""
    gm = captured(function, *of_two_losses())
    before = picture(gm.graph), gm.code
    bodies = [picture(m.graph) for m in gm.modules() if isinstance(m, fx.GraphModule)]

    def refusing(original):
        def refused(self):
            graph = self if faulty == "lint" else self.graph
            if any("fused" in str(node.target) for node in graph.nodes):
                raise PlantedError("refused")
            return original(self)

        return refused

    owner = fx.Graph if faulty == "lint" else fx.GraphModule
    monkeypatch.setattr(owner, faulty, refusing(getattr(owner, faulty)))
    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")
    with told("refused"):
        compile_losses.rewrite(gm)
    assert before == (picture(gm.graph), gm.code)
    assert bodies == [picture(m.graph) for m in gm.modules() if isinstance(m, fx.GraphModule)]
    report = gm.meta["compile_losses"]
    assert {site.status for site in report.losses} == {"declined"}
    assert all("refused" in site.reason for site in report.losses)


@pytest.mark.sampled(2)
@pytest.mark.planted
@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("step", ["take_shared_logits", "take_plain_logits"])
def test_losses_beside_a_step_with_a_fault(harm, step, monkeypatch, chunks):
    """A step that looks for what several losses share leaves out all that it would take."""

    def function(h, w, labels, t):
        logits = F.linear(h, w)
        return F.cross_entropy(logits, labels) + logits.logsumexp(-1).mean() + F.mse_loss(h, t)

    def harmful(graph, *given, **options):
        yield from take(graph, *given, **options)
        harm(first_of_ours(graph))

    take = getattr(rewriting, step)
    monkeypatch.setattr(rewriting, step, harmful)
    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")
    inputs = torch.randn(64, 8), torch.randn(50, 8), torch.randint(50, (64,)), torch.randn(64, 8)
    if step == "take_plain_logits":  # which comes after the other one
        monkeypatch.setattr(rewriting, "take_shared_logits", lambda *_, **__: iter(()))
    with told(HARM[harm]):
        report = compile_losses.explain(function, *inputs)
    assert {(site.op, site.status) for site in report.losses} == {
        ("cross_entropy", "rewritten"),
        ("mse_loss", "rewritten"),
    }
    (error,) = report.errors
    assert HARM[harm] in error


# The passes on AOTAutograd's graphs


@pytest.mark.sampled(2)
@pytest.mark.planted
@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("lowering", ["plan", "in_place"])
@pytest.mark.parametrize("way", WAYS)
def test_lowering_is_undone(way, lowering, harm, monkeypatch, no_code, kernels_for_small_losses):
    def function(x, w, labels):
        return F.cross_entropy(x @ w, labels)

    def harmful(graph, *given, **options):
        found = lower(graph, *given, **options)
        if not harmful.done:
            harmful.done = True
            harm(first_of_ours(graph))
        return found

    harmful.done = False

    lower = getattr(inductor_passes, lowering)
    monkeypatch.setattr(inductor_passes, lowering, harmful)
    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")
    inputs = torch.randn(64, 8, requires_grad=True), torch.randn(8, 12), torch.randint(12, (64,))
    with told(HARM[harm]), fresh_cache():
        check(function, inputs, way)


# Lazy logits

LAZY = {"lazy_logits": True}


class Model(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.head, self.breaks = nn.Linear(8, 50), breaks

    def forward(self, x, labels):
        logits = self.head(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(logits, labels), logits


def trained(model, function, inputs):
    model.zero_grad()
    loss, logits = function(*inputs)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    return [loss.detach(), logits.detach() + 0, *gradients]


@pytest.mark.sampled(2)
@pytest.mark.planted
@pytest.mark.parametrize(
    ("breaks", "way"),
    [(False, "enable"), (True, "backend"), pytest.param(True, "enable", marks=pytest.mark.slow)],
)
def test_lazy_logits_with_faults(breaks, way, monkeypatch, chunks, no_code):
    """Each function raises that makes logits lazy or takes them, before and after its work."""
    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")
    model = Model(breaks)
    inputs = torch.randn(64, 8), torch.randint(50, (64,))
    expected = trained(model, model, inputs)
    modules = (lazy.inputs, lazy.outputs, heads, returned_logits)
    files = {inspect.getsourcefile(module) for module in modules}

    def compiled(faults: Faults) -> int:
        torch._dynamo.reset()
        guard._warned.clear()
        enabled = compile_losses.enable(lazy_logits=True) if way == "enable" else nullcontext()
        with enabled, faults.planted(monkeypatch), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if way == "enable":
                function = torch.compile(model)
            else:
                function = torch.compile(model, backend="compile_losses", options=LAZY)
            torch.testing.assert_close(trained(model, function, inputs), expected)
            kinds.append(type(function(*inputs)[1]))
        messages = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert len(messages) <= 1, messages
        return len(messages)

    kinds: list[type] = []
    with torch._inductor.config.patch(force_disable_caches=True):
        whole = Faults()
        assert not compiled(whole)
        assert kinds == [LazyLogits]
        codes = [code for code in whole.calls if code.co_filename in files]
        faults = [
            Faults(code, at, event)
            for i, code in enumerate(codes)
            for at, event in [((1, whole.calls[code])[i % 2], ("call", "return")[i // 2 % 2])]
        ]
        warned = sum(map(compiled, faults))
    raised = sum(fault.raised for fault in faults)
    assert raised > 15
    assert warned > 0.8 * raised
