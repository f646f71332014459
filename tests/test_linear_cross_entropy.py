"""Linear cross entropy by itself: values, gradients, what is computed, and what is held."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import compile_losses.ops
from compile_losses.linear import LinearCrossEntropyLoss, linear_cross_entropy
from compile_losses.ops.linear import chunk_size, row_chunks
from compile_losses.ops.linear.chunk_size import chunk_rows, sums_in_float32
from compile_losses.ops.linear.reference import reference
from tests.accuracy import assert_accurate

fused = torch.ops.fused
op = fused.linear_cross_entropy
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
ROWS, HIDDEN, CLASSES = 90, 24, 37


@pytest.fixture
def chunks(monkeypatch):
    """Sets how many rows of logits are held at a time."""

    def set_rows(rows):
        monkeypatch.setattr(chunk_size, "LEAST_ROWS", rows)
        monkeypatch.setattr(chunk_size, "LOGITS_BYTES", 1)
        monkeypatch.setattr("compile_losses.ops.linear.products.BLOCK_BYTES", 1000)

    set_rows(16)
    return set_rows


@pytest.fixture
def exact_chunks(monkeypatch):
    """Sets how many rows of logits are held, whatever else would be better."""

    def set_rows(rows):
        monkeypatch.setattr(row_chunks, "chunk_rows", lambda *_, **__: rows)

    return set_rows


def problem(device, rows=ROWS, hidden=HIDDEN, classes=CLASSES, ignored=5, scale=1.0):
    """Input, weight, target, bias and class weights in float64, exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.bfloat16().double().to(device)

    target = torch.randint(classes, (rows,), generator=generator)
    if ignored:
        target[::ignored] = -100
    weight = torch.rand(classes, generator=generator, dtype=torch.float64) + 0.5
    weight = weight.bfloat16().double().to(device)
    return draw(rows, hidden), draw(classes, hidden), target.to(device), draw(classes), weight


def expected(input, linear_weight, target, *, linear_bias=None, weight=None, reduction=1, **more):
    options = {"label_smoothing": 0.0, "softcap": None, "z_loss": 0.0, **more}
    return reference(
        input, linear_weight, target, linear_bias, weight, reduction, -100,
        *options.values(), dtype=input.dtype,
    )  # fmt: skip


def run(function, tensors, dtype, grad_output=None, **options):
    """The loss and the gradients of input, weight and bias."""
    input, linear_weight, target, linear_bias, weight = (
        t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors
    )
    leaves = [
        t.detach().requires_grad_() for t in (input, linear_weight, linear_bias) if t is not None
    ]
    bias = {"linear_bias": leaves[2]} if linear_bias is not None else {}
    loss = function(leaves[0], leaves[1], target, weight=weight, **bias, **options)
    if grad_output is None:
        generator = torch.Generator().manual_seed(1)
        grad_output = torch.randn(loss.shape, generator=generator, dtype=torch.float64) * 3
    return loss.detach(), *torch.autograd.grad(
        loss, leaves, grad_output.to(loss.device, loss.dtype)
    )


def assert_like_torch(tensors, dtype, what, **options):
    ours = run(op, tensors, dtype, **options)
    eager = run(expected, tensors, dtype, **options)
    exact = run(
        expected, [t.cpu() if t is not None else t for t in tensors], torch.float64, **options
    )
    for name, *results in zip(("loss", "input", "weight", "bias"), ours, eager, exact):  # noqa: B905
        assert_accurate(*results, f"{what}, {name}")


OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 5.0},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2},
]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ignored", [0, 5, 2])
@dtypes
def test_accuracy(dtype, reduction, ignored, chunks, device):
    """Six chunks, the last one short; with every second row ignored those are left out."""
    input, linear_weight, target, bias, weight = problem(device, ignored=ignored)
    for options, b, w in itertools.product(OPTIONS, (None, bias), (None, weight)):
        assert_like_torch(
            (input, linear_weight, target, b, w),
            dtype,
            f"{options}, bias {b is not None}, weight {w is not None}",
            reduction=reduction,
            **options,
        )


@pytest.mark.parametrize("count", [1, 8, 9, 64])
@pytest.mark.parametrize("kind", ["random", "few classes", "mean 1", "calibrated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_chunks(dtype, kind, count, exact_chunks, device):
    """The weight's gradient is as accurate after 64 chunks as after one."""
    exact_chunks(1024 // count)
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


def test_262144_classes(exact_chunks, device):
    exact_chunks(4)
    input, linear_weight, target, _, _ = problem(device, 256, 8, 262_144, ignored=0, scale=0.5)
    assert_like_torch((input, linear_weight, target, None, None), torch.bfloat16, "64 chunks")


@dtypes
def test_repeatable(dtype, chunks, device):
    tensors = problem(device)
    for options in ({}, {"reduction": 0}, {"softcap": 3.0, "z_loss": 0.1}):
        first, *others = [run(op, tensors, dtype, **options) for _ in range(3)]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


def products(function):
    """The matrix products that a call makes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    return sum(
        event.name in ("aten::mm", "aten::addmm", "aten::addmm_") for event in profiled.events()
    )


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)))
def test_only_gradients_that_are_needed(needs, chunks):
    """One product a chunk for the logits, one more for each matrix gradient that is asked for."""
    input, linear_weight, target, bias, _ = problem("cpu", ignored=0)
    tensors = [
        t.clone().requires_grad_(n)
        for t, n in zip((input, linear_weight, bias), needs, strict=True)
    ]
    x, w, b = tensors

    def step():
        loss = op(x, w, target, linear_bias=b)
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.backward()

    assert products(step) == 6 * (1 + needs[0] + needs[1])
    full = run(op, (input, linear_weight, target, bias, None), torch.float64, torch.ones(()))
    for tensor, needed, gradient in zip(tensors, needs, full[1:], strict=True):
        assert (tensor.grad is not None) == needed
        if needed:
            torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0)
    with torch.no_grad():
        assert products(lambda: op(x, w, target, linear_bias=b)) == 6


def leaves(device="cpu", dtype=torch.float64, **options):
    input, linear_weight, target, bias, _ = problem(device, **options)
    return [t.to(dtype).requires_grad_() for t in (input, linear_weight, bias)], target


def test_autograd_contract(chunks, device):
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


def test_accumulates_into_grad(chunks, device):
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


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_opcheck(reduction, chunks, device):
    (x, w, b), target = leaves(device, torch.float32, rows=20)
    for options in ({}, {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.1}):
        keywords = {"linear_bias": b, "reduction": reduction, **options}
        torch.library.opcheck(op.default, (x, w, target), keywords)
        arguments = (
            x, w, target, b, None, reduction, -100, options.get("label_smoothing", 0.0),
            options.get("softcap"), options.get("z_loss", 0.0), torch.float32,
        )  # fmt: skip
        torch.library.opcheck(fused.linear_cross_entropy_forward.default, arguments)
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            grad_output = torch.ones(target.shape if reduction == 0 else (), device=device)
            backward = fused.linear_cross_entropy_backward.default
            torch.library.opcheck(backward, (grad_output, *arguments, *needs))
            if reduction != 0:
                with_grad = fused.linear_cross_entropy_with_grad.default
                torch.library.opcheck(with_grad, (*arguments, *needs))


def test_with_grad_takes_grad_output(chunks, device):
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


def largest_allocation(function):
    """In bytes, of those that the ops inside a call make."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    return max(event.self_cpu_memory_usage for event in profiled.events())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", [0, 1])
def test_logits_are_never_held(reduction, compiled):
    """At sizes of its own choice: one buffer within the budget, where the logits take 312 MiB."""
    rows, hidden, classes = 4096, 16, 20_000
    (x, w, _), target = leaves("cpu", torch.float32, rows=rows, hidden=hidden, classes=classes)

    def step(x, w, target):
        return op(x, w, target, reduction=reduction).sum()

    function = torch.compile(step, backend="aot_eager") if compiled else step
    largest = largest_allocation(lambda: function(x, w, target).backward())
    computed = int((target != -100).sum())
    chunk = chunk_rows(
        computed, hidden, classes, torch.float32, buffers=2 - reduction, sums_weight=bool(reduction)
    )
    buffer = chunk * classes * 4
    assert buffer <= largest <= chunk_size.LOGITS_BYTES < rows * classes * 4


def test_gradients_are_handed_over(chunks):
    """The gradients made in the forward are those that the backward returns, without a copy."""
    (x, w, b), target = leaves("cpu", rows=64, hidden=1000, classes=500)
    loss = op(x, w, target, linear_bias=b)
    largest = largest_allocation(loss.backward)
    assert largest < w.nbytes
    assert all(t.grad is not None for t in (x, w, b))


def test_chunk_rows():
    """The sizes that the project is measured by, in bfloat16."""
    gib = 2**30
    for rows, hidden, classes, most in (
        (8192, 4096, 128_256, 0.35),
        (16_384, 2048, 32_000, 0.20),
        (8192, 1024, 151_936, 0.35),
        (4096, 8192, 262_144, 0.50),
    ):
        chunk = chunk_rows(rows, hidden, classes, torch.bfloat16, sums_weight=True)
        assert chunk * classes * 2 <= most * gib
        assert chunk >= chunk_size.LEAST_ROWS
        assert not sums_in_float32(rows, chunk, torch.bfloat16)
    many = chunk_rows(131_072, 4096, 128_256, torch.bfloat16, sums_weight=True)
    assert many == 4096
    assert sums_in_float32(131_072, many, torch.bfloat16)
    assert not sums_in_float32(131_072, many, torch.float32)
    assert chunk_rows(100, 8, 10, torch.float32) == 100
    assert chunk_rows(0, 8, 10, torch.float32) == 1
    assert chunk_rows(5000, 8, 10, torch.float32, budget=2000 * 40) == 1024
    # The gradient of a large weight allows larger chunks.
    assert chunk_rows(8192, 8192, 128_256, torch.bfloat16, sums_weight=True) == 2048
    # A little more memory for logits instead of a sum in float32.
    assert chunk_rows(32_768, 2048, 32_000, torch.bfloat16, sums_weight=True) == 4096


def test_ignored_rows(chunks, device, monkeypatch):
    """They have no product where they are many, and no gradient, whatever they hold."""
    monkeypatch.setattr(row_chunks, "WORTH_WAITING", 0)
    input, linear_weight, target, _, _ = problem(device, ignored=0)
    target[: ROWS - 9] = -100
    assert products(lambda: op(input, linear_weight, target)) == 1
    x, w = input.clone().requires_grad_(), linear_weight.clone().requires_grad_()
    with torch.no_grad():
        x[0] = torch.nan
    loss = op(x, w, target)
    loss.backward()
    rows = slice(ROWS - 9, None)
    torch.testing.assert_close(
        loss, F.cross_entropy(F.linear(input, linear_weight)[rows], target[rows])
    )
    assert x.grad[: ROWS - 9].eq(0).all()
    assert w.grad.isfinite().all()
    each = op(input, linear_weight, target, reduction=0)
    assert each.shape == (ROWS,)
    assert each[: ROWS - 9].eq(0).all()


@pytest.mark.gpu
def test_ignored_rows_in_a_cuda_graph(chunks, monkeypatch):
    """Nothing waits for their number while a graph is captured."""
    monkeypatch.setattr(row_chunks, "WORTH_WAITING", 0)
    input, linear_weight, target, _, _ = problem("cuda", ignored=2)
    expected = op(input, linear_weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = op(input, linear_weight, target)
    graph.replay()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_to_compare(rows, reduction, chunks, device):
    """No rows, or only ignored ones: torch's loss, gradients of 0."""
    (x, w, b), target = leaves(device, rows=rows)
    target = torch.full_like(target, -100)
    ours = op(x, w, target, linear_bias=b, reduction=reduction)
    torch.testing.assert_close(
        ours, expected(x, w, target, linear_bias=b, reduction=reduction), equal_nan=True
    )
    for gradient in torch.autograd.grad(ours.sum(), (x, w, b)):
        assert gradient.eq(0).all()


def test_shapes_and_layouts(chunks, device):
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


def test_dtype_and_autocast(chunks, device):
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


@needs_torchs
@pytest.mark.parametrize("variant", ["", "chunked", "chunked_none"])
@dtypes
def test_opinfo_samples(dtype, variant, chunks, device):
    chunks(2)
    ran = 0
    for info in opinfo(variant):
        for sample in info.sample_inputs(device, dtype, requires_grad=True):
            keywords = {k: v for k, v in sample.kwargs.items() if k != "options"}

            def results(function, dtype, keywords=keywords, sample=sample):
                def cast(value):
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        return value.detach().to(dtype).requires_grad_(value.requires_grad)
                    return value

                tensors = [cast(v) for v in (sample.input, *sample.args)]
                options = {k: cast(v) for k, v in keywords.items()}
                loss = function(*tensors, **options)
                roots = [
                    t for t in (*tensors, *options.values())
                    if isinstance(t, torch.Tensor) and t.requires_grad
                ]  # fmt: skip
                return loss.detach(), *torch.autograd.grad(loss, roots, torch.ones_like(loss))

            ours = results(linear_cross_entropy, dtype)
            eager = results(F.linear_cross_entropy, dtype)
            exact = results(F.linear_cross_entropy, torch.float64)
            for triple in zip(ours, eager, exact, strict=True):
                assert_accurate(*triple, repr(sample))
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


def test_compiled_with_dynamic_shapes(chunks, device):
    (x, w, b), _ = leaves(device)
    compiled = torch.compile(op, backend="aot_eager", dynamic=True)
    for rows in (90, 70, 31):
        target = torch.randint(CLASSES, (rows,), device=device)
        results = [run(f, (x[:rows], w, target, b, None), torch.float64) for f in (compiled, op)]
        torch.testing.assert_close(*results)


def test_only_leaf_ops_in_compiled_graphs(chunks):
    """The gradients are made in the forward graph, and scaled in the backward graph."""
    from functorch.compile import make_boxed_func

    texts = []

    def record(gm, inputs):
        texts.append(gm.print_readable(print_output=False))
        return make_boxed_func(gm.forward)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=record, bw_compiler=record)
    (x, w, _), target = leaves("cpu")
    torch.compile(op, backend=backend)(x, w, target).backward()
    forward, backward = texts
    assert "linear_cross_entropy_with_grad" in forward
    assert "linear_cross_entropy" not in backward
    assert backward.count("fused.scale.default") == 2
    assert compile_losses.ops is not None
