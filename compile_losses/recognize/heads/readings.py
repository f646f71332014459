"""Readers of logits that need a few statistics of each row, which one op computes together.

A reader is looked at as an ATen op. It may be a cross entropy, for which the op computes a negative
log-likelihood; a divergence from the rows of a teacher; or a sum of multiples of the statistics,
such as a picked logit, which is the logsumexp less the negative log-likelihood. It may also be the
maximum or the argmax.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.op_traits import RESHAPES
from compile_losses.ops.checks import REDUCTIONS, batch_of
from compile_losses.ops.linear.row_statistics import (
    ARGMAX,
    DIVERGENCE,
    ENTROPY,
    LOG_PROBS,
    LOG_SQUARES,
    LOGSUMEXP,
    MAXIMUM,
    NLL,
    RANK,
    TOP_INDICES,
    TOP_VALUES,
    TOTAL,
    VARIANCE,
)
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, compute, same_sizes
from compile_losses.recognize.graph.symbolic_tensors import Value, example, has_gradient, whole
from compile_losses.recognize.heads.head import NotAbsorbedError
from compile_losses.recognize.heads.logits import logits_of
from compile_losses.recognize.heads.ranks import rank_of
from compile_losses.recognize.spellings.row_views import (
    VIEWS,
    RowIndexError,
    picks_of_gather,
    target_of_gather,
    target_of_index,
    unexpanded,
)
from compile_losses.recognize.spellings.softmax_rows import (
    multiple_of_softmax,
    one_hot_classes,
    softmax_of,
    unbounded,
    unscaled,
)
from compile_losses.torch_internals.ops import OpOverload, named_arguments

#: A view of rows: the op, and its arguments but the first.
Move: TypeAlias = tuple[OpOverload[..., Any], list[Any]]

_CROSS_ENTROPY = torch.ops.fused.cross_entropy.default
#: Their kinds if the student's logits are the op's input. Input, target and reduction have the same
#: places in the arguments of all.
_DIVERGENCES = {
    torch.ops.fused.softmax_kl_div.default: "kl",
    torch.ops.fused.softmax_js_div.default: "js",
    torch.ops.fused.softmax_finite_kl_div.default: "finite_kl",
}
#: The kinds if they are its target.
_REVERSED = {"kl": "reverse_kl", "js": "js", "finite_kl": "finite_reverse_kl"}
_WHATS = {
    "js": "Jensen-Shannon divergence",
    "finite_cross_entropy": "cross entropy with a teacher's probabilities, of finite logits",
    "finite_kl": "Kullback-Leibler divergence of finite logits",
    "finite_reverse_kl": "Kullback-Leibler divergence of finite logits",
}
#: A reduction of a divergence: a cross entropy's mean, which is over the rows.
MEAN_OF_ROWS = -1
_SPREADS = (aten.std.correction, aten.var.correction)
_MAX = (torch.max, aten.max.dim, "max")
_TOP = (torch.topk, aten.topk.default, "topk")


@dataclass(frozen=True)
class Divergence:
    """A divergence from a teacher's rows.

    Attributes:
        kind, beta, temperature: as ``fused::linear_row_statistics_forward`` has them.
        teacher: its logits.
        reduction: how the loss of each row is reduced; also MEAN_OF_ROWS.
    """

    kind: str
    beta: float
    temperature: float
    teacher: Value
    reduction: int


@dataclass(frozen=True)
class Spread:
    """A variance or standard deviation of logits.

    Attributes:
        of_all: whether it is that of all rows together, or of each row.
        is_root: whether it is a standard deviation.
        correction: what is subtracted from the number of logits.
        factor: what it is multiplied by.
    """

    of_all: bool
    is_root: bool
    correction: float
    factor: float = 1.0


@dataclass(frozen=True)
class Reading:
    """A node that holds statistics of each row.

    Attributes:
        logits: the tensor that it reads, with the classes in dimension dim.
        dim: as above.
        terms: the factor of each statistic; the node holds the sum of all.
        exponential: if the node holds the exponential of this sum, what that is multiplied by.
        target: the class that is picked of each row, if one is.
        call: the arguments by name of a cross entropy.
        divergence: the kind and the teacher of a divergence.
        picks: the classes that are picked of each row, if several are, in a last dimension, which
            the node has as well.
        top_k: how many of the largest logits are read of each row, in such a dimension.
        ranked: the class of each row whose rank is read.
        ties: whether logits that are as large count in the rank.
        spread: how the node is made of its terms, a variance and perhaps a sum of each row, if it
            is no sum of multiples.
        over_rows: ``aten.sum.default`` or ``aten.mean.default`` if the node holds that of all rows.
        what: in words.
    """

    logits: Value
    dim: int
    terms: dict[int, float] = field(default_factory=dict)
    exponential: float | None = None
    target: Value | None = None
    call: dict[str, Any] | None = None
    divergence: Divergence | None = None
    picks: Value | None = None
    top_k: int = 0
    ranked: Value | None = None
    ties: bool = False
    spread: Spread | None = None
    over_rows: OpOverload[..., Any] | None = None
    what: str = ""

    @property
    def drops_shifts(self) -> bool:
        """Whether it is the same for logits that are all larger by a number."""
        terms, classes = self.terms, self.logits.fake.shape[self.dim]
        grow = (LOGSUMEXP, MAXIMUM, TOP_VALUES)
        if not isinstance(classes, int):
            return not {TOTAL, *grow} & set(terms)
        shift = sum(terms.get(place, 0.0) for place in grow)
        return math.isclose(shift, -classes * terms.get(TOTAL, 0.0))

    @property
    def columns(self) -> Any:
        """How many numbers the node has of each row; None if they have no dimension."""
        return self.picks.fake.shape[-1] if self.picks is not None else self.top_k or None

    @property
    def batch(self) -> Any:
        """What a divergence's batchmean divides by; None if that is not its reduction."""
        found = self.divergence
        is_batchmean = found is not None and found.reduction == REDUCTIONS["batchmean"]
        return batch_of(self.logits.fake) if is_batchmean else None

    @property
    def weight(self) -> Node | None:
        """The weight of each class."""
        return None if self.call is None else self.call["weight"]

    @property
    def ignore_index(self) -> int | None:
        """None if no class index is ignored."""
        return None if self.call is None else self.call["ignore_index"]


@dataclass(frozen=True)
class Place:
    """Where the op's results have the classes that a reader picks.

    Attributes:
        columns: of the picks, those of each set of classes; empty if the op's target has them.
        part: the number of the reader's set among these.
        ignore_index: the class index whose rows have a loss of 0.
    """

    columns: tuple[int, ...]
    part: int
    ignore_index: int


def reading_of(node: Node, replay: AtenReplay, logits: Container[Node] = ()) -> Reading | None:
    """The statistics that a node reads of each row of a tensor; None if it reads anything else.

    Args:
        logits: the nodes that may be the student's logits of a divergence; others are a teacher's.
    """
    if node.target is _CROSS_ENTROPY:
        return _cross_entropy(node, replay, logits)
    if node.target in _DIVERGENCES:
        return _divergence(node, logits)
    if not isinstance(example(node), Tensor):
        return None
    item = _item_of_pair(node, replay)
    if item is not None:
        return item
    value = replay.of(node)
    if value.op is None or value.node is not node:
        return None
    try:
        return _of_value(value, replay)
    except RowIndexError:
        return None


def _cross_entropy(node: Node, replay: AtenReplay, logits: Container[Node]) -> Reading | None:
    """A cross entropy; None if the op has not its target or its options."""
    call = named_arguments(node)
    input, target = call["input"], call["target"]
    if not isinstance(input, Node) or not isinstance(target, Node):
        return None
    dim = 0 if example(input).dim() == 1 else 1
    if example(target).is_floating_point():
        is_student = input in logits and target not in logits
        return _soft_targets(call, dim, replay) if is_student else None
    if call["weight"] is not None and call["label_smoothing"]:
        return None
    terms = {NLL: 1.0}
    return Reading(whole(input), dim, terms, None, whole(target), call, what="cross entropy")


def _soft_targets(call: dict[str, Any], dim: int, replay: AtenReplay) -> Reading | None:
    """A cross entropy whose target is the softmax of a teacher's logits."""
    input, target = whole(call["input"]), whole(call["target"])
    if call["weight"] is not None or call["label_smoothing"] or has_gradient(target):
        return None
    found = softmax_of(_attached(target, replay), replay, logarithm=False)
    if found is None or found[1] != dim:
        return None
    reduction = call["reduction"]
    if reduction == REDUCTIONS["mean"]:
        reduction = MEAN_OF_ROWS
    divergence = Divergence("cross_entropy", 0.5, 1.0, found[0], reduction)
    what = "cross entropy with a teacher's probabilities"
    return Reading(input, dim, {DIVERGENCE: 1.0}, divergence=divergence, what=what)


def _attached(target: Value, replay: AtenReplay) -> Value:
    """A target without a gradient before it was detached, under views as well."""
    target = replay.resolve(target)
    if target.op is aten.detach.default:
        return _attached(target.args[0], replay)
    inner = _attached(target.args[0], replay) if target.op in VIEWS else None
    if inner is None or inner is replay.resolve(target.args[0]):
        return target
    return compute(target.op, inner, *target.args[1:]) or target  # type: ignore[arg-type]


def _divergence(node: Node, logits: Container[Node]) -> Reading | None:
    """A divergence of logits from a teacher's, or the reverse; None if the op has no such."""
    call = named_arguments(node)
    rows = (call["input"], call["target"])
    of_student = [place for place, row in enumerate(rows) if row in logits]
    if len(of_student) != 1 or not all(isinstance(row, Node) for row in rows):
        return None
    (place,) = of_student
    student, teacher = rows[place], rows[1 - place]
    trained = has_gradient(student) and not has_gradient(teacher)
    if example(node).requires_grad and not trained:
        return None
    kind, beta = _DIVERGENCES[node.target], call.get("beta", 0.5)  # type: ignore[index]
    if not call.get("entropy", True):
        kind = "finite_cross_entropy"
    if place == 1:  # a mixture has both rows, and a divergence is of the second one from the first
        if kind not in _REVERSED:
            return None
        kind, beta = _REVERSED[kind], 1 - beta
    fake: Tensor = example(student)
    dim, reduction = call["dim"] % fake.dim(), call["reduction"]
    if reduction == REDUCTIONS["batchmean"] and statically_known_true(
        batch_of(fake) * fake.shape[dim] == fake.numel()
    ):
        reduction = MEAN_OF_ROWS
    found = Divergence(kind, beta, call["temperature"], whole(teacher), reduction)
    what = _WHATS.get(kind, "Kullback-Leibler divergence")
    return Reading(whole(student), dim, {DIVERGENCE: 1.0}, divergence=found, what=what)


def _item_of_pair(node: Node, replay: AtenReplay) -> Reading | None:
    """``torch.max(x, dim)`` and ``topk`` return two tensors, each in a node of its own."""
    if node.target is not operator.getitem:
        return None
    source, index = node.args
    if not isinstance(source, Node) or not is_pair(source) or index not in (0, 1):
        return None
    names = _NAMES_OF_TOP if source.target in _TOP else ("input", "dim", "keepdim")
    given = dict(zip(names, source.args, strict=False)) | source.kwargs
    input, dim = given.get("input"), given.get("dim", -1 if source.target in _TOP else None)
    if not isinstance(input, Node) or not isinstance(dim, int) or isinstance(dim, bool):
        return None
    logits = whole(input)
    if not logits.fake.dim():
        return None
    if source.target not in _TOP:
        return _largest(logits, dim % logits.rank, ARGMAX if index else MAXIMUM, replay)
    top_k, is_last = given.get("k"), dim % logits.rank == logits.rank - 1
    if type(top_k) is not int or top_k < 1 or not is_last or given.get("largest", True) is not True:
        return None
    return _top(logits, top_k, TOP_INDICES if index else TOP_VALUES, replay)


_NAMES_OF_TOP = ("input", "k", "dim", "largest", "sorted")


def is_pair(node: Node) -> bool:
    """Whether a node is a call of ``topk``, or of ``max`` that may have a dimension."""
    return node.target in (*_MAX, *_TOP)


def _top(source: Value, top_k: int, place: int, replay: AtenReplay) -> Reading:
    """The largest logits of each row, or their classes."""
    found = _largest(source, source.rank - 1, ARGMAX if place == TOP_INDICES else MAXIMUM, replay)
    of_one = {ARGMAX: TOP_INDICES, MAXIMUM: TOP_VALUES}
    terms = {of_one.get(each, each): factor for each, factor in found.terms.items()}
    what = "classes of the largest logits" if place == TOP_INDICES else f"largest {top_k}"
    return replace(found, terms=terms, top_k=top_k, what=what)


def _largest(source: Value, dim: int | None, place: int, replay: AtenReplay) -> Reading:
    """The maximum or argmax of logits, of their softmax, or of its logarithm, in each row.

    Args:
        dim: along which; None if the maximum of all rows is taken, too.
        place: of the statistic.
    """
    for logarithm in (True, False):
        found = multiple_of_softmax(source, replay, logarithm=logarithm)
        if found is None or found.factor < 0 or dim not in (None, found.dim):
            continue
        if place == ARGMAX:  # a softmax grows with its logit
            return Reading(found.logits, found.dim, {ARGMAX: 1.0}, what="argmax")
        what, terms = "probability of the likeliest class", {MAXIMUM: 1.0, LOGSUMEXP: -1.0}
        if not logarithm:
            return Reading(found.logits, found.dim, terms, found.factor, what=what)
        return _times(Reading(found.logits, found.dim, terms, what=f"log-{what}"), found.factor)
    what = "argmax" if place == ARGMAX else "maximum"
    return Reading(source, source.rank - 1 if dim is None else dim, {place: 1.0}, what=what)


def _largest_of_all(source: Value, replay: AtenReplay) -> Reading:
    found = _largest(source, None, MAXIMUM, replay)
    return replace(found, over_rows=aten.max.default, what=f"{found.what} over all rows")


def _of_value(value: Value, replay: AtenReplay) -> Reading | None:
    """As :func:`reading_of`, of the ATen op that a node is."""
    op, args = value.op, value.args
    if op is aten.neg.default:
        inner = replay.resolve(args[0])
        found = _of_value(inner, replay)
        return None if found is None else _times(found, -1.0)
    if op in (aten.squeeze.dim, aten.unsqueeze.default, *RESHAPES):
        return _of_value(replay.resolve(args[0]), replay) if _keeps_rows(value) else None
    if not args or not isinstance(args[0], Value) or not args[0].fake.dim():
        return None  # torch takes 0 and -1 as dimensions of a number
    if op is aten.logsumexp.default and len(args[1]) == 1:
        doubled = multiple_of_softmax(args[0], replay, logarithm=True)
        if doubled is not None and doubled.factor == 2 and doubled.dim == args[1][0] % args[0].rank:
            return Reading(doubled.logits, doubled.dim, {LOG_SQUARES: 1.0}, what=_SQUARES)
        return Reading(args[0], args[1][0] % args[0].rank, {LOGSUMEXP: 1.0}, what="logsumexp")
    if op is aten.gather.default:
        source = args[0] if args[0].whole else unexpanded(args[0], replay)
        try:
            target, dim = target_of_gather(value, replay)
        except RowIndexError:
            return _picks(source, picks_of_gather(value, replay), replay)
        return _pick(source, dim, target, replay)
    if op is aten.index.Tensor:
        target, dim = target_of_index(value, replay)
        return _pick(args[0], dim, target, replay)
    if op in (aten.sum.dim_IntList, aten.mean.dim):
        rank = rank_of(value, replay)
        if rank is not None:
            found = Reading(rank.logits, rank.dim, {RANK: 1.0}, what="rank of a class")
            return replace(found, ranked=rank.classes, ties=rank.ties)
        return _sum(value, replay) or _sum_of_row(value, replay)
    if op in (aten.sum.default, aten.mean.default):
        return _sum(value, replay) or _sum_of_all(value)
    if op in _SPREADS:
        return _spread(value, replay)
    if op is aten.argmax.default and len(args) > 1 and isinstance(args[1], int):
        return _largest(args[0], args[1] % args[0].rank, ARGMAX, replay)
    if op is aten.amax.default and len(args) > 1 and len(args[1]) == 1:
        return _largest(args[0], args[1][0] % args[0].rank, MAXIMUM, replay)
    if op is aten.max.default or (op is aten.amax.default and len(args[1]) == args[0].rank):
        return _largest_of_all(args[0], replay)
    return None


def _keeps_rows(value: Value) -> bool:
    """Whether a view of one number for each row drops or adds dimensions of one alone."""
    before, after = value.args[0].fake.shape, value.fake.shape
    one, other = (
        [size for size in shape if not statically_known_true(size == 1)]
        for shape in (before, after)
    )
    return same_sizes(one, other)


def _times(reading: Reading, factor: float) -> Reading:
    """What a reader of so many times the same holds."""
    if reading.spread is not None:
        spread = replace(reading.spread, factor=factor * reading.spread.factor)
        return replace(reading, spread=spread)
    if reading.exponential is not None:
        return replace(reading, exponential=factor * reading.exponential)
    terms = {place: factor * multiple for place, multiple in reading.terms.items()}
    return replace(reading, terms=terms)


def _pick(source: Value, dim: int, target: Value, replay: AtenReplay) -> Reading:
    found, what = _of_classes(source, dim, NLL, -1.0, replay)
    return replace(found, target=target, what=f"{what} of a class")


def _picks(source: Value, picks: Value, replay: AtenReplay) -> Reading:
    found, what = _of_classes(source, source.rank - 1, LOG_PROBS, 1.0, replay)
    plural = "probabilities".join(what.rsplit("probability", 1)) if what != "logit" else "logits"
    return replace(found, picks=picks, what=f"{plural} of several classes")


def _of_classes(
    source: Value, dim: int, place: int, sign: float, replay: AtenReplay
) -> tuple[Reading, str]:
    """What is picked of each row, and its name: a log-probability, a probability or a logit.

    Args:
        place, sign: of the statistic that is, but for its sign, the log-probability.
    """
    found = multiple_of_softmax(source, replay, logarithm=True)
    if found is not None and found.dim == dim:
        return Reading(found.logits, dim, {place: sign * found.factor}), "log-probability"
    found = multiple_of_softmax(source, replay, logarithm=False)
    if found is not None and found.dim == dim:
        return Reading(found.logits, dim, {place: sign}, found.factor), "probability"
    return Reading(source, dim, {LOGSUMEXP: 1.0, place: sign}), "logit"


def _sum(value: Value, replay: AtenReplay) -> Reading | None:
    """Over the classes, or over classes and rows: of log-probabilities, or of these or logits times
    probabilities, or of what a one-hot target selects."""
    dims, dtype = _dims_of_sum(value), value.kwargs.get("dtype")
    if dims is None or (dtype is not None and not dtype.is_floating_point):
        return None
    found = _of_summands(value.args[0], replay)
    if found is None or found.dim not in dims:
        return None
    is_mean = value.op in (aten.mean.dim, aten.mean.default)
    if is_mean:
        classes = found.logits.fake.shape[found.dim]
        if not isinstance(classes, int) or not classes:
            return None
        found = _times(found, 1 / classes)
    if value.op in (aten.sum.dim_IntList, aten.mean.dim) and len(dims) == 1:
        return found
    over_rows = aten.mean.default if is_mean else aten.sum.default
    return replace(found, over_rows=over_rows, what=f"{found.what} over all rows")


def _dims_of_sum(value: Value) -> list[int] | None:
    """The dimensions of a sum or mean; None unless they are one or all."""
    rank = value.args[0].rank
    if value.op in (aten.sum.default, aten.mean.default):
        return list(range(rank))
    dims = value.args[1]
    if not isinstance(dims, list) or len(dims) not in (1, rank):
        return None
    return [dim % rank for dim in dims]


def _of_summands(summands: Value, replay: AtenReplay) -> Reading | None:
    """The sum over the classes; None if it is none of the statistics."""
    inner, factor = unscaled(summands, replay)
    if inner.op is aten.special_entr.default:
        softmax = multiple_of_softmax(inner.args[0], replay, logarithm=False)
        if softmax is None or softmax.factor != 1:
            return None
        return Reading(softmax.logits, softmax.dim, {ENTROPY: factor}, what="entropy")
    logits = softmax_of(inner, replay, logarithm=True)
    if logits is not None:
        rows, dim = logits
        classes = rows.fake.shape[dim]
        if not isinstance(classes, int):
            return None
        terms = {TOTAL: factor, LOGSUMEXP: -factor * classes}
        return Reading(rows, dim, terms, what="sum of log-probabilities")
    squared = _squared(inner, replay)
    if squared is not None:
        softmax = multiple_of_softmax(squared, replay, logarithm=False)
        if softmax is not None:
            factor *= softmax.factor**2
            return Reading(softmax.logits, softmax.dim, {LOG_SQUARES: 1.0}, factor, what=_SQUARES)
    if inner.op is not aten.mul.Tensor or not all(isinstance(a, Value) for a in inner.args[:2]):
        return None
    for one, other in (inner.args, inner.args[::-1]):
        if not same_sizes(one.fake.shape, other.fake.shape):
            return None
        found = _of_product(one, other, replay)
        if found is not None:
            return _times(found, factor)
    return None


_SQUARES = "sum of squared probabilities"


def _squared(value: Value, replay: AtenReplay) -> Value | None:
    """What a square is of; None if it is none."""
    if value.op is aten.pow.Tensor_Scalar and value.args[1] == 2:
        return value.args[0]
    if value.op is not aten.mul.Tensor or not all(isinstance(a, Value) for a in value.args[:2]):
        return None
    one, other = value.args[:2]
    return one if replay.same(one, other) else None


def _of_product(one: Value, other: Value, replay: AtenReplay) -> Reading | None:
    """The sum over the classes of a product of probabilities, or of a one-hot target."""
    classes = one_hot_classes(one, replay)
    if classes is not None:
        return _pick(other, other.rank - 1, classes, replay)
    found = multiple_of_softmax(one, replay, logarithm=False)
    if found is None:
        return None
    logits, dim, factor = found.logits, found.dim, found.factor
    other = unbounded(other, replay)
    logarithms = multiple_of_softmax(other, replay, logarithm=True)
    if logarithms is not None and logarithms.dim == dim:
        if not replay.same(logits, logarithms.logits):
            return None
        return Reading(logits, dim, {ENTROPY: -factor * logarithms.factor}, what="entropy")
    if replay.same(logits, other):
        terms = {LOGSUMEXP: factor, ENTROPY: -factor}
        return Reading(other, dim, terms, what="expected logit")
    return None


def _sum_of_row(value: Value, replay: AtenReplay) -> Reading | None:
    """Of the logits of each row. What else is summed up has to be made of them by itself."""
    dims, dtype = _dims_of_sum(value), value.kwargs.get("dtype")
    if dims is None or len(dims) != 1 or (dtype is not None and not dtype.is_floating_point):
        return None
    try:
        logits = logits_of(value.args[0].argument, replay)
    except NotAbsorbedError:
        return None
    (dim,) = dims
    classes, factor = value.args[0].fake.shape[dim], 1.0
    if logits is None or logits.class_dim != dim or not isinstance(classes, int) or not classes:
        return None
    if value.op is aten.mean.dim:
        factor = 1 / classes
    return Reading(value.args[0], dim, {TOTAL: factor}, what="sum of the logits")


def _sum_of_all(value: Value) -> Reading | None:
    """Of all logits, as some steps log their mean."""
    logits = value.args[0]
    classes, factor = logits.fake.shape[-1], 1.0
    if value.kwargs.get("dtype") is not None or not isinstance(classes, int) or not classes:
        return None
    if value.op is aten.mean.default:
        factor = 1 / classes
    what = "sum of the logits"
    return Reading(logits, logits.rank - 1, {TOTAL: factor}, over_rows=value.op, what=what)


def _spread(value: Value, replay: AtenReplay) -> Reading | None:
    """A variance or standard deviation of each row of logits, or of all of them."""
    logits, *dims = value.args
    over = [dim % logits.rank for dim in (dims[0] if dims and dims[0] else range(logits.rank))]
    try:
        found = logits_of(logits.argument, replay)
    except NotAbsorbedError:
        return None
    if found is None or len(over) not in (1, logits.rank) or found.class_dim not in over:
        return None
    classes, correction = logits.fake.shape[found.class_dim], value.kwargs.get("correction")
    if not isinstance(classes, int) or not classes:
        return None
    correction = 1.0 if correction is None else float(correction)
    of_all, is_root = len(over) > 1, value.op is aten.std.correction
    terms = {VARIANCE: 1.0, TOTAL: 1.0} if of_all else {VARIANCE: 1.0}
    what = f"{'standard deviation' if is_root else 'variance'} of the logits"
    what += " over all rows" if of_all else ""
    spread = Spread(of_all, is_root, correction)
    return Reading(logits, found.class_dim, terms, spread=spread, what=what)
