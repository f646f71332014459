"""Ranks of classes: how many logits of a row are larger than that of its class.

Log-probabilities have the order of their logits, and so may be compared as well. Probabilities have
not, since small ones are 0, nor have log-probabilities that are rounded to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, equal_sizes
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.recognize.spellings.row_views import target_of_gather
from compile_losses.recognize.spellings.softmax_rows import softmax_of

#: Comparisons of logits with one logit of each row: whether the logits stand on the left, and
#: whether equal ones count.
_COMPARISONS = {
    aten.gt.Tensor: (True, False),
    aten.ge.Tensor: (True, True),
    aten.lt.Tensor: (False, False),
    aten.le.Tensor: (False, True),
}
#: In which counts, and small differences, are rounded.
_NARROW = (torch.float16, torch.bfloat16, torch.bool)


@dataclass(frozen=True)
class Rank:
    """How many logits of each row are larger than that of a class.

    Attributes:
        logits: the tensor, with the classes in the last dimension, dim.
        classes: one of each row.
        ties: whether logits that are as large count, too.
    """

    logits: Value
    dim: int
    classes: Value
    ties: bool


def rank_of(value: Value, replay: AtenReplay) -> Rank | None:
    """A sum as a rank; None if it is none.

    Raises:
        RowIndexError: what is compared with are no logits of one class of each row.
    """
    dims = value.args[1] if value.op is aten.sum.dim_IntList else None
    if not isinstance(dims, list) or len(dims) != 1 or value.fake.dtype in _NARROW:
        return None
    larger = replay.resolve(value.args[0])
    while larger.op is aten._to_copy.default and larger.fake.dtype not in _NARROW:
        larger = replay.resolve(larger.args[0])
    if larger.op not in _COMPARISONS or not all(isinstance(a, Value) for a in larger.args):
        return None
    is_left, ties = _COMPARISONS[larger.op]
    rows, own = larger.args if is_left else larger.args[::-1]
    dim = rows.rank - 1
    if dims[0] % larger.rank != dim or not equal_sizes(own.fake.shape, [*rows.fake.shape[:-1], 1]):
        return None
    found = softmax_of(rows, replay, logarithm=True)
    if found is not None and (found[1] != dim or rows.fake.dtype in _NARROW):
        return None
    logits = rows if found is None else found[0]
    own = replay.resolve(own)
    if own.op is not aten.gather.default or not replay.same(rows, own.args[0]):
        return None
    classes, _ = target_of_gather(own, replay)
    return Rank(logits, dim, classes, ties)
