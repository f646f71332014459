"""Where a custom op has no rule of its own, torch's does: functorch levels, forward mode, and the
second derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from compile_losses.torch_internals.eager import in_forward_mode, is_functorch_wrapped_tensor


def needs_torch(*tensors: Tensor | None) -> bool:
    """Whether a tensor is inside ``torch.func`` or carries a forward-mode tangent.

    Custom ops have no rule for either, so the public ops hand over to torch's own loss there.
    """
    if any(t is not None and is_functorch_wrapped_tensor(t) for t in tensors):
        return True
    return in_forward_mode() and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


def double_backward(
    loss: Callable[..., Tensor],
    grad_output: Tensor,
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    shape: torch.Size | None = None,
) -> list[Tensor | None]:
    """The vector-Jacobian product of a loss's gradient, by torch's own formulas.

    Args:
        loss: the torch loss as a function of ``inputs``.
        grad_output: the gradient that reached the loss.
        inputs: the differentiable arguments of the loss.
        cotangents: one for each of ``inputs``, for the gradient with respect to it; ``None`` where
            that gradient was not computed.
        shape: what ``inputs`` were broadcast to before they were differentiated.

    Returns:
        The products with respect to ``grad_output`` and each of ``inputs``, ``None`` where no
        gradient is required. They are differentiable again when grad mode is on.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: the same tensor given twice must not receive both arguments' gradients.
        roots = [tensor.view_as(tensor) for tensor in (grad_output, *inputs)]
        wanted = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
        arguments = roots[1:]
        if shape is not None:
            arguments = [root.expand(shape) for root in arguments]
        for i, cotangent in enumerate(cotangents):
            if cotangent is not None:  # wider where the gradient is yet to be summed
                arguments[i] = arguments[i].to(cotangent.dtype)
        gradients = torch.autograd.grad(
            loss(*arguments),
            [arguments[i] for i in wanted],
            roots[0],
            create_graph=True,
        )
        used = [i for i, root in enumerate(roots) if root.requires_grad]
        pairs = [
            (gradient, cotangents[i])
            for gradient, i in zip(gradients, wanted, strict=True)
            if gradient.requires_grad
        ]
        products: list[Tensor | None] = [None] * len(roots)
        if used and pairs:
            results = torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                [roots[i] for i in used],
                [cotangent for _, cotangent in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
            for i, result in zip(used, results, strict=True):
                products[i] = result
    return products
