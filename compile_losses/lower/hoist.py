"""The gradient computed with the loss.

In a joint graph a loss and its gradient read the same operands twice::

    loss = X_forward(input, target, ...)         grad = X_backward(grad_output, input, target, ...)

Hoisting computes the gradient for a grad_output of 1 in the same read, and leaves to the backward
only its scaling, which costs nothing when grad_output is 1::

    loss, unit = X_with_grad(input, target, ...)         grad = scale(unit, grad_output)

With a grad_output that is no power of two a bfloat16 gradient is then rounded twice, which stays
within the accuracy rule of the tests; float16 is left alone, see ``refusal``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.partitioners import get_default_op_list
from torch.fx import Graph, Node

from compile_losses.lower.aliases import depends_on_tangents, graph_outputs, storage_of
from compile_losses.lower.calls import fused_call, fused_op
from compile_losses.ops.checks import REDUCTIONS

fused = torch.ops.fused


@dataclass(frozen=True)
class Pair:
    """A loss in a joint graph, with its gradient.

    Attributes:
        name: of the loss.
        forward, backward: the calls of ``X_forward`` and ``X_backward``.
        loss, gradient: the nodes that hold their results.
        reduction: of the loss.
        only_input: whether no gradient but input's is asked for.
    """

    name: str
    forward: Node
    backward: Node
    loss: Node
    gradient: Node
    reduction: int
    only_input: bool

    @property
    def input(self) -> Node:
        return self.forward.args[0]  # type: ignore[return-value]


def hoist(graph: Graph) -> list[tuple[Node, str]]:
    """Hoists every gradient of a joint graph that may be.

    Returns:
        The forward nodes that were left alone, with the reasons.
    """
    kept = []
    pairs = find_pairs(graph)
    overwrites = bool(pairs) and overwrites_buffers(graph)
    for pair in pairs:
        reason = refusal(pair, overwrites)
        if reason is None:
            replace(pair)
        else:
            kept.append((pair.forward, reason))
    return kept


def find_pairs(graph: Graph) -> list[Pair]:
    """Losses with exactly one gradient call of the same arguments."""
    pairs = []
    for forward in graph.nodes:
        loss, part = fused_call(forward) or ("", "")
        if part != "forward":
            continue
        backward_op = fused_op(loss, "backward")
        calls = [
            node
            for node in graph.find_nodes(op="call_function", target=backward_op)
            if _same_loss(forward, node)
        ]
        forwards = [
            node
            for node in graph.find_nodes(op="call_function", target=forward.target)
            if node.args == forward.args
        ]
        if len(calls) != 1 or len(forwards) != 1:
            continue
        pair = _pair(loss, forward, calls[0])
        if pair is not None:
            pairs.append(pair)
    return pairs


def _same_loss(forward: Node, backward: Node) -> bool:
    """Arguments are compared by name: the two ops share all but what each has of its own."""
    own = {"dtype", "grad_output", "stats", "total_weight"}
    own |= {"needs_grad_input", "needs_grad_target", "needs_grad_weight"}

    def named(node: Node) -> dict[str, Any]:
        schema = node.target._schema  # type: ignore[union-attr]
        names = [argument.name for argument in schema.arguments]
        return {**dict(zip(names, node.args, strict=False)), **node.kwargs}

    left, right = named(forward), named(backward)
    return {k: v for k, v in left.items() if k not in own} == {
        k: v for k, v in right.items() if k not in own
    }


def _pair(name: str, forward: Node, backward: Node) -> Pair | None:
    schema = forward.target._schema  # type: ignore[union-attr]
    reduction = forward.args[[a.name for a in schema.arguments].index("reduction")]
    loss: Node | None = forward
    if len(schema.returns) > 1:
        loss = _item(forward, 0)
    gradient: Node | None = backward
    only_input = True
    results = len(backward.target._schema.returns)  # type: ignore[union-attr]
    if results > 1:
        needs_input, *needs_others = backward.args[-results:]
        only_input = needs_input is True and not any(needs_others)
        gradient = _item(backward, 0)
    if loss is None or gradient is None or not isinstance(reduction, int):
        return None
    return Pair(name, forward, backward, loss, gradient, reduction, only_input)


def _item(node: Node, index: int) -> Node | None:
    items = [u for u in node.users if u.target is operator.getitem and u.args[1] == index]
    return items[0] if len(items) == 1 else None


def refusal(pair: Pair, overwrites: bool) -> str | None:
    """Why a gradient stays in the backward, or None; see overwrites_buffers."""
    input: Tensor = pair.input.meta["val"]
    gradient: Tensor = pair.gradient.meta["val"]
    if pair.reduction == REDUCTIONS["none"]:
        return "the loss is not reduced"
    if not pair.only_input:
        return "another argument than input needs a gradient"
    if gradient.shape != input.shape:
        return "input is broadcast"
    if gradient.dtype == torch.float16:
        return "a unit gradient would underflow in float16 before the loss scale reaches it"
    if any(n.meta.get("recompute") is not None for n in (pair.forward, pair.input)):
        return "inside a checkpointed region, which runs its forward twice"
    if not overwrites:
        return "the backward could no longer run twice (retain_graph) over these inputs"
    return None


def overwrites_buffers(graph: Graph) -> bool:
    """Whether a joint graph's backward is given intermediates to overwrite even without us.

    AOTAutograd gives it those that only it still needs ("donated buffers"), and such a backward
    refuses retain_graph. The unit gradient is one more of them; it must not be the only one, or a
    graph of the loss alone would refuse what torch allows.
    """
    backward = depends_on_tangents(graph)
    kept = {storage_of(n) for n in [*graph.find_nodes(op="placeholder"), *graph_outputs(graph)]}
    ops = get_default_op_list()
    # What the backward reads of the forward, and what that is cheaply computed from again.
    needed = [n for node in backward for n in node.all_input_nodes if n not in backward]
    seen = set(needed)
    while needed:
        node = needed.pop()
        if node.op != "call_function":
            continue
        if not ops.is_recomputable(node):
            if isinstance(node.meta.get("val"), Tensor) and storage_of(node) in kept:
                continue
            return True
        needed += (source for source in node.all_input_nodes if source not in seen)
        seen.update(node.all_input_nodes)
    return False


def _like(fake: Any) -> Tensor:
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def replace(pair: Pair) -> None:
    graph = pair.forward.graph
    with graph.inserting_before(pair.forward):
        with_grad = fused_op(pair.name, "with_grad")
        both = graph.call_function(with_grad, pair.forward.args, pair.forward.kwargs)
        # A tensor of its own: AOTAutograd would take one that shares memory with the backward's
        # result for an alias of it, and not donate it.
        value = _like(pair.gradient.meta["val"])
        both.meta = {**pair.forward.meta, "val": (pair.loss.meta["val"], value)}
        loss = graph.call_function(operator.getitem, (both, 0))
        loss.meta = dict(pair.loss.meta)
        unit = graph.call_function(operator.getitem, (both, 1))
        unit.meta = {**pair.loss.meta, "val": value}
    # Where the gradient was computed, and so after its grad_output.
    grad_output: Node = pair.backward.args[0]  # type: ignore[assignment]
    with graph.inserting_before(pair.backward):
        scaled = graph.call_function(fused.scale.default, (unit, grad_output))
        scaled.meta = {**pair.backward.meta, "val": pair.gradient.meta["val"]}
        # What Inductor holds the arguments' strides to; with_grad has those of forward.
        scaled.meta["eager_input_vals"] = ((unit.meta["val"], grad_output.meta["val"]), {})
    pair.loss.replace_all_uses_with(loss)
    pair.gradient.replace_all_uses_with(scaled)
    for node in (*pair.backward.users, pair.backward, *pair.forward.users, pair.forward):
        if not node.users:
            graph.erase_node(node)
