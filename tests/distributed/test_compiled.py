"""Losses of DTensors in compiled functions: what is rewritten, and what is communicated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_losses
from compile_losses.recognize.graph.aten_replay import kept_source
from tests.constants import set_constants
from tests.distributed.world import (
    FLATTENS,
    NO_FLATTENING,
    WORLD,
    Collectives,
    distribute,
    mesh_for,
)

ROWS, CLASSES, HIDDEN = 8, 12, 6


def arguments(layouts, *shapes):
    mesh = init_device_mesh("cpu", mesh_for(layouts[0]))
    tensors = []
    for layout, shape in zip(layouts, shapes, strict=True):
        if len(shape) == 1:
            tensors.append(distribute(torch.randint(CLASSES, shape), mesh, layout))
        else:
            tensors.append(distribute(torch.randn(shape), mesh, layout).requires_grad_())
    return tensors


def compiled(function, tensors, **options):
    """The report, and the calls in the forward and in the backward graph."""
    graphs, reports = [], []

    def keep(graph, _):
        graphs.append([n for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph.forward)

    inner = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )

    def backend(graph, inputs):
        reports.append(compile_losses.rewrite(graph).meta["compile_losses"])
        return inner(graph, inputs)

    torch._dynamo.reset()
    loss = torch.compile(function, backend=backend, fullgraph=True, **options)(*tensors)
    mesh = tensors[0].device_mesh
    loss.backward(distribute_tensor(torch.ones(loss.shape), mesh, [Replicate()] * mesh.ndim))
    (report,) = reports
    return report, graphs


def skip_unless_torch_traces(function, tensors, **options):
    """Without us, too, torch 2.14 and 2.15 fail to gather from a DTensor of symbolic sizes, and
    torch 2.12 to flatten one that is sharded in its second dimension."""
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="eager", fullgraph=True, **options)(*tensors)
    except (
        torch._dynamo.exc.TorchRuntimeError,
        torch._dynamo.exc.InternalTorchDynamoError,
    ) as error:
        pytest.skip(reason=f"torch itself does not trace it: {str(error).splitlines()[0]}")


def collectives_of(graph):
    found = []
    for node in graph:
        if isinstance(node.target, torch._ops.OpOverload):
            namespace, _, name = node.target._schema.name.partition("::")
            if namespace == "_c10d_functional" and name not in Collectives.FREE:
                found.append((name, node.args[0].meta["val"].numel()))
    return found


fused = torch.ops.fused
#: The function; where its arguments lie; their shapes; the op, called alone.
CASES = {
    "sharded classes": (F.cross_entropy, "1 R", "LT", fused.cross_entropy),
    "sharded rows": (F.cross_entropy, "0 0", "LT", fused.cross_entropy),
    "both": (F.cross_entropy, "01 0R", "LT", fused.cross_entropy),
    "uneven classes": (F.cross_entropy, "1 R", "UT", fused.cross_entropy),
    "elements": (F.mse_loss, "0 0", "LL", fused.mse_loss),
    "sequences": (
        lambda x, t: F.cross_entropy(x.flatten(0, 1), t),
        "1 R",
        "ST",
        lambda x, t: fused.cross_entropy(x.flatten(0, 1), t),
    ),
    "written out": (
        lambda x, t: -x.log_softmax(1).gather(1, t.unsqueeze(1)).mean(),
        "0 0",
        "LT",
        fused.cross_entropy,
    ),
    "a linear layer": (
        lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t),
        "R 0 R",
        "HWT",
        fused.linear_cross_entropy,
    ),
    "a linear layer of a sharded batch": (
        lambda h, w, t: F.cross_entropy(F.linear(h, w), t),
        "0 R 0",
        "HWT",
        fused.linear_cross_entropy,
    ),
}
SHAPES = {
    "L": (ROWS, CLASSES),
    "U": (ROWS, CLASSES + 1),
    "S": (2, ROWS // 2, CLASSES),
    "T": (ROWS,),
    "H": (ROWS, HIDDEN),
    "W": (CLASSES, HIDDEN),
}
#: DTensors of symbolic sizes can't be flattened; whether a linear layer pays needs its sizes.
STATIC = ("sequences", "a linear layer", "a linear layer of a sharded batch")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "dynamic"),
    [(case, dynamic) for case in CASES for dynamic in (False, True)[: 2 - (case in STATIC)]],
)
def test_as_much_communication_as_in_eager_mode(case, dynamic, monkeypatch):
    if case == "sequences" and not FLATTENS:
        pytest.skip(reason=NO_FLATTENING)
    set_constants(monkeypatch, least_rows=1, logits_bytes=1)
    function, layouts, shapes, alone = CASES[case]
    tensors = arguments(layouts.split(), *(SHAPES[shape] for shape in shapes))
    skip_unless_torch_traces(function, tensors, dynamic=dynamic)
    report, (forward, backward) = compiled(function, tensors, dynamic=dynamic)
    assert [site.status for site in report.sites] == ["rewritten"], report
    assert ("linear" in case) == (report.sites[0].op == "linear_cross_entropy")

    for tensor in tensors:
        tensor.grad = None
    with Collectives() as eager:
        loss = alone(*tensors)
    mesh = tensors[0].device_mesh
    grad = distribute_tensor(torch.ones(()), mesh, [Replicate()] * mesh.ndim)
    with Collectives() as eager_backward:
        loss.backward(grad)
    assert len(collectives_of(forward)) == len(eager.calls)
    if not dynamic:
        assert collectives_of(forward) == eager.calls
    assert collectives_of(backward) == eager_backward.calls


def of_layer(part):
    return lambda h, w, t: fused.linear_log_probs(h, w, t)[part]


log_softmax, entropy = fused.selective_log_softmax, lambda x, _: fused.softmax_entropy(x)
#: The function, which calls our ops; where its arguments lie; their shapes. A result that goes
#: through an op of DTensors has the mesh of an earlier call, which torch 2.13 does not trace.
CALLS = {
    "log-probabilities, sharded classes": (log_softmax, "1 R", "LT"),
    "log-probabilities, sharded rows": (log_softmax, "0 0", "LT"),
    "log-probabilities, both": (log_softmax, "01 0R", "LT"),
    "log-probabilities, uneven classes": (log_softmax, "1 R", "UT"),
    "entropies, sharded classes": (entropy, "1 R", "LT"),
    "entropies, sharded rows": (entropy, "0 0", "LT"),
    "log-probabilities of a layer, sharded classes": (of_layer(0), "R 0 R", "HWT"),
    "entropies of a layer, sharded classes": (of_layer(1), "R 0 R", "HWT"),
    "log-probabilities of a layer, sharded sequence": (of_layer(0), "0 0 0", "HWT"),
    "log-probabilities of a layer, sharded rows": (of_layer(0), "0 R 0", "HWT"),
    "entropies of a layer, sharded rows": (of_layer(1), "0 R 0", "HWT"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CALLS)
def test_calls_communicate_as_in_eager_mode(case, monkeypatch):
    set_constants(monkeypatch, least_rows=1, logits_bytes=1)
    function, layouts, shapes = CALLS[case]
    tensors = arguments(layouts.split(), *(SHAPES[shape] for shape in shapes))
    skip_unless_torch_traces(function, tensors)
    _, (forward, backward) = compiled(function, tensors)
    with Collectives() as eager:
        result = function(*tensors)
    with Collectives() as eager_backward:
        result.backward(torch.ones_like(result))
    assert collectives_of(forward) == eager.calls
    assert collectives_of(backward) == eager_backward.calls
    in_forward = {str(node.target) for node in forward}
    assert any("statistics" in name for name in in_forward), in_forward


@pytest.mark.parametrize("layouts", [("0", "R", "0", "R"), ("R", "0", "R", "0")])
def test_divergences_of_layers_are_of_logits(layouts, monkeypatch):
    """A step of DTensors gets the op of logits; that of both layers is called by name."""
    set_constants(monkeypatch, least_rows=2, logits_bytes=1)

    def loss(h, w, t, tw):
        with torch.no_grad():
            teacher = F.linear(t, tw)
        return F.kl_div(F.linear(h, w).log_softmax(-1), teacher.softmax(-1), reduction="batchmean")

    shapes = (ROWS, HIDDEN), (CLASSES, HIDDEN), (ROWS, HIDDEN), (CLASSES, HIDDEN)
    tensors = arguments(layouts, *shapes)
    for site in compile_losses.explain(loss, *tensors).losses:
        assert "linear" not in site.op
        assert "DTensors" in site.reason or site.op == "kl_div"
    h, w, t, tw = (tensor.detach() for tensor in tensors)
    assert fused.linear_softmax_kl_div(h, w, t, target_weight=tw).shape == ()


@pytest.mark.usefixtures("kernels_for_small_losses")
def test_the_gradient_of_sharded_rows_is_in_the_forward():
    """The lower passes see a rank's own part of the loss, and treat it like any other."""
    tensors = arguments(("0", "R", "0"), (ROWS, HIDDEN), (CLASSES, HIDDEN), (ROWS,))
    report = compile_losses.explain(lambda h, w, t: F.cross_entropy(h @ w.t(), t), *tensors)
    (site,) = report.losses
    assert site.status == "rewritten"
    assert "gradient in forward" in site.plan
    assert "in place" in site.plan


def test_a_rank_s_part_of_the_loss_is_left_to_torch():
    """Ours is placed otherwise: a sum of parts, where torch's is an average of them."""
    tensors = arguments(("0", "0"), (ROWS, CLASSES), (ROWS, CLASSES))
    report = compile_losses.explain(lambda x, y: F.mse_loss(x, y).to_local(), *tensors)
    (site,) = report.losses
    assert site.status == "declined"
    assert "a rank's part of it is read" in site.reason


def test_what_has_no_sharded_form_is_left_to_torch():
    tensors = arguments(("1", "1"), (ROWS, CLASSES), (ROWS, CLASSES))
    report = compile_losses.explain(lambda x, q: F.cross_entropy(x, q.softmax(1)), *tensors)
    (site,) = report.losses
    assert site.status == "declined"
    assert "no sharded form" in site.reason


def gathered(h, w, t):
    return F.cross_entropy(F.linear(h, w).redistribute(placements=[Replicate()]), t)


def gathered_to_local(h, w, t):
    logits = F.linear(h, w).redistribute(placements=[Replicate()]).to_local()
    return DTensor.from_local(F.cross_entropy(logits, t.to_local()), t.device_mesh, [Replicate()])


def gathered_whole(h, w, t):
    loss = F.cross_entropy(F.linear(h, w).full_tensor(), t.full_tensor())
    return DTensor.from_local(loss, t.device_mesh, [Replicate()])


@pytest.mark.parametrize("loss", [gathered, gathered_to_local, gathered_whole])
def test_gathered_logits_are_held(loss):
    tensors = arguments("R0R", (ROWS, HIDDEN), (CLASSES, HIDDEN), (ROWS,))
    skip_unless_torch_traces(loss, tensors)
    report, _ = compiled(loss, tensors)
    (site,) = report.losses
    assert (site.op, site.status) == ("cross_entropy", "rewritten")
    assert "without its linear layer: its logits are gathered" in site.reason


def test_own_classes_are_not_gathered():
    """A loss of each rank's own logits is no loss of all of them."""

    def loss(h, w, t):
        own = F.linear(h, w).to_local()
        mean = F.cross_entropy(own, t.to_local() % own.shape[1])
        return DTensor.from_local(mean, t.device_mesh, [Partial()])

    tensors = arguments("R0R", (ROWS, HIDDEN), (CLASSES, HIDDEN), (ROWS,))
    report, _ = compiled(loss, tensors)
    assert "gathered" not in report.losses[0].reason


def prim_redistribute(tensor):
    return tensor


@pytest.mark.parametrize("module", ["torch._dynamo.variables.tensor", "somebody.else"])
@pytest.mark.parametrize("layout", ["1", "R"])
def test_a_redistribution_of_torch_2_11(layout, module, monkeypatch):
    """There Dynamo has a function in place of the method."""
    monkeypatch.setattr(prim_redistribute, "__module__", module)
    sharded, redistributed = arguments(("1", layout), (ROWS, CLASSES), (ROWS, CLASSES))
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    node = graph.call_function(prim_redistribute, (source,))
    source.meta["example_value"], node.meta["example_value"] = sharded, redistributed
    keeps = layout == "1" and module.startswith("torch.")
    assert kept_source(node) is (source if keeps else None)


def test_ranks_share_no_compiled_graphs():
    """A graph of sharded classes holds where a rank's shard begins, which torch's keys do not."""
    keys = []
    for rank in range(2):
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        with compile_losses.enable():
            keys.append(torch._inductor.config.joint_custom_pre_pass.uuid())
    assert keys[0] != keys[1]
