"""Kullback-Leibler divergence of rows whose classes are sharded: what each shard computes.

- ``fused::vocabulary_parallel_divergence``: what a shard knows of each row of input and target,
  [rows, its own classes]: the stats [rows, 6] of :mod:`compile_losses.ops.softmax_kl_div`, as if
  there were no other classes.
- ``merged``: from these stats of all shards the stats of the whole rows, and their divergence.
  Between the two the stats are gathered: the only communication.
- ``fused::softmax_kl_div_backward`` of a shard's logits and the merged stats makes their gradients.

Of each row the stats hold the largest logit of input, the sum of the exponentials relative to it,
the same two of target, a pivot, and c, the sum of ``q * ((t - largest target) - (x - pivot))`` for
the shard's own q = softmax(target / T). They merge as those of a row's parts do on one device:
shards are weighted by their part of q, after all c are brought to the pivot of the shard that has
the largest target logit. If all classes of a shard have q = 0, they add 0.

Jensen-Shannon's divergence reads the logits a second time, for the mixture of the whole rows; it
has no such form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.row_pair import statistics

NONE = REDUCTIONS["none"]

divergence = library.define(
    "vocabulary_parallel_divergence(Tensor input, Tensor target, float temperature) -> Tensor"
)


def divergence_kernel(input: Tensor, target: Tensor, temperature: float) -> Tensor:
    if input.shape[1] == 0:
        nothing = divergence_fake(input, target).zero_()
        nothing[:, 0] = nothing[:, 2] = -torch.inf
        return nothing
    stats: Tensor
    _, stats = torch.ops.fused.softmax_kl_div_forward(
        input, target, NONE, temperature, -1, torch.promote_types(input.dtype, target.dtype)
    )
    return stats


def divergence_fake(input: Tensor, target: Tensor, *_: float) -> Tensor:
    return statistics(input, target, input.shape[:1])


def merged(shards: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The divergences [rows], in float64, and the stats [rows, 6] of the whole rows.

    Args:
        shards: [shards, rows, 6].
    """
    largest, exponentials, largest_target, mass, pivot, cross = shards.double().unbind(-1)
    largest_of_all = largest.amax(0)
    exponentials = (exponentials * _factors(largest, largest_of_all, temperature)).sum(0)
    likeliest = largest_target.argmax(0, keepdim=True)
    largest_target_of_all = largest_target.gather(0, likeliest).squeeze(0)
    new_pivot = pivot.gather(0, likeliest).squeeze(0)
    masses = mass * _factors(largest_target, largest_target_of_all, temperature)
    mass = masses.sum(0)
    shift = (largest_target_of_all - largest_target) - (new_pivot - pivot)
    without_mass = (masses == 0) & (mass > 0)  # if all are without, there is no q: nan
    cross = torch.where(without_mass, 0, masses / mass * (cross - shift)).sum(0)
    distance = (cross + (largest_of_all - new_pivot)) / temperature
    stats = (largest_of_all, exponentials, largest_target_of_all, mass, new_pivot, cross)
    return distance + (exponentials / mass).log(), torch.stack(stats, -1).to(shards.dtype)


def _factors(largest: Tensor, of_all: Tensor, temperature: float) -> Tensor:
    """Of sums relative to a shard's largest logit, where they count from that of all."""
    factors = ((largest - of_all) / temperature).exp()
    return torch.where(largest == -torch.inf, 0, factors)


library.compose(divergence, divergence_kernel, divergence_fake)
