"""Tensor subclasses and modes see of our functions what they see of torch's."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from compile_losses import functional
from tests.conformance import samples
from tests.conformance.compare import Call, losses

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


class Logged(torch.Tensor):
    """A subclass with a table of the functions that it overrides."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(F, func.__name__, None) is func:
            return "overridden", func, len(args), sorted(kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


class Duck:
    """Not a tensor at all, as NumPy-like wrappers are not."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "quack", func


def first(loss: str) -> Call:
    return next(samples.calls(loss, torch.float32, "cpu"))


@losses
def test_plain_subclass(loss):
    call = first(loss)
    tensors = {**call.tensors, "input": call.tensors["input"].as_subclass(Plain)}
    ours, theirs = (f(**tensors, **call.options) for f in (call.ours, call.theirs))
    assert type(ours) is type(theirs) is Plain
    torch.testing.assert_close(ours, theirs)


@losses
@pytest.mark.parametrize("argument", ["input", "target"])
def test_overriding_subclass(loss, argument):
    call = first(loss)
    tensors = {**call.tensors, argument: call.tensors[argument].as_subclass(Logged)}
    ours, theirs = (f(**tensors, **call.options) for f in (call.ours, call.theirs))
    assert ours == theirs
    assert ours[1] is call.theirs


@losses
def test_duck(loss):
    call = first(loss)
    duck = Duck()
    ours, theirs = (f(duck, call.tensors["target"]) for f in (call.ours, call.theirs))
    assert ours == theirs == ("quack", call.theirs)


@losses
def test_function_mode(loss):
    """A mode is asked about torch's function; torch.device contexts leave the op in place."""
    call = first(loss)
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        call.ours(**call.tensors, **call.options)
    assert call.theirs in seen
    with torch.device("cpu"), Ops() as ops:
        call.ours(**call.tensors, **call.options)
    with Ops() as expected:
        call.ours(**call.tensors, **call.options)
    assert ops.names == expected.names


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@losses
def test_dispatch_subclass(loss):
    """A wrapper subclass with a rule for every op takes ours too, in forward and backward."""
    call = first(loss)

    def run(function):
        leaves = call.map(lambda t: TwoTensor(t.clone(), t.clone()))
        leaves.tensors["input"].requires_grad_()
        value = function(**leaves.tensors, **call.options)
        value.sum().backward()
        gradient = leaves.tensors["input"].grad
        assert isinstance(value, TwoTensor)
        assert isinstance(gradient, TwoTensor)
        return value.a.detach(), value.b.detach(), gradient.a, gradient.b

    torch.testing.assert_close(run(call.ours), run(call.theirs))


@losses
def test_parameters_and_buffers(loss):
    call = first(loss)
    leaf = torch.nn.Parameter(call.tensors["input"])
    value = call.ours(**{**call.tensors, "input": leaf}, **call.options)
    assert type(value) is torch.Tensor
    value.sum().backward()
    assert leaf.grad is not None


@losses
def test_is_a_function_like_any(loss):
    function = getattr(functional, loss)
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert function.__name__ == loss


BROADCASTING = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


@pytest.mark.parametrize("loss", [*BROADCASTING, "kl_div"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_warnings(loss, compiled):
    """torch's warnings, in the name of the line that calls the loss."""
    a, b = torch.rand(3, 4), torch.rand(4 if loss in BROADCASTING else (3, 4))
    counts = []
    for function in (getattr(functional, loss), getattr(F, loss)):
        if compiled:
            function = torch.compile(function, backend="eager", fullgraph=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function(a, b)
        mine = [w for w in caught if "broadcast" in str(w.message) or "batchmean" in str(w.message)]
        assert all(w.category is UserWarning for w in mine)
        if not compiled:
            assert [w.filename for w in mine] == [__file__]
        counts.append(bool(mine))
    assert counts[0] == counts[1] or compiled
    assert counts[0]
