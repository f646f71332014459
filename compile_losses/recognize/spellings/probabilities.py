"""Losses of probabilities: cross entropy and Kullback-Leibler divergence, written out.

A body becomes a polynomial (:mod:`compile_losses.recognize.spellings.softmax_algebra`). It is
compared with the polynomial of each loss, for every choice of arguments among the body's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch

from compile_losses.ops.checks import NOTHING_IGNORED
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, compute, same_sizes
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.recognize.spellings.divergence import softmax_divergences
from compile_losses.recognize.spellings.normal_form import NormalForm, Steps, Written, sums_classes
from compile_losses.recognize.spellings.polynomial import (
    OpaqueError,
    Polynomial,
    atom,
    exp,
    log_softmax,
    selected,
)
from compile_losses.recognize.spellings.softmax_algebra import SoftmaxAlgebra
from compile_losses.torch_internals.ops import packet_of

#: The bodies that are looked for: q and p are probabilities, x and z logits, t a class index.
BODIES = [
    (
        "cross_entropy",
        "logsumexp(x) - x[t] of each row; sum over classes of -one_hot(t) log_softmax(x)",
    ),
    ("cross_entropy", "sum over classes of -q log_softmax(x), where the op takes probabilities"),
    ("softmax_kl_div", "sum over classes of softmax(z) (log_softmax(z) - log_softmax(x))"),
    (
        "softmax_js_div",
        "sum over classes of b q (log q - log m) + (1 - b) p (log p - log m), with p = softmax(x), "
        "q = softmax(z) and m = (1 - b) p + b q",
    ),
    (
        "softmax_finite_kl_div",
        "sum over classes of softmax(z) (log_softmax(z) - log_softmax(x)) where neither x nor z is "
        "infinite; sum over classes of -softmax(z) log_softmax(x) where x is not infinite",
    ),
    ("kl_div", "q (log q - log p), with either argument as it is or as a logarithm"),
]


def written_probabilities(form: NormalForm, algebra: SoftmaxAlgebra) -> Iterator[Written]:
    """The losses of probabilities that a form may be."""
    if form.weights:
        return
    polynomial = algebra.of(form.body)
    if not {found[0] for found in polynomial.atoms()} & {"lse", "log", "exp", "one_hot"}:
        return
    if form.selection is not None:
        yield from softmax_divergences(form, polynomial, algebra)
        return
    yield from _cross_entropy_of_rows(form, polynomial, algebra)
    yield from _cross_entropy_of_one_hot(form, polynomial, algebra)
    if sums_classes(form) is not None:
        yield from softmax_divergences(form, polynomial, algebra)
        yield from _soft_cross_entropy(form, polynomial, algebra)
        yield from _divergence(form, polynomial, algebra)


def _cross_entropy_of_rows(
    form: NormalForm, polynomial: Polynomial, algebra: SoftmaxAlgebra
) -> Iterator[Written]:
    """logsumexp(x) - x[target], for each row."""
    if len(polynomial) != 2 or (form.reduced and form.root.fake.dim() > 0):
        return
    for lse in [found for found in polynomial.atoms() if found[0] == "lse"]:
        for pick in [found for found in polynomial.atoms() if found[0] == "pick"]:
            _, key, dim = lse
            scale = polynomial.ratio(atom(lse) - atom(pick))
            if scale is None or (pick[1], pick[3]) != (key, dim):
                continue
            x, target = (algebra.value(k, form.root.node) for k in (key, pick[2]))
            if x is None or target is None:
                continue
            found = _class_indices(form, scale, x, target, dim, algebra.replay)
            if found is not None:
                yield found


def _cross_entropy_of_one_hot(
    form: NormalForm, polynomial: Polynomial, algebra: SoftmaxAlgebra
) -> Iterator[Written]:
    """sum(one_hot(target) * (logsumexp(x) - x)) over the classes."""
    dims = sums_classes(form)
    for hot in [found for found in polynomial.atoms() if found[0] == "one_hot"]:
        if dims is None or hot[2] not in dims:
            continue
        rows = selected(polynomial, hot[2])
        if rows is None:
            continue
        # After the sum over classes, the sum over rows is left.
        whole = form.root.fake.dim() == 0
        reduced = form.reduced if whole and (len(dims) > 1 or len(form.reduced) > 1) else ()
        shape = list(form.body.fake.shape)
        size = shape.pop(hot[2])
        if not isinstance(size, int):
            continue
        yield from _cross_entropy_of_rows(replace(form, reduced=reduced), rows, algebra)


def _class_indices(
    form: NormalForm, scale: float, x: Value, target: Value, dim: int, replay: AtenReplay
) -> Written | None:
    """The cross entropy of these logits and targets; None if their shapes don't go together."""
    rows = list(x.fake.shape)
    del rows[dim]
    moved = _classes_second(x, dim, replay)
    if moved is None or not same_sizes(target.fake.shape, rows):
        return None
    if target.fake.dtype != torch.int64:
        return None
    last: Steps = []
    if not form.reduced and not same_sizes(form.root.fake.shape, rows):
        last = [(torch.unsqueeze, (dim,))]
    return Written(
        "cross_entropy",
        (moved.argument, target.argument, None, "reduction", NOTHING_IGNORED, 0.0),
        form=replace(form, constant=form.constant * scale),
        counts={"mean": math.prod(rows)},
        each=not form.reduced,
        last=last,
    )


def _soft_cross_entropy(
    form: NormalForm, polynomial: Polynomial, algebra: SoftmaxAlgebra
) -> Iterator[Written]:
    """-sum(q * log_softmax(x)) over the classes."""
    dims = sums_classes(form) or ()
    for _, key, dim in [found for found in polynomial.atoms() if found[0] == "lse"]:
        x = algebra.value(key, form.root.node)
        if x is None or dim not in dims or not same_sizes(x.fake.shape, form.body.fake.shape):
            continue
        for q in named_values(form.body, algebra.replay):
            try:
                weights = algebra.of(q)
                scale = polynomial.ratio(weights * log_softmax(key, dim) * -1.0)
            except OpaqueError:
                continue
            if exp(log_softmax(key, dim)).atoms() & weights.atoms():
                continue  # an entropy: one softmax is all it needs
            moved = _classes_second(x, dim, algebra.replay)
            target = _classes_second(q, dim, algebra.replay)
            if scale is None or moved is None or target is None:
                continue
            rows = math.prod(s for i, s in enumerate(x.fake.shape) if i != dim)
            yield Written(
                "cross_entropy",
                (moved.argument, target.argument, None, "reduction", -100, 0.0),
                form=replace(form, constant=form.constant * scale),
                counts={"mean": rows},
                each=form.root.fake.dim() > 0 or form.body.fake.dim() == 1,
            )


def _divergence(
    form: NormalForm, polynomial: Polynomial, algebra: SoftmaxAlgebra
) -> Iterator[Written]:
    """q * (log(q) - log(p)), with either argument as it is or as a logarithm."""
    if form.root.fake.dim() > 0 or form.body.fake.dim() == 0:
        return
    atoms = polynomial.atoms()
    if not {found[0] for found in atoms} & {"log", "exp"}:
        return
    if len(_softmax_dims(polynomial)) > 1:  # a mistake of the user's, and no divergence
        return
    logarithms = [algebra.value(a[1], form.root.node) for a in atoms if a[0] == "log"]
    if any(p is None or _guarded(p) for p in logarithms):
        return
    named = named_values(form.body, algebra.replay)
    shape = form.body.fake.shape
    found = []
    for (i, q), (j, p) in permutations(enumerate(named), 2):
        for options, pattern in _divergences(p, q, algebra):
            scale = polynomial.ratio(pattern)
            if scale is not None:
                # Tensors that the graph holds come before tensors that would be computed again,
                # then tensors that are computed first: logarithms are left to the op.
                preference = (not p.whole) + (not q.whole), -i - j
                found.append((preference, p, q, options, scale))
    for _, p, q, options, scale in sorted(found, key=lambda candidate: candidate[0]):
        yield Written(
            "kl_div",
            (p.argument, q.argument, "reduction"),
            options,
            form=replace(form, constant=form.constant * scale),
            counts={"batchmean": shape[0], "mean": math.prod(shape)},
        )


def _softmax_dims(polynomial: Polynomial) -> set[int]:
    dims = {found[2] for found in polynomial.atoms() if found[0] == "lse"}
    return dims.union(*(_softmax_dims(a[1]) for a in polynomial.atoms() if a[0] == "exp"))


def _guarded(p: Value) -> bool:
    """Whether a logarithm is kept from 0, by a number added to its argument or by a bound.

    The loss would be that of the tensor with the number added. That tensor would have to be
    computed before the op, and Inductor has better ways.
    """
    if p.op is None:
        return False
    packet, rest = packet_of(p.op), p.args[1:]
    plus = packet in (aten.add, aten.sub) and not isinstance(rest[0], Value)
    return plus or packet in (aten.clamp, aten.clamp_min, aten.maximum)


def _divergences(
    p: Value, q: Value, algebra: SoftmaxAlgebra
) -> Iterator[tuple[dict[str, Any], Polynomial]]:
    """The op's options for two tensors, and what the divergence with these options is."""
    log_input: dict[str, Any] = {"log_input": False}
    as_written = algebra.of(p), algebra.of(q)
    for options, logarithm in (({}, lambda: as_written[0]), (log_input, lambda: algebra.log_of(p))):
        for log_target in (False, True):
            try:
                if log_target:
                    pattern = exp(algebra._argument(q, 0)) * (as_written[1] - logarithm())
                    yield {**options, "log_target": True}, pattern
                else:
                    yield options, as_written[1] * (algebra.log_of(q) - logarithm())
            except OpaqueError:
                continue


def named_values(body: Value, replay: AtenReplay) -> list[Value]:
    """The floating-point tensors of a body's shape that it is made of, outermost first."""
    found: dict[Any, Value] = {}
    waiting, levels = [body], 6
    while waiting and levels > 0 and len(found) < 12:
        following = []
        for value in waiting:
            value = replay.resolve(value)
            if same_sizes(value.fake.shape, body.fake.shape) and value.fake.is_floating_point():
                found.setdefault(replay.key(value), value)
            following += [a for a in value.args if isinstance(a, Value)]
        waiting, levels = following, levels - 1
    return list(found.values())[1:]


def _classes_second(x: Value, dim: int, replay: AtenReplay) -> Value | None:
    """A view of x with the classes in cross_entropy's dimension."""
    return x if x.fake.dim() == 1 else _move(x, dim, 1, replay)


def _move(x: Value, dim: int, to: int, replay: AtenReplay) -> Value | None:
    """A view of a tensor with one dimension in another place; None if torch refuses it."""
    rank = x.fake.dim()
    if dim == to % rank:
        return x
    order = [d for d in range(rank) if d != dim]
    order.insert(to % rank, dim)
    return compute(aten.permute.default, x, order)
