"""The algebra of losses made of logarithms, exponentials and softmaxes.

A Value becomes a polynomial of *atoms*: tensors taken as they are, logarithms and exponentials,
and two quantities of a row, its logsumexp and the entry at an index. ``log_softmax(x)`` is
``x - logsumexp(x)``, ``softmax(x)`` is its exponential, and a gathered log-probability is an entry
less a logsumexp. So spellings of the same loss become the same polynomial.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.op_traits import RESHAPES
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, same_sizes
from compile_losses.recognize.graph.constants import constant
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.recognize.spellings.polynomial import (
    OpaqueError,
    Polynomial,
    atom,
    combined,
    exp,
    log,
    log_mixture,
    log_softmax,
    number,
    picked,
    row_dim,
    selected,
    sum_of,
)
from compile_losses.recognize.spellings.row_views import (
    RowIndexError,
    as_one_hot,
    pushed_under_softmax,
    target_of_gather,
    target_of_index,
)
from compile_losses.torch_internals.graphs import is_erased
from compile_losses.torch_internals.ops import packet_of

_DEEPEST = 12


class SoftmaxAlgebra:
    """Polynomials of the Values of one graph."""

    def __init__(self, replay: AtenReplay) -> None:
        self.replay = replay
        self._values: dict[Hashable, list[Value]] = {}
        self._done: dict[Value, Polynomial] = {}

    def leaf(self, value: Value) -> Hashable:
        """The key of a tensor that is taken as it is; :meth:`value` finds the tensor by it."""
        key = self.replay.key(value)
        known, resolved = self._values.setdefault(key, []), self.replay.resolve(value)
        if resolved not in known:
            known.append(resolved)
        return key

    def value(self, key: Hashable, root: Node) -> Value | None:
        """A tensor with this key that the graph computes before root. Others may come later, or may
        have been erased with another match; None if there is no other."""
        for value in self._values[key]:
            if not is_erased(value.node) and value.node < root:
                return value
        return None

    def of(self, value: Value, depth: int = 0) -> Polynomial:
        """The polynomial of a Value; of one that is not understood, an atom that stands for it."""
        value = self.replay.resolve(value)
        if value not in self._done:
            try:
                if depth > _DEEPEST or value.op is None or not value.fake.is_floating_point():
                    raise OpaqueError
                self._done[value] = self._of(value, depth + 1)
            except (OpaqueError, RowIndexError):
                self._done[value] = atom(("leaf", self.leaf(value)))
        return self._done[value]

    def logits(self, value: Value, root: Node) -> tuple[Value, int] | None:
        """The logits and the dimension of the classes, if a Value is a log_softmax; else None."""
        polynomial = self.of(value)
        for found in polynomial.atoms():
            if found[0] == "lse" and polynomial == log_softmax(*found[1:]):
                logits = self.value(found[1], root)
                return None if logits is None else (logits, found[2])
        return None

    def _of(self, value: Value, depth: int) -> Polynomial:
        """The polynomial of a Value.

        Raises:
            OpaqueError, RowIndexError: its op is not known, or not with these arguments.
        """
        packet = packet_of(value.op)
        args = value.args
        if packet in (aten.add, aten.sub, aten.mul, aten.div, aten.rsub, aten.xlogy):
            return self._arithmetic(packet, value, depth)
        if packet is aten.neg:
            return self.of(args[0], depth) * -1.0
        if packet in (aten._log_softmax, aten._softmax):
            return self._softmax(value)
        if packet is aten.logsumexp:
            (dim,) = args[1] if len(args[1]) == 1 else (None,)
            if dim is None or not args[0].fake.dim():
                raise OpaqueError
            dim = dim % args[0].rank
            try:
                return self._log_of_stack(args[0], dim, depth, *args[2:])
            except OpaqueError:
                return atom(("lse", self.leaf(args[0]), dim))
        if packet is aten.logaddexp:
            return log(sum_of([exp(self._operand(a, value, depth)) for a in args]))
        if packet is aten.lerp:
            left, right, weight = (self._operand(a, value, depth) for a in args)
            return left + (right - left) * weight
        if packet is aten.log:
            return self.log_of(args[0], depth)
        if packet is aten.exp:
            return exp(self._argument(args[0], depth))
        if packet is aten.gather:
            target, dim = target_of_gather(value, self.replay)
            return self._picked(args[0], target, dim, depth)
        if packet is aten.index:
            target, dim = target_of_index(value, self.replay)
            return self._picked(args[0], target, dim, depth)
        if packet in (aten.squeeze, aten.unsqueeze, aten.view, aten._unsafe_view):
            return self._moved(value, depth)
        if packet is aten.sum:
            return self._sum(value, depth)
        if packet in (aten.slice, aten.select, aten.permute, aten.transpose, aten.t):
            return self._under_softmax(value)
        if packet is aten._to_copy:
            one_hot = as_one_hot(self.replay.resolve(args[0]), self.replay)
            if one_hot is not None:
                return atom(("one_hot", self.leaf(one_hot), value.fake.dim() - 1))
        if packet is aten.alias or (
            packet is aten.expand and same_sizes(args[0].fake.shape, value.fake.shape)
        ):
            return self.of(args[0], depth)
        raise OpaqueError

    def _log_of_stack(
        self, value: Value, dim: int, depth: int, keepdim: bool = False
    ) -> Polynomial:
        """logsumexp along the dimension of a stack adds tensors up, element by element."""
        stack = self.replay.resolve(value)
        if stack.op is not aten.stack.default or keepdim:
            raise OpaqueError
        if (stack.args[1] if len(stack.args) > 1 else 0) % stack.rank != dim:
            raise OpaqueError
        return log(sum_of([exp(self.of(tensor, depth)) for tensor in stack.args[0]]))

    def log_of(self, value: Value, depth: int = 0) -> Polynomial:
        """The polynomial of a Value's logarithm.

        Raises:
            OpaqueError: it is not known.
        """
        resolved = self.replay.resolve(value)
        if resolved.op is aten.div.Tensor and not resolved.kwargs:
            try:  # no monomial divides by a mixture, but its logarithm is known
                one, other = (self._operand(part, resolved, depth) for part in resolved.args)
                return log(one) - log_mixture(other)
            except OpaqueError:
                pass
        return log(self._argument(value, depth))

    def _argument(self, value: Value, depth: int) -> Polynomial:
        """The operand of a logarithm, exponential or pick, in which sums and scaled tensors are
        leaves."""
        resolved = self.replay.resolve(value)
        inner = self.of(resolved, depth)
        if resolved.op is aten.div.Tensor and isinstance(resolved.args[1], Value):
            return inner
        rows = {"exp", "lse", "pick", "sumexp"}
        return inner if {a[0] for a in inner.atoms()} & rows else atom(("leaf", self.leaf(value)))

    def _arithmetic(self, packet: Any, value: Value, depth: int) -> Polynomial:
        """That of a sum, difference, product or quotient."""
        if set(value.kwargs) - {"alpha"} or value.kwargs.get("alpha", 1) != 1:
            raise OpaqueError
        if len(value.args) > 2:  # a multiple
            raise OpaqueError
        left, right = operands = [self._operand(a, value, depth) for a in value.args[:2]]
        self._check_selection(value, operands)
        result = combined(packet, left, right)
        if result is not None:
            return result
        if packet is aten.xlogy:
            # xlogy of two tensors is 0 wherever the first one is; their product may be nan.
            if not self.replay.same(*value.args[:2]):
                raise OpaqueError
            return left * self.log_of(value.args[1], depth)
        if len(right) != 1:
            raise OpaqueError
        monomial, coefficient = next(iter(right.items()))
        inverse = frozenset((inner, -power) for inner, power in monomial)
        return left * Polynomial({inverse: 1.0 / coefficient})

    def _operand(self, argument: Any, value: Value, depth: int) -> Polynomial:
        """The polynomial of an operand. A tensor must have the result's rank, so that the numbers
        of a row stay in place."""
        if isinstance(argument, bool) or not isinstance(argument, int | float | Value):
            raise OpaqueError
        if not isinstance(argument, Value):
            return number(argument)
        known = constant(argument, value.fake.dtype, self.replay)
        if known is not None:
            return number(known)
        if argument.fake.dim() != value.fake.dim():
            raise OpaqueError
        resolved = self.replay.resolve(argument)
        one_hot = as_one_hot(resolved, self.replay)
        if resolved.op is aten.neg.default and not resolved.fake.is_floating_point():
            return self._operand(resolved.args[0], value, depth) * -1.0
        if one_hot is not None:  # an integer tensor times a floating one
            return atom(("one_hot", self.leaf(one_hot), value.fake.dim() - 1))
        return self.of(argument, depth)

    def _check_selection(self, value: Value, operands: list[Polynomial]) -> None:
        """A one-hot tensor selects an entry of tensors of its own shape: broadcast along the
        classes, it would select all of them."""
        atoms = set().union(*(operand.atoms() for operand in operands))
        if not any(found[0] == "one_hot" for found in atoms):
            return
        shapes = [self._values[found[1]][0].fake.shape for found in atoms if found[0] == "leaf"]
        for argument, operand in zip(value.args, operands, strict=False):
            if any(found[0] == "one_hot" for found in operand.atoms()):
                shapes.append(argument.fake.shape)
        if not all(same_sizes(shape, value.fake.shape) for shape in shapes):
            raise OpaqueError

    def _softmax(self, value: Value) -> Polynomial:
        """That of a softmax or its logarithm, in the dtype of its argument."""
        x, dim, half_to_float = value.args
        if half_to_float or not x.fake.dim():
            raise OpaqueError
        result = log_softmax(self.leaf(x), dim % x.rank)
        return result if value.op is aten._log_softmax.default else exp(result)

    def _under_softmax(self, value: Value) -> Polynomial:
        moved = pushed_under_softmax(value, self.replay)
        if moved is None:
            raise OpaqueError
        return self._softmax(moved)

    def _picked(self, source: Value, target: Value, dim: int, depth: int) -> Polynomial:
        key = self.leaf(target)
        return picked(self._argument(source, depth), key, dim)

    def _moved(self, value: Value, depth: int) -> Polynomial:
        """Dropping or restoring the class dimension of one number for each row."""
        inner = value.args[0]
        polynomial = self.of(inner, depth)
        dims = {row_dim(found) for found in polynomial.atoms()}
        dim = dims.pop() if len(dims) == 1 else None
        if dim is not None:
            dropped, kept = sorted((inner.fake.shape, value.fake.shape), key=len)
            rest = [size for i, size in enumerate(kept) if i != dim]
            one = len(rest) < len(kept) and statically_known_true(kept[dim] == 1)
            if one and same_sizes(rest, dropped):
                return polynomial
        if value.op is aten.unsqueeze.default:
            raise OpaqueError
        of_rows = self._logsumexp_of_rows(value)
        return self._under_softmax(value) if of_rows is None else of_rows

    def _logsumexp_of_rows(self, value: Value) -> Polynomial | None:
        """A view of the logsumexp of a view, as the logsumexp of the tensor before both views; None
        of other views."""
        inner = self.replay.resolve(value.args[0])
        if inner.op is not aten.logsumexp.default or value.op not in RESHAPES:
            return None
        rows, dims, *keepdim = inner.args
        if [dim % rows.rank for dim in dims] != [rows.rank - 1] or any(keepdim):
            return None
        shape = (*value.fake.shape, rows.fake.shape[-1])
        while not same_sizes(rows.fake.shape, shape):
            resolved = self.replay.resolve(rows)
            if resolved.op not in RESHAPES:
                return None
            rows = resolved.args[0]
        return atom(("lse", self.leaf(rows), len(shape) - 1))

    def _sum(self, value: Value, depth: int) -> Polynomial:
        """A sum over the classes: of exponentials, or of entries that a one-hot target selects."""
        inner = value.args[0]
        dims: Any = value.args[1] if value.op is aten.sum.dim_IntList else ()
        if len(dims) != 1 or value.kwargs.get("dtype") is not None or not inner.fake.dim():
            raise OpaqueError
        dim = dims[0] % inner.rank
        polynomial = self.of(inner, depth)
        rows = selected(polynomial, dim)
        if rows is not None:
            return rows
        for found in polynomial.atoms():
            if found[0] == "exp" and polynomial == atom(found):
                for leaf in found[1].atoms():
                    if leaf[0] == "leaf" and found[1] == atom(leaf):
                        return atom(("sumexp", leaf[1], dim))
        raise OpaqueError
