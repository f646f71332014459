"""Linear cross entropy in joint graphs.

Autograd has put the gradients into the forward already, and a ``scale`` for each into the backward.
What is left to do is to take along what the forward knows of their factor (see ``factor``): the
weight's gradient is often the largest tensor of a step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from compile_losses.lower.aliases import depends_on_tangents
from compile_losses.lower.calls import fused_call, named_arguments
from compile_losses.lower.cost import Cost, hint_of, nbytes_of
from compile_losses.lower.decision import Decision
from compile_losses.lower.factor import emit, factor_of, move_before
from compile_losses.ops.linear.chunk_size import Plan, chunk_rows, plan
from compile_losses.ops.linear.leaves import ARGUMENT_COUNT
from compile_losses.sites import site_of
from compile_losses.torch_internals.graphs import EAGER_VALUES, RECOMPUTE
from compile_losses.torch_internals.inductor import activation_memory_budget

fused = torch.ops.fused
_NAME = "linear_cross_entropy"


def plan_linear(graph: Graph) -> list[Decision]:
    """Moves factors of the gradients into the forward; says what each loss costs."""
    calls = [(node, call[1]) for node in graph.nodes if (call := fused_call(node))]
    losses = [
        (node, part)
        for node, part in calls
        if part != "backward" and (fused_call(node) or ("",))[0] == _NAME
    ]
    backward = depends_on_tangents(graph) if losses else set()
    decisions = []
    for node, part in losses:
        cost, stock, reason = _costs(node)
        site = site_of(node)
        choice = "kernel"
        if part == "with_grad" and activation_memory_budget() == 0:
            if _compute_again(node):
                choice = "logits computed again, for an activation memory budget of 0"
        elif part == "with_grad":
            _save(node)
            choice = "hoisted with its factor" if _take_factor(node, backward) else "hoisted"
        decisions.append(Decision(site, _NAME, choice, reason, cost, stock))
    return decisions


def _compute_again(node: Node) -> bool:
    """Leaves the gradients to the backward, which computes the logits again; whether it could.

    Without any budget the partitioner saves nothing, and would compute the gradients twice.
    """
    items: dict[Any, Node] = {u.args[1]: u for u in node.users}
    loss_item = items.pop(0, None)
    scales = [(index, scale) for index, item in items.items() for scale in item.users]
    if loss_item is None or not scales:
        return False
    if any(scale.target is not fused.scale.default for _, scale in scales):
        return False
    (grad_output, *others) = {scale.args[1] for _, scale in scales}
    if others:
        return False
    graph, arguments = node.graph, node.args[:ARGUMENT_COUNT]
    needs = node.args[ARGUMENT_COUNT : ARGUMENT_COUNT + 3]
    values = node.meta["val"]

    def call(op: Any, args: tuple[Any, ...], value: Any, like: Node) -> Node:
        new = graph.call_function(op, args)
        new.meta = {k: v for k, v in like.meta.items() if k != EAGER_VALUES}
        new.meta["val"] = value
        return new

    with graph.inserting_before(node):
        loss = call(fused.linear_cross_entropy_forward.default, arguments, values[0], node)
    first = min(scale for _, scale in scales)
    with graph.inserting_before(first):
        op = fused.linear_cross_entropy_backward.default
        backward = call(op, (grad_output, *arguments, *needs), values[1:], first)
        gradients = {
            index: call(operator.getitem, (backward, index - 1), values[index], first)
            for index in items
        }
    loss_item.replace_all_uses_with(loss)
    for index, scale in scales:
        scale.replace_all_uses_with(gradients[index])
        graph.erase_node(scale)
    for unused in (loss_item, *items.values(), node):
        graph.erase_node(unused)
    return True


def _save(node: Node) -> None:
    """Keeps the gradients from being computed a second time in the backward.

    In a checkpointed region, or with an activation memory budget, the partitioner would do so: it
    takes an op that it does not know for cheap.
    """
    for each in (node, *node.users):
        each.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE


def _take_factor(node: Node, backward: set[Node]) -> bool:
    """Whether a factor of all gradients went from the backward into a call."""
    units = [u for u in node.users if u.target is operator.getitem and u.args[1] != 0]
    scales = [user for unit in units for user in unit.users]
    scalings = {scale.args[1] for scale in scales if scale.target is fused.scale.default}
    if len(scalings) != 1 or any(scale.target is not fused.scale.default for scale in scales):
        return False
    factor = factor_of(scalings.pop(), backward)
    if factor is None or not move_before(factor.nodes, node):
        return False
    values = node.meta["val"]
    with node.graph.inserting_before(node):
        number = emit(factor, values[0].dtype, values[0], node.graph)
    node.kwargs = {**node.kwargs, "grad_output": number}
    for scale in scales:
        scale.args = (scale.args[0], factor.tangent)
    # Both are given other arguments than tracing recorded.
    for changed in (node, *scales):
        changed.meta.pop(EAGER_VALUES, None)
    return True


def _costs(node: Node) -> tuple[Cost, Cost, str]:
    """Bytes of logits, of their gradient and of the sums of the others, ours and torch's."""
    named = named_arguments(node)
    needs = [named.get(f"needs_grad_{name}", False) for name in ("input", "linear_weight")]
    input, weight = (named[name].meta["val"] for name in ("input", "linear_weight"))
    hidden = hint_of(weight.shape[1])
    row_bytes = nbytes_of(weight) // max(1, hidden)
    rows = nbytes_of(input) // max(1, hidden * input.element_size())
    classes = row_bytes // weight.element_size()
    if needs[1]:
        how = plan(rows, hidden, classes, weight.dtype, needs_input=needs[0])
    else:
        chunk = chunk_rows(rows, hidden, classes, weight.dtype)
        how = Plan(chunk, held=chunk * row_bytes)
    logits = rows * row_bytes
    # Written by the product and read by the loss; written and read by it again, and by a product
    # for each gradient. Torch reads them once more.
    gradients = (1 + sum(needs)) if any(needs) else 0
    moved = (2 + gradients) * logits
    stock = Cost(moved + logits * any(needs), logits)
    reason = f"{how.chunk} rows of logits at a time"
    if how.first is not None:
        reason = f"{how.first_rows} rows of logits in the weight's gradient"
        if how.first_rows < rows:
            reason += f", then {how.chunk} at a time"
    return Cost(moved + how.moved, how.held), stock, reason
