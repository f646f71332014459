"""Passes of one function: early sizes, mutated inputs, shared nodes, layouts, statistics' costs."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_losses.lower.argument_layouts import accept_layouts, leave_unpadded
from compile_losses.lower.early_sizes import compute_sizes_early
from compile_losses.lower.fused_calls import find_losses
from compile_losses.lower.mutated_inputs import save_before_mutation
from compile_losses.lower.shared_with_forward import save, share
from compile_losses.lower.slow_paths import is_small, slow_path
from compile_losses.lower.statistics import plan_statistics
from compile_losses.torch_internals.graphs import DISLIKES_PADDING, EAGER_VALUES, RECOMPUTE
from tests.constants import set_constants
from tests.corpus.capture import SMALL
from tests.passes.graphs import aten, fused, name_of, of_aten, one, text


def test_sizes_of_the_inputs_are_read_first():
    def step(x, t):
        y = (x + t).sin()
        return y.sum() / y.shape[0], y.cos().expand(y.shape[0] * 1, y.shape[1])

    gm = make_fx(step, tracing_mode="symbolic")(torch.randn(6, 5), torch.randn(6, 5))
    compute_sizes_early(gm.graph)
    gm.graph.lint()
    gm.recompile()
    order = list(gm.graph.nodes)
    sine = order.index(one(gm.graph, aten.sin.default))
    sizes = [n for n in order if "sym_size" in name_of(n.target)]
    assert sizes
    assert all(order.index(n) < sine and n.args[0].op == "placeholder" for n in sizes)
    x, t = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(gm(x, t), step(x, t))


def test_what_a_mutated_input_made_is_saved():
    def step(x, w, tangents_1):
        y = x.sin()
        z = x.cos()
        x.copy_(w)
        return z.sum(), tangents_1 * y

    gm = of_aten(step, *[torch.randn(3) for _ in range(2)], torch.tensor(1.0))
    save_before_mutation(gm.graph)
    assert RECOMPUTE in one(gm.graph, aten.sin.default).meta
    assert RECOMPUTE not in one(gm.graph, aten.cos.default).meta


def test_unmutated_inputs():
    gm = of_aten(
        lambda x, tangents_1: (x.sum(), tangents_1 * x.sin()), torch.ones(3), torch.tensor(1.0)
    )
    save_before_mutation(gm.graph)
    assert RECOMPUTE not in one(gm.graph, aten.sin.default).meta


def test_shared_nodes():
    def step(x):
        forward = (x.sin() * 2, x.exp())
        backward = (x.sin() * 2, x.sin() * 2.0, x.exp() + 1)
        return *forward, *backward

    gm = of_aten(step, torch.randn(3))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    before = gm(torch.ones(3))
    share(calls[:3], calls[3:])
    gm.graph.lint()
    gm.recompile()
    assert text(gm.graph).count("aten.sin") == 1
    assert text(gm.graph).count("aten.exp") == 1
    assert text(gm.graph).count("aten.mul") == 2  # 2 is not 2.0
    torch.testing.assert_close(gm(torch.ones(3)), before)


def test_saved():
    gm = of_aten(lambda x: x.sort()[0], torch.randn(3))
    node = one(gm.graph, aten.sort.default)
    save(node)
    assert all(RECOMPUTE in n.meta for n in (node, *node.users))


def loss_of(y, t):
    return fused.cross_entropy_with_grad(y, t, None, 1, -100, 0.0, torch.float32)


def layouts(function):
    gm = of_aten(
        function, torch.randn(8, 4), torch.randn(4, 6), torch.randint(6, (8,)), torch.randn(6)
    )
    call = one(gm.graph, "fused.cross_entropy_with_grad")
    call.meta[EAGER_VALUES] = ((), {})
    accept_layouts(call)
    leave_unpadded(call)
    return gm, EAGER_VALUES not in call.meta


def test_layouts():
    assert layouts(lambda x, w, t, b: loss_of(x @ w, t))[1]
    assert layouts(lambda x, w, t, b: loss_of((x @ w).view(2, 4, 6).view(8, 6), t))[1]
    assert not layouts(lambda x, w, t, b: loss_of((x @ w).sin(), t))[1]


def test_products_with_a_bias():
    gm, _ = layouts(lambda x, w, t, b: loss_of(torch.addmm(b, x, w), t))
    assert one(gm.graph, aten.addmm.default).meta[DISLIKES_PADDING]
    gm, _ = layouts(lambda x, w, t, b: loss_of(x @ w, t))
    assert DISLIKES_PADDING not in one(gm.graph, aten.mm.default).meta


def test_costs_of_statistics():
    def joint(y, t, tangents_1):
        *values, stats = fused.row_statistics_forward(y, t, -100, None)
        g = tangents_1.expand(4)
        return values[2], fused.row_statistics_backward(
            None, None, g, None, y, t, stats, -100, None
        )

    gm = of_aten(joint, torch.randn(4, 5), torch.randint(5, (4,)), torch.tensor(1.0))
    (decision,) = plan_statistics(gm.graph)
    assert (decision.cost.moved, decision.stock.moved) == (3 * 80, 5 * 80)
    assert decision.cost.held == decision.stock.held == 80
    gm = of_aten(
        lambda y, t: fused.row_statistics_forward(y, t, -100, None)[2],
        torch.randn(4, 5),
        torch.randint(5, (4,)),
    )
    (decision,) = plan_statistics(gm.graph)
    assert (decision.cost.moved, decision.stock.moved, decision.cost.held) == (80, 160, 0)


def loss(function, *inputs):
    return find_losses(of_aten(function, *inputs).graph)[0]


def test_slow_paths():
    def mse(x, t):
        return fused.mse_loss_forward(x, t, None, 1, x.dtype)

    x, t = torch.randn(8, 6), torch.randn(8, 6)
    assert slow_path(loss(mse, x, t)).factor == 1.1  # without a gradient
    assert slow_path(loss(mse, x, torch.randn(6, 8).t())).factor == 2.5

    def trained(x, t, g):
        return mse(x, t), fused.mse_loss_backward(g, x, t, None, 1, True, False, False)[0]

    assert slow_path(loss(trained, x, t, torch.tensor(1.0))) is None

    def classes(y, t):
        return fused.cross_entropy_forward(y, t, None, 1, -100, 0.0, y.dtype)[0]

    narrow, labels = torch.randn(8, 6).bfloat16(), torch.randint(6, (8,))
    assert slow_path(loss(classes, narrow, labels)) is None
    assert (
        "not neighbours"
        in slow_path(loss(classes, torch.randn(6, 8).bfloat16().t(), labels)).reason
    )


def test_small_losses(monkeypatch):
    def mse(x, t):
        return fused.mse_loss_forward(x, t, None, 1, x.dtype)

    found = loss(mse, torch.randn(8, 6), torch.randn(8, 6))
    assert not is_small(found)
    set_constants(monkeypatch, **{**SMALL, "small_simple_bytes": 8 * 6 * 4 + 1})
    assert is_small(found)
