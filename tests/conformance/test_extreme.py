"""Property-based tests of special operands: infinities, nan, zeros, huge and subnormal numbers in
every argument and in grad_output, each drawn by hypothesis into operands that are ordinary.

Held against torch's eager functions in the same dtype and in float64, number by number: where those
give an infinity or nan ours must give one of theirs, elsewhere the one rule of accuracy holds. What
ours does not share with torch is in docs/conformance.md, and left out here by name.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accuracy import RATIO, SIMILAR, ULPS, similar
from tests.conformance.compare import Call, always_the_same, exactly, losses

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is an optional test dependency")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS = ("cross_entropy", "nll_loss")
BINARY = "binary_cross_entropy_with_logits"
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "batchmean": 3}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
INFINITE = (torch.inf, -torch.inf, torch.nan)
ORDINARY = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, -3.0)


def extremes(dtype: torch.dtype, loss: str, name: str) -> tuple[float, ...]:
    """Special numbers of a dtype. In float64 products of three of them stay numbers: there torch's
    function is the reference, whose overflows depend on its order of multiplication. So do those of
    the sums over a row."""
    if dtype == torch.float64:
        large, small = (1e10, 1e50, 1e95), (1e-10, 1e-50, 1e-95)
    else:
        finfo = torch.finfo(dtype)
        large = (1e4, 1e15, finfo.max**0.5 * 1.5, finfo.max / 3, finfo.max)
        if loss in ROWS and name != "input":
            large = large[:3]
        subnormal = finfo.smallest_normal * finfo.eps
        small = (1e-5, 1e-20, finfo.smallest_normal, finfo.smallest_normal * 0.37, 3 * subnormal)
    signed = (*large, *small, *(-x for x in (*large, *small)))
    return (*ORDINARY, *INFINITE, *signed)


@dataclass(frozen=True)
class Extreme:
    """A call and the grad_output of its loss."""

    call: Call
    grad_output: Tensor

    @property
    def requires(self) -> tuple[str, ...]:
        return self.call.differentiable


def put(draw: Any, tensor: Tensor, values: tuple[float, ...], most: int) -> Tensor:
    """Some of a tensor's numbers replaced."""
    tensor = tensor.clone()
    for _ in range(draw(st.integers(1, most)) if tensor.numel() else 0):
        place = draw(st.integers(0, tensor.numel() - 1))
        tensor.view(-1)[place] = draw(st.sampled_from(values))
    return tensor


def pair(draw: Any, loss: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Ordinary operands and options of an elementwise loss."""
    shape = draw(st.sampled_from(((3, 4), (5,), (1,), (), (2, 3, 2), (7, 33))))
    log_target = loss == "kl_div" and draw(st.booleans())
    input = torch.rand(shape) * 4 - 5 if loss == "kl_div" else torch.randn(shape)
    target = torch.randn(shape) if loss not in ("kl_div", BINARY) else torch.rand(shape) * 0.8 + 0.1
    tensors = {"input": input, "target": target.log() if log_target else target}
    options: dict[str, Any] = {"reduction": draw(st.sampled_from(("none", "mean", "sum")))}
    if loss == "kl_div":
        options["log_target"] = log_target
        options["reduction"] = draw(st.sampled_from(tuple(REDUCTIONS)))
    if loss in ("mse_loss", "l1_loss", "huber_loss", BINARY) and draw(st.booleans()):
        tensors["weight"] = torch.rand(shape) + 0.5
    if loss == BINARY and draw(st.booleans()):
        tensors["pos_weight"] = torch.rand(shape[-1:]) + 1.5  # near 1, torch alone keeps digits
    numbers = st.sampled_from((1.0, 0.5, 3.0, 1e-3, 1e-30, 1e30))
    if loss == "smooth_l1_loss":
        options["beta"] = draw(numbers | st.sampled_from((0.0, torch.inf)))
    if loss == "huber_loss":
        options["delta"] = draw(numbers | st.just(torch.inf))
    return tensors, options


def rows(draw: Any, loss: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Ordinary operands and options of a loss of rows, which lie along the memory or across it."""
    count, cols = draw(st.sampled_from((1, 3, 5))), draw(st.sampled_from((2, 4, 9, 70)))
    inner = draw(st.sampled_from(((), (), (2,))))
    tensors = {"input": torch.randn(count, cols, *inner)}
    options: dict[str, Any] = {"reduction": draw(st.sampled_from(("none", "mean", "sum")))}
    if loss == "cross_entropy":
        options["label_smoothing"] = draw(st.sampled_from((0.0, 0.0, 0.1, 1.0)))
    if loss == "cross_entropy" and draw(st.booleans()):
        tensors["target"] = torch.randn(count, cols, *inner).softmax(1)
    else:
        tensors["target"] = torch.randint(cols, (count, *inner))
        if draw(st.booleans()):
            tensors["target"][torch.rand(count, *inner) < 0.4] = -100
    if draw(st.booleans()):
        tensors["weight"] = torch.rand(cols) + 0.5
    return tensors, options


@st.composite
def extreme_calls(draw: Any, loss: str) -> Extreme:
    """An operand, or grad_output, with special numbers; and perhaps zeros and infinities beside."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    tensors, options = (rows if loss in ROWS else pair)(draw, loss)
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    shape = Call(loss, tensors, options)
    grad_output = torch.randn(shape.theirs(**tensors, **options).shape).to(dtype)
    places = {**tensors, "grad_output": grad_output}
    names = [n for n, t in places.items() if t.is_floating_point()]
    first, second = (draw(st.sampled_from(names)) for _ in range(2))
    places[first] = put(draw, places[first], extremes(dtype, loss, first), 2)
    if second != first and draw(st.booleans()):
        places[second] = put(draw, places[second], (*INFINITE, 0.0, 1.0), 1)
    grad_output = places.pop("grad_output")
    return Extreme(Call(loss, places, options), grad_output)


def evaluate(function: Any, extreme: Extreme) -> dict[str, Tensor]:
    call, requires = extreme.call, extreme.requires
    leaves = {n: t.detach().clone() for n, t in call.tensors.items()}
    for name in requires:
        leaves[name].requires_grad_()
    loss = function(**leaves, **call.options)
    roots = [leaves[name] for name in requires]
    gradients = torch.autograd.grad(loss, roots, extreme.grad_output.to(loss.dtype))
    return {"loss": loss.detach(), **dict(zip(requires, gradients, strict=True))}


def with_gradients(extreme: Extreme) -> dict[str, tuple[str, Tensor]]:
    """What compiled code has: the loss and the unit gradient times grad_output; or the gradient of
    a known grad_output. With the name of the result that each stands for."""
    call, options = extreme.call, dict(extreme.call.options)
    name = call.loss
    if name == "cross_entropy" and call.tensors["target"].is_floating_point():
        name = "cross_entropy_probabilities"
    op = getattr(torch.ops.fused, f"{name}_with_grad")
    options["reduction"] = REDUCTIONS[options["reduction"]]
    arguments = {a.name: None for a in op.default._schema.arguments}
    arguments |= {"ignore_index": -100, "log_input": True, "dtype": call.tensors["input"].dtype}
    arguments |= {**call.tensors, **options}
    grad_output = extreme.grad_output
    given = {a.name: arguments[a.name] for a in op.default._schema.arguments}
    loss, unit = op(**given)
    gradient = unit.clone()
    torch.ops.fused.scale_(gradient, grad_output)
    # What has left the range of the dtype before grad_output comes.
    lost = unit.isinf() | (unit.abs() < torch.finfo(unit.dtype).smallest_normal)
    gradient[lost] = evaluate(call.ours, extreme)["input"][lost]
    _, known = op(**{**given, "grad_output": grad_output})
    return {
        "loss with its gradient": ("loss", loss),
        "unit gradient times grad_output": ("input", gradient),
        "gradient of a known grad_output": ("input", known),
    }


def worst_errors(extreme: Extreme, name: str) -> Tensor:
    """The largest error, number by number, that torch makes in calls like this one."""
    call = extreme.call
    dtype = call.tensors["input"].dtype
    wide = dtype == torch.float64  # where torch is the reference, and shows no error
    worst = torch.zeros(())
    low = torch.float32 if wide else dtype
    for seed in range(SIMILAR):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            n: similar(t, generator, low if t.dtype == dtype else t.dtype)
            for n, t in call.tensors.items()
        }
        other = Extreme(replace(call, tensors=tensors), extreme.grad_output.to(low))
        found = evaluate(call.theirs, other)[name]
        error = (found.double() - exact_of(other)[name].double()).abs().nan_to_num(0, 0)
        worst = torch.maximum(worst, error * (RATIO if wide else 1))
    return worst


def exact_of(extreme: Extreme) -> dict[str, Tensor]:
    other = Extreme(extreme.call.map(exactly), extreme.grad_output)
    return evaluate(extreme.call.theirs, other)


def assert_agrees(extreme: Extreme, what: str, name: str, ours: Tensor, eager: Any, exact: Any):
    got, torchs, right = (t.double() for t in (ours, eager[name], exact[name]))
    finfo, wide = torch.finfo(ours.dtype), ours.dtype == torch.float64

    def agree(like: Tensor) -> Tensor:
        error = (torchs - right).abs().nan_to_num(0, 0)
        ulp = finfo.eps * right.abs() + finfo.smallest_normal * finfo.eps
        alike = (got == torchs) | (got.isnan() & torchs.isnan())
        alike |= (got == right) | (got.isnan() & right.isnan())
        # Beyond the dtype, and what torch rounds to infinity only in between.
        alike |= (right.abs() > finfo.max * (1 - finfo.eps)) & got.isinf() & (got * right > 0)
        # In float64 the reference is torch's own, which errs as well where terms cancel.
        ulps = 2**20 if wide else ULPS
        return alike | ((got - right).abs() <= 2 * torch.maximum(error, like) + ulps * ulp)

    if agree(torch.zeros(())).all():
        return
    wrong = ~agree(worst_errors(extreme, name))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        operands = {"grad_output": extreme.grad_output, **extreme.call.tensors}
        there = {n: t[tuple(place)].item() for n, t in operands.items() if t.shape == wrong.shape}
        raise AssertionError(
            f"{what} of {extreme.call} at {place}, {there or operands}: ours {got[wrong][0]}, "
            f"torch {torchs[wrong][0]}, exact {right[wrong][0]}; {int(wrong.sum())} numbers"
        )


def weights_cancel(call: Call) -> bool:
    """Whether a mean divides by the sum of class weights, and that is 0 or next to it though they
    are not all 0."""
    target, weight = call.tensors["target"], call.tensors.get("weight")
    if weight is None or target.is_floating_point() or call.options["reduction"] != "mean":
        return False
    ignored = target == call.options.get("ignore_index", -100)
    weights = weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
    return bool(weights.any()) and (
        abs(weights.sum().item()) < torch.finfo(torch.float32).smallest_normal
    )


def differs_knowingly(extreme: Extreme, what: str, name: str) -> bool:
    """What docs/conformance.md says of infinities."""
    tensors, grad_output = extreme.call.tensors, extreme.grad_output
    infinite = {n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()}
    if extreme.call.loss == "cross_entropy":
        soft = tensors["target"].is_floating_point() or extreme.call.options["label_smoothing"] > 0
        if soft and infinite & {"target", "weight"}:
            return True
        if soft and weights_cancel(extreme.call):
            return True
        return not grad_output.isfinite().all() and what.startswith("unit")
    terms = extreme.call.loss == "kl_div" and name == "target"
    return terms and not (grad_output.isfinite() & (grad_output != 0)).all()


def check(extreme: Extreme) -> None:
    call = extreme.call
    eager, exact = evaluate(call.theirs, extreme), exact_of(extreme)
    found = {n: (n, t) for n, t in evaluate(call.ours, extreme).items()}
    sums_weight = "weight" in call.tensors and call.loss in ("mse_loss", "l1_loss")
    mean_of_weights = sums_weight and call.options["reduction"] == "mean"
    if call.options["reduction"] != "none" and call.loss != "nll_loss" and not mean_of_weights:
        found |= with_gradients(extreme)
    for what, (name, ours) in found.items():
        if not differs_knowingly(extreme, what, name):
            assert_agrees(extreme, what, name, ours, eager, exact)


def examples(loss: str, number: int) -> None:
    @always_the_same(number)
    @given(extreme_calls(loss))
    def run(extreme: Extreme) -> None:
        check(extreme)

    run()


@pytest.mark.sampled(2)
@losses
def test_extreme(loss):
    examples(loss, 100)


@losses
@pytest.mark.slow
def test_many_extreme(loss):
    examples(loss, 1000)


@pytest.mark.parametrize("pos_weight", [None, 2.5, 0.0, torch.inf])
@pytest.mark.parametrize("weight", [None, 0.0, 3.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_cross_entropy_of_infinities(weight, pos_weight, dtype):
    """Every pair of special logits and targets; also with special weights and grad_output."""
    # None whose terms torch cancels: of 90 with target 1 a loss is left, which torch loses.
    logits = (0.0, 1e-30, 1.0, -1.0, 3.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan)
    targets = (0.0, 0.3, 1.0, 1.5, -1.0, torch.inf, -torch.inf, torch.nan)
    pairs = torch.tensor(list(itertools.product(logits, targets)), dtype=torch.float64).to(dtype)
    tensors = {"input": pairs[:, 0].clone(), "target": pairs[:, 1].clone()}
    for name, value in (("weight", weight), ("pos_weight", pos_weight)):
        if value is not None:
            tensors[name] = torch.full((len(pairs),), value, dtype=dtype)
    for each in (1.0, -0.5, 0.0, torch.inf, -torch.inf, torch.nan):
        grad_output = torch.full((len(pairs),), each, dtype=dtype)
        check(Extreme(Call(BINARY, tensors, {"reduction": "none"}), grad_output))
