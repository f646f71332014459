"""A fault of this package costs a loss, never a compilation: each function of the passes raises."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses import guard, inductor_passes
from compile_losses.recognize import rewriting
from tests.faults import Faults, PlantedError
from tests.graphs import Head, classes, distributions, interpreted, real

pytestmark = [pytest.mark.usefixtures("kernels_for_small_losses"), pytest.mark.planted]


class Checkpointed(Head):
    def forward(self, x, target):
        return checkpoint(super().forward, x, target, use_reentrant=False)


def written_out(a, b):
    return 0.5 * ((a - b) ** 2).sum(1).mean()


def distilled(x, target):
    return F.kl_div(F.log_softmax(x / 2, -1), F.softmax(target / 2, -1), reduction="batchmean") * 4


def masked(x, target):
    target = target.clone()
    target[target == 3] = -100
    return F.cross_entropy(x.float(), target, label_smoothing=0.1)


def two(x, target):
    return F.smooth_l1_loss(x, target) + 0.1 * F.l1_loss(x, target, reduction="none").mean()


def entropy_written_out(x, target):
    return -x.log_softmax(-1).gather(1, target[:, None]).mean()


def binary(x, target):
    return F.binary_cross_entropy_with_logits(x, target, target * 2, reduction="sum") / 7


#: Ten models, and their inputs.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "cross entropy": (lambda: Head(F.cross_entropy), classes),
    "linear cross entropy": (lambda: Head(F.cross_entropy), lambda: classes(128)),
    "squared errors written out": (lambda: Head(written_out), real),
    "divergence of a GELU": (lambda: Head(distilled, F.gelu), distributions),
    "masked in place": (lambda: Head(masked), classes),
    "two losses": (lambda: Head(two), real),
    "cross entropy written out": (lambda: Head(entropy_written_out), lambda: classes(128)),
    "divergence of a logarithm": (
        lambda: Head(F.kl_div, lambda x: x.softmax(-1).log()),
        distributions,
    ),
    "checkpointed": (lambda: Checkpointed(F.cross_entropy), lambda: classes(128)),
    "binary cross entropy": (lambda: Head(binary), real),
}


def loss_and_gradients(model: nn.Module, function, inputs):
    model.zero_grad()
    loss = function(*inputs)
    (3 * loss).backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


class Injection:
    """One model, compiled with faults in it."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model, make_inputs = MODELS[name]
        torch.manual_seed(0)
        self.model, self.inputs = make_model(), make_inputs()
        self.monkeypatch = monkeypatch
        self.expected = loss_and_gradients(self.model, self.model, self.inputs)

    def compile(self, faults: Faults, inner: str) -> None:
        """``inner`` compiles what the recognisers leave: only Inductor has our other passes."""
        torch._dynamo.reset()
        guard._warned.clear()
        with (
            interpreted(self.monkeypatch),
            faults.planted(self.monkeypatch),
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            compiled = torch.compile(
                self.model,
                backend="compile_losses",
                options={"strict": False, "inner_backend": inner},
                fullgraph=True,
            )
            torch.testing.assert_close(
                loss_and_gradients(self.model, compiled, self.inputs), self.expected
            )

    def every_fault(
        self,
        seen: Counter[types.CodeType],
        places_of: Callable[[int], Iterable[tuple[int, str]]],
    ) -> tuple[int, int]:
        """Lets each function raise that is not in ``seen``, in those of its calls that
        ``places_of`` names; how often one did, and how often the user was told. Some only make a
        recogniser look no further. Those that raise before Inductor compiles do so without it."""
        recognising, whole = Faults(), Faults()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            self.compile(recognising, "eager")
            self.compile(whole, "inductor")
        raised = told = 0
        for code, calls in whole.calls.items():
            if seen[code]:
                continue
            seen[code] += 1
            for at, event in places_of(calls):
                faults = Faults(code, at, event)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    self.compile(faults, "eager" if at <= recognising.calls[code] else "inductor")
                raised += (
                    faults.raised
                )  # not where a result is kept from one compilation to another
                messages = [str(w.message) for w in caught if w.category is RuntimeWarning]
                told += any("internal error: PlantedError" in message for message in messages)
                assert len(messages) <= 1, messages
        return raised, told


@pytest.fixture
def one_chunk_of_sixteen_rows(chunks):
    return chunks


#: A part of the functions of the models, for each of the tests that have them all.
PARTS = 3


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_faults(part, monkeypatch, one_chunk_of_sixteen_rows):
    """Every function that one of the models calls raises in one of them, by turns before and after
    it does its work, and in its first call and in its last."""
    seen: Counter[types.CodeType] = Counter()

    def one(calls: int) -> list[tuple[int, str]]:
        turn, other = divmod(len(seen), PARTS)
        if other != part:
            return []
        return [(1 if turn % 2 else calls, "call" if turn // 2 % 2 else "return")]

    counts = [Injection(name, monkeypatch).every_fault(seen, one) for name in MODELS]
    raised, told = (sum(count) for count in zip(*counts, strict=True))
    assert len(seen) > 150
    # A generator that is to raise when it has done its work does not.
    assert raised > 0.9 * (len(seen) // PARTS)
    assert told > 0.8 * raised


@pytest.mark.slow
@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("name", MODELS)
def test_faults_in_every_model(name, event, monkeypatch, one_chunk_of_sixteen_rows):
    raised, told = Injection(name, monkeypatch).every_fault(
        Counter(), lambda calls: {(1, event), (calls, event)}
    )
    assert raised > 20
    assert told > 0.8 * raised


def test_strict():
    """Faults are raised where they are asked for."""

    def planted(*_, **__):
        raise PlantedError

    with pytest.MonkeyPatch.context() as patch, fresh_cache():  # on a warm one there is no plan
        patch.setattr(inductor_passes, "plan", planted)
        compiled = torch.compile(
            Head(F.mse_loss), backend="compile_losses", options={"strict": True}
        )
        with pytest.raises(Exception, match="PlantedError"):
            compiled(*real())


def test_report_of_a_fault(monkeypatch):
    """explain() says that a loss was left to torch, and why."""

    def planted(*_, **__):
        raise PlantedError("here")

    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")
    monkeypatch.setattr(rewriting, "through_linear", planted)
    guard._warned.clear()
    with pytest.warns(RuntimeWarning, match="internal error"):
        report = compile_losses.explain(Head(F.cross_entropy), *classes())
    (site,) = report.losses
    assert (site.op, site.status) == ("cross_entropy", "declined")
    assert site.reason == "internal error: PlantedError: here; please report it"
    assert site.line > 0


@pytest.fixture
def no_op_of_ours(monkeypatch):
    """Inductor can't compile a call of our ops."""
    call = GraphLowering.call_function

    def refused(self, target, *args):
        if str(target).startswith("fused."):
            raise PlantedError(str(target))
        return call(self, target, *args)

    monkeypatch.setattr(GraphLowering, "call_function", refused)
    monkeypatch.delenv("COMPILE_LOSSES_STRICT", raising=False)
    monkeypatch.setattr(guard, "_warned", set())


@pytest.mark.parametrize("enabled", [False, True])
def test_what_inductor_cannot_compile(enabled, no_op_of_ours):
    """It is compiled as torch has it, and the report says so."""
    linear = nn.Linear(64, 2048)

    def function(x, target):
        return F.cross_entropy(linear(x), target)

    inputs = torch.randn(2048, 64, requires_grad=True), torch.randint(2048, (2048,))
    with fresh_cache(), contextlib.ExitStack() as stack:
        if enabled:
            stack.enter_context(compile_losses.enable())
            compiled = torch.compile(function)
        else:
            compiled = torch.compile(function, backend="compile_losses")
        with pytest.warns(RuntimeWarning, match="PlantedError"):
            ours = compiled(*inputs)
    expected = function(*inputs)
    torch.testing.assert_close(ours, expected)
    gradients = (torch.autograd.grad(loss, inputs[0])[0] for loss in (ours, expected))
    torch.testing.assert_close(*gradients)


def test_what_inductor_cannot_compile_in_strict_mode(no_op_of_ours):
    compiled = torch.compile(F.cross_entropy, backend="compile_losses", options={"strict": True})
    with fresh_cache(), pytest.raises(Exception, match="PlantedError"):
        compiled(torch.randn(512, 8192), torch.randint(8192, (512,)))
