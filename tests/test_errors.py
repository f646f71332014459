"""Bad input: torch's class of exception, in a message that names the argument and its value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gpus import assert_ended_by_target, on_a_gpu_of_its_own

fused = torch.ops.fused
ELEMENTWISE = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "binary_cross_entropy_with_logits",
]


def raises_like_torch(ours, torchs, *fragments):
    with pytest.raises(Exception) as expected:  # noqa: PT011  whatever torch raises
        torchs()
    with pytest.raises(expected.type) as error:
        ours()
    for fragment in fragments:
        assert fragment in str(error.value), str(error.value)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_shapes(name, device):
    a, b = torch.rand(3, 4, device=device), torch.rand(3, 5, device=device)
    raises_like_torch(
        lambda: getattr(fused, name)(a, b),
        lambda: getattr(F, name)(a, b, reduction="sum"),
        name,
        "target",
        "[3, 4]",
        "[3, 5]",
    )


@pytest.mark.parametrize("name", [*ELEMENTWISE, "cross_entropy"])
def test_reduction(name, device):
    a = torch.rand(3, 4, device=device)
    b = torch.zeros(3, dtype=torch.int64, device=device) if name == "cross_entropy" else a
    raises_like_torch(
        lambda: getattr(fused, name)(a, b, reduction=7),
        lambda: getattr(F, name)(a, b, reduction="most"),
        name,
        "reduction",
        "got 7",
    )
    if name != "kl_div":
        with pytest.raises(ValueError, match="reduction"):
            getattr(fused, name)(a, b, reduction=3)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_integers(name, device):
    a = torch.ones(3, 4, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match=r"expected input to be float.*torch.int64 \[3, 4\]"):
        getattr(fused, name)(a, a.float())
    with pytest.raises(RuntimeError, match=r"expected target to be float.*torch.int64 \[3, 4\]"):
        getattr(fused, name)(a.float(), a)
    with pytest.raises(RuntimeError, match="complex64"):
        getattr(fused, name)(a.to(torch.complex64), a.float())


def test_no_gradient_on_integers():
    with pytest.raises(RuntimeError, match="floating"):
        torch.ones(3, dtype=torch.int64).requires_grad_()
    target = torch.zeros(3, dtype=torch.int64)
    loss = fused.cross_entropy(torch.rand(3, 4, requires_grad=True), target)
    with pytest.raises(RuntimeError, match=r"does not require grad|not have been used"):
        torch.autograd.grad(loss, target)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ELEMENTWISE, "cross_entropy"])
def test_wrong_device(name):
    a = torch.rand(3, 4, device="cuda")
    b = torch.zeros(3, dtype=torch.int64) if name == "cross_entropy" else a.cpu()
    raises_like_torch(
        lambda: getattr(fused, name)(a, b),
        lambda: getattr(F, name)(a, b, reduction="sum"),
        "target",
        "cuda:0",
        "cpu",
    )


def test_wrong_device_meta():
    with pytest.raises(RuntimeError, match="expected target to be on input's device cpu"):
        fused.mse_loss(torch.rand(3), torch.rand(3, device="meta"))


def test_parameters(device):
    a = torch.rand(3, device=device)
    raises_like_torch(
        lambda: fused.smooth_l1_loss(a, a, beta=-1.0),
        lambda: F.smooth_l1_loss(a, a, beta=-1.0),
        "beta",
        "-1.0",
    )
    raises_like_torch(
        lambda: fused.huber_loss(a, a, delta=0.0),
        lambda: F.huber_loss(a, a, delta=0.0),
        "delta",
        "0.0",
    )


def test_weights(device):
    a, b = torch.rand(3, 4, device=device), torch.rand(3, 4, device=device)
    for name in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
        for shape in ((5,), (2, 3, 4), (1, 3, 4)):
            with pytest.raises(RuntimeError, match=r"weight to broadcast to \[3, 4\], got shape"):
                getattr(fused, name)(a, b, weight=torch.rand(shape, device=device))
        with pytest.raises(RuntimeError, match=r"weight to be of real numbers.*complex64"):
            getattr(fused, name)(a, b, weight=a.to(torch.complex64))
        with pytest.raises(RuntimeError, match=r"weight to be on input's device"):
            getattr(fused, name)(a, b, weight=torch.rand(3, 4, device="meta"))


def test_binary_cross_entropy_arguments(device):
    a, b = torch.rand(3, 4, device=device), torch.rand(3, 4, device=device)
    weight = torch.rand(4, device=device, requires_grad=True)

    def compare(*args, fragments, **kwargs):
        raises_like_torch(
            lambda: fused.binary_cross_entropy_with_logits(*args, **kwargs),
            lambda: F.binary_cross_entropy_with_logits(*args, **kwargs),
            *fragments,
        )

    compare(a, b[:1], fragments=("target", "[3, 4]", "[1, 4]"))
    compare(a, b.long(), fragments=("target", "int64"))
    compare(a, b > 0, fragments=("target", "bool"))
    compare(a.long(), b, fragments=("input", "int64"))
    compare(a, b, weight, fragments=("weight", "require grad"))
    compare(a, b, pos_weight=weight, fragments=("pos_weight", "require grad"))
    # From 2.14 on torch raises a NotImplementedError, which is a RuntimeError as well.
    booleans = weight.detach() > 0
    with pytest.raises(RuntimeError):
        F.binary_cross_entropy_with_logits(a, b, pos_weight=booleans)
    with pytest.raises(RuntimeError, match=r"pos_weight .*bool"):
        fused.binary_cross_entropy_with_logits(a, b, pos_weight=booleans)
    compare(a, b, pos_weight=weight[:3].detach(), fragments=("pos_weight", "[3, 4]", "[3]"))
    compare(a, b, pos_weight=a.detach()[None], fragments=("pos_weight", "[1, 3, 4]"))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(
                fused.binary_cross_entropy_with_logits(a, b, weight, weight),
                F.binary_cross_entropy_with_logits(a, b, weight, pos_weight=weight),
            )


def test_cross_entropy_arguments(device):
    x = torch.rand(3, 4, device=device)
    t = torch.zeros(3, dtype=torch.int64, device=device)

    def compare(*args, fragments, **kwargs):
        raises_like_torch(
            lambda: fused.cross_entropy(*args, **kwargs),
            lambda: F.cross_entropy(*args, **kwargs),
            *fragments,
        )

    compare(x, t[:2], fragments=("target", "batch size 3", "got shape [2]"))
    compare(x, t.int(), fragments=("target", "int32"))
    compare(x, t.bool(), fragments=("target", "bool"))
    compare(x, t, x[0, :3], fragments=("weight", "[4]", "[3]"))
    compare(x, t, x[0].double(), fragments=("weight", "float64"))
    compare(x, t, x[0].clone().requires_grad_(), fragments=("weight", "grad"))
    compare(x, t, label_smoothing=1.5, fragments=("label_smoothing", "1.5"))
    compare(x.long(), t, fragments=("input", "int64"))
    compare(x[..., None, None], t[:, None, None].expand(3, 2, 1), fragments=("target", "[3, 2, 1]"))
    image = torch.rand(3, 4, 2, device=device)
    uint8 = torch.zeros(3, 2, dtype=torch.uint8, device=device)
    compare(image, uint8, fragments=("target", "int64", "uint8"))
    compare(x, x[:2], fragments=("target", "batch size 3", "got shape [2, 4]"))
    compare(x, x[:, :3], fragments=("target", "int64 or uint8", "[3, 3]"))
    compare(x, t[:, None].expand(3, 4), fragments=("target", "[3, 4]"))


def test_cross_entropy_probabilities_arguments(device):
    x = torch.rand(3, 4, device=device)

    def compare(*args, fragments, **kwargs):
        raises_like_torch(
            lambda: fused.cross_entropy(*args, **kwargs),
            lambda: F.cross_entropy(*args, **kwargs),
            *fragments,
        )

    compare(x, x, ignore_index=2, fragments=("ignore_index", "negative", "got 2"))
    compare(x, x, x[0, :3], fragments=("weight", "[4]", "[3]"))
    compare(x, x, x, fragments=("weight", "[4]", "[3, 4]"))
    compare(x, x, label_smoothing=1.5, fragments=("label_smoothing", "1.5"))
    compare(x[0, 0], x[0, 0], fragments=("input", "got 0"))


def test_nll_loss_arguments(device):
    x = torch.rand(3, 4, device=device)
    t = torch.zeros(3, dtype=torch.int64, device=device)

    def compare(*args, fragments, **kwargs):
        raises_like_torch(
            lambda: fused.nll_loss(*args, **kwargs),
            lambda: F.nll_loss(*args, **kwargs),
            *fragments,
        )

    compare(x[0, 0], t[0], fragments=("input", "got 0"))
    compare(x, t[:2], fragments=("target", "batch size 3", "got shape [2]"))
    compare(x, t.int(), fragments=("target", "int32"))
    compare(x, x, fragments=("target", "float32"))
    compare(x, t, x[0, :3], fragments=("weight", "[4]", "[3]"))
    compare(x, t, x[0].double(), fragments=("weight", "float64"))
    compare(x, t, x[0].clone().requires_grad_(), fragments=("weight", "grad"))
    compare(x.long(), t, fragments=("input", "int64"))
    compare(x[..., None, None], t[:, None, None].expand(3, 2, 1), fragments=("target", "[3, 2, 1]"))
    for one in (t[0], t[:1]):  # torch takes both for one row without a batch
        torch.testing.assert_close(fused.nll_loss(x[0], one), F.nll_loss(x[0], one))
        torch.testing.assert_close(fused.cross_entropy(x[0], one), F.cross_entropy(x[0], one))


@pytest.mark.parametrize(
    "op", [fused.softmax_kl_div, fused.softmax_js_div, fused.softmax_finite_kl_div], ids=str
)
def test_softmax_divergence_arguments(op, device):
    x = torch.rand(3, 4, device=device)
    with pytest.raises(RuntimeError, match=r"target to have input's shape \[3, 4\], got \[3, 1\]"):
        op(x, x[:, :1])
    with pytest.raises(RuntimeError, match="temperature to be positive, got 0"):
        op(x, x, temperature=0.0)
    with pytest.raises(RuntimeError, match="temperature to be positive, got nan"):
        op(x, x, temperature=float("nan"))
    own = {fused.softmax_js_div: [0.5], fused.softmax_finite_kl_div: [True]}.get(op, [])
    forward = getattr(fused, f"{op.__name__}_forward")  # which compiled graphs call
    with pytest.raises(RuntimeError, match="temperature to be positive, got -1"):
        forward(x, x, 1, *own, -1.0, -1, torch.float32)
    for beta in (-1.0, 0.0, 1.0, float("nan")) if own == [0.5] else ():
        with pytest.raises(RuntimeError, match="beta to be between 0 and 1"):
            forward(x, x, 1, beta, 1.0, -1, torch.float32)
    with pytest.raises(IndexError, match=r"dim .*\[3, 4\], got 2"):
        op(x, x, dim=2)
    with pytest.raises(IndexError, match="dim"):
        op(x[0, 0], x[0, 0])
    with pytest.raises(ValueError, match="reduction"):
        op(x, x, 4)
    with pytest.raises(NotImplementedError, match=r"target.*int64"):
        op(x, x.long())


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_softmax_js_div_beta(beta, device):
    x = torch.rand(3, 4, device=device)
    with pytest.raises(RuntimeError, match=f"beta to be between 0 and 1, .*got {beta}"):
        fused.softmax_js_div(x, x, beta=beta)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**40)])
def test_target_out_of_range_cpu(bad, smoothing):
    x = torch.rand(3, 4, requires_grad=True)
    t = torch.tensor([0, bad, 1])
    raises_like_torch(
        lambda: fused.cross_entropy(x, t, label_smoothing=smoothing),
        lambda: F.cross_entropy(x, t, label_smoothing=smoothing),
        "target",
        str(bad),
        "4 classes",
    )
    loss, stats, total = fused.cross_entropy_forward(x, t * 0, None, 1, -100, 0.0, torch.float32)
    with pytest.raises(IndexError, match=str(bad)):
        fused.cross_entropy_backward(loss, x, t, None, stats, total, 1, -100, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "bad"),
    [
        ((3, 4), 4),
        ((3, 4), -1),
        ((3, 4), 2**62),
        ((3, 4), -(2**63)),
        ((3, 5000), 5000),
        ((3, 4, 2), 4),
    ],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
def test_target_out_of_range_cuda(loss, shape, bad):
    result = on_a_gpu_of_its_own(f"""
x = torch.rand({shape}, device="cuda")
t = torch.full({(shape[0], *shape[2:])}, {bad}, device="cuda")
torch.ops.fused.{loss}(x, t)
""")
    assert_ended_by_target(result)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 4), (3, 5000), (3, 4, 2)])
@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
def test_target_changes_before_backward_cuda(loss, shape):
    """Also behind the version counter's back: the gradient is of what was saved before the change,
    or there is none."""
    result = on_a_gpu_of_its_own(f"""
x = torch.rand({shape}, device="cuda", requires_grad=True)
t = torch.zeros({(shape[0], *shape[2:])}, dtype=torch.int64, device="cuda")
loss = torch.ops.fused.{loss}(x, t)
t.fill_({shape[1]})
try:
    loss.backward()
except RuntimeError as error:
    assert "modified by an inplace operation" in str(error), error
else:
    raise SystemExit("the version counter was not asked")
t.zero_()
loss = torch.ops.fused.{loss}(x, t)
torch.cuda.synchronize()
t.data.fill_({shape[1]})
print("before the backward", flush=True)
loss.backward()
assert x.grad.isfinite().all()
""")
    assert "before the backward" in result.stdout, result.stderr
    if result.returncode != 0:
        assert_ended_by_target(result)


@pytest.mark.gpu
def test_leaf_ops_refuse_tensors_of_other_devices():
    """They are dispatched by one tensor, and their kernels follow the pointers of all."""
    a, t = torch.rand(3, 4, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    w = torch.rand(4, device="cuda")
    loss, stats, total = fused.cross_entropy_forward(a, t, w, 1, -100, 0.0, torch.float32)
    calls = [
        (fused.mse_loss_forward, (a, a, a, 1, torch.float32)),
        (fused.mse_loss_backward, (loss, a, a, a, 1, True, True, True)),
        (fused.cross_entropy_forward, (a, t, w, 1, -100, 0.0, torch.float32)),
        (fused.cross_entropy_backward, (loss, a, t, w, stats, total, 1, -100, 0.0)),
        (fused.cross_entropy_value, (a, t, 1, -100, 0.0)),
        (fused.nll_loss_forward, (a, t, w, 1, -100, torch.float32)),
        (fused.nll_loss_value, (a, t, 1, -100)),
    ]
    for op, args in calls:
        op(*args)
        for i, argument in enumerate(args):
            if isinstance(argument, torch.Tensor):
                moved = (*args[:i], argument.cpu(), *args[i + 1 :])
                with pytest.raises(RuntimeError, match="on the same device"):
                    op(*moved)


@pytest.mark.kernels
def test_leaf_ops_check_for_themselves():
    """Leaf ops may be called directly; they never read out of bounds."""
    a = torch.rand(3, 4)
    with pytest.raises(RuntimeError, match="broadcast"):
        fused.mse_loss_forward(a, torch.rand(5), None, 1, torch.float32)
    with pytest.raises(RuntimeError, match="reduction"):
        fused.mse_loss_forward(a, a, None, 9, torch.float32)
    with pytest.raises(RuntimeError, match="float64, float32"):
        fused.mse_loss_forward(a.long(), a, None, 1, torch.float32)
    with pytest.raises(RuntimeError, match="broadcast shape"):
        fused.mse_loss_with_grad(a[:1], a, None, 1, torch.float32)
    with pytest.raises(RuntimeError, match="reduction"):
        fused.mse_loss_with_grad(a, a, None, 0, torch.float32)
    with pytest.raises(RuntimeError, match=r"weight to broadcast to \[3, 4\], got shape \[2, 4\]"):
        fused.mse_loss_forward(a, a, a[:2], 1, torch.float32)
    with pytest.raises(RuntimeError, match=r"weight to be float64, float32"):
        fused.mse_loss_forward(a, a, a.long(), 1, torch.float32)
    loss = fused.binary_cross_entropy_with_logits_forward
    with pytest.raises(RuntimeError, match=r"pos_weight to broadcast to \[3, 4\], got shape \[3\]"):
        loss(a, a, None, a[:, 0], 1, torch.float32)
    with pytest.raises(RuntimeError, match=r"grad_output to hold one number, got shape \[3, 4\]"):
        fused.mse_loss_with_grad(a, a, None, 1, torch.float32, a)
    with pytest.raises(RuntimeError, match="grad_output to be float64, float32"):
        fused.mse_loss_with_grad_(a, a, None, 1, torch.float32, torch.tensor(1))
    meta = a.to("meta")
    with pytest.raises(RuntimeError, match=r"grad_output to hold one number, got .*\[3, 4\]"):
        fused.mse_loss_with_grad(meta, meta, None, 1, torch.float32, grad_output=meta)
    with pytest.raises(NotImplementedError, match="grad_output to be float64, float32"):
        fused.mse_loss_with_grad_(
            meta, meta, None, 1, torch.float32, torch.tensor(1, device="meta")
        )
    with pytest.raises(RuntimeError, match="on the same device, got meta and cpu"):
        fused.mse_loss_with_grad(meta, meta, None, 1, torch.float32, torch.tensor(1.0))
    t = torch.zeros(3, dtype=torch.int64)
    loss, stats, total = fused.cross_entropy_forward(a, t, None, 1, -100, 0.0, torch.float32)
    with pytest.raises(RuntimeError, match="stats"):
        fused.cross_entropy_backward(loss, a, t, None, stats[:2], total, 1, -100, 0.0)
    with pytest.raises(RuntimeError, match="grad_output"):
        fused.cross_entropy_backward(loss.expand(2), a, t, None, stats, total, 1, -100, 0.0)
    with pytest.raises(RuntimeError, match="target of shape"):
        fused.cross_entropy_forward(a, t[:2], None, 1, -100, 0.0, torch.float32)
    with pytest.raises(RuntimeError, match="target of shape"):
        fused.nll_loss_forward(a, t[:2], None, 1, -100, torch.float32)
    with pytest.raises(RuntimeError, match="target of shape"):
        fused.cross_entropy_value(a, t[:2], 1, -100, 0.0)
    with pytest.raises(RuntimeError, match="reduction"):
        fused.nll_loss_value(a, t, 3, -100)
    with pytest.raises(RuntimeError, match="total_weight"):
        fused.nll_loss_backward(loss, a, t, None, total.double(), 1, -100)
    row_pairs = {  # what comes before and after the statistics
        "cross_entropy_probabilities": ((None,), (1, 0.0)),
        "softmax_kl_div": ((), (1, 1.0, -1)),
        "softmax_js_div": ((), (1, 0.5, 1.0, -1)),
        "softmax_finite_kl_div": ((), (1, True, 1.0, -1)),
    }
    for name, (weight, options) in row_pairs.items():
        forward, backward, with_grad = (
            getattr(fused, f"{name}_{part}") for part in ("forward", "backward", "with_grad")
        )
        loss, stats = forward(a, a, *weight, *options, torch.float32)
        with pytest.raises(RuntimeError, match="input's shape"):
            forward(a, a[:2], *weight, *options, torch.float32)
        with pytest.raises(RuntimeError, match="stats"):
            backward(loss, a, a, *weight, stats[:2], *options, True, True)
        with pytest.raises(RuntimeError, match="grad_output"):
            backward(loss.expand(2), a, a, *weight, stats, *options, True, True)
        with pytest.raises(RuntimeError, match="reduction"):
            with_grad(a, a, *weight, 0, *options[1:], torch.float32)
    with pytest.raises(IndexError, match="dimension 2"):
        fused.softmax_kl_div_forward(a, a, 1, 1.0, 2, torch.float32)
    with pytest.raises(IndexError, match="dimension 2"):
        fused.softmax_js_div_forward(a, a, 1, 0.5, 1.0, 2, torch.float32)


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**40)])
def test_nll_loss_target_out_of_range_cpu(bad):
    x = torch.rand(3, 4, requires_grad=True)
    t = torch.tensor([0, bad, 1])
    raises_like_torch(
        lambda: fused.nll_loss(x, t), lambda: F.nll_loss(x, t), "target", str(bad), "4 classes"
    )
    loss, total = fused.nll_loss_forward(x, t * 0, None, 1, -100, torch.float32)
    with pytest.raises(IndexError, match=str(bad)):
        fused.nll_loss_backward(loss, x, t, None, total, 1, -100)
