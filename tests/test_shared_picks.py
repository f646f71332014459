"""Several classes of each row that losses pick of a head's logits, under torch.compile."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.linear import linear_top_k_kl_div
from tests.linear_problems import largest_allocation
from tests.test_row_gradients import AGAIN, BATCH, CLASSES, IN_THE_FORWARD, LOGITS, TOKENS, problem
from tests.test_shared_logits import check, check_accuracy, entropy_of, outcome, sites_of

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")

COUNT = 5


def sparse_problem(dtype=torch.float64, *, frozen=False, tokens=TOKENS, count=COUNT):
    """Hidden states, weight, labels, a mask, a teacher's log-probabilities and their classes."""
    h, w, labels, mask, *_ = problem(dtype, frozen=frozen, tokens=tokens)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(BATCH, tokens, CLASSES, generator=generator, dtype=torch.float64)
    teacher, index = F.log_softmax(2 * logits, -1).topk(count, -1)
    index[:, ::3, -1] = index[:, ::3, 0]  # equal classes of a row
    return h, w, labels, mask, teacher.to(dtype), index


def masked_mean(each, mask):
    return (each * mask).sum() / mask.sum()


def cross_entropy_of_picks(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    return -(teacher.exp() * log_probs).sum(-1).mean()


def divergence_of_picks(h, w, labels, mask, teacher, index):
    """Of a teacher's stored log-probabilities."""
    log_probs = F.log_softmax(F.linear(h, w) / 2, dim=-1)
    student = torch.gather(log_probs, dim=-1, index=index)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def unreduced_divergence(h, w, labels, mask, teacher, index):
    student = F.linear(h, w).log_softmax(-1).gather(-1, index)
    each = F.kl_div(student, teacher, reduction="none", log_target=True)
    return masked_mean(each.sum(-1), mask)


def less_logsumexp(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    student = logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def with_hard_labels(h, w, labels, mask, teacher, index):
    """And the accuracy and an entropy, all of the same logits."""
    logits = F.linear(h, w)
    hard = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
    student = F.log_softmax(logits, -1).gather(-1, index)
    soft = (teacher.exp() * (teacher - student)).sum(-1)
    with torch.no_grad():
        hits = (logits.argmax(-1) == labels).double().mean()
    return 0.5 * hard + 0.5 * masked_mean(soft, mask) - 0.01 * entropy_of(logits).mean(), hits


def renormalised(h, w, labels, mask, teacher, index):
    """Both over the support: the logsumexp over all classes has no part in that."""
    student = F.log_softmax(F.linear(h, w).gather(-1, index), -1)
    teacher = F.log_softmax(teacher, -1)
    return masked_mean((teacher.exp() * (teacher - student)).sum(-1), mask)


def renormalised_log_probs(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w) / 0.7, -1).gather(-1, index)
    student = student - student.logsumexp(-1, keepdim=True)
    teacher = teacher - teacher.logsumexp(-1, keepdim=True)
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / mask.sum()


def reversed_divergence(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    return masked_mean((student.exp() * (student - teacher)).sum(-1), mask)


def with_a_tail(h, w, labels, mask, teacher, index):
    """The mass of all other classes is one class more."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index[..., 1:])
    tails = [torch.log1p(-x.exp().sum(-1).clamp(max=0.999)) for x in (student, teacher[..., 1:])]
    kept = (teacher[..., 1:].exp() * (teacher[..., 1:] - student)).sum(-1)
    return masked_mean(kept + tails[1].exp() * (tails[1] - tails[0]), mask)


def with_a_tail_beside(h, w, labels, mask, teacher, index):
    """The same in one tensor, as TRL has it."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index[..., 1:])

    def with_tail(log_probs):
        total = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([log_probs, torch.log(-torch.expm1(total))], -1)

    student, teacher = with_tail(student), with_tail(teacher[..., 1:])
    return masked_mean((teacher.exp() * (teacher - student)).sum(-1), mask)


def capped(h, w, labels, mask, teacher, index):
    logits = 5 * torch.tanh(F.linear(h, w) / 5)
    return -(teacher.exp() * F.log_softmax(logits, -1).gather(-1, index)).sum(-1).mean()


def of_shifted_rows(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)[:, :-1]
    student = F.log_softmax(logits, -1).gather(-1, index[:, 1:])
    hard = F.cross_entropy(logits.reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
    return hard - masked_mean((teacher[:, 1:].exp() * student).sum(-1), mask[:, 1:])


def of_flat_rows(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w).view(-1, CLASSES), -1)
    student = student.gather(1, index.flatten(0, 1))
    return -(teacher.flatten(0, 1).exp() * student).sum() / mask.sum()


def along_a_dimension(h, w, labels, mask, teacher, index):
    """torch.take_along_dim is a gather."""
    student = torch.take_along_dim(F.linear(h, w).log_softmax(-1), index, -1)
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def of_one_support(h, w, labels, mask, teacher, index):
    """The same classes of every row, expanded."""
    student = F.log_softmax(F.linear(h, w), -1)
    student = student.gather(-1, index[:1, :1].expand(BATCH, h.shape[1], -1))
    return -masked_mean(student.exp().sum(-1).log(), mask)


def both_ways(h, w, labels, mask, teacher, index):
    """The logits are read twice, at the same classes."""
    logits = F.linear(h, w)
    student = F.log_softmax(logits, -1).gather(-1, index)
    picked = logits.gather(-1, index)
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    return masked_mean(forward, mask) + 1e-3 * masked_mean(picked.square().sum(-1), mask)


def of_the_function(h, w, labels, mask, teacher, index):
    return linear_top_k_kl_div(h, w, teacher, index, temperature=1.5, renormalize=True)


def other_picks(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w), -1)
    other = (index + 1) % CLASSES
    return (log_probs.gather(-1, index) - 0.1 * log_probs.gather(-1, other)).square().mean()


def picks_of_some_rows(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    some = F.log_softmax(logits[:, 3:], -1).gather(-1, index[:, 3:])
    return entropy_of(logits).mean() - (teacher[:, 3:].exp() * some).mean()


#: What the forward can compute the gradients of.
BY_ROW = {
    f.__name__: f
    for f in (
        cross_entropy_of_picks, divergence_of_picks, unreduced_divergence, less_logsumexp,
        with_hard_labels, renormalised, renormalised_log_probs, reversed_divergence, with_a_tail,
        with_a_tail_beside,
        capped, of_shifted_rows, of_flat_rows, along_a_dimension, of_one_support, both_ways,
        other_picks, picks_of_some_rows,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_in_the_forward(name):
    inputs = sparse_problem()
    (site,) = check(BY_ROW[name], inputs)
    assert "several classes" in site.reason
    assert site.plan[0] == IN_THE_FORWARD


@pytest.mark.parametrize("name", BY_ROW)
def test_verified(name):
    inputs = sparse_problem()
    (site,) = check(BY_ROW[name], inputs, verify=True)
    assert "not verified" not in site.notes


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


@pytest.mark.parametrize("name", ["cross_entropy_of_picks", "with_hard_labels", "renormalised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(name, dtype):
    check_accuracy(BY_ROW[name], sparse_problem(dtype))


def of_other_rows(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    each = (student.exp() * teacher).sum(-1)
    return (each - each.mean()).square().mean()


def across_the_picks(h, w, labels, mask, teacher, index):
    """Each number depends on its neighbours in the row."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    return masked_mean(student.exp().cumsum(-1).square().sum(-1), mask)


def of_two_parts(h, w, labels, mask, teacher, index):
    """The first classes of each row beside the last, one of them by itself."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    first, second, rest = student.split([1, 1, COUNT - 2], -1)
    again = torch.cat([rest, first, second], -1).softmax(-1)
    return masked_mean((again * teacher).sum(-1) + (first * second)[..., 0], mask)


@pytest.mark.parametrize("function", [of_other_rows, across_the_picks, of_two_parts])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("options", "plan"), [({}, LOGITS), ({"prefer_memory": True}, AGAIN)])
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
    """Its likeliest classes are computed in the same step; only its own logits are held."""
    h, w, _, mask, _, _ = sparse_problem()
    other = torch.randn(CLASSES, h.shape[-1], dtype=h.dtype)

    def step(h, w):
        with torch.no_grad():
            teacher, index = F.log_softmax(F.linear(h, other), -1).topk(COUNT, -1)
        student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
        return masked_mean((teacher.exp() * (teacher - student)).sum(-1), mask)

    (site,) = [s for s in check(step, [h, w]) if s.status == "rewritten"]
    assert "several classes" in site.reason


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


def of_its_own_logits(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w), -1)
    own = log_probs.topk(COUNT, -1).indices
    return -masked_mean((teacher.exp() * log_probs.gather(-1, own)).sum(-1), mask)


def beside_its_own_argmax(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    best = logits.argmax(-1, keepdim=True)
    index = torch.cat([index[..., 1:], best], -1)
    return -masked_mean(F.log_softmax(logits, -1).gather(-1, index).sum(-1), mask)


def fewer_rows(h, w, labels, mask, teacher, index):
    """gather leaves out the last rows of each sequence, and the last sequence."""
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index[:-1, :-2])
    return -(teacher[:-1, :-2].exp() * student).sum()


def along_the_tokens(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    some = index.transpose(1, 2)[:, :3] % TOKENS  # [batch, 3, tokens]
    student = F.log_softmax(logits, -1).gather(1, some)
    return student.square().mean() + torch.logsumexp(logits, -1).mean()


def softmax_over_the_tokens(h, w, labels, mask, teacher, index):
    student = F.log_softmax(F.linear(h, w), 1).gather(-1, index)
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def logsumexp_over_the_tokens(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    student = logits.gather(-1, index) - logits.logsumexp(1, keepdim=True)[..., :COUNT]
    return -masked_mean((teacher.exp() * student).sum(-1), mask)


def classes_in_the_middle(h, w, labels, mask, teacher, index):
    log_probs = F.log_softmax(F.linear(h, w).transpose(1, 2), 1)
    student = log_probs.gather(1, index.transpose(1, 2))
    return -(teacher.transpose(1, 2).exp() * student).sum(1).mean()


def another_temperature(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    soft = F.log_softmax(logits / 2, -1).gather(-1, index)
    hard = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return hard - masked_mean((teacher.exp() * soft).sum(-1), mask)


def probabilities_of_picks(h, w, labels, mask, teacher, index):
    student = F.softmax(F.linear(h, w), -1).gather(-1, index)
    return (student - teacher.exp()).square().mean()


def shifted(h, w, labels, mask, teacher, index):
    picked = (F.linear(h, w) + 1.5).gather(-1, index)
    return (picked - teacher).square().mean()


def written_between(h, w, labels, mask, teacher, index):
    """The classes that are picked last are others, in the memory of the first."""
    logits, index = F.linear(h, w), index.clone()
    with torch.no_grad():
        first = F.log_softmax(logits, -1).gather(-1, index)
        index.add_(1).remainder_(CLASSES)
        last = F.log_softmax(logits, -1).gather(-1, index)
    return torch.logsumexp(logits, -1).mean(), first, last


def with_the_logits(h, w, labels, mask, teacher, index):
    logits = F.linear(h, w)
    student = F.log_softmax(logits, -1).gather(-1, index)
    return -(teacher.exp() * student).sum(-1).mean(), logits


def scattered(h, w, labels, mask, teacher, index):
    """A dense teacher that is 0 but for a few classes."""
    log_probs = F.log_softmax(F.linear(h, w), -1)
    dense = torch.zeros_like(log_probs).scatter(-1, index, teacher.exp())
    return -(dense * log_probs).sum(-1).mean()


NEAR_MISSES = (
    of_its_own_logits, beside_its_own_argmax, fewer_rows, along_the_tokens,
    softmax_over_the_tokens, logsumexp_over_the_tokens, classes_in_the_middle,
    another_temperature, probabilities_of_picks, shifted, written_between, with_the_logits,
)  # fmt: skip


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    inputs = sparse_problem()
    assert not any(site.status == "rewritten" for site in check(function, inputs))


def test_a_dense_teacher():
    check(scattered, sparse_problem())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (another_temperature, "reads other rows than the rest, or scales them otherwise"),
        (of_its_own_logits, "needs the logits"),
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
