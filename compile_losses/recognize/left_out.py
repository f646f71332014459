"""Losses that leave out terms by their value. No op does that, so they are declined."""

from __future__ import annotations

from dataclasses import replace

from compile_losses.recognize.aten_replay import AtenReplay, aten
from compile_losses.recognize.normal_form import NormalForm
from compile_losses.recognize.symbolic_tensors import Value
from compile_losses.torch_internals.ops import packet_of

INFINITE = "terms of infinite logits count as 0, and as nan in the op"
NAN = "terms that are nan are left out, and make the op's loss nan"

_TESTS = {aten.isinf, aten.isnan, aten.isfinite, aten.isposinf, aten.isneginf}
_LOGICAL = {
    *(aten.logical_not, aten.logical_or, aten.logical_and),
    *(aten.bitwise_not, aten.bitwise_or, aten.bitwise_and),
}
_SUMS = {aten.add, aten.sub, aten.neg, aten.mul}
_DEEPEST = 4


def without_infinities(form: NormalForm, replay: AtenReplay) -> NormalForm | None:
    """A form without the masks that set its body to 0 at infinities; None if it has none."""
    body = _kept(form.body, replay, 0)
    return None if body is form.body else replace(form, body=body)


def without_nan(value: Value, replay: AtenReplay) -> NormalForm | None:
    """The form of a ``nansum`` or ``nanmean`` of all elements, nan included."""
    node = value.node
    if len(node.args) != 1 or node.kwargs or not node.all_input_nodes:
        return None
    body = replay.of(node.all_input_nodes[0])
    return NormalForm(value, body, reduced=((None, False),))


def _kept(value: Value, replay: AtenReplay, depth: int) -> Value:
    resolved = replay.resolve(value)
    if resolved.op is None or depth > _DEEPEST:
        return value
    packet, args = packet_of(resolved.op), resolved.args
    if packet is aten.masked_fill and args[2] == 0 and _tests_infinity(args[1], replay, 0):
        return replay.resolve(args[0])
    if packet in _SUMS:
        kept = [_kept(a, replay, depth + 1) if isinstance(a, Value) else a for a in args]
        if any(new is not old for new, old in zip(kept, args, strict=True)):
            return Value(resolved.fake, resolved.node, resolved.op, tuple(kept), resolved.kwargs)
    return value


def _tests_infinity(mask: Value, replay: AtenReplay, depth: int) -> bool:
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
