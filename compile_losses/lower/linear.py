"""Linear cross entropy in joint graphs.

Autograd has put the gradients into the forward already, and a ``scale`` for each into the backward.
What is left to do is to take along what the forward knows of their factor (see ``factor``): the
weight's gradient is often the largest tensor of a step.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from compile_losses.lower.aliases import depends_on_tangents
from compile_losses.lower.calls import fused_call, named_arguments
from compile_losses.lower.cost import Cost, hint_of, nbytes_of
from compile_losses.lower.decision import Decision, site_of
from compile_losses.lower.factor import emit, factor_of, move_before
from compile_losses.ops.linear.chunk_size import Plan, chunk_rows, plan

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
        choice = "kernel"
        if part == "with_grad":
            choice = "hoisted with its factor" if _take_factor(node, backward) else "hoisted"
        decisions.append(Decision(site_of(node), _NAME, choice, reason, cost, stock))
    return decisions


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
        changed.meta.pop("eager_input_vals", None)
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
