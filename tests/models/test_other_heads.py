"""The heads of Liger Kernel and verl, and ours in their places: results and gradients.

Without a GPU Liger's kernels run in Triton's interpreter, with TRITON_INTERPRET=1. The modules of
verl are loaded without its package, which needs more than torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses import switches
from compile_losses.known_heads import doors, liger, verl
from tests.accuracy import assert_accurate

ROWS, HIDDEN, CLASSES = 24, 16, 70
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(head, *, alone=False):
    """The function of a row of the table; alone: without the package around its module."""
    try:
        files = importlib.metadata.files(head.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(reason=f"pip install {head.package}")
    if alone:
        path = head.module.replace(".", "/") + ".py"
        (file,) = (file for file in files if str(file) == path)
        spec = importlib.util.spec_from_file_location(head.module, file.locate())
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(head.module)
    doors.meet(module)
    assert str(head) not in doors.left, doors.left[str(head)]
    return getattr(module, head.name)


def problem(dtype, leading=(ROWS,), bias=False):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).to(DEVICE).requires_grad_()

    target = torch.randint(CLASSES, leading, generator=generator).to(DEVICE)
    return draw(*leading, HIDDEN), draw(CLASSES, HIDDEN), target, draw(CLASSES) if bias else None


def outcome(function, given, options):
    """The results, and the gradients of a function of them."""
    results = [r for r in function(*given, *options) if r is not None]
    loss = sum((r.float() * torch.linspace(-1, 2, r.numel(), device=DEVICE).view(r.shape)).sum()
               for r in results)  # fmt: skip
    leaves = [x for x in given if x is not None and x.requires_grad]
    return [*(r.detach() for r in results), *torch.autograd.grad(loss, leaves)]


def check(head, function, reference, given, options, *, compiled=False):
    """
    Args:
        given: hidden states, weight, targets and, if the function takes one, a bias or None.
    """
    theirs = outcome(function, given, options)
    wide = [
        x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in given
    ]
    exact = outcome(reference, wide, options)
    if compiled:
        torch._dynamo.reset()
        backend = {"backend": "compile_losses", "fullgraph": True}
        ours = outcome(torch.compile(lambda *a: function(*a), **backend), given, options)
    else:
        before = switches.counters()["known heads"][str(head)]
        with compile_losses.enable():
            ours = outcome(function, given, options)
        assert switches.counters()["known heads"][str(head)] == before + 1
    for i, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_accurate(a, b, c, f"result {i}")


#: In the order of the arguments.
OPTIONS = {
    "ignore_index": -100,
    "lse_square_scale": 0.0,
    "label_smoothing": 0.0,
    "reduction": "mean",
    "softcap": None,
}
LIGER = {
    "plain": {},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "softcap": {"softcap": 5.0},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"lse_square_scale": 0.01, "ignore_index": 3},
}


class TestLiger:
    (head,) = liger.HEADS

    @pytest.fixture(scope="class")
    def function(self):
        pytest.importorskip("triton", reason="pip install triton")
        if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip(reason="TRITON_INTERPRET=1 runs Triton's kernels on a CPU")
        return load(self.head)

    @staticmethod
    def reference(h, w, target, bias, _, ignored, z_loss, smoothing, reduction, softcap):
        z = F.linear(h, w, bias)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        options = {"reduction": "none", "label_smoothing": smoothing, "ignore_index": ignored}
        kept = target != ignored
        loss = F.cross_entropy(z, target, **options) + z_loss * z.logsumexp(-1) ** 2 * kept
        if reduction == "none":
            return (loss,)
        return (loss.sum() / (kept.sum() if reduction == "mean" else 1),)

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    @pytest.mark.parametrize("name", LIGER)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_as_accurate(self, dtype, name, compiled, function, no_code):
        if name == "softcap" and DEVICE == "cpu":
            pytest.skip(reason="Triton's interpreter can't cast the number of a soft-cap")
        given = problem(dtype, bias=name == "smoothing")
        options = (None, *{**OPTIONS, **LIGER[name]}.values())
        check(self.head, function.apply, self.reference, given, options, compiled=compiled)

    def test_all_ignored(self, function):
        h, w, target, _ = problem(torch.float32)
        given = (h, w, torch.full_like(target, -100))
        expected, *_ = function.apply(*given)
        with compile_losses.enable():
            loss, *_ = function.apply(*given)
        assert expected == loss == 0

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"return_z_loss": True}, "it returns more than the loss"),
            ({"ce_weight": torch.ones(CLASSES)}, "its classes or tokens have weights"),
            ({"accum_dtype": torch.float64}, "its gradients are sums in another dtype"),
        ],
    )
    def test_refused(self, options, reason):
        assert self.head.compute(*problem(torch.float32), **options) == reason


class TestVerl:
    labels, ppo = verl.HEADS

    @staticmethod
    def reference(h, w, target, temperature):
        log_p = F.log_softmax(F.linear(h, w) / temperature, -1)
        picked = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return picked, -(log_p.exp() * log_p).sum(-1)

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    @pytest.mark.parametrize("leading", [(ROWS,), (3, 8)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_ppo(self, dtype, leading, compiled, no_code):
        function = load(self.ppo, alone=True)
        h, w, target, _ = problem(dtype, leading)

        def theirs(h, w, target, temperature):
            return function.apply(h, w, target, temperature, 10)

        check(self.ppo, theirs, self.reference, (h, w, target), (0.7,), compiled=compiled)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_labels(self, dtype):
        function = load(self.labels)
        check(self.labels, function.apply, self.reference, problem(dtype)[:3], (0.7,))

    def test_signature(self):
        load(self.labels, alone=True)

    def test_refused(self):
        h, w, target, _ = problem(torch.float32)
        compute = self.labels.compute
        assert not isinstance(compute(h, w, target, 1.0), str)
        assert compute(h, w, target, 1.0, "mean") == "its log-probabilities are reduced"
        assert (
            compute(h, w, target, 1.0, "none", object()) == "its classes are sharded over a group"
        )
        assert compute(h, w, target, 0.0) == "its temperature is not a positive number"
