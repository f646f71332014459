"""The ops by themselves: values, gradients, layouts, repeatability, opcheck, gradcheck."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.accuracy import assert_accurate
from tests.specs import SPECS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def leaves(sample, tensors=None):
    """The sample's tensors, the differentiable ones as leaves of the same layout."""
    return tuple(
        t.detach().requires_grad_(i in sample.differentiable) if t.is_floating_point() else t
        for i, t in enumerate(sample.tensors if tensors is None else tensors)
    )


def loss_and_gradients(function, sample, tensors, grad_output=None):
    tensors = leaves(sample, tensors)
    loss = sample.call(function, tensors)
    if grad_output is None:
        generator = torch.Generator().manual_seed(1)
        grad_output = torch.randn(loss.shape, generator=generator, dtype=torch.float64) * 3
    roots = [tensors[i] for i in sample.differentiable]
    return loss, torch.autograd.grad(loss, roots, grad_output.to(loss.device, loss.dtype))


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
        assert_accurate(ours, eager, exact, sample.name)
        for i, gradients in enumerate(
            zip(our_gradients, eager_gradients, exact_gradients, strict=True)
        ):
            assert_accurate(*gradients, f"{sample.name}, gradient {i}")


@specs
@dtypes
def test_repeatable(spec, dtype, device):
    for sample in spec.samples(device, dtype):
        first, *others = [loss_and_gradients(spec.op, sample, sample.tensors) for _ in range(3)]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)


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


def opcheck(op, args, kwargs, what):
    """torch.library.opcheck, less its comparison under AOTAutograd where that can't be had.

    It holds nan for unequal to nan, and torch's own decompositions divide by numel.
    """
    result = op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    empty = any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in args)
    if not empty and not any(r is not None and r.isnan().any() for r in results):
        tests.append("test_aot_dispatch_dynamic")
    try:
        torch.library.opcheck(op, args, kwargs, test_utils=tests)
    except Exception as error:
        raise AssertionError(f"{op}, {what}") from error


@specs
def test_opcheck(spec, device):
    for sample in spec.samples(device, torch.float32):
        if sample.tensors[0].numel() > 10_000:
            continue  # opcheck runs each op tens of times; size adds nothing
        opcheck(spec.op.default, *sample.arguments(leaves(sample)), sample.name)


def record_leaf_calls(function):
    """The leaf ops, with their arguments, that a call dispatches to."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "fused":
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        function()
    return calls


def reduction_of(op, args):
    return args[[argument.name for argument in op._schema.arguments].index("reduction")]


@specs
def test_opcheck_leaves(spec, device):
    """Forward and backward as autograd calls them, and the ops that passes insert."""
    seen, names = set(), set()
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
            calls.append((with_grad, (*detached, factor), {}))
            calls.append((in_place, (detached[0].clone(), *detached[1:]), {"grad_output": factor}))
        for op, args, kwargs in calls:
            seen.add(op.name().removeprefix("fused::"))
            opcheck(op, args, kwargs, sample.name)
    assert seen == {f"{spec.name}_{part}" for part in spec.parts}


@specs
@dtypes
@pytest.mark.parametrize("factor", [None, -3.75], ids=["unit", "factor"])
def test_with_grad(spec, factor, dtype, device):
    """One pass gives the loss and its gradient for one grad_output, also over the input."""
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
        given = () if factor is None else (grad_output.to(device, kind).reshape(shape),)
        loss, gradient = spec.part("with_grad")(*args, *given)
        overwritten = torch.empty_like(args[0]).copy_(args[0])
        in_place = spec.part("with_grad_")(overwritten, *args[1:], *given)
        for result in (loss, in_place):
            assert_accurate(result, eager, exact, sample.name)
        for result in (gradient, overwritten):
            assert_accurate(result, eager_gradient, exact_gradient, f"{sample.name}, gradient")
        ran += 1
    assert ran > 5


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
    torch.library.opcheck(
        torch.ops.fused.scale.default, (transposed.contiguous(), torch.ones((), device=device))
    )
    torch.library.opcheck(
        torch.ops.fused.scale_.default, (transposed.contiguous(), torch.ones((), device=device))
    )


@specs
def test_gradcheck(spec, device):
    operands = [
        t.to(device).requires_grad_() if t.is_floating_point() else t.to(device)
        for t in spec.operands(4, 5)
    ]
    for reduction in (0, 1, 2):

        def function(*tensors, reduction=reduction):
            return spec.op(*tensors, reduction=reduction)

        assert torch.autograd.gradcheck(function, operands)
        assert torch.autograd.gradgradcheck(function, operands)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smooth_l1_loss", {"beta": 0.3}),
        ("huber_loss", {"delta": 0.3}),
        ("kl_div", {"log_input": False}),
        ("kl_div", {"log_target": True}),
        ("kl_div", {"log_target": True, "log_input": False, "reduction": 3}),
        ("cross_entropy", {"label_smoothing": 0.2}),
        ("cross_entropy_probabilities", {"label_smoothing": 0.2}),
        ("softmax_kl_div", {"temperature": 2.5, "reduction": 3}),
        ("softmax_kl_div", {"dim": 0}),
    ],
)
def test_gradcheck_options(name, options, device):
    spec = SPECS[name]
    operands = [
        t.to(device).requires_grad_() if t.is_floating_point() else t.to(device)
        for t in spec.operands(4, 5)
    ]
    assert torch.autograd.gradcheck(lambda *t: spec.op(*t, **options), operands)
    assert torch.autograd.gradgradcheck(lambda *t: spec.op(*t, **options), operands)


WEIGHTED = [spec for spec in SPECS.values() if "weight" in spec.arguments and spec.broadcasts]


@pytest.mark.parametrize("spec", WEIGHTED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(4, 5), (5,), (4, 1), ()], ids=str)
def test_gradcheck_weight(spec, shape, device):
    """Gradients of all three tensors, twice, in each of which any may be the only one."""
    input, target = (t.to(device).requires_grad_() for t in spec.operands(4, 5))
    weight = (torch.rand(shape, dtype=torch.float64, device=device) + 0.5).requires_grad_()
    for reduction in (0, 1, 2):

        def function(a, b, w, reduction=reduction):
            return spec.op(a, b, reduction=reduction, weight=w)

        assert torch.autograd.gradcheck(function, (input, target, weight))
        assert torch.autograd.gradgradcheck(function, (input, target, weight))
        for i in range(3):
            tensors = [input.detach(), target.detach(), weight.detach()]
            tensors[i].requires_grad_()
            (ours,) = torch.autograd.grad(function(*tensors).sum(), tensors[i])
            torchs = spec.torch_loss(*tensors[:2], reduction=reduction, weight=tensors[2])
            torch.testing.assert_close(ours, torch.autograd.grad(torchs.sum(), tensors[i])[0])


@pytest.mark.parametrize("weights", [("weight",), ("pos_weight",), ("weight", "pos_weight")])
def test_gradcheck_binary_weights(weights, device):
    spec = SPECS["binary_cross_entropy_with_logits"]
    operands = [t.to(device).requires_grad_() for t in spec.operands(4, 5)]
    given = {
        name: torch.rand(shape, dtype=torch.float64, device=device)
        for name, shape in zip(weights, ((4, 1), (5,)), strict=False)
    }
    assert torch.autograd.gradcheck(lambda *t: spec.op(*t, **given), operands)
    assert torch.autograd.gradgradcheck(lambda *t: spec.op(*t, **given), operands)


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "huber_loss"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@dtypes
def test_weight_is_torchs(name, reduction, dtype, device):
    """torch's own weighted losses, whose weight has input's size, also in another dtype."""
    a, b, w = (torch.rand(7, 9, device=device).to(dtype) for _ in range(3))
    theirs, ours = getattr(F, name), getattr(torch.ops.fused, name)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    for weight in (w, w.float(), w.double(), (w > 0.5).to(dtype), w > 0.5, (4 * w).long()):
        expected = theirs(a, b, reduction=reduction, weight=weight)
        exact = theirs(a.double(), b.double(), reduction=reduction, weight=weight.double())
        assert_accurate(ours(a, b, number, weight=weight), expected, exact)
    # A weight that is one number does not promote, but for its sum in the mean.
    a, b, w = a[0, 0], b, torch.full((), 0.3, dtype=torch.float64, device=device)
    expected = theirs(a, b, reduction=reduction, weight=w)
    assert ours(a, b, number, weight=w).dtype == expected.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pos_weight", [None, 2.0, 0.0])
def test_binary_cross_entropy_special_logits(pos_weight, dtype, device):
    """Infinite, nan and huge logits and targets, as torch has them."""
    values = [0.0, 1e-30, 1.0, 20.0, 90.0, 1e4, 1e38, torch.inf]
    logits = torch.tensor([*values, *(-v for v in values), torch.nan], dtype=dtype, device=device)
    targets = torch.tensor([0.0, 0.3, 1.0, torch.nan], dtype=dtype, device=device)
    spec = SPECS["binary_cross_entropy_with_logits"]
    weight = None if pos_weight is None else torch.tensor(pos_weight, device=device)
    results = []
    for function, kind in ((spec.op, dtype), (spec.torch_loss, dtype), (spec.torch_loss, None)):
        x, y = (
            t.to(kind or torch.float64).contiguous().requires_grad_()
            for t in torch.broadcast_tensors(logits[:, None], targets)
        )
        loss = function(x, y, reduction=0, pos_weight=weight)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (x, y))))
    for ours, eager, exact in zip(*results, strict=True):
        assert_accurate(ours, eager, exact)


def test_confident_binary_cross_entropy_keeps_its_digits(device):
    """torch subtracts logits from their log-sigmoid, and loses the loss of confident negatives."""
    logits = torch.linspace(-80.0, 80.0, 4001, device=device)
    for target in (0.0, 1.0):
        ours = torch.ops.fused.binary_cross_entropy_with_logits(
            logits, torch.full_like(logits, target), reduction=0
        )
        signed = (logits if target == 0.0 else -logits).double()
        exact = F.softplus(signed, threshold=1e9)
        torch.testing.assert_close(ours.double(), exact, rtol=4 * 2**-23, atol=0)


def test_l1_gradient_of_equal_and_nan_elements(device):
    a = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.nan, torch.inf], device=device)
    b = torch.tensor([0.0, 0.0, 1.0, 2.0, 1.0, torch.inf], device=device)
    for loss, options in ((F.l1_loss, {}), (F.smooth_l1_loss, {"beta": 0.0})):
        results = []
        for function in (loss, getattr(torch.ops.fused, loss.__name__)):
            leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
            results.append(torch.autograd.grad(function(*leaves, **options), leaves))
        torch.testing.assert_close(*results)


def test_weights_in_functional_transforms(device):
    a, b, w = (torch.rand(4, 5, device=device) for _ in range(3))
    for name in ("mse_loss", "huber_loss"):
        ours, torchs = getattr(torch.ops.fused, name), getattr(F, name)
        for transform in (torch.func.grad, torch.func.jacrev):
            results = [
                transform(lambda *t, f=f: f(t[0], t[1], weight=t[2]), argnums=(0, 2))(a, b, w)
                for f in (ours, torchs)
            ]
            torch.testing.assert_close(*results)
        results = [
            torch.func.vmap(lambda x, y, z, f=f: f(x, y, weight=z))(a, b, w) for f in (ours, torchs)
        ]
        torch.testing.assert_close(*results)
    results = [
        torch.func.grad(lambda x, f=f: f(x, b, pos_weight=w[0]))(a)
        for f in (
            torch.ops.fused.binary_cross_entropy_with_logits,
            F.binary_cross_entropy_with_logits,
        )
    ]
    torch.testing.assert_close(*results)


@specs
def test_gradgradcheck_broadcast_and_same_tensor(spec, device):
    if not spec.broadcasts:
        pytest.skip(reason=f"{spec.name}'s input and target do not broadcast")
    input, _ = (t.to(device).requires_grad_() for t in spec.operands(3, 1))
    _, target = (t.to(device).requires_grad_() for t in spec.operands(1, 4))
    assert torch.autograd.gradcheck(spec.op, (input, target))
    assert torch.autograd.gradgradcheck(spec.op, (input, target))
    square = spec.operands(4, 4)[0].to(device).requires_grad_()
    ours = torch.autograd.grad(spec.op(square, square * 1).exp(), square, create_graph=True)[0]
    torchs = torch.autograd.grad(
        spec.torch_loss(square, square * 1).exp(), square, create_graph=True
    )[0]
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), square), torch.autograd.grad(torchs.sum(), square)
    )


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


@pytest.mark.parametrize("wide", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("fill", ["-inf mask", "leading -inf", "all -inf", "inf", "nan", "outlier"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_special_logits(fill, smoothing, wide, device):
    x = torch.randn(6, 3000, dtype=torch.float64)
    t = torch.randint(1500, 3000, (6,))
    if fill == "-inf mask":
        x[:, torch.randperm(1500)] = -torch.inf
    elif fill == "leading -inf":
        x[:, :1200] = -torch.inf
    elif fill == "all -inf":
        x[2] = -torch.inf
    elif fill == "inf":
        x[2, 5] = torch.inf
    elif fill == "nan":
        x[2, 5] = torch.nan
    else:
        x[:, 7] = 1e4
    t[4] = -100
    x = x.t().contiguous().t() if wide else x
    spec = SPECS["cross_entropy"]
    for dtype in (torch.float32, torch.bfloat16):
        for reduction in ("none", "mean"):
            results = []
            options = {"reduction": {"none": 0, "mean": 1}[reduction], "label_smoothing": smoothing}
            for function, logits in (
                (spec.op, x.to(device, dtype)),
                (spec.torch_loss, x.to(device, dtype)),
                (spec.torch_loss, x.to(dtype).double()),
            ):
                leaf = logits.detach().requires_grad_()
                loss = function(leaf, t.to(leaf.device), **options)
                (gradient,) = torch.autograd.grad(loss.sum(), leaf)
                results.append((loss.detach(), gradient))
            (ours, eager, exact) = results
            assert_accurate(ours[0], eager[0], exact[0], f"loss {reduction}")
            assert_accurate(ours[1], eager[1], exact[1], f"gradient {reduction}")


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_ignored_rows(reduction, device):
    """All rows ignored: the mean is nan, its gradient 0; nan rows stay nan in the gradient."""
    spec = SPECS["cross_entropy"]
    x = torch.randn(5, 9, device=device)
    x[2] = torch.nan
    t = torch.full((5,), -100, device=device)
    results = []
    for function in (spec.op, spec.torch_loss):
        leaf = x.clone().requires_grad_()
        loss = function(leaf, t, reduction=reduction)
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_no_rows(reduction, device):
    x = torch.randn(0, 9, device=device, requires_grad=True)
    t = torch.zeros(0, dtype=torch.int64, device=device)
    ours = torch.ops.fused.cross_entropy(x, t, reduction=reduction)
    torch.testing.assert_close(
        ours, SPECS["cross_entropy"].torch_loss(x, t, reduction=reduction), equal_nan=True
    )
    assert torch.autograd.grad(ours.sum(), x)[0].shape == (0, 9)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-7, 0.5, 1.0, 2.0, 1e38, torch.inf, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_div_special_values(value, dtype, device):
    """Logarithm and exponential over their whole range, and torch's corners for target 0."""
    spec = SPECS["kl_div"]
    others = torch.tensor([0.0, 1e-30, 0.3, 1.0, 3.0, torch.nan], dtype=dtype, device=device)
    values = torch.full_like(others, value)
    for options in (
        {"log_input": True},
        {"log_input": False},
        {"log_target": True},
        {"log_target": True, "log_input": False},
    ):
        # An infinite probability is no corner of torch's that anyone could want.
        for input, target in ((values, others), (others, values))[: 1 if value == torch.inf else 2]:
            ours = spec.op(input, target, reduction=0, **options)
            eager = spec.torch_loss(input, target, reduction=0, **options)
            exact = spec.torch_loss(input.double(), target.double(), reduction=0, **options)
            same_kind = torch.isfinite(eager) == torch.isfinite(exact)
            assert_accurate(ours[same_kind], eager[same_kind], exact[same_kind], str(options))


def test_more_than_2_to_the_31_elements(device):
    """Indices beyond 32 bits, without the memory: both operands are expanded."""
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


def test_retain_graph_and_version_counter(device):
    a = torch.randn(30, device=device, requires_grad=True)
    b = torch.randn(30, device=device)
    loss = torch.ops.fused.mse_loss(a, b)
    first = torch.autograd.grad(loss, a, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, a), first, rtol=0, atol=0)
    loss = torch.ops.fused.mse_loss(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@specs
def test_functional_transforms(spec, device):
    """Inside torch.func the public op is torch's loss."""
    a, b = (t.to(device) for t in spec.operands(6, 5))

    def ours(x, y):
        return spec.op(x, y)

    def torchs(x, y):
        return spec.torch_loss(x, y)

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian, torch.func.vmap):
        torch.testing.assert_close(transform(ours)(a, b), transform(torchs)(a, b))
    tangent = torch.ones_like(a)
    jvps = [torch.func.jvp(lambda x, f=f: f(x, b), (a,), (tangent,)) for f in (ours, torchs)]
    torch.testing.assert_close(*jvps)


@specs
def test_forward_mode(spec, device):
    from torch.autograd import forward_ad

    a, b = (t.to(device) for t in spec.operands(6, 5))
    results = []
    for function in (spec.op, spec.torch_loss):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, torch.ones_like(a))
            results.append(forward_ad.unpack_dual(function(dual, b)).tangent)
    torch.testing.assert_close(*results)


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
    if "with_grad" not in spec.parts:
        pytest.skip(reason=f"{spec.name} has no such op")
    (_, args, _), *_ = record_leaf_calls(lambda: spec.op(*spec.operands(4, 5)))
    args = (args[0].requires_grad_(), *args[1:])
    with pytest.raises(RuntimeError, match="not differentiable"):
        spec.part("with_grad")(*args)
    with torch.no_grad():
        spec.part("with_grad")(*args)


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
