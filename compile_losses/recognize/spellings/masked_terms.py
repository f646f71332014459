"""Losses that leave out terms by their value: those of infinite logits, for which there is an op,
and terms that are nan, for which there is none.

``masked_fill(q * log_p, isinf(x), 0)`` has no term where x is infinite. The sum of such terms is
``softmax_finite_kl_div`` if all masks test the logits that this op tests, and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from torch import promote_types

from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.recognize.spellings.divergence import divergence_of_rows
from compile_losses.recognize.spellings.normal_form import NormalForm, Written, sums_classes
from compile_losses.recognize.spellings.polynomial import exp, log_softmax, softmax_pairs
from compile_losses.recognize.spellings.softmax_algebra import SoftmaxAlgebra
from compile_losses.torch_internals.ops import packet_of

INFINITE = "its mask of infinities makes it another loss than softmax_finite_kl_div"
NAN = "terms that are nan are left out, and make the op's loss nan"

_TESTS = {aten.isinf, aten.isnan, aten.isfinite, aten.isposinf, aten.isneginf}
_OR = {aten.logical_or, aten.bitwise_or}
_LOGICAL = _OR | {aten.logical_not, aten.logical_and, aten.bitwise_not, aten.bitwise_and}
_SUMS = {aten.add, aten.sub, aten.neg, aten.mul}
_COPIES = {aten.alias, aten.detach, aten.clone}
_DEEPEST = 4


@dataclass(frozen=True)
class LeftOut:
    """A form without the masks that set its terms to 0 at infinities.

    Attributes:
        form: without them.
        tested: the keys of the tensors at whose infinities, and there alone, all terms are left
            out; None if that can't be told.
    """

    form: NormalForm
    tested: frozenset[Hashable] | None


def without_infinities(form: NormalForm, replay: AtenReplay) -> LeftOut | None:
    """A form without the masks that set its body to 0 at infinities; None if it has none."""
    masks: list[Value | None] = []
    body = _kept(form.body, replay, masks, 0)
    if body is form.body:
        return None
    found = [None if mask is None else _tested(mask, replay, 0) for mask in masks]
    tested = found[0] if all(each == found[0] for each in found) else None
    return LeftOut(replace(form, body=body), tested)


def finite_divergences(found: LeftOut, algebra: SoftmaxAlgebra) -> Iterator[Written]:
    """The divergences of finite logits that a sum over the classes may be."""
    form = found.form
    if found.tested is None or form.weights:
        return
    if form.selection is None and sums_classes(form) is None:
        return
    polynomial = algebra.of(form.body)
    for x, z, dim in softmax_pairs(polynomial):
        log_p, log_q = log_softmax(x, dim), log_softmax(z, dim)
        rows = [algebra.value(key, form.root.node) for key in (x, z)]
        of_input, of_target = (row and _untransformed(row, algebra.replay) for row in rows)
        # In a cross entropy a target logit of -inf adds 0 without a mask. A mask of target's
        # infinities would leave out +inf as well, whose row is nan in the op.
        for entropy, tested in (True, {of_input, of_target}), (False, {of_input}):
            terms = log_q - log_p if entropy else log_p * -1.0
            scale = polynomial.ratio(exp(log_q) * terms)
            if scale is not None and found.tested == tested:
                scaled = replace(form, constant=form.constant * scale)
                options = {} if entropy else {"entropy": False}
                yield from divergence_of_rows(
                    "softmax_finite_kl_div", scaled, x, z, dim, options, algebra
                )


def without_nan(value: Value, replay: AtenReplay) -> NormalForm | None:
    """The form of a ``nansum`` or ``nanmean`` of all elements, nan included; else None."""
    node = value.node
    if len(node.args) != 1 or node.kwargs or not node.all_input_nodes:
        return None
    body = replay.of(node.all_input_nodes[0])
    return NormalForm(value, body, reduced=((None, False),))


def _kept(value: Value, replay: AtenReplay, masks: list[Value | None], depth: int) -> Value:
    """A value without masks at infinities. Appends the mask of each term, None if it has none."""
    resolved = replay.resolve(value)
    if resolved.op is None or depth > _DEEPEST:
        masks.append(None)
        return value
    packet, args = packet_of(resolved.op), resolved.args
    if packet is aten.masked_fill and args[2] == 0 and _tests_infinity(args[1], replay, 0):
        masks.append(args[1])
        return replay.resolve(args[0])
    if packet in _SUMS:
        kept = [_kept(a, replay, masks, depth + 1) if isinstance(a, Value) else a for a in args]
        if any(new is not old for new, old in zip(kept, args, strict=True)):
            return Value(resolved.fake, resolved.node, resolved.op, tuple(kept), resolved.kwargs)
    masks.append(None)
    return value


def _tests_infinity(mask: Value, replay: AtenReplay, depth: int) -> bool:
    """Whether a mask is made of tests for infinities or nan, at least in part."""
    mask = replay.resolve(mask)
    if mask.op is None or depth > _DEEPEST:
        return False
    if packet_of(mask.op) in _TESTS:
        return True
    return packet_of(mask.op) in _LOGICAL and any(
        _tests_infinity(argument, replay, depth + 1)
        for argument in mask.args
        if isinstance(argument, Value)
    )


def _tested(mask: Value, replay: AtenReplay, depth: int) -> frozenset[Hashable] | None:
    """The keys of the tensors one of which is infinite where a mask is true; else None."""
    mask = replay.resolve(mask)
    if mask.op is None or depth > _DEEPEST:
        return None
    if packet_of(mask.op) is aten.isinf:
        return frozenset({_untransformed(mask.args[0], replay)})
    if packet_of(mask.op) not in _OR:
        return None
    parts = [_tested(argument, replay, depth + 1) for argument in mask.args]
    return None if None in parts else frozenset().union(*(part or () for part in parts))


def _untransformed(value: Value, replay: AtenReplay) -> Hashable:
    """The key of a tensor before copies, casts that make it wider and factors that make it no
    larger. It is infinite where the tensor is."""
    while True:
        value = replay.resolve(value)
        if value.op is None or not value.args or not isinstance(value.args[0], Value):
            return replay.key(value)
        inner = value.args[0]
        if not _keeps_infinities(value, inner):
            return replay.key(value)
        value = inner


def _keeps_infinities(value: Value, inner: Value) -> bool:
    """Whether an op's result is infinite where its argument is, and nowhere else."""
    packet = packet_of(value.op)
    if packet in _COPIES:
        return True
    if packet is aten._to_copy:
        old, new = inner.fake.dtype, value.fake.dtype
        return inner.fake.is_floating_point() and promote_types(old, new) == new
    factor = value.args[1] if len(value.args) > 1 else None
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor == 0:
        return False
    if packet is aten.div and "rounding_mode" not in value.kwargs:
        return abs(factor) >= 1
    return packet is aten.mul and abs(factor) <= 1
