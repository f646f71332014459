"""What torch's losses do in their corners, item by item, eagerly and in compiled unmodified calls.

Each test names a behaviour that was read off torch; `check` compares with torch itself.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compile_losses import functional
from tests.conformance.compare import Call, assert_same, evaluate, evaluate_exactly, noise
from tests.conformance.test_compile import compiled

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

nan, inf = math.nan, math.inf
IGNORED = -100
PAIRS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


@pytest.fixture(params=["eager", "compiled"])
def check(request, device):
    """Compares a call with torch's, in values, gradients and classes of errors."""

    def compare(loss: str, *args, requires=None, **kwargs) -> Tensor | None:
        call = Call.bind(loss, *args, **kwargs).map(lambda t: t.to(device))
        requires = call.differentiable if requires is None else requires
        function = call.ours if request.param == "eager" else compiled(call.theirs)
        theirs = evaluate(call.theirs, call, requires)
        ours = evaluate(function, call, requires)
        if request.param == "compiled" and theirs.loss is None:
            assert ours.error is not None, str(call)  # Dynamo has classes of its own
            return None
        if request.param == "compiled" and ours.error is not None:
            torch._dynamo.reset()
            stock = torch.compile(call.theirs, backend="aot_eager", fullgraph=True)
            assert evaluate(stock, call, requires).error is not None, str(call)
            return None
        if request.param == "compiled" and theirs.loss is not None:
            # A compiled graph has the dtype of torch's meta function, which may promote alone.
            meta = evaluate(call.theirs, call.map(lambda t: t.to("meta"))).loss
            if meta is not None:
                theirs.tensors["loss"] = theirs.loss.to(meta.dtype)
        exact = evaluate_exactly(call, theirs)
        try:
            assert_same(call, ours, theirs, exact)
        except AssertionError:
            # Of what is not rewritten stock torch.compile answers, which drops l1_loss's weight
            # and promotes huber_loss.
            if request.param == "eager":
                raise
            torch._dynamo.reset()
            stock = torch.compile(call.theirs, backend="aot_eager", fullgraph=True)
            found = evaluate(stock, call, requires)
            for name in theirs.tensors:
                torch.testing.assert_close(
                    ours.tensors[name], found.tensors[name], rtol=0, atol=0, equal_nan=True
                )
        return theirs.loss

    return compare


def logits(rows: int = 4, cols: int = 5) -> Tensor:
    return noise(torch.empty(rows, cols), 0)


def classes(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
def test_01_dtypes_of_class_targets(check, loss):
    """int64 and uint8, the latter not for N-d inputs; nothing else."""
    x, t = logits(), classes(0, 1, 2, 3)
    for dtype in (torch.int64, torch.uint8, torch.int32, torch.int16, torch.bool):
        check(loss, x, t.to(dtype))
        check(loss, x.view(2, 5, 2), t.view(2, 2).to(dtype))
    check(loss, x, t.float())


@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_02_targets_out_of_range(loss, smoothing):
    """IndexError on the CPU; a batch mismatch is a ValueError."""
    options = {"label_smoothing": smoothing} if loss == "cross_entropy" else {}
    for bad in (-1, 5, -101, 2**40, -(2**63), 2**63 - 1):
        for x, t in (
            (logits(), classes(0, bad, 1, 2)),
            (logits(4, 10).view(4, 5, 2), classes(*[bad] * 8).view(4, 2)),
            (logits()[0], torch.tensor(bad)),
        ):
            call = Call.bind(loss, x, t, **options)
            for function in (call.ours, compiled(call.theirs)):
                with pytest.raises(IndexError, match=str(bad)):
                    function(**call.tensors, **call.options)
    for t in (classes(0, 1), classes(0, 1, 2, 3, 4)):
        with pytest.raises(ValueError, match="batch"):
            getattr(functional, loss)(logits(), t)
    with pytest.raises(ValueError, match="batch"):
        getattr(functional, loss)(logits(), torch.tensor(0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_03_nothing_to_average(check, loss, reduction):
    """All rows ignored, no rows, weights of zero."""
    x = logits()
    check(loss, x, classes(*[IGNORED] * 4), reduction=reduction)
    check(loss, x[:0], classes()[:0].long(), reduction=reduction)
    check(loss, x, classes(0, 1, 2, 3), weight=torch.zeros(5), reduction=reduction)
    check(loss, x, classes(0, 1, 2, 2), ignore_index=2, weight=noise(x[0], 3), reduction=reduction)


def test_03_gradient_of_ignored_rows_is_zero():
    leaf = logits().requires_grad_()
    loss = functional.cross_entropy(leaf, classes(*[IGNORED] * 4))
    assert loss.isnan()
    assert (torch.autograd.grad(loss, leaf)[0] == 0).all()


@pytest.mark.parametrize("value", [nan, -inf])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_04_ignored_rows_that_hold_nan(check, value, reduction):
    x = logits()
    x[1] = value
    check("cross_entropy", x, classes(0, IGNORED, 2, 3), reduction=reduction)
    x[1, 1:] = 0.5
    check("cross_entropy", x, classes(0, IGNORED, 2, 3), reduction=reduction)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_05_probability_targets(check, smoothing, reduction):
    """The mean is over rows, weighted or not; target and weight are differentiable."""
    x, q, w = logits(), logits().flip(0).softmax(-1), logits()[0].exp()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check("cross_entropy", x, q, **options)
    check("cross_entropy", x, q, weight=w, **options)
    check("cross_entropy", x, q, weight=w, requires=("input", "target", "weight"), **options)
    check("cross_entropy", x, q, weight=w, requires=("weight",), **options)
    check("cross_entropy", x, q * 3 - 1, **options)


def test_05_weights_that_require_grad(check):
    """torch refuses to differentiate class weights, and BCE's weights."""
    x, t, w = logits(), classes(0, 1, 2, 3), logits()[0].exp()
    for loss in ("cross_entropy", "nll_loss"):
        check(loss, x, t, weight=w, requires=("weight",))
        check(loss, x, t, weight=w, requires=("input", "weight"))
    binary = "binary_cross_entropy_with_logits"
    check(binary, x, x.flip(0).sigmoid(), weight=w, requires=("weight",))
    check(binary, x, x.flip(0).sigmoid(), pos_weight=w, requires=("pos_weight",))
    with torch.no_grad():
        weight = w.clone().requires_grad_()
        torch.testing.assert_close(
            functional.cross_entropy(x, t, weight), functional.cross_entropy(x, t, w)
        )


def test_06_probability_targets_ignore_nothing(check):
    for ignore_index in (0, 3, -1, -100):
        check("cross_entropy", logits(), logits().flip(0).softmax(-1), ignore_index=ignore_index)


def test_07_range_of_label_smoothing(check):
    for smoothing in (1.0, 1.0001, 2, -0.5, nan, inf, -inf):
        for target in (classes(0, 1, 2, 3), logits().softmax(-1)):
            check("cross_entropy", logits(), target, label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_08_infinite_logits(check, smoothing):
    x = logits()
    x[1, 3] = -inf
    x[2] = torch.tensor([-inf, -inf, 1.0, -inf, -inf])
    target = classes(0, 1, 2, 3)
    check("cross_entropy", x, target, label_smoothing=smoothing)
    check("cross_entropy", x, classes(0, 3, 0, 3), label_smoothing=smoothing)
    one_hot = torch.nn.functional.one_hot(target, 5).float()
    check("cross_entropy", x, one_hot, label_smoothing=smoothing)
    x[0, 1] = inf
    check("cross_entropy", x, target, label_smoothing=smoothing)


def test_09_many_rows_of_float16():
    """torch counts rows in float16, and overflows; the right mean is finite."""
    rows = 70_000
    x = logits(rows, 2).log_softmax(-1).half()
    t = torch.zeros(rows, dtype=torch.int64)
    exact = -x[:, 0].double().mean()
    for mean in (functional.nll_loss(x, t), functional.cross_entropy(x, t)):
        assert mean.isnan() or abs(mean.item() - exact.item()) < 2e-3 * abs(exact.item())
    assert functional.cross_entropy(x, t).isfinite()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [*PAIRS, "kl_div", "binary_cross_entropy_with_logits"])
def test_10_mixed_dtypes(check, loss):
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for a in dtypes:
        for b in dtypes:
            check(loss, logits().to(a), logits().flip(0).sigmoid().to(b))
    for dtype in (torch.float64, torch.bfloat16):
        for other in ("cross_entropy", "nll_loss"):
            check(other, logits(), classes(0, 1, 2, 3), weight=logits()[0].exp().to(dtype))


@pytest.mark.parametrize("loss", [*PAIRS, "kl_div", "binary_cross_entropy_with_logits"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_11_autocast(loss, low, device):
    a, b = logits().to(device, low), logits().flip(0).sigmoid().to(device, low)
    with torch.autocast(device, low):
        assert getattr(functional, loss)(a, b).dtype == torch.float32
        assert functional.cross_entropy(a, b.argmax(-1)).dtype == torch.float32
        assert functional.nll_loss(a, b.argmax(-1)).dtype == torch.float32


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [*PAIRS, "kl_div", "binary_cross_entropy_with_logits"])
def test_12_strides_of_unreduced_losses(check, loss):
    a = logits(8, 6).view(2, 4, 3, 2)
    b = logits(8, 6).sigmoid().view(2, 4, 3, 2)
    for first in (a, a.transpose(1, 3), a.to(memory_format=torch.channels_last)):
        for second in (b, b.transpose(1, 3), b.to(memory_format=torch.channels_last)):
            if first.shape == second.shape:
                check(loss, first, second, reduction="none")
    x = logits(8, 6).view(2, 4, 3, 2)
    target = torch.zeros(2, 2, 3, dtype=torch.int64).transpose(1, 2)
    check("cross_entropy", x, target, reduction="none")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "huber_loss"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_13_weighted_means(check, loss, reduction):
    """mse and l1 divide by the sum of the weights, huber by the number of elements."""
    a, b, w = logits(), logits().flip(0).sigmoid(), logits().exp()
    for requires in (("input",), ("weight",), ("input", "target", "weight")):
        check(loss, a, b, weight=w, reduction=reduction, requires=requires)
    check(loss, a, b, weight=torch.zeros_like(w), reduction=reduction)
    check(loss, a, b, weight=-w, reduction=reduction)
    check(loss, a, b[0], weight=w, reduction=reduction)
    check(loss, a, b.expand(2, 4, 5), weight=w, reduction=reduction)
    for wrong in (w[0], w[:, :1], w.view(-1)):
        check(loss, a, b, weight=wrong, reduction=reduction)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean"])
def test_14_kl_div(check, reduction):
    x, q = logits().log_softmax(-1), logits().flip(0).softmax(-1)
    option = {"reduction": reduction}
    check("kl_div", x, q.clone().index_fill_(1, classes(1), 0), requires=("input",), **option)
    check("kl_div", x, q.clone().index_fill_(1, classes(1), 0), **option)
    check("kl_div", x, q.clone().index_fill_(1, classes(1), -0.5), **option)
    y = x.clone().index_fill_(1, classes(1), -inf)
    check("kl_div", y, q, **option)
    check("kl_div", y, q.clone().index_fill_(1, classes(1), 0), **option)
    check("kl_div", y, q.log(), log_target=True, **option)
    check("kl_div", x, y, log_target=True, **option)
    check("kl_div", x[0, 0], q[0, 0], **option)
    check("kl_div", x[:0], q[:0], **option)
    check("kl_div", x, q.expand(2, 4, 5), **option)
    check("kl_div", x, q[0], **option)
    for legacy in ({"size_average": False}, {"size_average": True}, {"reduce": False}):
        check("kl_div", x, q, **legacy, **option)


def test_15_binary_cross_entropy(check):
    binary = "binary_cross_entropy_with_logits"
    x, y = logits(), logits().flip(0).sigmoid()
    check(binary, x, y[0])
    check(binary, x, y[:, :1])
    for dtype in (torch.int64, torch.uint8, torch.bool):
        check(binary, x, (y > 0.5).to(dtype))
        check(binary, (x > 0.5).to(dtype), y)
    x[0] = torch.tensor([inf, -inf, inf, -inf, nan])
    y[0] = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    check(binary, x, y, reduction="none")
    check(binary, x, y, reduction="none", pos_weight=logits()[0].exp())
    check(binary, x, y * 7 - 3, weight=x.exp()[:, :1], reduction="sum")
    check(binary, x * 100, y, pos_weight=torch.zeros(5), reduction="none")
    check(binary, x, y, pos_weight=torch.ones(3))
    check(binary, x, y, weight=torch.ones(3))
    check(binary, x, y, weight=torch.ones(2, 4, 5))


def test_17_linear_cross_entropy_is_linear_and_cross_entropy(check):
    x, w = logits(4, 3), logits(5, 3)
    check("cross_entropy", x @ w.T, classes(0, 1, 2, 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [*PAIRS, "kl_div", "binary_cross_entropy_with_logits"])
def test_18_gradients_of_targets(check, loss):
    for requires in (("target",), ("input", "target")):
        for reduction in ("none", "mean", "sum"):
            check(
                loss, logits(), logits().flip(0).sigmoid(), requires=requires, reduction=reduction
            )


@pytest.mark.parametrize("loss", [*PAIRS, "kl_div", "binary_cross_entropy_with_logits"])
def test_19_one_tensor_as_input_and_target(loss):
    results = []
    call = Call.bind(loss, logits(), logits())
    for function in (call.ours, call.theirs):
        leaf = logits().flip(0).sigmoid().requires_grad_()
        value = function(leaf, leaf * 1)
        (gradient,) = torch.autograd.grad(value.exp(), leaf, create_graph=True)
        results.append((value, gradient, torch.autograd.grad(gradient.sum(), leaf)[0]))
    torch.testing.assert_close(*results)


ALL = [*PAIRS, "kl_div", "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss"]


def operands(loss: str, device: str) -> tuple[Tensor, Tensor]:
    if loss in ("cross_entropy", "nll_loss"):
        return logits().to(device), classes(0, 1, 2, 3).to(device)
    return logits().to(device), logits().flip(0).sigmoid().to(device)


@pytest.mark.parametrize("loss", ALL)
def test_19_backward_twice(loss, device):
    """retain_graph gives the same gradient again; without it the second backward raises."""
    input, target = operands(loss, device)
    leaf = input.requires_grad_()
    value = getattr(functional, loss)(leaf, target)
    first = torch.autograd.grad(value, leaf, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(value, leaf), first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, leaf)


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("argument", ["input", "target"])
def test_19_changed_in_place(loss, argument, device):
    """Autograd's version counter notices what was changed between forward and backward.

    torch's l1_loss and cross_entropy save intermediates, and let their input be changed.
    """
    input, target = operands(loss, device)
    leaf = input.requires_grad_()
    tensors = {"input": leaf * 1, "target": target.clone()}
    value = getattr(functional, loss)(**tensors)
    tensors[argument].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    tensors = {"input": leaf * 1, "target": target.clone()}
    value = getattr(functional, loss)(**tensors)
    value.backward()
    tensors[argument].add_(0)  # afterwards no one minds


@pytest.mark.parametrize("loss", ALL)
def test_20_in_place_accumulation(loss, device):
    """Gradients accumulate in .grad, and hooks see them."""
    input, target = operands(loss, device)
    leaf = input.requires_grad_()
    seen = []
    leaf.register_hook(seen.append)
    for _ in range(2):
        getattr(functional, loss)(leaf, target).backward()
    torch.testing.assert_close(leaf.grad, seen[0] + seen[1])


def test_every_item_has_a_test():
    """Item 16, the warnings, is in test_overrides.py."""
    names = [name for name in globals() if name.startswith("test_")]
    found = {int(name.split("_")[1]) for name in names if name.split("_")[1].isdigit()}
    assert found | {16} == set(range(1, 21))
