"""Entropies of logits that are held anyway, and what else is read of the same rows: one call.

Such logits are inputs of the graph, or the output of a linear layer that stays. An entropy needs
its row twice in the forward, first for the softmax, and twice in the backward. Log-probabilities,
maxima and sums do not: Inductor reads all of them in one loop over the row, and so they are left to
it, or to an op of their own, if nobody reads an entropy. ``fused::row_statistics_forward`` reads a
row once for all of them, and once more for the gradient, which it writes without any other tensor
of the logits' size.

Logits that something computes in the same loop, such as a temperature, are left alone: for the op
they would have to be written to memory first, and their gradient read from there.
So are logits with a gradient from elsewhere too, to which Inductor adds its own in the same loop.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses import implementations
from compile_losses.device_constants import constants_of
from compile_losses.distributed import are_dtensors
from compile_losses.graphs import ancestors
from compile_losses.ops.linear.row_statistics import ARGMAX, ENTROPY, LOGSUMEXP, MAXIMUM, NLL, TOTAL
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.symbolic_tensors import (
    Size,
    Value,
    computed_alike,
    example,
    fake_mode,
    whole,
)
from compile_losses.recognize.heads.head import Head, NotAbsorbedError, computed, find_head
from compile_losses.recognize.heads.logits import Logits, is_made_of, logits_of
from compile_losses.recognize.heads.readings import Reading, reading_of
from compile_losses.recognize.heads.row_moves import (
    LEAST_PART,
    ROW_MOVES,
    classes_last,
    moves_between,
)
from compile_losses.recognize.heads.shared_logits import Kept, Rewritten, StatisticsCall, made_of
from compile_losses.recognize.heads.shared_readers import Shared, holds, look_for_readers
from compile_losses.recognize.match import Match
from compile_losses.recognize.spellings.row_views import unshaped
from compile_losses.request import Request
from compile_losses.sites import in_words
from compile_losses.torch_internals.ops import tree_leaves
from compile_losses.torch_internals.tensors import size_hint

#: The places of the statistics among the results of the op, the differentiable ones first.
_PLACES = {NLL: 0, LOGSUMEXP: 1, ENTROPY: 2, TOTAL: 3, MAXIMUM: 4, ARGMAX: 5}
#: Parts of the names of functions that sum up.
_SUMS = ("sum", "dot", "entropy")


def take_plain_logits(
    graph: Graph, replay: AtenReplay, request: Request
) -> Iterator[Rewritten | Kept]:
    """Has one call compute what is read of logits' rows, if an entropy is.

    Yields:
        logits with such a call, or logits whose readers stay as they are, with the reason.
    """
    sources = _sources_of_entropies(graph, replay)
    for node in list(graph.nodes) if sources else []:
        given = _held(node) if node in sources else None
        if given is None:
            continue
        shared, _ = look_for_readers(given, replay)
        if not any(ENTROPY in reading.terms for reading in shared.readings.values()):
            continue
        own = [
            reader
            for reader, reading in shared.readings.items()
            if is_made_of(reading.logits.argument, replay, given)
        ]
        try:
            _check_size(example(node))
            yield _CallOnHeldLogits(shared, replay, request).run()
        except NotAbsorbedError as error:
            yield Kept(own, str(error))


def _sources_of_entropies(graph: Graph, replay: AtenReplay) -> set[Node]:
    """The nodes that entropies are made of, as far as these have their classes in the last place.

    Only sums are replayed: a whole graph would take long.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if not any(part in name for part in _SUMS):
            continue
        reading = reading_of(node, replay, ())
        if reading is None or ENTROPY not in reading.terms:
            continue
        classes = reading.logits.fake.shape[reading.dim]

        def of_classes(node: Node, classes: Any = classes) -> list[Node]:
            return [each for each in node.all_input_nodes if holds(example(each), classes)]

        found.update(set(ancestors([node], until=found, sources=of_classes)) - {node})
    return found


def _held(node: Node) -> Head | None:
    """A tensor that is in memory whatever reads it, as the output of a layer that does nothing.

    Nothing reads this layer's weight.
    """
    value = example(node)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 1:
        return None
    if are_dtensors(value) or fake_mode(value) is None:
        return None
    if node.op != "placeholder":
        try:
            if find_head(node) is None:
                return None
        except NotAbsorbedError:
            return None
    return Head(node, whole(node), whole(node), None)


def _check_size(logits: Tensor) -> None:
    """Raises NotAbsorbedError for logits that torch's ops read as fast."""
    if not implementations.has_kernels(logits.device):
        raise NotAbsorbedError("there are no kernels: torch's ops are fused with what reads them")
    constants = constants_of(logits.device)
    classes, numbers = size_hint(logits.shape[-1]), size_hint(logits.numel())
    if classes is None or numbers is None:
        raise NotAbsorbedError("the number of the logits is not known")
    if classes < constants.statistics_classes:
        raise NotAbsorbedError(
            f"of {classes} classes all is read in one loop, which computes more than that"
        )
    if numbers * logits.element_size() < constants.statistics_bytes:
        raise NotAbsorbedError("the logits are few: one call would take longer than it saves")


class _CallOnHeldLogits(StatisticsCall):
    """Computes the statistics of held logits, which other nodes may read as well."""

    op, layer, differentiable = "row_statistics_forward", "", 4

    def __init__(self, shared: Shared, replay: AtenReplay, request: Request) -> None:
        super().__init__(shared, replay, request)
        #: The nodes that lead to the readers.
        self.interior: set[Node] = set()
        shared.outputs = []

    def _logits(self) -> Logits:
        """All rows, of which each reader's are some."""
        readings, head = self.shared.readings, self.shared.head
        every: dict[Node, Logits] = {}
        refused: dict[Node, str] = {}
        for node, reading in readings.items():
            try:
                every[node] = self._read_of(reading)
            except NotAbsorbedError as error:
                refused[node] = str(error)
        entropies = [node for node, r in readings.items() if ENTROPY in r.terms]
        if not every.keys() & set(entropies):
            raise NotAbsorbedError(refused[entropies[0]])
        first = next(every[node] for node in entropies if node in every)
        base = replace(first, input=head.input, class_dim=example(head.node).dim() - 1)
        for node in list(readings):
            moves = moves_between(base, every[node]) if node in every else None
            few = node in every and _rows(every[node]) < LEAST_PART * _rows(base)
            if moves is None or few:
                del readings[node]  # it reads the logits by itself, as before
                continue
            self.moves[node] = moves
            readings[node] = _in_places_of_op(readings[node])
        if not any(ENTROPY in reading.terms for reading in readings.values()):
            raise NotAbsorbedError("it reads only some of the rows")
        base.absorbed = max((every[node].absorbed for node in readings), key=len)
        return base

    def _read_of(self, reading: Reading) -> Logits:
        """How what a reader reads is made of the logits."""
        head = self.shared.head
        logits = logits_of(reading.logits.argument, self.replay, head)
        if logits is None:
            raise NotAbsorbedError("it reads something else than rows of the logits")
        if logits.head is not head:
            raise NotAbsorbedError("it reads other logits as well")
        if logits.class_dim != reading.dim or logits.is_shifted:
            raise NotAbsorbedError("it reads something else than rows of classes")
        if not reading.terms.keys() <= _PLACES.keys():
            raise NotAbsorbedError("the op has no such statistic")
        if reading.call is not None and reading.call["label_smoothing"]:
            raise NotAbsorbedError("its labels are smoothed")
        if logits.scale != 1:
            raise NotAbsorbedError("it reads scaled logits")
        if logits.weight is not head.weight or logits.bias is not None:
            raise NotAbsorbedError("some classes of a row are read, or classes are scaled apart")
        value = logits.input
        while not value.whole:
            if value.op not in ROW_MOVES:
                raise NotAbsorbedError(
                    "the logits are scaled, or rows of them picked, in the same loop"
                )
            value = value.args[0]
        logits.input = classes_last(logits.input, logits.class_dim)
        logits.class_dim = logits.input.fake.dim() - 1
        return logits

    def _target(self, logits: Logits) -> tuple[Value | None, int]:
        """Of the readers that pick a class, those that pick the same as the first one stay."""
        readings, first = self.shared.readings, None
        for node, reading in sorted(readings.items(), key=operator.itemgetter(0)):
            if reading.target is None:
                continue
            flat, ignored = unshaped(reading.target, self.replay), reading.ignore_index
            if first is None:
                first = flat, ignored, self.moves[node]
            same = self.replay.same(flat, first[0]) and ignored == first[1]
            if not same or not computed_alike(self.moves[node], first[2]):
                del readings[node]
        return super()._target(logits)

    def _arguments(self, logits: Logits) -> tuple[tuple[Any, ...], list[str]]:
        target, ignore_index = self._target(logits)
        args = (
            _rows_of(self.shared.head.node).argument,
            target and target.argument,
            ignore_index,
            logits.softcap,
        )
        self._leave_what_is_needed(args)
        return args, []

    def _leave_what_is_needed(self, args: tuple[Any, ...]) -> None:
        """Class indices may be made of the logits, by readers that come before the call then."""
        readings, start = self.shared.readings, {self.shared.head.node}
        needed = set(self._read(args)) - start
        needed |= {source for node in needed for source in made_of(node, start)}
        for node in needed & set(readings):
            if readings[node].target is not None or ENTROPY in readings[node].terms:
                raise NotAbsorbedError(
                    "its class indices are made of what else is read of the same rows"
                )
            del readings[node]

    def _check(self, match: Match, logits: Logits) -> None:
        """Others may read the logits: they are held."""

    def _needed(self, args: tuple[Any, ...]) -> list[Node]:
        """The logits are held: what is made of them may be among these nodes."""
        return self._read(args)

    def _places(self, needed: list[Node]) -> list[Node]:
        """Before any of the nodes that the op makes superfluous."""
        readings, starts = self.shared.readings, set(needed)
        before = {node for reader in readings for node in made_of(reader, starts)}
        return sorted({*readings, *(before & set(self.shared.between) - starts)})

    def _inside(self) -> set[Node]:
        return {*self.interior, *self.shared.readings}

    def _match(self, reader: Node, reading: Reading, args: tuple[Any, ...]) -> Match:
        match = super()._match(reader, reading, args)
        self.interior |= {*match.interior, *match.detached}
        return match

    def _replace(self, *given: Any) -> Rewritten:
        self._check_gradients()
        return super()._replace(*given)

    def _check_gradients(self) -> None:
        """Checks that the logits have no gradient from elsewhere.

        Inductor writes the sum of gradients that it computes itself once. The call's gradient would
        be written, read and added.
        """
        if not any(example(reader).requires_grad for reader in self.shared.readings):
            return
        inside = self._inside()
        for node in {self.shared.head.node, *self.interior}:
            for user in node.users:
                # A view that an earlier rewrite put into the graph does not say that it has one.
                trained = user.op == "output" or any(map(_is_trained, (user, *user.users)))
                if user not in inside and trained:
                    raise NotAbsorbedError(f"the logits have a gradient from {in_words(user)}, too")


def _is_trained(node: Node) -> bool:
    return any(getattr(value, "requires_grad", False) for value in tree_leaves(example(node)))


def _rows(logits: Logits) -> int:
    """The number of the logits, of so many rows of classes."""
    return size_hint(logits.input.fake.numel()) or 0


def _in_places_of_op(reading: Reading) -> Reading:
    """The op for held logits has fewer results than that for a head."""
    return replace(reading, terms={_PLACES[k]: v for k, v in reading.terms.items()})


def _rows_of(node: Node) -> Value:
    """A tensor as [rows, classes], without a copy."""
    value = example(node)
    strides, sizes = value.stride(), value.shape
    sides = [strides[-1] == 1]
    sides += [strides[d] == strides[d + 1] * sizes[d + 1] for d in range(value.dim() - 2)]
    if not all(map(statically_known_true, sides)):
        raise NotAbsorbedError("the logits would have to be copied, so that their rows lie evenly")
    if value.dim() == 2:
        return whole(node)
    classes = value.shape[-1]
    if not isinstance(classes, int):
        classes = Size(node, value.dim() - 1)
    return computed(aten.reshape.default, whole(node), [-1, classes])
