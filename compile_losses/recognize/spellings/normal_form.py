"""The normal form of a loss: ``scale * sum(weights * body)``.

Means, sums, views, constant factors and weights are peeled off a root, from the outside in. Each
step leaves a form whose body may be that of a loss; the families decide that. The scale is kept as
integers and symbols, so that ``.sum() / a.numel()`` is a mean under dynamic shapes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.op_traits import MEANS, ONES, PRODUCTS, RESHAPES, SCALINGS, TOTALS, TURNS
from compile_losses.recognize.graph.aten_replay import AtenReplay, compute, same_sizes
from compile_losses.recognize.graph.constants import constant
from compile_losses.recognize.graph.symbolic_tensors import Size, Value, example

aten = torch.ops.aten

#: Clones are of ``contiguous()`` and ``reshape()``. Behind a detach nothing has gradients.
_VIEWS = (*RESHAPES, *ONES, *TURNS, aten.alias.default, aten.clone.default)
_NORM = aten.linalg_vector_norm.default

Steps = list[tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass(frozen=True)
class Selection:
    """``body[mask]``, for a mask of the body's leading dimensions.

    Attributes:
        mean: whether the sum is divided by the number that the mask takes.
    """

    mask: Value
    mean: bool


@dataclass(frozen=True)
class NormalForm:
    """``root == constant * numerator / denominator * sum(weights * body)``.

    Attributes:
        root: the Value that holds the loss.
        body: the tensor that is left of it.
        weights: tensors, broadcast with the body, that its elements are multiplied by.
        reduced: the dimensions added up and whether they are kept, for each sum or mean on the way;
            None for all dimensions.
        views: whether elements were rearranged on the way.
        selection: the part of the body that is summed, if that is not all of it.
    """

    root: Value
    body: Value
    constant: float = 1.0
    numerator: Any = 1
    denominator: Any = 1
    weights: tuple[Value, ...] = ()
    reduced: tuple[tuple[tuple[int, ...] | None, bool], ...] = ()
    views: bool = False
    selection: Selection | None = None

    def scale(self, counts: dict[str, Any], sized: list[Node]) -> tuple[str, Steps] | None:
        """The op's reduction that gives the scale, and the steps that remain after it; None if the
        graph has no sizes that give it.

        Args:
            counts: the divisor of each reduction of the op.
            sized: tensors whose sizes may express the remaining divisor.
        """
        constant, numerator, denominator = self.constant, self.numerator, self.denominator
        divisors: list[Size] = []
        exact = [
            r for r, n in counts.items() if statically_known_true(numerator * n == denominator)
        ]
        reduction = exact[0] if exact else "sum"
        if not exact:
            if isinstance(numerator, int) and isinstance(denominator, int):
                if denominator == 0:
                    return None
                constant = constant * numerator / denominator
            elif not statically_known_true(numerator == denominator):
                found = _as_sizes(numerator, denominator, sized)
                if found is None:
                    return None
                divisors = found
        steps: Steps = [(torch.mul, (constant,))] if constant not in (1.0, -1.0) else []
        steps += [(torch.neg, ())] if constant == -1.0 else []
        return reduction, steps + [(torch.div, (size,)) for size in divisors]


@dataclass
class Written:
    """A loss found in a normal form: ``root == scale of the form * op(*args, **kwargs)``.

    Attributes:
        counts: the divisor of each reduction of the op.
        each: whether the root holds a number for each row, instead of their sum.
        last: the steps that then change the shape.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    form: NormalForm = field(kw_only=True)
    counts: dict[str, Any] = field(kw_only=True)
    each: bool = field(kw_only=True, default=False)
    last: Steps = field(kw_only=True, default_factory=list)


def normal_forms(node: Node, replay: AtenReplay) -> Iterator[NormalForm]:
    """Every form of a node, the one with the largest body first."""
    root = replay.of(node)
    yield from _forms(NormalForm(root, root), replay)


def added_forms(form: NormalForm, replay: AtenReplay) -> Iterator[tuple[NormalForm, NormalForm]]:
    """Forms of both parts of a sum, if these are reduced alike. The body of the whole is then the
    sum of both bodies, each times its constant."""
    value = form.body
    if value.op not in (aten.add.Tensor, aten.sub.Tensor) or value.kwargs or form.weights:
        return
    parts = value.args[:2]
    if not all(isinstance(p, Value) and same_sizes(p.fake.shape, value.fake.shape) for p in parts):
        return
    sign = 1.0 if value.op is aten.add.Tensor else -1.0
    left = _forms(replace(form, body=parts[0]), replay)
    right = [*_forms(replace(form, body=parts[1], constant=form.constant * sign), replay)]
    for one in left:
        for other in right:
            if (
                len(one.reduced) > len(form.reduced)
                and one.reduced == other.reduced
                and not (one.weights or other.weights)
                and same_sizes(one.body.fake.shape, other.body.fake.shape)
                and statically_known_true(
                    one.numerator * other.denominator == other.numerator * one.denominator
                )
            ):
                yield one, other


def _forms(form: NormalForm, replay: AtenReplay) -> Iterator[NormalForm]:
    """A form and all that it can be peeled to, depth first."""
    waiting = [form]
    while waiting:
        form = waiting.pop()
        form = replace(form, body=replay.resolve(form.body))
        yield form
        waiting += reversed(_peel(form, replay))


def sums_classes(form: NormalForm) -> tuple[int, ...] | None:
    """The dimensions added up first; None if there are none or the root holds more than rows."""
    if not form.reduced or (form.root.fake.dim() > 0 and len(form.reduced) > 1):
        return None
    dims, keep = form.reduced[-1]
    if form.root.fake.dim() > 0 and (keep or dims is None or len(dims) != 1):
        return None
    return tuple(range(form.body.fake.dim())) if dims is None else dims


def _peel(form: NormalForm, replay: AtenReplay) -> list[NormalForm]:
    """The forms that are left once the op of the body is taken off; none if it can't be."""
    value = form.body
    if value.op is None or value.kwargs.get("dtype") is not None:
        return []
    if form.selection is not None:
        return _scaling(form, replay) if value.op in SCALINGS else []
    whole = form.root.fake.dim() == 0
    if value.op is aten.index.Tensor:
        return _selection(form) if whole and form.reduced and not form.weights else []
    if value.op in (*TOTALS, *MEANS):
        return _reduction(form, replay) if whole or not form.reduced else []
    if value.op in _VIEWS:
        # Before the last sum the order of elements does not matter; after it there is one element.
        movable = whole and (form.reduced or value.fake.numel() == 1)
        if not movable or value.kwargs.get("memory_format") not in (None, torch.contiguous_format):
            return []
        return _view(form, value.args[0])
    if value.op in SCALINGS:
        return _scaling(form, replay)
    if value.op is aten.pow.Tensor_Scalar and _is_two(value.args[1]) and not form.reduced:
        norm = replay.resolve(value.args[0])
        if whole and _is_two_norm(norm):  # the square of a norm is a sum of squares
            inner = norm.args[0]
            square = Value(inner.fake, norm.node, aten.pow.Tensor_Scalar, (inner, 2))
            return [replace(form, body=square, reduced=((None, False),))]
    return []


def _reduction(form: NormalForm, replay: AtenReplay) -> list[NormalForm]:
    """The form under a sum or a mean, with its weights aligned; none if they can't be."""
    value = form.body
    inner = value.args[0]
    shape = inner.fake.shape
    named = value.op in (aten.sum.dim_IntList, aten.mean.dim) and value.args[1] and shape
    dims = tuple(sorted(d % len(shape) for d in value.args[1])) if named else None
    keep = len(value.args) > 2 and bool(value.args[2])
    denominator = form.denominator
    if value.op in MEANS:
        denominator = denominator * math.prod(shape[d] for d in dims or range(len(shape)))
    weights = []
    for weight in form.weights:
        aligned: Value | None = weight
        for dim in dims if dims and not keep and weight.fake.dim() > 0 else ():
            aligned = aligned and compute(aten.unsqueeze.default, aligned, dim)
        if aligned is None:
            return []
        weights.append(aligned)
    return [
        replace(
            form,
            body=inner,
            denominator=denominator,
            weights=tuple(weights),
            reduced=(*form.reduced, (dims, keep)),
        )
    ]


def _selection(form: NormalForm) -> list[NormalForm]:
    """Elements, or rows, taken by a mask. Only a count of the mask gives their number."""
    value = form.body
    inner, indices = value.args
    mask = indices[0]
    if len(indices) != 1 or not isinstance(mask, Value) or mask.fake.dtype != torch.bool:
        return []
    masked = mask.fake.dim()
    if masked == 0 or not same_sizes(mask.fake.shape, inner.fake.shape[:masked]):
        return []
    # In the replay the number that the mask takes is another symbol.
    count, *rest = example(value.node).shape if value.whole else value.fake.shape
    mean = False
    for each in {1, math.prod(rest)}:
        if statically_known_true(form.denominator == form.numerator * each * count):
            form, mean = replace(form, numerator=1, denominator=each), True
            break
    dims, keep = form.reduced[-1]
    if dims is not None:  # dimension 0 stands for all of the mask's
        others = tuple(d + masked - 1 for d in dims if d > 0)
        dims = (*range(masked), *others) if 0 in dims else others
    reduced = (*form.reduced[:-1], (dims, keep))
    return [replace(form, body=inner, reduced=reduced, selection=Selection(mask, mean))]


def _view(form: NormalForm, inner: Value) -> list[NormalForm]:
    """Weights must be viewed the other way round."""
    weights = []
    for weight in form.weights:
        aligned = _unviewed(weight, form.body, inner)
        if aligned is None:
            return []
        weights.append(aligned)
    return [replace(form, body=inner, weights=tuple(weights), views=True)]


def _unviewed(weight: Value, after: Value, before: Value) -> Value | None:
    """A weight as before a view, None if unknown. It is known if the view merged or split
    dimensions along which the weight is the same."""
    if after.op is aten.clone.default:
        return weight
    if after.op not in RESHAPES:
        return None
    shape = weight.fake.shape
    if same_sizes(shape, after.fake.shape):
        return compute(aten.view.default, weight, list(before.fake.shape))
    rows = 0
    while rows < len(shape) and not statically_known_true(shape[rows] == 1):
        rows += 1
    if not all(statically_known_true(size == 1) for size in shape[rows:]):
        return None
    if not same_sizes(after.fake.shape[:rows], before.fake.shape[:rows]):
        return None
    aligned: Value | None = weight
    while aligned and aligned.fake.dim() > before.fake.dim():
        aligned = compute(aten.squeeze.dim, aligned, -1)
    while aligned and aligned.fake.dim() < before.fake.dim():
        aligned = compute(aten.unsqueeze.default, aligned, -1)
    return aligned


def _scaling(form: NormalForm, replay: AtenReplay) -> list[NormalForm]:
    """Takes a factor off a product, a quotient or a negation: a number, a symbol or a weight."""
    value = form.body
    if value.op is aten.neg.default:
        return [replace(form, body=value.args[0], constant=-form.constant)]
    left, right = value.args[:2]
    multiplies = value.op in PRODUCTS
    if multiplies and not isinstance(_number(left, value, replay), Value):
        left, right = right, left
    right = _number(right, value, replay)
    if not isinstance(left, Value):
        return []
    if isinstance(right, Value):
        if form.selection is not None:
            return []
        return _weights(form, left, right, multiplies, replay)
    if isinstance(right, bool):
        return []
    if isinstance(right, int | torch.SymInt):
        if multiplies:
            return [replace(form, body=left, numerator=form.numerator * right)]
        return [replace(form, body=left, denominator=form.denominator * right)]
    if isinstance(right, float) and (multiplies or right != 0):
        changed = form.constant * right if multiplies else form.constant / right
        return [replace(form, body=left, constant=changed)]
    return []


def _number(factor: Any, value: Value, replay: AtenReplay) -> Any:
    """A factor as a number, if it is a tensor that certainly holds one."""
    known = constant(factor, value.fake.dtype, replay) if isinstance(factor, Value) else None
    return factor if known is None else known


def _weights(
    form: NormalForm, left: Value, right: Value, multiplies: bool, replay: AtenReplay
) -> list[NormalForm]:
    """The forms of either factor as the body, with the other one as a weight: of all elements, or
    of each row whose classes are added up."""
    if not form.reduced or "rounding_mode" in form.body.kwargs:
        return []
    added = sums_classes(form) if form.root.fake.dim() > 0 else ()
    if added is None:
        return []
    forms = []
    pairs = [(left, right), (right, left)] if multiplies else [(left, right)]
    for body, factor in pairs:
        weight: Value | None = factor
        if not multiplies:
            if factor.fake.dtype == torch.float16:  # whose reciprocals leave its range
                weight = compute(aten.to.dtype, factor, torch.float32)
            weight = weight and compute(aten.reciprocal.default, weight)
        elif not factor.fake.is_floating_point():
            weight = compute(_CAST, factor, body.fake.dtype)
        while weight is not None and weight.fake.dim() < form.body.fake.dim():
            weight = compute(aten.unsqueeze.default, weight, 0)
        # A factor that enlarges the body would repeat the body's elements in the sum.
        if weight is None or not same_sizes(body.fake.shape, form.body.fake.shape):
            continue
        if any(weight.fake.shape[dim] != 1 for dim in added):
            continue
        if body.fake.is_floating_point() and weight.fake.is_floating_point():
            forms.append(replace(form, body=body, weights=(*form.weights, weight)))
    return forms


_CAST = torch.ops.prims.convert_element_type.default


def _is_two(number: Any) -> bool:
    return isinstance(number, int | float) and number == 2  # comparing a symbol would add a guard


def _is_two_norm(value: Value) -> bool:
    if value.op is not _NORM:
        return False
    order = value.args[1] if len(value.args) > 1 else value.kwargs.get("ord", 2)
    return _is_two(order) and value.fake.dim() == 0 and value.kwargs.get("dtype") is None


def _as_sizes(numerator: Any, denominator: Any, sized: list[Node]) -> list[Size] | None:
    """The sizes of one tensor whose product is the reciprocal of a symbolic quotient; None if there
    are none."""
    for node in sized:
        shape = example(node).shape
        for many in range(1, len(shape) + 1):
            for dims in combinations(range(len(shape)), many):
                product = math.prod(shape[d] for d in dims)
                if statically_known_true(numerator * product == denominator):
                    return [Size(node, d) for d in dims]
    return None
