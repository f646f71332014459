"""Losses of a linear layer's output in joint graphs: linear cross entropy, divergences, and the
statistics of each row that several losses are made of.

Of a loss that is reduced autograd has put the gradients into the forward already, and a ``scale``
for each into the backward. What is left to do is to take along what the forward knows of their
factor (see ``known_factors``): the weight's gradient is often the largest tensor of a step.

Of one that is not reduced the gradients are in the backward, where the logits are computed again.
They go into the forward where that can compute them (see ``row_gradients``). Otherwise a loss that
recognition found gets its logits back, as torch computes it, unless memory is preferred.

The partitioner takes an op that it does not know for cheap. In a checkpointed region, or with an
activation memory budget, it would compute the gradients of the forward a second time, and so it is
made to save them. With a budget of 0 the backward computes the logits again instead.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import (
    descendants,
    emit,
    erase,
    erase_unused,
    give,
    in_dtype,
    move_before,
    replace,
    replace_uses,
)
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import Cost, hint_of, nbytes_of
from compile_losses.lower.decision import Decision
from compile_losses.lower.early_sizes import compute_sizes_early
from compile_losses.lower.fused_calls import fused_op, same_arguments
from compile_losses.lower.held_logits import (
    grad_outputs_of,
    leaf_arguments,
    name_of,
    results_of,
    take_logits_back,
)
from compile_losses.lower.known_factors import factor_of, product_of
from compile_losses.lower.row_gradients import RowGradients, row_gradients, values_of
from compile_losses.lower.shared_with_forward import save
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.chunk_size import Plan, chunk_rows, held_rows, plan
from compile_losses.ops.linear.row_divergences import tensors_beside
from compile_losses.ops.linear.row_function import encode
from compile_losses.sites import is_without_logits, site_of
from compile_losses.switches import PREFER_MEMORY, how_to_set
from compile_losses.torch_internals.inductor import activation_memory_budget
from compile_losses.torch_internals.ops import named_arguments

aten = torch.ops.aten
fused = torch.ops.fused
_DIVERGENCES = ("linear_softmax_js_div", "linear_softmax_kl_div")
_NAMES = ("linear_cross_entropy", "linear_row_statistics", *_DIVERGENCES)


#: Where a node that counts rows has in words which these are.
COUNTS = "compile_losses_counts"


def plan_linear(graph: AtenGraph) -> None:
    """Moves factors of the gradients into the forward; says what each loss costs."""
    backward = graph.backward
    for node, name, part in graph.calls:
        if name not in _NAMES or part == "backward":
            continue
        cost, stock, reason = _compared_costs(node, node)
        site = site_of(node)
        choice = "kernel"
        if part == "with_grad" and activation_memory_budget() == 0:
            if _compute_again(node):
                choice = "logits computed again, for an activation memory budget of 0"
        elif part == "with_grad":
            choice = (
                "gradient in forward with its factor"
                if _take_factor(node, backward)
                else "gradient in forward"
            )
            save(node)
        graph.decisions.append(Decision(site, name, choice, reason, cost, stock))


def plan_rows(graph: AtenGraph) -> None:
    """Decides how the gradients of losses that are not reduced are computed."""
    graph.decisions += [_plan_rows(graph, node, own) for node, own in differentiated(graph)]


def differentiated(graph: AtenGraph) -> list[tuple[Node, list[Node]]]:
    """The losses of a head that are not reduced, each with the calls of its gradients. What these
    are made of has no sizes that are read from the losses."""
    found = []
    for node in _losses_by_row(graph):
        name = name_of(node)
        own = [
            n for n, *call in graph.calls if call == [name, "backward"] and same_arguments(node, n)
        ]
        if own:
            found.append((node, own))
    if found:
        compute_sizes_early(graph.graph)
    return found


def _losses_by_row(graph: AtenGraph) -> list[Node]:
    """The losses of a head that are not reduced."""
    return [
        node
        for node, name, part in graph.calls
        if name in _NAMES and part == "forward" and _is_by_row(node)
    ]


def numbers_of_rows(graph: AtenGraph, inputs: Sequence[Node]) -> list[Node]:
    """Those of some tensors that are made of what such a loss computes of each row, and have no
    more numbers."""
    found = []
    for node in _losses_by_row(graph):
        made, most = set(descendants([node])), max(hint_of(v.numel()) for v in values_of(node))
        found += [n for n in inputs if n in made and hint_of(n.meta["val"].numel()) <= most]
    return found


def _plan_rows(graph: AtenGraph, node: Node, backwards: list[Node]) -> Decision:
    site, name = site_of(node), name_of(node)
    named = named_arguments(backwards[0])
    needs = tuple(value for name, value in named.items() if name.startswith("needs_grad_"))
    cost, stock, chunks = _compared_costs(backwards[0], node)
    reason = None
    if len(backwards) > 1:
        reason = "its losses are differentiated more than once"
    elif torch.float16 in (values_of(node)[0].dtype, named["input"].meta["val"].dtype):
        reason = "a unit gradient would underflow in float16 before the loss scale reaches it"
    elif activation_memory_budget() == 0:
        reason = "the activation memory budget is 0"
    elif needs == (True, False, False) and _has_one_gradient_a_row(backwards[0]):
        _scale_rows(node, backwards[0])
        return Decision(site, name, "gradient in forward, scaled by row", chunks, cost, stock)
    else:
        found = row_gradients(node, grad_outputs_of(backwards[0]), graph.backward)
        if isinstance(found, RowGradients):
            _move_rows_into_forward(node, backwards[0], found)
            return Decision(site, name, "gradient in forward by row", chunks, cost, stock)
        reason = found
    held = site is not None and not is_without_logits(node)
    plain = named.get("z_loss", 0) == 0
    if held and plain and not graph.request.prefer_memory:
        counted = named["counted"]
        take_logits_back(node, backwards)
        erase_unused([counted] if counted is not None else [])
        reason += f"; {how_to_set(PREFER_MEMORY)} computes the logits twice instead"
        return Decision(site, name, "with its logits", reason)
    return Decision(site, name, "logits computed again", reason, cost, stock)


def _is_by_row(node: Node) -> bool:
    return named_arguments(node).get("reduction", REDUCTIONS["none"]) == REDUCTIONS["none"]


def _given(backward: Node) -> list[Node]:
    """The gradients that a backward is given."""
    return [node for node in grad_outputs_of(backward) if node is not None]


def _has_one_gradient_a_row(backward: Node) -> bool:
    """Whether a backward is given one gradient, of one number a row."""
    given = _given(backward)
    return len(given) == 1 and given[0].meta["val"].dim() == 1


def _with_unit_gradients(
    node: Node, backward: Node, function: str, known: Sequence[Node]
) -> dict[int, Node]:
    """Puts the losses and gradients of each row into the place of the losses; the gradients."""
    named = named_arguments(backward)
    needs = [value for name, value in named.items() if name.startswith("needs_grad_")]
    values = values_of(node)
    with values[0].fake_mode:  # type: ignore[attr-defined]
        fresh = tuple(map(torch.empty_like, backward.meta["val"]))
    op = fused_op(name_of(node), "rows_with_grad")
    args = (*leaf_arguments(node), *needs, function, list(known))
    counted = named["counted"]
    kwargs = {} if counted is None else {"counted": counted}
    both = emit(node, op, args, kwargs, value=(*values, *fresh))
    items = results_of(both, node)
    losses, units = items[: len(values)], items[len(values) :]
    save(both)
    replace(node, losses if len(values) > 1 else losses[0])
    indices: list[Any] = [user.args[1] for user in backward.users]
    kept = {index: units[index] for index in indices}
    erase_unused(item for item in items if item not in kept.values())
    return kept


def _move_rows_into_forward(node: Node, backward: Node, found: RowGradients) -> None:
    units = _with_unit_gradients(node, backward, found.function, found.known)
    values, scale = backward.meta["val"], fused.scale.default
    scaled = {
        index: emit(backward, scale, (unit, found.tangent), value=values[index])
        for index, unit in units.items()
    }
    replace(backward, scaled)


def _scale_rows(node: Node, backward: Node) -> None:
    """Makes input's gradient for a gradient of 1 of each row, which the backward multiplies."""
    input = named_arguments(node)["input"]
    (grad_output,) = _given(backward)
    value = grad_output.meta["val"]
    rows: Any = value.shape[0]
    if not isinstance(rows, int):
        rows = emit(node, aten.sym_size.int, (input, 0), value=rows)
    options: dict[str, Any] = {
        "dtype": value.dtype,
        "device": value.device,
        "layout": torch.strided,
    }
    ones = emit(node, aten.full.default, ([rows], 1), options, value=value)
    first = len(values_of(node))
    results = [None if given is None else first for given in grad_outputs_of(backward)]
    function = encode([], results)
    assert function is not None
    (unit,) = _with_unit_gradients(node, backward, function, [ones]).values()
    column = emit(backward, aten.unsqueeze.default, (grad_output, 1))
    product = emit(backward, aten.mul.Tensor, (unit, column))
    replace(backward, {0: in_dtype(product, backward.meta["val"][0].dtype, backward)})


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
    arguments, values = leaf_arguments(node), node.meta["val"]
    name, count = name_of(node), len(arguments)
    needs = node.args[count : count + 3]
    loss = emit(node, fused_op(name, "forward"), arguments, value=values[0])
    first = min(scale for _, scale in scales)
    args = (grad_output, *arguments, *needs)
    backward = emit(first, fused_op(name, "backward"), args, value=values[1:])
    gradients = {
        index: emit(first, operator.getitem, (backward, index - 1), value=values[index])
        for index in items
    }
    replace_uses(loss_item, loss)
    for index, scale in scales:
        replace(scale, gradients[index])
    erase(loss_item, *items.values(), node)
    return True


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
    loss = node.meta["val"][0]
    give(node, grad_output=product_of(factor, loss.dtype, loss, node))
    for scale in scales:
        give(scale, (scale.args[0], factor.tangent))
    return True


def _compared_costs(node: Node, forward: Node) -> tuple[Cost | None, Cost | None, str]:
    """As :func:`_costs`, without bytes where a loss takes the place of one that is not torch's."""
    cost, stock, reason = _costs(node)
    counted = named_arguments(node)["counted"]
    if counted is not None:
        reason += f", of those with {counted.meta[COUNTS]}"
    return (None, None, reason) if is_without_logits(forward) else (cost, stock, reason)


def _costs(node: Node) -> tuple[Cost, Cost, str]:
    """Bytes of logits, of their gradient and of the sums of the others, ours and torch's."""
    named = named_arguments(node)
    needs = [named.get(f"needs_grad_{name}", False) for name in ("input", "linear_weight")]
    input, weight = (named[name].meta["val"] for name in ("input", "linear_weight"))
    hidden = hint_of(weight.shape[1])
    row_bytes = nbytes_of(weight) // max(1, hidden)
    rows = nbytes_of(input) // max(1, hidden * input.element_size())
    classes = row_bytes // weight.element_size()
    of_teacher, computed = 0, False
    sizes = rows, hidden, classes, weight.dtype, weight.device
    teacher, teacher_weight, teacher_softcap = _teacher_of(node)
    if teacher is not None:
        computed = teacher_weight is not None or teacher_softcap is not None
        beside = tensors_beside(
            input.dtype,
            (teacher if teacher_weight is None else teacher_weight).meta["val"].dtype,
            computed=computed,
            by_row=_is_by_row(node),
            reverse=named.get("reverse", False),  # of no account by row
            gradient=any(needs),
            softcap=named["softcap"] is not None,
        )
        chunk = chunk_rows(*sizes, beside=beside, sums_weight=needs[1], is_taken=True)
        how = Plan(chunk, held=held_rows(chunk, weight.device, beside) * row_bytes)
        of_teacher = rows * classes * teacher.meta["val"].element_size()
    elif needs[1] and not _is_by_row(node):
        how = plan(*sizes, needs_input=needs[0])
    else:
        chunk = chunk_rows(*sizes, sums_weight=needs[1], is_taken=True)
        how = Plan(chunk, held=chunk * row_bytes)
    logits = rows * row_bytes
    # Written by the product and read by the loss; written and read by it again, and by a product
    # for each gradient. Torch reads them once more. A teacher's are read, and written before if
    # they are computed.
    gradients = (1 + sum(needs)) if any(needs) else 0
    moved = (2 + gradients) * logits + (1 + computed) * of_teacher
    stock = Cost(moved + (logits + of_teacher) * any(needs), logits + of_teacher * computed)
    reason = f"{how.chunk} rows of logits at a time"
    if how.first is not None:
        reason = f"{how.first_rows} rows of logits in the weight's gradient"
        if how.first_rows < rows:
            reason += f", then {how.chunk} at a time"
    return Cost(moved + how.moved, how.held), stock, reason


def _teacher_of(node: Node) -> tuple[Node | None, Node | None, float | None]:
    """A teacher's logits, or its layer's input and weight, and its soft-cap."""
    named = named_arguments(node)
    name = "target" if name_of(node) in _DIVERGENCES else "teacher"
    return named.get(name), named.get(f"{name}_weight"), named.get(f"{name}_softcap")
