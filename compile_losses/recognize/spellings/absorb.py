"""Absorption: a logarithm, or a cast to a wider dtype, before a loss becomes part of its op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.ops.checks import NARROW
from compile_losses.recognize.graph.aten_replay import aten, compute
from compile_losses.recognize.graph.memory import memory_of, storage_of
from compile_losses.recognize.graph.symbolic_tensors import Value, whole
from compile_losses.recognize.match import Match, example


def absorb(match: Match) -> None:
    """Moves a match's arguments up past nodes whose work its op can do itself."""
    if not isinstance(example(match.root), Tensor):
        return
    if match.op == "kl_div":
        _absorb_log(match)
    # cross_entropy's target may be an index; the other losses' may be cast like input.
    for i in range(len(_floating_arguments(match))):
        _absorb_cast(match, i)
    # An absorbed cast or autocast makes a loss wider than its arguments. Torch's autocast does not
    # widen a loss that is written out.
    result = example(match.root).dtype
    dtypes = [argument.dtype for argument in _floating_arguments(match)]
    if any(dtype in NARROW for dtype in dtypes) and (result == torch.float32 or match.interior):
        match.kwargs.setdefault("dtype", result)


def _floating_arguments(match: Match) -> list[Tensor]:
    values = [example(argument) for argument in match.args[:2]]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _absorb_log(match: Match) -> None:
    """kl_div(p.log(), q): the op takes the logarithm itself."""
    input = match.args[0]
    if match.kwargs.get("log_input") is False:  # it takes one logarithm, and has it
        return
    if not _is_log(input) or len(input.args) != 1 or input.kwargs:
        return
    probabilities = input.args[0]
    if not _absorbable(match, input, probabilities):
        return
    if not example(probabilities).is_floating_point():
        return
    match.args = (probabilities, *match.args[1:])
    match.kwargs["log_input"] = False
    match.interior.append(input)
    match.absorbed.append("the logarithm")


def _is_log(node: Any) -> bool:
    """Whether an argument is a call of torch's logarithm."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_method":
        return node.target == "log"
    return node.op == "call_function" and node.target in (
        torch.log,
        torch.Tensor.log,
        aten.log.default,
    )


def _absorb_cast(match: Match, index: int) -> None:
    """loss(x.float(), ...): the op reads x as it is and computes in float32.

    The result is that of torch: each element is converted on the way, and the gradient is rounded
    to x's dtype once, as by the backward of torch's cast.
    """
    found = _without_cast(match, match.args[index])
    if found is None:
        return
    source, cast = found
    to, origin = example(match.args[index]).dtype, example(source).dtype
    if (to, origin) not in {(torch.float32, narrow) for narrow in NARROW}:
        return
    arguments = list(match.args)
    arguments[index] = source
    match.args = tuple(arguments)
    if cast is not None and cast not in match.interior:
        match.interior.append(cast)
    match.absorbed.append(f"a cast from {str(origin).removeprefix('torch.')}")


def _without_cast(match: Match, argument: Any) -> tuple[Any, Node | None] | None:
    """The source of a cast, and the cast's node if it has one; views in between stay. None if there
    is no cast that the op can take over."""
    if isinstance(argument, Node):
        source = _cast_source(argument)
        if source is None or not _absorbable(match, argument, source):
            return None
        return source, argument
    if not isinstance(argument, Value) or argument.op is None:
        return None
    inner = argument.args[0]
    if argument.op is aten._to_copy.default:
        return inner.argument, None
    if argument.op is not aten.permute.default:
        return None
    found = _without_cast(match, inner.argument)
    if found is None:
        return None
    source, cast = found
    value = source if isinstance(source, Value) else whole(source)
    moved = compute(argument.op, value, *argument.args[1:])
    return None if moved is None else (moved, cast)


def _cast_source(node: Any) -> Node | None:
    """The argument of x.float(), x.to(dtype), x.type(dtype) and nothing else; else None."""
    if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.op == "call_method" and node.target in ("float", "to", "type"):
        rest = [*node.args[1:], *node.kwargs.values()]
        if all(isinstance(argument, torch.dtype) for argument in rest):
            return node.args[0]
    return None


def _absorbable(match: Match, node: Node, argument: Any) -> bool:
    """Whether a match may read ``argument`` in place of ``node``, which has no user outside it.

    If the node has another user, its tensor is in memory anyway, and gradients would be added up in
    another dtype. Node and argument must not be written to in between, and the node must not cut
    gradients off.
    """
    value, source = example(node), example(argument)
    return (
        set(node.users) <= {match.root, *match.interior}
        and isinstance(value, Tensor)
        and isinstance(source, Tensor)
        and value.shape == source.shape
        and value.device == source.device
        and value.requires_grad == source.requires_grad
        and not (value.is_inference() or source.is_inference())  # they have no version
        and not any(
            memory_of(node.graph).conflict(storage_of(tensor), node, match.root)
            for tensor in (value, source)
        )
    )
