"""Known heads of other libraries: when a call is met, and when it is left alone.

The library is a module that each test writes. Its head has the arguments of the row ``HEAD``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses import known_heads, switches
from compile_losses.known_heads import doors
from compile_losses.known_heads.head import KnownHead, product_dtype, refuse_layer
from compile_losses.known_heads.rows import rows_of

SOURCE = """
import torch
import torch.nn.functional as F

class Head(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, hidden, weight, target{more}):
        Head.calls += 1
        with torch.enable_grad():
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(F.linear(h, w), target, reduction="sum")
            ctx.save_for_backward(*torch.autograd.grad(loss, (h, w)))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        h, w = ctx.saved_tensors
        return grad * h, grad * w, {nones}
"""


def compute(hidden, weight, target, scale=1.0):
    reason = "its scale is not positive" if scale <= 0 else None
    reason = reason or refuse_layer(hidden, weight, None, target)
    if reason is not None:
        return reason
    rows = rows_of(hidden, weight, None, target, product_dtype(hidden), scale=scale)
    return -rows.log_probs.sum()


HEAD = KnownHead("a-library", ("2.1", "3"), "a_library", "Head", "linear_cross_entropy", compute)
NAME = "a-library's Head"


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Writes the module, and makes its head the only known one. A function that imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doors, "HEADS", (HEAD,))
    monkeypatch.setattr(doors, "_by_name", {NAME: HEAD})
    monkeypatch.setattr(doors, "left", {})
    monkeypatch.setattr(doors, "refused", [])
    monkeypatch.setattr(
        sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, doors._Finder)]
    )
    code = (compute.__code__.co_filename, compute.__name__)
    monkeypatch.setattr(
        sys.modules["compile_losses.recognize.heads.known_heads"], "_FUNCTIONS", {code: HEAD}
    )
    switches.counters().clear()

    def load(more=", scale=1.0", nones="None, None", version="2.1.7"):
        (tmp_path / "a_library.py").write_text(SOURCE.format(more=more, nones=nones))
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        return importlib.import_module("a_library")

    yield load
    sys.modules.pop("a_library", None)
    doors.in_eager_code(frozenset())


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (12, 20))
    return hidden, weight, torch.randint(20, (12,), generator=generator)


def check(function, *more):
    """Loss and gradients are those of a plain cross entropy."""
    hidden, weight, target = problem()
    loss = function(hidden, weight, target, *more)
    expected = F.cross_entropy(F.linear(hidden, weight), target, reduction="sum")
    torch.testing.assert_close(loss, expected)
    for found, wanted in zip(
        *(torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_eager_calls_are_met(library):
    with compile_losses.enable():
        module = library()  # is imported later
        check(module.Head.apply)
        assert module.Head.calls == 0
        assert switches.counters()["known heads"] == {NAME: 1}
    check(module.Head.apply)
    assert module.Head.calls == 1


def test_a_library_that_is_imported_already(library):
    module = library()
    apply = module.Head.apply
    with compile_losses.enable():
        check(module.Head.apply)
        assert module.Head.calls == 0
    check(apply)  # bound before
    assert module.Head.calls == 1


def test_graphs_for_us_alone(library):
    module = library()
    doors.watch()

    def step(hidden, weight, target):
        return module.Head.apply(hidden, weight, target)

    check(torch.compile(step, backend="aot_eager"))
    assert module.Head.calls > 0
    torch._dynamo.reset()
    module.Head.calls = 0
    check(torch.compile(step, backend="compile_losses", fullgraph=True))
    assert module.Head.calls == 0
    report = compile_losses.explain(step, *problem())
    (site,) = report.losses
    assert (site.op, site.status) == ("linear_row_statistics", "rewritten")
    assert site.reason == NAME
    assert site.file == __file__
    assert "gradient in forward by row" in site.plan
    assert site.gain == ""  # torch's own ops are not what it is compared with


@pytest.mark.parametrize("how", ["option", "losses", "environment", "disabled"])
def test_switches(how, library, monkeypatch):
    module = library()
    options = {"option": {"known_heads": False}, "losses": {"losses": ["mse_loss"]}}.get(how, {})
    if how == "environment":
        monkeypatch.setenv("COMPILE_LOSSES_KNOWN_HEADS", "0")
    elif how == "disabled":
        monkeypatch.setenv("COMPILE_LOSSES", "0")
    with compile_losses.enable(**options):
        check(module.Head.apply)
    doors.watch()
    check(
        torch.compile(lambda *a: module.Head.apply(*a), backend="compile_losses", options=options)
    )
    assert module.Head.calls > 1
    assert not switches.counters()["known heads"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"version": "2.2"}, "release 2.2 was not tested; 2.1, 3 were"),
        ({"version": "30.0"}, "release 30.0 was not tested; 2.1, 3 were"),
        (
            {"more": ", scale=1.0, softcap=None", "nones": "None, None, None"},
            r"its arguments \(hidden, weight, target, scale, softcap\) are not those",
        ),
        ({"more": ", scale=2.0"}, r"its arguments \(hidden, weight, target, scale\) are not those"),
    ],
)
def test_others_are_left_alone(given, reason, library):
    with compile_losses.enable():
        module = library(**given)
        assert type(module.Head) is type(torch.autograd.Function)
        check(module.Head.apply)
    assert module.Head.calls == 1
    assert re.match(reason, doors.left[NAME])
    report = compile_losses.explain(lambda: module.Head.apply(*problem()))
    assert f"left as it is: {NAME}: {doors.left[NAME]}" in str(report)


def test_refused_arguments(library):
    module = library()
    with compile_losses.enable():
        check(module.Head.apply, -1.0)
        assert module.Head.calls == 1
        refused = switches.counters()["known heads refused"]
        assert refused[f"{NAME}: its scale is not positive"] == 1
        hidden, weight, target = problem()
        with torch.autocast("cpu", torch.bfloat16):  # the copy of its weight would be larger
            module.Head.apply(hidden, weight, target)
        assert module.Head.calls == 2
        given = problem()
        report = compile_losses.explain(lambda: module.Head.apply(*given, -1.0))
    (site,) = report.losses
    assert (site.op, site.status, site.reason) == (NAME, "declined", "its scale is not positive")
    assert site.file == __file__


@pytest.mark.planted
def test_a_fault_leaves_the_library_alone(library, monkeypatch):
    def fault(self, forward):
        raise ValueError("planted")

    monkeypatch.setattr(KnownHead, "differs", fault)
    monkeypatch.delenv("COMPILE_LOSSES_STRICT", raising=False)
    with compile_losses.enable(), pytest.warns(RuntimeWarning, match="planted"):
        module = library()
    check(module.Head.apply)
    assert module.Head.calls == 1
    assert "planted" in doors.left[NAME]


def test_modules_that_switch_on():
    import _compile_losses_autoload

    assert set(_compile_losses_autoload.MODULES) == {head.module for head in known_heads.HEADS}


def test_no_library_is_imported():
    packages = {head.module.partition(".")[0] for head in known_heads.HEADS}
    code = f"""
import sys, compile_losses
compile_losses.enable()
assert not {packages!r} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def doubled(head):
    """A class derived from a head, with a forward of its own."""

    class Doubled(head):
        @staticmethod
        def forward(ctx, *args):
            return 2 * head.forward(ctx, *args)

        @staticmethod
        def backward(ctx, grad):
            return head.backward(ctx, 2 * grad)

    return Doubled


@pytest.mark.parametrize("when", ["before", "after"])
def test_derived_classes_compute_what_they_say(library, when):
    module = library()
    derived = doubled(module.Head) if when == "before" else None
    with compile_losses.enable():
        derived = derived or doubled(module.Head)
        found = [derived.apply(*problem(), 1.0), torch.compile(derived.apply)(*problem(), 1.0)]
        found.append(doubled(derived).apply(*problem(), 1.0) / 2)
        check(module.Head.apply)
    found.append(derived.apply(*problem(), 1.0))
    hidden, weight, target = problem()
    expected = 2 * F.cross_entropy(F.linear(hidden, weight), target, reduction="sum")
    for each in found:
        torch.testing.assert_close(each, expected)
    assert switches.counters()["known heads"] == {NAME: 1}
    assert issubclass(derived, module.Head)


@pytest.mark.parametrize("when", ["before", "after"])
def test_replaced_forward_is_called(library, when):
    module = library()
    forward = module.Head.forward

    def replace():
        module.Head.forward = staticmethod(lambda ctx, *args: 3 * forward(ctx, *args))

    if when == "before":
        replace()
    with compile_losses.enable():
        if when == "after":
            replace()
        found = module.Head.apply(*problem(), 1.0)
    hidden, weight, target = problem()
    expected = F.cross_entropy(F.linear(hidden, weight), target, reduction="sum")
    torch.testing.assert_close(found, 3 * expected)
    assert not switches.counters()["known heads"]
