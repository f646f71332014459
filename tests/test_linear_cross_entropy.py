"""Linear cross entropy by itself: values, gradients, errors."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from compile_losses.linear import LinearCrossEntropyLoss, linear_cross_entropy
from compile_losses.ops.linear.block_layout import smallest_scratch
from tests.accuracy import RATIO, SIMILAR, assert_accurate, similar
from tests.calls import dtypes
from tests.linear_problems import (
    CLASSES,
    HIDDEN,
    OPTIONS,
    ROWS,
    assert_like_torch,
    expected,
    leaves,
    op,
    problem,
    run,
)

fused = torch.ops.fused


def assert_accurate_with_all_options(dtype, reduction, ignored, device):
    input, linear_weight, target, bias, weight = problem(device, ignored=ignored)
    for options, b, w in itertools.product(OPTIONS, (None, bias), (None, weight)):
        assert_like_torch(
            (input, linear_weight, target, b, w),
            dtype,
            f"{options}, bias {b is not None}, weight {w is not None}",
            reduction=reduction,
            **options,
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ignored", [0, 5, 2])
@dtypes
def test_accuracy(dtype, reduction, ignored, chunks, device):
    """Six chunks, the last one short; with every second row ignored those are left out."""
    assert_accurate_with_all_options(dtype, reduction, ignored, device)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("ignored", [0, 5, 2])
@dtypes
def test_accuracy_of_blocks(dtype, reduction, ignored, blocks, device):
    """The logits of the first rows in the weight's gradient, those of the others in chunks."""
    assert_accurate_with_all_options(dtype, reduction, ignored, device)
    assert all(plan.first_rows == HIDDEN for plan in blocks)


@pytest.mark.parametrize(
    ("rows", "first", "blocks"),
    [
        (40, 20, 4),
        (40, 24, 9),  # as many rows as hidden has features: no memory of the gradient to spare
        (40, 30, 12),  # more of them: three blocks in the scratch buffer
        (40, 40, 6),  # all rows
        (9, 9, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_of_blocks(dtype, rows, first, blocks, exact_plan, monkeypatch, device):
    monkeypatch.setattr("compile_losses.ops.linear.block_layout.ALIGNED", 1)
    layout = smallest_scratch(first, HIDDEN, CLASSES, blocks)
    assert (layout.scratch > 1) == (first > HIDDEN)
    exact_plan(7, layout)
    tensors = problem(device, rows=rows, ignored=10)  # too few to be left out
    for options in OPTIONS:
        assert_like_torch(tensors, dtype, f"{options}", **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 8, 9, 64])
@pytest.mark.parametrize("kind", ["random", "few classes", "mean 1", "calibrated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_chunks(dtype, kind, count, exact_plan, device):
    """The weight's gradient is as accurate after 64 chunks as after one."""
    exact_plan(1024 // count)
    input, linear_weight, target, bias, _ = problem(device, 1024, 64, 700, ignored=0)
    linear_weight, bias = linear_weight / 8, bias / 8
    if kind == "few classes":
        target = target % 5
    elif kind == "mean 1":
        input = input + 1
    elif kind == "calibrated":
        target = torch.distributions.Categorical(logits=F.linear(input, linear_weight)).sample()
    tensors = [t.bfloat16().double() for t in (input, linear_weight, bias)]
    assert_like_torch((*tensors[:2], target, tensors[2], None), dtype, f"{count} chunks")


@pytest.mark.parametrize("kind", ["random", "calibrated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_blocks(dtype, kind, exact_plan, device):
    """Input's gradient is as accurate as a sum over 43 blocks of classes as in one product."""
    exact_plan(256, smallest_scratch(64, 64, 2800, 43))
    input, linear_weight, target, bias, _ = problem(device, 128, 64, 2800, ignored=0)
    linear_weight, bias = linear_weight / 8, bias / 8
    if kind == "calibrated":
        target = torch.distributions.Categorical(logits=F.linear(input, linear_weight)).sample()
    tensors = [t.bfloat16().double() for t in (input, linear_weight, bias)]
    assert_like_torch((*tensors[:2], target, tensors[2], None), dtype, kind)


def test_262144_classes(exact_plan, device):
    exact_plan(4)
    input, linear_weight, target, _, _ = problem(device, 256, 8, 262_144, ignored=0, scale=0.5)
    assert_like_torch((input, linear_weight, target, None, None), torch.bfloat16, "64 chunks")


@dtypes
def test_repeatable(dtype, either_way, device):
    tensors = problem(device)
    for options in ({}, {"reduction": 0}, {"softcap": 3.0, "z_loss": 0.1}):
        first, *others = [run(op, tensors, dtype, **options) for _ in range(3)]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_autograd_contract(either_way, device):
    (x, w, b), target = leaves(device)
    factor = torch.tensor(3.0, dtype=torch.float64, device=device)
    loss = op(x, w, target, linear_bias=b)
    first = torch.autograd.grad(loss, (x, w, b), factor, retain_graph=True)
    # The gradients that were handed out are the caller's own.
    for gradient in first:
        gradient.mul_(2)
    second = torch.autograd.grad(loss, (x, w, b), factor, retain_graph=True)
    torch.testing.assert_close([g / 2 for g in first], list(second))
    third = torch.autograd.grad(loss, (x, w, b), factor)
    torch.testing.assert_close(third, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (x, w, b))
    for changed in (x, w):
        loss = op(x, w, target, linear_bias=b)
        with torch.no_grad():
            changed.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_accumulates_into_grad(either_way, device):
    (x, w, b), target = leaves(device)
    for _ in range(2):
        op(x, w, target, linear_bias=b).backward()
    twice = torch.autograd.grad(2 * expected(x, w, target, linear_bias=b), (x, w, b))
    torch.testing.assert_close((x.grad, w.grad, b.grad), twice)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradcheck(reduction, chunks, device):
    chunks(2)
    (x, w, b), target = leaves(device, rows=6, hidden=3, classes=4)
    for options in ({}, {"label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.1}):

        def function(x, w, b, options=options):
            return op(x, w, target, linear_bias=b, reduction=reduction, **options)

        assert torch.autograd.gradcheck(function, (x, w, b))
        assert torch.autograd.gradgradcheck(function, (x, w, b))
        frozen = w.detach()
        assert torch.autograd.gradgradcheck(lambda x, b: function(x, frozen, b), (x, b))  # noqa: B023


def test_gradcheck_of_blocks(exact_plan, monkeypatch):
    monkeypatch.setattr("compile_losses.ops.linear.block_layout.ALIGNED", 1)
    exact_plan(2, smallest_scratch(3, 3, 4, 4))
    (x, w, b), target = leaves("cpu", rows=6, hidden=3, classes=4)
    for options in ({}, {"label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.1}):

        def function(x, w, b, options=options):
            return op(x, w, target, linear_bias=b, **options)

        assert torch.autograd.gradcheck(function, (x, w, b))
        assert torch.autograd.gradgradcheck(function, (x, w, b))


def test_transforms(chunks, device):
    (x, w, _), target = leaves(device)
    loss = op(x, w, target)
    many = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
    ours = torch.autograd.grad(loss, (x, w), many, is_grads_batched=True)
    torchs = torch.autograd.grad(expected(x, w, target), (x, w), many, is_grads_batched=True)
    torch.testing.assert_close(ours, torchs)
    x, w = x.detach(), w.detach()
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        ours, torchs = (transform(lambda x, f=f: f(x, w, target))(x) for f in (op, expected))
        torch.testing.assert_close(ours, torchs)
    stacked = torch.stack([x, 2 * x])
    ours, torchs = (
        torch.func.vmap(lambda x, f=f: f(x, w, target))(stacked) for f in (op, expected)
    )
    torch.testing.assert_close(ours, torchs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_opcheck(reduction, either_way, device, opcheck):
    (x, w, b), target = leaves(device, torch.float32, rows=20)
    for options in ({}, {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.1}):
        keywords = {"linear_bias": b, "reduction": reduction, **options}
        opcheck(op.default, (x, w, target), keywords)
        arguments = (
            x, w, target, b, None, reduction, -100, options.get("label_smoothing", 0.0),
            options.get("softcap"), options.get("z_loss", 0.0), torch.float32,
        )  # fmt: skip
        opcheck(fused.linear_cross_entropy_forward.default, arguments)
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            grad_output = torch.ones(target.shape if reduction == 0 else (), device=device)
            backward = fused.linear_cross_entropy_backward.default
            opcheck(backward, (grad_output, *arguments, *needs))
            if reduction != 0:
                with_grad = fused.linear_cross_entropy_with_grad.default
                opcheck(with_grad, (*arguments, *needs))


def test_with_grad_takes_grad_output(either_way, device):
    """As the passes call it: the gradients for a factor that is known beside the loss."""
    (x, w, b), target = leaves(device)
    arguments = (x.detach(), w.detach(), target, b.detach(), None, 1, -100, 0.0, None, 0.0, x.dtype)
    three = torch.tensor(3.0, dtype=torch.float64, device=device)
    loss, *gradients = fused.linear_cross_entropy_with_grad(*arguments, True, True, True, three)
    torch.testing.assert_close(loss, expected(x, w, target, linear_bias=b))
    exact = torch.autograd.grad(expected(x, w, target, linear_bias=b), (x, w, b), three)
    torch.testing.assert_close(tuple(gradients), exact)
    none = (*arguments[:5], 0, *arguments[6:])
    with pytest.raises(RuntimeError, match="needs a reduction"):
        fused.linear_cross_entropy_with_grad(*none, True, True, True)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_to_compare(rows, reduction, either_way, device):
    """No rows, or only ignored ones: torch's loss, gradients of 0."""
    (x, w, b), target = leaves(device, rows=rows)
    target = torch.full_like(target, -100)
    ours = op(x, w, target, linear_bias=b, reduction=reduction)
    torch.testing.assert_close(
        ours, expected(x, w, target, linear_bias=b, reduction=reduction), equal_nan=True
    )
    for gradient in torch.autograd.grad(ours.sum(), (x, w, b)):
        assert gradient.eq(0).all()


def test_shapes_and_layouts(either_way, device):
    """Leading dimensions, one row, weights and inputs of any strides, uint8 targets."""
    (x, w, _), target = leaves(device)
    cases = {
        "leading": (x.reshape(3, 5, 6, HIDDEN), w, target.reshape(3, 5, 6)),
        "one row": (x[1], w, target[1]),
        "transposed weight": (x, w.detach().t().contiguous().t(), target),
        "transposed input": (x.detach().t().contiguous().t(), w, target),
        "rows apart": (x[::2], w, target[::2]),
        "columns apart": (x.detach().repeat_interleave(2, 1)[:, ::2], w, target),
        "uint8": (x, w, target.clamp(min=0).to(torch.uint8)),
    }
    for name, (input, weight, classes) in cases.items():
        for reduction in (0, 1):
            ours, torchs = (f(input, weight, classes, reduction=reduction) for f in (op, expected))
            torch.testing.assert_close(ours, torchs, msg=name)
            assert ours.stride() == torchs.stride(), name


def test_probabilities_and_more_class_dimensions(device):
    """Both are torch's, over all logits."""
    (x, w, _), _ = leaves(device)
    probabilities = torch.rand(ROWS, CLASSES, dtype=torch.float64, device=device).requires_grad_()
    ours, torchs = (f(x, w, probabilities, label_smoothing=0.1) for f in (op, expected))
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, (x, w, probabilities)) for loss in (ours, torchs))
    )
    w = torch.randn(7, 2, 3, HIDDEN, dtype=torch.float64, device=device)
    target = torch.randint(7, (ROWS, 2, 3), device=device)
    torch.testing.assert_close(op(x, w, target), expected(x, w, target))


def test_dtype_and_autocast(either_way, device):
    tensors, target = leaves(device, torch.bfloat16)
    x, w, b = tensors
    ours = op(x, w, target, linear_bias=b, dtype=torch.float32)
    torchs = F.cross_entropy(F.linear(x, w, b).float(), target)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, torchs)
    for pair in zip(*(torch.autograd.grad(v, tensors) for v in (ours, torchs)), strict=True):
        torch.testing.assert_close(*pair, rtol=3e-2, atol=1e-3)
    tensors = [t.detach().float().requires_grad_() for t in tensors]
    x, w, b = tensors
    with torch.autocast(device, torch.bfloat16):
        ours = op(x, w, target, linear_bias=b)
        # Of float logits: torch 2.11 rounds the loss of bfloat16 ones, and then returns a float.
        torchs = F.cross_entropy(F.linear(x, w, b).float(), target)
        exact = op(x, w, target, linear_bias=b, dtype=torch.float32)  # nothing is cast
    assert ours.dtype == torchs.dtype == torch.float32
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(exact, F.cross_entropy(F.linear(x, w, b), target))
    for pair in zip(*(torch.autograd.grad(v, tensors) for v in (ours, torchs)), strict=True):
        assert pair[0].dtype == torch.float32
        torch.testing.assert_close(*pair, rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_0(smoothing, z_loss, chunks, device):
    """A mean over a total weight of 0 is nan; with smoothing too, where the losses are not 0."""
    x, w = torch.randn(ROWS, HIDDEN, device=device), torch.randn(CLASSES, HIDDEN, device=device)
    weight = torch.ones(CLASSES, device=device).index_fill(0, torch.tensor(3, device=device), 0)
    target = torch.full((ROWS,), 3, device=device)
    loss = op(x, w, target, weight=weight, label_smoothing=smoothing, z_loss=z_loss)
    assert F.cross_entropy(x @ w.t(), target, weight, label_smoothing=smoothing).isnan()
    assert loss.isnan()


def test_module_is_torchs(chunks, device):
    torch.manual_seed(0)
    weight = torch.rand(CLASSES)
    options = {"bias": True, "weight": weight, "label_smoothing": 0.1, "ignore_index": 3}
    ours = LinearCrossEntropyLoss(HIDDEN, CLASSES, **options).to(device)
    x = torch.randn(ROWS, HIDDEN, device=device)
    target = torch.randint(CLASSES, (ROWS,), device=device)
    logits = F.linear(x, ours.linear.weight, ours.linear.bias)
    torchs = F.cross_entropy(logits, target, weight.to(device), ignore_index=3, label_smoothing=0.1)
    torch.testing.assert_close(ours(x, target), torchs)
    more = LinearCrossEntropyLoss(HIDDEN, 5, out_features=(2, 3), bias=True).to(device)
    assert more(x, torch.randint(5, (ROWS, 2, 3), device=device)).shape == ()
    assert "softcap=None" in repr(ours)
    with pytest.raises(RuntimeError, match="weight shape"):
        LinearCrossEntropyLoss(HIDDEN, CLASSES, weight=weight[:3])
    with pytest.raises(RuntimeError, match="label_smoothing"):
        LinearCrossEntropyLoss(HIDDEN, CLASSES, label_smoothing=-0.1)
    theirs = getattr(torch.nn, "LinearCrossEntropyLoss", None)
    if theirs is not None:
        twin = theirs(HIDDEN, CLASSES, **options).to(device)
        twin.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x, target), twin(x, target))


def opinfo(variant=""):
    from torch.testing._internal.common_methods_invocations import op_db

    found = [i for i in op_db if i.name == "nn.functional.linear_cross_entropy"]
    return [i for i in found if i.variant_test_name == variant]


needs_torchs = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch has no linear_cross_entropy before 2.13"
)


def of_sample(function, sample, change):
    """The loss of an OpInfo sample, and its gradients; of tensors that are changed before."""

    def changed(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return change(value.detach()).requires_grad_(value.requires_grad)
        return value

    tensors = [changed(v) for v in (sample.input, *sample.args)]
    options = {k: changed(v) for k, v in sample.kwargs.items() if k != "options"}
    loss = function(*tensors, **options)
    given = [t for t in (*tensors, *options.values()) if isinstance(t, torch.Tensor)]
    roots = [t for t in given if t.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, roots, torch.ones_like(loss))


def worst_error(sample, dtype, index):
    """The largest error of a result that torch makes of tensors like the sample's.

    Of what torch computes in float64 it is none, since that is the reference: there its error in
    float32 counts.
    """
    rounded, ratio = (torch.float32, RATIO) if dtype == torch.float64 else (dtype, 1.0)

    def near(seed, dtype):
        generator = torch.Generator().manual_seed(seed)
        return lambda tensor: similar(tensor, generator, rounded).to(dtype)

    worst = 0.0
    for seed in range(SIMILAR):
        eager = of_sample(F.linear_cross_entropy, sample, near(seed, rounded))
        exact = of_sample(F.linear_cross_entropy, sample, near(seed, torch.float64))
        error = (eager[index].double() - exact[index]).abs()
        worst = max(worst, ratio * error.nan_to_num(0, 0).max().item())
    return worst


@needs_torchs
@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["", "chunked", "chunked_none"])
@dtypes
def test_opinfo_samples(dtype, variant, chunks, device):
    chunks(2)
    ran = 0
    for info in opinfo(variant):
        for sample in info.sample_inputs(device, dtype, requires_grad=True):
            ours = of_sample(linear_cross_entropy, sample, lambda t: t)
            eager = of_sample(F.linear_cross_entropy, sample, lambda t: t)
            exact = of_sample(F.linear_cross_entropy, sample, torch.Tensor.double)
            for i, results in enumerate(zip(ours, eager, exact, strict=True)):
                what = f"{sample.summary()}, result {i}"
                try:
                    assert_accurate(*results, what)
                except AssertionError:
                    assert_accurate(*results, what, worst_error(sample, dtype, i))
            ran += 1
    assert ran > 5


@needs_torchs
def test_opinfo_errors(device):
    ran = 0
    for info in opinfo():
        for error in info.error_inputs(device):
            sample = error.sample_input
            if sample.input.dim() > 2:
                continue  # torch takes no further leading dimensions; the op does
            with pytest.raises(error.error_type, match=error.error_regex):
                linear_cross_entropy(sample.input, *sample.args, **sample.kwargs)
            ran += 1
    assert ran >= 5


def test_errors(device):
    (x, w, b), target = leaves(device)

    def refuses(kind, *fragments, function=op, args=(x, w, target), **keywords):
        with pytest.raises(kind) as caught:
            function(*args, **keywords)
        for fragment in fragments:
            assert re.search(re.escape(fragment), str(caught.value)), (fragment, str(caught.value))

    refuses(ValueError, "target", f"[{ROWS}]", "[7]", args=(x, w, target[:7]))
    refuses(RuntimeError, "target", "int32", args=(x, w, target.int()))
    refuses(RuntimeError, "probabilities", args=(x, w, torch.rand(ROWS, device=device)))
    refuses(RuntimeError, "linear_weight", "float32", args=(x, w.float(), target))
    refuses(RuntimeError, "linear_bias", "(37,)", "(5,)", linear_bias=b[:5])
    refuses(RuntimeError, "in_features", "23", args=(x[:, :-1], w, target))
    refuses(RuntimeError, "weight", "[37]", "[5]", weight=b.detach()[:5])
    refuses(RuntimeError, "weight", "float32", weight=b.detach().float())
    refuses(RuntimeError, "weight", "grad", weight=b)
    refuses(RuntimeError, "label_smoothing", "1.5", label_smoothing=1.5)
    refuses(RuntimeError, "softcap", "0.0", softcap=0.0)
    refuses(ValueError, "reduction", "7", reduction=7)
    refuses(ValueError, "batchmean", function=linear_cross_entropy, reduction="batchmean")
    if device == "cpu":  # a device-side assertion would end the process' CUDA context
        refuses(IndexError, "37", args=(x, w, target.clamp(min=0) + 37))


def test_compiled_with_dynamic_shapes(either_way, device):
    (x, w, b), _ = leaves(device)
    compiled = torch.compile(op, backend="aot_eager", dynamic=True)
    for rows in (90, 70, 31):
        target = torch.randint(CLASSES, (rows,), device=device)
        results = [run(f, (x[:rows], w, target, b, None), torch.float64) for f in (compiled, op)]
        torch.testing.assert_close(*results)
