"""Lazy logits that leave one compiled graph and are used by eager code or the next graph.

Each program does the same without a compiler, or raises an error that docs/heads.md names.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils import dlpack
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses.lazy import LazyLogits
from tests.constants import set_constants
from tests.graphs import interpreted
from tests.lazy_programs import LATER

ROWS, HIDDEN, CLASSES = 24, 8, 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=2, least_elements=1, logits_bytes=1, part_of_weight=0)
    with interpreted(monkeypatch):
        yield


def leaves():
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, HIDDEN, generator=generator) for n in (ROWS, CLASSES)]
    return [x.requires_grad_() for x in made]


def labels():
    return torch.arange(ROWS) * 7 % CLASSES


def head(h, w):
    return F.linear(h, w)


def loss(x, y):
    return F.cross_entropy(x, y)


def written(a, b):
    a.mul_(2)
    return (a + b).sum()


def of_two(a, b):
    return a.square().mean() + b.exp().mean()


def with_options(compiled):
    options = {"lazy_logits": True, "inner_backend": "aot_eager"}
    return torch.compile(compiled, backend="compile_losses", options=options)


def same(program):
    """Asserts that a program's results and gradients are those without a compiler, both ways in."""

    def run(compile):
        h, w = leaves()
        results = program(compile, h, w)
        tensors = [x for x in results if isinstance(x, torch.Tensor)]
        rest = [x for x in results if not isinstance(x, torch.Tensor)]
        return [*tensors, h.grad, w.grad], rest

    expected, expected_rest = run(lambda function: function)

    def check(found, rest):
        assert rest == expected_rest
        for one, other in zip(found, expected, strict=True):
            if other is None:
                assert one is None
                continue
            one, other = one.detach(), other.detach()
            torch.testing.assert_close(one + 0, other + 0, rtol=1e-5, atol=1e-6)

    check(*run(with_options))
    torch._dynamo.reset()
    with compile_losses.enable(lazy_logits=True):
        check(*run(torch.compile))


def logits_of(compile, h, w):
    lg = compile(head)(h, w)
    assert isinstance(lg, LazyLogits) or compile not in (with_options, torch.compile)
    return lg


VIEWS = {
    "itself": lambda x: x,
    "rows": lambda x: x[:-4],
    "detached": lambda x: x.detach(),
    "transpose": lambda x: x.t(),
    "three dimensions": lambda x: x.view(4, -1, CLASSES),
    "inner rows": lambda x: x.view(4, -1, CLASSES)[:, :-1],
}
READS = {
    "argmax": lambda x: x.argmax(-1),
    "sum": lambda x: x.sum(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()).clone(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("view", VIEWS)
def test_view_of_logits_that_were_read(view, read):
    def program(compile, h, w):
        lg = logits_of(compile, h, w)
        before = VIEWS[view](lg)
        number = READS[read](lg)
        after = VIEWS[view](lg)
        total = compile(of_two)(before, after)
        if total.requires_grad:
            total.backward()
        return number, total

    same(program)


@pytest.mark.parametrize("is_read", [False, True])
def test_accuracy_beside_the_loss_of_shifted_rows(is_read):
    def program(compile, h, w):
        lg, y = logits_of(compile, h, w), labels()
        shifted = lg[:-1]
        accuracy = (lg.argmax(-1) == y).float().mean() if is_read else 0
        found = compile(loss)(shifted, y[1:])
        found.backward()
        return found, accuracy

    same(program)


MADE = {
    "cast": lambda x: x.double(),
    "clone": lambda x: x.clone(),
    "division": lambda x: x / 2,
    "view": lambda x: x[:],
    "two steps": lambda x: (x * 2).double(),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("of", ["logits", "made"])
@pytest.mark.parametrize("kind", ["changes", "watches", "retains", "node", "post", "multi"])
@pytest.mark.parametrize("made", MADE)
def test_hook(made, kind, of):
    def program(compile, h, w):
        lg, seen = logits_of(compile, h, w), []
        result = MADE[made](lg)
        hooked = lg if of == "logits" else result
        if kind == "changes":
            hooked.register_hook(lambda grad: 10 * grad)
        elif kind == "watches":
            hooked.register_hook(lambda grad: seen.append(grad.detach().clone()))
        elif kind == "node":
            hooked.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
        elif kind == "post":
            hooked.grad_fn.register_hook(lambda grads, _: (grads[0], *grads[1:]))
        elif kind == "multi":
            torch.autograd.graph.register_multi_grad_hook(
                [hooked], lambda grads: seen.append(grads[0].detach().clone())
            )
        else:
            hooked.retain_grad()
        found = compile(loss)(result, labels())
        found.backward()
        return found, hooked.grad if kind == "retains" else None, *seen

    same(program)


@pytest.mark.parametrize("wanted", ["logits", "both", "view", "inputs"])
def test_gradient_of_the_logits(wanted):
    def program(compile, h, w):
        lg = logits_of(compile, h, w)
        taken = lg[1:]
        found = compile(loss)(taken, labels()[1:])
        if wanted == "inputs":
            found.backward(inputs=[h])
            return (found,)
        tensors = {"logits": [lg], "both": [lg, h, w], "view": [taken]}[wanted]
        return found, *torch.autograd.grad(found, tensors)

    same(program)


@pytest.mark.parametrize("kind", ["changes", "retains"])
def test_hook_after_the_loss(kind):
    def program(compile, h, w):
        lg = logits_of(compile, h, w)
        found = compile(loss)(lg, labels())
        if kind == "changes":
            lg.register_hook(lambda grad: 10 * grad)
        else:
            lg.retain_grad()
        found.backward()
        return found, lg.grad if kind == "retains" else None

    same(program)


def test_gradient_of_a_graph_that_cannot_run_again_is_an_error():
    def noisy(x, y):
        return F.cross_entropy(x + torch.rand(()), y)

    h, w = leaves()
    lg = with_options(head)(h, w)
    found = with_options(noisy)(lg, labels())
    with pytest.raises(RuntimeError, match=r"asked for.*random numbers"):
        torch.autograd.grad(found, lg)


PAIRS = {
    "overlapping rows": lambda x: (x[:16], x[8:]),
    "view and base": lambda x: (x[:16], x),
    "base and view": lambda x: (x, x[:1]),
    "twice": lambda x: (x, x),
    "transposes": lambda x: (x[:20, :20], x[:20, :20].t()),
    "apart": lambda x: (x[:12], x[12:]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_written_alias(pair, is_read, is_detached):
    def both(a, b):
        a.mul_(2)
        return (a.sum() + b.square().sum(),)

    def program(compile, h, w):
        lg = logits_of(compile, h, w)
        lg = lg.detach() if is_detached else lg.clone()
        if is_read:
            lg.sum()
        (found,) = compile(both)(*PAIRS[pair](lg))
        if found.requires_grad:
            found.backward()
        return found, lg

    same(program)


@pytest.mark.parametrize("writes", ["result", "base", "graph"])
def test_returned_view_that_is_written(writes):
    def returning(x, y):
        return F.cross_entropy(x, y), x[:4], x.t()

    def program(compile, h, w):
        lg = logits_of(compile, h, w).detach()
        found, rows, flipped = compile(returning)(lg, labels())
        if writes == "result":
            rows.fill_(3)
        elif writes == "base":
            lg[:2] = 5
        else:
            compile(written)(rows, rows)
        return found, rows, flipped, lg

    same(program)


STORAGES = {
    "from_dlpack": lambda x: torch.from_dlpack(x) * 2,
    "share_memory_": lambda x: x.share_memory_() * 2,
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride()) * 2,
    "set_ of a tensor": lambda x: torch.empty(0).set_(x) * 2,
    "nbytes": lambda x: torch.tensor(x.untyped_storage().nbytes()),
    "storage's list": lambda x: torch.tensor(x.untyped_storage().tolist()[:8]),
    "data_ptr": lambda x: torch.tensor(x.data_ptr() != 0),
    "typed storage": lambda x: torch.tensor(list(x.storage())[:3]),
    "memoryview": lambda x: torch.tensor(memoryview(x.numpy())[0, 0]),
    "deepcopy": lambda x: copy.deepcopy(x) * 2,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)) * 2,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("view", ["itself", "rows", "transpose"])
@pytest.mark.parametrize("kind", STORAGES)
def test_storage(kind, view):
    def program(compile, h, w):
        lg = VIEWS[view](logits_of(compile, h, w).detach())
        return STORAGES[kind](lg), lg

    same(program)


def test_data_is_set():
    def program(compile, h, w):
        lg = logits_of(compile, h, w)
        lg.data = torch.full_like(lg, 0.25)
        found = compile(loss)(lg, labels())
        found.backward()
        return found, lg

    same(program)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_is_set(view):
    def program(compile, h, w):
        x = view(logits_of(compile, h, w)).detach()
        other = torch.ones_like(x.clone())
        x.set_(other)
        found = compile(of_two)(x, x * 2)
        other.mul_(3)
        return found, x

    same(program)


@pytest.mark.parametrize("part", ["hidden state", "weight"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_head_is_given_other_data(view, part):
    """Averaged weights that take the place of others, as for an evaluation."""

    def program(compile, h, w):
        x = view(logits_of(compile, h, w))
        before = h if part == "hidden state" else w
        kept = before.data
        before.data = kept * 0.5
        found = compile(of_two)(x, x)
        before.data = kept
        if found.requires_grad:
            found.backward()
        return found, x

    same(program)


def test_head_is_given_other_data_before_a_replay():
    h, w = leaves()
    lg = with_options(head)(h, w)
    value = with_options(loss)(lg, labels())
    w.data = w.data * 0.5
    with pytest.raises(RuntimeError, match="given other data since"):
        torch.autograd.grad(value, lg)


@pytest.mark.parametrize("is_whole", [True, False])
def test_graph_that_is_compiled_in_a_checkpoint(is_whole):
    """What is saved while it is compiled is none of the checkpoint's."""

    def program(compile, h, w):
        def both(h, w):
            return compile(loss)(logits_of(compile, h, w), labels())

        if is_whole:
            value = checkpoint(both, h, w, use_reentrant=False)
        else:
            lg = logits_of(compile, h, w)
            value = checkpoint(compile(loss), lg, labels(), use_reentrant=False)
        value.backward()
        return (value,)

    same(program)


def test_unfrozen_head():
    """A graph that takes a frozen head leaves a product out: a trained one needs another."""

    def ours(function, graphs):
        def note(gm, inputs):
            graphs.append(gm)
            return gm

        options = {"lazy_logits": True, "inner_backend": note}
        return torch.compile(function, backend="compile_losses", options=options)

    (h, w), firsts, seconds = leaves(), [], []
    first, second = ours(head, firsts), ours(loss, seconds)
    for is_trained in (False, True, False, True):
        w.requires_grad_(is_trained)
        second(first(h, w), labels()).backward()
    assert (len(firsts), len(seconds)) == (2, 2)


def test_layout():
    h, w = leaves()
    lazy, plain = with_options(head)(h, w), F.linear(h, w)
    for each in ("dtype", "shape", "device", "is_leaf", "requires_grad", "layout"):
        assert getattr(lazy, each) == getattr(plain, each)
    assert lazy.stride() == plain.stride()


def test_function_that_takes_the_memory_unseen():
    """A function of C++ that calls no op gets an error, or the logits once they are read."""
    h, w = leaves()
    lg = with_options(head)(h, w).detach()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        dlpack.to_dlpack(lg)
    lg.sum()
    assert torch.equal(torch.from_dlpack(dlpack.to_dlpack(lg)), F.linear(h, w))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("view", ["itself", "inner rows", "detached"])
@pytest.mark.parametrize("later", LATER)
def test_graph_of_another_compiler(later, view, is_read, backend):
    def program(compile, h, w):
        lg = logits_of(compile, h, w)
        if is_read:
            lg.sum()
        x = VIEWS[view](lg)
        torch.manual_seed(0)
        function = LATER[later]
        other = function if compile not in (with_options, torch.compile) else None
        other = other or torch.compile(function, backend=backend)
        made = other(x, torch.zeros(x.shape[:-1], dtype=torch.long))
        made = made if isinstance(made, tuple) else (made,)
        total = sum(each.sum() for each in made if each.is_floating_point())
        if total.requires_grad:
            total.backward()
        return *made, lg

    same(program)


EVALUATED = {"backend": "compile_losses", "options": {"lazy_logits": True}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", [None, -100])
def test_perplexity_of_torchmetrics(ignored, dtype):
    """It breaks the graph at its mask, and so before it at its call. The logits are not held."""
    perplexity = pytest.importorskip("torchmetrics.functional.text").perplexity

    def step(h, w, y):
        with torch.no_grad():
            return perplexity((h @ w.t())[None], y[None], ignore_index=ignored)

    compiled = torch.compile(step, **EVALUATED)
    for rows in (ROWS, ROWS + 4, ROWS + 8):  # from the second one on it is a symbol
        h = torch.randn(rows, HIDDEN).to(dtype)
        w, y = torch.randn(CLASSES, HIDDEN).to(dtype), torch.arange(rows) * 7 % CLASSES
        if ignored is not None:
            y[::3] = ignored
        torch.testing.assert_close(
            compiled(h, w, y), step(h, w, y).to(torch.float32), rtol=2e-2, atol=0, check_dtype=False
        )
    sites = compile_losses.explain(compiled, h, w, y).losses
    assert [site.op for site in sites] == ["linear_row_statistics"]
    assert "probability of a class" in sites[0].reason


def test_evaluated_logits():
    """Of a graph without a loss they wait, and few rows of them are computed by themselves."""
    h, w = leaves()

    def model(h, w):
        return F.linear(h, w)

    with torch.no_grad():
        logits = torch.compile(model, **EVALUATED)(h, w)
        assert isinstance(logits, LazyLogits)
        last = logits[-1:].softmax(-1)
        assert logits.is_unread()
        torch.testing.assert_close(last, model(h, w)[-1:].softmax(-1))
        torch.testing.assert_close(logits.exp(), model(h, w).exp())
        changed = torch.compile(model, **EVALUATED)(h, w)
        w.add_(1)
        with pytest.raises(RuntimeError, match="the head's weight was changed in place"):
            changed.exp()


def test_logits_of_inference_mode():
    """They could not be computed later as tensors that autograd takes."""
    h, w = (leaf.detach() for leaf in leaves())

    def model(h, w):
        return F.linear(h, w)

    with torch.inference_mode():
        assert type(torch.compile(model, **EVALUATED)(h, w)) is torch.Tensor
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, **EVALUATED)
        assert isinstance(compiled(h, w), LazyLogits)
    with torch.inference_mode():
        assert type(compiled(h.clone(), w.clone())) is torch.Tensor
