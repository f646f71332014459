"""What the spellings of losses are called with."""

from __future__ import annotations

import torch


def pair():
    return torch.randn(6, 10, requires_grad=True), torch.randn(6, 10)


def learned_pair():
    return torch.randn(6, 10, requires_grad=True), torch.randn(6, 10, requires_grad=True)


def half_pair():
    return torch.randn(6, 10, requires_grad=True).bfloat16(), torch.randn(6, 10).bfloat16()


def weighted_pair():
    return (*pair(), torch.rand(6, 10) + 0.1)


def masked_pair():
    return (*pair(), torch.rand(6, 10) > 0.3)


def images():
    """Predicted noise, noise, and a weight for each sample."""
    return (
        torch.randn(3, 2, 4, 4, requires_grad=True),
        torch.randn(3, 2, 4, 4),
        torch.rand(3) + 0.1,
    )


def patches():
    """Reconstructed patches, patches, and which were masked."""
    return (
        torch.randn(2, 5, 12, requires_grad=True),
        torch.randn(2, 5, 12),
        (torch.arange(10).view(2, 5) % 3 > 0).float(),
    )


def classes():
    return torch.randn(6, 10, requires_grad=True), torch.randint(10, (6,))


def plain_classes():
    return torch.randn(6, 10), torch.randint(10, (6,))


def half_classes():
    x, t = classes()
    return x.bfloat16(), t


def square_classes():
    """As many rows as classes, where a mistaken dimension goes unnoticed."""
    return torch.randn(8, 8, requires_grad=True), torch.randint(8, (8,))


def cubes():
    return torch.randn(4, 4, 4, requires_grad=True), torch.randint(4, (4, 4))


def tokens():
    return torch.randn(2, 3, 10, requires_grad=True), torch.randint(10, (2, 3))


def half_tokens():
    x, t = tokens()
    return x.bfloat16(), t


def masked_tokens():
    return (*tokens(), torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


def pixels():
    return torch.randn(2, 10, 4, 4, requires_grad=True), torch.randint(10, (2, 4, 4))


def distributions():
    return torch.rand(6, 10).softmax(-1).requires_grad_(), torch.rand(6, 10).softmax(-1)


def log_distributions():
    p, q = distributions()
    return p.detach().log().requires_grad_(), q.log()


def distillation():
    """A student's logits and a teacher's."""
    return torch.randn(6, 10, requires_grad=True), torch.randn(6, 10)


def learned_distillation():
    return learned_pair()


def soft_targets():
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 10).softmax(-1)


def square_logits():
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)


def student_pixels():
    return torch.randn(2, 10, 4, 4, requires_grad=True), torch.randn(2, 10, 4, 4)
