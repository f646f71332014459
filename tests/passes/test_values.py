"""Constants, sizes, pieces of loops, and what is moved: the smaller readers of Dynamo's graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.autocast import autocast_dtype, cast_by
from compile_losses.recognize.constants import constant
from compile_losses.recognize.head import NotAbsorbedError
from compile_losses.recognize.moved_nodes import move_before
from compile_losses.recognize.returned_logits import outputs_of, readers
from compile_losses.recognize.returned_numbers import of_parameters, returned_numbers
from compile_losses.recognize.row_statistics import reading_of
from compile_losses.recognize.row_views import RowIndexError, picks_of_gather, target_of_gather
from compile_losses.recognize.small_sizes import NoSizeError, Sizes
from tests.passes import decisions
from tests.passes.graphs import aten, dynamo, one, put_ops, recognizer, returned, words

CONSTANTS = {
    "tensor": (lambda x: x * torch.tensor(0.5), 0.5),
    "function": (lambda x: x * torch.log1p(-torch.tensor(0.5)), -0.6931471805599453),
    "arithmetic": (lambda x: x * (1 - torch.tensor(0.25)), 0.75),
    "narrow": (lambda x: x * torch.tensor(0.5, dtype=torch.bfloat16), None),
    "integer": (lambda x: x * torch.tensor(3), None),
    "of a tensor": (lambda x: x * x.amax(), None),
    "vector": (lambda x: x * torch.tensor([0.5]), None),
    "infinite": (lambda x: x * torch.tensor(float("inf")), None),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name):
    function, expected = CONSTANTS[name]
    found_by, root = recognizer(dynamo(function, torch.randn(3)).gm)
    value = found_by.replay.of(root)
    assert constant(value.args[1], torch.float32, found_by.replay) == expected
    assert constant(True, torch.float32, found_by.replay) is None
    assert constant(2, torch.float32, found_by.replay) == 2.0


def test_small_sizes():
    sizes = Sizes([torch.empty(4096, 513, device="meta")])
    assert sizes.smaller
    rows, columns = sizes.of(4096), sizes.of(513)
    assert rows != columns
    assert max(rows, columns) < 64
    assert sizes.of(4096 * 513) == rows * columns
    assert sizes.of(4096.0) == float(rows)
    assert (sizes.of(3), sizes.of(0.5), sizes.of(True)) == (3, 0.5, True)
    assert sizes.unchanged().of(4096) == 4096
    assert not Sizes([torch.empty(3, 4)]).smaller


def test_too_many_sizes():
    many = [torch.empty(n, 99, device="meta") for n in range(5000, 5060)]
    with pytest.raises(NoSizeError):
        Sizes(many)


def chunked(order=slice(None), stop=None):
    def step(x, t):
        parts = [a.log_softmax(-1).sum(-1) for a in x.chunk(3)[order][:stop]]
        return torch.cat(parts)

    return step


@pytest.mark.parametrize(
    ("function", "expected"),
    [(chunked(), True), (chunked(slice(None, None, -1)), False), (chunked(stop=2), False)],
)
def test_loops_are_rejoined(function, expected):
    found_by, root = recognizer(dynamo(function, torch.randn(6, 5), torch.zeros(6)).gm)
    value = found_by.replay.resolve(found_by.replay.of(root))
    assert (value.op is aten.sum.dim_IntList) == expected, value


def test_a_stack_of_samples():
    def step(x, t):
        return torch.stack([a.logsumexp(-1) for a in x])

    found_by, root = recognizer(dynamo(step, torch.randn(3, 4, 5), torch.zeros(3)).gm)
    value = found_by.replay.resolve(found_by.replay.of(root))
    assert value.op is aten.logsumexp.default
    assert [words(a) for a in value.args[:2]] == ["l_x_", "[2]"]


def test_what_is_moved_before_a_place():
    def step(x, t):
        place = x.sin()
        labels = (t + 1) % 5
        drawn = torch.randint(5, (3,))
        wide = t.float()
        return place, labels, drawn, wide

    found = dynamo(step, torch.randn(3), torch.arange(3))
    found_by, _ = recognizer(found.gm)
    place, labels, drawn, wide = returned(found.gm.graph)
    assert move_before([labels], place, found_by.replay)
    assert labels < place
    assert not move_before([drawn], place, found_by.replay)
    assert not move_before([wide], place, found_by.replay)
    found.gm.graph.lint()


def test_nothing_moves_past_a_write():
    def step(x, t):
        place = x.sin()
        t.add_(1)
        return place, t * 2

    found = dynamo(step, torch.randn(3), torch.arange(3))
    found_by, _ = recognizer(found.gm)
    place, labels = returned(found.gm.graph)
    assert not move_before([labels], place, found_by.replay)


def test_targets_and_picks_of_a_gather():
    def step(x, t, p):
        return x.gather(1, t[:, None]), x.gather(1, p), x.gather(0, p), x.gather(1, p[:2])

    found = dynamo(step, torch.randn(4, 5), torch.zeros(4).long(), torch.zeros(4, 2).long())
    found_by, _ = recognizer(found.gm)
    single, several, rows, fewer = (found_by.replay.of(n) for n in returned(found.gm.graph))
    target, dim = target_of_gather(single, found_by.replay)
    assert (words(target), dim) == ("l_t_", 1)
    assert words(picks_of_gather(several, found_by.replay)) == "l_p_"
    for value, function in (
        (several, target_of_gather),
        (rows, picks_of_gather),
        (fewer, picks_of_gather),
    ):
        with pytest.raises(RowIndexError):
            function(value, found_by.replay)


READERS = {
    "cross entropy": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "logsumexp": lambda x, t: x.logsumexp(-1),
    "entropy": lambda x, t: (x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "picked": lambda x, t: x.log_softmax(-1).gather(-1, t[:, None]).squeeze(-1),
    "several": lambda x, t: x.log_softmax(-1).gather(-1, torch.stack([t, t], -1)),
    "argmax": lambda x, t: x.argmax(-1),
    "amax": lambda x, t: x.amax(-1),
    "sum of log-probabilities": lambda x, t: x.log_softmax(-1).sum(-1),
    "a sum": lambda x, t: x.sin().sum(-1),
    "probabilities": lambda x, t: x.softmax(-1),
    "of the rows": lambda x, t: x.logsumexp(0),
}


@pytest.mark.parametrize("name", READERS)
def test_readings(name):
    found = dynamo(READERS[name], torch.randn(4, 5), torch.zeros(4).long())
    put_ops(found.gm)
    found_by, root = recognizer(found.gm)
    reading = reading_of(root, found_by.replay)
    told = ["nothing"] if reading is None else [
        f"{reading.what} of {words(reading.logits)} along {reading.dim}: "
        f"{dict(sorted(reading.terms.items()))}, "
        f"target {reading.target and words(reading.target)}, "
        f"picks {reading.picks and words(reading.picks)}"
    ]  # fmt: skip
    decisions.check("readings", name, told)


def test_outputs_of_logits():
    def step(x, t):
        y = x * 2
        return y.sum(), y.view(-1), y.size(0)

    graph = dynamo(step, torch.randn(3, 4), torch.zeros(3)).gm.graph
    logits = one(graph, "mul")
    total, view, *_ = returned(graph)
    assert [n.name for n in outputs_of({logits}, total)] == [view.name]
    assert set(readers({logits}, total)) == {view}


def test_logits_that_others_read():
    def step(x, t):
        y = x * 2
        return y.sum(), y.sin().sum(), y.max(-1)

    graph = dynamo(step, torch.randn(3, 4), torch.zeros(3)).gm.graph
    total, *_ = returned(graph)
    with pytest.raises(NotAbsorbedError, match="have other users"):
        outputs_of({one(graph, "mul")}, total)


def test_returned_numbers():
    def step(x, t):
        loss = (x.sin() * t).sum() + x.cos().mean()
        return loss, t.sum()

    graph = dynamo(step, torch.randn(3, requires_grad=True), torch.randn(3)).gm.graph
    (number,) = returned_numbers(graph, set())
    assert len(number.reductions) == 2
    assert not any(of_parameters(n) for n in number.reductions)


def test_autocast():
    def step(x, t):
        with torch.autocast("cpu", torch.bfloat16):
            a = x.sin()
            with torch.autocast("cpu", enabled=False):
                b = a.cos()
        return a + b

    graph = dynamo(step, torch.randn(3), torch.zeros(3)).gm.graph
    inside, off = one(graph, "sin"), one(graph, "cos")
    assert autocast_dtype(inside, "cpu") is torch.bfloat16
    assert autocast_dtype(inside, "cuda") is None
    assert autocast_dtype(off, "cpu") is None
    assert cast_by(torch.bfloat16, torch.float32) is torch.bfloat16
    assert cast_by(torch.bfloat16, torch.float64) is torch.float64
    assert cast_by(None, torch.float32) is torch.float32
