"""What functional's docstring says of arguments that change behind autograd's back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses import functional

#: The loss, its options, and the arguments whose change torch does not notice and ours does.
KEPT_BY_TORCH = {
    "cross_entropy": ("cross_entropy", {}, ("input",)),
    "cross_entropy of probabilities": ("cross_entropy", {}, ("input",)),
    "l1_loss": ("l1_loss", {}, ("input", "target")),
    "mse_loss, weight": ("mse_loss", {}, ("input", "target")),
    "kl_div, log_target": ("kl_div", {"log_target": True}, ("input", "target")),
}
READ_BY_BOTH = {
    "cross_entropy": ("cross_entropy", {}, ("target",)),
    "mse_loss": ("mse_loss", {}, ("input", "target")),
    "mse_loss, weight": ("mse_loss", {}, ("weight",)),
    "smooth_l1_loss": ("smooth_l1_loss", {}, ("input", "target")),
    "huber_loss": ("huber_loss", {}, ("input", "target")),
    "kl_div": ("kl_div", {}, ("input", "target")),
    "nll_loss": ("nll_loss", {}, ("target",)),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", {}, ("input",)),
}


def gradients(module, name, loss, options, changed):
    """The gradients of input and, if it has one, target, of a loss of the old arguments."""
    torch.manual_seed(0)
    tensors = {"input": torch.randn(6, 5), "target": torch.rand(6, 5) + 0.1}
    if name in ("cross_entropy", "nll_loss"):
        tensors["target"] = torch.randint(5, (6,))
    if "weight" in name:
        tensors["weight"] = torch.rand(6, 5) + 0.5
    for tensor in (tensors["input"], tensors["target"]):
        tensor.requires_grad_(tensor.is_floating_point())
    value = getattr(module, loss)(**tensors, **options, reduction="sum")
    if changed is not None:
        data = tensors[changed].data
        data.copy_(data.flip(0))
    return torch.autograd.grad(value, [t for t in tensors.values() if t.requires_grad])


def equal(left, right):
    return all(torch.allclose(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", KEPT_BY_TORCH)
def test_kept_by_torch(name):
    loss, options, arguments = KEPT_BY_TORCH[name]
    for changed in arguments:
        before, torchs, ours = (
            gradients(module, name, loss, options, argument)
            for module, argument in ((F, None), (F, changed), (functional, changed))
        )
        assert equal(torchs, before)
        assert not equal(ours, before)


@pytest.mark.parametrize("name", READ_BY_BOTH)
def test_read_by_both(name):
    loss, options, arguments = READ_BY_BOTH[name]
    for changed in arguments:
        torchs, ours = (
            gradients(module, name, loss, options, changed) for module in (F, functional)
        )
        torch.testing.assert_close(ours, torchs)
