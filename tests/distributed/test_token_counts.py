"""The mean over all ranks' tokens, as trainers write it: its divisor is known with the loss.

The backward then scales gradients by the tangent alone, which is 1: it reads none of them again.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from compile_losses.distributed.data_parallel import global_mean
from tests.constants import set_constants
from tests.distributed.world import WORLD

ROWS, HIDDEN, CLASSES = 8, 16, 48


def total_of(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


def valid(labels):
    return (labels != -100).sum()


def transformers(logits, labels, count):
    """``ForCausalLMLoss``, with an integer in a tensor."""
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if torch.is_tensor(count):
        count = count.to(loss.device)
    return loss / count


def average_tokens_across_devices(logits, labels, count):
    """All of Trainer's step compiled: its DDP averages gradients."""
    loss = transformers(logits, labels, count)
    loss *= WORLD
    return loss


def torchtitan(logits, labels, count):
    return total_of(logits, labels) / count


def torchtitan_by_token(logits, labels, count):
    return F.cross_entropy(logits, labels, reduction="none").sum() / count


def accelerate(logits, labels, count):
    """As its guide to gradient accumulation has it."""
    return total_of(logits, labels) * WORLD / count


def summed_by_tensor(logits, labels, _):
    """The count's own collective, behind that of a metric."""
    count = valid(labels)
    dist.all_reduce(count)
    return WORLD * total_of(logits, labels) / count


def summed_by_function(logits, labels, _):
    count = all_reduce(valid(labels), "sum", dist.group.WORLD)
    return total_of(logits, labels) / count.clamp(min=1)


def summed_after(logits, labels, _):
    total = total_of(logits, labels)
    return total / all_reduce(valid(labels), "sum", dist.group.WORLD)


def by_global_mean(logits, labels, _):
    return global_mean(total_of(logits, labels), valid(labels))


GIVEN = [transformers, average_tokens_across_devices, torchtitan, torchtitan_by_token, accelerate]
COUNTED = [summed_by_tensor, summed_by_function, summed_after, by_global_mean]
#: Each spelling, with a count that the trainer has or without one.
CASES = [(spelling, count) for spelling in GIVEN for count in (torch.tensor(5), 5, 5.0)]
CASES += [(spelling, None) for spelling in COUNTED]


@pytest.mark.usefixtures("kernels_for_small_losses", "no_code")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("takes_head", [False, True])
@pytest.mark.parametrize(
    ("spelling", "count"), CASES, ids=lambda v: getattr(v, "__name__", type(v).__name__)
)
def test_known_with_the_loss(spelling, count, takes_head, graphs, monkeypatch):
    if takes_head:
        set_constants(monkeypatch, least_rows=1, logits_bytes=1)
    torch.manual_seed(0)
    head, x = nn.Linear(HIDDEN, CLASSES), torch.randn(ROWS, HIDDEN)
    labels = torch.randint(CLASSES, (ROWS,))
    labels[:3] = -100

    def step(x, labels, count):
        return spelling(head(x), labels, count)

    results = []
    for function in (step, torch.compile(step, backend="compile_losses", fullgraph=True)):
        loss = function(x, labels, count)
        results.append((loss.detach(), *torch.autograd.grad(loss, list(head.parameters()))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    forward, backward = graphs["post"]
    assert ("linear_cross_entropy_with_grad" in forward) is takes_head
    assert "grad_output: %" in forward
    scales = [line for line in backward.splitlines() if "fused.scale" in line]
    assert scales
    assert all("%tangents_1)" in line for line in scales), scales
