"""Several classes of each row that losses pick of a head's logits, under torch.compile."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.corpus.picks import (
    BY_ROW,
    COUNT,
    NEAR_MISSES,
    across_the_picks,
    another_temperature,
    cross_entropy_of_picks,
    divergence_of_picks,
    masked_mean,
    of_its_own_logits,
    of_other_rows,
    of_the_function,
    renormalised,
    reversed_divergence,
    scattered,
    sparse_problem,
    with_hard_labels,
)
from tests.corpus.rows import BATCH, CLASSES, TOKENS
from tests.corpus.shared import entropy_of
from tests.heads import AGAIN, IN_THE_FORWARD, LOGITS, check, check_accuracy, outcome, sites_of
from tests.linear_problems import largest_allocation

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_in_the_forward(name):
    inputs = sparse_problem()
    (site,) = check(BY_ROW[name], inputs, verify=True)
    assert "several classes" in site.reason
    assert site.plan[0] == IN_THE_FORWARD
    assert "not verified" not in site.notes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BY_ROW)
def test_frozen_heads(name):
    inputs = sparse_problem(frozen=True)
    (site,) = check(BY_ROW[name], inputs)
    assert site.plan[0] == IN_THE_FORWARD


@pytest.mark.parametrize("count", [TOKENS, 1, 2, CLASSES])
def test_counts(count):
    """Also where the classes of a row are as many as the tokens, or all."""
    inputs = sparse_problem(count=count)
    for function in (with_hard_labels, reversed_divergence, renormalised):
        check(function, inputs)


def test_function_of_this_package():
    check(of_the_function, sparse_problem())
    check(of_the_function, sparse_problem(count=1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["cross_entropy_of_picks", "with_hard_labels", "renormalised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(name, dtype):
    check_accuracy(BY_ROW[name], sparse_problem(dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("options", "plan"), [({}, LOGITS), ({"prefer_memory": True}, AGAIN)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("function", [of_other_rows, across_the_picks])
def test_gradients_in_the_backward(options, plan, frozen, function):
    inputs = sparse_problem(frozen=frozen)
    (site,) = check(function, inputs, **options)
    assert site.plan[0] == plan


@pytest.mark.parametrize("options", [{}, {"prefer_memory": True}], ids=str)
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradients_from_outside(softcap, options):
    """Several results that are differentiated together, with the logits or twice without."""
    h, w, labels, _, _, index = sparse_problem()

    def step(h, w):
        logits = F.linear(h, w)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each, logits.log_softmax(-1).gather(-1, index), entropy_of(logits)

    compiled = torch.compile(step, backend="compile_losses", options=options)
    results = [function(h, w) for function in (compiled, step)]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad([r.cos().sum() for r in result], (h, w)) for result in results]
    torch.testing.assert_close(*gradients)


def test_without_gradients():
    inputs = [t.detach() for t in sparse_problem()]
    check_value = torch.compile(with_hard_labels, backend="compile_losses")
    torch.testing.assert_close(check_value(*inputs), with_hard_labels(*inputs))
    (site,) = sites_of(with_hard_labels, inputs)
    assert site.plan[0] == "kernel"


def test_symbols():
    """Of a batch and a length that are symbols; their number of classes is one, too."""
    compiled = torch.compile(with_hard_labels, backend="compile_losses", dynamic=True)
    for tokens in (18, 25):
        inputs = sparse_problem(tokens=tokens)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(with_hard_labels, inputs))


def test_symbols_of_rows_alone():
    compiled = torch.compile(with_hard_labels, backend="compile_losses")
    compile_losses.counters().clear()
    for tokens in (18, 25, 31):
        inputs = sparse_problem(tokens=tokens)
        for tensor in inputs[:1] + inputs[2:]:
            torch._dynamo.mark_dynamic(tensor, 1)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(with_hard_labels, inputs))
    assert compile_losses.counters()["rewritten"]["linear_row_statistics"] == 1


def test_symbols_of_the_function():
    compiled = torch.compile(of_the_function, backend="compile_losses", dynamic=True)
    for tokens in (18, 25):
        inputs = sparse_problem(tokens=tokens)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(of_the_function, inputs))


def test_no_logits_are_held():
    """Of 8000 classes a chunk of 16 rows at a time, where the logits of all are 144 rows."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 18, 8, generator=generator, requires_grad=True)
    w = torch.randn(8000, 8, generator=generator, requires_grad=True)
    index = torch.randint(8000, (8, 18, COUNT), generator=generator)
    teacher = torch.randn(8, 18, COUNT, generator=generator).log_softmax(-1)
    mask = torch.ones(8, 18)
    for function in (divergence_of_picks, renormalised, reversed_divergence):
        compiled = torch.compile(function, backend="compile_losses")

        def train(compiled=compiled):
            compiled(h, w, None, mask, teacher, index).backward()

        train()
        assert largest_allocation(train) < 2 * 16 * 8000 * 4


def test_teacher_in_the_graph():
    """Its likeliest classes are computed in the same step, and no logits are held."""
    h, w, _, mask, _, _ = sparse_problem()
    other = torch.randn(CLASSES, h.shape[-1], dtype=h.dtype)

    def step(h, w):
        with torch.no_grad():
            teacher, index = F.log_softmax(F.linear(h, other), -1).topk(COUNT, -1)
        student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
        return masked_mean((teacher.exp() * (teacher - student)).sum(-1), mask)

    sites = check(step, [h, w])
    assert [site.status for site in sites] == ["rewritten"] * 2
    assert any("several classes" in site.reason for site in sites)
    assert any("classes of the largest logits" in site.reason for site in sites)


def test_classes_out_of_bounds():
    h, w, labels, mask, teacher, index = sparse_problem()
    for wrong in (-1, CLASSES):
        index[1, 2, 3] = wrong
        for function in (
            cross_entropy_of_picks,
            torch.compile(cross_entropy_of_picks, backend="compile_losses"),
        ):
            with pytest.raises((IndexError, RuntimeError), match=f"{wrong} is out of bounds"):
                function(h, w, labels, mask, teacher, index)


# Near misses: what must stay as it is, or be right.


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    inputs = sparse_problem()
    sites = check(function, inputs, inner_backend="eager")
    assert not any(site.status == "rewritten" for site in sites)


def test_a_dense_teacher():
    check(scattered, sparse_problem())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (another_temperature, "reads other rows than the rest, or scales them otherwise"),
        (of_its_own_logits, "what its losses read besides is made of its logits"),
    ],
)
def test_reasons(function, reason):
    report = compile_losses.explain(function, *sparse_problem())
    texts = [site.reason for site in report.losses]
    assert any(reason in text for text in texts), texts


UNARY = (torch.exp, torch.tanh, torch.square, torch.neg, lambda x: x.clamp(-3, 2), F.softplus)
BINARY = (torch.add, torch.mul, torch.minimum, torch.sub, lambda a, b: torch.where(a > b, a, b))
#: Of the numbers of each row, some of them with other rows or in another order.
OF_ROWS = (
    lambda x, mask: x.softmax(-1),
    lambda x, mask: x - x.logsumexp(-1, keepdim=True),
    lambda x, mask: x * x.sum(-1, keepdim=True),
    lambda x, mask: x - x.amax(-1, keepdim=True),
    lambda x, mask: torch.cat([x, x.sum(-1, keepdim=True)], -1),
    lambda x, mask: torch.cat([x, x], -1),
    lambda x, mask: x[..., 1:],
    lambda x, mask: x.masked_fill(mask.unsqueeze(-1) == 0, 0.5),
    lambda x, mask: x.flip(-1),
    lambda x, mask: x - x.mean(1, keepdim=True),
    lambda x, mask: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda x, mask: x.reshape(x.shape[0], -1).cumsum(-1).view(x.shape) / 50,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(16))
def test_drawn_functions(seed):
    """Of the numbers of each row, and of other statistics."""
    draw = random.Random(seed)
    unary = [draw.choice(UNARY) for _ in range(3)]
    of_rows = [draw.choice(OF_ROWS[: 8 if seed % 4 else None]) for _ in range(2)]
    binary = [draw.choice(BINARY) for _ in range(2)]
    hard = draw.random() < 0.5

    def step(h, w, labels, mask, teacher, index):
        logits = F.linear(h, w)
        student = logits.log_softmax(-1).gather(-1, index) / 4
        student = of_rows[0](unary[0](student), mask)
        if student.shape == teacher.shape:
            student = binary[0](student, teacher)
        each = of_rows[1](unary[1](student), mask).sum(-1)
        each = binary[1](unary[2](each / 8), entropy_of(logits) if hard else mask)
        total = (each * mask).sum() / mask.sum()
        if hard:
            total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return total

    # As many classes as tokens, batches or neither: shapes that could be taken for each other.
    inputs = sparse_problem(count=draw.choice((BATCH, COUNT, TOKENS)))
    (site,) = check(step, inputs)
    assert site.status == "rewritten"
