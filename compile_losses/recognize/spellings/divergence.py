"""Divergences of two softmaxes: Kullback-Leibler's, and Jensen-Shannon's of their mixture.

The logarithm of a mixture is one atom, and the weights of the mixture must be those of the terms.
Weights may be tensors that hold numbers: they count as the numbers in the source
(:mod:`compile_losses.recognize.graph.constants`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch

from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, compute, same_sizes
from compile_losses.recognize.graph.constants import constant
from compile_losses.recognize.graph.symbolic_tensors import Value, example
from compile_losses.recognize.spellings.normal_form import (
    NormalForm,
    Selection,
    Steps,
    Written,
    sums_classes,
)
from compile_losses.recognize.spellings.polynomial import (
    Atom,
    Polynomial,
    atom,
    exp,
    log_softmax,
    softmax_of,
    softmax_pairs,
    unrounded,
)
from compile_losses.recognize.spellings.softmax_algebra import SoftmaxAlgebra


def softmax_divergences(
    form: NormalForm, polynomial: Polynomial, algebra: SoftmaxAlgebra
) -> Iterator[Written]:
    """The divergences that a sum over the classes may be.

    Args:
        polynomial: the term of each class.
    """
    for found in polynomial.atoms():
        if found[0] == "log_mixture":
            yield from _of_mixture(form, polynomial, found, algebra)
    for x, z, dim in softmax_pairs(polynomial):
        log_p, log_q = log_softmax(x, dim), log_softmax(z, dim)
        scale = polynomial.ratio(exp(log_q) * (log_q - log_p))
        if scale is not None:
            scaled = replace(form, constant=form.constant * scale)
            yield from divergence_of_rows("softmax_kl_div", scaled, x, z, dim, {}, algebra)


def _of_mixture(
    form: NormalForm, polynomial: Polynomial, log_m: Atom, algebra: SoftmaxAlgebra
) -> Iterator[Written]:
    """b q (log q - log m) + (1 - b) p (log p - log m) for a mixture m of p and q, whose weights
    must be those of the terms."""
    pattern = Polynomial({})
    parts: list[tuple[Hashable, int, float]] = []
    for monomial, weight in log_m[1].items():
        (factor,) = monomial
        softmax = softmax_of(factor)
        assert softmax is not None
        log_one = log_softmax(*softmax)
        pattern = pattern + exp(log_one) * (log_one - atom(log_m)) * weight
        parts.append((*softmax, unrounded(weight)))
    scale = polynomial.ratio(pattern)
    if len(parts) != 2 or scale is None:
        return
    (x, dim, _), (z, other_dim, beta) = parts
    if dim != other_dim:
        return
    if not _differentiable(x, form, algebra) and _differentiable(z, form, algebra):
        # The rows may be exchanged. The op can compute the gradient of its input with the loss.
        x, z, beta = z, x, parts[0][2]
    options = {} if beta == 0.5 else {"beta": beta}
    scaled = replace(form, constant=form.constant * unrounded(scale))
    yield from divergence_of_rows("softmax_js_div", scaled, x, z, dim, options, algebra)


def _differentiable(key: Hashable, form: NormalForm, algebra: SoftmaxAlgebra) -> bool:
    value = algebra.value(key, form.root.node)
    return value is not None and bool(getattr(example(value.node), "requires_grad", False))


def divergence_of_rows(
    op: str,
    form: NormalForm,
    input: Hashable,
    target: Hashable,
    dim: int,
    options: dict[str, Any],
    algebra: SoftmaxAlgebra,
) -> Iterator[Written]:
    """The divergence, if the form adds up all classes of both rows."""
    x, z = (algebra.value(key, form.root.node) for key in (input, target))
    if x is None or z is None or dim not in (sums_classes(form) or ()):
        return
    shape = form.body.fake.shape
    if not all(same_sizes(value.fake.shape, shape) for value in (x, z)):
        return
    each = form.root.fake.dim() > 0 or len(shape) == 1
    last: Steps = []
    if form.selection is not None:
        each, last = True, _of_selected_rows(form.selection, len(shape) - 1)
        if not last or dim < form.selection.mask.fake.dim():
            return
    temperature, x, z = _temperature(x, z, algebra.replay)
    if temperature != 1:
        options = {**options, "temperature": temperature}
    if dim != len(shape) - 1:
        options = {**options, "dim": dim}
    yield Written(
        op,
        (x.argument, z.argument, "reduction"),
        options,
        form=form,
        counts={"batchmean": shape[0], "mean": math.prod(shape)},
        each=each,
        last=last,
    )


def _of_selected_rows(selection: Selection, rank: int) -> Steps:
    """The steps from the loss of each row to the sum of the rows that a mask takes.

    The other rows are set to 0, so that nobody waits for the number of rows. Without a way to do
    that there are no steps.
    """
    outside = compute(aten.logical_not.default, selection.mask)
    count = compute(aten.sum.default, selection.mask)
    while outside is not None and outside.fake.dim() < rank:
        outside = compute(aten.unsqueeze.default, outside, -1)
    if outside is None or count is None:
        return []
    steps: Steps = [(torch.masked_fill, (outside, 0.0)), (torch.sum, ())]
    return [*steps, (torch.div, (count,))] if selection.mean else steps


def _temperature(x: Value, z: Value, replay: AtenReplay) -> tuple[float, Value, Value]:
    """The divisor of both tensors, and the tensors before the division."""
    found = []
    for value in (x, z):
        resolved = replay.resolve(value)
        if resolved.op not in (aten.div.Tensor, aten.mul.Tensor) or resolved.kwargs:
            return 1.0, x, z
        inner, factor = resolved.args[0], constant(resolved.args[1], value.fake.dtype, replay)
        if factor is None or factor <= 0 or not same_sizes(inner.fake.shape, value.fake.shape):
            return 1.0, x, z
        found.append((factor if resolved.op is aten.div.Tensor else 1.0 / factor, inner))
    (one, inner_x), (other, inner_z) = found
    return (one, inner_x, inner_z) if one == other else (1.0, x, z)
