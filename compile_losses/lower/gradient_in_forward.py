"""The gradient computed with the loss.

In a joint graph a loss and its gradient read the same operands twice::

    loss = X_forward(input, target, ...)         grad = X_backward(grad_output, input, target, ...)

The pass computes the gradient for a grad_output of 1 in the same read. The backward only scales it,
which costs nothing when grad_output is 1::

    loss, unit = X_with_grad(input, target, ...)         grad = scale(unit, grad_output)

Where grad_output is the tangent of the whole times factors that the forward knows,
``known_factors`` puts the factors into X_with_grad, and the scaling is by the tangent alone.

If the backward overwrites buffers anyway, it is given the unit gradient to scale in place. Any
other backward must be able to run again if its graph is retained: then it scales a copy, see
``scale_saved``.

If grad_output is no power of two, a bfloat16 gradient is rounded twice, which stays within the
accuracy rule of the tests. Gradients in float16 do not move, see ``refusal``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from compile_losses.lower.fused_calls import Loss, fused_call, fused_op
from compile_losses.lower.known_factors import emit, factor_of
from compile_losses.lower.node_relations import (
    depends_on_tangents,
    graph_outputs,
    is_fused_into_readers,
    is_view,
    readers_of,
    storage_of,
)
from compile_losses.node_order import move_before
from compile_losses.ops.checks import REDUCTIONS, same_shape
from compile_losses.torch_internals.graphs import EAGER_VALUES, RECOMPUTE
from compile_losses.torch_internals.inductor import (
    activation_memory_budget,
    config,
    get_default_op_list,
)
from compile_losses.torch_internals.ops import named_arguments

fused = torch.ops.fused

#: In the meta of a ``scale``: its gradient is autograd's, see ``scale_saved``.
SAVED = "compile_losses_saved"


def refusal(loss: Loss, overwrites: bool) -> str | None:
    """Why a gradient stays in the backward, or None; see overwrites_buffers."""
    if len(loss.backwards) != 1:
        return "the loss is differentiated more than once"
    (backward,) = loss.backwards
    reduction = loss.arguments["reduction"]
    needs = {k: v for k, v in named_arguments(backward).items() if k.startswith("needs_grad_")}
    gradients = loss.gradients()
    if not isinstance(reduction, int) or loss.value is None or not gradients:
        return "the graph does not hold the loss and its gradient as one node each"
    if reduction == REDUCTIONS["none"]:
        return "the loss is not reduced"
    if any(v is not (k == "needs_grad_input") for k, v in needs.items()):
        return "another argument than input needs a gradient"
    input: Tensor = loss.input.meta["val"]
    gradient: Tensor = gradients[0].meta["val"]
    if not same_shape(gradient.shape, input.shape):
        return "input is broadcast"
    if gradient.dtype == torch.float16:
        return "a unit gradient would underflow in float16 before the loss scale reaches it"
    if any(n.meta.get(RECOMPUTE) is not None for n in (loss.forward, loss.input)):
        return "inside a checkpointed region, which runs its forward twice"
    if activation_memory_budget() < 1:
        return "with an activation memory budget, for which the forward may run twice"
    if not overwrites and config.triton.cudagraphs:
        return "a CUDA graph of the backward could no longer run twice (retain_graph)"
    if not overwrites and is_fused_into_readers(gradients[0]):
        return "Inductor computes it in what reads it, and nothing else is kept for the backward"
    if not overwrites and not is_returned(gradients[0]):
        return "AOTAutograd would give it to the backward for good, which could not run twice then"
    return None


def overwrites_buffers(graph: Graph) -> bool:
    """Whether stock torch.compile donates a buffer to the backward of a joint graph.

    AOTAutograd donates a saved tensor if nothing but the backward needs it, and a backward with a
    donated buffer refuses retain_graph. The unit gradient may be one more donated buffer. It must
    not be the first, or a backward would refuse retain_graph which stock torch.compile allows.
    """
    backward = depends_on_tangents(graph) - {*graph.find_nodes(op="output")}
    kept = {storage_of(n) for n in [*graph.find_nodes(op="placeholder"), *graph_outputs(graph)]}
    ops = get_default_op_list()
    # Nodes of the forward that the backward reads, and the sources of those that are recomputed.
    needed = [n for node in backward for n in tensors_read(node) if n not in backward]
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


def tensors_read(node: Node) -> list[Node]:
    """The arguments that torch's ops for a node read: torch computes the gradient of kl_div with
    respect to log-probabilities from the target alone."""
    if fused_call(node) == ("kl_div", "backward"):
        named = named_arguments(node)
        if named["log_input"] and not named["needs_grad_target"]:
            return [n for n in node.all_input_nodes if n is not named["input"]]
    return node.all_input_nodes


def is_returned(node: Node) -> bool:
    """Whether a graph returns a value, itself or through views."""
    return any(reader.op == "output" for reader in readers_of(node))


def _like(fake: Any) -> Tensor:
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _view(fake: Any) -> Tensor:
    with fake.fake_mode:
        return fake.view_as(fake)


def move_into_forward(loss: Loss, backward_nodes: set[Node], *, owned: bool) -> bool:
    """Moves the gradient of a loss without a refusal; True if a factor of its grad_output went too.

    Args:
        backward_nodes: the nodes that depend on tangents.
        owned: whether AOTAutograd may give the unit gradient to the backward for good.
    """
    (backward,) = loss.backwards
    (gradient,) = loss.gradients()
    value = loss.value
    assert value is not None
    graph = loss.forward.graph
    with_grad = fused_op(loss.name, "with_grad")
    # What scales the gradient in the backward: all of grad_output, or its factor that is not known.
    scaling: Any = backward.args[0]
    factor = factor_of(scaling, backward_nodes)
    if factor is not None and not move_before(factor.nodes, loss.forward):
        factor = None
    kwargs = dict(loss.forward.kwargs)
    meta = dict(loss.forward.meta)
    with graph.inserting_before(loss.forward):
        if factor is not None:
            scaling = factor.tangent
            number = emit(factor, value.meta["val"].dtype, loss.input.meta["val"], graph)
            kwargs["grad_output"] = number
            if EAGER_VALUES in meta:
                args_vals, kwargs_vals = meta[EAGER_VALUES]
                kwargs_vals = {**kwargs_vals, "grad_output": number.meta["val"]}
                meta[EAGER_VALUES] = args_vals, kwargs_vals
        both = graph.call_function(with_grad, loss.forward.args, kwargs)
        unit_value = _like(gradient.meta["val"])
        both.meta = {**meta, "val": (value.meta["val"], unit_value)}
        first = graph.call_function(operator.getitem, (both, 0))
        first.meta = dict(value.meta)
        unit = graph.call_function(operator.getitem, (both, 1))
        unit.meta = {**value.meta, "val": unit_value}
    # At the place of the backward op, and so after grad_output.
    with graph.inserting_before(backward):
        scaled = graph.call_function(fused.scale.default, (unit, scaling))
        scaled.meta = {**backward.meta, "val": gradient.meta["val"]}
        if not owned:
            # AOTAutograd donates no tensor that shares memory with a result of the backward.
            scaled.meta |= {SAVED: True, "val": _view(unit_value)}
        # The strides that Inductor gives the arguments; with_grad has those of X_forward.
        scaled.meta[EAGER_VALUES] = ((unit.meta["val"], scaling.meta["val"]), {})
    value.replace_all_uses_with(first)
    gradient.replace_all_uses_with(scaled)
    _retrace_views(scaled)
    for node in (*backward.users, backward, *loss.forward.users, loss.forward):
        if not node.users:
            graph.erase_node(node)
    return factor is not None


def _retrace_views(node: Node) -> None:
    """Makes the recorded values of a node's views share the memory of the node's value."""
    for user in node.users:
        if is_view(user):
            args, kwargs = map_arg((user.args, user.kwargs), lambda n: n.meta["val"])
            with node.meta["val"].fake_mode:
                user.meta["val"] = user.target(*args, **kwargs)  # type: ignore[operator]
            _retrace_views(user)
