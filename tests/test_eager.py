"""The short way of the ops in eager code: the same as the general one, and cheaper."""

from __future__ import annotations

import itertools
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import compile_losses.ops
from compile_losses import library
from tests.constants import set_constants
from tests.specs import SPECS

fused = torch.ops.fused
CASES = {
    "mse_loss": (torch.randn(8), torch.randn(8)),
    "l1_loss": (torch.randn(8), torch.randn(8)),
    "smooth_l1_loss": (torch.randn(8), torch.randn(8)),
    "huber_loss": (torch.randn(8), torch.randn(8)),
    "binary_cross_entropy_with_logits": (torch.randn(8), torch.rand(8)),
    "kl_div": (torch.rand(8).log(), torch.rand(8)),
    "cross_entropy": (torch.randn(2, 4), torch.tensor([3, 1])),
    "nll_loss": (torch.randn(2, 4).log_softmax(-1), torch.tensor([3, 1])),
    "softmax_kl_div": (torch.randn(2, 4), torch.randn(2, 4)),
    "softmax_js_div": (torch.randn(2, 4), torch.randn(2, 4)),
    "softmax_finite_kl_div": (torch.randn(2, 4), torch.randn(2, 4)),
}
losses = pytest.mark.parametrize("name", CASES)


def inputs_of(name):
    input, target = CASES[name]
    return input.clone().requires_grad_(), target


def leaf(name):
    """The same loss through the op's registered formula."""
    forward = getattr(fused, f"{name}_forward").default
    arguments = {a.name: a.default_value for a in getattr(fused, name).default._schema.arguments}

    def function(input, target):
        named = {**arguments, "input": input, "target": target, "dtype": input.dtype}
        schema = forward._schema.arguments
        result = forward(*(named.get(a.name, a.default_value) for a in schema))
        return result if isinstance(result, torch.Tensor) else result[0]

    return function


@losses
def test_same_gradients(name):
    results = []
    for function in (getattr(fused, name), leaf(name)):
        input, target = inputs_of(name)
        loss = function(input, target) * 3
        (gradient,) = torch.autograd.grad(loss, input, create_graph=True)
        # kl_div's gradient does not depend on its input.
        (second,) = torch.autograd.grad(
            gradient.square().sum(), input, allow_unused=True, materialize_grads=True
        )
        results.append((loss, gradient, second))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@losses
def test_batched_gradients(name):
    """A backward over vmap's tensors, whose type is that of plain ones."""
    input, target = inputs_of(name)
    loss = getattr(fused, name)(input, target)
    factors = torch.tensor([1.0, -2.0, 0.5])
    (batch,) = torch.autograd.grad(loss, input, factors, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(loss, input, f, retain_graph=True)[0] for f in factors]
    torch.testing.assert_close(batch, torch.stack(each))


@losses
def test_modes_see_the_ops(name):
    """Dispatch modes and hooks of saved tensors get what they always got."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    input, target = inputs_of(name)
    with Mode():
        loss = getattr(fused, name)(input, target)
    assert f"fused.{name}_forward.default" in seen
    loss.backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        again = getattr(fused, name)(input, target)
    assert packed
    gradient, input.grad = input.grad, None
    again.backward()
    torch.testing.assert_close(input.grad, gradient)


def negated(tensor):
    return torch._neg_view(-tensor)


def zeros(tensor):
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


@pytest.mark.parametrize("special", [negated, zeros])
@losses
def test_tensors_that_only_look_plain(name, special):
    """Their type is that of plain ones, but their memory does not hold their values."""
    input, target = CASES[name]
    function = getattr(fused, name)
    expected = input if special is negated else torch.zeros_like(input)
    torch.testing.assert_close(function(special(input), target), function(expected, target))


@losses
def test_inference_mode(name):
    input, target = CASES[name]
    with torch.inference_mode():
        loss = getattr(fused, name)(input.clone(), target.clone())
    torch.testing.assert_close(loss, getattr(fused, name)(input, target), rtol=0, atol=0)


def test_weights_by_position():
    input, target = CASES["binary_cross_entropy_with_logits"]
    for weight, pos_weight in itertools.product((None, torch.rand(8)), repeat=2):
        torch.testing.assert_close(
            fused.binary_cross_entropy_with_logits(input, target, weight, pos_weight, 2),
            F.binary_cross_entropy_with_logits(
                input, target, weight, pos_weight=pos_weight, reduction="sum"
            ),
        )


@losses
def test_checkpoint_and_modified_input(name):
    input, target = inputs_of(name)
    function = getattr(fused, name)
    checkpoint(function, input, target, use_reentrant=False).backward()
    expected = torch.autograd.grad(function(input, target), input)[0]
    torch.testing.assert_close(input.grad, expected)
    hidden = input * 1
    loss = function(hidden, target)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class TestWithoutGradients:
    """Calls of the internal ops, as compiled code makes them."""

    op = fused.mse_loss_forward.default
    given = (*CASES["mse_loss"], None, 1, torch.float32)
    value = F.mse_loss(*CASES["mse_loss"])

    @pytest.fixture
    def kernels(self, monkeypatch):
        """The calls that went below autograd at once."""
        found = []

        def exclude(key, value):
            found.append(value)
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, value)

        monkeypatch.setattr(compile_losses.eager, "exclude", exclude)
        return found

    def test_short_way(self, kernels):
        with torch.no_grad():
            torch.testing.assert_close(self.op(*self.given), self.value)
        assert kernels == [True, False]

    def test_compiled_code_takes_it(self, kernels, kernels_for_small_losses, monkeypatch):
        """In the forward and in the backward."""
        set_constants(monkeypatch, ahead_bytes=1 << 30)
        x = torch.randn(64, 64, requires_grad=True)
        step = torch.compile(lambda x: F.cross_entropy(x, x.argmax(-1)), backend="compile_losses")
        step(x).backward()
        forward, backward = kernels[:2], kernels[2:]
        assert forward == [True, True]  # a Function's forward is below autograd
        assert backward == [True, False]

    def test_gradients_are_recorded_or_refused(self, kernels):
        input, target, *rest = self.given
        assert self.op(input.clone().requires_grad_(), target, *rest).requires_grad
        with pytest.raises(RuntimeError, match="not differentiable"):
            fused.scale.default(input.clone().requires_grad_(), torch.ones(()))
        assert not kernels

    def test_an_error_ends_it(self, kernels):
        with torch.no_grad(), pytest.raises(RuntimeError, match="broadcast"):
            self.op(torch.randn(3), torch.randn(4), *self.given[2:])
        assert kernels == [True, False]
        assert self.op(torch.randn(3, requires_grad=True), torch.randn(3), *self.given[2:]).grad_fn

    def test_modes_and_classes_see_the_op(self, kernels):
        seen = []

        class Functions(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        class Classed(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                seen.append(func)
                return super().__torch_function__(func, types, args, kwargs)

        classed = self.given[0].clone().as_subclass(Classed)
        with torch.no_grad():
            for mode in (Functions, Dispatch):
                with mode():
                    self.op(*self.given)
            self.op(classed, *self.given[1:])
        assert seen == [self.op] * 3

    def test_every_op_has_a_kernel_for_autograd(self):
        """Which goes below autograd, so that nothing is passed over."""
        for name in sorted(filter(library.INTERNAL.fullmatch, library.DECLARED)):
            assert "Autograd[alias]" in torch._C._dispatch_dump(f"fused::{name}"), name


@pytest.mark.slow
@losses
def test_overhead(name):
    """Host time on eight elements against torch.nn.functional's, in the thread's own time."""

    def microseconds(function, calls=300, rounds=40):
        best = float("inf")
        for _ in range(rounds):
            start = time.thread_time_ns()
            for _ in range(calls):
                function()
            best = min(best, (time.thread_time_ns() - start) / calls / 1e3)
        return best

    def step(function):
        input.grad = None
        function(input, target).backward()

    def ratio(run):
        ours, torchs = getattr(fused, name), getattr(F, name, None) or SPECS[name].torch_loss
        return microseconds(lambda: run(ours)) / microseconds(lambda: run(torchs))

    input, target = inputs_of(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kl_div's mean
            both = ratio(step)
            forward = ratio(lambda function: function(*CASES[name]))
    finally:
        torch.set_num_threads(threads)
    assert both < 2.5
    # Torch's take no longer than the dispatcher and a Python kernel, which ours start from.
    assert forward < {"cross_entropy": 3, "nll_loss": 6}.get(name, 2)
