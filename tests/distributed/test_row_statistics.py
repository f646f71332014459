"""Log-probabilities, entropies and likeliest classes of DTensors are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import compile_losses.functional as F
from compile_losses import linear_log_probs
from compile_losses.ops.selective_log_softmax import reference
from tests.constants import set_constants
from tests.distributed.test_communication import GATHER, SCATTER, collectives, dtensor
from tests.distributed.test_exact import (
    LINEAR_LAYOUTS,
    check,
    labels,
    logits_of_impossible_classes,
    rand,
)
from tests.distributed.world import WORLD, compare, difference, distribute, mesh_for

fused = torch.ops.fused
ROWS, CLASSES, HIDDEN = 8, 12, 6
#: How many numbers a rank sends of each row.
NUMBERS = 5

#: Of logits [rows, classes] and of the index: rows, classes, both or neither; apart; Partial.
LAYOUTS = [
    *("0 0", "1 R", "R R", "P R", "P 0", "0 R", "R 0", "1 0", "S S"),
    *("01 0R", "10 R0", "0R 0R", "00 00", "R1 RR", "1P RR", "P1 0R", "0P 00", "01 00"),
]
#: Rows by classes: uneven shards, one of them empty.
SHAPES = [(7, 5), (3, 2)]


def rows_for(layouts, rows):
    return 8 if "S" in layouts else rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize("picks", [None, 3])
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selective_log_softmax(shape, layouts, picks):
    rows, classes = rows_for(layouts, shape[0]), shape[1]
    index = labels(*(rows,) if picks is None else (rows, picks), classes=classes)
    check(F.selective_log_softmax, [rand(rows, classes), index], layouts.split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_entropy(shape, layouts):
    logits = rand(rows_for(layouts, shape[0]), shape[1])
    check(F.softmax_entropy, [logits], [layouts.split()[0]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layouts", ["2 R", "0 0", "1 1", "12 1R", "02 0R", "01 01"])
def test_sequences_of_logits(layouts):
    """Logits [batch, sequence, classes], and those of one row."""
    logits, layout = rand(3, 5, 6), layouts.split()[0]
    for index in (labels(3, 5, classes=6), labels(3, 5, 2, classes=6)):
        check(F.selective_log_softmax, [logits, index], layouts.split())
    check(F.softmax_entropy, [logits], [layout])


@pytest.mark.parametrize("index", [torch.tensor(7), torch.tensor([7, 0])], ids=str)
def test_one_row_of_logits(index):
    check(F.selective_log_softmax, [rand(10), index], ["0", "R"])
    check(F.softmax_entropy, [rand(10)], ["0"])


OPTIONS = {"plain": {}, "all": {"temperature": 0.7, "softcap": 4.0}}


def of_both(function, **options):
    """A function of the log-probabilities and entropies, whose gradients depend on each other."""

    def loss(input, weight, index, bias=None):
        log_probs, entropy, _ = function(
            input, weight, index, bias, return_entropy=True, return_argmax=True, **options
        )
        return log_probs.exp() * entropy + entropy

    return loss


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layouts", LINEAR_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_log_probs(shape, layouts, options, monkeypatch):
    set_constants(monkeypatch, least_rows=2, logits_bytes=1)
    rows, classes = shape
    placed = layouts.split()
    index = labels(rows, classes=classes, ignored=(0, 1))
    tensors, differentiable = [rand(rows, HIDDEN), rand(classes, HIDDEN, seed=3), index], [0, 1]
    if options == "all":
        tensors.append(rand(classes, seed=4))
        placed.append(placed[1])
        differentiable.append(3)
    check(of_both(linear_log_probs, **OPTIONS[options]), tensors, placed, differentiable)


@pytest.mark.parametrize("layouts", ["1R R0 1R", "01 RR 01", "0R R0 R1", "11 0R 11"])
def test_sequences_of_hidden(layouts):
    tensors = [rand(3, 5, 4), rand(6, 4, seed=3), labels(3, 5, classes=6, ignored=(0, 3))]
    check(of_both(linear_log_probs), tensors, layouts.split(), (0, 1))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("layouts", ["R 0 R", "0 R 0"])
def test_one_of_the_results_alone(layouts, part):
    def loss(*tensors):
        return linear_log_probs(*tensors, return_entropy=True)[part]

    tensors = [rand(7, HIDDEN), rand(5, HIDDEN, seed=3), labels(7, classes=5, ignored=(1,))]
    check(loss, tensors, layouts.split(), (0, 1))


def simulated(layouts, *tensors):
    """DTensors on simulated ranks."""
    mesh = init_device_mesh("cpu", mesh_for(layouts[0]))
    return [distribute(t, mesh, text) for t, text in zip(tensors, layouts, strict=True)]


@pytest.mark.parametrize("layouts", ["0 R 0", "1R RR 1R", "0R R0 0R"])
def test_numbers_of_rows(layouts):
    """They are placed as the rows, and need whole classes."""
    from torch.distributed._local_tensor import LocalTensorMode

    tensors = rand(3, 6, HIDDEN), rand(5, HIDDEN, seed=3), labels(3, 6, classes=5, ignored=(1,))
    asked = {"return_log_squares": True, "return_rank": True, "top_k": 2}
    expected = linear_log_probs(*tensors, **asked)
    with LocalTensorMode(WORLD):
        placed = simulated(layouts.split(), *tensors)
        if "R0" in layouts:
            with pytest.raises(RuntimeError, match="expected whole classes with squares, rank or"):
                linear_log_probs(*placed, **asked)
            return
        found = linear_log_probs(*placed, **asked)
        assert all(difference(*pair) < 1e-12 for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("layouts", ["R 0 R", "0 R 0", "0R R0 0R"])
def test_likeliest_classes(layouts):
    """The first of equal ones, wherever these lie, and of nans."""
    from torch.distributed._local_tensor import LocalTensorMode

    hidden, weight = torch.eye(7, dtype=torch.float64), rand(5, 7)
    weight[:, 0] = 1.0  # all alike
    weight[1:, 1] = 9.0  # alike on several ranks
    weight[4, 2] = 9.0
    weight[:, 3] = -torch.inf
    hidden = hidden[:3] if layouts == "R 0 R" else hidden[:3].repeat(2, 1)
    index = torch.zeros(len(hidden), dtype=torch.int64)
    expected = (hidden @ weight[:, :7].nan_to_num(neginf=-1e9).t()).argmax(1)
    weight[:, 3] = 0
    _, ours = linear_log_probs(hidden, weight, index, return_argmax=True)
    assert torch.equal(ours, expected)
    with LocalTensorMode(WORLD):
        tensors = simulated(layouts.split(), hidden, weight, index)
        _, argmax = linear_log_probs(*tensors, return_argmax=True)
        assert difference(argmax, expected) == 0
        weight[3, 4] = torch.nan
        tensors = simulated(layouts.split(), hidden, weight, index)
        _, argmax = linear_log_probs(*tensors, return_argmax=True)
        assert difference(argmax, torch.full_like(expected, 3)) == 0


@pytest.mark.parametrize("function", ["selective", "several", "entropy"])
@pytest.mark.parametrize("layouts", ["1 R", "01 0R"])
def test_impossible_classes(layouts, function):
    logits = logits_of_impossible_classes()
    index = torch.tensor([5, 1, 0, 2, 3, 4])
    tensors = [logits, index]
    loss = exact = F.selective_log_softmax
    if function == "several":
        tensors[1] = torch.stack([index, torch.tensor([6, 0, 1, 2, 3, 4])], 1)
        exact = reference  # the op of whole rows has -inf where this has nan
    elif function == "entropy":
        tensors, layouts = [logits], layouts.split()[0]
        loss = exact = F.softmax_entropy
    found = compare(loss, tensors, layouts.split(), exact=exact)
    assert max(found.values()) <= 1e-12, found


def test_a_target_in_an_impossible_shard():
    """-inf, and not nan: another rank has logits."""
    logits = rand(4, 8)
    logits[:, :2] = -torch.inf
    index = torch.tensor([0, 1, 0, 1])
    assert (F.selective_log_softmax(logits, index) == -torch.inf).all()
    check(lambda x, i: F.selective_log_softmax(x, i).exp(), [logits, index], ["1", "R"])


@pytest.mark.parametrize("layouts", ["1 R", "01 0R"])
def test_float32_far_from_zero(layouts):
    """Logits near 700: with their logsumexp in one number gradients would be off by 5e-5."""
    logits, index = (rand(16, 64) * 3 + 700).float(), labels(16, classes=64)

    def loss(logits, index):
        return F.selective_log_softmax(logits, index) + F.softmax_entropy(logits)

    def exact(logits, index):
        return loss(logits.double(), index)

    found = compare(loss, [logits, index], layouts.split(), exact=exact)
    assert found["grad 0"] <= 1e-6
    assert found["loss"] <= 1e-5


@pytest.mark.parametrize("layouts", ["R 0 R", "0R R0 0R"])
def test_an_index_on_no_rank_is_refused(layouts):
    index = torch.tensor([0, 9, 1, 2, 0, 9])
    with pytest.raises(IndexError, match="target 9 is out of bounds"):
        check(linear_log_probs, [rand(6, 4), rand(5, 4), index], layouts.split())
    placed = ["1", "R"]
    with pytest.raises(IndexError, match="target 9 is out of bounds"):
        check(F.selective_log_softmax, [rand(6, 5), index], placed)
    with pytest.raises(IndexError, match="target -1 is out of bounds"):
        check(F.selective_log_softmax, [rand(6, 5), index.clamp(max=1) - 1], placed)
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        check(F.selective_log_softmax, [rand(6, 5), index.view(6, 1)], placed)


@pytest.mark.parametrize("layouts", ["0 0", "0R RR", "R R"])
def test_second_derivatives_of_sharded_rows(layouts):
    """The gradient of a penalty on the gradient."""

    def penalty(logits, index):
        result = F.selective_log_softmax(logits, index) * F.softmax_entropy(logits)
        (grad,) = torch.autograd.grad(result, logits, torch.ones_like(result), create_graph=True)
        return (grad * grad).sum()

    check(penalty, [rand(8, 5), labels(8, classes=5)], layouts.split())


def test_second_derivatives_of_sharded_classes_are_refused():
    x = dtensor(8, 12, placements=[Shard(1)]).requires_grad_()
    index = distribute_tensor(torch.zeros(8, dtype=torch.int64), x.device_mesh, [Replicate()])
    weight, hidden = dtensor(12, 6).requires_grad_(), dtensor(8, 6, placements=[Replicate()])
    for result, leaf in (
        (F.selective_log_softmax(x, index), x),
        (F.softmax_entropy(x), x),
        (linear_log_probs(hidden, weight, index), weight),
    ):
        ones = torch.ones_like(result)
        (grad,) = torch.autograd.grad(result, leaf, ones, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated once only"):
            grad.sum().backward()


def plain_index(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def wrong_shard():
    mesh, shape = init_device_mesh("cpu", (4,)), torch.Size((8, 12))
    local = torch.randn(8, 5)
    return DTensor.from_local(local, mesh, [Shard(1)], shape=shape, stride=(12, 1))


REFUSED = {
    "a plain index": (
        lambda: F.selective_log_softmax(dtensor(8, 12), plain_index(8)),
        "is a DTensor and index a plain tensor",
    ),
    "a plain hidden": (
        lambda: linear_log_probs(torch.randn(8, 6), dtensor(12, 6), plain_index(8)),
        "is a DTensor and input a plain tensor",
    ),
    "features sharded": (
        lambda: linear_log_probs(dtensor(8, 6), dtensor(12, 6, placements=[Shard(1)]), of_rows(8)),
        r"linear_log_probs: expected linear_weight to be sharded by Shard\(0\)",
    ),
    "classes sharded twice": (
        lambda: F.softmax_entropy(
            dtensor(8, 12, placements=[Shard(1)] * 2, mesh=init_device_mesh("cpu", (2, 2)))
        ),
        r"softmax_entropy: expected the classes to be sharded by Shard\(1\) along one dimension",
    ),
    "classes dealt out otherwise": (
        lambda: F.softmax_entropy(wrong_shard()),
        r"expected 3 of 12 classes on this rank of 4.*got 5",
    ),
}


def of_rows(rows):
    return distribute_tensor(plain_index(rows), init_device_mesh("cpu", (4,)), [Shard(0)])


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_sharded_form(case):
    function, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        function()


def test_sharded_classes_take_one_gather():
    index, several = torch.randint(CLASSES, (ROWS,)), torch.randint(CLASSES, (ROWS, 3))
    logits = torch.randn(ROWS, CLASSES)
    selective = F.selective_log_softmax
    assert collectives(selective, (logits, index), "1R") == ([(GATHER, ROWS * NUMBERS)], [])
    expected = [(GATHER, ROWS * (NUMBERS + 3))]
    assert collectives(selective, (logits, several), "1R") == (expected, [])
    assert collectives(F.softmax_entropy, (logits,), "1") == ([(GATHER, ROWS * NUMBERS)], [])


def test_sharded_rows_take_nothing():
    index, logits = torch.randint(CLASSES, (ROWS,)), torch.randn(ROWS, CLASSES)
    assert collectives(F.selective_log_softmax, (logits, index), "00") == ([], [])
    assert collectives(F.softmax_entropy, (logits,), "0") == ([], [])
    tensors = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN), index
    assert collectives(of_both(linear_log_probs), tensors, "0R0") == ([], [])


@pytest.mark.parametrize("rows_of_a_chunk", [1, 3, 8])
@pytest.mark.parametrize("hidden", ["R", "0"])
def test_linear_has_one_gather_of_statistics(hidden, rows_of_a_chunk, monkeypatch):
    """Whatever the number of chunks. A sharded sequence is gathered, its gradient scattered."""
    set_constants(monkeypatch, least_rows=rows_of_a_chunk, logits_bytes=1)
    index = torch.randint(CLASSES, (ROWS,))
    tensors = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN), index
    loss = of_both(linear_log_probs)
    forward, backward = collectives(loss, tensors, (hidden, "0", hidden))
    sequence = [(GATHER, ROWS // 4 * HIDDEN), (GATHER, ROWS // 4)] if hidden == "0" else []
    assert forward == [*sequence, (GATHER, ROWS * NUMBERS)]
    assert backward == ([(SCATTER, ROWS * HIDDEN)] if hidden == "0" else [])


@pytest.mark.parametrize("layouts", ["R 0 R", "0 R 0"])
def test_dtypes(layouts):
    mesh = init_device_mesh("cpu", (4,))
    tensors = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN), plain_index(ROWS)
    hidden, weight, index = (
        distribute(t, mesh, text) for t, text in zip(tensors, layouts.split(), strict=True)
    )
    half = hidden.bfloat16().requires_grad_()
    log_probs, entropy = linear_log_probs(half, weight.bfloat16(), index, return_entropy=True)
    assert log_probs.dtype == entropy.dtype == torch.float32
    log_probs.backward(torch.ones_like(log_probs))
    assert half.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        under = linear_log_probs(hidden, weight, index)
    assert torch.equal(under.to_local(), log_probs.detach().to_local())
    logits = dtensor(8, 12, placements=[Shard(1)]).bfloat16()
    assert F.softmax_entropy(logits).dtype == torch.bfloat16


@pytest.mark.parametrize("layouts", ["R 0 R", "0 R 0"])
def test_without_gradients(layouts):
    mesh = init_device_mesh("cpu", (4,))
    tensors = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN), plain_index(ROWS)
    sharded = [distribute(t, mesh, s) for t, s in zip(tensors, layouts.split(), strict=True)]
    assert not linear_log_probs(*sharded).requires_grad
    sharded[1].requires_grad_()
    assert linear_log_probs(*sharded).requires_grad
    _, argmax = linear_log_probs(*sharded, return_argmax=True)
    assert not argmax.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not linear_log_probs(*sharded).requires_grad
