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

If the tensors that torch's gradient reads outlive the forward in any case, as inputs of the graph
may, torch holds nothing of their size for the backward, and the unit gradient would be one more.
Then ``X_ahead`` computes it for one forward at a time, see :mod:`compile_losses.ops.ahead`::

    loss, ahead = X_ahead(input, ...)       grad = X_ahead_gradient(grad_output, ahead, input, ...)

If grad_output is no power of two, a bfloat16 gradient is rounded twice, which stays within the
accuracy rule of the tests. Gradients in float16 do not move, see ``refusal``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.device_constants import constants_of
from compile_losses.graphs import (
    GIVEN_AS,
    ancestors,
    annotate,
    emit,
    erase_unused,
    fresh_like,
    move_before,
    replace_uses,
    retrace_views,
    view_like,
)
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import nbytes_of
from compile_losses.lower.fused_calls import Loss, fused_call, fused_op
from compile_losses.lower.known_factors import factor_of, product_of
from compile_losses.lower.node_relations import (
    is_fused_into_readers,
    readers_of,
    storage_of,
)
from compile_losses.ops.checks import REDUCTIONS, same_shape
from compile_losses.torch_internals.graphs import RECOMPUTE
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


def operands_outlive(loss: Loss, graph: AtenGraph) -> bool:
    """Whether a loss's input, and what torch's gradient reads, are there until the backward,
    whatever the loss does, so that torch saves nothing else of the input's size. Not in a graph
    that calls the backward itself, and not of a small input.

    Of a function of a difference torch saves the difference, if that is smaller than what it is
    made of. A unit gradient in its place takes no more.
    """
    if graph.backward.isdisjoint(loss.backwards):
        return False
    named = loss.arguments
    input: Tensor = loss.input.meta["val"]
    if nbytes_of(input) < constants_of(input.device).ahead_bytes:
        return False
    held = [*graph.graph.find_nodes(op="placeholder"), *graph.forward_outputs]
    kept = set(map(storage_of, held))
    read = {loss.input, *tensors_read(loss.backwards[0])}
    operands = [n for n in dict.fromkeys(named.values()) if isinstance(n, Node) and n in read]
    values = {n: v for n in operands if isinstance(v := n.meta["val"], Tensor)}
    large = [n for n, v in values.items() if v.is_floating_point() and v.dim() == input.dim()]
    if not all(storage_of(n) in kept or _is_read_again(n, loss, graph) for n in large):
        return False
    if not loss.is_elementwise or loss.name == "kl_div":
        return True
    difference = nbytes_of(input) * max(named["dtype"].itemsize, input.itemsize) // input.itemsize
    return sum(nbytes_of(values[n]) for n in large) <= difference


def _is_read_again(operand: Node, loss: Loss, graph: AtenGraph) -> bool:
    """Whether the backward reads an operand for something else than the loss."""
    readers = {node for node in readers_of(operand) if node.op != "output"}
    return not graph.backward.isdisjoint(readers.difference(loss.backwards))


def refusal_ahead(loss: Loss, graph: AtenGraph) -> str | None:
    """Why a gradient whose operands outlive the forward stays in the backward, or None."""
    if loss.input not in tensors_read(loss.backwards[0]):
        return "torch computes it without the input, which need not be kept for it"
    if graph.request.prefer_memory:
        return "memory is preferred, and what it is computed from is kept in any case"
    if config.triton.cudagraphs:
        return "a CUDA graph can't tell whether the gradient of another forward is held"
    return None


def overwrites_buffers(graph: AtenGraph) -> bool:
    """Whether stock torch.compile donates a buffer to the backward of a joint graph.

    AOTAutograd donates a saved tensor if nothing but the backward needs it, and a backward with a
    donated buffer refuses retain_graph. The unit gradient may be one more donated buffer. It must
    not be the first, or a backward would refuse retain_graph which stock torch.compile allows.
    """
    backward = graph.backward - {*graph.graph.find_nodes(op="output")}
    placeholders = graph.graph.find_nodes(op="placeholder")
    kept = {storage_of(n) for n in [*placeholders, *graph.outputs]}
    ops = get_default_op_list()
    # Nodes of the forward that the backward reads, and the sources of those that are recomputed.
    needed = [n for node in backward for n in tensors_read(node) if n not in backward]

    def is_recomputed(node: Node) -> bool:
        return node.op == "call_function" and ops.is_recomputable(node)

    saved = (n for n in ancestors(needed, past=is_recomputed) if not is_recomputed(n))
    return any(
        node.op == "call_function"
        and not (isinstance(node.meta.get("val"), Tensor) and storage_of(node) in kept)
        for node in saved
    )


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


def move_into_forward(
    loss: Loss, backward_nodes: set[Node], *, owned: bool, ahead: bool = False
) -> bool:
    """Moves the gradient of a loss without a refusal; True if a factor of its grad_output went too.

    Args:
        backward_nodes: the nodes that depend on tangents.
        owned: whether AOTAutograd may give the unit gradient to the backward for good.
        ahead: whether it is computed for one forward at a time.
    """
    (backward,) = loss.backwards
    (gradient,) = loss.gradients()
    value = loss.value
    assert value is not None
    forward = loss.forward
    # What scales the gradient in the backward: all of grad_output, or its factor that is not known.
    scaling: Any = backward.args[0]
    factor = factor_of(scaling, backward_nodes)
    if factor is not None and not move_before(factor.nodes, forward):
        factor = None
    kwargs = dict(forward.kwargs)
    given = forward.meta.get(GIVEN_AS)
    if factor is not None:
        scaling = factor.tangent
        number = product_of(factor, value.meta["val"].dtype, loss.input.meta["val"], forward)
        kwargs["grad_output"] = number
        if given is not None:
            given = given[0], {**given[1], "grad_output": number.meta["val"]}
    unit_value = fresh_like(gradient.meta["val"])
    scaled_value = gradient.meta["val"] if owned else view_like(unit_value)
    if ahead:
        with unit_value.fake_mode:  # type: ignore[attr-defined]
            unit_value = unit_value.as_strided((), ())
    values = value.meta["val"], unit_value
    target = fused_op(loss.name, "ahead" if ahead else "with_grad")
    both = emit(forward, target, forward.args, kwargs, value=values, given_as=given)
    first, unit = (
        emit(forward, operator.getitem, (both, index), like=value, value=result)
        for index, result in enumerate(values)
    )
    # At the place of the backward op, and so after grad_output. The strides that Inductor gives the
    # arguments: with_grad and ahead have those of X_forward.
    of_scale = unit_value, scaling.meta["val"]
    if ahead:
        scaled = emit(
            backward,
            fused_op(loss.name, "ahead_gradient"),
            (scaling, unit, *forward.args),
            kwargs,
            value=scaled_value,
            given_as=None if given is None else ((*reversed(of_scale), *given[0]), given[1]),
        )
    else:
        scaled = scale(backward, unit, scaling, gradient.meta["val"], owned=owned)
        annotate(scaled, GIVEN_AS, (of_scale, {}))
    replace_uses(value, first)
    replace_uses(gradient, scaled)
    retrace_views(scaled)
    erase_unused([*backward.users, backward, *forward.users, forward])
    return factor is not None


def scale(
    place: Node, unit: Node, factor: Node, value: Tensor, *, owned: bool, like: Node | None = None
) -> Node:
    """A gradient, as the backward scales it; what reads it is to be retraced.

    Args:
        place, like: as for :func:`compile_losses.graphs.emit`.
        value: of the gradient.
        owned: whether AOTAutograd may give the unit gradient to the backward for good. It donates
            no tensor that shares memory with a result of the backward.
    """
    value = value if owned else view_like(unit.meta["val"])
    scaled = emit(place, fused.scale.default, (unit, factor), like=like, value=value)
    if not owned:
        annotate(scaled, SAVED, True)
    return scaled
