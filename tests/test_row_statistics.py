"""Statistics of rows of logits: the ops, and the functions that are made of them."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from compile_losses import functional
from compile_losses.ops.row_statistics import entropy_of, reference
from tests.accuracy import assert_accurate
from tests.calls import dtypes
from tests.gpus import assert_ended_by_target, on_a_gpu_of_its_own

fused = torch.ops.fused
IGNORED = -100
#: The statistics that have gradients, and their places among the results.
DIFFERENTIABLE = ("nll", "logsumexp", "entropy", "total")

#: Classes of a row: on a GPU of a warp's lanes or a block's threads, on the CPU of several tiles.
WIDTHS = [1, 2, 7, 8, 100, 257, 1024, 1031, 4099, 32_000]
#: Rows that are not contiguous, or do not start on a boundary of 16 bytes.
LAYOUTS = {
    "offset": ((4 * 515 + 1,), lambda x: x[1:].view(4, 515)),
    "long, offset": ((4 * 2051 + 3,), lambda x: x[3:].view(4, 2051)),
    "padded": ((6, 1040), lambda x: x[:, :1031]),
    "padded and offset": ((6, 2050), lambda x: x[:, 3:2003]),
    "transposed": ((65, 70), lambda x: x.t()),
    "every other": ((6, 74), lambda x: x[:, ::2]),
    "one row": ((1, 37), lambda x: x),
    "expanded": ((1, 37), lambda x: x.expand(4, 37)),
}


def problem(shape, dtype, device, scale=3.0, arrange=lambda x: x):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    logits = arrange(values.to(device, dtype))
    rows, classes = logits.shape
    target = torch.randint(classes, (rows,), generator=generator)
    if rows > 2:
        target[1] = IGNORED
    return logits, target.to(device)


def torchs(logits, target, softcap, grads, dtype):
    """torch's statistics and their gradient, in a dtype."""
    leaf = logits.detach().to(dtype).requires_grad_()
    z = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
    nll = None
    if target is not None:
        nll = F.cross_entropy(z, target, ignore_index=IGNORED, reduction="none")
    results = [nll, torch.logsumexp(z, 1), entropy_of(z), z.sum(1)]
    pairs = [(r, g.to(dtype)) for r, g in zip(results, grads, strict=True) if None not in (r, g)]
    outputs, given = zip(*pairs, strict=True)
    (gradient,) = torch.autograd.grad(outputs, leaf, given)
    return [None if r is None else r.detach() for r in results], z.detach(), gradient


def random_grads(rows, device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(rows, generator=generator, dtype=torch.float64).to(device, dtype)
        for _ in DIFFERENTIABLE
    ]


def statistics_and_gradient(logits, target, softcap, grads):
    with torch.no_grad():
        results = fused.row_statistics_forward(logits, target, IGNORED, softcap)
        gradient = fused.row_statistics_backward(
            *grads, logits, target, results[6], IGNORED, softcap
        )
    return results, gradient


def squares_of(z):
    return (2 * F.log_softmax(z, 1)).logsumexp(1)


def log_squares(logits, target, softcap=None):
    """That of the op, beside which all other statistics are the same bits as without it."""
    options = (logits, target, IGNORED, softcap)
    without, found = (
        fused.row_statistics_forward(*options, squares=squares) for squares in (False, True)
    )
    assert without[7].shape == (0,)
    for place, (one, other) in enumerate(zip(without, found, strict=True)):
        if place != 7:
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    return found[7]


def check(logits, target, softcap=None):
    """Every statistic, and the gradient of all of them, by the accuracy rule."""
    rows, device, dtype = logits.shape[0], logits.device, logits.dtype
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    grads = random_grads(rows, device)
    if target is None:
        grads[0] = None
    ours, gradient = statistics_and_gradient(logits, target, softcap, grads)
    exact, z, exact_gradient = torchs(logits, target, softcap, grads, torch.float64)
    eager, _, eager_gradient = torchs(logits, target, softcap, grads, acc)
    for name, result, of_torch, of_double in zip(DIFFERENTIABLE, ours, eager, exact, strict=False):
        if of_double is None:
            assert result.shape == (0,)
            continue
        assert result.dtype == acc
        if dtype == torch.float64:  # torch's own results err as much
            scale = max(1.0, z.abs().max().item()) * (logits.shape[1] if name == "total" else 1)
            torch.testing.assert_close(result, of_double, rtol=1e-12, atol=1e-14 * scale)
        else:
            assert_accurate(result, of_torch, of_double, name)
    if dtype == torch.float64:
        torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)
    else:
        assert_accurate(gradient, eager_gradient.to(dtype), exact_gradient, "gradient")
    assert gradient.dtype == dtype
    assert gradient.is_contiguous()
    wide = logits.to(acc)
    wide = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    # Of a confident row it is near 0. It is made of the square of a sum near 1, of capped logits.
    like = 2 * torch.finfo(acc).eps * (softcap or 1)
    squares = log_squares(logits, target, softcap)
    assert_accurate(squares, squares_of(wide), squares_of(z), "log_squares", like)
    *_, maximum, argmax, _, _ = ours
    assert argmax.dtype == torch.int64
    if softcap is None:
        assert torch.equal(maximum, logits.to(acc).amax(1))
        assert torch.equal(argmax.cpu(), logits.cpu().argmax(1))
    else:  # whose rounding may differ
        torch.testing.assert_close(maximum.double(), z.amax(1), rtol=1e-6, atol=0)
        at = z.gather(1, argmax.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(at, z.amax(1), rtol=1e-6, atol=0)


@dtypes
@pytest.mark.parametrize("softcap", [None, 4.0], ids=["", "softcap"])
@pytest.mark.parametrize("classes", WIDTHS)
def test_statistics(classes, softcap, dtype, device):
    check(*problem((5, classes), dtype, device), softcap)


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, device):
    shape, arrange = LAYOUTS[layout]
    logits, target = problem(shape, dtype, device, arrange=arrange)
    check(logits, target)
    check(logits, None, 4.0)


@dtypes
def test_confident_rows(dtype, device):
    """Large logits, and such far from 0."""
    logits, target = problem((6, 1031), dtype, device, scale=20.0)
    check(logits, target)
    check(logits, target, 30.0)
    check(logits + 300, target)


@dtypes
def test_many_rows(dtype, device):
    check(*problem((3000, 17), dtype, device))


@dtypes
def test_no_target(dtype, device):
    logits, _ = problem((5, 300), dtype, device)
    check(logits, None)


def test_all_ignored(device):
    logits, _ = problem((5, 300), torch.float32, device)
    target = torch.full((5,), IGNORED, device=device)
    check(logits, target)
    grads = [torch.ones(5, device=device), None, None, None]
    results, gradient = statistics_and_gradient(logits, target, None, grads)
    assert torch.equal(results[0], torch.zeros(5, device=device))
    assert torch.equal(gradient, torch.zeros_like(logits))


@pytest.mark.parametrize("classes", [1, 5, 2000])
def test_one_class_of_each_row(classes, device):
    """Where one class has all the mass nothing is left to be rounded."""
    logits = torch.full((3, classes), -torch.inf, device=device)
    logits[:, 0] = torch.tensor([700.3, -80.1, 0.0])
    results, gradient = statistics_and_gradient(
        logits, torch.zeros(3, dtype=torch.int64, device=device), None, random_grads(3, device)
    )
    nll, logsumexp, entropy, _, maximum, argmax, _, _ = results
    assert torch.equal(log_squares(logits, None), torch.zeros_like(nll))
    assert torch.equal(nll, torch.zeros_like(nll))
    assert torch.equal(entropy, torch.zeros_like(nll))
    assert torch.equal(logsumexp, logits[:, 0])
    assert torch.equal(maximum, logits[:, 0])
    assert argmax.tolist() == [0, 0, 0]
    assert gradient.isfinite().all()


def test_no_rows(device):
    logits, target = torch.empty(0, 5, device=device), torch.empty(0, 1, device=device).long()
    results, gradient = statistics_and_gradient(logits, target[:, 0], None, [None] * 4)
    assert [r.shape for r in results] == [(0,)] * 6 + [(0, 3), (0,)]
    assert log_squares(logits, target[:, 0]).shape == (0,)
    assert gradient.shape == (0, 5)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_classes(rows, device):
    with pytest.raises(RuntimeError, match="at least 1 class"):
        fused.row_statistics_forward(torch.empty(rows, 0, device=device), None, IGNORED, None)


@dtypes
@pytest.mark.parametrize("fill", ["-inf", "lowest"])
@pytest.mark.parametrize("classes", [50, 3001])
def test_masked_classes(classes, fill, dtype, device):
    """Those with probability 0 add nothing to the entropy, and have a gradient without nan."""
    logits, target = problem((6, classes), dtype, device)
    mask = torch.rand(logits.shape, device=device) < 0.5
    mask[0, : classes // 2] = True  # the first packets of some threads hold nothing else
    mask[1, classes // 2 :] = True
    mask[2] = True
    mask[2, -1] = False
    value = -torch.inf if fill == "-inf" else torch.finfo(dtype).min
    logits.masked_fill_(mask, value)
    target = (~mask).int().argmax(1)
    grads = random_grads(6, device)
    ours, gradient = statistics_and_gradient(logits, target, None, grads)
    leaf = logits.double().requires_grad_()
    exact = reference(leaf, target, IGNORED, None)
    pairs = [(e, g) for e, g in zip(exact, grads, strict=True) if e is not None]
    (exact_gradient,) = torch.autograd.grad([e for e, _ in pairs], leaf, [g for _, g in pairs])
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for result, expected in zip(ours[:3], exact[:3], strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    if fill == "-inf":
        assert torch.equal(ours[3].double(), exact[3])
    squares = log_squares(logits, target).double()
    torch.testing.assert_close(squares, squares_of(logits.double()), rtol=tolerance, atol=tolerance)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        gradient.double(), exact_gradient, rtol=max(eps, tolerance), atol=4 * tolerance
    )
    assert torch.equal(ours[5].cpu(), logits.cpu().argmax(1))


@dtypes
@pytest.mark.parametrize("place", [0, 3, 900, 2996])
@pytest.mark.parametrize("classes", [60, 3001])
def test_special_rows(classes, place, dtype, device):
    """Rows with nan or infinities, beside others, which they do not touch."""
    logits, _ = problem((8, classes), dtype, device)
    place %= classes
    logits[1, place] = torch.nan
    logits[2, place] = torch.inf
    logits[3] = -torch.inf
    logits[4, place:] = torch.nan
    logits[5, place], logits[5, -1] = torch.inf, torch.nan
    logits[6, place], logits[6, -2] = torch.inf, -torch.inf
    target = torch.full((8,), 2, device=device)
    ours, gradient = statistics_and_gradient(logits, target, None, random_grads(8, device))
    z = logits.double()
    close = {"rtol": 2e-5, "atol": 1e-4, "equal_nan": True}
    nll = F.cross_entropy(z, target, reduction="none")
    torch.testing.assert_close(ours[0].double(), nll, **close)
    torch.testing.assert_close(ours[1].double(), z.logsumexp(1), **close)
    torch.testing.assert_close(ours[2].double(), entropy_of(z), **close)
    torch.testing.assert_close(ours[3].double(), z.sum(1), **close)
    torch.testing.assert_close(log_squares(logits, target).double(), squares_of(z), **close)
    torch.testing.assert_close(ours[4].double(), z.amax(1), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours[5].cpu(), logits.cpu().argmax(1))
    assert gradient[1:7].isnan().all()
    assert gradient[[0, 7]].isfinite().all()
    # That of the total has no softmax in it.
    ones = torch.ones(8, device=device)
    only = statistics_and_gradient(logits, target, None, [None, None, None, ones])[1]
    assert torch.equal(only, torch.ones_like(logits))


@dtypes
@pytest.mark.parametrize("classes", [60, 3001])
def test_equal_logits(classes, dtype, device):
    """The first of equal classes is argmax."""
    logits = torch.zeros(4, classes, dtype=dtype, device=device)
    logits[1, [7, 20, classes - 1]] = 1
    logits[2, [classes // 2, classes - 1]] = 1
    logits[3, classes - 1] = 1
    for softcap in (None, 2.0):
        argmax = fused.row_statistics_forward(logits, None, 0, softcap)[5]
        assert argmax.tolist() == [0, 7, classes // 2, classes - 1]
    # Of logits that differ, but not after their cap.
    logits = torch.full((1, classes), 60.0, dtype=dtype, device=device)
    logits[0, [0, -1]] = torch.tensor([50, 70], dtype=dtype, device=device)
    assert fused.row_statistics_forward(logits, None, 0, 0.5)[5].tolist() == [0]


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("given", [(0,), (1,), (2,), (3,), (0, 2), ()], ids=str)
def test_some_gradients(given, softcap, device):
    logits, target = problem((5, 700), torch.float64, device)
    grads = [g if i in given else None for i, g in enumerate(random_grads(5, device))]
    gradient = statistics_and_gradient(logits, target, softcap, grads)[1]
    if given:
        expected = torchs(logits, target, softcap, grads, torch.float64)[2]
    else:
        expected = torch.zeros_like(logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    empty = [torch.empty(0, device=device) if g is None else g for g in grads]
    assert torch.equal(statistics_and_gradient(logits, target, softcap, empty)[1], gradient)


@dtypes
def test_layouts_and_dtypes_of_gradients(dtype, device):
    logits, target = problem((6, 300), torch.float32, device)
    dense = random_grads(6, device, dtype)
    strided = [g.repeat_interleave(2)[::2] for g in dense]
    results = [
        statistics_and_gradient(logits, target, None, grads)[1] for grads in (dense, strided)
    ]
    assert torch.equal(*results)
    expanded = [torch.tensor(0.5, dtype=dtype, device=device).expand(6) for _ in dense]
    results = [
        statistics_and_gradient(logits, target, None, grads)[1]
        for grads in (expanded, [g.contiguous() for g in expanded])
    ]
    assert torch.equal(*results)


@dtypes
@pytest.mark.parametrize("softcap", [None, 4.0], ids=["", "softcap"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_in_place(layout, softcap, dtype, device):
    shape, arrange = LAYOUTS[layout]
    logits, target = problem(shape, dtype, device, arrange=arrange)
    grads = random_grads(logits.shape[0], device)
    results, gradient = statistics_and_gradient(logits, target, softcap, grads)
    fused.row_statistics_backward_(*grads, logits, target, results[6], IGNORED, softcap)
    assert torch.equal(logits, gradient)


def test_in_place_leaves_the_padding(device):
    whole = torch.randn(6, 1040, device=device)
    before = whole.clone()
    logits = whole[:, 3:1031]
    *_, stats, _ = fused.row_statistics_forward(logits, None, 0, None)
    ones = torch.ones(6, device=device)
    fused.row_statistics_backward_(None, ones, ones, ones, logits, None, stats, 0, None)
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, 1031:], before[:, 1031:])
    assert not torch.equal(whole, before)


def test_target_out_of_bounds():
    logits = torch.randn(3, 5)
    for wrong in (5, -1):
        target = torch.tensor([0, wrong, 1])
        with pytest.raises(IndexError, match="out of bounds for 5 classes"):
            fused.row_statistics_forward(logits, target, IGNORED, None)
        with pytest.raises(IndexError, match="out of bounds for 5 classes"):
            functional.selective_log_softmax(logits, target)
    assert fused.row_statistics_forward(logits, torch.tensor([0, 5, 1]), 5, None)[0][1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [4, 5000])
@pytest.mark.parametrize(
    "direction", ["forward", pytest.param("backward", marks=pytest.mark.kernels)]
)
def test_target_out_of_bounds_on_a_gpu(direction, classes):
    wrong = {"forward": -1, "backward": 0}[direction]
    result = on_a_gpu_of_its_own(f"""
fused = torch.ops.fused
x = torch.rand(3, {classes}, device="cuda")
t = torch.full((3,), {wrong}, device="cuda")
nll, *_, stats, _ = fused.row_statistics_forward(x, t, -100, None)
t.fill_({classes})
fused.row_statistics_backward(nll, None, None, None, x, t, stats, -100, None)
""")
    assert_ended_by_target(result)


@pytest.mark.parametrize(
    ("input", "target", "softcap", "error"),
    [
        (torch.randn(3), None, None, "expected input of shape"),
        (torch.randn(2, 3, 4), None, None, "expected input of shape"),
        (torch.ones(2, 3).long(), None, None, "to be float64"),
        (torch.randn(2, 3), torch.zeros(3).long(), None, "expected target"),
        (torch.randn(2, 3), torch.zeros(2).int(), None, "expected target"),
        (torch.randn(2, 3), None, 0.0, "expected softcap to be positive"),
        (torch.randn(2, 3), None, -1.0, "expected softcap to be positive"),
    ],
)
def test_errors(input, target, softcap, error):
    with pytest.raises((RuntimeError, NotImplementedError), match=error):
        fused.row_statistics_forward(input, target, IGNORED, softcap)
    meta = [None if t is None else t.to("meta") for t in (input, target)]
    with pytest.raises((RuntimeError, NotImplementedError), match=error):
        fused.row_statistics_forward(*meta, IGNORED, softcap)


def test_errors_of_the_backward():
    logits, target = problem((4, 9), torch.float32, "cpu")
    *_, stats, _ = fused.row_statistics_forward(logits, target, IGNORED, None)
    saved = (logits, target, stats, IGNORED, None)
    with pytest.raises(RuntimeError, match="expected grad_entropy of shape"):
        fused.row_statistics_backward(None, None, torch.ones(3), None, *saved)
    with pytest.raises(RuntimeError, match="expected stats as row_statistics_forward"):
        fused.row_statistics_backward(
            None, None, None, None, logits, target, stats[1:], IGNORED, None
        )


@dtypes
@pytest.mark.parametrize("classes", [60, 5001])
def test_repeatable(classes, dtype, device):
    logits, target = problem((40, classes), dtype, device)
    grads = random_grads(40, device)
    first, first_gradient = statistics_and_gradient(logits, target, None, grads)
    for _ in range(3):
        again, gradient = statistics_and_gradient(logits, target, None, grads)
        assert all(map(torch.equal, first, again))
        assert torch.equal(first_gradient, gradient)
        assert torch.equal(log_squares(logits, target), log_squares(logits, target))


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("with_target", [True, False])
def test_gradcheck(with_target, softcap, device):
    logits, target = problem((4, 5), torch.float64, device)
    target = target if with_target else None
    first = 0 if with_target else 1

    def function(x):
        return fused.row_statistics_forward(x, target, IGNORED, softcap)[first:4]

    leaf = logits.requires_grad_()
    assert torch.autograd.gradcheck(function, (leaf,))
    assert torch.autograd.gradgradcheck(function, (leaf,))
    for i in range(first, 4):
        assert torch.autograd.gradgradcheck(lambda x, i=i: function(x)[i - first], (leaf,))


@pytest.mark.parametrize("squares", [False, True])
def test_differentiable(squares, device):
    logits, target = problem((4, 50), torch.float32, device)
    leaf = logits.requires_grad_()
    results = fused.row_statistics_forward(leaf, target, IGNORED, None, squares)
    assert [r.requires_grad for r in results] == [True] * 4 + [False] * 4
    (ours,) = torch.autograd.grad(results[2].sum() + 2 * results[0].sum(), leaf)
    nll, _, entropy, _ = reference(leaf, target, IGNORED, None)
    (torchs,) = torch.autograd.grad(entropy.sum() + 2 * nll.sum(), leaf)
    torch.testing.assert_close(ours, torchs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("with_target", [True, False])
@dtypes
def test_opcheck(dtype, with_target, softcap, device, opcheck):
    logits, target = problem((4, 9), dtype, device)
    target = target if with_target else None
    options = (IGNORED, softcap)
    leaf = logits.clone().requires_grad_()
    opcheck(fused.row_statistics_forward.default, (leaf, target, *options))
    opcheck(fused.row_statistics_forward.default, (leaf, target, *options, True))
    results = fused.row_statistics_forward(logits, target, *options)
    grads = random_grads(4, device, results[1].dtype)
    saved = (target, results[6], *options)
    opcheck(
        fused.row_statistics_backward.default,
        (*(g.requires_grad_() for g in grads), leaf, *saved),
    )
    grads = [None if i == 1 else g.detach() for i, g in enumerate(grads)]
    strided = torch.empty(4, 18, dtype=dtype, device=device)[:, ::2].copy_(logits)
    opcheck(fused.row_statistics_backward.default, (*grads, strided, *saved))
    opcheck(fused.row_statistics_backward_.default, (*grads, logits, *saved))


@pytest.mark.parametrize("function", ["selective_log_softmax", "softmax_entropy"])
def test_opcheck_of_public_ops(function, device, opcheck):
    logits, target = problem((4, 9), torch.float32, device)
    arguments = (logits.requires_grad_(),)
    if function == "selective_log_softmax":
        arguments += (target.clamp(0),)
    opcheck(getattr(fused, function).default, arguments)


#: Leading dimensions of logits, and shapes of an index.
SHAPES = {"row": (), "rows": (6,), "batch": (2, 3), "deep": (2, 1, 3), "none": (0, 3)}


def torchs_selective_log_softmax(logits, index):
    if index.dim() == logits.dim():  # ours rounds the logsumexp as this does
        return logits.gather(-1, index) - torch.logsumexp(logits, -1, keepdim=True)
    log_probabilities = F.log_softmax(logits, -1)
    return log_probabilities.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def torchs_softmax_entropy(logits):
    return -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)


def of_functions(ours, torchs, logits, *others):
    """A function's result and gradient beside torch's, by the accuracy rule."""
    results = []
    for function, dtype in ((ours, logits.dtype), (torchs, logits.dtype), (torchs, torch.float64)):
        leaf = logits.detach().to(dtype).requires_grad_()
        result = function(leaf, *others)
        generator = torch.Generator().manual_seed(2)
        grad = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        grad = grad.to(logits.dtype).to(result)
        results.append((result.detach(), torch.autograd.grad(result, leaf, grad)[0]))
    for what, *three in zip(("result", "gradient"), *results, strict=True):
        if logits.dtype == torch.float64:  # torch's own results err as much
            torch.testing.assert_close(three[0], three[2], rtol=1e-12, atol=1e-13)
        else:
            assert_accurate(*three, what)


@dtypes
@pytest.mark.parametrize("picks", [None, 1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_selective_log_softmax(shape, picks, dtype, device):
    leading = SHAPES[shape]
    logits = (torch.randn(*leading, 301, dtype=torch.float64) * 3).to(device, dtype)
    index = torch.randint(301, leading if picks is None else (*leading, picks), device=device)
    of_functions(functional.selective_log_softmax, torchs_selective_log_softmax, logits, index)


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_entropy(shape, dtype, device):
    logits = (torch.randn(*SHAPES[shape], 301, dtype=torch.float64) * 3).to(device, dtype)
    of_functions(functional.softmax_entropy, torchs_softmax_entropy, logits)


def test_shapes_and_dtypes_of_functions():
    logits = torch.randn(2, 3, 5)
    for wrong in (torch.zeros(2).long(), torch.zeros(3, 2).long(), torch.zeros(2, 3, 1, 1).long()):
        with pytest.raises(
            RuntimeError, match=r"expected index of shape \[2, 3\] or \[2, 3, 'K'\]"
        ):
            functional.selective_log_softmax(logits, wrong)
    with pytest.raises(RuntimeError, match="expected index to be int64"):
        functional.selective_log_softmax(logits, torch.zeros(2, 3))
    for function in (functional.softmax_entropy, lambda x: functional.selective_log_softmax(x, x)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(torch.ones(2, 3, dtype=torch.int64))
        with pytest.raises((RuntimeError, IndexError)):
            function(torch.tensor(1.0))
    no_classes = torch.empty(3, 0)
    assert torch.equal(functional.softmax_entropy(no_classes), torch.zeros(3))
    with pytest.raises(RuntimeError):
        functional.selective_log_softmax(no_classes, torch.zeros(3).long())


def test_entropy_of_a_mask():
    logits = torch.randn(4, 9, requires_grad=True)
    masked = logits.masked_fill(torch.arange(9) > 5, -torch.inf)
    entropy = functional.softmax_entropy(masked)
    torch.testing.assert_close(entropy, functional.softmax_entropy(logits[:, :6]))
    assert torch.autograd.grad(entropy.sum(), logits)[0].isfinite().all()


FUNCTIONS = {
    "selective_log_softmax": lambda x: functional.selective_log_softmax(
        x, torch.ones_like(x[..., 0], dtype=torch.int64)
    ),
    "several picks": lambda x: functional.selective_log_softmax(
        x, torch.ones_like(x[..., :2], dtype=torch.int64)
    ),
    "softmax_entropy": functional.softmax_entropy,
}
TORCHS = {
    "selective_log_softmax": lambda x: F.log_softmax(x, -1)[..., 1],
    "several picks": lambda x: F.log_softmax(x, -1)[..., [1, 1]],
    "softmax_entropy": entropy_of,
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


@functions
def test_gradcheck_of_functions(name, device):
    logits = torch.randn(2, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(FUNCTIONS[name], (logits,))
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], (logits,))


@functions
def test_transforms(name, device):
    """vmap, torch.func and forward mode are torch's."""
    ours, torchs = FUNCTIONS[name], TORCHS[name]
    x = torch.randn(4, 5, device=device, dtype=torch.float64)
    for transform in (torch.func.jacrev, torch.func.hessian, torch.func.vmap):
        torch.testing.assert_close(transform(ours)(x), transform(torchs)(x))
    tangent = torch.ones_like(x)
    torch.testing.assert_close(
        torch.func.jvp(ours, (x,), (tangent,)), torch.func.jvp(torchs, (x,), (tangent,))
    )


@pytest.mark.sampled(2)
@functions
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(name, dynamic, device):
    compiled = torch.compile(FUNCTIONS[name], backend="inductor", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5, 8):
        results = []
        for function in (compiled, FUNCTIONS[name]):
            x = torch.randn(2, rows, 65, generator=torch.Generator().manual_seed(0))
            leaf = x.to(device).requires_grad_()
            result = function(leaf * 2)
            result.sum().backward()
            results.append((result.detach(), leaf.grad))
        torch.testing.assert_close(*results)


@functions
def test_plugin_compiles_them(name, device):
    """Its passes leave the ops alone."""
    compiled = torch.compile(FUNCTIONS[name], backend="compile_losses", fullgraph=True)
    leaf = torch.randn(2, 3, 65, device=device, requires_grad=True)
    result = compiled(leaf)
    torch.testing.assert_close(result, FUNCTIONS[name](leaf))
    grads = [torch.autograd.grad(f(leaf).sum(), leaf)[0] for f in (compiled, TORCHS[name])]
    torch.testing.assert_close(*grads)


def test_plugin_beside_a_loss(device):
    """Two calls of the same statistics, and a loss that becomes an op."""
    target = torch.randint(65, (6,), device=device)

    def step(x):
        entropy = functional.softmax_entropy(x).mean() - functional.softmax_entropy(x).max()
        picked = functional.selective_log_softmax(x, target)
        return F.cross_entropy(x, target) + entropy + picked.exp().mean()

    leaf = torch.randn(6, 65, device=device, requires_grad=True)
    compiled = torch.compile(step, backend="compile_losses", fullgraph=True)
    results = []
    for function in (compiled, step):
        loss = function(leaf * 2)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(*results)


class Named(torch.Tensor):
    """A class with a rule of its own for functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@functions
def test_subclass(name):
    x = torch.randn(3, 5)
    torch.testing.assert_close(
        FUNCTIONS[name](x.as_subclass(Named)).as_subclass(torch.Tensor), TORCHS[name](x)
    )


@pytest.mark.gpu
@pytest.mark.kernels  # torch's sums of one row and of many are not the same bits
@pytest.mark.usefixtures("memory_given_back")
def test_more_than_2_31_elements():
    classes = 65_537
    logits = torch.zeros(2**15 + 3, classes, dtype=torch.bfloat16, device="cuda")
    logits[-1, -1] = 3
    results = fused.row_statistics_forward(logits, None, 0, None, True)
    last = logits[-1:].clone()
    expected = fused.row_statistics_forward(last, None, 0, None, True)
    assert all(torch.equal(r[-1:], e) for r, e in zip(results[1:], expected[1:], strict=True))
    ones = torch.ones(1, device="cuda")
    gradient = fused.row_statistics_backward(
        None, None, None, ones, last, None, expected[6], 0, None
    )
    fused.row_statistics_backward_(
        None, None, None, ones.expand(len(logits)), logits, None, results[6], 0, None
    )
    assert torch.equal(logits[-1:], gradient)


DIVERGENCES = {
    "kl": ("softmax_kl_div", False, (2.0,)),
    "reverse kl": ("softmax_kl_div", True, (1.0,)),
    "js": ("softmax_js_div", False, (0.3, 1.5)),
    "js, reversed": ("softmax_js_div", True, (0.3, 1.0)),
    "finite kl": ("softmax_finite_kl_div", False, (True, 1.5)),
    "finite kl, reversed": ("softmax_finite_kl_div", True, (True, 1.0)),
    "finite cross entropy": ("softmax_finite_kl_div", False, (False, 2.0)),
}
#: Layouts of the logits and of the teacher's, which may reach a boundary of 16 bytes elsewhere.
PAIRS = {
    "alike": ("padded", "padded"),
    "padded apart": ("padded and offset", "padded"),
    "offset": ("offset", "offset"),
    "transposed": ("transposed", "every other"),
}


@pytest.mark.sampled(2)
@dtypes
@pytest.mark.parametrize("softcap", [None, 4.0], ids=["", "softcap"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradient_with_a_divergence(divergence, pair, softcap, dtype, device, opcheck):
    """The gradient of all statistics and of a divergence, over the logits, in one call."""
    name, reverse, options = DIVERGENCES[divergence]
    (shape, arrange), (teacher_shape, arrange_teacher) = (LAYOUTS[layout] for layout in PAIRS[pair])
    logits, target = problem(shape, dtype, device, arrange=arrange)
    teacher = problem(teacher_shape, dtype, device, 2.0, arrange_teacher)[0].flip(0)
    rows, classes = (min(sizes) for sizes in zip(logits.shape, teacher.shape, strict=True))
    logits, teacher, target = logits[:rows, :classes], teacher[:rows, :classes], target[:rows]
    target = target.clamp(max=classes - 1)
    if pair == "transposed":
        teacher = teacher.t().contiguous().t()
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    *grads, grad_divergence = [*random_grads(rows, device), random_grads(rows + 1, device)[0][1:]]
    reference_op = importlib.import_module(f"compile_losses.ops.{name}").reference

    def torchs_gradient(dtype):
        leaf = logits.detach().to(dtype).requires_grad_()
        z = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
        order = (teacher.to(dtype), z) if reverse else (z, teacher.to(dtype))
        each = reference_op(*order, 0, *options, -1)
        statistics = reference(leaf, target, IGNORED, softcap)
        outputs = [statistic for statistic in (*statistics, each) if statistic is not None]
        given = [g.to(dtype) for g in (*grads, grad_divergence)]
        return torch.autograd.grad(outputs, leaf, given)[0]

    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    order = (teacher, z) if reverse else (z, teacher)
    _, saved = getattr(fused, f"{name}_forward")(*order, 0, *options, -1, acc)
    stats = fused.row_statistics_forward(logits, target, IGNORED, softcap)[6]
    exact, eager = torchs_gradient(torch.float64), torchs_gradient(acc)
    ours, before = logits.clone(memory_format=torch.preserve_format), teacher.clone()
    arguments = (ours, target, stats, IGNORED, softcap, grad_divergence, teacher, saved, reverse)
    op = getattr(fused, f"{name}_row_statistics_backward_")
    # Of each divergence two kinds of calls: traces of others are alike.
    if pair == "alike" and (dtype, softcap) in ((torch.float32, None), (torch.bfloat16, 4.0)):
        opcheck(op.default, (*grads, ours.clone(), *arguments[1:], *options))
    op(*grads, *arguments, *options)
    assert torch.equal(teacher, before)
    if dtype == torch.float64:
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    elif softcap is None or dtype == torch.float32:
        assert_accurate(ours, eager.to(dtype), exact, "gradient")
    else:  # the statistics of the divergence are those of rounded logits
        torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05)


def test_teachers_of_another_dtype_are_refused(device):
    logits, target = problem((3, 5), torch.float32, device)
    stats = fused.row_statistics_forward(logits, target, IGNORED, None)[6]
    _, saved = fused.softmax_kl_div_forward(logits, logits, 0, 1.0, -1, torch.float32)
    grads = random_grads(3, device)
    arguments = (logits, target, stats, IGNORED, None, grads[0], logits.double(), saved, False, 1.0)
    with pytest.raises(RuntimeError, match="expected teacher to have input's dtype"):
        fused.softmax_kl_div_row_statistics_backward_(*grads, *arguments)
