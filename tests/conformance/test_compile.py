"""Unmodified calls and modules under torch.compile(backend="compile_losses"), and PyTorch's own
samples of the modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from tests.conformance import ledger, samples
from tests.conformance.compare import (
    LOSSES,
    Call,
    assert_same,
    evaluate,
    evaluate_exactly,
    is_floating,
    losses,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MODULES = {
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "KLDivLoss": "kl_div",
    "MSELoss": "mse_loss",
    "NLLLoss": "nll_loss",
    "HuberLoss": "huber_loss",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
}
MODULE_INFOS = {info.name.removeprefix("nn."): info for info in module_db}
INNER = {"inner_backend": "aot_eager"}


def compiled(function, **options):
    """Compiled afresh, in one graph, by our backend over aot_eager."""
    torch._dynamo.reset()
    return torch.compile(
        function, backend="compile_losses", fullgraph=True, options=INNER, **options
    )


def check(call: Call, function, requires: tuple[str, ...] | None = None) -> None:
    """A compiled function against eager torch; errors may have torch.compile's classes."""
    requires = call.differentiable if requires is None else requires
    theirs = evaluate(call.theirs, call, requires)
    if theirs.error is not None:
        assert evaluate(function, call, requires).error is not None or theirs.loss is not None
        ledger.count(call, "errors")
        return
    exact = evaluate_exactly(call, theirs)
    assert_same(call, evaluate(function, call, requires), theirs, exact)
    ledger.count(call, "compiled")


def check_all(calls: list[Call], choose) -> None:
    assert calls
    for call in calls:
        check(call, compiled(choose(call)))


@pytest.mark.sampled(2)
@losses
def test_calls(loss, device):
    """One call of every option."""
    seen, calls = set(), []
    for call in samples.brief(loss, torch.float32, device):
        options = frozenset(ledger.options_of(call))
        if not options <= seen:
            seen |= options
            calls.append(call)
    check_all(calls, lambda call: call.theirs)


@losses
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_all_calls(loss, dtype, device):
    check_all(list(samples.brief(loss, dtype, device)), lambda call: call.theirs)


@pytest.mark.sampled(2)
@losses
def test_functional_compiles(loss, device):
    """compile_losses.functional itself, in one graph, by any backend."""
    calls = list(samples.brief(loss, torch.float32, device))[::12]
    check_all(calls, lambda call: call.ours)
    for call in calls[:2]:
        torch._dynamo.reset()
        check(call, torch.compile(call.ours, backend="aot_eager", fullgraph=True, dynamic=True))


@pytest.mark.sampled(2)
@losses
def test_dynamic_shapes(loss, device):
    function = None
    for rows in (4, 6, 9):
        call = next(
            c
            for c in samples.calls(loss, torch.float32, device)
            if c.name in ("contiguous", "rows") and not c.options.get("ignore_index")
        )
        call = call.map(lambda t, rows=rows: t[torch.arange(rows, device=device) % len(t)])
        function = function or compiled(call.theirs, dynamic=True)
        check(call, function)


def module_inputs(name: str, dtype: torch.dtype, device: str):
    info = MODULE_INFOS[name]
    return info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=False, training=True
    )


def module_call(loss: str, module: nn.Module, arguments) -> Call:
    """The functional call that a module's forward makes."""
    options = {n: v for n, v in vars(module).items() if n in OPTIONS and v is not None}
    tensors = dict(zip(("input", "target"), arguments, strict=False))
    tensors |= {n: t for n, t in module.named_buffers() if t is not None}
    return Call(loss, tensors, options, type(module).__name__)


OPTIONS = ("reduction", "beta", "delta", "log_target", "ignore_index", "label_smoothing")


def check_modules(name: str, step: int, device: str) -> None:
    ran = 0
    for sample in list(module_inputs(name, torch.float32, device))[::step]:
        arguments = [a.detach() for a in sample.forward_input.args]
        module = getattr(nn, name)(
            *sample.constructor_input.args, **sample.constructor_input.kwargs
        ).to(device)
        call = module_call(MODULES[name], module, arguments)
        function = compiled(module)
        check(
            call,
            lambda input, target, function=function, **_: function(input, target),
            tuple(name for name in call.differentiable if name != "weight"),
        )
        if sample.reference_fn is not None and is_floating(arguments[0]):
            expected = sample.reference_fn(module, *arguments)
            torch.testing.assert_close(function(*arguments), expected, equal_nan=True)
        ran += 1
    assert ran > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODULES)
def test_some_modules(name, device):
    check_modules(name, 8 if name == "CrossEntropyLoss" else 3, device)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, device):
    check_modules(name, 1, device)


def test_every_loss_has_a_module():
    assert set(MODULES.values()) == set(LOSSES)


class Trained(nn.Module):
    """A module that holds compiled functions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, target):
        return self.criterion(self.head(x), target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict"])
@pytest.mark.parametrize("compile_as", ["method", "wrapper"])
def test_copies_of_compiled_modules(how, compile_as, device):
    """A compiled module is copied and saved as far as torch's own is, and computes the same."""
    copies = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "torch.save": saved,
        "state_dict": restored,
    }
    x, target = torch.randn(3, 4, device=device), torch.tensor([0, 4, 2], device=device)
    results = []
    for backend, options in (("compile_losses", INNER), ("aot_eager", None)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Trained().to(device)
        if compile_as == "method":
            module.compile(backend=backend, options=options)
        else:
            module = torch.compile(module, backend=backend, options=options)
        loss = module(x, target)
        loss.backward()
        try:
            copied = copies[how](module)
            results.append((loss, copied(x, target), copied.state_dict()))
        except Exception as error:
            results.append(type(error))
    if isinstance(results[1], type):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results)


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def restored(module):
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = copy.deepcopy(Trained()).to(next(module.parameters()).device)
    state = torch.load(buffer)
    fresh.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in state.items()})
    return module if next(iter(state)).startswith("_orig_mod.") else fresh
