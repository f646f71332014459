"""Random small training steps through all passes: the result is eager's, whatever was rewritten."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")

ROWS, WIDTH, CLASSES = 6, 10, 8


def head(rng):
    """What feeds a loss, as a function of x and weight: a product, a leaf, pointwise ops, views."""
    return rng.choice(
        [
            lambda x, w: x @ w,
            lambda x, w: x[:, :CLASSES],
            lambda x, w: x[:, :CLASSES].contiguous(),
            lambda x, w: F.gelu(x @ w),
            lambda x, w: (x @ w) * 0.7,
            lambda x, w: torch.cat([x @ w, x @ w], 1)[:, 1 : CLASSES + 1],
            lambda x, w: (x @ w).view(2, -1, CLASSES).view(-1, CLASSES),
            lambda x, w: (w.t() @ x.t()).t(),
            lambda x, w: F.layer_norm(x @ w, (CLASSES,)),
            lambda x, w: (x @ w).double().float(),
            lambda x, w: torch.tanh(x @ w / 3) * 3 + x[:, :CLASSES],
            lambda x, w: x[:, :CLASSES].detach() + w.sum(),
        ]
    )


def squared_error(rng):
    difference = rng.choice([lambda p, t: p - t, lambda p, t: t - p, lambda p, t: p + (-t)])
    square = rng.choice(
        [lambda d: d**2, lambda d: d * d, lambda d: d.square(), lambda d: d.abs().pow(2)]
    )
    reduce = rng.choice(
        [
            lambda s: s.mean(),
            lambda s: s.sum() / s.numel(),
            lambda s: s.sum(dim=1).mean(),
            lambda s: 0.5 * s.mean(dim=-1).mean(),
            lambda s: s.mean(dim=0).sum() / CLASSES,
            lambda s: s.clamp(max=0.5).mean(),
            lambda s: (s * 2).sum(),
            lambda s: (s * 1).add_(1).mean(),
        ]
    )
    whole = rng.choice([None, None, None, lambda d: d.norm() ** 2, lambda d: d.norm()])
    if whole is not None:
        return lambda p, t, *_: whole(difference(p, t))
    return lambda p, t, *_: reduce(square(difference(p, t)))


def written_difference(rng):
    """A function of the difference as people write it, or nearly: constants may not agree."""
    beta, other = rng.choice([0.3, 1.0, 2.0]), rng.choice([0.3, 1.0, 2.0])
    constants = beta, rng.choice([beta, beta, other])
    d = rng.choice([lambda p, t: (p - t).abs(), lambda p, t: torch.abs(t - p)])
    inside = rng.choice([lambda d, b: d < b, lambda d, b: d <= b, lambda d, b: ~(d >= b)])
    huber = rng.random() < 0.5

    def where(d):
        quadratic = 0.5 * d**2 if huber else 0.5 * d * d / constants[0]
        linear = constants[1] * (d - 0.5 * beta) if huber else d - 0.5 * constants[1]
        return torch.where(inside(d, beta), quadratic, linear)

    def clamped(d):
        q = d.clamp(max=constants[0])
        return 0.5 * q**2 + constants[1] * (d - q)

    body = rng.choice([where, clamped, lambda d: d, lambda d: d.clamp(max=50), F.relu])
    weight = rng.choice(
        [
            lambda e, t: e,
            lambda e, t: e * t.abs(),
            lambda e, t: e * (t > 0),
            lambda e, t: e / t.exp(),
        ]
    )
    reduce = rng.choice(
        [
            lambda e: e.mean(),
            lambda e: e.sum(1).mean(),
            lambda e: (e.mean(1) * e.new_tensor(0.5)).sum(),
            lambda e: e.flatten().sum() / len(e),
        ]
    )
    return lambda p, t, c, w: reduce(weight(body(d(p, t)), t))


def written_rows(rng):
    """Cross entropy and divergences as people write them, or nearly: over rows by mistake, eps."""
    dim = rng.choice([1, 1, 1, 0])
    eps = rng.choice([0.0, 0.0, 1e-3])
    temperature = rng.choice([1.0, 2.0])

    def log_p(p):
        if eps:
            return (p.softmax(dim) + eps).log()
        return rng_log(p / temperature if temperature != 1 else p)

    rng_log = rng.choice(
        [
            lambda p: p.log_softmax(dim),
            lambda p: p.softmax(dim).log(),
            lambda p: p - p.logsumexp(dim, keepdim=True),
        ]
    )
    pick = rng.choice(
        [
            lambda x, c: x.gather(1, c[:, None]).squeeze(1),
            lambda x, c: x[torch.arange(len(c)), c],
            lambda x, c: (F.one_hot(c, CLASSES) * x).sum(1),
            lambda x, c: -F.nll_loss(x, c, reduction="none"),
        ]
    )
    reduce = rng.choice(
        [
            lambda e: -e.mean(),
            lambda e: -(e * e.new_ones(len(e))).sum() / 3,
            lambda e: e.exp().sum(),
        ]
    )

    def divergence(p, t, c, w):
        q = (t / temperature).softmax(dim)
        return (q * (q.log() - log_p(p))).sum(1).mean()

    def soft(p, t, c, w):
        return -(t.softmax(1) * log_p(p)).sum(dim).mean()

    return rng.choice([lambda p, t, c, w: reduce(pick(log_p(p), c)), divergence, soft])


def loss(rng):
    """A loss of prediction, target, classes and class weights."""
    reduction = rng.choice(["mean", "sum", "none"])
    weighted, ignored = rng.random() < 0.3, rng.choice([-100, 2])
    smoothing = rng.choice([0.0, 0.2])
    log = rng.choice([lambda p: (p.abs() + 0.1).log(), lambda p: F.log_softmax(p, -1)])
    unreduced = rng.choice([torch.mean, torch.sum])
    function = rng.choice(
        [
            lambda p, t, c, w: F.mse_loss(p, t, reduction=reduction),
            lambda p, t, c, w: F.smooth_l1_loss(p, t, reduction=reduction, beta=0.4),
            lambda p, t, c, w: F.huber_loss(p, t, reduction=reduction, delta=0.6),
            lambda p, t, c, w: F.kl_div(log(p), t.softmax(-1), reduction=reduction),
            lambda p, t, c, w: F.cross_entropy(
                p, c, w if weighted else None, ignore_index=ignored, reduction=reduction,
                label_smoothing=smoothing,
            ),
            lambda p, t, c, w: F.cross_entropy(p, c, reduction=reduction),
            squared_error(rng),
            written_difference(rng),
            written_difference(rng),
            written_rows(rng),
            written_rows(rng),
            lambda p, t, c, w: F.l1_loss(p, t, reduction=reduction),
            lambda p, t, c, w: F.mse_loss(
                p, t, reduction=reduction, weight=(w * t if weighted else w.expand(p.shape)).abs(),
            ),
            lambda p, t, c, w: F.huber_loss(p, t, reduction=reduction, weight=w * p.detach()),
            lambda p, t, c, w: F.binary_cross_entropy_with_logits(
                p, t.sigmoid(), w if weighted else None, reduction=reduction,
                pos_weight=w if smoothing else None,
            ),
        ]
    )  # fmt: skip

    def scalar(p, t, c, w):
        value = function(p, t, c, w)
        return value if value.dim() == 0 else unreduced(value)

    return scalar


def term(rng):
    """One loss with what surrounds it: other readers of its input, mutations, a no_grad copy."""
    prediction, other, value = head(rng), head(rng), loss(rng)
    learned_target, read_again, mutated, validated = (rng.random() < 0.25 for _ in range(4))
    factor = rng.choice([1.0, 0.3, -2.0])

    def function(x, weight, target, classes, class_weight):
        p = prediction(x, weight)
        t = other(x, weight) if learned_target else target
        total = factor * value(p, t, classes, class_weight)
        if read_again:
            total = total + p.sin().sum()
        if mutated:
            q = p * 1.0
            difference = q.detach() - target
            total = total + F.mse_loss(q.detach(), target) + (difference**2).mean()
            difference.add_(1)
            q.mul_(2)
            total = total + q.sum()
        if validated:
            with torch.no_grad():
                total = total + F.mse_loss(x @ weight, target)
        return total, p

    return function


def program(seed):
    rng = random.Random(seed)
    terms = [term(rng) for _ in range(rng.randint(1, 3))]
    returns_prediction = rng.random() < 0.3

    def step(*inputs):
        values, predictions = zip(*(function(*inputs) for function in terms), strict=True)
        return sum(values), predictions[-1] if returns_prediction else values[0]

    return step


def run(seed, function):
    """The loss, what else is returned, and both gradients; or torch's refusal of the program."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    x, weight = draw(ROWS, WIDTH).requires_grad_(), draw(WIDTH, CLASSES).requires_grad_()
    classes = torch.randint(CLASSES, (ROWS,), generator=generator)
    value, returned = function(x, weight, draw(ROWS, CLASSES), classes, draw(CLASSES).abs() + 0.5)
    if not value.requires_grad:
        return [value, returned]
    factor = random.Random(seed).choice([1.0, 1.0, 3.0, -0.5])
    # An input that does not count has no gradient in eager mode, and one of zeros in a graph.
    gradients = torch.autograd.grad(
        value * factor, (x, weight), allow_unused=True, materialize_grads=True
    )
    return [value.detach(), returned.detach().clone(), *gradients]


def check(seed):
    torch._dynamo.reset()
    function = program(seed)
    options = random.Random(seed).choice([{}, {"inner_backend": "aot_eager"}])
    expected = run(seed, function)
    compiled = torch.compile(function, backend="compile_losses", fullgraph=True, options=options)
    actual = run(seed, compiled)
    torch.testing.assert_close(
        actual, expected, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda m: f"seed {seed}: {m}"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(8))
def test_fuzz(seed):
    check(seed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [*range(8, 24), 122])
def test_fuzz_without_code(seed, no_code):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 500))
def test_fuzz_more(seed):
    check(seed)
