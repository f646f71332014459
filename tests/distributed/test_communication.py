"""How much is communicated, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import compile_losses.functional as F
import compile_losses.ops  # noqa: F401
from tests.constants import set_constants
from tests.distributed.world import Collectives, distribute, mesh_for
from tests.linear_problems import LargestStorage

fused = torch.ops.fused
NONE, MEAN, SUM = range(3)
ROWS, CLASSES, HIDDEN = 8, 12, 6
GATHER, REDUCE, SCATTER = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"


def collectives(loss, tensors, layouts):
    """Those of the forward, and those of the backward."""
    mesh = init_device_mesh("cpu", mesh_for(layouts[0]))
    sharded = [distribute(t, mesh, text) for t, text in zip(tensors, layouts, strict=True)]
    for tensor in sharded:
        tensor.requires_grad_(tensor.is_floating_point())
    with Collectives() as forward:
        value = loss(*sharded)
    grad = distribute_tensor(torch.ones(value.shape), mesh, [Replicate()] * mesh.ndim)
    with Collectives() as backward:
        value.backward(grad)
    return forward.calls, backward.calls


def logits():
    return torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_sharded_classes(reduction, smoothing):
    """One gather of three numbers a row, or four with label smoothing."""
    forward, backward = collectives(
        lambda x, t: fused.cross_entropy(x, t, None, reduction, label_smoothing=smoothing),
        logits(),
        ("1", "R"),
    )
    assert forward == [(GATHER, ROWS * (4 if smoothing else 3))]
    assert backward == []


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        (("0", "0"), [(REDUCE, 2)]),
        (("00", "00"), [(REDUCE, 2)] * 2),
        (("0R", "0R"), [(REDUCE, 2)]),
        (("01", "0R"), [(GATHER, ROWS // 2 * 3), (REDUCE, 2)]),
        (("R", "R"), []),
    ],
)
def test_a_mean_is_one_reduction_of_two_numbers(layouts, expected):
    assert collectives(fused.cross_entropy, logits(), layouts) == (expected, [])


@pytest.mark.parametrize("reduction", [NONE, SUM])
@pytest.mark.parametrize("layouts", [("0", "0"), ("00", "00")], ids=" ".join)
def test_sums_and_unreduced_losses_of_rows(layouts, reduction):
    def loss(input, target):
        return fused.cross_entropy(input, target, None, reduction)

    forward, _ = collectives(loss, logits(), layouts)
    assert forward == []


@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_elementwise(reduction):
    tensors = torch.randn(8, 6), torch.randn(8, 6)
    assert collectives(lambda a, b: fused.mse_loss(a, b, reduction), tensors, ("0", "0")) == (
        [],
        [],
    )


@pytest.mark.parametrize("rows_of_a_chunk", [1, 3, 8])
@pytest.mark.parametrize("hidden", ["R", "0"])
def test_linear_has_one_gather_of_statistics(hidden, rows_of_a_chunk, monkeypatch):
    """Whatever the number of chunks. A sharded sequence is gathered, its gradient scattered."""
    set_constants(monkeypatch, least_rows=rows_of_a_chunk, logits_bytes=1)
    _, target = logits()
    tensors = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN), target
    forward, backward = collectives(fused.linear_cross_entropy, tensors, (hidden, "0", hidden))
    sequence = [(GATHER, ROWS // 4 * HIDDEN), (GATHER, ROWS // 4)] if hidden == "0" else []
    assert forward == [*sequence, (GATHER, ROWS * 3)]
    assert backward == ([(SCATTER, ROWS * HIDDEN)] if hidden == "0" else [])


def test_linear_holds_no_logits_of_all_rows(monkeypatch):
    """The largest tensor that the forward and the backward make is smaller than a rank's logits."""
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)
    rows, classes = 64, 400
    from compile_losses.ops.linear import vocabulary_parallel as leaf_ops

    input, weight = torch.randn(rows, 2), torch.randn(classes // 4, 2)
    target = torch.randint(classes // 4, (rows,))
    with LargestStorage() as largest:
        own = leaf_ops.parts_kernel(input, weight, target, None, None, 0, classes, -100, 0.0, None)
        _, stats, _ = fused.vocabulary_parallel_merge(
            own.unsqueeze(0), target, None, None, classes, SUM, -100, 0.0, torch.float32
        )
        leaf_ops.gradient_kernel(
            torch.ones(()), None, input, weight, target, None, None, stats, 0, classes, SUM, -100,
            0.0, None, True, True, False,
        )  # fmt: skip
    assert largest.bytes == 16 * (classes // 4) * 4  # a CPU takes 16 rows or more at a time


def dtensor(*shape, placements=None, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (4,))
    return distribute_tensor(torch.randn(shape), mesh, placements or [Shard(0)])


MIXED = {
    "a plain target": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64)),
    "a plain input": lambda x: F.mse_loss(torch.randn(8, 12), x),
    "a plain target of nll_loss": lambda x: F.nll_loss(x, torch.zeros(8, dtype=torch.int64)),
    "a plain target of softmaxes": lambda x: fused.softmax_kl_div(x, torch.randn(8, 12)),
    "a plain target of a mixture": lambda x: fused.softmax_js_div(x, torch.randn(8, 12)),
    "a plain weight of elements": lambda x: F.mse_loss(x, x, weight=torch.ones(8, 12)),
    "a plain class weight": lambda x: F.cross_entropy(x, x.softmax(1), torch.ones(12)),
    "a plain hidden": lambda x: F.linear_cross_entropy(
        torch.randn(8, 12), x, torch.zeros(8, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_plain_tensors_among_dtensors(case):
    with pytest.raises(
        RuntimeError, match=r"is a DTensor and .* a plain tensor.*distribute_tensor"
    ):
        MIXED[case](dtensor(8, 12))


def test_other_meshes():
    other = init_device_mesh("cpu", (2, 2))
    target = dtensor(8, 12, placements=(Shard(0), Replicate()), mesh=other)
    with pytest.raises(RuntimeError, match="expected all arguments on one mesh"):
        F.mse_loss(dtensor(8, 12), target)


def probabilities(x):
    return F.cross_entropy(x, x.softmax(1))


REFUSED = {
    "probabilities of sharded classes": (probabilities, "Redistribute the arguments"),
    "a mixture of sharded classes": (
        lambda x: fused.softmax_js_div(x, x, dim=1),
        "Redistribute the arguments",
    ),
    "finite logits of sharded classes": (
        lambda x: fused.softmax_finite_kl_div(x, x, dim=1),
        "Redistribute the arguments",
    ),
    "nll_loss of sharded classes": (
        lambda x: F.nll_loss(x, dtensor(8).abs().long()),
        "Give cross_entropy the logits",
    ),
    "features sharded": (
        lambda x: F.linear_cross_entropy(x, x, dtensor(8).abs().long()),
        r"sharded by Shard\(0\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_sharded_form(case):
    function, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        function(dtensor(8, 12, placements=[Shard(1)]))


def test_shards_that_are_not_dealt_out_as_torch_does():
    mesh = init_device_mesh("cpu", (4,))
    shape, stride = torch.Size((8, 12)), (12, 1)
    x = DTensor.from_local(torch.randn(8, 5), mesh, [Shard(1)], shape=shape, stride=stride)
    target = DTensor.from_local(torch.zeros(8, dtype=torch.int64), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"expected 3 of 12 classes on this rank of 4.*got 5"):
        F.cross_entropy(x, target)


def test_classes_over_two_dimensions_of_the_mesh():
    mesh = init_device_mesh("cpu", (2, 2))
    x = dtensor(8, 12, placements=[Shard(1), Shard(1)], mesh=mesh)
    target = distribute_tensor(torch.zeros(8, dtype=torch.int64), mesh, [Replicate()] * 2)
    with pytest.raises(RuntimeError, match="along one dimension of the mesh"):
        F.cross_entropy(x, target)


def test_a_second_derivative_of_sharded_classes_is_refused():
    x = dtensor(8, 12, placements=[Shard(1)]).requires_grad_()
    target = distribute_tensor(torch.zeros(8, dtype=torch.int64), x.device_mesh, [Replicate()])
    (grad,) = torch.autograd.grad(F.cross_entropy(x, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        grad.sum().backward()


@pytest.mark.parametrize("layouts", [("1", "R"), ("0", "0")], ids=" ".join)
def test_without_gradients(layouts):
    mesh = init_device_mesh("cpu", (4,))
    x, target = (distribute(t, mesh, text) for t, text in zip(logits(), layouts, strict=True))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not fused.cross_entropy(x.requires_grad_(), target).requires_grad
    assert not fused.cross_entropy(x.detach(), target).requires_grad


@pytest.mark.parametrize("layouts", [("0", "0"), ("1", "R")], ids=" ".join)
def test_dtypes_follow_torch(layouts):
    mesh = init_device_mesh("cpu", (4,))
    x, target = (distribute(t, mesh, text) for t, text in zip(logits(), layouts, strict=True))
    half = x.bfloat16().requires_grad_()
    assert fused.cross_entropy(half, target).dtype == torch.bfloat16
    assert fused.cross_entropy(half, target, dtype=torch.float32).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused.cross_entropy(half, target)
    assert loss.dtype == torch.float32
    loss.backward(distribute_tensor(torch.ones(()), mesh, [Replicate()], src_data_rank=None))
    assert half.grad.dtype == torch.bfloat16
