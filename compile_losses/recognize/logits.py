"""Where logits come from: the linear layer that makes them, and what is done to them before a loss.

The nodes between are walked as ATen ops, of which each either acts on whole rows, like a view or a
slice, or on every logit alike, like a cast, a factor or a soft-cap.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from compile_losses.ops.checks import NARROW
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.shadow import Shadow
from compile_losses.recognize.values import Value, fake_mode

aten = torch.ops.aten

_LINEAR = (torch._C._nn.linear, torch.nn.functional.linear, aten.linear.default)
_MATMUL = (operator.matmul, torch.matmul, torch.mm, aten.matmul.default, aten.mm.default)
_FACTORS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
#: The same values in another layout or dtype.
_COPIES = (aten.clone.default, aten._to_copy.default, aten.alias.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


#: Why logits keep their layer out of reach.
OUTSIDE = "its logits are an input of this graph"


class NotAbsorbedError(Exception):
    """Why a linear layer can't be computed together with the loss of its output."""


@dataclass
class Logits:
    """How a tensor of logits is made.

    Attributes:
        linear: the node of the linear layer.
        nodes: those after it, up to the logits.
        moves: the ATen ops among them that move rows, with their arguments, less the tensor, in
            order.
        class_dim: the dimension of the classes in the result.
        factor: of the linear layer's output, before the soft-cap.
        softcap: its constant, or None.
        cast: the dtype that the output was cast to, or None.
    """

    linear: Node
    nodes: list[Node]
    class_dim: int
    moves: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    factor: float = 1.0
    softcap: float | None = None
    cast: torch.dtype | None = None


def find_logits(match: Match, shadow: Shadow) -> Logits | None:
    """The linear layer behind a match's input and the way from it, None where there is none.

    Raises:
        NotAbsorbedError: there is one, and something on the way can't be taken along.
    """
    nodes: list[Node] = []
    steps: list[Value] = []
    current: Node | Value = match.args[0]
    while True:
        if isinstance(current, Value) and not current.whole:
            value = current
        else:
            node = current if isinstance(current, Node) else current.node
            if _is_linear(node):
                break
            nodes.append(node)
            value = shadow.of(node)
            if value.node is not node:  # the node hands an argument on, maybe that of another one
                passed = (n for n in node.all_input_nodes if isinstance(example(n), Tensor))
                current = next((n for n in passed if shadow.of(n) is value), value.node)
                continue
        if value.op is None and _comes_from_outside(value.node):
            raise NotAbsorbedError(OUTSIDE)
        if value.op is None or not value.args or not isinstance(value.args[0], Value):
            return None
        steps.append(value)
        current = value.args[0]
    if not all(fake_mode(example(n)) is not None for n in (node, *node.all_input_nodes)):
        return None
    _check_users({node, *nodes, *match.interior}, match.root)
    logits = Logits(node, nodes[::-1], example(node).dim() - 1)
    _Walk(logits).over(steps[::-1])
    return logits


def _comes_from_outside(node: Node) -> bool:
    """Whether a graph's input is the result of something that torch differentiates."""
    if node.op != "placeholder":
        return False
    given = getattr(node.meta.get("grapharg"), "example", None)
    return isinstance(given, Tensor) and given.grad_fn is not None


def _is_linear(node: Node) -> bool:
    return (node.op == "call_function" and node.target in _LINEAR) or is_product(node)


def is_product(node: Node) -> bool:
    """Whether a node is input @ weight.t(), and so a linear layer without a bias."""
    is_function = node.op == "call_function" and node.target in _MATMUL
    is_method = node.op == "call_method" and node.target in ("matmul", "mm")
    if not (is_function or is_method) or len(node.args) != 2:
        return False
    left, right = (example(argument) for argument in node.args)
    return isinstance(left, Tensor) and isinstance(right, Tensor) and right.dim() == 2


def _check_users(nodes: set[Node], root: Node) -> None:
    """That neither the logits nor what the loss makes of them is needed elsewhere."""
    for node in nodes:
        if not set(node.users) <= {*nodes, root}:
            raise NotAbsorbedError("the logits have other users")


class _Walk:
    """From the output of the linear layer to the logits, one ATen op after the other."""

    def __init__(self, logits: Logits) -> None:
        self.logits = logits
        self.classes = example(logits.linear).shape[-1]
        self.divisor: float | None = None  # the last factor, while a soft-cap may follow
        self.tanh = False

    def over(self, steps: list[Value]) -> None:
        for step in steps:
            if any(isinstance(a, Value) for a in tree_leaves((step.args[1:], step.kwargs))):
                raise NotAbsorbedError(f"{step.node.name} {_combination(step)}")
            if step.op in _FACTORS:
                self._factor(step)
            elif step.op is aten.tanh.default:
                self._tanh(step)
            elif step.op in _COPIES:
                self._copy(step)
            else:
                self._move(step)
        if self.tanh:
            raise NotAbsorbedError("tanh without the factors of a soft-cap")
        self._end_factor()

    def _factor(self, step: Value) -> None:
        number = step.args[1]
        if not isinstance(number, int | float) or isinstance(number, bool) or number == 0:
            raise NotAbsorbedError(f"{step.node.name} scales the logits by more than a number")
        divides = step.op in (aten.div.Tensor, aten.div.Scalar)
        divisor = number if divides else 1 / number
        if self.tanh:
            if divides or number <= 0 or not math.isclose(number, self.divisor or 0.0):
                raise NotAbsorbedError("tanh with two different factors around it")
            self.logits.softcap, self.divisor, self.tanh = float(number), None, False
            return
        self._end_factor()
        if self.logits.softcap is not None:
            raise NotAbsorbedError("the logits are scaled after their soft-cap")
        self.divisor = divisor

    def _end_factor(self) -> None:
        if self.divisor is None:
            return
        # Input is scaled instead, which rounds it to its own dtype.
        if self.logits.cast is not None and not _is_power_of_two(self.divisor):
            raise NotAbsorbedError("the logits are scaled in float32 after a narrower product")
        self.logits.factor /= self.divisor
        self.divisor = None

    def _tanh(self, step: Value) -> None:
        if self.logits.cast is not None:
            raise NotAbsorbedError("tanh or a soft-cap in float32 of logits in a narrower dtype")
        if self.divisor is None or self.tanh or self.logits.softcap is not None:
            raise NotAbsorbedError("tanh without the factors of a soft-cap")
        self.tanh = True

    def _copy(self, step: Value) -> None:
        before, after = step.args[0].fake.dtype, step.fake.dtype
        if step.fake.device != step.args[0].fake.device:
            raise NotAbsorbedError("the logits go to another device")
        if before == after:
            return
        if (before, after) not in {(narrow, torch.float32) for narrow in NARROW} or self.tanh:
            raise NotAbsorbedError(f"a cast of the logits from {before} to {after}")
        self._end_factor()
        self.logits.cast = after

    def _move(self, step: Value) -> None:
        logits, rest = self.logits, step.args[1:]
        ndim = step.args[0].fake.dim()
        dims = [d % ndim for d in _dims(step)]
        if step.op in _VIEWS:
            last = step.fake.shape[-1] if step.fake.dim() else 0
            if logits.class_dim != ndim - 1 or not statically_known_true(last == self.classes):
                raise NotAbsorbedError(f"{step.node.name} takes the classes of a row apart")
            rest = (_sizes(step.fake.shape[:-1], step.node),)
            logits.class_dim = step.fake.dim() - 1
        elif step.op is aten.slice.Tensor and logits.class_dim not in dims:
            rest = tuple(rest)
        elif step.op is aten.select.int and logits.class_dim not in dims:
            logits.class_dim -= dims[0] < logits.class_dim
        elif step.op is aten.unsqueeze.default:
            at = step.args[1] % (ndim + 1)
            logits.class_dim += at <= logits.class_dim
            rest = (at,)
        elif step.op is aten.squeeze.dim and logits.class_dim not in dims:
            logits.class_dim -= dims[0] < logits.class_dim and step.fake.dim() < ndim
        elif step.op in (aten.transpose.int, aten.permute.default, aten.t.default):
            order = list(range(ndim))
            if step.op is aten.permute.default:
                order = dims
            else:
                a, b = dims if step.op is aten.transpose.int else (0, ndim - 1)
                order[a], order[b] = order[b], order[a]
            logits.class_dim = order.index(logits.class_dim)
            logits.moves.append((aten.permute.default, (order,)))
            return
        elif logits.class_dim in dims:
            raise NotAbsorbedError(f"{step.node.name} takes only some classes of a row")
        else:
            name = step.node.name
            raise NotAbsorbedError(f"{name} is none of a cast, a factor, a soft-cap and a view")
        if not all(isinstance(a, int | list | None) for a in rest):
            raise NotAbsorbedError(f"{step.node.name} cuts the logits at a symbolic place")
        logits.moves.append((step.op, tuple(rest)))


def _combination(step: Value) -> str:
    """What an op with a second tensor does to the logits."""
    packet = step.op._overloadpacket if step.op is not None else None
    if packet in (aten.index_select, aten.index, aten.gather, aten.embedding, aten.masked_select):
        return "picks some of the logits: pick the same rows of the hidden states before the layer"
    if packet in (aten.masked_fill, aten.where):
        return "masks some of the logits"
    if packet in (aten.add, aten.sub, aten.rsub):
        return "adds another tensor to the logits: a bias can be the layer's own"
    return "combines the logits with another tensor"


def _dims(step: Value) -> list[int]:
    """The dimensions that an op is told, as it is told them."""
    if step.op in (aten.slice.Tensor, aten.select.int, aten.squeeze.dim):
        return [step.args[1]] if len(step.args) > 1 else [0]
    if step.op is aten.transpose.int:
        return list(step.args[1:3])
    return list(step.args[1]) if step.op is aten.permute.default else []


def _sizes(sizes: Any, node: Node) -> list[int]:
    """Sizes as constants, -1 in the place of one that is symbolic."""
    constant = [size if isinstance(size, int) else -1 for size in sizes]
    if constant.count(-1) > 1:
        raise NotAbsorbedError(f"{node.name} has more than one symbolic size")
    return constant


def _is_power_of_two(number: float) -> bool:
    mantissa, _ = math.frexp(abs(number))
    return mantissa == 0.5
