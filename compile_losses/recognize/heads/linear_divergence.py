"""A divergence of a linear layer's output from a teacher's: one op, which never holds the logits.

The teacher has no gradient. If nothing else reads the teacher's logits and their layer can be taken
along, they are computed a chunk at a time, as the student's are. Otherwise the op reads them as
they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from compile_losses.distributed import are_dtensors
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.row_divergences import tensors_beside
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.symbolic_tensors import Value, has_gradient, whole
from compile_losses.recognize.guards import refusal
from compile_losses.recognize.heads.head import NotAbsorbedError, computed
from compile_losses.recognize.heads.logits import Logits, find_logits, logits_of
from compile_losses.recognize.heads.with_head import check_copy, check_gain, check_rows, loss_dtype
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.returned_logits import lazy_outputs
from compile_losses.request import Request


def take_divergence(match: Match, replay: AtenReplay, request: Request) -> Match | None:
    """The match of a divergence with the layer of the student's logits, or with both layers."""
    reverse = _is_reverse(match)
    student, teacher = (1, 0) if reverse else (0, 1)
    logits = find_logits(match, replay, student)
    if logits is None:
        return None
    _check(match, logits)
    if _is_trained(match) and has_gradient(match.args[teacher]):
        raise NotAbsorbedError("both rows of logits need a gradient, and the op gives one")
    if reverse and match.op != "softmax_kl_div":
        raise NotAbsorbedError("only its second row of logits needs a gradient")

    def taken(of_teacher: Logits | None) -> Match:
        _check_gain(match, logits, of_teacher, reverse, request)
        check_rows(match, match.args[2], logits, request)
        found = _match(match, logits, of_teacher, reverse)
        found.returned = lazy_outputs(logits.head, logits.outputs, replay, request.lazily)
        found.notes = [*found.notes, *["the logits are returned lazily"] * bool(found.returned)]
        return found

    held = None
    try:
        of_teacher = find_logits(match, replay, teacher)
        if of_teacher is not None:
            _check(match, of_teacher)
            check_copy(of_teacher)
            if of_teacher.outputs:
                raise NotAbsorbedError(
                    "they are returned: a step that returns its loss alone holds none"
                )
            found = taken(of_teacher)
            held = refusal(found)
            if held is None:
                return found
    except NotAbsorbedError as error:
        held = str(error)
    if held is not None and may_be_read_apart(match.args[teacher], replay, request):
        raise NotAbsorbedError("others read its teacher, too, which a call of row statistics takes")
    found = taken(None)
    if held is not None:
        found.notes = [*found.notes, f"the teacher's logits are held: {held}"]
    return found


def may_be_read_apart(teacher: Any, replay: AtenReplay, request: Request) -> bool:
    """Whether a teacher's logits that others read, too, may be computed once for these, and once
    more for what the student is compared with: that is a small part of them."""
    try:
        found = logits_of(teacher, replay)
    except NotAbsorbedError:
        return False
    if found is None or has_gradient(teacher):
        return False
    way = set(found.way)
    if not any(user not in way for user in found.head.node.users):
        return False  # one reader alone
    picked, whole = found.weight.fake.shape[0], example(found.head.node).shape[-1]
    return request.prefer_memory or bool(2 * picked <= whole)


def _check_gain(
    match: Match, logits: Logits, of_teacher: Logits | None, reverse: bool, request: Request
) -> None:
    """As ``check_gain``, with what the op holds beside the student's logits."""
    given = match.args[0 if reverse else 1]
    beside = tensors_beside(
        example(logits.head.node).dtype,
        example(given if of_teacher is None else of_teacher.head.node).dtype,
        computed=of_teacher is not None,
        by_row=match.args[2] == REDUCTIONS["none"],
        reverse=reverse,
        gradient=_is_trained(match),
    )
    check_gain(match, logits, request, beside)


def _is_reverse(match: Match) -> bool:
    """Whether the student's logits are the second argument: only that one has a gradient then."""
    first, second = map(has_gradient, match.args[:2])
    return _is_trained(match) and second and not first


def _is_trained(match: Match) -> bool:
    return bool(example(match.root).requires_grad)


def _check(match: Match, logits: Logits) -> None:
    """Checks that a layer makes logits whose rows the op can compare."""
    if logits.softcap is not None:
        raise NotAbsorbedError("a soft-cap of its logits, which a call of row statistics takes")
    check_no_dtensors(logits)
    dim, rank = match.kwargs.get("dim", -1), logits.input.fake.dim()
    if not logits.class_dim == rank - 1 == dim % rank:
        raise NotAbsorbedError(
            "its classes are not the last dimension: with these last its layer is taken"
        )


def check_no_dtensors(logits: Logits) -> None:
    if are_dtensors(logits.input.fake) or are_dtensors(logits.weight.fake):
        raise NotAbsorbedError("DTensors, which the op takes in calls alone")


def _match(match: Match, logits: Logits, of_teacher: Logits | None, reverse: bool) -> Match:
    """The match of loss, student's layer and, if it is taken along, teacher's layer."""
    target = match.args[0 if reverse else 1]
    given: dict[str, Any] = {}
    if of_teacher is not None:
        target = without_gradient(of_teacher.input)
        given["target_weight"] = without_gradient(of_teacher.weight)
        if of_teacher.bias is not None:
            given["target_bias"] = without_gradient(of_teacher.bias)
    elif has_gradient(target):
        target = without_gradient(target if isinstance(target, Value) else whole(target))
    if logits.bias is not None:
        given["linear_bias"] = logits.bias.argument
    if reverse:
        given["reverse"] = True
    options = {k: v for k, v in match.kwargs.items() if k in ("beta", "temperature")}
    return Match(
        match.root,
        f"linear_{match.op}",
        (logits.input.argument, logits.weight.argument, target, match.args[2]),
        {**given, **options, "dtype": _loss_dtype(match)},
        list(dict.fromkeys([*match.interior, *logits.way])),
        _absorbed(match, logits, of_teacher),
        match.steps,
        match.notes,
        detached=[] if of_teacher is None else of_teacher.way,
    )


def _absorbed(match: Match, logits: Logits, of_teacher: Logits | None) -> list[str]:
    layers = "a linear layer" if of_teacher is None else "the linear layers of student and teacher"
    more = [] if of_teacher is None else of_teacher.absorbed
    return list(dict.fromkeys([layers, *match.absorbed, *logits.absorbed, *more]))


def without_gradient(value: Value) -> Node | Value:
    """A tensor without a gradient: the original has none, even if the layer's weights have."""
    if not has_gradient(value.argument):
        return value.argument
    return computed(aten.detach.default, value).argument


def _loss_dtype(match: Match) -> torch.dtype:
    if match.steps and "dtype" not in match.kwargs:
        return torch.promote_types(*(example(argument).dtype for argument in match.args[:2]))
    return loss_dtype(match)
