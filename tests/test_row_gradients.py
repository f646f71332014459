"""Unreduced linear cross entropy under torch.compile: gradients by row, in the forward."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses.ops.linear.row_function import RowFunction, encode
from compile_losses.ops.linear.steps import Operand
from tests.accuracy import assert_accurate
from tests.corpus.rows import (
    ACROSS_ROWS,
    BATCH,
    BY_ROW,
    CLASSES,
    HIDDEN,
    TOKENS,
    clipped,
    losses,
    masked_mean,
    of_shifted_logits,
    preferences,
    problem,
)
from tests.graphs import Compiled
from tests.heads import AGAIN, IN_THE_FORWARD, LOGITS, SCALED, errors_on_similar
from tests.linear_problems import known_text, largest_allocation, leaves

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


def weights_of(result):
    weights = torch.linspace(0.5, 1, result.numel(), dtype=result.dtype, device=result.device)
    return weights.view(result.shape)


def outcome(function, inputs, factor=3.0):
    """What a function returns, and gradients of a number that is made of it."""
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    total = sum(
        (factor * (i + 1) * r * weights_of(r)).sum()
        for i, r in enumerate(results)
        if r.requires_grad
    )
    wanted = [t for t in tensors if t.requires_grad]
    return [*(r.detach() for r in results), *torch.autograd.grad(total, wanted)]


def check(function, inputs, **options):
    """Compares a compiled step with torch's; returns its sites."""
    compiled = Compiled(function, **options)
    if inputs[0].dtype == torch.float64:
        pair = outcome(compiled, inputs), outcome(function, inputs)
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)
        return compiled.sites
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    exact = [t.detach().requires_grad_(g.requires_grad) for t, g in zip(exact, inputs, strict=True)]
    found = [outcome(compiled, inputs), outcome(function, inputs), outcome(function, exact)]
    likes = [errors_on_similar(function, inputs, outcome)] * (inputs[0].dtype == torch.bfloat16)
    likes = likes[0] if likes else [0.0] * len(found[0])
    for i, (*results, like) in enumerate(zip(*found, likes, strict=True)):
        assert_accurate(*results, f"{function.__name__}, result {i}", like)
    return compiled.sites


def only(sites):
    (site,) = sites
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten"), site
    return site


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BY_ROW)
def test_in_the_forward(name, dtype, device):
    inputs = problem(dtype, device=device)
    assert only(check(BY_ROW[name], inputs)).plan[0] == IN_THE_FORWARD


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_across_rows(name, device):
    """Recognised, and then computed as without this op: the reason says what would save memory."""
    inputs = problem(device=device)
    site = only(check(ACROSS_ROWS[name], inputs))
    assert site.plan[0] == LOGITS
    words = "outside of the graph" if name in ("each_of_them", "two_numbers") else "other rows"
    assert words in site.details[0]
    assert "prefer_memory" in site.details[0]


@pytest.mark.parametrize("name", ["preferences", "each_of_them", "of_neighbours"])
def test_memory_is_preferred(name, monkeypatch, device):
    inputs = problem(device=device)
    assert only(check(ACROSS_ROWS[name], inputs, prefer_memory=True)).plan[0] == AGAIN
    monkeypatch.setenv("COMPILE_LOSSES_PREFER_MEMORY", "1")
    report = compile_losses.explain(ACROSS_ROWS[name], *inputs)
    assert only(report.losses).plan[0] == AGAIN


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [*BY_ROW, *ACROSS_ROWS])
def test_frozen_head(name, dtype, device):
    """Input's gradients are made for a gradient of 1 of each row, whatever they are scaled by."""
    function = {**BY_ROW, **ACROSS_ROWS}[name]
    inputs = problem(dtype, frozen=True, device=device)
    assert only(check(function, inputs)).plan[0] == SCALED


def test_with_a_bias():
    def step(h, w, labels, mask, advantages, old, b):
        each = F.cross_entropy(
            F.linear(h, w, b).view(-1, CLASSES), labels.view(-1), reduction="none"
        )
        return (each * mask.view(-1)).sum() / mask.sum()

    inputs = (*problem(), torch.randn(CLASSES, dtype=torch.float64, requires_grad=True))
    assert only(check(step, inputs)).plan[0] == IN_THE_FORWARD
    inputs[1].requires_grad_(False)  # the bias is trained, its layer not
    assert only(check(step, inputs)).plan[0] == IN_THE_FORWARD


def test_logits_taken_back_with_a_bias():
    def step(h, w, labels, mask, advantages, old, b):
        each = F.cross_entropy(
            F.linear(h, w, b).view(-1, CLASSES), labels.view(-1), reduction="none"
        )
        return each.view(BATCH, -1).sum(-1).square().mean()

    inputs = (*problem(), torch.randn(CLASSES, dtype=torch.float64, requires_grad=True))
    assert only(check(step, inputs)).plan[0] == LOGITS


@pytest.mark.parametrize("function", [clipped, masked_mean, preferences])
def test_enabled(function):
    """By the other way in, and more than one backward of one graph."""
    inputs = problem()
    with compile_losses.enable():
        compiled = torch.compile(function)
        for factor in (1.0, -2.0):
            torch.testing.assert_close(
                outcome(compiled, inputs, factor), outcome(function, inputs, factor)
            )


@pytest.mark.parametrize("function", [clipped, masked_mean, of_shifted_logits])
def test_dynamic_shapes(function):
    compiled = torch.compile(function, backend="compile_losses", dynamic=True)
    for tokens in (18, 23, 40):
        inputs = problem(tokens=tokens)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(function, inputs))


def test_checkpointed():
    """The gradients are kept, not computed a second time."""

    def step(*inputs):
        return checkpoint(clipped, *inputs, use_reentrant=False)

    inputs = problem()
    assert only(check(step, inputs)).plan[0] == IN_THE_FORWARD


def check_two_models(step):
    inputs = problem()
    sites = check(step, inputs)
    assert sorted(site.plan[0] for site in sites) == [IN_THE_FORWARD, "kernel"]


def test_two_models():
    """The log-probabilities of a second model are known before those of the first."""

    def step(h, w, labels, mask, advantages, old):
        with torch.no_grad():
            reference = -losses(h * 0.9, w * 1.1, labels)
        logp = -losses(h, w, labels)
        penalty = torch.exp(reference - logp) - (reference - logp) - 1
        return ((penalty - logp * advantages) * mask).sum() / mask.sum()

    check_two_models(step)


def test_two_models_the_other_way_round():
    """What is computed after the losses is moved before them."""

    def step(h, w, labels, mask, advantages, old):
        logp = -losses(h, w, labels)
        with torch.no_grad():
            reference = -losses(h * 0.9, w * 1.1, labels)
        return ((torch.exp(reference - logp) + 3 * logp) * mask).sum() / mask.sum()

    check_two_models(step)


def test_called_by_name():
    """The op itself, unreduced, in a compiled step; memory is what it was chosen for."""

    def step(h, w, labels, mask, advantages, old):
        each = compile_losses.linear.linear_cross_entropy(h, w, labels, reduction="none")
        return (torch.exp(-each - old) * mask).sum() / mask.sum()

    def summed(h, w, labels, mask, advantages, old):
        each = compile_losses.linear.linear_cross_entropy(h, w, labels, reduction="none")
        return each.sum(-1).square().mean()

    for function in (step, summed):
        inputs = problem()
        compiled = torch.compile(function, backend="compile_losses")
        torch.testing.assert_close(outcome(compiled, inputs), outcome(function, inputs))


def test_no_logits_are_held(monkeypatch):
    """Of 8000 classes a chunk of 16 rows at a time, where the logits of all are 144 rows."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 18, HIDDEN, generator=generator, requires_grad=True)
    w = torch.randn(8000, HIDDEN, generator=generator, requires_grad=True)
    labels = torch.randint(8000, (8, 18), generator=generator)
    mask, advantages = torch.ones(8, 18), torch.randn(8, 1, generator=generator)
    old = torch.zeros(8, 18) - 9
    compiled = torch.compile(clipped, backend="compile_losses")

    def train():
        compiled(h, w, labels, mask, advantages, old).backward()

    train()
    assert largest_allocation(train) < 2 * 16 * 8000 * 4


#: Of a loss, a mask, an older log-probability and a weight for each sequence.
UNARY = {
    "exp": lambda x: torch.exp(-x),
    "square": lambda x: x * x,
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(0.5, 3.0),
    "detach": lambda x: x.detach(),
    "softplus": F.softplus,
    "log1p": lambda x: torch.log1p(x.abs()),
    "relu": lambda x: F.relu(x - 1),
    "half": lambda x: x.float().double(),
    "flat": lambda x: x.reshape(-1).reshape(x.shape),
}
BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "div": lambda a, b: a / (1 + b.abs()),
}
ACROSS = {
    "sum": lambda x: x - x.sum(-1, keepdim=True) / TOKENS,
    "mean": lambda x: x * x.mean(),
    "max": lambda x: x / x.detach().amax(),
    "roll": lambda x: x.roll(1, -1),
    "flip": lambda x: x * x.flip(0),
}


def drawn(seed, across):
    """A function of the losses that works row by row, or does not; and whether it rounds them.

    If the losses are rounded to float32, so are their gradients, and these are of another size if
    known factors are multiplied in later: both roundings are right.
    """
    draw = random.Random(seed)
    unary = [UNARY[draw.choice(list(UNARY))] for _ in range(4)]
    binary = [BINARY[draw.choice(list(BINARY))] for _ in range(3)]
    others = [draw.randrange(4) for _ in range(3)]
    mix = ACROSS[draw.choice(list(ACROSS))] if across else lambda x: x
    place = draw.randrange(3)

    def step(h, w, labels, mask, advantages, old):
        each = losses(h, w, labels)
        known = [mask, old, advantages.expand_as(mask), each]
        x = each
        for i in range(3):
            x = unary[i](x)
            if across and i == place:
                x = mix(x)
            x = binary[i](x, known[others[i]])
        return (unary[3](x) * mask + 0.1 * each).sum() / mask.sum()

    return step, UNARY["half"] in unary


def check_drawn(seed, across):
    """Compares with eager mode, or with stock where stock differs from it (seed 3, torch 2.11)."""
    torch._dynamo.reset()
    (function, rounds), inputs = drawn(seed, across), problem()

    def differing(results):
        for actual, expected in zip(ours, results, strict=True):
            size = expected.nan_to_num(0, 0, 0).abs().max() if rounds else 1.0
            try:
                torch.testing.assert_close(
                    actual, expected, rtol=1e-7, atol=1e-7 * float(size), equal_nan=True
                )
            except AssertionError as error:
                return f"{seed}: {error}"
        return None

    ours = outcome(torch.compile(function, backend="compile_losses"), inputs)
    if differing(outcome(function, inputs)):
        torch._dynamo.reset()
        found = differing(outcome(torch.compile(function), inputs))
        assert found is None, found
    sites = compile_losses.explain(function, *inputs).losses
    return {choice for site in sites for choice in site.plan}


@pytest.mark.parametrize("across", [False, True])
def test_drawn_functions(across):
    plans = set().union(*(check_drawn(seed, across) for seed in range(6)))
    assert (LOGITS if across else IN_THE_FORWARD) in plans


@pytest.mark.slow
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("first", [6, *range(100, 300, 20)])
def test_200_drawn_functions(first, across):
    for seed in range(first, first + 20):
        check_drawn(seed, across)


rows_with_grad = torch.ops.fused.linear_cross_entropy_rows_with_grad
exp = torch.ops.aten.exp.default
mul = torch.ops.aten.mul.Tensor


def of_rows(device, dtype=torch.float64, **options):
    (x, w, b), target = leaves(device, dtype)
    values = {"label_smoothing": 0.0, "softcap": None, "z_loss": 0.0, **options}
    arguments = (x.detach(), w.detach(), target, b.detach(), None, 0, -100, *values.values(), dtype)
    return (x, w, b), target, values, arguments


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}, {"z_loss": 1e-2}], ids=str
)
def test_known_gradients(options, device):
    tensors, target, values, arguments = of_rows(device, **options)
    x, w, b = tensors
    each = torch.ops.fused.linear_cross_entropy(x, w, target, linear_bias=b, reduction=0, **values)
    g = torch.randn_like(each)
    loss, *gradients = rows_with_grad(*arguments, True, True, True, *known_text(g))
    torch.testing.assert_close(loss, each)
    torch.testing.assert_close(tuple(gradients), torch.autograd.grad(each, tensors, g))


@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-2}], ids=str)
def test_function_of_the_losses(options, device):
    """Also where ignored rows are left out, with what is known of them."""
    tensors, target, values, arguments = of_rows(device, **options)
    x, w, b = tensors
    known = torch.randn(len(target), dtype=torch.float64, device=device)
    two = torch.full((), 2.0, dtype=torch.float64, device=device)
    text = encode(
        [
            (mul, (Operand(0), Operand(2)), {}),
            (torch.ops.aten.neg.default, (Operand(3),), {}),
            (exp, (Operand(4),), {}),
            (mul, (Operand(5), Operand(1)), {}),
        ],
        [6],
    )
    each = torch.ops.fused.linear_cross_entropy(x, w, target, linear_bias=b, reduction=0, **values)
    g = (torch.exp(-2 * each) * known).detach()
    loss, *gradients = rows_with_grad(*arguments, True, True, True, text, [known, two])
    torch.testing.assert_close(loss, each)
    torch.testing.assert_close(tuple(gradients), torch.autograd.grad(each, tensors, g))


def test_opcheck_of_rows(device):
    _, target, _, arguments = of_rows(device, torch.float32)
    text = encode([(exp, (Operand(0),), {})], [1])
    for needs in ((True, True, True), (True, False, False), (False, True, False)):
        torch.library.opcheck(rows_with_grad.default, (*arguments, *needs, text, []))
        ones = torch.ones(len(target), device=device)
        torch.library.opcheck(rows_with_grad.default, (*arguments, *needs, *known_text(ones)))


def test_errors_of_rows():
    *_, arguments = of_rows("cpu")
    needs = (True, True, True)
    text = encode([(exp, (Operand(0),), {})], [1])
    with pytest.raises(RuntimeError, match=r"expected reduction 0 \(none\).*, got 1"):
        rows_with_grad(*arguments[:5], 1, *arguments[6:], *needs, text, [])
    bad = json.dumps({"steps": [["aten.cumsum.default", [{"value": 0}, 0], {}]], "results": [1]})
    with pytest.raises(ValueError, match=r"row_function has aten.cumsum.default, which is no step"):
        rows_with_grad(*arguments, *needs, bad, [])


def test_what_is_no_function_of_rows():
    aten = torch.ops.aten
    assert encode([(aten.cumsum.default, (Operand(0), 0), {})], [1]) is None
    assert encode([(aten.sum.default, (Operand(0),), {})], [1]) is None
    assert encode([(aten.bernoulli.p, (Operand(0), 0.5), {})], [1]) is None
    assert encode([(aten.mul_.Tensor, (Operand(0), Operand(0)), {})], [1]) is None
    assert encode([(aten.mul.Tensor, (Operand(0), torch.ones(3)), {})], [1]) is None


def test_text_of_a_function():
    """Infinities, dtypes and what is known of some of the rows."""
    aten = torch.ops.aten
    text = encode(
        [
            (torch.ops.prims.convert_element_type.default, (Operand(0), torch.float64), {}),
            (aten.clamp.default, (Operand(3), -float("inf"), 2.5), {}),
            (aten.where.self, (Operand(1), Operand(4), Operand(2)), {}),
        ],
        [5],
    )
    known = torch.tensor([True, False, True, False]), torch.zeros(1, dtype=torch.float64)
    function = RowFunction(text, known)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (result,) = function(slice(0, 4), [x])
    assert result.tolist() == [1.0, 0.0, 2.5, 0.0]
    (result,) = function(slice(2, 4), [x[2:]])
    assert result.tolist() == [2.5, 0.0]
    kept = torch.tensor([0, 2])
    (result,) = function.keep(kept)(slice(0, 2), [x[kept]])
    assert result.tolist() == [1.0, 2.5]


def test_text_of_several_functions():
    """Of three values: one result is a step, one is none, one a number that is known."""
    text = encode([(torch.ops.aten.add.Tensor, (Operand(0), Operand(1)), {})], [4, None, 3])
    function = RowFunction(text, (torch.tensor(5.0),))
    x = torch.tensor([1.0, 2.0])
    first, second, third = function(slice(0, 2), [x, 10 * x, x])
    assert (first.tolist(), second, third.tolist()) == ([11.0, 22.0], None, [5.0, 5.0])
