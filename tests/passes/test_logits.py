"""From logits back to the layer that makes them: what the op takes in its place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.heads.head import NotAbsorbedError
from compile_losses.recognize.heads.logits import OutsideError, find_logits, is_made_of, logits_of
from compile_losses.recognize.match import Match
from tests.passes import decisions
from tests.passes.graphs import dynamo, evaluate, numbers, recognizer

CLASSES = 7


def given(dtype=torch.float64):
    h, w, b = torch.randn(2, 5, 3), torch.randn(CLASSES, 3), torch.randn(CLASSES)
    return [t.to(dtype).requires_grad_() for t in (h, w, b)]


PADDING = torch.arange(CLASSES) > 4

#: Each is exactly what the described op computes; those with a number added differ by it.
ABSORBED = {
    "layer": lambda h, w, b: F.linear(h, w, b),
    "view": lambda h, w, b: F.linear(h, w, b).view(-1, CLASSES),
    "last rows": lambda h, w, b: F.linear(h, w)[:, 1:],
    "one row of each": lambda h, w, b: F.linear(h, w, b)[:, -1],
    "unsqueezed": lambda h, w, b: F.linear(h, w, b).unsqueeze(1),
    "unsqueezed behind": lambda h, w, b: F.linear(h, w, b).unsqueeze(3),
    "squeezed": lambda h, w, b: F.linear(h, w, b)[:1].squeeze(0),
    "transposed": lambda h, w, b: F.linear(h, w, b).transpose(1, 2),
    "permuted": lambda h, w, b: F.linear(h, w, b).permute(2, 0, 1),
    "picked rows": lambda h, w, b: F.linear(h, w, b).view(-1, CLASSES)[torch.tensor([3, 1, 1])],
    "picked rows by index_select": lambda h, w, b: F.linear(h, w, b).index_select(
        1, torch.tensor([3, 1, 1])
    ),
    "picked by two indices": lambda h, w, b: F.linear(h, w, b)[
        torch.tensor([1, 0]), torch.tensor([4, 2])
    ],
    "factor": lambda h, w, b: 0.3 * F.linear(h, w, b),
    "divisor": lambda h, w, b: F.linear(h, w, b) / 0.7,
    "two factors": lambda h, w, b: 3 * F.linear(h, w, b) / 2,
    "learned factor": lambda h, w, b: F.linear(h, w, b) * w[0, 0],
    "learned divisor": lambda h, w, b: F.linear(h, w) / b[:1],
    "factor of each row": lambda h, w, b: F.linear(h, w) * h[..., :1],
    "factor of each class": lambda h, w, b: F.linear(h, w, b) * b,
    "divisor of each class": lambda h, w, b: F.linear(h, w, b) / (1 + b**2),
    "addend": lambda h, w, b: F.linear(h, w) + b,
    "addend subtracted": lambda h, w, b: F.linear(h, w) - b,
    "second addend": lambda h, w, b: F.linear(h, w, b) + 2 * b,
    "second addend subtracted": lambda h, w, b: F.linear(h, w, b) - 2 * b,
    "addend, then factor": lambda h, w, b: (F.linear(h, w) + b) * 0.5,
    "factor, then addend": lambda h, w, b: F.linear(h, w) * 0.5 + b,
    "addend of transposed": lambda h, w, b: F.linear(h, w).transpose(1, 2) + b[:, None],
    "first classes": lambda h, w, b: F.linear(h, w, b)[..., :5],
    "some classes": lambda h, w, b: F.linear(h, w, b)[..., 2:6],
    "mask": lambda h, w, b: F.linear(h, w, b).masked_fill(PADDING, -1e3),
    "mask by where": lambda h, w, b: torch.where(PADDING, -1e3, F.linear(h, w)),
    "kept by where": lambda h, w, b: torch.where(~PADDING, F.linear(h, w, b), -1e3),
    "factor, then mask": lambda h, w, b: (F.linear(h, w, b) * 3).masked_fill(PADDING, -8.0),
    "classes picked": lambda h, w, b: F.linear(h, w, b)[..., torch.tensor([1, 2])],
    "classes from the end": lambda h, w, b: F.linear(h, w, b)[..., torch.tensor([-1, 2])],
    "classes selected": lambda h, w, b: F.linear(h, w).index_select(2, torch.tensor([1, 0, 3])),
    "soft-cap": lambda h, w, b: 5 * torch.tanh(F.linear(h, w, b) / 5),
    "tanh": lambda h, w, b: torch.tanh(F.linear(h, w, b)),
    "turned over": lambda h, w, b: -4 * torch.tanh(F.linear(h, w, b) / 4),
    "soft-cap and factors": lambda h, w, b: 2 * (3 * torch.tanh(F.linear(h, w, b) * 0.4)),
}
SHIFTED = {
    "number added": lambda h, w, b: F.linear(h, w, b) + 3,
    "number added to a soft-cap": lambda h, w, b: 2 * torch.tanh(F.linear(h, w, b)) - 3,
    "sigmoid": lambda h, w, b: 6 * torch.sigmoid(F.linear(h, w, b) / 3),
}


def logits(function, inputs):
    found = dynamo(function, *inputs)
    found_by, root = recognizer(found.gm)
    return found, root, logits_of(root, found_by.replay)


@pytest.mark.parametrize("name", [*ABSORBED, *SHIFTED])
def test_absorbed(name):
    found, root, made = logits({**ABSORBED, **SHIFTED}[name], given())
    known = numbers(found)
    input, weight, bias = (evaluate(v, known) for v in (made.input, made.weight, made.bias))
    result = torch.einsum("...h,ch->...c", input.movedim(made.class_dim, -1), weight)
    result = result if bias is None else result + bias
    if made.softcap is not None:
        result = made.softcap * torch.tanh(result / made.softcap)
    difference = result.movedim(-1, made.class_dim) - known[root]
    assert made.is_shifted == (name in SHIFTED)
    expected = difference.flatten()[0].expand_as(difference) if made.is_shifted else 0 * difference
    torch.testing.assert_close(difference, expected, rtol=1e-12, atol=1e-12)
    copies = made.weight.node is not made.head.weight.node or not made.weight.whole
    assert made.copies_weight == copies
    decisions.check("logits", name, made.absorbed or ["nothing"])


def test_way_back():
    _, root, made = logits(lambda h, w, b: (F.linear(h, w) / 2).view(-1, CLASSES), given())
    assert made.way == [root, root.all_input_nodes[0], made.head.node]


def test_casts():
    _, _, made = logits(lambda h, w, b: F.linear(h, w, b).float(), given(torch.bfloat16))
    assert made.cast is torch.float32
    assert made.absorbed == ["a cast from bfloat16"]
    # A power of two is as exact before the product is rounded.
    _, _, made = logits(lambda h, w, b: F.linear(h, w).float() * 4, given(torch.bfloat16))
    assert "a factor of 4" in made.absorbed
    assert made.scale == 1
    # Another factor would round the input. The scale of the product rounds nothing else.
    _, _, made = logits(
        lambda h, w, b: torch.tanh(F.linear(h, w).float() * 0.3) * 2, given(torch.bfloat16)
    )
    assert "a factor of 0.6" in made.absorbed
    assert (made.scale, made.softcap) == (0.6, 2)


def test_detached():
    _, _, made = logits(lambda h, w, b: F.linear(h, w, b).detach() * 2, given())
    assert made.absorbed == ["a factor of 2"]


#: What stays between, and words of the reason.
REFUSED = {
    "squares": (lambda h, w, b: F.linear(h, w).square(), "is none of a cast, a factor"),
    "bounds": (lambda h, w, b: F.linear(h, w).clamp(-1, 1), "bounds the logits"),
    "nan_to_num": (lambda h, w, b: F.linear(h, w).nan_to_num(), "not finite"),
    "floor": (lambda h, w, b: torch.div(F.linear(h, w), 2, rounding_mode="floor"), "rounds"),
    "factor of 0": (lambda h, w, b: F.linear(h, w) * 0.0, "scales the logits by 0"),
    "infinite factor": (lambda h, w, b: F.linear(h, w) * torch.inf, "scales the logits by inf"),
    "alpha": (lambda h, w, b: torch.add(F.linear(h, w), b, alpha=2), "adds a multiple"),
    "addend of rows": (lambda h, w, b: F.linear(h, w) + h[..., :1], "a number to each row of"),
    "rows shifted, then capped": (
        lambda h, w, b: torch.tanh(F.linear(h, w) + h.detach()[..., :1]), "a number is added",
    ),
    "addend of logits": (lambda h, w, b: F.linear(h, w) + F.linear(h, 2 * w), "adds a tensor to"),
    "rows of a bias": (lambda h, w, b: F.linear(h, w, b) * h[..., :1], "a layer with a bias"),
    "factor of logits": (
        lambda h, w, b: F.linear(h, w) * torch.ones(2, 5, CLASSES).double(), "a number of its own",
    ),
    "after a soft-cap": (lambda h, w, b: torch.tanh(F.linear(h, w)) + b, "after their soft-cap"),
    "two soft-caps": (lambda h, w, b: F.linear(h, w).tanh().tanh(), "after their soft-cap"),
    "number, then soft-cap": (
        lambda h, w, b: torch.tanh((F.linear(h, w) + 1) * h[..., :1]), "a number is added",
    ),
    "number, then factors": (lambda h, w, b: (F.linear(h, w) + 1) * b, "a number is added"),
    "number, then mask": (
        lambda h, w, b: (F.linear(h, w) + 1).masked_fill(PADDING, 0.5), "a number is added",
    ),
    "rows masked": (
        lambda h, w, b: F.linear(h, w).masked_fill(h[..., :1] > 0, 0.0), "not some of the classes",
    ),
    "replaced by a tensor": (lambda h, w, b: torch.where(PADDING, b, F.linear(h, w)), "a tensor's"),
    "mask after a soft-cap": (
        lambda h, w, b: F.linear(h, w).tanh().masked_fill(PADDING, -9.0), "after their soft-cap",
    ),
    "two layers": (lambda h, w, b: torch.cat([F.linear(h, w), F.linear(h, w)]), "several layers"),
    "rows apart": (
        lambda h, w, b: F.linear(h, w).transpose(1, 2).reshape(2, -1), "takes the classes of a row",
    ),
    "rows by a list": (lambda h, w, b: F.linear(h, w).view(-1, CLASSES)[[3, 1]], "a list of"),
    "more classes": (
        lambda h, w, b: F.linear(h, w)[..., torch.tensor([1, 2] * CLASSES)], "more classes",
    ),
    "classes by a list": (lambda h, w, b: F.linear(h, w)[..., [1, 2]], "a list of constants"),
    "classes by a mask": (
        lambda h, w, b: F.linear(h, w)[..., PADDING], "only some classes",
    ),
    "one class": (lambda h, w, b: F.linear(h, w)[..., 1], "only some classes"),
    "repeated": (lambda h, w, b: F.linear(h, w)[:1] * torch.ones(2, 1, 1).double(), "repeats"),
    "narrowed": (lambda h, w, b: F.linear(h, w).float(), "a cast of the logits"),
    "gathered": (lambda h, w, b: F.linear(h, w).gather(-1, torch.tensor([[[1]]])), "picks other classes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, words = REFUSED[name]
    with pytest.raises(NotAbsorbedError) as error:
        logits(function, given())
    assert words in str(error.value)


NARROW = {
    "factor, then mask": (
        lambda h, w, b: (F.linear(h, w).float() * 0.3).masked_fill(PADDING, -1.0),
        "in float32",
    ),
    "mask, then factor": (
        lambda h, w, b: F.linear(h, w).float().masked_fill(PADDING, -1.0) * 0.3,
        "in float32",
    ),
    "number, then soft-cap": (
        lambda h, w, b: torch.tanh(F.linear(h, w).float() + 1),
        "a number is added",
    ),
    "learned factor": (lambda h, w, b: F.linear(h, w).float() * b[0], "computes in float32"),
    "addend": (lambda h, w, b: F.linear(h, w).float() + b.float(), "computes in float32"),
    "mask": (lambda h, w, b: F.linear(h, w).masked_fill(PADDING, -1e3 + 0.3), "rounds"),
}


@pytest.mark.parametrize("name", NARROW)
def test_refused_in_16_bits(name):
    function, words = NARROW[name]
    with pytest.raises(NotAbsorbedError) as error:
        logits(function, given(torch.bfloat16))
    assert words in str(error.value)


def test_no_layer():
    _, _, made = logits(lambda h, w, b: h.tanh() * 2, given())
    assert made is None


def test_too_far_from_its_layer():
    def far(h, w, b):
        x = F.linear(h, w)
        for _ in range(17):
            x = x.unsqueeze(0).squeeze(0)
        return x

    assert logits(far, given())[2] is None


def test_layer_of_another_graph():
    made = F.linear(*given()).view(-1, CLASSES)
    with pytest.raises(OutsideError):
        logits(lambda x: x / 2, [made])


def test_other_readers():
    """Of the logits and not of the loss: for a match nothing else may go into it."""

    def step(h, w, b):
        x = F.linear(h, w, b)
        return F.mse_loss(x, x.detach().sin())

    found = dynamo(step, *given())
    found_by, root = recognizer(found.gm)
    (match,) = [c for c in found_by.candidates(root) if isinstance(c, Match)]
    with pytest.raises(NotAbsorbedError, match="made of the logits as well"):
        find_logits(match, found_by.replay)


def test_is_made_of():
    found = dynamo(lambda h, w, b: (F.linear(h, w) / 2, F.linear(h, w + 1)), *given())
    found_by, root = recognizer(found.gm)
    _, other = found.gm.graph.find_nodes(op="output")[0].all_input_nodes
    made = logits_of(root, found_by.replay)
    assert is_made_of(root, found_by.replay, made.head)
    assert not is_made_of(other, found_by.replay, made.head)
