"""A call of a loss, made of torch's function and of ours, in the same dtype and in float64."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import functional
from tests.accuracy import RATIO, SIMILAR, assert_accurate, similar
from tests.conformance import ledger

#: linear_cross_entropy has a weight more, and for the divergences of softmaxes and for contrastive
#: losses torch has no function: they have tests of their own.
_OTHERS = (
    "contrastive_cross_entropy",
    "contrastive_sigmoid_cross_entropy",
    "linear_cross_entropy",
    "linear_softmax_js_div",
    "linear_softmax_kl_div",
    "selective_log_softmax",
    "softmax_entropy",
    "softmax_finite_kl_div",
    "softmax_js_div",
    "softmax_kl_div",
)
LOSSES = tuple(name for name in functional.__all__ if name not in _OTHERS)
TENSORS = ("input", "target", "weight", "pos_weight")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
losses = pytest.mark.parametrize("loss", LOSSES)
dtypes = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float64, id="float64", marks=pytest.mark.slow),
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16"),
        pytest.param(torch.float16, id="float16", marks=pytest.mark.slow),
    ],
)


@dataclass(frozen=True)
class Call:
    """A call of a loss: its tensors and its other arguments, by name."""

    loss: str
    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @staticmethod
    def bind(loss: str, *args: Any, **kwargs: Any) -> Call:
        given = inspect.signature(getattr(F, loss)).bind(*args, **kwargs).arguments
        tensors = {name: given.pop(name) for name in TENSORS if given.get(name) is not None}
        return Call(loss, tensors, given)

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        return replace(self, tensors={name: function(t) for name, t in self.tensors.items()})

    def with_options(self, **options: Any) -> Call:
        return replace(self, options={**self.options, **options})

    @property
    def ours(self) -> Callable[..., Tensor]:
        return getattr(functional, self.loss)

    @property
    def theirs(self) -> Callable[..., Tensor]:
        return getattr(F, self.loss)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Arguments that torch differentiates the loss with respect to."""
        soft = self.tensors["target"].is_floating_point()
        weighted = self.loss in ("mse_loss", "l1_loss", "huber_loss", "cross_entropy") and soft
        names = ("input", "target", *(("weight",) if weighted else ()))
        return tuple(n for n in names if n in self.tensors and is_floating(self.tensors[n]))

    def __str__(self) -> str:
        tensors = {n: f"{t.dtype} {list(t.shape)} {t.stride()}" for n, t in self.tensors.items()}
        return f"{self.loss} {self.name}: {tensors} {self.options}"


def is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def exactly(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double() if tensor.is_floating_point() else tensor.cpu()


def without_cancellation(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """binary_cross_entropy_with_logits of finite tensors, of terms that do not cancel.

    torch takes pos_weight target from (1 - target + pos_weight target) sigmoid(input), and softplus
    stops at a threshold.
    """
    positive = target if pos_weight is None else target * pos_weight
    loss = -(1 - target) * F.logsigmoid(-input) - positive * F.logsigmoid(input)
    loss = loss if weight is None else loss * weight
    return loss if reduction == "none" else getattr(loss, reduction)()


def same(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(like.shape, generator=generator, dtype=torch.float64) * 3
    return values.to(like.device, like.dtype)


def positive_noise(like: Tensor, seed: int) -> Tensor:
    """For what is summed with it: where a sum cancels, what is left of it is rounding."""
    values = noise(torch.empty(like.shape, dtype=torch.float64), seed).abs() + 0.1
    return values.to(like.device, like.dtype)


@dataclass
class Result:
    """What a call gave: tensors by name, ``None`` where torch.autograd gives that, or an error.

    Attributes:
        function, requires, second: what it was evaluated of, see :func:`evaluate`.
    """

    function: Callable[..., Tensor]
    requires: tuple[str, ...] = ()
    second: bool = False
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def loss(self) -> Tensor | None:
        return self.tensors.get("loss")


def evaluate(
    function: Callable[..., Tensor],
    call: Call,
    requires: tuple[str, ...] = (),
    *,
    second: bool = False,
    rounded: Result | None = None,
) -> Result:
    """The loss; its gradients for a random grad_output; and theirs, for random cotangents.

    Args:
        rounded: whose dtypes grad_output and the cotangents are rounded to, in float64 too, so that
            the result is held against the exact one for what it was given.
    """
    leaves = {n: t.detach().requires_grad_(n in requires) for n, t in call.tensors.items()}
    result: dict[str, Tensor | None] = {}

    def cotangent(of: Tensor, name: str, seed: int) -> Tensor:
        values = positive_noise(of, seed)
        model = None if rounded is None else rounded.tensors.get(name)
        return values if model is None else values.to(model.dtype).to(of.dtype)

    try:
        loss = function(**leaves, **call.options)
        result["loss"] = loss
        if requires:
            roots = [leaves[name] for name in requires]
            grad_output = cotangent(loss, "loss", 1).requires_grad_(second)
            gradients = torch.autograd.grad(
                loss, roots, grad_output, create_graph=second, allow_unused=True
            )
            named = {f"gradient of {n}": g for n, g in zip(requires, gradients, strict=True)}
            result |= named
            pairs = [
                (g, cotangent(g, name, 2 + i))
                for i, (name, g) in enumerate(named.items())
                if g is not None and g.requires_grad
            ]
            if second and pairs:
                names = (*requires, "grad_output")
                products = torch.autograd.grad(
                    [g for g, _ in pairs],
                    [*roots, grad_output],
                    [cotangent for _, cotangent in pairs],
                    allow_unused=True,
                )
                result |= {
                    f"second derivative by {n}": torch.zeros_like(root) if p is None else p
                    for n, root, p in zip(names, [*roots, grad_output], products, strict=True)
                }
    except Exception as error:  # whatever torch raises
        return Result(function, requires, second, result, error)
    return Result(function, requires, second, result)


def evaluate_exactly(call: Call, theirs: Result) -> Result:
    """A call in float64: of torch, but where torch cancels and its own error is in the way."""
    exact, function = call.map(exactly), call.theirs
    finite = all(t.isfinite().all() for t in exact.tensors.values())
    named = call.loss == "binary_cross_entropy_with_logits" and set(call.options) <= {"reduction"}
    if named and finite:
        function = without_cancellation
    return evaluate(function, exact, theirs.requires, second=theirs.second, rounded=theirs)


def similar_call(call: Call, seed: int, cast: Callable[[torch.dtype], torch.dtype]) -> Call:
    """The call with operands like its own, in other dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return call.map(lambda t: similar(t, generator, cast(t.dtype)))


def worst_error(call: Call, theirs: Result, name: str) -> float:
    """The largest error that torch makes in a result of calls like this one.

    Where terms cancel, an error is of their size and not of the result's; and torch's own error in
    one call says little of that size.

    - It may be none by luck, as for equal logits; and of one number it is one sample.
    - Of what torch computes in float64 it is none at all, since that is the reference. There its
      error in float32 counts, too.
    - What a second derivative is the sum of reaches a leaf from several sides, and is added up in
      the leaf's dtype. Where torch composes a loss of ops, those sides meet before, in the
      promoted dtype: of mixed dtypes its error counts, too, for operands of the leaf's.
    """
    kinds = {t.dtype for t in call.tensors.values() if t.is_floating_point()}
    own = theirs.tensors[name].dtype
    variants: list[tuple[Callable[[torch.dtype], torch.dtype], float]] = [(lambda kind: kind, 1.0)]
    if torch.float64 in kinds:
        low = {torch.float64: torch.float32}
        variants.append((lambda kind: low.get(kind, kind), RATIO))
    if name.startswith("second") and len(kinds) > 1:
        variants.append((lambda _: own, 1.0))
    worst = 0.0
    for seed, (cast, scale) in itertools.product(range(SIMILAR), variants):
        other = similar_call(call, seed, cast)
        found = evaluate(theirs.function, other, theirs.requires, second=theirs.second)
        exact = evaluate_exactly(other, found)
        if found.tensors.get(name) is None or exact.tensors.get(name) is None:
            continue
        error = (exactly(found.tensors[name]) - exact.tensors[name].detach()).abs()
        error = error[error.isfinite()]
        worst = max(worst, error.max().item() * scale if error.numel() else 0.0)
    return worst


def steps(tensor: Tensor) -> list[int]:
    """The strides that matter: those between elements."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1]


def assert_same(call: Call, ours: Result, theirs: Result, exact: Result) -> None:
    """The same class of error, or the same tensors, as accurately as the one rule asks.

    Where torch gives a loss that it fails to differentiate, ours may have gradients; and a loss
    where torch refuses for want of a deterministic kernel.
    """
    refusal = "does not have a deterministic implementation"
    if theirs.loss is None and refusal in str(theirs.error) and ours.error is None:
        return
    if theirs.error is not None and (theirs.loss is None or ours.error is not None):
        assert isinstance(ours.error, type(theirs.error)), (
            f"{call}: torch raises {theirs.error!r}, ours {ours.error!r}"
        )
        return
    if ours.error is not None:
        raise AssertionError(f"{call}: torch gives a result") from ours.error
    for name, expected in theirs.tensors.items():
        got, what = ours.tensors[name], f"{call}, {name}"
        assert (got is None) == (expected is None), what
        if expected is None:
            continue
        assert got.requires_grad == expected.requires_grad, what
        if name == "loss" and got.numel() > 0:
            assert steps(got) == steps(expected), f"{what}: {got.stride()}"
        if is_floating(expected):
            if name.startswith("second") and same(got, expected):
                continue  # on CUDA torch has other special values than the float64 reference
            results = (got.detach(), expected.detach(), exact.tensors[name].detach())
            try:
                assert_accurate(*results, what)
            except AssertionError:
                assert_accurate(*results, what, worst_error(call, theirs, name))
        else:
            torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=what)


def compare(
    call: Call, requires: tuple[str, ...] = (), *, second: bool = False, mode: str | None = None
) -> None:
    """Makes the call of torch and of ours, compares, and counts it under ``mode``."""
    theirs = evaluate(call.theirs, call, requires, second=second)
    ours = evaluate(call.ours, call, requires, second=second)
    exact = evaluate_exactly(call, theirs)
    assert_same(call, ours, theirs, exact)
    if mode is None:
        mode = "double backward" if second else "gradients" if requires else "eager"
    ledger.count(call, "errors" if theirs.loss is None else mode)


def patterns(call: Call) -> Iterator[tuple[str, ...]]:
    """Every set of arguments that may require gradients, the empty one first."""
    names = call.differentiable
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def always_the_same(number: int) -> Any:
    """Settings of hypothesis: so many examples, the same in each run, without a limit of time."""
    from hypothesis import HealthCheck, settings

    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
