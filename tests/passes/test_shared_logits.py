"""Heads whose logits several losses read: who reads them, with which rows, and the one call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from compile_losses.recognize.heads.head import find_head
from compile_losses.recognize.heads.logits import logits_of
from compile_losses.recognize.heads.row_moves import moves_between
from compile_losses.recognize.heads.shared_logits import Kept, Rewritten, take_shared_logits
from compile_losses.recognize.heads.shared_readers import holds, look_for_readers
from compile_losses.request import Request
from tests.passes.graphs import dynamo, name_of, put_ops, recognizer, text
from tests.passes.outcomes import assert_same, with_gradients

F64 = torch.float64
BATCH, TOKENS, HIDDEN, CLASSES = 2, 6, 3, 11


def given():
    h = torch.randn(BATCH, TOKENS, HIDDEN, dtype=F64, requires_grad=True)
    w = torch.randn(CLASSES, HIDDEN, dtype=F64, requires_grad=True)
    return h, w, torch.randint(CLASSES, (BATCH, TOKENS))


def entropy(x):
    p = x.log_softmax(-1)
    return -(p.exp() * p).sum(-1)


def flat(x, t, **options):
    return F.cross_entropy(x.flatten(0, 1), t.flatten(), **options)


def taken(function, **options):
    found = dynamo(function, *given())
    put_ops(found.gm)
    found_by, _ = recognizer(found.gm)
    request = Request.of(**{"lowers": True} | options)
    results = list(take_shared_logits(found.gm.graph, found_by.replay, request))
    found.gm.graph.lint()
    found.gm.recompile()
    return found, results


#: Steps that need no logits, and the statistics that are computed.
TAKEN = {
    "loss and entropy": lambda x, t: flat(x, t) + entropy(x).mean(),
    "entropy alone": lambda x, t: entropy(x).square().mean(),
    "sum of the logits": lambda x, t: (
        flat(x, t) + 0.1 * x.logsumexp(-1).sum() + x.log_softmax(-1).sum(-1).mean()
    ),
    "metrics": lambda x, t: (flat(x, t), (x.argmax(-1) == t).sum(), x.detach().amax(-1)),
    "maximum and place": lambda x, t: (flat(x, t), *x.detach().max(-1)),
    "smoothed": lambda x, t: flat(x, t, label_smoothing=0.1) - entropy(x).sum(),
    "weighted": lambda x, t: flat(x, t, weight=torch.ones(CLASSES, dtype=F64)) + entropy(x).sum(),
    "some rows": lambda x, t: flat(x[:, 1:], t[:, 1:]) + entropy(x).mean(),
    "one row of each": lambda x, t: F.cross_entropy(x[:, -1], t[:, -1]) + entropy(x).mean(),
    "transposed": lambda x, t: flat(x, t) + (entropy(x.transpose(0, 1)) ** 2).sum(),
    "classes second": lambda x, t: F.cross_entropy(x.transpose(1, 2), t) + entropy(x).sum(),
    "capped": lambda x, t: (lambda y: flat(y, t) + entropy(y).sum())(3 * torch.tanh(x / 3)),
    "scaled": lambda x, t: (lambda y: flat(y, t) + entropy(y).sum())(x / 0.7),
    "other classes": lambda x, t: flat(x, t) - 0.1 * flat(x, (t + 1) % CLASSES),
    "several classes": lambda x, t: (
        x.log_softmax(-1).gather(-1, torch.stack([t, 0 * t], -1)).exp().sum() + entropy(x).sum()
    ),
    "two sums": lambda x, t: flat(x, t) + flat(x, t, reduction="sum") ** 2,
    "ignored": lambda x, t: flat(x, t, ignore_index=3) + entropy(x).mean(),
    "by row": lambda x, t: (flat(x, t, reduction="none") ** 2).sum() + entropy(x).sum(),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    function = TAKEN[name]
    found, (result,) = taken(lambda h, w, t: function(F.linear(h, w), t))
    assert isinstance(result, Rewritten), result
    assert name_of(result.node.target) == "fused.linear_row_statistics_forward"
    assert not any(n.target is torch._C._nn.linear for n in found.gm.graph.nodes)
    before = dynamo(lambda h, w, t: function(F.linear(h, w), t), *given())
    assert_same(with_gradients(found.gm, found.inputs), with_gradients(before.gm, found.inputs))


#: Steps that keep their logits, with a part of the reason.
KEPT = {
    "logits read": (lambda x, t: flat(x, t) + x.square().mean(), "square is none of"),
    "probabilities": (lambda x, t: (flat(x, t), x.argmax(-1), x.std(-1)), "std"),
    "another temperature": (lambda x, t: flat(x, t) + entropy(x / 2).mean(), "scales them"),
    "shifted": (
        lambda x, t: (lambda y: flat(y, t) + y.logsumexp(-1).mean())(x + 1), "a number is added",
    ),
    "gradient of the maximum": (
        lambda x, t: flat(x, t) + x.amax(-1).mean(), "a gradient that goes to single logits",
    ),
    "over the rows": (lambda x, t: flat(x, t) + x.logsumexp(1).mean(), "rows"),
    "returned": (lambda x, t: (flat(x, t) + entropy(x).mean(), x), "its logits are returned"),
    "its own best class": (
        lambda x, t: flat(x, x.argmax(-1)) + entropy(x).mean(), "is made of its logits",
    ),
    "wider": (lambda x, t: flat(x, t) + entropy(x.float()).mean(), "a cast of the logits"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    function, words = KEPT[name]
    found, results = taken(lambda h, w, t: function(F.linear(h, w), t))
    before = dynamo(lambda h, w, t: function(F.linear(h, w), t), *given())
    put_ops(before.gm)
    assert text(found.gm.graph) == text(before.gm.graph)
    assert all(isinstance(result, Kept) for result in results)
    assert any(words in result.reason for result in results), results


def test_one_loss_is_another_search():
    assert taken(lambda h, w, t: flat(F.linear(h, w), t))[1] == []
    assert taken(lambda h, w, t: F.linear(h, w).sin().sum())[1] == []


def test_gradients_that_nobody_lowers():
    _, (result,) = taken(lambda h, w, t: entropy(F.linear(h, w)).square().sum(), lowers=False)
    assert isinstance(result, Kept)
    assert "would need the logits twice" in result.reason


def test_a_loop_over_samples():
    """The end of the loop is the reader."""

    def step(h, w, t):
        x = F.linear(h, w)
        rows = torch.stack([
            each.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
            for each, labels in zip(x, t, strict=True)
        ])  # fmt: skip
        return rows.exp().sum() + entropy(x).sum()

    found, (result,) = taken(step)
    assert isinstance(result, Rewritten)
    assert "stack" not in text(found.gm.graph)


def test_the_graph():
    found, _ = taken(lambda h, w, t: entropy(F.linear(h, w)).sum() + F.linear(h, w + 1).sum())
    assert_expected_inline(
        text(found.gm.graph),
        """\
reshape_default = aten.reshape(l_h_, (-1, 3))
linear_row_statistics_forward_default = fused.linear_row_statistics_forward(reshape_default, l_w_, None, None, None, None, None, None, None, -4611686018427387904, None, None, 0.5, 1.0, None, False, False, 0, False, 1.0)
getitem = getitem(linear_row_statistics_forward_default, 2)
neg_default = aten.neg(getitem)
to_dtype = aten.to.dtype(neg_default, torch.float64)
reshape_default_1 = aten.reshape(to_dtype, (2, 6))
neg = neg(reshape_default_1)
sum_2 = sum(neg)
add = add(l_w_, 1)
linear_1 = linear(l_h_, add)
sum_3 = sum(linear_1)
add_1 = add(sum_2, sum_3)
return (add_1,)""",
    )


def test_readers():
    def step(h, w, t):
        x = F.linear(h, w)
        y = x / 2
        return entropy(y), y.logsumexp(-1), x.size(0), x.detach().argmax(-1)

    found = dynamo(step, *given())
    found_by, _ = recognizer(found.gm)
    node = next(n for n in found.gm.graph.nodes if n.target is torch._C._nn.linear)
    shared, needs = look_for_readers(find_head(node), found_by.replay)
    assert needs is None
    assert len(shared.readings) == 3
    assert shared.between[0] is node
    assert shared.outputs == []


def test_what_holds_classes():
    x = torch.ones(2, CLASSES)
    assert holds(x, CLASSES)
    assert holds((x, x), CLASSES)
    assert not holds((), CLASSES)
    assert not holds(x[:, :3], CLASSES)
    assert not holds(None, CLASSES)


#: How rows are made of all rows: the ops, or None for other rows.
MOVES = {
    "same": (lambda x: x, ()),
    "part": (lambda x: x[:, 1:], ("slice",)),
    "one": (lambda x: x[:, -1], ("select",)),
    "transposed": (lambda x: x.transpose(0, 1), ("permute",)),
    "two": (lambda x: x[:, 1:].transpose(0, 1), ("slice", "permute")),
    "flat": (lambda x: x.flatten(0, 1), ()),
    "factor": (lambda x: x * 2, None),
    "picked": (lambda x: x[torch.tensor([1, 0])], None),
    "capped": (lambda x: torch.tanh(x), None),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    function, expected = MOVES[name]
    found = dynamo(lambda h, w, t: ((x := F.linear(h, w)) * 1, function(x) * 1), *given())
    found_by, root = recognizer(found.gm)
    (_, other) = found.gm.graph.find_nodes(op="output")[0].all_input_nodes
    made = [logits_of(node, found_by.replay) for node in (root, other)]
    moves = moves_between(*made)
    names = None if moves is None else tuple(name_of(op).split(".")[1] for op, _ in moves)
    assert names == expected
