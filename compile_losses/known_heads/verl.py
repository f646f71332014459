"""verl's heads of PPO and GRPO: log-probabilities and entropies of the classes that were sampled.

``LinearCrossEntropy`` has Triton kernels, ``FusedLinearForPPO`` torch's ops on chunks of rows. Of
the first one what stays theirs is a reduction, and classes that are sharded over a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compile_losses.known_heads.head import KnownHead, product_dtype, refuse_layer
from compile_losses.known_heads.rows import Rows, rows_of


def _rows(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> Rows:
    rows, dtype = hidden.reshape(-1, hidden.shape[-1]), product_dtype(hidden)
    return rows_of(rows, weight, None, labels.reshape(-1), dtype, temperature=temperature)


def _refuse_rows(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Any) -> str | None:
    if not isinstance(temperature, (int, float)) or not temperature > 0:
        return "its temperature is not a positive number"
    if hidden.dim() < 2 or labels.shape != hidden.shape[:-1]:
        return "its labels do not have the shape of its rows"
    if weight.dtype != product_dtype(hidden):
        return "its product has another dtype than its weight"
    rows = hidden.reshape(-1, hidden.shape[-1])
    return refuse_layer(rows, weight, None, labels.reshape(-1))


def log_probs_of_labels(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor] | str:
    """Log-probabilities and entropies in float32, [tokens]."""
    if dist_process_group is not None:
        return "its classes are sharded over a group"
    if reduction != "none":
        return "its log-probabilities are reduced"
    if hidden.dtype == torch.float64:
        return "its dtype is float64"
    reason = _refuse_rows(hidden, weight, labels, temperature)
    if reason is not None:
        return reason
    rows = _rows(hidden, weight, labels, temperature)
    return rows.log_probs, rows.entropy


def log_probs_for_ppo(
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 512,
) -> tuple[Tensor, Tensor] | str:
    """Log-probabilities in float32 and entropies in hidden_states' dtype, of input_ids' shape."""
    if hidden_states.dim() not in (2, 3):
        return "its rows have neither one nor two dimensions"
    reason = _refuse_rows(hidden_states, vocab_weights, input_ids, temperature)
    if reason is not None:
        return reason
    rows = _rows(hidden_states, vocab_weights, input_ids, temperature)
    log_probs, entropy = (each.view(input_ids.shape) for each in (rows.log_probs, rows.entropy))
    return log_probs.to(torch.float32), entropy.to(hidden_states.dtype)


HEADS = (
    KnownHead(
        package="verl",
        versions=("0.9.1",),
        module="verl.utils.kernel.linear_cross_entropy",
        name="LinearCrossEntropy",
        loss="linear_cross_entropy",
        compute=log_probs_of_labels,
    ),
    KnownHead(
        package="verl",
        versions=("0.9.1",),
        module="verl.utils.experimental.torch_functional",
        name="FusedLinearForPPOFunction",
        loss="linear_cross_entropy",
        compute=log_probs_for_ppo,
    ),
)
