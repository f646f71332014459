"""Bytes that losses move and hold."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_losses.lower import cost
from compile_losses.lower.cost import Cost, Feed, Gradient
from compile_losses.torch_internals.inductor import get_default_op_list
from tests.passes.graphs import aten, of_aten, one, returned


def test_bytes_of_distinct_elements():
    with FakeTensorMode():
        x = torch.empty(6, 5)
        assert cost.nbytes_of(x) == 120
        assert cost.nbytes_of(x.double()) == 240
        assert cost.nbytes_of(x[:, :1].expand(6, 9)) == 24
        assert cost.nbytes_of(x[0]) == 20
    assert cost.nbytes_of(3) == 0
    assert cost.nbytes_of(None) == 0


def test_layouts():
    x = torch.empty(3, 4, 5)
    assert cost.laid_out_alike(x, torch.empty(3, 4, 10)[..., ::2])
    assert not cost.laid_out_alike(x, torch.empty(5, 4, 3).permute(2, 1, 0))
    assert cost.laid_out_alike(x, torch.empty(4, 5).expand(3, 4, 5))
    assert cost.laid_out_alike(torch.empty(1, 4), torch.empty(4, 1).t())


FEEDS = {
    "matrix product": (lambda x, w: x @ w, "matrix product", None, True),
    "view": (lambda x, w: (x @ w).view(-1), "view of a matrix product", None, True),
    "input": (lambda x, w: x.t(), "view of a graph input", None, False),
    "pointwise": (lambda x, w: x.sin(), "pointwise sin", 8 * 4 * 4, True),
    "of two": (lambda x, w: x + x.cos(), "pointwise add", 8 * 4 * 4, True),
    "of another size": (lambda x, w: x[:, :1].sin(), "pointwise sin", 8 * 4, True),
    "cast": (lambda x, w: x.double(), "cast", 8 * 4 * 4, True),
    "copy": (lambda x, w: x.t().clone(), "copy", 8 * 4 * 4, True),
    "of a product": (lambda x, w: (x @ w).sin(), "pointwise sin", 8 * 6 * 4, True),
}


@pytest.mark.parametrize("name", FEEDS)
def test_feeds(name):
    function, kind, source, stored = FEEDS[name]
    gm = of_aten(function, torch.randn(8, 4), torch.randn(4, 6))
    (node,) = returned(gm.graph)
    feed = cost.feed_of(node, get_default_op_list())
    assert (feed.kind, feed.source, feed.stored) == (kind, source, stored)
    assert feed.nbytes == cost.nbytes_of(node.meta["val"])


def test_buffers_are_read_once():
    gm = of_aten(
        lambda x, w: (x.sin() * x).sum() + (x + 1).amax() * w.sum(),
        torch.ones(4),
        torch.ones(9),
    )
    (node,) = returned(gm.graph)
    found = cost.buffers_read([node], get_default_op_list())
    assert sum(found.values()) == 16 + 36
    assert cost.behind_views(one(gm.graph, aten.sin.default)).name == "sin"


INPUT = Feed("graph input", 100, None, 100, False)
PRODUCT = Feed("matrix product", 100, None, 100, True)
POINTWISE = Feed("pointwise", 100, 50, 100, True)
DEAR = Feed("pointwise", 100, 200, 100, True)
KEPT, FUSED = Gradient(100, False), Gradient(100, True)


@pytest.mark.parametrize(
    ("feeds", "gradients", "options", "expected"),
    [
        ([INPUT], [], {}, Cost(100, 0)),
        ([INPUT], [KEPT], {}, Cost(300, 100)),
        ([INPUT], [KEPT], {"in_forward": True}, Cost(200, 100)),
        ([PRODUCT], [KEPT], {"in_forward": True, "in_place": True}, Cost(200, 100)),
        ([PRODUCT], [FUSED], {"in_forward": True, "in_place": True}, Cost(300, 200)),
        ([POINTWISE], [KEPT], {"in_forward": True}, Cost(350, 200)),
        ([INPUT, INPUT], [KEPT], {"in_forward": True}, Cost(300, 100)),
    ],
)
def test_kernels(feeds, gradients, options, expected):
    found = cost.kernel_cost(
        feeds, 0, gradients, **{"in_forward": False, "in_place": False} | options
    )
    assert found == expected
    more = cost.kernel_cost(
        feeds, 7, gradients, **{"in_forward": False, "in_place": False} | options
    )
    assert more == Cost(expected.moved + 7, expected.held)


@pytest.mark.parametrize(
    ("feeds", "gradients", "passes", "in_place", "expected"),
    [
        ([INPUT], [], 1, False, Cost(100, 0)),
        ([INPUT], [], 2, False, Cost(200, 0)),
        ([INPUT], [KEPT], 1, False, Cost(300, 100)),
        ([PRODUCT], [KEPT], 1, True, Cost(300, 100)),
        ([PRODUCT], [KEPT], 1, False, Cost(300, 200)),
        ([POINTWISE], [KEPT], 1, False, Cost(200, 100)),
        ([POINTWISE], [FUSED], 1, False, Cost(100, 0)),
        ([DEAR], [KEPT], 1, False, Cost(500, 200)),
    ],
)
def test_torchs_ops(feeds, gradients, passes, in_place, expected):
    assert cost.decomposed_cost(feeds, gradients, passes, in_place=in_place) == expected


def test_words():
    assert str(Cost(2_000_000, 500_000)) == "2 MB moved, 500 kB held"
