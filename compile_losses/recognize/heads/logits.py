"""From a loss back to the linear layer that makes its logits, and the ops in between.

The ops in between are ATen's, by the replay. An op on whole rows, like a view, a slice or an index,
is applied to the layer's input instead. An op on classes, like an addend for each class, is applied
to the layer's weight and bias. A cast, a factor and a soft-cap act on every logit alike.

A factor is applied to the layer's input, which rounds it. So is a power of two after a cast to
float32, whose product is not rounded. Another factor there becomes the scale of the product, which
is rounded once, as torch rounds it before the cast. ``c * tanh(x / d)`` is a soft-cap of c with a
factor inside. ``c * sigmoid(x / d)`` is one of c / 2: it differs by a constant, which softmax
drops. A number that is added to all logits is dropped, too, but before a soft-cap it is a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.distributed import are_dtensors
from compile_losses.graphs import ancestors, descendants
from compile_losses.op_traits import FOLLOWED, PRODUCTS, QUOTIENTS, RESHAPES, SUMS, TURNS, View
from compile_losses.ops.checks import NARROW
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, same_sizes
from compile_losses.recognize.graph.constants import constant
from compile_losses.recognize.graph.memory import storage_of
from compile_losses.recognize.graph.symbolic_tensors import Value, fake_mode, has_gradient, sources
from compile_losses.recognize.graph.unrolled import JOINS
from compile_losses.recognize.heads.head import Head, NotAbsorbedError, computed, find_head
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.returned_logits import outputs_of, readers
from compile_losses.sites import in_words
from compile_losses.torch_internals.graphs import GRAPH_ARGUMENT
from compile_losses.torch_internals.ops import packet_of

_MASKS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self)
#: The same values in another layout or dtype.
_COPIES = (aten.clone.default, aten._to_copy.default, aten.alias.default)

#: The most ops between a layer and its loss. A layer further up is no layer of classes.
FURTHEST = 32
#: Why the layer of some logits can't be found.
OUTSIDE = "its logits are an input of this graph"
#: Methods that give every rank the classes of all, as ``parallelize_module`` calls after a layer.
#: In torch 2.11 they are functions of Dynamo's, whose names begin with ``prim_``.
_GATHERS = ("full_tensor", "redistribute", "to_local")
#: Why rows that a mask takes of logits stay.
MASKED = (
    "and only data say how many: without capture_dynamic_output_shape_ops the graph breaks there, "
    "and lazy_logits takes them with their layer"
)
#: Why an op without a scale of its product does not take a layer.
SCALED = "the logits are scaled in float32 after a narrower product"
#: How autograd names the backwards of layers, and of graphs that may have one.
_BACKWARDS_OF_LAYERS = ("AddmmBackward", "CompiledFunctionBackward", "LinearBackward", "MmBackward")
#: Those of views and ops on a layer's output.
_BACKWARDS_OF_ONE = frozenset(
    f"{name}Backward"
    for name in (
        *("Add", "Alias", "Clone", "Div", "Index", "IndexSelect", "MaskedSelect", "Mul", "Permute"),
        *("ReshapeAlias", "Select", "Slice", "Squeeze", "T", "Tanh", "ToCopy", "Transpose"),
        *("UnsafeView", "Unsqueeze", "View"),
    )
)
#: Why a layer stays if one of these ops is between it and its loss, as in some models.
_STAY = {
    **dict.fromkeys(
        (aten.clamp, aten.clamp_min, aten.clamp_max, aten.hardtanh),
        "bounds the logits, which the op does not",
    ),
    aten.nan_to_num: "replaces what is not finite among the logits, which the op does not",
    aten.div: "rounds the logits",
    **dict.fromkeys(
        (aten.cat, aten.stack),
        "puts the logits of several layers together, and they are read as one: a loss of one "
        "layer's own logits, or of one layer that has all their weights, can be computed with it",
    ),
    aten.gather: "picks other classes for each row: an index of classes for all rows can be taken",
    aten.masked_select: (
        "picks single logits, as many as only data say: with a mask of rows ([..., 1]) and without "
        "capture_dynamic_output_shape_ops the graph breaks there, and lazy_logits takes them with "
        "their layer"
    ),
}


@dataclass
class Logits:
    """How a tensor of logits is made: ``cap(scale * (input @ weight.t() + bias))``.

    Attributes:
        head: the linear layer, as the graph has it.
        nodes: the nodes after the layer, up to the logits.
        input, weight, bias: of a layer that makes the logits themselves, but for the soft-cap.
        class_dim: the dimension of the classes in the result, and of hidden in input.
        softcap: the number that tanh is multiplied by and its argument divided by, or None.
        cast: the dtype that the output was cast to, or None.
        scale: of the product, before it is rounded to its dtype.
        copies_weight: whether weight is another tensor than the layer's.
        is_shifted: whether a number that is added to all logits was left out, as softmax drops it.
        shifts: the nodes that added a number to each row, which were left out, too.
        absorbed: the ops on the logits, in words.
        outputs: the outputs of the graph that are made of the layer's output.
    """

    head: Head
    nodes: list[Node]
    input: Value
    weight: Value
    bias: Value | None
    class_dim: int
    softcap: float | None = None
    cast: torch.dtype | None = None
    scale: float = 1.0
    copies_weight: bool = False
    is_shifted: bool = False
    shifts: list[Node] = field(default_factory=list)
    absorbed: list[str] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)

    @property
    def way(self) -> list[Node]:
        """From the logits back to the layer."""
        return [*reversed(self.nodes), self.head.node]


def find_logits(match: Match, replay: AtenReplay, place: int = 0) -> Logits | None:
    """The linear layer behind a match's argument and the ops after it; None without a layer.

    Args:
        place: of the argument, which holds logits.

    Raises:
        NotAbsorbedError: there is a layer, and an op after it can't be taken along, or its product
            has a scale.
    """
    way = way_to(match.args[place], replay)
    if way is None:
        return None
    inside = {way.head.node, *way.nodes, *match.interior}
    _check_readers(inside, match.root)
    outputs = outputs_of(inside, match.root)
    logits = _logits(way, replay)
    if logits.scale != 1:
        raise NotAbsorbedError(SCALED)
    logits.outputs = outputs
    return logits


def logits_of(tensor: Node | Value, replay: AtenReplay, given: Head | None = None) -> Logits | None:
    """As :func:`find_logits`, for any tensor, which may be detached; the logits may have readers.

    Args:
        given: a tensor at which to stop as at a layer's output.

    Raises:
        NotAbsorbedError: an op after the layer can't be taken along.
    """
    way = way_to(tensor, replay, given)
    return None if way is None else _logits(way, replay, may_detach=True)


def is_made_of(tensor: Node | Value, replay: AtenReplay, given: Head) -> bool:
    """Whether the way back from some logits leads to a tensor before it leads to a layer."""
    try:
        way = way_to(tensor, replay, given)
    except NotAbsorbedError:
        return False
    return way is not None and way.head is given


class OutsideError(NotAbsorbedError):
    """The layer that makes the logits is in no graph, or in another."""


@dataclass
class Way:
    """From a tensor back to a linear layer.

    Attributes:
        nodes: those after the layer, the last one first.
        steps: the ops, the last one first.
    """

    head: Head
    nodes: list[Node]
    steps: list[Value]


def way_to(tensor: Node | Value, replay: AtenReplay, given: Head | None = None) -> Way | None:
    """The ops from a tensor back to its linear layer; None if it is not made of a layer."""
    nodes: list[Node] = []
    steps: list[Value] = []
    current = tensor
    while len(steps) < FURTHEST:
        if isinstance(current, Value) and not current.whole:
            value = current
        else:
            node = current if isinstance(current, Node) else current.node
            head = given if given is not None and node is given.node else find_head(node)
            if head is not None:
                break
            nodes.append(node)
            value = replay.of(node)
            if value.node is not node:  # the node returns an argument, maybe another node's
                passed = (n for n in node.all_input_nodes if isinstance(example(n), Tensor))
                current = next((n for n in passed if replay.of(n) is value), value.node)
                continue
        if value.op is None and _comes_from_a_layer(value.node):
            raise OutsideError(OUTSIDE)
        if _is_gathered(value.node):
            raise NotAbsorbedError(
                "its logits are gathered from the ranks that share its classes: logits that stay "
                "sharded (ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)) are "
                "computed with their loss"
            )
        if value.op is None:
            return None
        if _is_convolution_of_width_1(value):
            raise NotAbsorbedError(
                "a convolution of width 1 makes its logits: a linear layer whose input has the "
                "channels last can be computed with its loss"
            )
        followed = followed_by(value)
        if followed is None:
            return None
        steps.append(value)
        current = followed
    else:
        return None
    if not all(fake_mode(example(n)) is not None for n in (node, *node.all_input_nodes)):
        return None
    return Way(head, nodes, steps)


def _logits(way: Way, replay: AtenReplay, *, may_detach: bool = False) -> Logits:
    """What the ops on a way make of the layer's output; raises NotAbsorbedError if one stays."""
    head = way.head
    class_dim = example(head.node).dim() - 1
    logits = Logits(head, way.nodes[::-1], head.input, head.weight, head.bias, class_dim)
    steps = way.steps[::-1]
    if may_detach:
        steps = [step for step in steps if step.op is not aten.detach.default]
    _Walk(logits, replay).over(steps)
    return logits


def _comes_from_a_layer(node: Node) -> bool:
    """Whether a graph's input may be the output of a linear layer, of another graph or of eager
    code, perhaps cast, scaled or seen through views."""
    given = getattr(node.meta.get(GRAPH_ARGUMENT), "example", None)
    if node.op != "placeholder" or not isinstance(given, Tensor):
        return False
    made: Any = given.grad_fn
    while made is not None and made.name().rstrip("0123456789") in _BACKWARDS_OF_ONE:
        made = made.next_functions[0][0]
    return made is not None and made.name().startswith(_BACKWARDS_OF_LAYERS)


def _is_gathered(node: Node) -> bool:
    """Whether a tensor is a DTensor of sharded classes, of which each rank has all of them."""
    source = node
    while _name_of(source) in _GATHERS and source.all_input_nodes:
        source = source.all_input_nodes[0]
    whole, parts = example(node), example(source)
    if source is node or not are_dtensors(parts) or not isinstance(whole, Tensor):
        return False
    placements = getattr(whole, "placements", ())
    last = parts.dim() - 1
    is_sharded, remains = (
        any(placement.is_shard(last) for placement in each)
        for each in (parts.placements, placements)
    )
    return is_sharded and not remains and same_sizes(whole.shape, parts.shape)


def _name_of(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.removeprefix("prim_") if node.op in ("call_method", "call_function") else ""


def _is_convolution_of_width_1(value: Value) -> bool:
    if value.op is not aten.convolution.default:
        return False
    weight = value.args[1].fake
    return all(statically_known_true(size == 1) for size in weight.shape[2:])


def followed_by(value: Value) -> Value | None:
    """The argument of an ATen op that holds the logits: of two, the one of the result's size."""
    arguments = value.args
    if value.op in JOINS:
        arguments = tuple(arguments[0][:1])
    elif value.op in (*PRODUCTS, aten.add.Tensor, aten.where.self):
        arguments = arguments[1:] if value.op is aten.where.self else arguments
        sized = [
            a
            for a in arguments
            if isinstance(a, Value) and same_sizes(a.fake.shape, value.fake.shape)
        ]
        arguments = (*sized, *arguments)
    if not arguments or not isinstance(arguments[0], Value):
        return None
    return arguments[0]


def _check_readers(nodes: set[Node], root: Node) -> None:
    """Checks that nothing else made of the logits goes into the loss."""
    for user in readers(nodes, root):
        if _leads_to(user, {*nodes, root}):
            raise NotAbsorbedError(
                f"{in_words(user)} is made of the logits as well, and goes into the loss"
            )


def _leads_to(node: Node, nodes: set[Node]) -> bool:
    last = max(nodes)
    return any(made in nodes for made in descendants([node], past=lambda each: not last < each))


class _Walk:
    """Goes from the output of the linear layer to the logits, one ATen op after the other.

    Attributes:
        factor: a number by which the logits, or the argument of their soft-cap, are still to be
            multiplied.
        height: the number that tanh is multiplied by so far; None without a tanh.
        shift: a number that was added to all logits before any soft-cap; nan if it is not known.
        masked: whether classes have a finite number of their own in the place of their logits.
    """

    def __init__(self, logits: Logits, replay: AtenReplay) -> None:
        self.logits = logits
        self.replay = replay
        self.classes = example(logits.head.node).shape[-1]
        self.factor = 1.0
        self.height: float | None = None
        self.shift = 0.0
        self.masked = False

    def over(self, steps: list[Value]) -> None:
        """Takes all steps, the first one after the layer first; raises NotAbsorbedError at one that
        stays."""
        for step in _joined_reshapes(steps):
            if step.op in (*PRODUCTS, *QUOTIENTS):
                self._multiply(step)
            elif step.op in SUMS:
                self._add(step)
            elif step.op in _MASKS:
                self._mask(step)
            elif step.op in (aten.tanh.default, aten.sigmoid.default):
                self._cap(step)
            elif step.op in _COPIES:
                self._copy(step)
            elif step.op in (aten.index.Tensor, aten.index_select.default):
                self._pick(step)
            elif step.op is aten.cat.default and len(step.args[0]) == 1:
                continue
            else:
                self._move(step)
        if self.height is not None:
            # height * tanh(factor * x) is |height| tanh(x' / |height|) of x' = factor * height * x.
            self.logits.softcap = abs(self.height)
            self.factor *= self.height
            if math.isclose(self.factor, 1.0):
                self.factor = 1.0
        self._apply_factor()
        if self.logits.softcap is not None:
            self._note(f"a soft-cap of {self.logits.softcap:g}")

    def _note(self, what: str) -> None:
        if what not in self.logits.absorbed:
            self.logits.absorbed.append(what)

    def _apply_factor(self) -> None:
        """Multiplies input instead, which rounds it to its own dtype."""
        if self.factor == 1:
            return
        logits = self.logits
        self._note(f"a factor of {self.factor:g}")
        if logits.cast is not None and not _is_power_of_two(self.factor):
            if self.masked or logits.input.fake.dtype == torch.float16:  # which may overflow
                raise NotAbsorbedError(SCALED)
            logits.scale *= self.factor
            self.factor = 1.0
            return
        logits.input = computed(aten.mul.Tensor, logits.input, self.factor)
        logits.bias = logits.bias and computed(aten.mul.Tensor, logits.bias, self.factor)
        self.factor = 1.0

    def _operand(self, step: Value) -> Any:
        """The other operand of an op on the logits: a number, or a Value of a tensor."""
        other = next((a for a in step.args[:2] if a is not followed_by(step)), None)
        if isinstance(other, Value):
            number = constant(other, step.fake.dtype, self.replay)
            return other if number is None else number
        return other

    def _check_uncapped(self, what: str) -> None:
        if self.height is not None:
            raise NotAbsorbedError(f"{what} after their soft-cap")

    def _check_unshifted(self, step: Value) -> None:
        if self.shift:
            raise NotAbsorbedError(f"a number is added to the logits before {step.node.name}")

    def _check_dtype(self, step: Value) -> None:
        """Checks that an op on the layer or its input rounds like the op on the logits."""
        if self.logits.cast is not None or step.fake.dtype != self.logits.input.fake.dtype:
            raise NotAbsorbedError(f"{step.node.name} computes in float32 after a narrower product")

    def _for_each_class(self, tensor: Value, step: Value) -> Value | None:
        """A tensor that is broadcast along the rows, as [classes]."""
        shape = _aligned(tensor, step)
        classes = shape.pop(self.logits.class_dim)
        if not all(statically_known_true(size == 1) for size in shape):
            return None
        if not statically_known_true(classes == self.classes):
            return None
        return tensor if tensor.fake.dim() == 1 else computed(aten.reshape.default, tensor, [-1])

    def _multiply(self, step: Value) -> None:
        """A factor: a number, or one for each class or row."""
        other = self._operand(step)
        multiplies = step.op in PRODUCTS
        if step.kwargs:
            raise NotAbsorbedError(f"{step.node.name} rounds the logits")
        if isinstance(other, int | float) and not isinstance(other, bool):
            if other == 0 or not math.isfinite(other):
                raise NotAbsorbedError(f"{step.node.name} scales the logits by {other}")
            scale = other if multiplies else 1 / other
            if self.height is None:
                self.factor *= scale
                self.shift *= scale
            else:
                self.height *= scale
            return
        if not isinstance(other, Value):
            raise NotAbsorbedError(f"{step.node.name} scales the logits by {_name(other)}")
        self._check_uncapped(f"{step.node.name} scales the logits by a tensor")
        _check_size(step)
        self._check_dtype(step)
        logits, shape, op = self.logits, _aligned(other, step), step.op
        self.shift = self.shift and math.nan  # times a number that is not known
        if all(statically_known_true(size == 1) for size in shape):
            number = computed(aten.reshape.default, other, []) if other.fake.dim() else other
            logits.input = computed(op, logits.input, number)
            logits.bias = logits.bias and computed(op, logits.bias, number)
            self._note("a factor")
        elif statically_known_true(shape[logits.class_dim] == 1):
            if logits.bias is not None:
                raise NotAbsorbedError(f"{step.node.name} scales each row of a layer with a bias")
            logits.input = computed(op, logits.input, other)
            self._note("a factor for each row")
        else:
            each = self._for_each_class(other, step)
            if each is None:
                raise NotAbsorbedError(f"{step.node.name} scales each logit by a number of its own")
            self._check_unshifted(step)
            column = computed(aten.unsqueeze.default, each, 1)
            logits.weight = computed(op, logits.weight, column)
            logits.bias = logits.bias and computed(op, logits.bias, each)
            logits.copies_weight = True
            self._note("a factor for each class")

    def _add(self, step: Value) -> None:
        """An addend: a number of each row, which softmax drops, or one of each class."""
        other, subtracts = self._operand(step), step.op in (aten.sub.Tensor, aten.sub.Scalar)
        if step.kwargs or len(step.args) != 2:  # alpha
            raise NotAbsorbedError(
                f"{step.node.name} adds a multiple to the logits: a product before is taken along"
            )
        if isinstance(other, int | float) and math.isfinite(other):
            if self.height is None:
                self.shift += -other if subtracts else other
            self.logits.is_shifted = self.logits.is_shifted or other != 0
            return  # softmax is the same for logits that are all larger by a number
        if not isinstance(other, Value):
            raise NotAbsorbedError(f"{step.node.name} adds {_name(other)} to the logits")
        self._check_uncapped(f"{step.node.name} adds to the logits")
        _check_size(step)
        shape = _aligned(other, step)
        each = self._for_each_class(other, step)
        if each is None and shape[self.logits.class_dim] == 1 and self._is_of_logits(other):
            self.shift, self.logits.is_shifted = math.nan, True
            self.logits.shifts.append(step.node)
            return  # nor does softmax change with a number for all logits of a row
        if each is None:
            if shape[self.logits.class_dim] == 1:
                raise NotAbsorbedError(
                    f"{step.node.name} adds a number to each row of the logits, which no bias for "
                    "each class does"
                )
            raise NotAbsorbedError(
                f"{step.node.name} adds a tensor to the logits, which no bias for each class does"
            )
        self._check_dtype(step)
        self._apply_factor()
        logits = self.logits
        if logits.bias is not None:
            logits.bias = computed(step.op, logits.bias, each)
        else:
            logits.bias = computed(aten.neg.default, each) if subtracts else each
        if logits.bias.fake.dtype != logits.input.fake.dtype:
            logits.bias = computed(aten.to.dtype, logits.bias, logits.input.fake.dtype)
        self._note("an addend for each class")

    def _is_of_logits(self, tensor: Value) -> bool:
        """Whether a tensor has no gradient, or one that goes to the layer's output alone.

        That gradient is 0. Who else had one would get none if the tensor is left out.
        """
        head = self.logits.head.node
        trained = filter(has_gradient, sources(tensor))
        made = ancestors(trained, until={head})
        return not any(n.op in ("placeholder", "get_attr") and has_gradient(n) for n in made)

    def _mask(self, step: Value) -> None:
        """A number in the place of the logits of some classes, which becomes their bias."""
        logits, name = self.logits, step.node.name
        if step.op is aten.where.self:
            mask, *sides = step.args
            followed = followed_by(step)
            is_kept = sides[0] is followed
            value: Any = sides[1] if is_kept else sides[0]
            if is_kept:
                mask = computed(aten.logical_not.default, mask)
        else:
            _, mask, value = step.args
        number = constant(value, step.fake.dtype, self.replay)
        if number is None:
            number = _filled(value, self.replay)
        each = self._for_each_class(mask, step)
        if each is None:
            raise NotAbsorbedError(f"{name} masks some of the logits, not some of the classes")
        if number is None:
            raise NotAbsorbedError(f"{name} replaces some of the logits by a tensor's values")
        self._check_uncapped(f"{name} masks the logits")
        if math.isfinite(number):
            self._check_unshifted(step)
            self.masked = True
        dtype = logits.input.fake.dtype
        if torch.tensor(number, dtype=dtype).item() != number:
            raise NotAbsorbedError(f"{name} masks the logits by {number}, which {dtype} rounds")
        if not isinstance(self.classes, int):
            raise NotAbsorbedError(
                f"{name} masks classes whose number is a symbol: torch._dynamo.mark_static of the "
                "weight makes it known"
            )
        self._apply_factor()
        if logits.scale != 1:
            raise NotAbsorbedError(SCALED)
        if logits.bias is None:
            logits.bias = computed(aten.new_zeros.default, logits.weight, [self.classes])
        logits.bias = computed(aten.masked_fill.Scalar, logits.bias, each, number)
        column = computed(aten.unsqueeze.default, each, 1)
        logits.weight = computed(aten.masked_fill.Scalar, logits.weight, column, 0)
        logits.copies_weight = True
        self._note("a mask of classes")

    def _cap(self, step: Value) -> None:
        """The bounded function of a soft-cap; what multiplies afterwards is its height."""
        self._check_uncapped(f"{step.node.name} is taken of the logits")
        if self.shift:
            self._shift_bias(step)
        self.height = 1.0
        if step.op is aten.sigmoid.default:  # (1 + tanh(x / 2)) / 2, and softmax drops the addend
            self.factor, self.height = self.factor / 2, 0.5
            self.logits.is_shifted = True

    def _shift_bias(self, step: Value) -> None:
        """Makes a number that was added to all logits a part of the layer's bias."""
        logits, shift = self.logits, self.shift
        if logits.cast is not None:  # as a bias it would be rounded with the product
            name = step.node.name
            raise NotAbsorbedError(
                f"a number is added to the logits before {name}, in float32 after a narrower "
                "product"
            )
        if not math.isfinite(shift) or not isinstance(self.classes, int):
            self._check_unshifted(step)
        self._apply_factor()
        if logits.bias is None:
            logits.bias = computed(aten.new_full.default, logits.weight, [self.classes], shift)
        else:
            logits.bias = computed(aten.add.Tensor, logits.bias, shift)
        self.shift, logits.is_shifted = 0.0, False
        self._note(f"an addend of {shift:g}")

    def _copy(self, step: Value) -> None:
        """A cast from 16 bits to float32, or a copy in the same dtype."""
        before, after = step.args[0].fake.dtype, step.fake.dtype
        if step.fake.device != step.args[0].fake.device:
            raise NotAbsorbedError("the logits go to another device")
        if before == after:
            return
        if (before, after) not in {(narrow, torch.float32) for narrow in NARROW}:
            raise NotAbsorbedError(f"a cast of the logits from {before} to {after}")
        if self.height is None:  # the factor so far rounds to the narrower dtype
            self._apply_factor()
        self.logits.cast = after
        self._note(f"a cast from {str(before).removeprefix('torch.')}")

    def _pick(self, step: Value) -> None:
        """Rows taken by an index, or classes, the same of each row."""
        logits, name = self.logits, step.node.name
        selects = step.op is aten.index_select.default
        given = [step.args[2]] if selects else step.args[1]
        if not all(index is None or index.whole for index in given):
            raise NotAbsorbedError(f"{name} takes some of the logits by a list of constants")
        index = self._index_of_classes(step)
        if index is not None:
            self._some_classes(step, step.op, *((0, index) if selects else ([index],)))
            self._note("classes picked by an index")
            return
        if step.op is not aten.index_select.default:
            indices = step.args[1]
            if len(indices) > logits.class_dim or not all(isinstance(i, Value) for i in indices):
                raise NotAbsorbedError(f"{name} takes only some classes of a row")
            if any(index.fake.dtype in (torch.bool, torch.uint8) for index in indices):
                raise NotAbsorbedError(f"{name} takes rows by a mask, {MASKED}")
            ranks = [index.fake.dim() for index in indices]
            logits.class_dim += max(ranks) - len(indices)
        logits.input = computed(step.op, logits.input, *step.args[1:])
        self._note("rows picked by an index")

    def _move(self, step: Value) -> None:
        """A view, as which the layer's input is viewed, or a slice of the classes."""
        logits, rest, op = self.logits, step.args[1:], step.op
        if op not in FOLLOWED:
            raise NotAbsorbedError(f"{step.node.name} {_why_it_stays(step)}")
        view = View(op, step.args, step.args[0].fake.shape, step.fake.shape)
        if op is aten.slice.Tensor:
            _check_constant(step, rest)
            if logits.class_dim in view.dims:
                self._some_classes(step, aten.slice.Tensor, 0, *rest[1:])
                self._note("a slice of the classes")
                return
        place = view.place_of(logits.class_dim)
        if place is None:
            how = "the classes of a row apart" if op in RESHAPES else "only some classes of a row"
            raise NotAbsorbedError(f"{step.node.name} takes {how}")
        logits.class_dim = place
        if op in RESHAPES:
            sizes = _sizes(step.fake.shape[:-1], step.node)
            op, rest = aten.reshape.default, ([*sizes, logits.input.fake.shape[-1]],)
        elif op in TURNS:
            op, rest = aten.permute.default, (view.order,)
        elif op is aten.unsqueeze.default:
            rest = tuple(view.dims)
        _check_constant(step, rest)
        logits.input = computed(op, logits.input, *rest)

    def _index_of_classes(self, step: Value) -> Value | None:
        """The index that a step picks classes by; None if it picks rows."""
        place = self.logits.class_dim
        if step.op is aten.index_select.default:
            _, dim, index = step.args
            return index if dim % step.args[0].fake.dim() == place else None
        indices = step.args[1]
        if len(indices) != place + 1 or any(each is not None for each in indices[:-1]):
            return None
        index = indices[-1]
        is_plain = index.fake.dim() == 1 and index.fake.dtype in (torch.int64, torch.int32)
        return index if is_plain else None

    def _some_classes(self, step: Value, op: Any, *rest: Any) -> None:
        """Takes some rows of the weight, and some elements of the bias."""
        logits, before = self.logits, self.classes
        self.classes = step.fake.shape[logits.class_dim]
        if not statically_known_true(self.classes <= before):
            raise NotAbsorbedError(f"{step.node.name} may take more classes than there are")
        logits.weight = computed(op, logits.weight, *rest)
        logits.bias = logits.bias and computed(op, logits.bias, *rest)
        logits.copies_weight = True  # its gradient is


def _joined_reshapes(steps: list[Value]) -> list[Value]:
    """The same steps, in which the last of consecutive reshapes is one of what the first is given.

    So classes that a reshape merges and the next one splits stay together.
    """
    joined: list[Value] = []
    for step in steps:
        if step.op in RESHAPES and joined and joined[-1].op in RESHAPES:
            step = replace(step, args=(joined.pop().args[0], *step.args[1:]))
        joined.append(step)
    return joined


def _check_size(step: Value) -> None:
    """Checks that the other operand of an op does not enlarge the logits."""
    followed = followed_by(step)
    assert followed is not None
    if not same_sizes(step.fake.shape, followed.fake.shape):
        raise NotAbsorbedError(f"{step.node.name} repeats the logits, which broadcasts them")


def _check_constant(step: Value, rest: tuple[Any, ...]) -> None:
    if not all(isinstance(argument, int | list | None) for argument in rest):
        raise NotAbsorbedError(f"{step.node.name} cuts the logits at a symbolic place")


def _name(operand: Any) -> str:
    if operand is None:
        return "the logits themselves"
    return f"{operand}" if isinstance(operand, int | float) else "a symbol"


def _filled(value: Any, replay: AtenReplay) -> float | None:
    """The number that logits are filled with. Infinities too, which are no ``constant``."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, Value):
        return None
    resolved = replay.resolve(value)
    if resolved.op is aten.scalar_tensor.default and isinstance(resolved.args[0], int | float):
        return float(resolved.args[0])
    return None


def _aligned(tensor: Value, step: Value) -> list[Any]:
    """The shape that a tensor is broadcast from."""
    shape = list(tensor.fake.shape)
    return [1] * (step.fake.dim() - len(shape)) + shape


def _why_it_stays(step: Value) -> str:
    """What a step is that is not followed, in words that go on from its name."""
    assert step.op is not None
    if packet_of(step.op) in (aten.cat, aten.stack) and _is_returned(step.node):
        return (
            "puts the logits of several layers together, and this graph returns them: in a step of "
            "one graph (fullgraph=True) that returns its losses alone each loss takes its own layer"
        )
    return _STAY.get(
        packet_of(step.op), "is none of a cast, a factor, an addend, a soft-cap and a view"
    )


def _is_returned(node: Node) -> bool:
    """Whether a graph returns a tensor, or a view of it."""
    (output,) = node.graph.find_nodes(op="output")
    return storage_of(example(node)) in {storage_of(example(n)) for n in output.all_input_nodes}


def _sizes(sizes: Any, node: Node) -> list[int]:
    """Sizes as constants, -1 in the place of one that is symbolic."""
    constant = [size if isinstance(size, int) else -1 for size in sizes]
    if constant.count(-1) > 1:
        raise NotAbsorbedError(f"{node.name} has more than one symbolic size")
    return constant


def _is_power_of_two(number: float) -> bool:
    mantissa, _ = math.frexp(abs(number))
    return mantissa == 0.5
