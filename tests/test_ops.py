"""The ops by themselves: values, layouts, repeatability, opcheck, dtypes."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from compile_losses.lower.fused_calls import is_elementwise
from tests.accuracy import RATIO, SIMILAR, assert_accurate, similar
from tests.calls import deterministic, dtypes, leaves, loss_and_gradients, record_leaf_calls, specs
from tests.opchecks import OpChecks
from tests.specs import SPECS
from tests.specs.spec import Sample


@pytest.mark.sampled(3)
@specs
@dtypes
def test_accuracy(spec, dtype, device):
    for sample in spec.samples(device, dtype):
        exact_tensors = [
            t.double().cpu() if t.is_floating_point() else t.cpu() for t in sample.tensors
        ]
        ours, our_gradients = loss_and_gradients(spec.op, sample, sample.tensors)
        eager, eager_gradients = loss_and_gradients(spec.torch_loss, sample, sample.tensors)
        exact, exact_gradients = loss_and_gradients(spec.exact, sample, exact_tensors)
        results = zip(
            (ours, *our_gradients),
            (eager, *eager_gradients),
            (exact, *exact_gradients),
            strict=True,
        )
        for i, result in enumerate(results):
            check_result(spec, sample, i, *result)


def check_result(spec, sample, index, ours, eager, exact):
    """Compares the loss (index 0) or a gradient.

    Torch's error is 0 where its own result is the reference, and says little where it is that of
    one number: there its errors in calls like this one count.
    """
    what = f"{sample.name}, gradient {index - 1}" if index else sample.name
    try:
        assert_accurate(ours, eager, exact, what)
    except AssertionError:
        if ours.dtype != torch.float64 and exact.numel() > 1:
            raise
        like = worst_error(spec, sample, index, ours.dtype)
        assert_accurate(ours, eager, exact, what, like)


def worst_error(spec, sample, index, dtype):
    """The largest error of a loss or gradient that torch makes in calls like this one.

    Where terms cancel, an error is of their size and not of the result's.
    """
    variants = [(dtype, 1.0)] + [(torch.float32, RATIO)] * (dtype == torch.float64)
    worst = 0.0
    for seed, (rounded, ratio) in itertools.product(range(SIMILAR), variants):
        generator = torch.Generator().manual_seed(seed)
        tensors = [similar(t, generator, rounded) for t in sample.tensors]
        exact_tensors = [t.double().cpu() if t.is_floating_point() else t.cpu() for t in tensors]
        loss, gradients = loss_and_gradients(spec.torch_loss, sample, tensors)
        exact_loss, exact_gradients = loss_and_gradients(spec.exact, sample, exact_tensors)
        result, exact = (loss, *gradients)[index], (exact_loss, *exact_gradients)[index]
        error = (result.double().cpu() - exact.double()).abs()
        worst = max(worst, ratio * error.nan_to_num(0, 0).max().item())
    return worst


ELEMENTWISE = [name for name in SPECS if is_elementwise(name)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_sizes(name, dtype, device):
    """Full tiles, the packets behind them, and the elements before and after all packets."""
    spec = SPECS[name]
    tile = 512 * 4 * 4
    sizes = (3, 100, tile // 4, tile - 1, tile, tile + 5, 2 * tile + 2052, 9 * tile - 8)
    for size, offset, reduction in itertools.product(sizes, (0, 1, 4), range(3)):
        tensors = tuple(t.to(device)[offset:] for t in spec.operands(size + offset, dtype=dtype))
        sample = Sample(f"{size} from {offset}", tensors, {"reduction": reduction})
        grad_output = None if reduction == 0 else torch.ones((), dtype=torch.float64)
        ours, eager, exact = (
            loss_and_gradients(function, sample, operands, grad_output)
            for function, operands in (
                (spec.op, tensors),
                (spec.torch_loss, tensors),
                (spec.exact, tuple(t.double().cpu() for t in tensors)),
            )
        )
        results = [(ours[0], *ours[1])]
        if reduction != 0:
            (_, args, _), *_ = record_leaf_calls(lambda s=sample: s.call(spec.op))
            results.append(spec.part("with_grad")(*args))
        for loss, gradient in results:
            assert_accurate(loss, eager[0], exact[0], sample.name)
            assert_accurate(gradient, eager[1][0], exact[1][0], f"{sample.name}, gradient")


@pytest.mark.sampled(3)
@specs
@dtypes
def test_repeatable(spec, dtype, device):
    for sample in spec.samples(device, dtype):
        first, *others = [loss_and_gradients(spec.op, sample, sample.tensors) for _ in range(3)]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("shape", [(600, 4099), (5, 131_101)], ids=["rows", "wide rows"])
@dtypes
@specs
def test_repeatable_20_times(spec, dtype, shape, device):
    """Bit for bit where all threads or blocks share a loss; in torch's deterministic mode, too."""
    tensors = tuple(t.to(device) for t in spec.operands(*shape, dtype=dtype))
    sample = Sample(str(shape), tensors)
    (_, args, _), *_ = record_leaf_calls(lambda: sample.call(spec.op))

    def results():
        loss, gradients = loss_and_gradients(spec.op, sample, tensors)
        fused = spec.part("with_grad")(*args) if "with_grad" in spec.parts else ()
        return loss, *gradients, *fused

    runs = [results() for _ in range(20)]
    with deterministic():
        runs.append(results())
    for run in runs:
        torch.testing.assert_close(run, runs[0], rtol=0, atol=0)


@pytest.mark.sampled(2)
@specs
def test_threads_do_not_change_results(spec):
    threads = torch.get_num_threads()
    try:
        for sample in spec.samples("cpu", torch.float32):
            if sample.weights and sample.options["reduction"] == 1 and "weight" in sample.weights:
                continue  # torch.sum adds the weight up in an order that depends on the threads
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(loss_and_gradients(spec.op, sample, sample.tensors))
            for other in results[1:]:
                torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(threads)


@specs
def test_unreduced_layout_is_torchs(spec, device):
    """The strides of an unreduced loss, and of gradients, are torch's wherever shapes are equal."""
    for sample in spec.samples(device, torch.float32):
        shapes = {t.shape for t in sample.tensors[:2]}
        if sample.options["reduction"] != 0 or (len(shapes) > 1 and spec.broadcasts):
            continue
        ours = sample.call(spec.op)
        assert ours.stride() == sample.call(spec.torch_loss).stride(), sample.name


@pytest.mark.sampled(3)
@specs
def test_opcheck(spec, device):
    check_public(spec, device)


@pytest.mark.slow
@specs
def test_opcheck_in_full(spec):
    """Every call traced, however alike they are."""
    check_public(spec, "cpu", every=True)


def check_public(spec, device, every=False):
    opcheck = OpChecks(every)
    for sample in spec.samples(device, torch.float32):
        if sample.tensors[0].numel() > 10_000:
            continue  # opcheck runs each op tens of times; size adds nothing
        args, kwargs = sample.arguments(leaves(sample))
        opcheck(spec.op.default, args, kwargs, sample.name)


def reduction_of(op, args):
    return args[[argument.name for argument in op._schema.arguments].index("reduction")]


def value_arguments(spec, forward, args):
    """What ``X_value`` takes for a call of ``X_forward``, if it can stand in for it."""
    if "value" not in spec.parts:
        return None
    op = spec.part("value")
    given = dict(zip((argument.name for argument in forward._schema.arguments), args, strict=False))
    if given["weight"] is not None or given["dtype"] != given["input"].dtype:
        return None
    values = (given[argument.name] for argument in op._schema.arguments)
    return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values)


@pytest.mark.sampled(8)
@specs
def test_opcheck_leaves(spec, device):
    check_leaves(spec, device)


@pytest.mark.slow
@specs
def test_opcheck_leaves_in_full(spec):
    """Every call traced, however alike they are."""
    check_leaves(spec, "cpu", every=True)


def check_leaves(spec, device, every=False):
    """Forward and backward as autograd calls them, and the ops that passes insert."""
    seen, names, opcheck = set(), set(), OpChecks(every)
    for sample in spec.samples(device, torch.float32):
        # Reductions to one number are alike in what is checked here.
        name = (sample.name, sample.options["reduction"] == 0)
        if sample.tensors[0].numel() > 10_000 or name in names:
            continue
        names.add(name)
        calls = record_leaf_calls(lambda s=sample: loss_and_gradients(spec.op, s, s.tensors))
        forward_args = calls[0][1]
        reduced = sample.options["reduction"] != 0
        broadcast = spec.broadcasts and (
            forward_args[0].shape != torch.broadcast_shapes(*(t.shape for t in forward_args[:2]))
        )
        if reduced and not broadcast and "with_grad" in spec.parts:
            with_grad = spec.part("with_grad")
            detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in forward_args]
            calls.append((with_grad, tuple(detached), {}))
            in_place = spec.part("with_grad_")
            calls.append((in_place, (detached[0].clone(), *detached[1:]), {}))
            factor = torch.full((), 0.3, device=device)
            calls.append((with_grad, tuple(detached), {"grad_output": factor}))
            calls.append((in_place, (detached[0].clone(), *detached[1:]), {"grad_output": factor}))
        if alone := value_arguments(spec, *calls[0][:2]):
            calls.append((spec.part("value"), alone, {}))
        for op, args, kwargs in calls:
            seen.add(op.name().removeprefix("fused::"))
            opcheck(op, args, kwargs, sample.name)
    assert seen == {f"{spec.name}_{part}" for part in spec.parts}


@pytest.mark.parametrize("name", [spec.name for spec in SPECS.values() if "value" in spec.parts])
@dtypes
def test_value(name, dtype, device):
    """Without its statistics the loss is the same, bit for bit."""
    spec = SPECS[name]
    ran = 0
    for sample in spec.samples(device, dtype):
        (forward, args, _), *_ = record_leaf_calls(lambda s=sample: s.call(spec.op))
        if alone := value_arguments(spec, forward, args):
            loss, *_ = forward(*args)
            torch.testing.assert_close(
                spec.part("value")(*alone), loss, rtol=0, atol=0, equal_nan=True
            )
            ran += 1
    assert ran > 5


@pytest.mark.sampled(6)
@specs
@dtypes
@pytest.mark.parametrize("factor", [None, -3.75], ids=["unit", "factor"])
def test_with_grad(spec, factor, dtype, device):
    """One pass gives the loss and its gradient for one grad_output, also over the input, and also
    ahead, where another gradient is not."""
    if "with_grad" not in spec.parts:
        pytest.skip(reason=f"{spec.name} has no such op")
    ran = 0
    grad_output = torch.tensor(factor or 1.0, dtype=torch.float64)
    for sample in spec.samples(device, dtype):
        (op, args, _), *_ = record_leaf_calls(lambda s=sample: s.call(spec.op))
        shapes = [t.shape for t in args[:2]]
        if (
            0 not in sample.differentiable
            or sample.options["reduction"] == 0
            or (spec.broadcasts and shapes[0] != torch.broadcast_shapes(*shapes))
        ):
            continue
        if reduction_of(op, args) != sample.options["reduction"]:
            continue  # a weighted mean is a sum, and a division outside of the leaf ops
        exact_tensors = [
            t.double().cpu() if t.is_floating_point() else t.cpu() for t in sample.tensors
        ]
        eager, (eager_gradient, *_) = loss_and_gradients(
            spec.torch_loss, sample, sample.tensors, grad_output
        )
        exact, (exact_gradient, *_) = loss_and_gradients(
            spec.exact, sample, exact_tensors, grad_output
        )
        # In the dtypes that a factor may have, and in any shape that holds one number.
        kind, shape = [(dtype, ()), (torch.float32, (1,)), (torch.float64, (1, 1, 1))][ran % 3]
        given = {}
        if factor is not None:
            given["grad_output"] = grad_output.to(device, kind).reshape(shape)
        loss, gradient = spec.part("with_grad")(*args, **given)
        overwritten = torch.empty_like(args[0]).copy_(args[0])
        in_place = spec.part("with_grad_")(overwritten, *args[1:], **given)
        for result in (loss, in_place):
            check_result(spec, sample, 0, result, eager, exact)
        for result in (gradient, overwritten):
            assert_accurate(result, eager_gradient, exact_gradient, f"{sample.name}, gradient")
        one, elements = torch.ones((), device=device), []
        for _ in range(2):
            again, element = spec.part("ahead")(*args, **given)
            elements.append(element)
            check_result(spec, sample, 0, again, eager, exact)
        for element in elements:
            ahead = spec.part("ahead_gradient")(one, element, *args, **given)
            assert_same_bits(ahead, gradient)
            assert ahead.stride() == gradient.stride()
        ran += 1
    assert ran > 5


def assert_same_bits(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [1.0, 3.0, -0.5, 0.0, float("inf"), float("nan")])
@dtypes
def test_scale(factor, dtype, device):
    for shape in ((), (0,), (7,), (3, 1000), (70_001,)):
        for grad in (torch.randn(shape, device=device).to(dtype),):
            number = torch.tensor(factor, device=device)
            expected = (grad * number.to(dtype)).to(dtype)
            torch.testing.assert_close(
                torch.ops.fused.scale(grad, number), expected, rtol=0, atol=0, equal_nan=True
            )
            scaled = grad.clone()
            assert torch.ops.fused.scale_(scaled, number) is None
            torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)
    transposed = torch.randn(5, 7, device=device).to(dtype).t()
    expected = transposed * 2
    torch.ops.fused.scale_(transposed, torch.tensor(2.0, device=device))
    torch.testing.assert_close(transposed, expected)
    gaps = torch.randn(4, 6, device=device).to(dtype)
    expected = gaps.clone()
    expected[:, ::2] *= torch.tensor(factor, device=device).to(dtype)
    torch.ops.fused.scale_(gaps[:, ::2], torch.tensor(factor, device=device))
    torch.testing.assert_close(gaps, expected, equal_nan=True)
    arguments = transposed.contiguous(), torch.ones((), device=device)
    for op in (torch.ops.fused.scale, torch.ops.fused.scale_, torch.ops.fused.scale_saved):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("retain_graph", [True, False])
def test_scale_saved(retain_graph, device):
    """It takes over what its backward is about to free, and nothing else."""
    unit = torch.randn(3, 5, device=device)
    memory, expected = unit.data_ptr(), 2 * unit
    scaled = []

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(unit)
            return x.sum()

        @staticmethod
        def backward(ctx, factor):
            scaled.append(torch.ops.fused.scale_saved(*ctx.saved_tensors, factor))
            return scaled[-1]

    outside = torch.ops.fused.scale_saved(unit, torch.full((), 2.0, device=device))
    assert outside.data_ptr() != unit.data_ptr()
    loss = 2 * Scaled.apply(torch.zeros(3, 5, device=device, requires_grad=True))
    loss.backward(retain_graph=retain_graph)
    assert (scaled[0].data_ptr() == memory) is not retain_graph
    assert (unit.numel() == 0) is not retain_graph  # an op may not return what it was given
    torch.testing.assert_close([outside, scaled[0]], [expected, expected])


@specs
def test_mixed_dtypes_and_dtype_argument(spec, device):
    """Kernels read each operand in its own dtype; `dtype` equals casting input first."""
    input, target = spec.operands(16, 24, dtype=torch.float32)
    input, target = input.to(device, torch.bfloat16), target.to(device)
    leaf, cast = input.clone().requires_grad_(), input.clone().requires_grad_()
    ours = spec.op(leaf, target, dtype=torch.float32)
    torchs = spec.torch_loss(cast.float(), target)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(torch.autograd.grad(ours, leaf), torch.autograd.grad(torchs, cast))


@specs
def test_float64_for_narrower_arguments(spec, device):
    """Asked for in float64 a loss is computed in it, whatever its arguments are in."""
    input, target = (t.to(device) for t in spec.operands(16, 24, dtype=torch.float32))
    cast = target.double() if target.is_floating_point() else target
    leaf = input.clone().requires_grad_()
    for reduction in (0, 1, 2):
        ours = spec.op(leaf, target, reduction=reduction, dtype=torch.float64)
        expected = spec.op(input.double(), cast, reduction=reduction)
        torch.testing.assert_close(ours, expected)
        (gradient,) = torch.autograd.grad(ours.sum(), leaf)
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("layout", ["dense", "gaps", "sequences"])
@pytest.mark.parametrize(("rows", "cols"), [(1580, 13184), (5144, 4992), (20_000, 2304)])
@dtypes
def test_cross_entropy_of_many_long_rows(dtype, rows, cols, layout):
    """The sums over all rows begin while the last of them are under way."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, cols, generator=generator, device="cuda").to(dtype)
    logits[1::50, :2000] = -torch.inf
    logits[2], logits[3, 7], logits[4, 9] = -torch.inf, torch.nan, torch.inf
    logits[5::60, 11] = 1e4
    if layout == "gaps":  # and classes behind the last packet of 16 bytes
        logits = logits[:, : cols - 125]
    classes = logits.shape[1]
    target = torch.randint(2000, classes, (rows,), generator=generator, device="cuda")
    target[::7] = -100
    weight = torch.rand(classes, generator=generator, device="cuda").to(dtype)
    if layout == "sequences":
        logits, target = logits.view(2, -1, classes).transpose(1, 2), target.view(2, -1)

    def results(function, logits, weight):
        losses = function(logits, target, weight, reduction=0)
        # Of no row that is special.
        mean = function(logits, torch.where(losses.isfinite(), target, -100))
        leaf = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf, target, weight), leaf)
        gradient = gradient.transpose(1, 2) if layout == "sequences" else gradient
        return losses, mean, gradient.reshape(rows, classes)[::97].clone()

    spec = SPECS["cross_entropy"]
    ours = results(spec.op, logits, weight)
    eager = results(spec.torch_loss, logits, weight)
    exact = results(spec.torch_loss, logits.double(), weight.double())
    for what, *values in zip(("losses", "mean", "gradient"), ours, eager, exact, strict=True):
        assert_accurate(*values, what)
    again = results(spec.op, logits, weight)
    torch.testing.assert_close(again, ours, rtol=0, atol=0, equal_nan=True)


ROW_PAIRS = [
    "cross_entropy_probabilities",
    "softmax_kl_div",
    "softmax_js_div",
    "softmax_finite_kl_div",
]


@pytest.mark.gpu
@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("layout", ["dense", "gaps", "shifted"])
@pytest.mark.parametrize("name", ROW_PAIRS)
@dtypes
def test_many_row_pairs_of_few_classes(name, dtype, layout):
    """Rows that share a warp, and differ in where their packets of 16 bytes begin."""
    spec, rows = SPECS[name], 70_001
    generator = torch.Generator("cuda").manual_seed(0)
    for classes in (1, 2, 3, 10, 21, 32, 100, 257):

        def operand(classes=classes):
            shape = (rows, classes + 5 if layout == "gaps" else classes)
            numel = shape[0] * shape[1] + 1
            flat = torch.randn(numel, generator=generator, device="cuda").to(dtype)
            return flat[layout == "shifted" :][: numel - 1].view(shape)[:, :classes]

        input, target = operand(), operand()
        if name == "cross_entropy_probabilities":
            target.copy_(target.softmax(1))
        mean = Sample(f"mean, {classes} classes", (input.clone(), target), {"reduction": 1})
        input[1::50, : classes // 2] = -torch.inf
        input[2], input[3, -1], input[4, 0] = -torch.inf, torch.nan, torch.inf
        input[5::60, -1] = 1e4
        losses = Sample(f"losses, {classes} classes", (input, target), {"reduction": 0})
        for sample in (losses, mean):
            exact_tensors = tuple(t.double() for t in sample.tensors)
            ours, our_gradients = loss_and_gradients(spec.op, sample, sample.tensors)
            eager, eager_gradients = loss_and_gradients(spec.torch_loss, sample, sample.tensors)
            exact, exact_gradients = loss_and_gradients(spec.torch_loss, sample, exact_tensors)
            assert_accurate(ours, eager, exact, sample.name)
            usual = exact.isfinite().expand(rows)  # elsewhere torch's gradient of target is nan
            for gradients in zip(our_gradients, eager_gradients, exact_gradients, strict=True):
                assert_accurate(*(g[usual] for g in gradients), f"{sample.name}, gradient")
        (_, args, _), *_ = record_leaf_calls(lambda s=mean: s.call(spec.op))
        unit = torch.ones((), dtype=torch.float64)
        (_, (eager, *_)), (_, (exact, *_)) = (
            loss_and_gradients(spec.torch_loss, mean, tensors, unit)
            for tensors in (mean.tensors, exact_tensors)
        )
        loss, gradient, *_ = spec.part("with_grad")(*args)
        torch.testing.assert_close(loss, ours, rtol=0, atol=0)
        assert_accurate(gradient, eager, exact, f"{mean.name}, with the loss")


@pytest.mark.gpu
@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("numel", [5_000_003, 33_333_333, 240_000_005])
def test_large_losses_are_shared_out_whole(dtype, numel):
    """More tiles than blocks that run at a time. Differences are integers, of exact squares."""
    generator = torch.Generator("cuda").manual_seed(0)
    difference = torch.randint(-3, 4, (numel,), generator=generator, device="cuda").to(dtype)
    target = torch.randint(-99, 99, (numel,), generator=generator, device="cuda").to(dtype)
    input = target + difference
    total = (difference * difference).sum(dtype=torch.float64)

    def results():
        mean = torch.ops.fused.mse_loss(input, target, dtype=torch.float32)
        sum_, gradient = torch.ops.fused.mse_loss_with_grad(input, target, None, 2, torch.float32)
        return mean, sum_, gradient, torch.ops.fused.mse_loss(input, target, reduction=0)

    mean, sum_, gradient, losses = results()
    assert mean.item() == pytest.approx(total.item() / numel, rel=2**-23)
    assert sum_.item() == pytest.approx(total.item(), rel=2**-23)
    assert gradient.equal(2 * difference)
    assert losses.equal(difference * difference)
    for again, first in zip(results(), (mean, sum_, gradient, losses), strict=True):
        assert again.equal(first)


@pytest.mark.usefixtures("memory_given_back")
def test_more_than_2_to_the_31_elements(device):
    """Indices beyond 32 bits; the target is expanded."""
    if device == "cpu":
        pytest.skip(reason="takes minutes on two cores; the same loops run with 64-bit indices")
    rows, cols = 1 << 17, (1 << 14) + 3
    input = torch.full((rows, cols), 2.0, dtype=torch.bfloat16, device=device)
    input[-1, -1] = 10.0
    target = torch.zeros((), dtype=torch.bfloat16, device=device).expand(rows, cols)
    total = torch.ops.fused.mse_loss(input, target, reduction=2, dtype=torch.float32)
    assert total.item() == pytest.approx(4.0 * (rows * cols - 1) + 100.0, rel=1e-6)
    loss, gradient = torch.ops.fused.mse_loss_with_grad(input, input * 0, None, 2, torch.float32)
    assert loss.item() == total.item()
    assert gradient[-1, -1].item() == 20.0
    assert gradient[0, 0].item() == 4.0


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("shape", [(16385, 131_080), (16385, 8193, 16)], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "name", ["cross_entropy", "cross_entropy_probabilities", "nll_loss", "softmax_kl_div"]
)
def test_more_than_2_to_the_31_logits(name, shape, device):
    """All logits are 0 but the last ones, which lie beyond 32 bits."""
    if device == "cpu":
        pytest.skip(reason="takes 13 GiB of memory; the same loops run with 64-bit indices")
    spec = SPECS[name]
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device)
    input = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    input[-1] = normal(shape[1:])
    if name in ("cross_entropy", "nll_loss"):
        rows = (shape[0], *shape[2:])
        target = torch.randint(shape[1], rows, generator=generator, device=device)
    elif name == "softmax_kl_div":
        # From rows of zeros exactly 0: a rounding error would be the same in each, and add up.
        target = torch.zeros(1, *shape[1:], dtype=torch.bfloat16, device=device).expand(shape)
    else:
        target = normal(1, *shape[1:]).softmax(1).bfloat16().expand(shape)
    options = {"dim": 1} if name == "softmax_kl_div" else {}
    options["reduction"] = 2
    sample = Sample(name, (input, target), {**options, "dtype": torch.float32})
    (_, args, _), *_ = record_leaf_calls(lambda: sample.call(spec.op))

    def outer_rows(loss, gradient):
        return loss, gradient[:: shape[0] - 1].clone()

    loss, (gradient,) = loss_and_gradients(spec.op, sample, sample.tensors, torch.ones(()))
    results = [outer_rows(loss, gradient)]
    del gradient  # gigabytes
    if "with_grad" in spec.parts:
        results.append(outer_rows(*spec.part("with_grad")(*args)[:2]))
    expected = []
    for i in (0, shape[0] - 1):
        slices = [t[i : i + 1] for t in sample.tensors]
        exact = tuple(t.double() if t.is_floating_point() else t for t in slices)
        one = Sample(name, exact, options)
        expected.append(loss_and_gradients(spec.torch_loss, one, exact, torch.ones(())))
    total = (shape[0] - 1) * expected[0][0] + expected[1][0]
    for loss, gradient in results:
        torch.testing.assert_close(loss.double(), total, rtol=1e-4, atol=1e-6)
        for row, (_, (exact,)) in zip(gradient, expected, strict=True):
            torch.testing.assert_close(row.double(), exact[0], rtol=1e-2, atol=1e-9)


@specs
def test_autocast(spec, device):
    """Losses run in float32 under autocast, as torch's lists say."""
    a, b = (t.to(device) for t in spec.operands(6, 5, dtype=torch.float32))
    a = a.bfloat16().requires_grad_()
    results = []
    for function in (spec.op, spec.torch_loss):
        with torch.autocast(device, torch.bfloat16):
            loss = function(a, b)
        results.append((loss, torch.autograd.grad(loss, a)[0]))
    exact_a = a.detach().double().requires_grad_()
    exact = spec.torch_loss(exact_a, b.double() if b.is_floating_point() else b)
    (ours, our_gradient), (torchs, torchs_gradient) = results
    assert ours.dtype == torchs.dtype == torch.float32
    assert_accurate(ours, torchs, exact, "loss")
    (exact_gradient,) = torch.autograd.grad(exact, exact_a)
    assert_accurate(our_gradient, torchs_gradient, exact_gradient, "gradient")


@specs
def test_ops_for_passes_say_that_they_are_not_differentiable(spec):
    (forward, args, _), *_ = record_leaf_calls(lambda: spec.op(*spec.operands(4, 5)))
    calls = {"with_grad": args, "value": value_arguments(spec, forward, args)}
    calls = {part: given for part, given in calls.items() if part in spec.parts}
    if not calls:
        pytest.skip(reason=f"{spec.name} has no such op")
    for part, (input, *others) in calls.items():
        leaf = input.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="not differentiable"):
            spec.part(part)(leaf, *others)
        with torch.no_grad():
            spec.part(part)(leaf, *others)


@specs
def test_meta_and_grad_modes(spec):
    a, b = spec.operands(6, 5)
    assert spec.op(a.to("meta"), b.to("meta")).device.type == "meta"
    a.requires_grad_()
    with torch.no_grad():
        assert not spec.op(a, b).requires_grad
    with torch.inference_mode():
        assert spec.op(a, b).is_inference()
    assert spec.op(a, b).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("gap", ["input", "target", "both"])
@pytest.mark.parametrize("name", ["smooth_l1_loss", "kl_div", "weighted mse_loss"])
def test_rows_with_gaps_on_cpu(name, gap, dtype):
    """Rows longer than a tile, in chunks that begin inside a row."""
    x, t = torch.rand(50, 1600), torch.rand(50, 1600)
    x, t = x.to(dtype)[:, 3:1503], t.to(dtype)[:, 3:1503]
    options = {"weight": torch.rand(1500)} if name.startswith("weighted") else {}
    op = getattr(torch.ops.fused, name.removeprefix("weighted "))
    given = [
        t if gap in (argument, "both") else t.contiguous()
        for argument, t in (("input", x), ("target", t))
    ]
    for reduction in (0, 2):
        results = []
        for operands in ([t.contiguous() for t in given], given):
            a, b = (t.detach().requires_grad_() for t in operands)
            loss = op(a, b, reduction, **options)
            results.append((loss, *torch.autograd.grad(loss, (a, b), torch.ones_like(loss))))
        torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-2, atol=0)
        torch.testing.assert_close(results[1][1:], results[0][1:], rtol=0, atol=0)


def flags_of_memory_at(address):
    """What Linux says of the mapping that an address lies in: VmFlags in /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(bound, 16) for bound in bounds.groups())
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the address is in no mapping")


@pytest.mark.kernels
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or not Path("/proc/self/smaps").exists(),
    reason="a kernel without transparent huge pages, or without a list of its mappings",
)
@pytest.mark.parametrize("transposed", [False, True])
def test_large_gradients_prefer_huge_pages(transposed):
    x, y = torch.rand(2, 2048, 4096)
    if transposed:
        x, y = x.t(), y.t()
    _, gradient = torch.ops.fused.mse_loss_with_grad(x, y, None, 1, torch.float32)
    middle = gradient.data_ptr() + gradient.nbytes // 2
    assert "hg" in flags_of_memory_at(middle)
