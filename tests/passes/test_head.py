"""Linear layers in all spellings, and what looks like one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.heads.head import NotAbsorbedError, find_head
from tests.passes.graphs import dynamo, evaluate, numbers, recognizer

HEADS = {
    "linear": lambda h, w, b: F.linear(h, w),
    "bias": lambda h, w, b: F.linear(h, w, b),
    "named": lambda h, w, b: F.linear(bias=b, weight=w, input=h),
    "matmul": lambda h, w, b: h @ w.t(),
    "method": lambda h, w, b: h.matmul(w.T),
    "mm": lambda h, w, b: torch.mm(h[0], w.t()),
    "addmm": lambda h, w, b: torch.addmm(b, h[0], w.t()),
    "method of the bias": lambda h, w, b: b.addmm(h[0], w.t()),
    "inner": lambda h, w, b: torch.inner(h, w),
    "einsum": lambda h, w, b: torch.einsum("bth,vh->btv", h, w),
    "weight first": lambda h, w, b: torch.einsum("vh,bth->btv", w, h),
    "transposed": lambda h, w, b: torch.einsum("...h,hv->...v", h, w.t()),
    "in a list": lambda h, w, b: torch.einsum("th, vh -> tv", [h[0], w]),
}
OTHERS = {
    "three dimensions": lambda h, w, b: h @ h.transpose(1, 2),
    "classes in the middle": lambda h, w, b: torch.einsum("bth,vh->bvt", h, w),
    "a sum": lambda h, w, b: torch.einsum("bth,vh->bt", h, w),
    "a square": lambda h, w, b: torch.einsum("bth,hh->bth", h, w[:3, :3]),
    "one operand": lambda h, w, b: torch.einsum("bth->bht", h),
    "factors": lambda h, w, b: torch.addmm(b, h[0], w.t(), beta=2),
    "a matrix added": lambda h, w, b: torch.addmm(torch.ones(5, 7), h[0], w.t()),
    "bilinear": lambda h, w, b: F.bilinear(h[0], h[1], w.unsqueeze(1).expand(7, 3, 3)),
    "a product of elements": lambda h, w, b: h * w[0],
}


def given(dtype=torch.float32):
    return [t.to(dtype) for t in (torch.randn(2, 5, 3), torch.randn(7, 3), torch.randn(7))]


@pytest.mark.parametrize("name", HEADS)
def test_heads(name):
    found = dynamo(HEADS[name], *given())
    _, root = recognizer(found.gm)
    head, known = find_head(root), numbers(found)
    assert head.node is root
    parts = (head.input, head.weight, head.bias)
    result = F.linear(*(part and evaluate(part, known) for part in parts))
    torch.testing.assert_close(result, known[root])
    for part, fake in zip(parts, ("input", "weight", "bias"), strict=True):
        assert part is None or part.fake.shape == evaluate(part, known).shape, fake


@pytest.mark.parametrize("name", OTHERS)
def test_other_products(name):
    _, root = recognizer(dynamo(OTHERS[name], *given()).gm)
    assert find_head(root) is None


def test_autocast_casts_each_argument():
    def step(h, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(h, w, b)

    found = dynamo(step, *given())
    node = next(n for n in found.gm.graph.nodes if n.target is torch._C._nn.linear)
    head = find_head(node)
    assert {p.fake.dtype for p in (head.input, head.weight, head.bias)} == {torch.bfloat16}


def test_mixed_dtypes():
    """Torch's fakes take them, and torch does not."""
    found = dynamo(lambda h, w, b: h @ w.t(), *given())
    _, root = recognizer(found.gm)
    weight = root.args[1].meta["example_value"]
    root.args[1].meta["example_value"] = weight.double()
    with pytest.raises(NotAbsorbedError, match="float32 and float64 without autocast"):
        find_head(root)
