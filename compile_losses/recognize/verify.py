"""Evaluates a match and the nodes that it replaces on the same numbers, and compares the results.

Verification guards against errors of recognisers: the original nodes run as they are, in float64,
from the tensors that the rewrite reads to the root. It costs some milliseconds a site, and so is
off by default.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.recognize.graph.rounding import rounding
from compile_losses.recognize.graph.small_sizes import NoSizeError, Sizes
from compile_losses.recognize.graph.symbolic_tensors import Size, Value, example
from compile_losses.recognize.match import Match
from compile_losses.torch_internals.eager import no_modes
from compile_losses.torch_internals.ops import given_arguments, tree_leaves, tree_map

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CASTS = {"float", "half", "bfloat16"}
#: Ops of logits [rows, classes, ...] and class indices.
_WITH_CLASSES = ("cross_entropy", "nll_loss", "row_statistics_forward")
#: The most elements of a tensor with which a difference at smaller sizes is tried again.
_MOST_ELEMENTS = 2**22


class _NotVerifiableError(Exception):
    """The original can't be evaluated here; the message says why."""


def verify(match: Match) -> tuple[str | None, str]:
    """Compares a match with the nodes that it replaces.

    Returns:
        A reason to decline the match, or None; and a remark for the report if the two could not be
        compared.
    """
    try:
        sizes = Sizes([example(node) for node in match.inputs])
        reason = _Comparison(match, sizes).run()
        if reason is not None and sizes.smaller and sizes.elements <= _MOST_ELEMENTS:
            # A number in the graph may have depended on the sizes.
            reason = _Comparison(match, sizes.unchanged()).run()
        return reason, ""
    except (_NotVerifiableError, NoSizeError) as error:
        return None, f"not verified: {error}"


class _Comparison:
    def __init__(self, match: Match, sizes: Sizes) -> None:
        self.match = match
        self.sizes = sizes
        self.nodes, self.leaves = _slice(match)
        self.generator = torch.Generator().manual_seed(0)

    def run(self) -> str | None:
        """A reason to decline the match; None if the results agree on all numbers that were drawn.

        Raises:
            _NotVerifiableError: there were none on which torch's result is finite.
        """
        compared = 0
        for name, draw in _draws(self.nodes):
            with _as_outside(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                agrees = self._compare(draw)
            if agrees is False:
                return f"verification: its results differ from torch's on {name}"
            compared += agrees is not None
        if not compared:
            raise _NotVerifiableError("torch's own result is not finite on random numbers")
        return None

    def _compare(self, draw: Callable[..., Tensor]) -> bool | None:
        """Whether the results agree; None if torch's are not finite."""
        leaves = {node: self._leaf(node, draw) for node in self.leaves}
        wanted = [t for t in leaves.values() if isinstance(t, Tensor) and t.requires_grad]
        values = dict(leaves)
        try:
            expected = _with_gradients(self._original(values), wanted)
        except Exception as error:
            raise _NotVerifiableError(" ".join(str(error).split())[:200]) from error
        if not all(bool(t.isfinite().all()) for t in expected):
            return None
        try:
            actual = _with_gradients(self._rewritten(values), wanted)
        except Exception:
            return False
        if all(map(_close, actual, expected)):
            return True
        # Rounding is looked at only where it matters: the original runs again for it.
        try:
            errors = rounding(
                lambda: _with_gradients(self._original(dict(leaves)), wanted), expected
            )
        except Exception:
            return False
        return all(map(_close, actual, expected, errors))

    def _original(self, values: dict[Node, Any]) -> Tensor:
        """The result of the nodes that are replaced. The Value of each is added to ``values``."""
        for node in self.nodes:
            args, kwargs = self._arguments((node.args, node.kwargs), values)
            if node.op == "call_method":
                name = "double" if node.target in _CASTS else str(node.target)
                values[node] = getattr(args[0], name)(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                values[node] = node.target(*args, **kwargs)
            if node in self.match.detached:
                values[node] = values[node].detach()
        result: Tensor = values[self.match.root]
        return result

    def _rewritten(self, values: dict[Node, Any]) -> Tensor:
        """The result of the op and the steps after it."""
        args, kwargs = self._arguments((self.match.args, self.match.kwargs), values)
        result: Tensor = self.match.overload(*args, **kwargs)
        for function, rest in self.match.steps:
            result = function(result, *self._arguments(rest, values))
        return result

    def _arguments(self, arguments: Any, values: dict[Node, Any]) -> Any:
        """Any nesting of arguments, on the CPU, in float64 and in the sizes chosen."""

        def concrete(argument: Any) -> Any:
            if isinstance(argument, Node):
                return values[argument]
            if isinstance(argument, Size):
                return values[argument.node].shape[argument.dim]
            if isinstance(argument, Value) and argument.whole:
                return values[argument.node]
            if isinstance(argument, Value):
                assert argument.op is not None
                args, kwargs = self._arguments((argument.args, argument.kwargs), values)
                return argument.op(*args, **kwargs)
            if argument in _FLOATING:
                return torch.float64
            if isinstance(argument, torch.device):
                return torch.device("cpu")
            return self.sizes.of(argument)

        # Slices are no containers to pytree.
        def element(argument: Any) -> Any:
            if isinstance(argument, slice):
                parts = (argument.start, argument.stop, argument.step)
                return slice(*(part if part is None else concrete(part) for part in parts))
            return concrete(argument)

        return tree_map(element, _plain(arguments))

    def _leaf(self, node: Node, draw: Callable[..., Tensor]) -> Any:
        """What a node holds from which both start: drawn numbers, a size, or classes."""
        traced = example(node)
        if not isinstance(traced, Tensor):
            return self.sizes.of(traced)
        shape = [self.sizes.of(size) for size in traced.shape]
        if traced.dtype in _FLOATING:
            return draw(shape, self.generator).requires_grad_(traced.requires_grad)
        if traced.dtype == torch.bool:
            return torch.randint(2, shape, generator=self.generator).bool()
        if traced.is_complex():
            raise _NotVerifiableError("complex numbers")
        return self._classes(node, shape).to(traced.dtype)

    def _classes(self, node: Node, shape: list[int]) -> Tensor:
        """Integers: classes of a cross entropy, or small counts."""
        match = self.match
        of_layer = match.op in ("linear_cross_entropy", "linear_row_statistics_forward")
        if match.op not in _WITH_CLASSES and not of_layer:
            return torch.randint(1, 5, shape, generator=self.generator)
        logits = example(match.args[1 if of_layer else 0])
        place = 0 if of_layer else min(logits.dim() - 1, 1)
        classes = self.sizes.of(logits.shape[place])
        target = torch.randint(classes, shape, generator=self.generator)
        bound = given_arguments(match.overload, match.args, match.kwargs)
        ignored = bound.get("ignore_index")
        if bound.get("target") is node and isinstance(ignored, int) and -(2**31) < ignored < 2**7:
            target.view(-1)[::5] = ignored
        return target


@contextmanager
def _as_outside() -> Iterator[None]:
    """Runs ops as outside of any compiler, mode or autocast."""
    plain = torch.autocast("cpu", enabled=False)
    with no_modes(), torch.inference_mode(False), torch.enable_grad(), plain:
        yield


def _plain(arguments: Any) -> Any:
    """fx's immutable containers as lists and dicts, which pytree knows."""
    if isinstance(arguments, tuple) and type(arguments) is not torch.Size:
        return tuple(map(_plain, arguments))
    if isinstance(arguments, list | torch.Size):
        return [*map(_plain, arguments)]
    if isinstance(arguments, dict):
        return {key: _plain(argument) for key, argument in arguments.items()}
    return arguments


def _slice(match: Match) -> tuple[list[Node], list[Node]]:
    """The nodes to evaluate, up to the root and in order, and the nodes that these start from."""
    inside = {match.root, *match.interior, *match.detached}
    starts = {source for node in inside for source in node.all_input_nodes} - inside
    # An input of the rewrite may depend on a start of the original: softmax(x) beside a
    # log_softmax(x) that stays. Independent numbers for both would be wrong.
    shared = starts - set(match.inputs)
    for node in match.inputs:
        inside |= _made_from(node, shared | inside)
    leaves = dict.fromkeys([*match.inputs, *starts])
    leaves |= dict.fromkeys(source for node in sorted(inside) for source in node.all_input_nodes)
    return sorted(inside), [leaf for leaf in leaves if leaf not in inside]


def _made_from(node: Node, starts: set[Node]) -> set[Node]:
    """The calls that make a node, if one of them reads one of some nodes."""
    found: set[Node] = set()
    waiting = [node]
    met = False
    while waiting and len(found) < 16:
        call = waiting.pop(0)
        if call.op not in ("call_function", "call_method") or call in starts:
            continue
        found.add(call)
        met = met or any(source in starts for source in call.all_input_nodes)
        waiting += [source for source in call.all_input_nodes if source not in found]
    return found if met else set()


def _draws(nodes: list[Node]) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Ways to draw floating-point tensors that reach both sides of every number in the graph."""
    numbers = {
        abs(float(argument))
        for node in nodes
        for argument in tree_leaves((_plain(node.args), _plain(node.kwargs)))
        if isinstance(argument, int | float) and not isinstance(argument, bool)
    }
    # Normal numbers of these sizes lie on both sides of anything from 0.01 to 20.
    scales = {1.0, 0.03, 20.0}
    scales |= {n * f for n in numbers if 1e-30 < n < 0.01 or 20 < n < 1e8 for f in (0.3, 4.0)}

    def uniform(shape: list[int], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def small(shape: list[int], generator: torch.Generator) -> Tensor:
        return uniform(shape, generator) ** 12

    yield "probabilities", uniform
    yield "small probabilities", small
    for scale in sorted(scales)[:12]:

        def normal(shape: list[int], generator: torch.Generator, scale: float = scale) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

        yield f"random numbers of size {scale:.2g}", normal


def _with_gradients(result: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """A result and its gradients, zeros where it has none."""
    if not wanted or not result.requires_grad:
        return [result.detach(), *(torch.zeros_like(leaf) for leaf in wanted)]
    # Another factor for each element, so that gradients do not cancel.
    factors = torch.arange(1, result.numel() + 1, dtype=result.dtype).view(result.shape)
    gradients = torch.autograd.grad(
        (result * factors.sqrt()).sum(), wanted, allow_unused=True, materialize_grads=True
    )
    return [result.detach(), *gradients]


def _close(actual: Tensor, expected: Tensor, error: float = 0.0) -> bool:
    """Whether two results agree, up to an error of rounding and the last digits."""
    if actual.shape != expected.shape or expected.numel() == 0:
        return actual.shape == expected.shape
    tolerance = max(1e-9 * float(expected.abs().max()), error) + 1e-30
    return torch.allclose(actual, expected, rtol=1e-6, atol=tolerance)
