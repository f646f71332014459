"""Contrastive losses whose batch lies on several processes: the loss of one process over all pairs.

Run by tests/distributed/test_contrastive.py, which names the checks. A rank compares its own rows
with those of all ranks, and holds no matrix of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.nn import functional as collectives

from compile_losses.functional import contrastive_cross_entropy, contrastive_sigmoid_cross_entropy
from tests.constants import set_constants
from tests.distributed import processes
from tests.distributed.processes import checks_in
from tests.graphs import interpreted
from tests.linear_problems import largest_allocation
from tests.models.training import reported

ROWS, WIDTH = 48, 8
#: Of a chunk of a rank's rows.
CHUNK = 16
#: Local features, the scale and the bias, and this rank's part of the loss.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def features() -> list[Tensor]:
    """Of all ranks: images, texts, the logarithm of a scale, and a bias."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, ROWS * dist.get_world_size(), WIDTH)
    image, text = torch.randn(shape, generator=generator, dtype=torch.float64)
    given = [image, text, *torch.tensor([0.7, -1.3], dtype=torch.float64)]
    return [each.to(processes.device) for each in given]


def clip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Of all pairs, in one process."""
    logits = scale.exp() * image @ text.T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    labels = 2 * torch.eye(len(image), dtype=image.dtype, device=image.device) - 1
    logits = scale.exp() * image @ text.T + bias
    return -F.logsigmoid(labels * logits).sum() / len(image)


def outcome(loss: Loss, tensors: list[Tensor]) -> list[Tensor]:
    """The loss and the gradients, that of the bias of zeros if nothing reads it."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    value = loss(*leaves)
    value.backward()
    return [value.detach(), *(t.new_zeros(()) if t.grad is None else t.grad for t in leaves)]


def check(loss: Loss, exact: Loss, *ops: str) -> None:
    """Compares the mean of the ranks' losses, and its gradients, with one process, and looks at
    what is held.

    Args:
        ops: what the losses of compiled graphs are to be rewritten to, if they have ops.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    every = features()
    whole, *of_features = outcome(exact, every)
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    local = [every[0][own], every[1][own], *every[2:]]
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, interpreted(patch), reported() as report:
        set_constants(patch, least_rows=CHUNK, least_elements=1, logits_bytes=1, part_of_weight=0)
        found, image, text, *rest = outcome(loss, local)
        most = largest_allocation(lambda: outcome(loss, local), processes.device)
    # A rank's features have their gradients of all ranks' losses; the scale and the bias are copies
    # that each rank has, whose gradients a trainer averages.
    for tensor in (found, *rest):
        dist.all_reduce(tensor)
    ours = [found / world, image / world, text / world, *(each / world for each in rest)]
    expected = [whole, *(each[own] for each in of_features[:2]), *of_features[2:]]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    matrix = ROWS * ROWS * world * 8
    assert 0 < most <= matrix * CHUNK / ROWS, (most, matrix)
    assert not report.errors, str(report)
    assert {site.op for site in report.losses} >= {*ops}, str(report)
    if ops:
        assert {site.status for site in report.losses} == {"rewritten"}, str(report)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    options = {"prefer_memory": True}
    return torch.compile(function, backend="compile_losses", options=options, fullgraph=True)


def gathered(tensor: Tensor) -> Tensor:
    """As open_clip gathers with gradients. Torch 2.13 compiles no such call."""
    return torch.cat(collectives.all_gather(tensor))


def gathered_in_graph(tensor: Tensor) -> Tensor:
    return all_gather_tensor_autograd(tensor, 0, dist.group.WORLD)


def labels(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device) + len(rows) * dist.get_rank()


def local_clip(image: Tensor, text: Tensor, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """open_clip's ``local_loss``: a rank's rows and all columns, in both directions."""
    by_image, by_text = scale.exp() * image @ texts.T, scale.exp() * text @ images.T
    own = labels(image)
    return (F.cross_entropy(by_image, own) + F.cross_entropy(by_text, own)) / 2


def check_clip_of_gathered_features() -> None:
    """The features are gathered in eager code, the loss is compiled."""
    step = compiled(local_clip)

    def loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return step(image, text, gathered(image), gathered(text), scale)

    check(loss, clip, "linear_cross_entropy")


def check_clip_in_one_graph() -> None:
    def loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        every = gathered_in_graph(image), gathered_in_graph(text)
        return local_clip(image, text, *every, scale)

    check(compiled(loss), clip, "linear_cross_entropy")


def check_clip_function() -> None:
    def loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        images, texts, factor = gathered(image), gathered(text), scale.exp()
        by_image = contrastive_cross_entropy(image, texts, labels(image), scale=factor)
        return (by_image + contrastive_cross_entropy(text, images, labels(text), scale=factor)) / 2

    check(loss, clip)


def local_siglip(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, own: bool = True
) -> Tensor:
    """As open_clip has it, of a rank's images and one rank's texts."""
    logits = scale.exp() * image @ text.T
    logits += bias
    like: Any = {"dtype": image.dtype, "device": image.device}
    signs = -torch.ones(len(image), len(text), **like)
    if own:
        signs = 2 * torch.eye(len(image), **like) + signs
    return -F.logsigmoid(signs * logits).sum() / len(image)


class Exchange(torch.autograd.Function):
    """Sends a tensor to the next rank and receives the previous one's, as open_clip does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: int) -> Tensor:  # type: ignore[override]
        ctx.step, rank, world = step, dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(tensor)
        sends = dist.P2POp(dist.isend, tensor.contiguous(), (rank + step) % world)
        receives = dist.P2POp(dist.irecv, received, (rank - step) % world)
        for request in dist.batch_isend_irecv([sends, receives]):
            request.wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return Exchange.apply(gradient, -ctx.step), None


def exchanging(pairs: Callable[..., Tensor]) -> Loss:
    """The loss of a rank's images and its texts, and then each other rank's, as they come."""

    def loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        total = pairs(image, text, scale, bias)
        for _ in range(dist.get_world_size() - 1):
            text = Exchange.apply(text, 1)
            total = total + pairs(image, text, scale, bias, own=False)
        return total

    return loss


def check_siglip_exchange() -> None:
    check(exchanging(compiled(local_siglip)), siglip)


def check_siglip_exchange_of_four() -> None:
    check_siglip_exchange()


def check_siglip_exchange_function() -> None:
    def pairs(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, own: bool = True) -> Tensor:
        target = None if own else torch.full((len(image),), -1, device=image.device)
        return contrastive_sigmoid_cross_entropy(image, text, target, scale=scale.exp(), bias=bias)

    check(exchanging(pairs), siglip)


def check_siglip_in_one_graph() -> None:
    """The texts of all ranks are gathered, and a rank's own are among them."""

    def loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        texts = gathered_in_graph(text)
        logits = scale.exp() * image @ texts.T + bias
        signs = 2 * F.one_hot(labels(image), len(texts)).to(image.dtype) - 1
        return -F.logsigmoid(signs * logits).sum() / len(image)

    check(compiled(loss), siglip)


CHECKS = checks_in(globals())
