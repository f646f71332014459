"""Losses as plain ATen, where Inductor fuses them better than a kernel could.

A custom op is opaque: its arguments are written to memory before it, and its gradient is read from
memory after it. The decomposition replaces a loss and its gradient by the ops that torch itself
would have put into the graph, and Inductor fuses those with their neighbours.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

import compile_losses.ops
from compile_losses import library
from compile_losses.graphs import copy_nodes, emit, erase_unused, replace, replace_uses
from compile_losses.lower.fused_calls import (
    Loss,
    fused_call,
    fused_op,
    is_elementwise,
)
from compile_losses.lower.node_relations import readers_of
from compile_losses.lower.shared_with_forward import share
from compile_losses.op_traits import MATMULS
from compile_losses.ops.checks import (
    REDUCTIONS,
    accumulation_type,
    batch_of,
    promoted_dtype,
    reduction_name,
    same_shape,
)
from compile_losses.torch_internals.inductor import select_decomp_table
from compile_losses.torch_internals.ops import named_arguments, schema_of, tree_leaves

aten = torch.ops.aten


def reference_of(name: str) -> Callable[..., Tensor] | None:
    """A loss in torch's own ops. It takes the arguments of ``X_forward`` without the dtype."""
    return getattr(getattr(compile_losses.ops, name, None), "reference", None)


@dataclass(frozen=True)
class Decomposition:
    """A loss and its gradients in torch's own ops.

    Attributes:
        loss: the calls that are replaced.
        replacements: a graph for each gradient, and one for the loss, as ``_trace`` makes them.
    """

    loss: Loss
    replacements: tuple[Graph, ...]

    def apply(self) -> None:
        loss = self.loss
        spliced = []
        # The backward is first: then nothing reads the tensors that the forward saves for it.
        for call, replacement in zip(_calls(loss), self.replacements, strict=True):
            results, nodes = _splice(call, replacement)
            spliced.append(nodes)
            if call is not loss.forward:
                for gradient in results:
                    _hold_layout(gradient)
        *backwards, forward = spliced
        # Torch's formulas for elementwise gradients read nothing of the forward.
        if not is_elementwise(loss.name):
            for backward in backwards:
                share(forward, backward)


def _calls(loss: Loss) -> list[Node]:
    return [*loss.backwards, loss.forward]


def decompositions_of(losses: Sequence[Loss]) -> list[Decomposition] | Loss:
    """The decompositions of losses, or the first that has none; the graph is not changed."""
    found: list[Decomposition] = []
    for loss in losses:
        decomposition = decomposition_of(loss)
        if decomposition is None:
            return loss
        found.append(decomposition)
    return found


def decomposition_of(loss: Loss) -> Decomposition | None:
    """The decomposition of a loss, None where there is none; the graph is not changed."""
    reference = reference_of(loss.name)
    if reference is None or not _only_saved_for(loss):
        return None
    replacements = []
    for call in _calls(loss):
        replacement = _trace(call, reference)
        if replacement is None:
            return None
        replacements.append(replacement)
    return Decomposition(loss, tuple(replacements))


def decompose_backward(node: Node) -> bool:
    """Replaces a gradient whose loss is not in the graph; False, and nothing changed, where that
    can't be done."""
    name, _ = fused_call(node) or ("", "")
    reference = reference_of(name)
    traced = _trace(node, reference) if reference is not None else None
    if traced is None:
        return False
    _splice(node, traced)
    return True


def decompose_by_body(node: Node) -> bool:
    """Replaces a call by what computes the op without kernels; False, and nothing changed, where
    that can't be done."""
    body = {**library.COMPOSED, **library.BODIES}[node.target]  # type: ignore[index]
    sources = node.all_input_nodes

    def function(*inputs: Any) -> Any:
        given = dict(zip(sources, inputs, strict=True))
        return body(*torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)[0])

    traced = None if node.kwargs else _traced(sources, function)
    if traced is None:
        return False
    _splice(node, traced)
    return True


def _only_saved_for(loss: Loss) -> bool:
    """Whether the backward alone reads the results of a forward besides the loss."""
    if len(schema_of(loss.forward.target).returns) == 1:
        return True
    readers = {*loss.backwards}
    return all(
        item.target is operator.getitem and (item.args[1] == 0 or set(item.users) <= readers)
        for item in loss.forward.users
    )


def _trace(node: Node, reference: Callable[..., Tensor]) -> Graph | None:
    """A call in functional ATen. The graph's placeholders stand for ``node.all_input_nodes``; None
    if the trace has constants of its own.

    Torch's own gradient formulas write in place (``grad.div_(n)``). Inductor expects no writes in a
    joint graph, and may move a read of a buffer past a write to it.
    """
    name, part = fused_call(node) or ("", "")
    named = named_arguments(node)
    options = [a.name for a in schema_of(fused_op(name, "forward")).arguments if a.name != "dtype"]
    sources = node.all_input_nodes

    def function(*inputs: Any) -> Any:
        bound = torch.fx.node.map_arg(named, dict(zip(sources, inputs, strict=True)).__getitem__)
        if part == "forward":
            return _forward(reference, bound, options)
        return _backward(reference, bound, options, of_elements=is_elementwise(name))

    return _traced(sources, function)


def _traced(sources: Sequence[Node], function: Callable[..., Any]) -> Graph | None:
    """A function of the values of nodes in functional ATen, as :func:`_trace` returns it."""
    values = [source.meta["val"] for source in sources]
    tensors = [value for value in values if isinstance(value, Tensor)]
    with tensors[0].fake_mode:  # type: ignore[attr-defined]
        # Both traces have the table: functionalize has other decompositions for ops that are left.
        table = select_decomp_table()
        traced = make_fx(function, decomposition_table=table)(*values)
        functional = functionalize(traced, remove="mutations")
        graph = make_fx(functional, decomposition_table=table)(*values).graph
    if graph.find_nodes(op="get_attr") or len(graph.find_nodes(op="placeholder")) != len(sources):
        return None
    _drop_idle_views(graph)
    return graph


def _drop_idle_views(graph: Graph) -> None:
    """Removes views of the same shape. Through such views the compiler does not see that forward
    and backward compute the same, and computes it twice."""
    for node in list(graph.nodes):
        if node.target in (aten.alias.default, aten.detach.default, aten.expand.default):
            source = node.args[0]
            same = sym_eq(source.meta["val"].shape, node.meta["val"].shape)
            if statically_known_true(same):
                replace(node, source)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _forward(reference: Callable[..., Tensor], named: dict[str, Any], options: list[str]) -> Any:
    dtype = named["dtype"]
    return reference(*(_cast(named[name], dtype) for name in options))


def _scales_once(device: torch.device) -> bool:
    """Whether the gradient of a mean is computed as the sum's, for ``grad_output`` / count in a
    wider dtype.

    Torch's formulas scale each element. In a CPU's loop over 16-bit numbers that takes up to 1.14
    times as long. A GPU's loop waits for memory. There the number of ops decides whether Inductor
    writes the gradient over the predictions, and torch's formulas make the same decision as
    without this package.
    """
    return device.type == "cpu"


def _backward(
    reference: Callable[..., Tensor],
    named: dict[str, Any],
    options: list[str],
    *,
    of_elements: bool,
) -> Any:
    """The gradients that a call of ``X_backward`` asks for, as torch's formulas compute them; where
    it has no flags, that of input alone."""
    grad_output = named["grad_output"]
    needs = {k.removeprefix("needs_grad_"): v for k, v in named.items() if k.startswith("needs_")}
    given = {k: v for k, v in needs.items() if named[k] is not None} or {"input": True}
    # Elementwise losses return gradients of the broadcast shape, in the wide dtype.
    shape = torch.broadcast_shapes(*(named[k].shape for k in given if k != "weight"))
    floating = [named[k] for k in ("input", "target") if named[k].is_floating_point()]
    wide = accumulation_type(promoted_dtype(grad_output, *floating))
    divisors = {"batchmean": batch_of(named["input"])}
    scaled_once = _scales_once(grad_output.device)
    count = math.prod(shape)
    # Torch's formulas divide by the count in Python, where 0 is an error.
    if of_elements and (scaled_once or statically_known_true(count == 0)):
        divisors["mean"] = count
    divisor = divisors.get(reduction_name(named["reduction"]))
    if divisor is not None:
        grad_output = (grad_output.to(wide) if scaled_once else grad_output) / divisor
        named = {**named, "reduction": REDUCTIONS["sum"]}
    leaves = {
        name: (
            named[name]
            if same_shape(named[name].shape, shape)
            else named[name].to(wide).expand(shape)
        )
        .detach()
        .requires_grad_(bool(needed))
        for name, needed in given.items()
    }
    with torch.enable_grad():
        arguments = ({**named, **leaves}[name] for name in options)
        value = reference(*(_cast(argument, grad_output.dtype) for argument in arguments))
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, grad_output))
    results = [next(found) if leaf.requires_grad else leaf.new_empty(0) for leaf in leaves.values()]
    return tuple(results) if needs else results[0]


def _splice(node: Node, replacement: Graph) -> tuple[list[Node], list[Node]]:
    """Replaces a call by its traced ops.

    Returns:
        The results that are read, and all nodes of the replacement.
    """
    placeholders = replacement.find_nodes(op="placeholder")
    copies = dict(zip(placeholders, node.all_input_nodes, strict=True))
    inner = [n for n in replacement.nodes if n.op == "call_function"]
    copy_nodes(inner, copies, lambda _: node, node)
    (output,) = replacement.find_nodes(op="output")
    results: Any = torch.fx.node.map_arg(output.args[0], copies.__getitem__)
    several = len(schema_of(node.target).returns) > 1
    replace(node, (results,) if several and isinstance(results, Node) else results)
    nodes = [copies[n] for n in inner]
    erase_unused(reversed(nodes))  # the places of gradients that are not needed
    read = [each for each in tree_leaves(results) if isinstance(each, Node) and each.users]
    return read, [copy for copy in nodes if copy.users]


def _hold_layout(gradient: Node) -> None:
    """Has Inductor write the gradient of a transposed product once, in the strides of eager mode.

    If two matrix products read a gradient through one view, Inductor writes the gradient row by
    row and then copies it into these strides. If rows are no multiple of 16 bytes, Inductor may pad
    them, and nothing is changed.
    """
    value: Tensor = gradient.meta["val"]
    strides = value.stride()
    readers = readers_of(gradient)
    if len(readers) < 2 or any(reader.target not in MATMULS for reader in readers):
        return
    if not all(isinstance(s, int) for s in (*value.shape, *strides)) or value.is_contiguous():
        return
    if any(s != 1 and s * value.element_size() % 16 for s in strides):
        return
    target = torch.ops.prims.inductor_force_stride_order.default
    args = (gradient, list(strides))
    held = emit(gradient.next, target, args, like=gradient, value=value)
    replace_uses(gradient, held, but=held)
