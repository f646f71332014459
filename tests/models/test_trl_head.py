"""TRL's fused head and ours in its place, call by call: results and gradients are as accurate."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses import known_heads, switches
from compile_losses.known_heads import doors
from tests import ROOT
from tests.accuracy import assert_accurate

trl = pytest.importorskip("trl", reason="pip install .[models]")

NAME = "trl's ChunkedLogProbFunction"
ROWS, HIDDEN, CLASSES = 24, 16, 70
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OPTIONS = {
    "plain": (1.0, None, 1.0),
    "temperature": (0.7, None, 1.0),
    "gemma": (1.0, 30.0, 1.0),
    "granite": (1.0, None, 1 / 8),
    "all": (1.3, 5.0, 0.0625),
}

pytestmark = pytest.mark.usefixtures("chunks")


@pytest.fixture
def head():
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    doors.watch()
    assert NAME not in doors.left
    return ChunkedLogProbFunction


def problem(dtype, device="cpu", bias=False):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).to(device).requires_grad_()

    target = torch.randint(CLASSES, (ROWS,), generator=generator).to(device)
    return draw(ROWS, HIDDEN), draw(CLASSES, HIDDEN), draw(CLASSES) if bias else None, target


def outcome(function, given, *options, outputs=ALL):
    """The results, and the gradients of a function of log-probabilities and entropies."""
    h, w, b, _ = given
    results = [r for r in function(*given, *options, outputs) if r is not None]
    log_probs, *entropy = [r for r in results if r.requires_grad]
    factors = torch.linspace(-1, 2, ROWS, device=h.device)
    loss = (log_probs * factors).sum() + sum((0.3 * e * factors).sum() for e in entropy)
    leaves = [x for x in (h, w, b) if x is not None and x.requires_grad]
    return [r.detach() for r in results], torch.autograd.grad(loss, leaves)


def by_logits(h, w, b, target, temperature, chunk_size, softcap, scale, outputs):
    """The same from all logits."""
    z = F.linear(h, w, b) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = F.log_softmax(z, -1)
    found = {
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": z.mean(-1).detach(),
        "is_top1": z.argmax(-1) == target,
    }
    picked = log_p.gather(-1, target[:, None]).squeeze(-1)
    return picked, *(value for name, value in found.items() if name in outputs)


def check(head, given, options, *, outputs=ALL, compiled=False):
    theirs = outcome(head.apply, given, options[0], 64, *options[1:], outputs=outputs)
    wide = [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad)
        for x in given[:3]
    ]
    exact = outcome(by_logits, (*wide, given[3]), options[0], 64, *options[1:], outputs=outputs)
    before = switches.counters()["known heads"][NAME]
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(lambda *a: head.apply(*a), backend="compile_losses", fullgraph=True)
        ours = outcome(step, given, options[0], 64, *options[1:], outputs=outputs)
    else:
        with compile_losses.enable():
            ours = outcome(head.apply, given, options[0], 64, *options[1:], outputs=outputs)
        assert switches.counters()["known heads"][NAME] == before + 1
    for part in (0, 1):
        assert len(ours[part]) == len(theirs[part]) == len(exact[part])
        for i, (a, b, c) in enumerate(zip(ours[part], theirs[part], exact[part], strict=True)):
            if a.dtype == torch.bool:
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
            else:
                assert_accurate(a, b, c, f"{('result', 'gradient')[part]} {i}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_eager(dtype, name, head, device):
    check(head, problem(dtype, device, bias=name == "all"), OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled(name, head, device, no_code):
    check(head, problem(torch.float32, device, bias=name == "all"), OPTIONS[name], compiled=True)


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "is_top1"), ("mean_logits",)])
def test_some_outputs(outputs, head):
    check(head, problem(torch.float32), OPTIONS["all"], outputs=outputs)


@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden", "head"])
def test_frozen(frozen, head):
    given = problem(torch.float32)
    given[frozen].requires_grad_(False)
    check(head, given, OPTIONS["plain"])


def test_autocast(head):
    """Products in bfloat16 of weights in float32; the copy is smaller than TRL's buffers."""
    given = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        check(head, given, OPTIONS["plain"])


def test_ties_and_nan(head):
    """The target is the first of equal logits, or it is not the largest; none of nan is."""
    h = torch.tensor([[1.0], [1.0], [0.0], [torch.nan]])
    w = torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    given = (h, w, None, torch.tensor([1, 2, 0, 0]), 1.0, 2, None, 1.0, ("is_top1",))
    expected = head.apply(*given)[-1]
    assert expected.tolist() == [True, False, True, False]
    with compile_losses.enable():
        assert torch.equal(head.apply(*given)[-1], expected)


def test_no_rows(head):
    given = [x[:0] if x is not None and len(x) == ROWS else x for x in problem(torch.float32)]
    with compile_losses.enable():
        found = head.apply(*given, 1.0, 32, None, 1.0, ALL)
        found[0].sum().backward()
    assert [tuple(each.shape) for each in found] == [(0,)] * 5


def test_rows_of_the_table():
    assert len({(head.module, head.name) for head in known_heads.HEADS}) == len(known_heads.HEADS)


@pytest.mark.slow
def test_switched_on_by_the_environment():
    """Without a compilation: the import of the head switches on what it needs."""
    code = f"""
import sys, torch, _compile_losses_autoload
_compile_losses_autoload.autoload()
assert "compile_losses" not in sys.modules
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
h, w, t = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
ChunkedLogProbFunction.apply(h, w, None, t, 1.0, 8)
import compile_losses
assert compile_losses.counters()["known heads"][{NAME!r}] == 1
"""
    variables = {**os.environ, "COMPILE_LOSSES_ENABLE": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)


def test_other_numbers_of_rows(head, no_code):
    """One graph for all of them."""
    torch._dynamo.reset()

    def step(h, w, t):
        return head.apply(h, w, None, t, 1.0, 64, None, 1.0, ALL)[0].sum()

    compiled = torch.compile(step, backend="compile_losses", dynamic=True, fullgraph=True)
    before = switches.counters()["rewritten"]["linear_row_statistics"]
    h, w, _, target = problem(torch.float32)
    for rows in (20, 11, 7):
        given = (h[:rows].detach().requires_grad_(), w, target[:rows])
        torch.testing.assert_close(compiled(*given), step(*given))
    assert switches.counters()["rewritten"]["linear_row_statistics"] == before + 1
