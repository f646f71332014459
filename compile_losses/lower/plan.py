"""What becomes of each loss of a joint or inference graph: a kernel, or torch's own ops.

A kernel reads its arguments once and computes the gradient in the same read (see
``gradient_in_forward``). Torch's ops read them again in the backward, but are fused with what feeds
the loss (see ``decompose``). A loss is a kernel unless ``cost`` says that it would move or hold
more bytes than torch's ops, or it is small, or its device has no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses import implementations
from compile_losses.graphs import descendants
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import (
    Cost,
    Feed,
    Gradient,
    decomposed_cost,
    feed_of,
    kernel_cost,
    nbytes_of,
)
from compile_losses.lower.counted_rows import count_rows
from compile_losses.lower.dead_buffers import is_computed_where_it_stands, overwritable
from compile_losses.lower.decision import Decision
from compile_losses.lower.decompose import (
    Decomposition,
    decompose_backward,
    decompose_by_body,
    decomposition_of,
)
from compile_losses.lower.elementwise import move_gradients
from compile_losses.lower.equal_losses import merge_equal_losses
from compile_losses.lower.fused_calls import (
    Loss,
    fused_call,
    has_part,
)
from compile_losses.lower.gradient_in_forward import (
    move_into_forward,
    operands_outlive,
    overwrites_buffers,
    refusal,
    refusal_ahead,
    tensors_read,
)
from compile_losses.lower.linear_losses import numbers_of_rows, plan_linear, plan_rows
from compile_losses.lower.mutated_inputs import save_before_mutation
from compile_losses.lower.node_relations import (
    is_fused_into_readers,
)
from compile_losses.lower.one_weight import join_heads
from compile_losses.lower.product_gradients import overwrite_products
from compile_losses.lower.regions import take_regions
from compile_losses.lower.slow_paths import is_small, slow_path
from compile_losses.lower.statistics import plan_statistics
from compile_losses.lower.two_softmaxes import take_two_softmaxes
from compile_losses.op_traits import CASTS
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.passes import PLAN
from compile_losses.pipeline import Pipeline
from compile_losses.request import Request
from compile_losses.sites import site_of
from compile_losses.torch_internals.inductor import OpTypes, get_default_op_list

aten = torch.ops.aten

#: A kernel may cost this many times as much as torch's ops: the estimates are not more exact.
_MARGIN = 1.05

#: Of a gradient in the forward, if torch holds nothing for it.
AHEAD = "unless the gradient of another forward is held"


@dataclass(frozen=True)
class LossPlan:
    """What becomes of a loss, decided on a graph in which no loss has been replaced yet.

    Attributes:
        loss: the calls.
        decision: a kernel, or decomposed; with what either costs.
        decomposition: what replaces the loss; None where the loss stays a kernel.
        in_backward: why the gradient of a kernel stays in the backward; None where it moves.
        owned: whether AOTAutograd may give a gradient that moves to the backward for good.
        ahead: whether a gradient that moves is computed for one forward at a time.
    """

    loss: Loss
    decision: Decision
    decomposition: Decomposition | None
    in_backward: str | None
    owned: bool
    ahead: bool


def _decompose_of_rows(graph: AtenGraph) -> None:
    """Decomposes the losses of a few numbers of each row of a head. In torch's ops the plan for the
    head sees how its gradients are made."""
    losses = graph.losses
    small = set(numbers_of_rows(graph, [loss.input for loss in losses]))
    for loss in losses:
        decomposition = decomposition_of(loss) if loss.input in small else None
        if decomposition is not None:
            site, name = site_of(loss.forward), loss.name
            decomposition.apply()
            reason = "it is made of a few numbers of each row of a head"
            graph.decisions.append(Decision(site, name, "decomposed", reason))


def _plan_kernels(graph: AtenGraph) -> None:
    """Plans each loss that is an op, and then applies all plans."""
    if not graph.calls:
        return
    ops = get_default_op_list()
    overwrites = overwrites_buffers(graph)
    _decompose_statistics(graph)
    _apply([_plan(loss, graph, ops, overwrites) for loss in graph.losses], graph, ops)


def _plan(loss: Loss, graph: AtenGraph, ops: OpTypes, overwrites: bool) -> LossPlan:
    """What becomes of a loss; nothing is changed."""
    in_backward = refusal(loss, overwrites)
    ahead = in_backward is None and operands_outlive(loss, graph)
    if ahead:
        in_backward = refusal_ahead(loss, graph)
    in_forward = bool(loss.backwards) and in_backward is None
    decision = _choose(loss, graph, ops, in_forward=in_forward)
    decomposition = decomposition_of(loss) if decision.choice == "decomposed" else None
    if decision.choice == "decomposed" and decomposition is None:
        decision = Decision(decision.site, loss.name, "kernel", "it can't be decomposed")
    return LossPlan(loss, decision, decomposition, in_backward, overwrites, ahead)


def _apply(plans: Sequence[LossPlan], graph: AtenGraph, ops: OpTypes) -> None:
    """Changes a graph as planned: first the decompositions, so that a gradient that moves passes
    torch's ops and no op of ours."""
    for each in plans:
        if each.decomposition is not None:
            each.decomposition.apply()
    _decompose_unpaired_backwards(graph, ops)
    graph.decisions += [each.decision for each in plans]
    backward = graph.backward
    for each in plans:
        if each.decomposition is not None or not each.loss.backwards:
            continue
        choice = "gradient in forward"
        if each.in_backward is not None:
            choice = "gradient in backward"
        elif move_into_forward(each.loss, backward, owned=each.owned, ahead=each.ahead):
            choice += " with its factor"
        reason = each.in_backward or (AHEAD if each.ahead else "")
        graph.decisions.append(Decision(each.decision.site, each.loss.name, choice, reason))


def _decompose_unpaired_backwards(graph: AtenGraph, ops: OpTypes) -> None:
    """Decomposes gradients whose loss is not in the graph, if Inductor would fuse their arguments,
    or if there are no kernels.

    ``in_place`` decomposes all gradients of elementwise losses in the backward's own graph.
    """
    paired = {backward for loss in graph.losses for backward in loss.backwards}
    for node, name, part in graph.calls:
        if part != "backward" or node in paired or not has_part(name, "with_grad_"):
            continue
        tensors = [n for n in node.all_input_nodes[1:3] if isinstance(n.meta.get("val"), Tensor)]
        fused = any(feed_of(n, ops).source is not None for n in tensors)
        if fused or not _has_kernels(node):
            decompose_backward(node)


def _decompose_short_backwards(graph: AtenGraph) -> None:
    """Decomposes gradients that torch computes from fewer tensors than the op takes. For the op
    the forward would have to save the others, too."""
    for node, name, part in graph.calls:
        is_gradient = part == "backward" and has_part(name, "with_grad_")
        if is_gradient and len(tensors_read(node)) < len(node.all_input_nodes):
            decompose_backward(node)


def _decompose_statistics(graph: AtenGraph) -> None:
    """Decomposes statistics of held logits where there are no kernels. What is picked of rows is
    made of other statistics, and so is gone through first."""
    for name in ("row_picks", "row_statistics"):
        for node in list(graph.graph.nodes):
            call = fused_call(node)
            if call is not None and call[0] == name and not _has_kernels(node):
                decompose_by_body(node)


def _has_kernels(call: Node) -> bool:
    """Whether a kernel computes a loss or a gradient."""
    values = (node.meta.get("val") for node in call.all_input_nodes)
    devices = (value.device for value in values if isinstance(value, Tensor))
    return all(map(implementations.has_kernels, devices))


def _choose(loss: Loss, graph: AtenGraph, ops: OpTypes, *, in_forward: bool) -> Decision:
    """A kernel or torch's own ops.

    Args:
        in_forward: whether a kernel computes the gradient with the loss.
    """
    feeds = feeds_of(loss, ops)
    kernel, stock = costs(loss, graph, feeds, in_forward)
    site = site_of(loss.forward)
    if not _has_kernels(loss.forward):
        # What a kernel reads once a body reads several times, in as many calls.
        return Decision(site, loss.name, "decomposed", "there are no kernels", stock, stock)
    saves = kernel.moved <= _MARGIN * stock.moved and kernel.held <= _MARGIN * stock.held
    if saves and not is_small(loss):
        kinds = " and ".join(dict.fromkeys(feed.kind for feed in feeds))
        return Decision(site, loss.name, "kernel", f"of {kinds}", kernel, stock)
    fused = [feed.kind for feed in feeds if feed.source is not None]
    if saves:
        reason = "it is small, its calls would take longer than they save"
    elif fused:
        reason = f"{fused[0]} is computed in the same kernel"
    elif loss.arguments["reduction"] == REDUCTIONS["none"]:
        reason = "an unreduced loss is fused with what reads it"
    elif (slow := slow_path(loss)) is not None:
        reason = slow.reason
    else:
        reason = "the gradient is fused with what reads it"
    return Decision(site, loss.name, "decomposed", f"{reason}; as a kernel {kernel}", stock, stock)


def feeds_of(loss: Loss, ops: OpTypes) -> list[Feed]:
    """The feeds of the arguments of input's rank: no class indices, and no weights of classes."""
    named = loss.arguments
    names = ("input", "target", "weight", "pos_weight")
    tensors = [named[name] for name in names if isinstance(named.get(name), Node)]
    dim = loss.input.meta["val"].dim()
    values = [(tensor, tensor.meta["val"]) for tensor in tensors]
    return [feed_of(t, ops) for t, v in values if v.is_floating_point() and v.dim() == dim]


def costs(
    loss: Loss, graph: AtenGraph, feeds: Sequence[Feed], in_forward: bool
) -> tuple[Cost, Cost]:
    """The costs of a loss as a kernel, and in torch's own ops."""
    gradients = [
        Gradient(nbytes_of(node.meta["val"]), is_fused_into_readers(node))
        for node in loss.gradients()
    ]
    value = loss.value
    between = 0
    if value is not None and loss.arguments["reduction"] == REDUCTIONS["none"]:
        # The loss is written and read back, and so is its grad_output.
        between = nbytes_of(value.meta["val"]) * (4 if gradients else 2)
    # If torch's ops can't write the gradient over the input, no kernel can.
    decomposed_in_place = _dies(loss, graph, lambda reader: True)
    in_place = (
        decomposed_in_place
        and (in_forward or loss.name == "cross_entropy")
        and _dies(loss, graph, is_computed_where_it_stands)
    )
    kernel = kernel_cost(feeds, between, gradients, in_forward=in_forward, in_place=in_place)
    # A weighted mean divides by the weight's sum, for which torch's ops need no read of their own.
    weight = loss.arguments.get("weight")
    if isinstance(weight, Node) and weight.op == "placeholder" and _is_summed(weight):
        kernel = Cost(kernel.moved + nbytes_of(weight.meta["val"]), kernel.held)
    slow = slow_path(loss)
    if slow is not None:
        kernel = Cost(int(slow.factor * kernel.moved), kernel.held)
    return kernel, decomposed_cost(
        feeds, gradients, _forward_passes(loss), in_place=decomposed_in_place
    )


def _dies(loss: Loss, graph: AtenGraph, may_come_first: Callable[[Node], bool]) -> bool:
    """Whether the gradient may be written over the input. All other readers of the input must
    belong to the forward, and the backward must need nothing that is computed from such a reader.

    Args:
        may_come_first: says of a reader whether the gradient can wait for it.
    """
    readers = {loss.forward, *loss.backwards}
    backward = graph.backward
    after = set(descendants([loss.forward]))

    def earlier(reader: Node) -> bool:
        if reader in after or not may_come_first(reader):
            return False
        made = descendants([reader])
        return not any(node in backward and node.op != "output" for node in made)

    return overwritable(loss.input, readers, earlier=earlier) is None


def _is_summed(node: Node) -> bool:
    """Whether a graph sums a tensor up, or a cast of it."""
    return any(
        user.target in (aten.sum.default, aten.sum.dim_IntList)
        or (user.target in CASTS and _is_summed(user))
        for user in node.users
    )


def _forward_passes(loss: Loss) -> int:
    """How often torch's ops read the input. On a CPU a softmax reads it twice: for the maximum and
    for the sum."""
    device: torch.device = loss.input.meta["val"].device
    return 2 if not loss.is_elementwise and device.type == "cpu" else 1


_PIPELINE: Pipeline[AtenGraph] = Pipeline(
    PLAN,
    statistics=plan_statistics,
    merge_equal=merge_equal_losses,
    row_losses=_decompose_of_rows,
    counted_rows=count_rows,
    row_gradients=plan_rows,
    regions=take_regions,
    two_softmaxes=take_two_softmaxes,
    kernels=_plan_kernels,
    product_gradients=overwrite_products,
    head_factors=plan_linear,
    one_weight=join_heads,
    short_gradients=_decompose_short_backwards,
    elementwise=move_gradients,
    mutated_inputs=save_before_mutation,
)


def plan(graph: Graph, request: Request | None = None) -> list[Decision]:
    """Decides about every loss of a graph; returns what was decided, for each loss.

    Args:
        request: by default what the environment asks for.
    """
    indexed = AtenGraph(graph, Request.of() if request is None else request)
    _PIPELINE.run(indexed)
    return indexed.decisions
