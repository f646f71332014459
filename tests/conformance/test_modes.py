"""The losses under torch's transforms and modes: torch's answer in each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.calls import deterministic
from tests.conformance import ledger, samples
from tests.conformance.compare import Call, compare, evaluate, evaluate_exactly, losses, noise
from tests.conformance.compare import assert_same as assert_same_results

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def brief(loss: str, device: str, dtype: torch.dtype = torch.float64) -> list[Call]:
    found = list(samples.brief(loss, dtype, device))
    assert len(found) > 10
    return found


def function_of(call: Call, ours: bool, names: tuple[str, ...]):
    """The loss as a function of some of its tensors."""
    loss = call.ours if ours else call.theirs

    def function(*tensors: Tensor) -> Tensor:
        given = {**call.tensors, **dict(zip(names, tensors, strict=True))}
        return loss(**given, **call.options)

    return function


def attempt(function: Callable[[], Any]) -> Any:
    """What a function returns, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        return error


def assert_same(call: Call, ours: Callable[[], Any], theirs: Callable[[], Any], mode: str) -> None:
    """The same tensors, in float64; or where torch fails, the same class of error."""
    got, expected = attempt(ours), attempt(theirs)
    if isinstance(expected, Exception):
        assert isinstance(got, type(expected)), f"{call}: {got!r} instead of {expected!r}"
        ledger.count(call, "errors")
        return
    if isinstance(got, Exception):
        raise AssertionError(str(call)) from got
    torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m: f"{call}: {m}")
    ledger.count(call, mode)


def assert_same_transformed(call: Call, transform, names: tuple[str, ...], mode: str) -> None:
    tensors = [call.tensors[name] for name in names]
    ours, theirs = (
        partial(transform(function_of(call, ours, names)), *tensors) for ours in (True, False)
    )
    assert_same(call, ours, theirs, mode)


def summed(function):
    return lambda *tensors: function(*tensors).sum()


@pytest.mark.sampled(2)
@losses
@pytest.mark.parametrize(
    "transform", ["grad", "grad of grad", "vjp", "jacrev", "jacfwd", "jvp", "hessian"]
)
def test_torch_func(loss, transform, device):
    transforms = {
        "grad": lambda f: torch.func.grad(summed(f)),
        "grad of grad": lambda f: torch.func.grad(
            lambda *t: torch.func.grad(summed(f))(*t).square().sum()
        ),
        "vjp": lambda f: lambda *t: torch.func.vjp(summed(f), *t)[0],
        "jacrev": torch.func.jacrev,
        "jacfwd": torch.func.jacfwd,
        "jvp": lambda f: lambda *t: torch.func.jvp(f, t, tuple(noise(a, 5) for a in t)),
        "hessian": lambda f: torch.func.hessian(summed(f)),
    }
    for call in brief(loss, device):
        mode = "forward mode" if transform in ("jacfwd", "jvp", "hessian") else "torch.func"
        assert_same_transformed(call, transforms[transform], call.differentiable, mode)


@losses
@pytest.mark.parametrize("dims", ["input", "all", "last"])
def test_vmap(loss, dims, device):
    for call in brief(loss, device):
        names = ("input",) if dims == "input" else tuple(call.tensors)
        at = -1 if dims == "last" else 0
        stacked = {
            n: torch.stack([t, t, t], at) if n in names else t for n, t in call.tensors.items()
        }
        batched = Call(call.loss, stacked, call.options, call.name)
        assert_same_transformed(
            batched, lambda f, at=at: torch.func.vmap(f, in_dims=at), names, "vmap"
        )


@losses
def test_vmap_of_grad(loss, device):
    """Gradients for each sample of a batch."""
    for call in brief(loss, device):
        stacked = call.map(lambda t: torch.stack([t, t]))
        names = tuple(call.tensors)
        assert_same_transformed(
            stacked,
            lambda f: torch.func.vmap(torch.func.grad(summed(f))),
            names,
            "vmap",
        )


def tangent(function, dual: Call):
    return forward_ad.unpack_dual(function(**dual.tensors, **dual.options)).tangent


@losses
def test_forward_mode(loss, device):
    for call in brief(loss, device):
        with forward_ad.dual_level():
            dual = call.map(
                lambda t: forward_ad.make_dual(t, noise(t, 5)) if t.is_floating_point() else t
            )
            ours, theirs = (partial(tangent, f, dual) for f in (call.ours, call.theirs))
            assert_same(call, ours, theirs, "forward mode")


def batched_gradient(function, call: Call):
    leaf = call.tensors["input"].detach().requires_grad_()
    value = function(**{**call.tensors, "input": leaf}, **call.options)
    grad_output = torch.stack([noise(value, seed) for seed in (1, 2)])
    return torch.autograd.grad(value, leaf, grad_output, is_grads_batched=True)


@losses
def test_batched_gradients(loss, device):
    """autograd.grad(is_grads_batched=True): vmap over the backward of a loss made outside it."""
    for call in brief(loss, device):
        ours, theirs = (partial(batched_gradient, f, call) for f in (call.ours, call.theirs))
        assert_same(call, ours, theirs, "vmap")


def jacobian_and_hessian(function, call: Call, vectorize: bool):
    functional, input = torch.autograd.functional, call.tensors["input"]
    return (
        functional.jacobian(function, input, vectorize=vectorize),
        functional.hessian(summed(function), input, vectorize=vectorize),
    )


@losses
@pytest.mark.parametrize("vectorize", [False, True])
def test_autograd_functional(loss, vectorize, device):
    """torch.autograd.functional's jacobian and hessian."""
    for call in brief(loss, device)[::5]:
        ours, theirs = (
            partial(jacobian_and_hessian, function_of(call, ours, ("input",)), call, vectorize)
            for ours in (True, False)
        )
        assert_same(call, ours, theirs, "vmap" if vectorize else "double backward")


@pytest.mark.sampled(2)
@losses
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("weight", ["same", pytest.param("float32", marks=pytest.mark.slow)])
def test_autocast(loss, low, weight, device):
    """The dtype of the loss is what torch's lists of ops make it; gradients are as accurate."""
    for dtype in (torch.float64, torch.float32, low):
        for call in brief(loss, device, dtype):
            if weight == "float32":
                call = Call(
                    call.loss,
                    {n: t.float() if "weight" in n else t for n, t in call.tensors.items()},
                    call.options,
                    call.name,
                )
            results = []
            for function in (call.ours, call.theirs):

                def cast(function=function, **arguments):
                    with torch.autocast(device, low):
                        return function(**arguments)

                results.append(evaluate(cast, call, ("input",)))
            ours, theirs = results
            exact = evaluate_exactly(call, theirs)
            assert_same_results(call, ours, theirs, exact)
            ledger.count(call, "autocast")


@pytest.mark.sampled(2)
@losses
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "deterministic", "detect_anomaly"])
def test_grad_modes(loss, mode, device):
    modes = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "detect_anomaly": torch.autograd.detect_anomaly,
        "deterministic": deterministic,
    }
    for call in brief(loss, device):
        with modes[mode]():
            requires = call.differentiable if torch.is_grad_enabled() else ()
            compare(call, requires, mode="grad modes")
            leaves = call.map(lambda t: t.detach().requires_grad_(t.is_floating_point()))
            leaves.tensors["target"].requires_grad_("target" in call.differentiable)
            refused = evaluate(call.theirs, call).error is not None  # compared above
            if not refused and set(call.differentiable) == {
                n for n, t in leaves.tensors.items() if t.requires_grad
            }:
                results = [f(**leaves.tensors, **call.options) for f in (call.ours, call.theirs)]
                assert results[0].requires_grad == results[1].requires_grad == bool(requires)
                assert results[0].is_inference() == results[1].is_inference()


@pytest.mark.sampled(2)
@losses
def test_meta(loss):
    """Shapes, dtypes and strides without data."""
    for call in samples.calls(loss, torch.float32, "cpu"):
        meta = call.map(lambda t: t.to("meta"))
        ours, theirs = (evaluate(f, meta) for f in (call.ours, call.theirs))
        if theirs.error is not None:
            continue  # also of calls that torch takes on other devices
        assert ours.error is None, f"{call}: {ours.error}"
        for name in ("shape", "dtype", "device"):
            assert getattr(ours.loss, name) == getattr(theirs.loss, name), f"{call}: {name}"
        if ours.loss.dim() and ours.loss.numel():
            real = call.ours(**call.tensors, **call.options)
            assert ours.loss.stride() in (real.stride(), theirs.loss.stride()), str(call)
        ledger.count(call, "grad modes")


@losses
def test_threads(loss, device):
    """Several threads at once, each with forward and backward, get what one alone gets."""
    calls = brief(loss, device, torch.float32)[:8]
    expected = [evaluate(call.ours, call, call.differentiable) for call in calls]
    errors = []

    def work() -> None:
        try:
            for call, alone in itertools.islice(
                itertools.cycle(zip(calls, expected, strict=True)), 3 * len(calls)
            ):
                result = evaluate(call.ours, call, call.differentiable)
                torch.testing.assert_close(
                    result.tensors, alone.tensors, rtol=0, atol=0, equal_nan=True
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    for call in calls:
        ledger.count(call, "gradients")


@losses
@pytest.mark.gpu
def test_streams(loss):
    """On streams of their own, all at once, calls give what each gives alone."""
    calls = brief(loss, "cuda", torch.float32)[:8]
    expected = [evaluate(call.ours, call, call.differentiable) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(3):
        results = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(evaluate(call.ours, call, call.differentiable))
        torch.cuda.synchronize()
        for result, alone in zip(results, expected, strict=True):
            torch.testing.assert_close(
                result.tensors, alone.tensors, rtol=0, atol=0, equal_nan=True
            )
    for call in calls:
        ledger.count(call, "gradients")


@losses
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_devices(loss):
    """On another device than the current one, which stays the current one."""
    for call in brief(loss, "cuda:0", torch.float32):
        here = evaluate(call.ours, call, call.differentiable)
        there = call.map(lambda t: t.to("cuda:1"))
        result = evaluate(call.ours, there, call.differentiable)
        assert torch.cuda.current_device() == 0
        assert result.error is None, str(call)
        for name, tensor in here.tensors.items():
            assert result.tensors[name].device == torch.device("cuda:1"), f"{call}: {name}"
            torch.testing.assert_close(
                result.tensors[name].to("cuda:0"), tensor, rtol=0, atol=0, equal_nan=True
            )
        ledger.count(call, "gradients")
