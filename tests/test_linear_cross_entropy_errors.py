"""What linear cross entropy refuses and takes, compared with torch's own call by call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses.functional import linear_cross_entropy

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        not hasattr(F, "linear_cross_entropy"), reason="torch has had the function since 2.13"
    ),
]

N, C, D, H = 6, 5, 3, 4


def normal(*shape):
    return torch.randn(shape)


def classes(*shape):
    return torch.randint(C, shape)


def call(target, input=(N, H), linear_weight=(C, H), **others):
    made = [normal(*t) if isinstance(t, tuple) else t for t in (input, linear_weight)]
    return {"input": made[0], "linear_weight": made[1], "target": target, **others}


def probabilities(*shape):
    return torch.rand(shape).softmax(-1)


def calls():
    good, soft = classes(N), probabilities(N, C)
    wide = {"linear_weight": (C, D, H)}
    yield "classes", call(good)
    yield "other batch", call(classes(N + 1))
    yield "one target", call(classes(1))
    yield "no dimension", call(torch.tensor(1))
    yield "two dimensions", call(classes(N, 1))
    yield "one row", call(torch.tensor(1), input=(H,))
    yield "one row, one target", call(classes(1), input=(H,))
    yield "one row, two targets", call(classes(2), input=(H,))
    yield "one row, [1, 1]", call(classes(1, 1), input=(H,))
    for dtype in (torch.int32, torch.int16, torch.int8, torch.bool, torch.uint8, torch.complex64):
        yield f"{dtype}", call((good % 2).to(dtype))
        yield f"{dtype}, other batch", call((classes(N + 1) % 2).to(dtype))
        yield f"{dtype}, one row", call(torch.tensor(1).to(dtype), input=(H,))
    yield "probabilities", call(soft)
    for dtype in (torch.float16, torch.float64):
        yield f"{dtype} probabilities", call(soft.to(dtype))
    yield "probabilities, other batch", call(probabilities(N + 1, C))
    yield "probabilities, other classes", call(probabilities(N, C - 1))
    yield "floating classes", call(torch.rand(N))
    yield "floating classes, other batch", call(torch.rand(N + 1))
    yield "one row of probabilities", call(probabilities(C), input=(H,))
    yield "probabilities and ignore_index", call(soft, ignore_index=-100)
    yield "out of range", call(torch.full((N,), C))
    yield "negative", call(torch.full((N,), -1))
    yield "other features", call(good, input=(N, H + 1))
    yield "no features", call(good, input=(N, 0), linear_weight=(C, 0))
    yield "no rows", call(classes(0), input=(0, H))
    yield "input without dimensions", call(good, input=())
    yield "linear_weight of one dimension", call(good, linear_weight=(H,))
    yield "linear_weight without dimensions", call(good, linear_weight=())
    yield "images", call(classes(N, D), **wide)
    yield "images, other batch", call(classes(N + 1, D), **wide)
    yield "images, other sizes", call(classes(N, D + 1), **wide)
    yield "images, one dimension", call(good, **wide)
    yield "images, one row", call(classes(D), input=(H,), **wide)
    yield "images, int32", call(classes(N, D).int(), **wide)
    yield "images, uint8", call(classes(N, D).to(torch.uint8), **wide)
    yield "images, a bias", call(classes(N, D), linear_bias=normal(C, D), **wide)
    yield "images, a bias of classes", call(classes(N, D), linear_bias=normal(C), **wide)
    for shape in ((C - 1,), (C, 1), ()):
        yield f"bias {shape}", call(good, linear_bias=normal(*shape))
        yield f"weight {shape}", call(good, weight=normal(*shape).abs())
        yield f"probabilities, weight {shape}", call(soft, weight=normal(*shape).abs())
    yield "float64 bias", call(good, linear_bias=normal(C).double())
    yield "float64 linear_weight", call(good, linear_weight=normal(C, H).double())
    yield "integers", call(good, input=classes(N, H), linear_weight=classes(C, H))
    yield "complex", call(good, input=normal(N, H) + 0j, linear_weight=normal(C, H) + 0j)
    for weight in (torch.rand(C).double(), classes(C), torch.rand(C) + 0j):
        yield f"{weight.dtype} weight", call(good, weight=weight)
        if not weight.is_complex():
            yield f"probabilities, {weight.dtype} weight", call(soft, weight=weight)
    for smoothing in (1.5, -0.5, float("nan"), float("inf"), "a", None):
        yield f"smoothing {smoothing}", call(good, label_smoothing=smoothing)
        yield f"probabilities, smoothing {smoothing}", call(soft, label_smoothing=smoothing)
    for reduction in ("batchmean", "elementwise_mean", "", None, 1):
        yield f"reduction {reduction}", call(good, reduction=reduction)
    for ignored in (1.5, "a", True, 2**70, 2**63, -(2**63)):
        yield f"ignore_index {ignored}", call(good, ignore_index=ignored)
    yield "a list as weight", call(good, weight=[1.0] * C)
    yield "sparse", call(good.to_sparse())
    learned = torch.rand(C, requires_grad=True)
    for name, target in (("classes", good), ("uint8", good.to(torch.uint8)), ("soft", soft)):
        yield f"{name}, learned weight", call(target, weight=learned)
    yield "images, learned weight", call(classes(N, D), weight=learned, **wide)


def result(function, arguments):
    try:
        return function(**arguments)
    except Exception as error:
        return error


torch.manual_seed(0)
CALLS = dict(calls())


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", CALLS)
def test_as_torch(name, grad):
    """The same class of error, or the same loss."""
    with torch.set_grad_enabled(grad):
        theirs, ours = (
            result(f, CALLS[name]) for f in (F.linear_cross_entropy, linear_cross_entropy)
        )
    if isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), (theirs, ours)
        return
    assert isinstance(ours, Tensor), ours
    assert ours.requires_grad == theirs.requires_grad
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [(N,), ()], ids=["rows", "one row"])
def test_no_gradient_flows_to_a_learned_weight(reduction, rows):
    """torch's chunked loss takes it, for what it computes in chunks, and gives it no gradient."""
    input, linear_weight = normal(*rows, H).requires_grad_(), normal(C, H).requires_grad_()
    weight, target = torch.rand(C, requires_grad=True), classes(*rows)
    options = torch.nn.LinearCrossEntropyOptions()
    results = []
    for function in (F.linear_cross_entropy, linear_cross_entropy):
        loss = function(
            input, linear_weight, target, weight=weight, reduction=reduction, options=options
        )
        roots = (input, linear_weight, weight)
        gradients = torch.autograd.grad(loss.sum(), roots, allow_unused=True)
        assert gradients[2] is None
        results.append((loss.detach(), *gradients[:2]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("target", "label_smoothing"), [(torch.int64, 0.1), (torch.uint8, 0.0)], ids=["smooth", "uint8"]
)
def test_a_learned_weight_elsewhere(target, label_smoothing):
    arguments = call(
        classes(N).to(target),
        weight=torch.rand(C, requires_grad=True),
        label_smoothing=label_smoothing,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    for function in (F.linear_cross_entropy, linear_cross_entropy):
        with pytest.raises(RuntimeError, match="weight"):
            function(**arguments)
