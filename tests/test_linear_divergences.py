"""Divergences of a linear layer's output from a teacher's by themselves: values, gradients, memory,
errors."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from compile_losses import functional
from compile_losses.device_constants import constants_of
from compile_losses.ops.linear.chunk_size import chunk_rows, held_rows
from tests.accuracy import assert_accurate
from tests.calls import dtypes
from tests.linear_problems import (
    compiled_texts,
    known_text,
    largest_allocation,
    most_allocated,
    products,
)

fused = torch.ops.fused
ROWS, HIDDEN, OF_TEACHER, CLASSES = 90, 24, 40, 37
CPU = torch.device("cpu")
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "batchmean": 3}


@dataclass(frozen=True)
class Loss:
    """An op with its own option, and what torch computes of log-probabilities for each class."""

    name: str
    option: dict
    options: tuple

    @property
    def op(self):
        return getattr(fused, self.name)

    def leaf(self, part):
        return getattr(fused, f"{self.name}_{part}").default

    def each(self, log_p, log_q):
        """What every class adds, of student and teacher."""
        if self.name == "linear_softmax_kl_div":
            p, q = (log_q, log_p) if self.option.get("reverse") else (log_p, log_q)
            return F.kl_div(p, q, reduction="none", log_target=True)
        beta = self.option.get("beta", 0.5)
        m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
        return beta * log_q.exp() * (log_q - m) + (1 - beta) * log_p.exp() * (log_p - m)

    def in_torch(self, student, teacher, reduction=3, temperature=1.0):
        each = self.each(
            F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1)
        )
        if reduction == 0:
            return each.sum(-1)
        return each.sum() / {1: each.numel(), 2: 1, 3: each.size(0)}[reduction]


LOSSES = {
    "forward": Loss("linear_softmax_kl_div", {}, (False,)),
    "reverse": Loss("linear_softmax_kl_div", {"reverse": True}, (True,)),
    "Jensen-Shannon": Loss("linear_softmax_js_div", {"beta": 0.3}, (0.3,)),
}
losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
TEACHERS = ["logits", "layer", "layer with a bias"]
teachers = pytest.mark.parametrize("teacher", TEACHERS)


def problem(teacher, device="cpu", rows=ROWS, hidden=HIDDEN, classes=CLASSES, scale=1.0):
    """Tensors in float64, exact in bfloat16: input, weight and bias of the student; target, and
    weight and bias of the teacher or None."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.bfloat16().double().to(device)

    student = (draw(rows, hidden), draw(classes, hidden) / 4, draw(classes))
    if teacher == "logits":
        return *student, draw(rows, classes), None, None
    bias = draw(classes) if "bias" in teacher else None
    return *student, draw(rows, OF_TEACHER), draw(classes, OF_TEACHER) / 4, bias


def given(tensors, dtype=torch.float64, needs=(True, True, True)):
    """The tensors in a dtype, the student's as leaves."""
    made = [None if t is None else t.to(dtype) for t in tensors]
    student = [t.detach().requires_grad_(n) for t, n in zip(made[:3], needs, strict=True)]
    return (*student, *made[3:])


def call(function, tensors, *options, **named):
    x, w, b, t, tw, tb = tensors
    return function(x, w, t, *options, linear_bias=b, target_weight=tw, target_bias=tb, **named)


def ours(loss, tensors, *options, **named):
    return call(loss.op, tensors, *options, **loss.option, **named)


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def torchs(loss, tensors, *options, softcap=None, target_softcap=None, **named):
    x, w, b, t, tw, tb = tensors
    teacher = t if tw is None else F.linear(t, tw, tb)
    student = capped(F.linear(x, w, b), softcap)
    return loss.in_torch(student, capped(teacher, target_softcap), *options, **named)


def run(function, loss, tensors, dtype, *options, **named):
    """The loss and the gradients of input, weight and bias."""
    tensors = given(tensors, dtype)
    value = function(loss, tensors, *options, **named)
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 3
    gradients = torch.autograd.grad(value, tensors[:3], grad_output.to(value.device, value.dtype))
    return value.detach(), *gradients


@pytest.mark.sampled(2)
@losses
@teachers
@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@dtypes
def test_accuracy(dtype, reduction, teacher, loss, chunks, device):
    """Six chunks, the last one short."""
    tensors = problem(teacher, device)
    for temperature in (1.0, 2.5):
        options = {"reduction": reduction, "temperature": temperature}
        mine = run(ours, loss, tensors, dtype, **options)
        eager = run(torchs, loss, tensors, dtype, **options)
        if dtype == torch.float64:
            # A divergence is a small difference of large numbers, and torch's no better than ours.
            torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)
            continue
        on_cpu = [t if t is None else t.cpu() for t in tensors]
        exact = run(torchs, loss, on_cpu, torch.float64, **options)
        for name, *results in zip(("loss", "input", "weight", "bias"), mine, eager, exact):  # noqa: B905
            assert_accurate(*results, f"temperature {temperature}, {name}")


@losses
@pytest.mark.parametrize("teacher", ["logits", "layer"])
def test_like_the_op_of_both_logits(loss, teacher, chunks, device):
    """Confident rows, and classes that are impossible for the teacher."""
    tensors = problem(teacher, device, scale=4.0)
    if teacher == "logits":
        tensors[3][:, 3:9] = -torch.inf

    def of_logits(loss, tensors, reduction):
        x, w, b, t, tw, tb = tensors
        teacher = t if tw is None else F.linear(t, tw, tb)
        pair, option = (F.linear(x, w, b), teacher), dict(loss.option)
        if option.pop("reverse", False):
            pair = pair[::-1]
        return getattr(fused, loss.name.removeprefix("linear_"))(*pair, reduction, **option)

    for reduction in range(4):
        results = [run(f, loss, tensors, torch.float64, reduction) for f in (ours, of_logits)]
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("count", [1, 8, 9, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_chunks(dtype, count, chunks, device):
    """The weight's gradient is as accurate after 64 chunks as after one."""
    chunks(1024 // count)
    tensors = problem("layer", device, 1024, 64, 300)
    loss = LOSSES["forward"]
    results = [run(f, loss, tensors, dtype) for f in (ours, torchs)]
    on_cpu = [t if t is None else t.cpu() for t in tensors]
    exact = run(torchs, loss, on_cpu, torch.float64)
    for name, *values in zip(("loss", "input", "weight", "bias"), *results, exact):  # noqa: B905
        assert_accurate(*values, f"{count} chunks, {name}")


@losses
@teachers
def test_repeatable(teacher, loss, chunks, device):
    tensors = problem(teacher, device)
    for reduction in (0, 3):
        first, *others = [run(ours, loss, tensors, torch.float32, reduction) for _ in range(3)]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


@losses
def test_autograd_contract(loss, chunks, device):
    tensors = given(problem("layer", device))
    student, three = tensors[:3], torch.tensor(3.0, dtype=torch.float64, device=device)
    value = ours(loss, tensors)
    first = torch.autograd.grad(value, student, three, retain_graph=True)
    for gradient in first:  # the gradients that were handed out are the caller's own
        gradient.mul_(2)
    second = torch.autograd.grad(value, student, three, retain_graph=True)
    torch.testing.assert_close([g / 2 for g in first], list(second))
    third = torch.autograd.grad(value, student, three)
    torch.testing.assert_close(third, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, student)
    for changed in (*student[:2], *tensors[3:5]):
        value = ours(loss, tensors)
        with torch.no_grad():
            changed.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@pytest.mark.sampled(2)
@losses
@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_gradcheck(reduction, loss, chunks, device):
    chunks(2)
    for teacher in ("logits", "layer"):
        tensors = problem(teacher, device, rows=5, hidden=3, classes=4)
        student, rest = given(tensors)[:3], tensors[3:]

        def function(*student, rest=rest):
            return ours(loss, (*student, *rest), reduction, temperature=1.5)

        assert torch.autograd.gradcheck(function, student)
        assert torch.autograd.gradgradcheck(function, student)


@losses
def test_transforms(loss, chunks, device):
    tensors = given(problem("layer", device))
    student, rest = tensors[:3], tensors[3:]
    many = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
    results = [
        torch.autograd.grad(f(loss, tensors), student, many, is_grads_batched=True)
        for f in (ours, torchs)
    ]
    torch.testing.assert_close(*results)
    x, *others = [t.detach() for t in student]
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        results = [
            transform(lambda x, f=f: f(loss, (x, *others, *rest)))(x) for f in (ours, torchs)
        ]
        torch.testing.assert_close(*results)
    results = [
        torch.func.vmap(lambda x, f=f: f(loss, (x, *others, *rest)))(torch.stack([x, 2 * x]))
        for f in (ours, torchs)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.sampled(6)
@losses
@pytest.mark.parametrize("teacher", ["logits", "layer with a bias"])
@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_opcheck(reduction, teacher, loss, chunks, device, opcheck):
    tensors = given(problem(teacher, device, rows=20), torch.float32)
    x, w, b, t, tw, tb = tensors
    named = {"linear_bias": b, "target_weight": tw, "target_bias": tb, **loss.option}
    opcheck(loss.op.default, (x, w, t, reduction), named)
    if reduction in (0, 2):
        leaf = (x, w, t, b, tw, tb, reduction, *loss.options, 2.0, None, None, 7, torch.float32)
        opcheck(loss.leaf("forward"), leaf)
        grad_output = torch.rand(20 if reduction == 0 else (), device=device)
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            opcheck(loss.leaf("backward"), (grad_output, *leaf, *needs))
            if reduction == 2:
                opcheck(loss.leaf("with_grad"), (*leaf, *needs))
        if reduction == 0:
            detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in leaf]
            rows = (*detached, True, True, True, *known_text(grad_output))
            opcheck(loss.leaf("rows_with_grad"), rows)


@losses
def test_gradients_of_rows(loss, chunks, device):
    """As the passes call it: for a gradient of each row that is known, or made of its loss."""
    tensors = problem("layer with a bias", device)
    x, w, b, t, tw, tb = tensors
    leaf = (x, w, t, b, tw, tb, 0, *loss.options, 2.0, None, None, 1, x.dtype)
    grad_output = torch.rand(ROWS, dtype=x.dtype, device=device)
    needs = (True, True, True)
    expected = loss.leaf("backward")(grad_output, *leaf, *needs)
    value, *gradients = loss.leaf("rows_with_grad")(*leaf, *needs, *known_text(grad_output))
    torch.testing.assert_close(value, loss.leaf("forward")(*leaf))
    torch.testing.assert_close(gradients, list(expected))
    square = '{"steps": [["aten.mul.Tensor", [{"value": 0}, {"value": 1}], {}]], "results": [2]}'
    expected = loss.leaf("backward")(value * grad_output, *leaf, *needs)
    _, *gradients = loss.leaf("rows_with_grad")(*leaf, *needs, square, [grad_output])
    torch.testing.assert_close(gradients, list(expected))


@losses
def test_with_grad_takes_grad_output(loss, chunks, device):
    """As the passes call it: the gradients for a factor that is known beside the loss."""
    tensors = given(problem("layer with a bias", device))
    x, w, b, t, tw, tb = (v.detach() for v in tensors)
    leaf = (x, w, t, b, tw, tb, 2, *loss.options, 1.0, None, None, 5, x.dtype)
    three = torch.tensor(3.0, dtype=torch.float64, device=device)
    value, *gradients = loss.leaf("with_grad")(*leaf, True, True, True, three)
    expected = torchs(loss, tensors, 2) / 5
    torch.testing.assert_close(value, expected.detach())
    exact = torch.autograd.grad(expected, tensors[:3], three)
    torch.testing.assert_close(tuple(gradients), exact)
    none = (*leaf[:6], 0, *leaf[7:])
    with pytest.raises(RuntimeError, match="needs a reduction"):
        loss.leaf("with_grad")(*none, True, True, True)


@losses
@teachers
@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_no_rows(reduction, teacher, loss, device):
    tensors = given(problem(teacher, device, rows=0))
    mine, theirs = (f(loss, tensors, reduction) for f in (ours, torchs))
    torch.testing.assert_close(mine, theirs, equal_nan=True)
    for gradient in torch.autograd.grad(mine.sum(), tensors[:3]):
        assert gradient.eq(0).all()


@losses
def test_shapes_and_layouts(loss, chunks, device):
    """Leading dimensions, one row, tensors of any strides."""
    x, w, b, t, tw, _ = given(problem("layer", device))
    logits = F.linear(t, tw)
    cases = {
        "leading": (x.reshape(3, 5, 6, HIDDEN), w, b, t.reshape(3, 5, 6, OF_TEACHER), tw, None),
        "leading, of logits": (
            x.reshape(3, 30, HIDDEN), w, b, logits.reshape(3, 30, CLASSES), None, None
        ),
        "one row": (x[1], w, b, t[1], tw, None),
        "one row of logits": (x[1], w, b, logits[1], None, None),
        "transposed weights": (
            x, w.t().contiguous().t(), b, t, tw.t().contiguous().t(), None
        ),
        "transposed inputs": (x.t().contiguous().t(), w, b, t.t().contiguous().t(), tw, None),
        "transposed logits": (x, w, b, logits.t().contiguous().t(), None, None),
        "rows apart": (x[::2], w, b, t[::2], tw, None),
        "columns apart": (
            x.repeat_interleave(2, 1)[:, ::2], w, b, logits.repeat_interleave(2, 1)[:, ::2], None,
            None,
        ),
        "a row expanded": (x, w, b, logits[:1].expand(ROWS, CLASSES), None, None),
    }  # fmt: skip
    for name, tensors in cases.items():
        for reduction in range(4):
            mine, theirs = (f(loss, tensors, reduction) for f in (ours, torchs))
            torch.testing.assert_close(mine, theirs, msg=name)
            assert mine.stride() == theirs.stride(), name
            gradients = [
                torch.autograd.grad(v.sum(), (x, w, b), retain_graph=True) for v in (mine, theirs)
            ]
            torch.testing.assert_close(*gradients, msg=name)


@losses
def test_dtypes_of_both_sides(loss, chunks, device):
    """They may differ; the loss has the promoted one, or the one that is asked for."""
    tensors = problem("layer", device)
    for of_student, of_teacher in itertools.permutations(
        (torch.bfloat16, torch.float32, torch.float64), 2
    ):
        student, teacher = given(tensors, of_student)[:3], given(tensors, of_teacher)[3:]
        mine, theirs = (f(loss, (*student, *teacher)) for f in (ours, torchs))
        promoted = torch.promote_types(of_student, of_teacher)
        assert mine.dtype == theirs.dtype == promoted
        narrow = torch.bfloat16 in (of_student, of_teacher)
        tolerance = {"rtol": 3e-2, "atol": 1e-3} if narrow else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(mine, theirs, **tolerance)
        for value in torch.autograd.grad(mine, student):
            assert value.dtype == of_student
    tensors = given(tensors, torch.bfloat16)
    mine = ours(loss, tensors, dtype=torch.float32)
    assert mine.dtype == torch.float32


@losses
def test_autocast(loss, chunks, device):
    tensors = given(problem("layer", device), torch.float32)
    x, w, b, t, tw, _ = tensors
    with torch.autocast(device, torch.bfloat16):
        mine = ours(loss, tensors)
        # Of float logits: on the CPU autocast leaves softmaxes in bfloat16.
        theirs = loss.in_torch(F.linear(x, w, b).float(), F.linear(t, tw).float())
        exact = ours(loss, tensors, dtype=torch.float32)  # nothing is cast
    assert mine.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(exact, torchs(loss, tensors))
    gradients = [torch.autograd.grad(v, tensors[:3]) for v in (mine, theirs)]
    for pair in zip(*gradients, strict=True):
        assert pair[0].dtype == torch.float32
        torch.testing.assert_close(*pair, rtol=3e-2, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("teacher", ["logits", "layer"])
def test_only_gradients_that_are_needed(needs, teacher, chunks):
    """A product a chunk for the student's logits and for each matrix gradient that is asked for. A
    chunk of the teacher's logits takes two."""
    tensors = problem(teacher)
    for loss in LOSSES.values():
        leaves = given(tensors, needs=needs)

        def step(loss=loss, leaves=leaves):
            value = ours(loss, leaves)
            assert value.requires_grad == any(needs)
            if any(needs):
                value.backward()

        of_logits = 6 + 12 * (teacher == "layer")
        assert products(step) == of_logits + 6 * (needs[0] + needs[1])
        everything = given(tensors)
        full = torch.autograd.grad(ours(loss, everything), everything[:3])
        for leaf, needed, gradient in zip(leaves[:3], needs, full, strict=True):
            assert (leaf.grad is not None) == needed
            if needed:
                torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=0)
        with torch.no_grad():
            assert products(lambda loss=loss: ours(loss, leaves)) == of_logits  # noqa: B023


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", [0, 3])
def test_logits_are_never_held(reduction, compiled):
    """At sizes of its own choice: buffers within the budget, where either side's logits take 312
    MiB."""
    rows, hidden, classes = 4096, 16, 20_000
    tensors = given(problem("layer", rows=rows, hidden=hidden, classes=classes), torch.float32)
    loss = LOSSES["forward"]

    def step(*tensors):
        return ours(loss, tensors, reduction).sum()

    function = torch.compile(step, backend="aot_eager") if compiled else step
    largest = largest_allocation(lambda: function(*tensors).backward())
    chunk = chunk_rows(rows, hidden, classes, torch.float32, CPU, beside=1, sums_weight=True)
    buffer = chunk * classes * 4
    assert buffer <= largest <= constants_of(CPU).logits_bytes < rows * classes * 4


def test_only_leaf_ops_in_compiled_graphs(chunks):
    """The gradients are made in the forward graph, and scaled in the backward graph."""
    tensors, loss = given(problem("layer")), LOSSES["forward"]
    forward, backward = compiled_texts(lambda *t: ours(loss, t), *tensors)
    assert "linear_softmax_kl_div_with_grad" in forward
    assert "linear_softmax_kl_div" not in backward
    assert backward.count("fused.scale.default") == 3


def test_compiled_with_dynamic_shapes(chunks, device):
    x, w, b, t, tw, tb = problem("layer", device)
    for loss in LOSSES.values():
        for reduction in range(4):

            def function(*tensors, loss=loss, reduction=reduction):
                return ours(loss, tensors, reduction)

            compiled = torch.compile(function, backend="aot_eager", dynamic=True)
            for rows in (90, 70, 31):
                tensors = (x[:rows], w, b, t[:rows], tw, tb)
                results = [
                    run(f, loss, tensors, torch.float64)
                    for f in (lambda _, t, c=compiled: c(*t), lambda _, t, c=function: c(*t))
                ]
                torch.testing.assert_close(*results)


@losses
def test_functions(loss, device):
    """With named reductions; the same from the package's front."""
    tensors = given(problem("layer with a bias", device))
    function = getattr(functional, loss.name)
    for name, reduction in REDUCTIONS.items():
        named = call(function, tensors, name, temperature=2.0, **loss.option)
        torch.testing.assert_close(named, ours(loss, tensors, reduction, temperature=2.0))
    torch.testing.assert_close(call(function, tensors, **loss.option), ours(loss, tensors))
    with pytest.raises(ValueError, match=r"expected reduction to be one of .*, got 'average'"):
        call(function, tensors, "average")


@losses
def test_errors(loss, device):
    x, w, b, t, tw, tb = given(problem("layer with a bias", device))
    logits = F.linear(t, tw, tb)
    layer = {"target_weight": tw, "target_bias": tb}

    def refuses(kind, *fragments, args=(x, w, t), **named):
        with pytest.raises(kind) as caught:
            loss.op(*args, **{**loss.option, **named})
        for fragment in fragments:
            assert re.search(re.escape(fragment), str(caught.value)), (fragment, str(caught.value))

    refuses(RuntimeError, "[90, 37]", "[90, 40]")  # for want of the teacher's weight
    refuses(RuntimeError, "[90, 37]", "[7, 37]", args=(x, w, logits[:7]))
    refuses(RuntimeError, "[90, 37]", "[90, 30]", target_weight=tw[:30])
    refuses(
        RuntimeError, "target_bias only with target_weight", args=(x, w, logits), target_bias=tb
    )
    refuses(RuntimeError, "target_bias", "(37,)", "(5,)", target_weight=tw, target_bias=tb[:5])
    refuses(RuntimeError, "linear_bias", "(37,)", "(5,)", linear_bias=b[:5], **layer)
    refuses(RuntimeError, "linear_weight", "float32", args=(x, w.float(), t), **layer)
    refuses(RuntimeError, "target_weight", "float32", target_weight=tw.float())
    refuses(RuntimeError, "target_weight", "in_features", "39", target_weight=tw[:, 1:])
    refuses(
        RuntimeError,
        "linear_weight",
        "[37, 2, 12]",
        args=(x[:, :12], w.view(37, 2, 12), t),
        **layer,
    )
    refuses(RuntimeError, "input to have at least 1", args=(x[0, 0], w, t), **layer)
    refuses(RuntimeError, "temperature", "0.0", temperature=0.0, **layer)
    refuses(RuntimeError, "temperature", "nan", temperature=float("nan"), **layer)
    refuses(ValueError, "reduction", "7", args=(x, w, t, 7), **layer)
    refuses(NotImplementedError, "target", "int64", args=(x, w, logits.long()))
    refuses(NotImplementedError, "dense", args=(x, w, logits.to_sparse()))
    for name, tensor in (("target", t), *layer.items()):
        learned = tensor.detach().clone().requires_grad_()
        named = {**layer, name: learned}
        args = (x, w, named.pop("target", t))
        refuses(RuntimeError, name, "not to require grad", args=args, **named)
        with torch.no_grad():
            loss.op(*args, **named, **loss.option)
    if "beta" in loss.option:
        refuses(RuntimeError, loss.name, "beta", "1.0", beta=1.0, **layer)


def test_float16_has_no_unit_gradients(chunks):
    """They would underflow: what the loss scale reaches is computed again."""
    tensors = given(problem("logits"), torch.float16)
    value = ours(LOSSES["forward"], tensors, 1)
    (gradient,) = torch.autograd.grad(value, tensors[0], torch.tensor(2.0**15).half())
    exact = given(problem("logits"))
    (expected,) = torch.autograd.grad(ours(LOSSES["forward"], exact, 1), exact[0])
    torch.testing.assert_close(
        gradient.double(), expected * 2.0**15, rtol=2e-2, atol=expected.abs().max() * 2.0**8
    )


# Soft-caps of the student's logits, of the teacher's, or of both.

CAPS = {
    "student": {"softcap": 1.5},
    "teacher": {"target_softcap": 2.0},
    "both": {"softcap": 1.5, "target_softcap": 4.0},
}
caps = pytest.mark.parametrize("softcaps", CAPS.values(), ids=CAPS)


@pytest.mark.sampled(4)
@losses
@teachers
@caps
@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@dtypes
def test_accuracy_with_softcaps(dtype, reduction, softcaps, teacher, loss, chunks, device):
    tensors, options = problem(teacher, device), {"temperature": 1.5, **softcaps}
    mine, eager = (run(f, loss, tensors, dtype, reduction, **options) for f in (ours, torchs))
    if dtype == torch.float64:
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)
        return
    on_cpu = [t if t is None else t.cpu() for t in tensors]
    exact = run(torchs, loss, on_cpu, torch.float64, reduction, **options)
    for name, *results in zip(("loss", "input", "weight", "bias"), mine, eager, exact):  # noqa: B905
        assert_accurate(*results, name)


@losses
@caps
def test_saturated_softcaps(softcaps, loss, chunks, device):
    """Logits far beyond the cap have gradients of 0, and a class that a mask made impossible has
    the logit -softcap."""
    tensors = problem("logits", device, scale=40.0)
    tensors[3][:, 3:9] = -torch.inf if "target_softcap" in softcaps else -1e4
    results = [run(f, loss, tensors, torch.float64, 2, **softcaps) for f in (ours, torchs)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(3)
@losses
@caps
def test_gradcheck_with_softcaps(softcaps, loss, chunks, device):
    chunks(2)
    for reduction, teacher in ((0, "logits"), (3, "layer")):
        tensors = problem(teacher, device, rows=5, hidden=3, classes=4)
        student, rest = given(tensors)[:3], tensors[3:]

        def function(*student, reduction=reduction, rest=rest):
            return ours(loss, (*student, *rest), reduction, temperature=1.5, **softcaps)

        assert torch.autograd.gradcheck(function, student)
        assert torch.autograd.gradgradcheck(function, student)


@losses
@caps
@pytest.mark.parametrize("teacher", ["logits", "layer"])
def test_given_tensors_stay_as_they_are(teacher, softcaps, loss, chunks, device):
    """A cap is computed in place, but of the op's own logits."""
    tensors = given(problem(teacher, device))
    copies = [t if t is None else t.detach().clone() for t in tensors]
    for reduction in (0, 3):
        first = ours(loss, tensors, reduction, **softcaps)
        torch.testing.assert_close(first, ours(loss, tensors, reduction, **softcaps))
        first.sum().backward()
    for tensor, copy in zip(tensors, copies, strict=True):
        assert tensor is None or torch.equal(tensor, copy)


@losses
@caps
def test_dtypes_of_both_sides_with_softcaps(softcaps, loss, chunks, device):
    tensors = problem("layer", device)
    for of_student, of_teacher in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        student, teacher = given(tensors, of_student)[:3], given(tensors, of_teacher)[3:]
        for reduction in (0, 3):
            pair = [f(loss, (*student, *teacher), reduction, **softcaps) for f in (ours, torchs)]
            tolerance = {"rtol": 1e-5, "atol": 1e-6}
            if of_student == torch.bfloat16:
                tolerance = {"rtol": 6e-2, "atol": 6e-3}
            torch.testing.assert_close(*pair, **tolerance)
            gradients = [torch.autograd.grad(value.sum(), student) for value in pair]
            torch.testing.assert_close(*gradients, rtol=1e-1, atol=tolerance["atol"] * 10)


@losses
@caps
def test_autocast_with_softcaps(softcaps, loss, chunks, device):
    tensors = given(problem("layer", device), torch.float32)
    x, w, b, t, tw, _ = tensors
    with torch.autocast(device, torch.bfloat16):
        mine = ours(loss, tensors, **softcaps)
        student = capped(F.linear(x, w, b), softcaps.get("softcap")).float()
        teacher = capped(F.linear(t, tw), softcaps.get("target_softcap")).float()
    torch.testing.assert_close(mine, loss.in_torch(student, teacher))


@pytest.mark.sampled(3)
@losses
@caps
def test_transforms_with_softcaps(softcaps, loss, chunks, device):
    tensors = problem("layer", device)
    x, *others = tensors

    def of(function):
        return lambda x: function(loss, (x, *others), **softcaps)

    for transform in (torch.func.grad, torch.func.jacfwd):
        torch.testing.assert_close(*(transform(of(f))(x) for f in (ours, torchs)))


@pytest.mark.sampled(3)
@losses
@pytest.mark.parametrize("teacher", ["logits", "layer with a bias"])
@pytest.mark.parametrize("reduction", [0, 2])
def test_opcheck_with_softcaps(reduction, teacher, loss, chunks, device, opcheck):
    tensors = given(problem(teacher, device, rows=20), torch.float32)
    x, w, b, t, tw, tb = tensors
    named = {"linear_bias": b, "target_weight": tw, "target_bias": tb, **loss.option}
    opcheck(loss.op.default, (x, w, t, reduction), {**named, **CAPS["both"]})
    leaf = (x, w, t, b, tw, tb, reduction, *loss.options, 2.0, 1.5, 4.0, 7, torch.float32)
    opcheck(loss.leaf("forward"), leaf)
    grad_output = torch.rand(20 if reduction == 0 else (), device=device)
    opcheck(loss.leaf("backward"), (grad_output, *leaf, True, True, True))
    if reduction == 2:
        opcheck(loss.leaf("with_grad"), (*leaf, True, True, True))
    else:
        detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in leaf]
        rows = (*detached, True, True, True, *known_text(grad_output))
        opcheck(loss.leaf("rows_with_grad"), rows)


@pytest.mark.sampled(3)
@pytest.mark.kernels
@pytest.mark.parametrize("reduction", [0, 3])
@pytest.mark.parametrize(
    ("teacher", "dtype", "softcaps", "apart"),
    [
        ("logits", torch.float32, {}, 0),
        ("layer", torch.float32, {}, 1),
        ("layer", torch.bfloat16, {}, 0.5),
        ("logits", torch.float32, CAPS["student"], 1),
        ("logits", torch.float32, CAPS["teacher"], 1),
        ("layer", torch.float32, CAPS["both"], 2),
    ],
)
@losses
def test_held_at_a_time(loss, teacher, dtype, softcaps, apart, reduction, chunks):
    """Beside the gradients: a chunk of the student's logits, and half a chunk of each tensor of its
    size that is needed besides: the teacher's logits, the student's tanh, and the gradient by row
    or in reverse if the teacher has another dtype."""
    rows, hidden, classes = 1024, 8, 10_000
    chunks(256)
    x, w, b, *of_teacher = problem(teacher, rows=rows, hidden=hidden, classes=classes)
    leaves = [tensor.float().requires_grad_() for tensor in (x, w, b)]
    of_teacher = [None if t is None else t.to(dtype) for t in of_teacher]
    if dtype != torch.float32 and (reduction == 0 or loss.option.get("reverse")):
        apart += 1
    # oneDNN packs operands of bfloat16 as suits the processor.
    with torch.backends.mkldnn.flags(enabled=False):
        most = most_allocated(
            lambda: ours(loss, [*leaves, *of_teacher], reduction, **softcaps).sum().backward()
        )
    held = held_rows(256, CPU, apart) * classes * 4
    gradients = sum(leaf.nbytes for leaf in leaves)
    assert held <= most <= gradients + held + rows * classes * 4 / 20


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", [0, 3])
@losses
def test_one_chunk_of_all_rows(loss, reduction, chunks):
    """The memory of the weight's gradient is taken when that of the teacher's logits is free."""
    chunks(256)
    tensors = given(problem("layer", rows=256, hidden=128, classes=10_000), torch.float32)
    most = most_allocated(lambda: ours(loss, tensors, reduction).sum().backward())
    held = held_rows(256, CPU, 1) * 10_000 * 4
    assert held <= most <= held + tensors[0].nbytes + tensors[1].nbytes / 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("teacher", ["logits", "layer"])
@pytest.mark.parametrize("function", ["mean", "by row", "of other rows"])
@caps
@losses
def test_compiled_with_softcaps(loss, softcaps, function, teacher, no_code, chunks):
    """Also where the logits are put back into the graph."""

    def step(*tensors):
        each = ours(loss, tensors, 3 if function == "mean" else 0, temperature=1.5, **softcaps)
        if function == "of other rows":
            return (each.sum() * each).sum()
        return each if function == "mean" else each.square().sum()

    tensors = given(problem(teacher))
    compiled = torch.compile(step, backend="compile_losses")
    values = [f(*tensors) for f in (compiled, step)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(value, tensors[:3]) for value in values]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@losses
def test_errors_of_softcaps(loss):
    x, w, _, t, tw, _ = given(problem("layer"))
    for name in ("softcap", "target_softcap"):
        for wrong in (0.0, -1.0, float("nan")):
            message = f"{loss.name}: expected {name} to be positive, got {wrong}"
            with pytest.raises(RuntimeError, match=message):
                loss.op(x, w, t, target_weight=tw, **{**loss.option, name: wrong})
