"""Log-probabilities of chosen classes by a linear layer, without ever holding that layer's output.

``torch.ops.fused.linear_log_probs(input, linear_weight, index, *, linear_bias=None,
temperature=1.0, softcap=None, squares=False, rank=False, top_k=0)`` returns tensors for the logits
``z = softcap(linear(input, linear_weight, linear_bias)) / temperature``, with ``softcap(x) =
softcap * tanh(x / softcap)``, if there is one:

- ``log_softmax(z, -1)`` at index, of index's shape, 0 where index is negative;
- the entropy of ``softmax(z, -1)``, of input's leading shape;
- ``argmax(z, -1)``, int64, of input's leading shape, without a gradient;
- ``log(softmax(z, -1).square().sum(-1))``, of input's leading shape, without a gradient; empty
  unless squares asks for it;
- how many logits of a row are larger than that at index, int64 of index's shape, -1 where index is
  negative; empty unless rank asks for it;
- ``topk(z, top_k)``, values and indices, of input's leading shape and then [top_k], without a
  gradient; empty with a top_k of 0. Which of several equal logits is taken is not said, as of
  torch's.

Input is [hidden], [rows, hidden] or with any other leading dimensions, linear_weight [classes,
hidden], linear_bias [classes]; index int64, of input's leading shape, or with one more dimension, K
classes of each row. Results are float32, and float64 for float64. Autocast casts input,
linear_weight and linear_bias as it casts those of ``linear``. The logits are computed a chunk of
rows at a time, as for ``compile_losses.ops.linear_row_statistics``: once in the forward, and
once more in the backward. If only input needs a gradient, that of one class of each row is computed
in the forward; in a compiled step the gradients may be in the forward, too. Tensors
inside ``torch.func``, and DTensors with K classes of each row, are computed as torch does, over all
logits. Other DTensors may be sharded by rows, or linear_weight by classes; gradients with sharded
classes can't be differentiated again. The last four results are not computed of sharded classes.

Raises:
    RuntimeError: shapes, dtypes or devices that don't go together; a temperature or a softcap that
        is not positive; a top_k that is not from 0 to the number of classes; a rank with K classes
        of each row; plain tensors among DTensors; linear_weight sharded by features, or by classes
        with squares, rank or top_k.
    IndexError: on the CPU, an index that is not below the number of classes. On CUDA the kernel
        stops with a device-side assertion.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.distributed import mesh_of
from compile_losses.ops import checks, linear_row_statistics
from compile_losses.ops.checks import accumulation_type, describe
from compile_losses.ops.linear.arguments import as_rows, check_linear
from compile_losses.ops.linear.reference import autocast_layer, autocast_off, under_autocast
from compile_losses.ops.linear.row_statistics import (
    ARGMAX,
    ENTROPY,
    LOG_PROBS,
    LOG_SQUARES,
    MAXIMUM,
    NLL,
)
from compile_losses.ops.row_statistics import entropy_of
from compile_losses.ops.softmax_divergence import check_temperature
from compile_losses.ops.transforms import needs_torch

NAME = "linear_log_probs"
#: What the index of a row becomes that no class is picked of, and what its rank is.
_NONE = _NO_RANK = -1

public = library.define(
    "linear_log_probs(Tensor input, Tensor linear_weight, Tensor index, *, "
    "Tensor? linear_bias=None, float temperature=1.0, float? softcap=None, bool squares=False, "
    "bool rank=False, int top_k=0) -> (Tensor log_probs, Tensor entropy, Tensor argmax, "
    "Tensor log_squares, Tensor rank, Tensor top_values, Tensor top_indices)"
)


def reference(
    input: Tensor,
    linear_weight: Tensor,
    index: Tensor,
    linear_bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    squares: bool,
    rank: bool,
    top_k: int,
) -> tuple[Tensor, ...]:
    logits = F.linear(input, linear_weight, linear_bias)
    logits = logits.to(accumulation_type(input.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_probs, classes = F.log_softmax(logits, -1), index.clamp(min=0)
    if index.dim() == logits.dim():
        log_probs = log_probs.gather(-1, classes)
    else:
        log_probs = log_probs.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    log_probs = torch.where(index < 0, 0, log_probs)
    given = logits.detach()
    log_squares = given.log_softmax(-1).mul(2).logsumexp(-1) if squares else given.new_empty(0)
    values, places = given.topk(top_k) if top_k else (given.new_empty(0), index.new_empty(0))
    ranks = index.new_empty(0)
    if rank:
        own = given.gather(-1, classes.unsqueeze(-1))
        ranks = torch.where(index < 0, _NO_RANK, (given > own).sum(-1))
    more = (log_squares, ranks, values, places)
    return log_probs, entropy_of(logits), given.argmax(-1), *more


def public_kernel(
    input: Tensor,
    linear_weight: Tensor,
    index: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    squares: bool = False,
    rank: bool = False,
    top_k: int = 0,
) -> tuple[Tensor, ...]:
    mesh = mesh_of(
        NAME, input=input, linear_weight=linear_weight, index=index, linear_bias=linear_bias
    )
    if under_autocast(input):
        layer = autocast_layer(input, linear_weight, linear_bias)
        input, linear_weight, linear_bias = layer  # type: ignore[assignment]
    _check(input, linear_weight, index, linear_bias, temperature, softcap)
    tensors = (input, linear_weight, index, linear_bias)
    of_several = index.dim() == input.dim()
    numbers = (squares, rank, top_k)
    _check_numbers(rank, top_k, linear_weight, of_several=of_several)
    if needs_torch(*tensors) if mesh is None else of_several:
        with autocast_off(input):
            return reference(*tensors, temperature, softcap, *numbers)
    # softcap(x) / T is tanh with the height softcap / T of x / T.
    softcap = None if softcap is None else softcap / temperature
    if mesh is not None:
        from compile_losses.distributed.statistics import linear_log_probs

        if temperature != 1:
            input = input / temperature
            linear_bias = None if linear_bias is None else linear_bias / temperature
        index = index.clamp(min=_NONE)
        whole = partial(public_kernel, squares=squares, rank=rank, top_k=top_k)
        asked = (True, True, True, squares, rank, bool(top_k), bool(top_k))
        return linear_log_probs(
            whole, NAME, mesh, input, linear_weight, index, linear_bias, softcap, _NONE, asked
        )
    target = picks = None
    several = of_several and index.shape[-1] != 1
    if several:
        picks = index.reshape(-1, index.shape[-1]).clamp(min=0)
    else:
        target = index.reshape(-1).clamp(min=_NONE)
    arguments = linear_row_statistics.in_order(
        as_rows(input),
        linear_weight,
        target,
        linear_bias,
        _NONE,
        softcap,
        picks=picks,
        ranked=index.reshape(-1).clamp(min=0) if rank else None,
        squares=squares,
        top_k=top_k,
        scale=1 / temperature,
    )
    statistics = linear_row_statistics.statistics(*arguments)
    if several:
        log_probs = torch.where(index < 0, 0, statistics[LOG_PROBS].view(index.shape))
    else:
        log_probs = (-statistics[NLL]).view(index.shape)
    leading = input.shape[:-1]
    log_squares, _, ranks, values, places = statistics[LOG_SQUARES:MAXIMUM]
    if squares:
        log_squares = log_squares.view(leading)
    if rank:
        ranks = torch.where(index < 0, _NO_RANK, ranks.view(index.shape))
    if top_k:
        values, places = (found.view(*leading, top_k) for found in (values, places))
    of_rows = (statistics[ENTROPY].view(leading), statistics[ARGMAX].view(leading))
    return log_probs, *of_rows, log_squares, ranks, values, places


def _check_numbers(rank: bool, top_k: int, linear_weight: Tensor, *, of_several: bool) -> None:
    if rank and of_several:
        raise RuntimeError(f"{NAME}: expected one class of each row with rank, got several")
    classes = linear_weight.shape[0]
    if not 0 <= top_k <= classes:
        raise RuntimeError(
            f"{NAME}: expected top_k from 0 to the number of classes, {classes}, got {top_k}"
        )


def _check(
    input: Tensor,
    linear_weight: Tensor,
    index: Tensor,
    linear_bias: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> None:
    checks.check_floating(NAME, input=input, linear_weight=linear_weight)
    checks.check_same_device(
        NAME, input, linear_weight=linear_weight, index=index, linear_bias=linear_bias
    )
    names = ("input", "linear_weight", "linear_bias")
    check_linear(NAME, names, input, linear_weight, linear_bias)
    if linear_weight.dim() != 2 or linear_weight.shape[0] == 0:
        raise RuntimeError(
            f"{NAME}: expected linear_weight of shape [classes, hidden] with at least 1 class, "
            f"got {list(linear_weight.shape)}"
        )
    leading, shape = input.shape[:-1], index.shape
    several = len(shape) > len(leading) and shape[-1] > 0
    fits = checks.same_shape(shape[:-1] if several else shape, leading)
    if index.dtype != torch.int64 or not fits:
        several_classes = ", ".join([*map(str, leading), "K"])
        raise RuntimeError(
            f"{NAME}: expected index to be int64 of shape {list(leading)} or [{several_classes}] "
            f"with K at least 1, got {describe(index)}"
        )
    check_temperature(NAME, temperature)
    checks.check_softcap(NAME, softcap)


library.implement_public(public, public_kernel)
