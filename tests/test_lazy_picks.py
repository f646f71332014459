"""Rows that a mask or an index takes of lazy logits: rows of a head, to the next graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.lazy import LazyLogits
from compile_losses.report.explanation import explain_call
from tests.constants import set_constants
from tests.graphs import interpreted

ROWS, HIDDEN, CLASSES = 24, 8, 50
MASK = torch.arange(ROWS) % 3 > 0
PLACES = torch.tensor([3, 0, -1, 3, 7])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=2, least_elements=1, logits_bytes=1, part_of_weight=0)
    with interpreted(monkeypatch):
        yield


def leaves(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (ROWS, CLASSES)]
    return [x.requires_grad_() for x in made]


def labels(rows=ROWS):
    return torch.arange(rows) * 7 % CLASSES


def head(h, w):
    return F.linear(h, w)


def loss(x, y):
    return F.cross_entropy(x.reshape(-1, CLASSES), y.reshape(-1))


def lazily(function, value=True):
    options = {"lazy_logits": value, "inner_backend": "aot_eager"}
    return torch.compile(function, backend="compile_losses", options=options)


def results(program, compile, dtype=torch.float32):
    h, w = leaves(dtype)
    found = program(compile, h, w)
    return [*found, h.grad, w.grad]


def same(program, dtype=torch.float32):
    """Asserts that results and gradients are those without a compiler."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    tolerance = tolerance or {"rtol": 5e-2, "atol": 1e-2}
    found, expected = (results(program, c, dtype) for c in (lazily, lambda function: function))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            one, other = one.detach() + 0, other.detach() + 0
            torch.testing.assert_close(one, other, equal_nan=True, **tolerance)


PICKS = {
    "mask": lambda x: x[MASK],
    "mask, other dimensions whole": lambda x: x[MASK, :],
    "mask of two dimensions": lambda x: x.view(4, 6, CLASSES)[MASK.view(4, 6)],
    "mask of the first": lambda x: x.view(4, 6, CLASSES)[MASK[:4]],
    "mask of the second": lambda x: x.view(4, 6, CLASSES)[:, MASK[:6]],
    "places": lambda x: x[PLACES],
    "places of two dimensions": lambda x: x.view(4, 6, CLASSES)[PLACES % 4, PLACES % 6],
    "index_select": lambda x: x.index_select(0, PLACES % ROWS),
    "after a slice": lambda x: x[:-4][MASK[:-4]],
    "after a cast": lambda x: x.double()[MASK],
    "then a cast": lambda x: x[MASK].double(),
    "then a factor": lambda x: x[MASK] / 2,
    "then a slice": lambda x: x[MASK][1:-1],
    "twice": lambda x: x[MASK][PLACES],
    "none": lambda x: x[MASK & False],
    "masked_select": lambda x: selected(x, MASK[:, None]),
    "masked_select, expanded": lambda x: selected(x, MASK[:, None].expand_as(x)),
    "masked_select, broadcast": lambda x: selected(x.view(4, 6, CLASSES), MASK[:6, None]),
    "masked_select, all rows of some": lambda x: selected(
        x.view(4, 6, CLASSES), MASK[:4, None, None]
    ),
    "masked_select of a slice": lambda x: selected(x.view(4, 6, CLASSES)[:, 1:], MASK[1:6, None]),
    "masked_select, picked": lambda x: selected(x, MASK[:, None])[PLACES],
    "masked_select of none": lambda x: selected(x, MASK[:, None] & False),
    "masked_select, its size a number": lambda x: x.masked_select(MASK[:, None]).view(
        int(MASK.sum()), CLASSES
    ),
    "mask of elements, expanded": lambda x: x[MASK[:, None].expand_as(x)].view(-1, CLASSES),
}


def selected(x, mask):
    return x.masked_select(mask).view(-1, CLASSES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PICKS)
def test_the_next_graph_takes_the_head(name, dtype):
    def program(compile, h, w):
        lg = compile(head)(h, w)
        picked = PICKS[name](lg)
        value = compile(loss)(picked, labels(picked.shape[:-1].numel()))
        value.backward()
        if compile is lazily:
            assert isinstance(picked, LazyLogits)
            assert picked.is_unread()
            assert lg.is_unread()
        return [value, picked.detach(), lg.detach().sum()]

    same(program, dtype)


OTHERS = {
    "classes": lambda x: x[:, PLACES],
    "elements": lambda x: x[x > 0],
    "one number": lambda x: x[PLACES, PLACES],
    "rows and classes": lambda x: x[MASK][:, PLACES],
    "elements, the same of each row": lambda x: x.masked_select(
        MASK[:, None].expand_as(x).contiguous()
    ),
    "elements, selected": lambda x: x.masked_select(x > 0),
    "selected of classes": lambda x: x.masked_select(torch.arange(CLASSES) % 2 == 0),
    "selected by one number": lambda x: x.masked_select(torch.tensor(data=True)),
    "selected of more dimensions": lambda x: x.masked_select(MASK[:2, None, None]),
    "selected of rows that are repeated": lambda x: x[:1].masked_select(MASK[:, None]),
    "selected by a mask of a row's class": lambda x: x[:, :1].masked_select(MASK[:, None]),
    "read before": lambda x: x[MASK] * (x.sum() > -1e9),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_pick_of_rows(name):
    def program(compile, h, w):
        picked = OTHERS[name](compile(head)(h, w))
        value = picked.square().mean()
        value.backward()
        return [value, picked.detach()]

    same(program)


@pytest.mark.parametrize(
    "index", [MASK[:5], torch.tensor([ROWS]), torch.ones(ROWS, CLASSES + 1) > 0]
)
def test_wrong_indices(index):
    h, w = leaves()
    with pytest.raises(IndexError) as expected:
        head(h, w)[index]
    with pytest.raises(IndexError) as found:
        lazily(head)(h, w)[index]
    assert str(found.value) == str(expected.value)


def test_a_mask_that_changes_later():
    def program(compile, h, w):
        mask, places = MASK.clone(), PLACES.clone()
        lg = compile(head)(h, w)
        one, other = lg[mask], lg[places]
        mask.fill_(value=True)
        places.zero_()
        return [compile(loss)(one, labels(len(one))), one.detach(), other.logsumexp(-1)]

    same(program)


@pytest.mark.parametrize("changed", ["hidden", "weight"])
def test_a_head_that_changes_later(changed):
    h, w = leaves()
    picked = lazily(head)(h, w)[MASK]
    with torch.no_grad():
        (h if changed == "hidden" else w).mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place"):
        lazily(loss)(picked, labels(len(picked)))
    with pytest.raises(RuntimeError, match="was changed in place"):
        picked.sum()


WATCHED = {
    "of the logits": lambda lg, picked: lg,
    "of the picked": lambda lg, picked: picked,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", ["retain_grad", "hook", "autograd.grad", "afterwards"])
@pytest.mark.parametrize("name", WATCHED)
def test_gradients_that_are_asked_for(name, asked):
    def program(compile, h, w):
        lg = compile(head)(h, w)
        if asked == "retain_grad":
            lg.retain_grad()
        picked = lg[MASK]
        tensor, seen = WATCHED[name](lg, picked), []
        if asked == "retain_grad":
            picked.retain_grad()
        if asked == "hook":
            tensor.register_hook(lambda grad: seen.append(grad * 1) or 2 * grad)
        value = compile(loss)(picked, labels(len(picked)))
        if asked == "autograd.grad":
            return [value, *torch.autograd.grad(value, [tensor, h, w])]
        if asked == "afterwards":
            seen += torch.autograd.grad(value, [tensor], retain_graph=True)
        value.backward()
        return [value, *seen, *([tensor.grad] if asked == "retain_grad" else [])]

    same(program)


@pytest.mark.parametrize("pick", [torch.Tensor.__getitem__, lambda x, m: selected(x, m[:, None])])
def test_numbers_of_rows_that_change(pick):
    compiled = lazily(head), lazily(loss)
    for rows in (5, 17, 11):
        h, w = leaves()
        mask = torch.arange(ROWS) < rows
        values = []
        for first, second in (compiled, (head, loss)):
            picked = pick(first(h, w), mask)
            value = second(picked, labels(rows))
            values.append([value, *torch.autograd.grad(value, [h, w])])
        torch.testing.assert_close(*values)


def test_two_losses_of_other_rows():
    def program(compile, h, w):
        lg = compile(head)(h, w)
        one, other = lg[MASK], lg[~MASK]
        value = compile(loss)(one, labels(len(one))) + 2 * compile(loss)(other, labels(len(other)))
        value = value + lg[PLACES].exp().mean()
        value.backward()
        return [value]

    same(program)


def test_without_gradients():
    def program(compile, h, w):
        with torch.no_grad():
            picked = compile(head)(h, w)[MASK]
            return [compile(loss)(picked, labels(len(picked))), picked.argmax(-1)]

    same(program)


def test_auto_reads_the_numbers():
    h, w = leaves()
    value = loss(lazily(head, "auto")(h, w)[MASK], labels(int(MASK.sum())))
    expected = loss(head(h, w)[MASK], labels(int(MASK.sum())))
    found, right = (torch.autograd.grad(x, [h, w]) for x in (value, expected))
    torch.testing.assert_close(found, right)


def test_one_function_with_a_graph_break():
    """LLaDA's: the loss of masked tokens, in the function that makes the logits."""

    def step(h, w):
        return F.cross_entropy(F.linear(h, w)[MASK], labels()[MASK])

    inputs = leaves()
    (site,) = explain_call(step, inputs, options={"lazy_logits": True}).losses
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten")
    found, right = (torch.autograd.grad(f(*inputs), inputs) for f in (lazily(step), step))
    torch.testing.assert_close(found, right)
    (site,) = explain_call(step, inputs).losses
    assert "after the graph break in" in site.reason
