"""Property-based tests: shapes, strides, dtypes and options drawn by hypothesis, held against
float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conformance.compare import DTYPES, Call, always_the_same, compare, losses

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is an optional test dependency")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PAIRS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
BINARY = "binary_cross_entropy_with_logits"


@st.composite
def shapes(draw, most: int = 4, largest: int = 9) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, largest), max_size=most)))


def strided(draw, shape: tuple[int, ...], make, dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of this shape: permuted, with gaps, an offset, or expanded dimensions."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from((1, 1, 2, 3))) for _ in shape]
    offset = draw(st.integers(0, 3))
    expanded = [draw(st.integers(0, 9)) == 0 and size > 0 for size in shape]
    sizes = [1 if e else size * step for size, step, e in zip(shape, steps, expanded, strict=True)]
    numel = torch.Size(sizes).numel()
    flat = make(numel + offset).to(device, dtype)[offset:]
    base = flat.view([sizes[i] for i in order])
    tensor = base.permute([order.index(i) for i in range(len(shape))])
    for dim, (step, e) in enumerate(zip(steps, expanded, strict=True)):
        if not e:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    return tensor.expand(shape)


def normal(n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64) * 2


def positive(n: int) -> Tensor:
    return torch.rand(n, dtype=torch.float64) * 0.55 + 0.4


def log_probabilities(n: int) -> Tensor:
    # Below the logarithms of `positive`: the sum of a divergence cancels otherwise, and what is
    # left of it is rounding.
    return torch.rand(n, dtype=torch.float64) * 4 - 5.5


def log_positive(n: int) -> Tensor:
    return positive(n).log()


def broadcast_of(draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    kept = draw(st.integers(0, len(shape)))
    return tuple(1 if draw(st.booleans()) else size for size in shape[kept:])


REDUCTION = st.sampled_from(("none", "mean", "sum"))
LEGACY = st.sampled_from(({}, {}, {}, {"size_average": False}, {"reduce": False}))


@st.composite
def pair_calls(draw, loss: str, device: str) -> Call:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    shape = draw(shapes())
    first = log_probabilities if loss == "kl_div" else normal
    second = normal if loss not in ("kl_div", BINARY) else positive
    log_target = loss == "kl_div" and draw(st.booleans())
    if log_target:
        second = log_positive
    input = strided(draw, shape, first, draw(st.sampled_from(DTYPES)), device)
    broadcasts = loss != BINARY and draw(st.integers(0, 3)) == 0
    other = broadcast_of(draw, shape) if broadcasts else shape
    dtype = input.dtype if draw(st.integers(0, 3)) else draw(st.sampled_from(DTYPES))
    tensors = {"input": input, "target": strided(draw, other, second, dtype, device)}
    options = {"reduction": draw(REDUCTION)}
    if loss != "huber_loss":
        options |= draw(LEGACY)
    if loss in ("mse_loss", "l1_loss", "huber_loss", BINARY) and draw(st.booleans()):
        weights = broadcast_of(draw, shape) if loss == BINARY else shape
        tensors["weight"] = strided(draw, weights, positive, input.dtype, device)
    if loss == BINARY and draw(st.booleans()):
        tensors["pos_weight"] = strided(draw, shape[-1:], positive, input.dtype, device)
    if loss == "smooth_l1_loss":
        options["beta"] = draw(st.sampled_from((1.0, 0.0, 0.5, 3)))
    if loss == "huber_loss":
        options["delta"] = draw(st.sampled_from((1.0, 0.25, 2)))
    if loss == "kl_div":
        options["reduction"] = draw(st.sampled_from(("none", "mean", "sum", "batchmean")))
        options["log_target"] = log_target
    return Call(loss, tensors, options)


@st.composite
def row_calls(draw, loss: str, device: str) -> Call:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    classes = draw(st.integers(1, 12))
    outer = draw(st.sampled_from(((), *[(n,) for n in (0, 1, 2, 7, 33)])))
    inner = draw(shapes(2, 5)) if outer else ()
    shape = (*outer, classes, *inner)
    dtype = draw(st.sampled_from(DTYPES))
    input = strided(draw, shape, normal, dtype, device)
    options = {"reduction": draw(REDUCTION), **draw(LEGACY)}
    if loss == "cross_entropy":  # smoothed of one class, the gradient is 0, of which no ulp is left
        smoothed = st.sampled_from((0.0, 0.0, 0.1, 1.0) if classes > 1 else (0.0,))
        options["label_smoothing"] = draw(smoothed)
    tensors = {"input": input}
    if loss == "cross_entropy" and classes > 1 and draw(st.booleans()):
        other = dtype if draw(st.integers(0, 3)) else torch.float32
        tensors["target"] = strided(draw, shape, positive, other, device)
    else:
        ignored = draw(st.sampled_from((-100, 0, classes - 1)))
        options["ignore_index"] = ignored

        def indices(n: int) -> Tensor:
            return torch.where(torch.rand(n) < 0.2, ignored, torch.randint(classes, (n,)))

        tensors["target"] = strided(draw, (*outer, *inner), indices, torch.int64, device)
    if draw(st.booleans()):
        tensors["weight"] = strided(draw, (classes,), positive, dtype, device)
    return Call(loss, tensors, options)


def calls(loss: str, device: str):
    return (row_calls if loss in ("cross_entropy", "nll_loss") else pair_calls)(loss, device)


def examples(loss: str, device: str, number: int, *, second: bool) -> None:
    @always_the_same(number)
    @given(calls(loss, device))
    def run(call: Call) -> None:
        compare(call, call.differentiable, second=second, mode="drawn")

    run()


@pytest.mark.sampled(2)
@losses
def test_drawn(loss, device):
    examples(loss, device, 60, second=False)


@losses
@pytest.mark.slow
@pytest.mark.parametrize("second", [False, True], ids=["gradients", "second derivatives"])
def test_many_drawn(loss, second, device):
    examples(loss, device, 600, second=second)
