"""Numbers of each row of logits that have no gradient: its largest logits, and a class's rank.

Everything is in ATen's ops, on as many rows as there are: a chunk of a head's logits, or all logits
where these are held. So values, ties and nan are torch's: ``topk`` says nothing of which of several
equal logits it takes, and a rank counts no comparison with nan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compile_losses.ops.checks import accumulation_type, describe, same_shape

aten = torch.ops.aten


def top_of(logits: Any, top_k: int, call: Callable[..., Any]) -> tuple[Any, Any]:
    """The ``top_k`` largest logits of each row, the largest first, and their classes, int64.

    Args:
        logits: [rows, classes].
        call: applies an op to arguments.
    """
    found = call(aten.topk.default, logits, top_k, 1, True, True)
    return found[0], found[1]


def rank_of(logits: Any, ranked: Any, ties: bool, call: Callable[..., Any]) -> Any:
    """How many logits of a row are larger than that of a class, int64 [rows].

    Args:
        logits: [rows, classes].
        ranked: the class of each row, int64 [rows].
        ties: whether logits that are as large count, too, the class's own among them.
        call: as above.
    """
    own = call(aten.gather.default, logits, 1, call(aten.unsqueeze.default, ranked, 1))
    larger = call(aten.ge.Tensor if ties else aten.gt.Tensor, logits, own)
    return call(aten.sum.dim_IntList, larger, [1])


def numbers_of(
    logits: Tensor,  # [rows, classes]
    ranked: Tensor | None,  # int64 [rows]
    top_k: int,
    softcap: float | None,
    *,
    ties: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank, largest logits and their classes; empty what nobody asked for."""
    rank = logits.new_empty(0, dtype=torch.int64)
    dtype = accumulation_type(logits.dtype)
    values = logits.new_empty((0, top_k) if top_k else 0, dtype=dtype)
    places = values.to(torch.int64)
    if ranked is None and not top_k:
        return rank, values, places
    if softcap is not None:  # it may make logits equal
        logits = logits.to(dtype).div(softcap).tanh_().mul_(softcap)
    if ranked is not None:
        rank = rank_of(logits, ranked, ties, _call)
    if top_k:
        values, places = top_of(logits, top_k, _call)
    return rank, values.to(dtype), places


def _call(op: Any, *arguments: Any) -> Any:
    return op(*arguments)


def tensors_beside(dtype: torch.dtype, softcap: float | None, *, ranks: bool, top_k: int) -> float:
    """How many tensors of the logits' size are held besides them."""
    if not ranks and not top_k:
        return 0
    wide = accumulation_type(dtype).itemsize / dtype.itemsize
    return (wide if softcap is not None else 0) + (1 / dtype.itemsize if ranks else 0)


def check(op: str, ranked: Tensor | None, top_k: int, input: Tensor, classes: Any) -> None:
    """Refuses ranked classes that are not one of each row, and more of the largest than there are.

    Raises:
        RuntimeError: as above.
    """
    if ranked is not None and (
        ranked.dtype != torch.int64 or not same_shape(ranked.shape, input.shape[:1])
    ):
        raise RuntimeError(
            f"{op}: expected ranked to be int64 of shape {list(input.shape[:1])}, "
            f"got {describe(ranked)}"
        )
    if not 0 <= top_k <= classes:
        raise RuntimeError(
            f"{op}: expected top_k from 0 to the number of classes, {classes}, got {top_k}"
        )
