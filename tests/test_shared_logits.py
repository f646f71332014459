"""Logits of a head that several losses and metrics read, under torch.compile: no logits."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses.explanation import explain_call
from compile_losses.sites import shorten
from tests.accuracy import assert_accurate
from tests.graphs import Compiled
from tests.linear_problems import largest_allocation
from tests.test_row_gradients import AGAIN, CLASSES, IN_THE_FORWARD, LOGITS, SCALED, problem

OP = "linear_row_statistics"

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


def logits_of(h, w):
    return F.linear(h, w)


def picked(logits, labels):
    """Log-probabilities as TRL computes them of float32 logits."""
    found = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
    return found - torch.stack([torch.logsumexp(sample, dim=-1) for sample in logits])


def picked_in_a_loop(logits, labels):
    """As TRL computes them of narrower logits."""
    rows = []
    for sample, index in zip(logits, labels, strict=True):
        all_classes = F.log_softmax(sample, dim=-1)
        rows.append(all_classes.gather(dim=-1, index=index.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def entropy_in_chunks(logits):
    """As TRL has it, a few rows at a time."""
    entropies = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(17, dim=0):
        log_probabilities = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(log_probabilities) * log_probabilities).sum(-1))
    return torch.cat(entropies, dim=0).reshape(logits.shape[:-1])


def entropy_of(logits):
    """As verl has it."""
    return torch.logsumexp(logits, -1) - (F.softmax(logits, -1) * logits).sum(-1)


def clipped(log_probabilities, mask, advantages, old):
    ratio = torch.exp(log_probabilities - old)
    each = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(each * mask).sum() / mask.sum()


def grpo_with_logged_entropy(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w) / 0.9, labels.clamp(min=0)
    log_probabilities = picked(logits, labels)
    with torch.no_grad():
        entropy = entropy_in_chunks(logits)
    return clipped(log_probabilities, mask, advantages, old), (entropy * mask).sum()


def grpo_in_loops(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    log_probabilities = picked_in_a_loop(logits, labels)
    entropy = entropy_in_chunks(logits)
    return clipped(log_probabilities, mask, advantages, old) - 0.01 * (entropy * mask).mean()


def ppo_with_entropy(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    log_probabilities = F.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    entropy = (entropy_of(logits) * mask).sum() / mask.sum()
    return clipped(log_probabilities, mask, advantages, old) - 0.01 * entropy


def token_accuracy(h, w, labels, mask, advantages, old):
    """As TRL's SFTTrainer logs it beside the model's loss."""
    shifted, targets = logits_of(h, w)[:, :-1].contiguous(), labels[:, 1:].contiguous()
    loss = F.cross_entropy(shifted.view(-1, CLASSES), targets.view(-1))
    with torch.no_grad():
        counted = targets != -100
        hits = ((shifted.argmax(dim=-1) == targets) & counted).sum()
    return loss, hits / counted.sum()


def with_z_loss(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)
    return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def with_shared_logsumexp(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    lse = torch.logsumexp(logits, dim=-1)
    log_probabilities = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - lse
    return -(log_probabilities * mask).sum() + 1e-2 * (lse**2 * mask).sum()


def smoothed_by_hand(h, w, labels, mask, advantages, old):
    """As fairseq has it."""
    lprobs = F.log_softmax(logits_of(h, w), -1).view(-1, CLASSES)
    target = labels.clamp(min=0).view(-1, 1)
    nll, smooth = -lprobs.gather(-1, target), -lprobs.sum(-1, keepdim=True)
    return 0.9 * nll.sum() + 0.1 / CLASSES * smooth.sum()


def categorical(h, w, labels, mask, advantages, old):
    actor = torch.distributions.Categorical(logits=logits_of(h, w), validate_args=False)
    gain = (actor.log_prob(labels.clamp(min=0)) * advantages).mean()
    return -gain - 0.01 * actor.entropy().mean()


def weighted_classes(h, w, labels, mask, advantages, old):
    """Also of classes in the second dimension, the maximum with its place, and detached."""
    logits = logits_of(h, w)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=h.dtype)
    loss = F.cross_entropy(logits.transpose(1, 2), labels, weight, reduction="mean")
    largest, place = logits.detach().max(-1)
    return loss, largest.mean(), (place == labels).double().mean()


def two_cross_entropies(h, w, labels, mask, advantages, old):
    """Of the same classes, one smoothed and summed, the other by row."""
    logits, flat = logits_of(h, w).flatten(0, 1), labels.flatten()
    each = F.cross_entropy(logits, flat, reduction="none")
    return (each.square() * mask.flatten()).mean() + F.cross_entropy(logits, flat, reduction="sum")


def metrics_of_some_rows(h, w, labels, mask, advantages, old):
    """A loss of transformers pads its labels, and metrics leave the last row out."""
    logits = logits_of(h, w)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1))
    with torch.no_grad():
        hits = (logits[..., :-1, :].argmax(-1) == labels[..., 1:]).double().mean()
    last = entropy_of(logits[:, -1])
    return loss + 0.1 * last.mean() + torch.logsumexp(logits, -1).transpose(0, 1)[3].sum(), hits


def entropies_of_transposed_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    entropy = entropy_of(logits.transpose(0, 1)[2:])  # [rows, batch]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + (entropy * mask.t()[2:]).mean()


def loss_of_some_rows(h, w, labels, mask, advantages, old):
    """Predictions are of all rows, and the last has no label."""
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return loss, logits.argmax(-1)


def smoothed_loss_of_some_rows(h, w, labels, mask, advantages, old):
    """Of every second row of one sample, beside a gradient of all rows."""
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits[1, ::2], labels[1, ::2], label_smoothing=0.2)
    return loss - 0.1 * (entropy_of(logits) * mask).mean()


def weighted_loss_of_transposed_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=h.dtype)
    some = logits.transpose(0, 1)[2:]
    loss = F.cross_entropy(some.flatten(0, 1), labels.t()[2:].flatten(), weight)
    return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def likelihoods_of_some_rows(h, w, labels, mask, advantages, old):
    """An answer behind a prompt, and the entropy of both."""
    logits = logits_of(h, w)
    answers = picked(logits[:, 2:], labels[:, 2:].clamp(min=0))
    return clipped(answers, mask[:, 2:], advantages, old[:, 2:]), entropy_of(logits).detach()


def entropy_alone(h, w, labels, mask, advantages, old):
    return (entropy_of(5 * torch.tanh(logits_of(h, w) / 5)) * mask).mean()


def of_scaled_hidden(h, w, labels, mask, advantages, old):
    """A layer with a bias for each class, temperature and soft-cap."""
    logits = 3 * torch.tanh((logits_of(h, w) + advantages.sum()) / 6)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + entropy_of(logits).mean()


def classes_of_two_sets_of_rows(h, w, labels, mask, advantages, old):
    """As ORPO has it: likelihoods of all answers, and a loss of the first alone."""
    logits = logits_of(h, w)
    answers = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())
    return F.cross_entropy(logits[0], labels[0]) + 0.1 * answers


def other_classes(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w).flatten(0, 1)
    labels = labels.clamp(min=0).flatten()
    other = (labels + 1) % CLASSES
    return F.cross_entropy(logits, labels) - 0.1 * F.cross_entropy(logits, other)


def other_ignored_classes(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w).flatten(0, 1), labels.clamp(min=0).flatten()
    one = F.cross_entropy(logits, labels, ignore_index=3)
    return one + F.cross_entropy(logits, labels, ignore_index=5)


#: What the forward can compute the gradients of.
BY_ROW = {
    f.__name__: f
    for f in (
        grpo_with_logged_entropy, grpo_in_loops, ppo_with_entropy, token_accuracy, with_z_loss,
        with_shared_logsumexp, smoothed_by_hand, categorical, weighted_classes,
        two_cross_entropies, metrics_of_some_rows, entropies_of_transposed_rows, entropy_alone,
        loss_of_some_rows, smoothed_loss_of_some_rows, weighted_loss_of_transposed_rows,
        classes_of_two_sets_of_rows, other_classes, other_ignored_classes,
    )
}  # fmt: skip


def outcome(function, inputs, trained=None):
    """What a step returns, and its gradients.

    Args:
        trained: how many inputs, the first ones, have gradients that are looked at; by default all.
    """
    leaves = [t for t in inputs[:trained] if t.requires_grad]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    return [*(r.detach() for r in results), *torch.autograd.grad(results[0], leaves)]


def sites_of(function, inputs, **options):
    report = explain_call(function, tuple(inputs), options=options)
    return [site for site in report.losses if site.op == OP]


def check(function, inputs, *, trained=None, tolerance=1e-11, **options):
    """Compares a compiled step with torch's; returns its sites of a head."""
    compiled = Compiled(function, **options)
    expected, found = (outcome(f, inputs, trained) for f in (function, compiled))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    return [site for site in compiled.sites if site.op == OP]


def check_accuracy(function, inputs, trained=None):
    """By the one accuracy rule, against float64."""
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    wide = [t.detach().requires_grad_(i.requires_grad) for t, i in zip(wide, inputs, strict=True)]
    compiled = torch.compile(function, backend="compile_losses")
    ours, eager = (outcome(f, inputs, trained) for f in (compiled, function))
    for results in zip(ours, eager, outcome(function, wide, trained), strict=True):
        assert_accurate(*results)


@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_in_the_forward(name):
    inputs = problem()
    (site,) = check(BY_ROW[name], inputs)
    assert site.plan[0] == IN_THE_FORWARD
    assert site.reason.startswith("absorbed a linear layer")


@pytest.mark.parametrize("name", ["grpo_in_loops", "two_cross_entropies", "token_accuracy"])
def test_explain_tells_of_the_compiled_step(name):
    inputs = problem()

    def told(sites):
        return [(s.op, s.status, s.reason, s.plan, s.details, s.notes) for s in sites]

    assert told(check(BY_ROW[name], inputs)) == told(sites_of(BY_ROW[name], inputs))


@pytest.mark.parametrize("name", BY_ROW)
def test_verified(name):
    inputs = problem()
    (site,) = check(BY_ROW[name], inputs, verify=True)
    assert "not verified" not in site.notes


@pytest.mark.parametrize("name", BY_ROW)
def test_frozen_heads(name):
    inputs = problem(frozen=True)
    (site,) = check(BY_ROW[name], inputs)
    assert site.plan[0] in (IN_THE_FORWARD, SCALED)


@pytest.mark.parametrize("name", ["ppo_with_entropy", "token_accuracy", "with_z_loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(name, dtype):
    check_accuracy(BY_ROW[name], problem(dtype))


def test_without_gradients():
    """A metric beside a loss in evaluation."""
    inputs = [t.detach() for t in problem()]
    expected = token_accuracy(*inputs)
    compiled = torch.compile(token_accuracy, backend="compile_losses")
    torch.testing.assert_close(compiled(*inputs), expected)
    (site,) = sites_of(token_accuracy, inputs)
    assert site.plan[0] == "kernel"


def of_other_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    entropy = entropy_of(logits)
    spread = (entropy - entropy.mean()).square().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + spread


@pytest.mark.parametrize("function", [of_other_rows, likelihoods_of_some_rows])
@pytest.mark.parametrize(("options", "plan"), [({}, LOGITS), ({"prefer_memory": True}, AGAIN)])
def test_gradients_of_other_rows(options, plan, function):
    inputs = problem()
    (site,) = check(function, inputs, **options)
    assert site.plan[0] == plan


def test_gradients_from_outside():
    """Several results that are differentiated together."""
    h, w, labels, *_ = problem()

    def step(h, w):
        logits = logits_of(h, w)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each, entropy_of(logits), torch.logsumexp(logits, -1)

    compiled = torch.compile(step, backend="compile_losses")
    results = [function(h, w) for function in (compiled, step)]
    gradients = [torch.autograd.grad([r.cos().sum() for r in result], (h, w)) for result in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_in_a_checkpoint():
    def step(h, w, *rest):
        return checkpoint(with_z_loss, h, w, *rest, use_reentrant=False)

    check(step, problem())


def test_two_symbols():
    """Of a batch and a length that are both symbols."""
    compiled = torch.compile(ppo_with_entropy, backend="compile_losses", dynamic=True)
    for tokens in (18, 25):
        inputs = problem(tokens=tokens)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(ppo_with_entropy, inputs))


def test_no_logits_are_held():
    """Of 8000 classes a chunk of 16 rows at a time, where the logits of all are 144 rows."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 18, 8, generator=generator, requires_grad=True)
    w = torch.randn(8000, 8, generator=generator, requires_grad=True)
    labels = torch.randint(8000, (8, 18), generator=generator)
    mask, advantages = torch.ones(8, 18), torch.randn(8, 1, generator=generator)
    old = torch.zeros(8, 18) - 9
    for function in (ppo_with_entropy, grpo_with_logged_entropy):
        compiled = torch.compile(function, backend="compile_losses")

        def train(compiled=compiled):
            result = compiled(h, w, labels, mask, advantages, old)
            (result[0] if isinstance(result, tuple) else result).backward()

        train()
        assert largest_allocation(train) < 2 * 16 * 8000 * 4


def test_returned_lazily():
    inputs = problem()

    def step(h, w, labels, *rest):
        logits = logits_of(h, w)
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        with torch.no_grad():
            hits = (logits.argmax(-1) == labels).sum()
        return loss, hits, logits

    compiled = torch.compile(step, backend="compile_losses", options={"lazy_logits": True})
    loss, hits, logits = compiled(*inputs)
    assert type(logits) is not torch.Tensor
    expected = step(*inputs)
    torch.testing.assert_close((loss, hits, logits + 0), expected)
    (site,) = explain_call(step, inputs, options={"lazy_logits": False}).losses
    assert "its logits are returned" in site.reason


# Near misses: what must stay as it is, or be right.


def probabilities_are_used(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), F.softmax(logits, -1)


def another_temperature(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + entropy_of(logits / 2).mean()


def gradient_of_the_maximum(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.amax(-1).mean()


def over_the_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + torch.logsumexp(logits, 1).mean()


def half_detached(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss - (F.softmax(logits.detach(), -1) * F.log_softmax(logits, -1)).sum(-1).mean()


def half_without_gradients(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    with torch.no_grad():
        probabilities = F.softmax(logits, -1)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss - (probabilities * F.log_softmax(logits, -1)).sum(-1).mean()


def shifted(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w) + 1.5
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + torch.logsumexp(logits, -1).mean()


def picked_of_bounded(h, w, labels, mask, advantages, old):
    """A bound matters where a class is picked that has no probability."""
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    bounded = F.log_softmax(logits, -1).clamp(min=torch.finfo(h.dtype).min)
    picked = bounded.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits, -1).mean() - (picked * mask).mean()


def of_sigmoids(h, w, labels, mask, advantages, old):
    """A soft-cap whose addend softmax drops, and a logsumexp does not."""
    logits = 30 * torch.sigmoid(logits_of(h, w) / 7.5)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + torch.logsumexp(logits, -1).mean()


def picked_by_themselves(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    best = logits.argmax(-1)
    return -(F.log_softmax(logits, -1).gather(-1, best.unsqueeze(-1)).squeeze(-1) * mask).sum()


def written_between(h, w, labels, mask, advantages, old):
    """The classes that are picked last are others, in the memory of the first."""
    logits, labels = logits_of(h, w).flatten(0, 1), labels.clamp(min=0).flatten()
    with torch.no_grad():
        first = F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1))
        labels.add_(1).remainder_(CLASSES)
        last = F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1))
    return torch.logsumexp(logits, -1).mean(), first, last


def in_place(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    logits = logits.detach().clone()
    logits[..., 3] = 100.0
    return loss, logits.argmax(-1)


def used_before(h, w, labels, mask, advantages, old):
    """The labels depend on what is read of the logits."""
    logits = logits_of(h, w)
    entropy = entropy_of(logits).detach()
    chosen = torch.where(entropy > entropy.mean(), labels, -100)
    return F.cross_entropy(logits.flatten(0, 1), chosen.flatten())


def learned_temperature_of_one(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    scaled = logits * w[0, 0].exp()
    return F.cross_entropy(scaled.flatten(0, 1), labels.flatten()) + entropy_of(logits).mean()


NEAR_MISSES = (
    probabilities_are_used, another_temperature, gradient_of_the_maximum, over_the_rows,
    half_detached, half_without_gradients, shifted, of_sigmoids, picked_by_themselves,
    written_between, in_place, used_before, learned_temperature_of_one, picked_of_bounded,
)  # fmt: skip


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    inputs = problem()
    assert check(function, inputs) == []


def test_a_scaled_layer():
    """A number for all logits that is known only when the step runs is a shift, too."""
    check(of_scaled_hidden, problem())


def test_reasons():
    report = compile_losses.explain(another_temperature, *problem())
    reasons = {site.reason for site in report.losses}
    assert any("reads other rows than the rest, or scales" in reason for reason in reasons)


def test_without_the_op_that_heads_need(monkeypatch):
    """Who leaves out heads leaves out these as well."""
    options = {"losses": ["cross_entropy"]}
    assert sites_of(token_accuracy, problem(), **options) == []


#: Of the statistics of each row.
STATISTICS = {
    "log-probability": lambda logits, labels: (
        -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
            labels.shape
        )
    ),
    "entropy": lambda logits, labels: entropy_of(logits),
    "logsumexp": lambda logits, labels: torch.logsumexp(logits, -1),
    "sum": lambda logits, labels: F.log_softmax(logits, -1).sum(-1),
    "argmax": lambda logits, labels: (logits.argmax(-1) == labels).to(logits.dtype),
    "maximum": lambda logits, labels: logits.detach().amax(-1),
}
UNARY = (torch.exp, torch.tanh, torch.square, torch.neg, lambda x: x.clamp(-3, 2), F.softplus)
BINARY = (torch.add, torch.mul, torch.minimum, torch.sub, lambda a, b: torch.where(a > b, a, b))


@pytest.mark.parametrize("seed", range(12))
def test_drawn_functions(seed):
    """Of two to four statistics, by row or across rows."""
    draw = random.Random(seed)
    names = draw.sample(list(STATISTICS), draw.randint(2, 4))
    if not {"log-probability", "entropy", "logsumexp", "sum"} & set(names):
        names.append("entropy")
    unary = [draw.choice(UNARY) for _ in names]
    binary = [draw.choice(BINARY) for _ in names]
    across = draw.random() < 0.3

    def step(h, w, labels, mask, advantages, old):
        logits, labels = logits_of(h, w), labels.clamp(min=0)
        total = old
        for name, one, two in zip(names, unary, binary, strict=True):
            statistic = one(STATISTICS[name](logits, labels) / 8)
            if across:
                statistic = statistic - statistic.mean()
            total = two(total, statistic)
        return (total * mask).sum() / mask.sum() + 0.1 * entropy_of(logits).mean()

    inputs = problem()
    assert len(check(step, inputs)) == 1


def test_each_reason_once():
    """Readers of logits that stay: the reason says who needs them, with the line, and once."""

    def step(h, w, labels, *_):
        logits = logits_of(h, w)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        second = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())
        return loss + second + entropy_of(logits).mean(), logits.std()

    compiled, inputs = Compiled(step), problem()
    torch.testing.assert_close(outcome(compiled, inputs), outcome(step, inputs))
    line = f"std ({shorten(__file__)}:{step.__code__.co_firstlineno + 4}) needs the logits"
    losses = [site for site in compiled.sites if site.op == "cross_entropy"]
    assert len(losses) == 2
    for site in losses:
        clauses = site.reason.split("; ")
        assert len(set(clauses)) == len(clauses), site.reason
        assert site.reason.count(line) == 1, site.reason
