"""Log-probabilities and entropies of rows of logits whose rows or classes are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compile_losses.distributed.layout import Rows, assemble, local
from compile_losses.distributed.linear_layer import LinearLayer
from compile_losses.distributed.vocabulary import (
    Vocabulary,
    each_once_differentiable,
    once_differentiable,
)
from compile_losses.ops import vocabulary_parallel_statistics as statistics_ops
from compile_losses.ops.linear import vocabulary_parallel_statistics as of_layers
from compile_losses.ops.linear.arguments import as_rows
from compile_losses.ops.vocabulary_parallel_statistics import Merged


class _OfLayer(torch.autograd.Function):
    """Negative log-likelihood, entropy and argmax of each row of a linear layer's output, from a
    rank's part of the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        vocabulary: Vocabulary,
        ignore_index: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard = (vocabulary.first_class(linear_weight.shape[0]), vocabulary.classes)
        tensors, options = (input, linear_weight, target, linear_bias), (ignore_index, softcap)
        own = of_layers.statistics(*tensors, *shard, *options)
        merged = Merged(vocabulary.everyones(own), vocabulary.classes)
        nll = merged.nll(target, ignore_index)
        ctx.save_for_backward(*tensors, merged.stats)
        ctx.arguments = (*shard, *options)
        ctx.mark_non_differentiable(merged.argmax)
        ctx.set_materialize_grads(False)
        return nll, merged.entropy, merged.argmax

    @staticmethod
    def backward(ctx: Any, grad_nll: Tensor | None, grad_entropy: Tensor | None, _: Any) -> Any:
        input, linear_weight, *rest = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        given = [grad for grad in (grad_nll, grad_entropy) if grad is not None]
        if not given:
            return (None,) * 7
        with torch.no_grad():
            gradients = of_layers.gradient(
                grad_nll, grad_entropy, input, linear_weight, *rest, *ctx.arguments, *needs
            )
        found = each_once_differentiable(gradients, needs, input, linear_weight, *given)
        return *found, *(None for _ in range(4))


class _OfLogits(torch.autograd.Function):
    """Log-probabilities and entropy of each row, from a rank's own logits [rows, its classes].

    Without an index there are no log-probabilities; without a target a row's index is [K].
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor | None,
        index: Tensor | None,
        vocabulary: Vocabulary,
        ignore_index: int,
    ) -> tuple[Tensor, Tensor]:
        shard = (vocabulary.first_class(logits.shape[1]), vocabulary.classes)
        own = statistics_ops.statistics(logits, target, index, *shard, ignore_index)
        merged = Merged(vocabulary.everyones(own), vocabulary.classes)
        if target is not None:
            log_probs = -merged.nll(target, ignore_index)
        elif index is not None:
            log_probs = merged.log_probs(index)
        else:
            log_probs = merged.entropy.new_empty(0)
        ctx.save_for_backward(logits, target, index, merged.stats)
        ctx.arguments = (*shard, ignore_index)
        ctx.set_materialize_grads(False)
        return log_probs, merged.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        logits, target, index, stats = ctx.saved_tensors
        given = [grad for grad in (grad_log_probs, grad_entropy) if grad is not None]
        if not given:
            return (None,) * 5
        of_nll = None if grad_log_probs is None or target is None else -grad_log_probs
        of_picked = None if index is None else grad_log_probs
        with torch.no_grad():
            result = statistics_ops.gradient(
                of_nll, grad_entropy, of_picked, logits, target, index, stats, *ctx.arguments
            )
        return once_differentiable(result, logits, *given), *(None for _ in range(4))


def linear_log_probs(
    whole: Callable[..., tuple[Tensor, ...]],
    op: str,
    mesh: DeviceMesh,
    input: Any,
    linear_weight: Any,
    index: Any,
    linear_bias: Any,
    softcap: float | None,
    ignore_index: int,
    asked: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Of DTensors, with a temperature of 1; see LinearLayer for their placements.

    Args:
        whole: the public op, for local tensors if every rank has all classes.
        ignore_index: all indices below 0 are this one.
        asked: which results are not empty; the first three never are.

    Returns:
        What the public op returns, placed as the rows: log-probabilities, entropies, likeliest
        classes, and what else was asked for of rows whose classes are whole.

    Raises:
        RuntimeError: more than these three is asked for of rows whose classes are sharded.
    """
    layout = LinearLayer(op, input, linear_weight, index)
    hidden, layer, bias, rows = layout.local(input, linear_weight, linear_bias, index)
    if layout.classes is None:
        results = whole(hidden, layer, rows, linear_bias=bias, softcap=softcap)
    elif any(asked[3:]):
        raise RuntimeError(
            f"{op}: expected whole classes with squares, rank or top_k, got linear_weight sharded "
            "by classes"
        )
    else:
        vocabulary = Vocabulary(mesh, layout.classes, linear_weight.shape[0])
        nll, entropy, argmax = _OfLayer.apply(
            as_rows(hidden), layer, bias, rows.reshape(-1), vocabulary, ignore_index, softcap
        )
        nothing = nll.new_empty(0), rows.new_empty(0)
        first = (each.reshape(rows.shape) for each in (-nll, entropy, argmax))
        results = (*first, *nothing, *nothing)
    return tuple(
        _assembled(result, rows, layout, mesh, index) if is_asked else result
        for result, is_asked in zip(results, asked, strict=True)
    )


def _assembled(
    result: Tensor, rows: Tensor, layout: LinearLayer, mesh: DeviceMesh, index: Any
) -> Tensor:
    """A rank's results of its rows, one number or several of each, as one DTensor."""
    columns = result.shape[rows.dim() :]
    shape = torch.Size((*index.shape, *columns))
    return assemble(result.reshape(*rows.shape, *columns), mesh, layout.target, shape)


def selective_log_softmax(
    whole: Callable[[Tensor, Tensor], Tensor],
    op: str,
    mesh: DeviceMesh,
    logits: Any,
    index: Any,
    *,
    single: bool,
    ignore_index: int,
) -> Tensor:
    """Of logits [..., C] whose rows, classes, both or neither are sharded.

    Args:
        whole: the public op, for local tensors of whole rows.
        single: whether index has one class a row.
    """
    rows = Rows(op, logits, index, logits.dim() - 1)
    own, own_index = local(logits, rows.input), local(index, rows.target)
    if rows.classes is None:
        log_probs = whole(own, own_index)
    else:
        vocabulary = Vocabulary(mesh, rows.classes, logits.shape[-1])
        flat = own_index.reshape(-1) if single else as_rows(own_index)
        picks = (flat, None) if single else (None, flat)
        log_probs, _ = _OfLogits.apply(as_rows(own), *picks, vocabulary, ignore_index)
        log_probs = log_probs.to(logits.dtype).reshape(own_index.shape)
    return assemble(log_probs, mesh, rows.target, index.shape)


def softmax_entropy(
    whole: Callable[[Tensor], Tensor], op: str, mesh: DeviceMesh, logits: Any
) -> Tensor:
    """Likewise; arguments as for selective_log_softmax."""
    rows = Rows(op, logits, logits, logits.dim() - 1)
    own = local(logits, rows.input)
    if rows.classes is None:
        entropy = whole(own)
    else:
        vocabulary = Vocabulary(mesh, rows.classes, logits.shape[-1])
        _, entropy = _OfLogits.apply(as_rows(own), None, None, vocabulary, -1)
        entropy = entropy.to(logits.dtype).reshape(own.shape[:-1])
    return assemble(entropy, mesh, rows.target, logits.shape[:-1])
