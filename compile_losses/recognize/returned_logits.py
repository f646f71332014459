"""Logits that a graph computes a loss of and returns: how they become lazy, or why they stay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Parameter

from compile_losses.distributed import are_dtensors
from compile_losses.graphs import descendants
from compile_losses.lazy import LazyOutput
from compile_losses.lazy.automatic import Automatic
from compile_losses.lazy.head import Step
from compile_losses.lazy.tensor import can_wait
from compile_losses.ops.linear.chunk_size import chunk_rows
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.memory import memory_of, storage_of
from compile_losses.recognize.graph.symbolic_tensors import Value, example
from compile_losses.recognize.heads.head import Head, NotAbsorbedError, find_head
from compile_losses.sites import megabytes
from compile_losses.switches import LAZY_LOGITS, how_to_set
from compile_losses.torch_internals.ops import tree_leaves
from compile_losses.torch_internals.tensors import FakeTensor, size_hint


@dataclass
class Lazily:
    """A request to make the logits lazy that a graph returns.

    Attributes:
        refusal: why they can't be lazy, in words.
        automatic: the function that is compiled, with ``"auto"``.
        crosses: whether logits without a loss are lazy, too, for the next graph.
        outputs: collects the outputs that the caller of the graph has to make lazy.
    """

    refusal: str | None = None
    automatic: Automatic | None = None
    crosses: bool = True
    outputs: list[LazyOutput] = field(default_factory=list)


_READ = "the logits have other users"
_RETURNED = "its logits are returned"


def readers(nodes: set[Node], root: Node | None) -> Iterator[Node]:
    """The users of some nodes' numbers, other than these nodes and the loss made of them."""
    for node in sorted(nodes):
        for user in node.users:
            is_size = isinstance(example(user), int | torch.SymInt)
            if user not in nodes and user is not root and not is_size:
                yield user


def outputs_of(nodes: set[Node], root: Node | None) -> list[Node]:
    """The outputs of a graph that are made of logits.

    Args:
        nodes: the head and what leads from it to the loss.
        root: the loss, if there is one.

    Raises:
        NotAbsorbedError: something else reads the logits.
    """

    def read_in(node: Node) -> list[Node]:
        return [user for user in readers({node}, root) if user.op != "output"]

    made = set(descendants(nodes, users=read_in))
    # Assertions about a size are among the nodes: the loss makes them superfluous.
    if not all(isinstance(example(node), Tensor) and node.users for node in made - nodes):
        raise NotAbsorbedError(_READ)
    return sorted(node for node in made if any(user.op == "output" for user in node.users))


def lazy_outputs(
    head: Head,
    outputs: list[Node],
    replay: AtenReplay,
    lazily: Lazily | None,
    *,
    has_loss: bool = True,
) -> list[LazyOutput]:
    """How the outputs of a graph that are made of a head's output become lazy.

    Args:
        lazily: None if nobody asked for it.
        has_loss: whether the graph has a loss of them. Then somebody will read what an evaluation
            returns beside it, and would compute it a second time.

    Raises:
        NotAbsorbedError: the logits have to be computed; the message says why.
    """
    if not outputs:
        return []
    for node in outputs:  # a number that is made of the logits is none of them
        _steps(head.node, node, replay)
    logits = example(head.node)
    if has_loss and not logits.requires_grad:
        raise NotAbsorbedError(
            f"{_RETURNED}, and no gradients are recorded: an evaluation that returns its loss "
            "alone holds none"
        )
    tensors = [part for part in (head.input, head.weight, head.bias) if part is not None]
    if any(are_dtensors(part.fake) for part in tensors):
        raise NotAbsorbedError(f"{_RETURNED}, and are those of a DTensor")
    if lazily is not None and lazily.refusal is not None:
        raise NotAbsorbedError(f"{_RETURNED}, and can't be lazy: {lazily.refusal}")
    found = [_lazy_output(head, node, replay) for node in outputs]
    if lazily is None:
        size = logits.dtype.itemsize * math.prod(map(_hint, logits.shape))
        raise NotAbsorbedError(
            f"{_RETURNED}: {how_to_set(LAZY_LOGITS)} would save {megabytes(size)}"
        )
    return found


def add_logits_without_loss(graph: Graph, replay: AtenReplay, lazily: Lazily) -> None:
    """Makes returned logits lazy of which the graph computes no loss: the next graph may.

    This is done if somebody asked for it, since nobody knows what reads them, and if a layer looks
    like a head: it makes at least twice as many features as it takes, of enough rows for chunks to
    pay.
    """
    if lazily.refusal is not None or not lazily.crosses:
        return
    (output,) = graph.find_nodes(op="output")
    known = {one.node for one in lazily.outputs}
    for node in dict.fromkeys(n for n in tree_leaves(output.args[0]) if isinstance(n, Node)):
        value = example(node)
        if node in known or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        with suppress(NotAbsorbedError):
            head = _head_behind(node, replay)
            if head is None or not _is_large(head):
                continue
            path = _steps(head.node, node, replay)[1]
            outputs = outputs_of(set(path), None)
            found = lazy_outputs(head, outputs, replay, lazily, has_loss=False)
            lazily.outputs += [one for one in found if one.node not in known]
            known.update(outputs)


def _head_behind(node: Node, replay: AtenReplay) -> Head | None:
    """The linear layer whose output alone a node is made of; None if there is none."""
    while True:
        head = find_head(node)
        if head is not None:
            return head
        value = replay.of(node)
        while value.op is not None and value.node is node:
            if not value.args or not isinstance(value.args[0], Value):
                return None
            value = value.args[0]
        if value.node is node:
            return None
        node = value.node


def _is_large(head: Head) -> bool:
    """Whether a layer looks like a head of enough rows for chunks to pay."""
    classes, hidden = example(head.node).shape[-1], head.input.fake.shape[-1]
    rows = math.prod(map(_hint, head.input.fake.shape[:-1]))
    if not isinstance(classes, int) or not isinstance(hidden, int) or classes < 2 * hidden:
        return False
    logits = example(head.node)
    return 2 * chunk_rows(rows, hidden, classes, logits.dtype, logits.device) <= rows


def _lazy_output(head: Head, node: Node, replay: AtenReplay) -> LazyOutput:
    """How an output that is made of a head's output becomes lazy.

    Raises:
        NotAbsorbedError: it has to be computed; the message says why.
    """
    steps, path = _steps(head.node, node, replay)
    (input, _), (weight, is_transposed) = _made_of(head.input), _made_of(head.weight)
    bias = None if head.bias is None else _made_of(head.bias)[0]
    memory = memory_of(node.graph)
    for source in (input, weight, bias) if bias is not None else (input, weight):
        value = example(source)
        storage = storage_of(value)
        if type(value) not in (FakeTensor, Tensor, Parameter) or storage in memory.classes:
            raise NotAbsorbedError(f"{_RETURNED}, and {source} is no plain tensor")
        written = memory.conflict(storage, head.node, head.node)
        if written:
            raise NotAbsorbedError(f"{_RETURNED}, and {source} {written}")
    dtype = example(head.node).dtype
    needs_grad = example(node).requires_grad
    return LazyOutput(node, input, weight, bias, dtype, is_transposed, steps, needs_grad, path)


def _made_of(part: Value) -> tuple[Node, bool]:
    """The node that an argument of a head is cast from, and whether it is transposed before."""
    is_transposed = False
    while not part.whole:
        if part.op is aten.t.default:
            is_transposed = not is_transposed
        elif part.op is not aten.to.dtype:
            raise NotAbsorbedError(f"{_RETURNED}, and {part.op} makes its layer")
        part = part.args[0]
    return part.node, is_transposed


def _steps(head: Node, node: Node, replay: AtenReplay) -> tuple[tuple[Step, ...], tuple[Node, ...]]:
    """The ops that lead from a head's output to a node, and the nodes that do."""
    steps: list[Step] = []
    path = [node]
    while path[-1] is not head:
        value = replay.of(path[-1])
        while value.op is not None and value.node is path[-1]:
            first, *rest = value.args
            numbers = all(not isinstance(part, Value | torch.SymInt) for part in tree_leaves(rest))
            if not (
                isinstance(first, Value) and numbers and can_wait(value.op, rest, value.kwargs)
            ):
                raise NotAbsorbedError(_READ)
            steps.append((value.op, tuple(rest), tuple(sorted(value.kwargs.items()))))
            value = first
        if value.node is path[-1]:
            raise NotAbsorbedError(_READ)
        path.append(value.node)
    return tuple(reversed(steps)), tuple(path)


def _hint(size: int | torch.SymInt) -> int:
    return size_hint(size) or 0
