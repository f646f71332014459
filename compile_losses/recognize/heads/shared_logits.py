"""Logits of one head that several losses and metrics read: one op for all that they read.

If each reader of a head's output needs a few numbers of each row (``readings``), none needs the
logits. One call of ``fused::linear_row_statistics_forward`` takes the place of the linear
layer, and the readers are computed from its results, by row. Each reader passes the guards of a
match of its own. The end of an unrolled loop stands for the loop's turns.

This search comes last. Before it, a loss that alone reads its logits was taken with its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.distributed import are_dtensors
from compile_losses.graphs import (
    ancestors,
    between,
    descendants,
    emit,
    erase_unused,
    give_value,
    replace_uses,
    undone_if_it_fails,
)
from compile_losses.lazy import LazyOutput
from compile_losses.ops.checks import NOTHING_IGNORED, REDUCTIONS
from compile_losses.ops.linear.row_divergences import tensors_beside
from compile_losses.ops.linear.row_statistics import DIFFERENTIABLE, LOG_SQUARES, TOTAL, VARIANCE
from compile_losses.ops.linear_row_statistics import DIVERGENCES, in_order
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.memory import is_written
from compile_losses.recognize.graph.moved_nodes import move_before
from compile_losses.recognize.graph.symbolic_tensors import (
    Size,
    Value,
    example,
    fake_mode,
    put,
    sources,
)
from compile_losses.recognize.graph.unrolled import is_join
from compile_losses.recognize.guards import changes_grad_mode, mutated, refusal
from compile_losses.recognize.heads.computed_reading import ComputedReading
from compile_losses.recognize.heads.head import Head, NotAbsorbedError, find_head
from compile_losses.recognize.heads.linear_divergence import (
    check_no_dtensors,
    may_be_read_apart,
    without_gradient,
)
from compile_losses.recognize.heads.logits import SCALED, Logits, logits_of
from compile_losses.recognize.heads.readings import Divergence, Move, Place, Reading, reading_of
from compile_losses.recognize.heads.row_classes import (
    Classes,
    as_rows,
    sets_of_classes,
    side_by_side,
)
from compile_losses.recognize.heads.row_moves import (
    LEAST_PART,
    classes_last,
    count_rows,
    flat_rows,
    moves_between,
    of_all_rows,
)
from compile_losses.recognize.heads.shared_readers import Shared, is_size, look_for_readers
from compile_losses.recognize.heads.with_head import check_copy, check_gain, check_rows
from compile_losses.recognize.match import Match
from compile_losses.recognize.returned_logits import lazy_outputs, readers
from compile_losses.recognize.spellings.row_views import unshaped
from compile_losses.recognize.verify import verify as compare
from compile_losses.request import Request
from compile_losses.sites import in_words, left_out
from compile_losses.switches import PREFER_MEMORY, how_to_set
from compile_losses.torch_internals.ops import schema_of

_OP = "linear_row_statistics_forward"
#: The most nodes from a reader in a loop to the node that joins the loop's results.
_STEPS_TO_JOIN = 8


@dataclass
class Rewritten:
    """A call of the op in the place of a head.

    Attributes:
        node: the call.
        readers: the nodes that were replaced.
        notes: remarks for the report.
        returned: the outputs of the graph that have to become lazy.
    """

    node: Node
    readers: list[Node]
    notes: list[str]
    returned: list[LazyOutput]


@dataclass
class Kept:
    """A head that stays.

    Attributes:
        readers: the nodes that read its output.
        reason: why they keep it.
        picking: a reader of several classes of each row that has a gradient: of these there is no
            match of their own, whose site could have the reason.
    """

    readers: list[Node]
    reason: str
    picking: Node | None = None


def _kept(shared: Shared, reason: str) -> Kept:
    readings = shared.readings
    picking = (n for n, r in readings.items() if r.picks and example(n).requires_grad)
    return Kept(list(readings), reason, next(picking, None))


def take_shared_logits(
    graph: Graph, replay: AtenReplay, request: Request
) -> Iterator[Rewritten | Kept]:
    """Replaces every head whose output several readers share.

    Yields:
        a head that was rewritten, or one that stays, with the reason.
    """
    for node in list(graph.nodes):
        try:
            head = find_head(node)
        except NotAbsorbedError:
            continue
        if head is None or not _is_worthwhile(head, request):
            continue
        shared = _shared(head, replay, request)
        if shared is None:
            continue
        if isinstance(shared, Kept):
            yield shared
            continue
        try:
            yield StatisticsCall(shared, replay, request).run()
        except NotAbsorbedError as error:
            yield _kept(shared, str(error))


def _is_worthwhile(head: Head, request: Request) -> bool:
    """Whether a layer has so many classes and rows that chunks of its output save memory."""
    output = example(head.node)
    if not isinstance(output, Tensor) or output.dim() == 0 or are_dtensors(output):
        return False
    if fake_mode(output) is None or fake_mode(head.input.fake) is None:
        return False
    logits = Logits(head, [], head.input, head.weight, head.bias, output.dim() - 1)
    try:
        check_gain(Match(head.node, _OP, ()), logits, request)
    except NotAbsorbedError:
        return False
    return True


def _shared(head: Head, replay: AtenReplay, request: Request) -> Shared | Kept | None:
    """The readers of a head's output, or why they keep it; None if one loss alone reads it."""
    found, needs = look_for_readers(head, replay)
    if needs is not None:
        return _kept(found, f"{in_words(needs)} needs the logits")
    return None if _is_declined(found, replay, request) else found


def _is_declined(found: Shared, replay: AtenReplay, request: Request) -> bool:
    """Whether there is no reader, or one loss that was declined together with its layer before.

    A loss of scaled logits was declined for the scale, and a divergence of logits with a soft-cap
    for the soft-cap, which this op has, or for other readers of its teacher. Some divergences have
    no op together with their layer but this one.
    """
    if all(set(reading.terms) <= {TOTAL, VARIANCE} for reading in found.readings.values()):
        return True  # means and deviations of all logits, if anything
    if len(found.readings) != 1:
        return False
    (reading,) = found.readings.values()
    divergence = reading.divergence
    if divergence is None and reading.call is None:
        return False
    if divergence is not None and divergence.kind not in ("kl", "reverse_kl", "js"):
        return False
    if divergence is not None and may_be_read_apart(divergence.teacher.argument, replay, request):
        return False
    try:
        logits = logits_of(reading.logits.argument, replay)
    except NotAbsorbedError:
        return True
    if logits is None or logits.scale != 1:
        return logits is None
    return divergence is None or logits.softcap is None


class StatisticsCall:
    """Replaces a head by the op that computes the statistics of its readers.

    Raises NotAbsorbedError before anything is changed.

    Attributes:
        op: the name of the op.
        layer: what it absorbs, in words.
        differentiable: so many of its results have gradients, the first ones.
    """

    op = _OP
    layer = "a linear layer"
    differentiable = DIFFERENTIABLE

    def __init__(self, shared: Shared, replay: AtenReplay, request: Request) -> None:
        self.shared, self.replay, self.request = shared, replay, request
        #: The layer of a teacher's logits, if these are computed with the student's.
        self.of_teacher: Logits | None = None
        #: What others read of the teacher's logits, and what computes that apart, if others do.
        self.others: dict[Node, Reading] = {}
        self.of_others: Callable[[], Rewritten] | None = None
        #: For each reader the ops that make its rows of the op's rows, which have this shape.
        self.moves: dict[Node, list[Move]] = {}
        self.base_shape: list[Any] = []
        #: For each reader its shape, and what a divergence's batchmean divides by.
        self.shapes: dict[Node, list[Any]] = {}
        self.batches: dict[Node, Any] = {}
        #: The sets of classes that are picks.
        self.sets: list[Classes] = []
        #: For each reader of classes where the op's results have them.
        self.places: dict[Node, Place] = {}
        #: For each reader of one class of each row this class, [rows]. Readers of equal classes
        #: share one, which is among the op's arguments, and so is known where the op stands.
        self.targets: dict[Node, Value] = {}

    def run(self) -> Rewritten:
        return self.checked()()

    def checked(self) -> Callable[[], Rewritten]:
        """What replaces the head, once all checks have passed. Until then nothing changes."""
        for reader in self.shared.readings:
            if (reason := left_out(reader)) is not None:
                raise NotAbsorbedError(reason)
        self._join_loops()
        logits = self._logits()
        args, notes = self._arguments(logits)
        readings = self.shared.readings
        needed = self._needed(args)
        place = self._place(needed)
        base, _ = flat_rows(logits.input)
        self.base_shape = _sizes_of(base.fake.shape[:-1], needed)
        self._check(Match(place, self.op, args), logits)
        for reader, reading in readings.items():
            value = example(reader)
            if value.requires_grad and reading.spread is not None:
                raise NotAbsorbedError(
                    f"{in_words(reader)} has a gradient, and the op has none of it: detached it is "
                    "taken"
                )
            if value.requires_grad and not set(reading.terms) <= set(range(self.differentiable)):
                if LOG_SQUARES in reading.terms:
                    raise NotAbsorbedError(
                        f"{in_words(reader)} has a gradient of squares, which the op has not"
                    )
                raise NotAbsorbedError(
                    f"{in_words(reader)} has a gradient that goes to single logits, as that of a "
                    "maximum does: detached it is taken"
                )
            if value.dtype == torch.float64 and logits.input.fake.dtype != torch.float64:
                raise NotAbsorbedError(
                    f"{in_words(reader)} is computed in float64 of narrower logits: in float32 it "
                    "is taken"
                )
            self.shapes[reader] = _sizes_of(value.shape, needed)
            batch = reading.batch
            self.batches[reader] = None if batch is None else _size_of(batch, needed)
            match = self._match(reader, reading, args)
            reason = refusal(match)
            if reason is None and self.request.verify:
                reason, _ = compare(match)
            if reason is not None:
                raise NotAbsorbedError(f"{in_words(reader)}: {reason}")
        inside = sorted(self._inside(), reverse=True)
        reason = mutated(Match(max(*readings, place), self.op, args, {}, inside))
        if reason is not None:
            raise NotAbsorbedError(reason)
        outputs = self.shared.outputs
        returned = lazy_outputs(self.shared.head, outputs, self.replay, self.request.lazily)
        return partial(self._replace, place, args, logits, returned, notes)

    def _arguments(self, logits: Logits) -> tuple[tuple[Any, ...], list[str]]:
        """The op's arguments, and remarks for the report."""
        target, ignore_index = self._target(logits)
        picks = self._picks(logits)
        divergence, teacher, notes = self._teacher(logits)
        self.beside = self._beside(divergence, logits.softcap)
        args = in_order(
            as_rows(logits.input).argument,
            logits.weight.argument,
            target and target.argument,
            logits.bias and logits.bias.argument,
            ignore_index,
            logits.softcap,
            teacher,
            *divergence,
            picks=picks and picks.argument,
            variance=any(VARIANCE in reading.terms for reading in self.shared.readings.values()),
            scale=logits.scale,
            **self._numbers(logits),
        )
        return args, notes

    def _numbers(self, logits: Logits) -> dict[str, Any]:
        """The op's arguments for numbers without a gradient."""
        readings = self.shared.readings
        of_ranks = {n: r for n, r in readings.items() if r.ranked is not None}
        sets = sets_of_classes(
            {node: replace(r, target=r.ranked) for node, r in of_ranks.items()},
            self.moves,
            self.replay,
        )
        ties = {reading.ties for reading in of_ranks.values()}
        if len(sets) > 1 or len(ties) > 1:
            raise NotAbsorbedError(
                "it has ranks of several classes, or with and without equal ones"
            )
        ranked = [one.of_all(*self._rows(logits)).argument for one in sets]
        return {
            "ranked": ranked[0] if ranked else None,
            "squares": any(LOG_SQUARES in reading.terms for reading in readings.values()),
            "top_k": max(reading.top_k for reading in readings.values()),
            "ties": any(ties),
        }

    def _argument(self, args: Sequence[Any], name: str) -> Any:
        """One of the op's arguments; None if it has no such argument."""
        names = [
            each.name for each in schema_of(getattr(torch.ops.fused, self.op).default).arguments
        ]
        return args[names.index(name)] if name in names else None

    def _inside(self) -> set[Node]:
        """The readers and the nodes that lead to them, which the op may make superfluous."""
        return {*self.shared.between, *self.shared.readings}

    def _check(self, match: Match, logits: Logits) -> None:
        """Checks that the op saves memory and is no slower, and that nothing needs the logits."""
        check_gain(match, logits, self.request, self.beside)
        check_rows(match, REDUCTIONS["none"], logits, self.request)
        self._check_closed()

    def _join_loops(self) -> None:
        """Replaces the readers in a loop by the loop's end: a stack of each sample's statistics."""
        readings = self.shared.readings
        for node in list(readings):
            join = _join_after(node) if node in readings else None
            reading = None if join is None else reading_of(join, self.replay)
            if join is None or reading is None:
                continue
            turns = self._turns(join)
            for turn in turns & set(readings):
                del readings[turn]
            self.shared.between += sorted(turns - set(self.shared.between))
            readings[join] = reading

    def _turns(self, join: Node) -> set[Node]:
        """The nodes that lead from the logits to the end of a loop."""
        head = self.shared.head.node
        return between(self.shared.between, join, until={head, *head.all_input_nodes})

    def _logits(self) -> Logits:
        """How the logits that all readers read are made, with the classes last in input.

        The op computes the most rows. The rows of other readers are some of these.
        """
        every: dict[Node, Logits] = {}
        for node, reading in self.shared.readings.items():
            logits = logits_of(reading.logits.argument, self.replay)
            if logits is None:
                raise NotAbsorbedError(
                    f"{in_words(node)} reads something else than rows of the logits"
                )
            if logits.head.node is not self.shared.head.node:
                raise NotAbsorbedError(f"{in_words(node)} reads other logits as well")
            if logits.class_dim != reading.dim:
                raise NotAbsorbedError(f"{in_words(node)} does not read rows of classes")
            if logits.is_shifted and not reading.drops_shifts:
                raise NotAbsorbedError(f"{in_words(node)} reads logits that a number is added to")
            logits.input = classes_last(logits.input, logits.class_dim)
            logits.class_dim = logits.input.fake.dim() - 1
            every[node] = logits
        self._leave_out_shifts(every)
        readings = self.shared.readings

        def rows(node: Node) -> tuple[int, bool]:
            reading = readings[node]
            more = (reading.target, reading.divergence, reading.picks)
            return count_rows(every[node]), any(part is not None for part in more)

        chosen = every[max(every, key=rows)]
        moves = {node: moves_between(chosen, logits) for node, logits in every.items()}
        whole = of_all_rows(chosen) if None in moves.values() else None
        if whole is not None and count_rows(chosen) >= LEAST_PART * count_rows(whole):
            chosen = whole
            moves = {node: moves_between(chosen, logits) for node, logits in every.items()}
        for node, found in moves.items():
            if found is None:
                raise NotAbsorbedError(
                    f"{in_words(node)} reads other rows than the rest, or scales them otherwise"
                )
            if found and readings[node].divergence is not None:
                raise NotAbsorbedError(f"{in_words(node)} has a teacher of some of the rows alone")
            self.moves[node] = found
        chosen.absorbed = max((one.absorbed for one in every.values()), key=len)
        return chosen

    def _leave_out_shifts(self, every: dict[Node, Logits]) -> None:
        """Leaves out readers, such as a maximum, of which nothing is made but a number that is
        added to all logits of a row."""
        readings, inside = self.shared.readings, set(self.shared.between)
        shifts = {node for logits in every.values() for node in logits.shifts}
        for node in list(readings) if shifts else []:
            made = list(descendants([node], past=lambda each: each not in inside))
            ends = [each for each in made if each in inside]
            others = [each for each in made if each not in inside]
            if ends and set(ends) <= shifts and all(self._is_between(n, node) for n in others):
                del readings[node], every[node]
                self.shared.between += others

    def _is_between(self, node: Node, start: Node) -> bool:
        """Whether a node made of a reader holds a tensor that nothing outside of the graph reads,
        and no other reader."""
        is_inside = node is start or node not in self.shared.readings
        return is_inside and isinstance(example(node), Tensor) and node.op != "output"

    def _target(self, logits: Logits) -> tuple[Value | None, int]:
        """The first set of one class of each row, as [rows], and the ignored index."""
        every = sets_of_classes(self.shared.readings, self.moves, self.replay)
        for one in every:
            if not one.several:
                self.targets |= dict.fromkeys(one.readers, one.flat)
        first = next((one for one in every if not one.several), None)
        self.sets = [one for one in every if one is not first]
        if first is None:
            return None, NOTHING_IGNORED
        self.places |= dict.fromkeys(first.readers, Place((), 0, first.ignore_index))
        return first.of_all(*self._rows(logits)), first.ignore_index

    def _picks(self, logits: Logits) -> Value | None:
        """All other sets side by side, as [rows, K]."""
        columns = tuple(one.count for one in self.sets)
        for part, one in enumerate(self.sets):
            self.places |= dict.fromkeys(one.readers, Place(columns, part, one.ignore_index))
        return side_by_side(self.sets, *self._rows(logits))

    def _rows(self, logits: Logits) -> tuple[Value, list[Any]]:
        """The op's input, and the shape of its rows, which only a set of some rows needs."""
        base, _ = flat_rows(logits.input)
        shape = []
        if any(self.moves.values()):
            shape = _sizes_of(base.fake.shape[:-1], list(sources((base,))))
        return as_rows(logits.input), shape

    def _teacher(self, logits: Logits) -> tuple[tuple[Any, ...], tuple[Any, Any, Any], list[str]]:
        """The divergence that is read, its teacher's arguments, and remarks for the report."""
        readings = self.shared.readings
        found = [(r, r.divergence) for r in readings.values() if r.divergence is not None]
        if not found:
            return (None, 0.5, 1.0, None), (None, None, None), []
        reading, divergence = found[0]
        if any(not self._is_same(divergence, other) for _, other in found[1:]):
            raise NotAbsorbedError("it has more than one divergence from a teacher")
        options = (divergence.kind, divergence.beta, divergence.temperature)
        held = None
        try:
            self.of_teacher = self._layer_of(reading, divergence)
        except NotAbsorbedError as error:
            held = str(error)
        if self.of_teacher is None:
            rows = as_rows(classes_last(divergence.teacher, reading.dim))
            notes = [] if held is None else [f"the teacher's logits are held: {held}"]
            return (*options, None), (without_gradient(rows), None, None), notes
        of_teacher = self.of_teacher
        rows = as_rows(classes_last(of_teacher.input, of_teacher.class_dim))
        layer = (rows, of_teacher.weight, of_teacher.bias)
        input, weight, bias = (part and without_gradient(part) for part in layer)
        return (*options, of_teacher.softcap), (input, weight, bias), []

    @property
    def _way_of_teacher(self) -> list[Node]:
        """The nodes that make a teacher's logits, if nothing else reads these."""
        return [] if self.of_teacher is None else self.of_teacher.way

    def _is_same(self, one: Divergence, other: Divergence) -> bool:
        """Whether two divergences are the same but for their reduction."""
        alike = replace(one, teacher=other.teacher, reduction=other.reduction) == other
        return alike and self.replay.same(one.teacher, other.teacher)

    def _layer_of(self, reading: Reading, divergence: Divergence) -> Logits | None:
        """The layer of a teacher's logits that nothing else reads."""
        found = logits_of(divergence.teacher.argument, self.replay)
        if found is not None:
            if found.head.node is self.shared.head.node:
                raise NotAbsorbedError("they are the student's own")
            others = self._others(found)
            if not self._only_readings(set(found.way), divergence, others.inside):
                raise NotAbsorbedError("something else reads them, or what is made of them")
            check_no_dtensors(found)
            if found.scale != 1:
                raise NotAbsorbedError(SCALED)
            check_copy(found)
            if found.class_dim != reading.dim:
                raise NotAbsorbedError("its classes are in another dimension")
            if found.weight.fake.shape[0] != self.shared.head.weight.fake.shape[0]:
                raise NotAbsorbedError("it has other classes")
            if others.readings:
                self.of_others, self.others = self._apart(divergence, others), others.readings
        return found

    def _others(self, of_teacher: Logits) -> _Others:
        """What else reads numbers of the rows of a teacher's logits, such as their argmax."""
        head, own = of_teacher.head, self.shared.readings
        found, _ = look_for_readers(head, self.replay)
        others = {node: reading for node, reading in found.readings.items() if node not in own}
        way = set(of_teacher.way)
        inside = set(others)
        for node in others:
            inside |= (
                between({head.node}, node, until={head.node, *head.node.all_input_nodes}) - way
            )
        known = inside | way | set(own)
        for node in inside - set(others):
            if any(user not in known and not is_size(example(user)) for user in node.users):
                return _Others(head, {}, set())
        if any(example(node).requires_grad for node in others):
            return _Others(head, {}, set())
        return _Others(head, others, inside)

    def _apart(self, divergence: Divergence, others: _Others) -> Callable[[], Rewritten]:
        """What computes numbers of a teacher's rows by themselves, from logits that are computed
        once more for that: those that the student is compared with are a small part of them."""
        read = [
            part
            for r in self.shared.readings.values()
            for part in (r.target, r.picks, r.ranked)
            if part is not None
        ]
        if others.readings.keys() & set(sources([unshaped(each, self.replay) for each in read])):
            raise NotAbsorbedError("labels are numbers of its rows")
        if not may_be_read_apart(divergence.teacher.argument, self.replay, self.request):
            raise NotAbsorbedError(
                f"something else reads them: {how_to_set(PREFER_MEMORY)} computes them twice"
            )
        if not _is_worthwhile(others.head, self.request):
            raise NotAbsorbedError("something else reads them, or what is made of them")
        between = [others.head.node, *sorted(others.inside - set(others.readings))]
        shared = Shared(others.head, others.readings, between)
        return _CallApart(shared, self.replay, self.request).checked()

    def _only_readings(
        self, nodes: set[Node], divergence: Divergence, ignored: Container[Node]
    ) -> bool:
        """Whether the readers of the student's logits alone read the teacher's.

        Nodes between these logits and the readers, such as a softmax, are superfluous as well.

        Args:
            ignored: other readers, and what leads to them.
        """
        readings = self.shared.readings

        def others(node: Node) -> list[Node]:
            found = readers({node}, None)
            return [each for each in found if each not in readings and each not in ignored]

        made = (node for node in descendants(nodes, users=others) if node not in nodes)
        return all(
            divergence.kind == "cross_entropy" and isinstance(example(node), Tensor) and node.users
            for node in made
        )

    def _beside(self, divergence: tuple[Any, ...], softcap: float | None) -> float:
        """How many tensors of the logits' size the op holds besides them."""
        if divergence[0] is None:
            return 0
        head, of_teacher = self.shared.head, self.of_teacher
        compared = [r.divergence for r in self.shared.readings.values() if r.divergence is not None]
        teacher = compared[0].teacher.fake if of_teacher is None else example(of_teacher.head.node)
        return tensors_beside(
            example(head.node).dtype,
            teacher.dtype,
            computed=of_teacher is not None,
            by_row=True,
            reverse=DIVERGENCES[divergence[0]][1],
            gradient=any(example(node).requires_grad for node in self._records()),
            softcap=softcap is not None,
        )

    def _needed(self, args: tuple[Any, ...]) -> list[Node]:
        """The nodes that the op and its readers are computed from, none of them the logits."""
        needed = self._read(args)
        head = self.shared.head.node
        later = (node for node in needed if not node < head)
        if any(node is head or head in made_of(node, set(head.all_input_nodes)) for node in later):
            raise NotAbsorbedError("what its losses read besides is made of its logits")
        if self.others.keys() & set(needed):
            raise NotAbsorbedError("its labels are numbers of a teacher's rows")
        return needed

    def _read(self, args: tuple[Any, ...]) -> list[Node]:
        readings = self.shared.readings
        needed = Match(max(readings), self.op, args).inputs
        return needed + [r.weight for r in readings.values() if r.weight is not None]

    def _place(self, needed: list[Node]) -> Node:
        """The place of the op: after its arguments, before the users of its results."""
        readings, head = self.shared.readings, self.shared.head.node
        records = self._records()

        def records_gradients(place: Node) -> bool:
            if place in records or (place is head and example(head).requires_grad):
                return True
            return any(place < node and not changes_grad_mode(place, node) for node in records)

        inside = self._inside()
        users = [user for node in readings for user in node.users if user not in inside]
        for place in self._places(needed):
            known = all(node < place for node in needed)
            if known and not any(user < place for user in users) and records_gradients(place):
                return place
        first, *_ = self._places(needed)
        if not records_gradients(first) or not move_before(needed, first, self.replay):
            raise NotAbsorbedError("what is read of its rows is used before all of it is known")
        return first

    def _places(self, needed: list[Node]) -> list[Node]:
        """Where the op may stand, in the order in which these places are tried."""
        return [*sorted(self.shared.readings), self.shared.head.node]

    def _records(self) -> set[Node]:
        """The readers with gradients; all readers if none has a gradient."""
        readings = self.shared.readings
        return {node for node in readings if example(node).requires_grad} or set(readings)

    def _check_closed(self) -> None:
        """Checks that the readers alone need the nodes in between."""
        inside = self._inside()
        for node in self.shared.between:
            for user in node.users:
                if user in inside or is_size(example(user)):
                    continue
                if user.op != "output" or node not in self.shared.outputs:
                    raise NotAbsorbedError(f"{in_words(user)} needs the logits")

    def _match(self, reader: Node, reading: Reading, args: tuple[Any, ...]) -> Match:
        """The match of one reader alone, for the guards and for verification."""
        has_gradient = example(reader).requires_grad
        inputs = set(Match(reader, self.op, args).inputs)
        detached = self._way_of_teacher if reading.divergence is not None else []
        starts = {*inputs, *detached}
        interior = between(starts, reader, until=starts)

        def read(
            statistics: Any,
            target: Any,
            linear_weight: Tensor,
            weight: Any,
            dtype: torch.dtype,
            base_shape: list[Any],
            arguments: list[list[Any]],
            shape: list[Any],
            batch: Any,
        ) -> Tensor:
            made = ComputedReading(_run, statistics, place, target, linear_weight, weight)
            moves = list(zip(ops, arguments, strict=True))
            result: Tensor = made.of(reading, dtype, shape, base_shape, moves, batch)
            return result if has_gradient else result.detach()

        place = self.places.get(reader)
        ops = [op for op, _ in self.moves[reader]]
        arguments = [arguments for _, arguments in self.moves[reader]]
        target, linear_weight = self.targets.get(reader), self._argument(args, "linear_weight")
        given = (target, linear_weight, reading.weight, example(reader).dtype)
        sizes = (self.base_shape, arguments, self.shapes[reader], self.batches[reader])
        steps: Any = [(read, (*given, *sizes))]
        inside = sorted(interior, reverse=True)
        if not has_gradient:
            inside, detached = [], [*inside, *detached]
        return Match(reader, self.op, args, {}, inside, steps=steps, detached=detached)

    def _replace(
        self,
        place: Node,
        args: tuple[Any, ...],
        logits: Logits,
        returned: list[LazyOutput],
        more: list[str],
    ) -> Rewritten:
        """Puts the op and the readers that are computed from its results into the graph."""
        readings, of_teacher = self.shared.readings, self._way_of_teacher
        if self.of_others is not None:
            apart = self.of_others()
            more = [*more, *(f"of the teacher's rows apart: {note}" for note in apart.notes)]
        records = any(example(node).requires_grad for node in self._records())

        def call(op: Any, *arguments: Any) -> Node:
            return emit(place, op, arguments)

        with undone_if_it_fails(place), torch.set_grad_enabled(records):
            given = [put(argument, place) for argument in args]
            node = call(getattr(torch.ops.fused, self.op).default, *given)
            linear_weight = self._argument(given, "linear_weight")
            results = {}
            for reader, reading in readings.items():
                where = self.places.get(reader)
                target = put(self.targets.get(reader), place)
                made = ComputedReading(call, node, where, target, linear_weight, reading.weight)
                shape = [put(size, place) for size in self.shapes[reader]]
                value, base = example(reader), [put(size, place) for size in self.base_shape]
                batch = put(self.batches[reader], place)
                moves = self.moves[reader]
                result = made.of(reading, value.dtype, shape, base, moves, batch)
                if is_written(reader):
                    result = call(aten.clone.default, result)
                if not value.requires_grad:
                    result = call(aten.detach.default, result)
                give_value(result, value)
                results[reader] = result
        for reader, result in results.items():
            replace_uses(reader, result)
        self.replay.forget(descendants(results.values()))
        erase_unused(sorted({*self._inside(), *of_teacher}, reverse=True))
        layers = "the linear layers of student and teacher" if of_teacher else self.layer
        absorbed = " and ".join(filter(None, [layers, *logits.absorbed]))
        whats = dict.fromkeys(reading.what for reading in readings.values())
        notes = [f"absorbed {absorbed}"] * bool(absorbed)
        notes += [f"computes of each row: {', '.join(whats)}", *more]
        notes += ["the logits are returned lazily"] * bool(returned)
        return Rewritten(node, list(readings), notes, returned)


@dataclass(frozen=True)
class _Others:
    """What else reads a teacher's logits than the readers of the student's.

    Attributes:
        head: the teacher's.
        readings: what it reads, by the nodes.
        inside: these nodes, and those that lead to them alone.
    """

    head: Head
    readings: dict[Node, Reading]
    inside: set[Node]


class _CallApart(StatisticsCall):
    """Computes what others read of a teacher's logits, which then nothing else needs."""

    def _check_closed(self) -> None:
        """The student's op makes all other readers superfluous."""


def made_of(node: Node, inputs: set[Node]) -> set[Node]:
    """The nodes that a node is made of, from inputs on."""
    return set(ancestors([node], until=inputs)) - {node}


def _sizes_of(shape: torch.Size, needed: list[Node]) -> list[Any]:
    """A shape as a rewrite may express it."""
    symbols = sum(not isinstance(size, int) for size in shape)
    if symbols <= 1:
        return [size if isinstance(size, int) else -1 for size in shape]
    return [_size_of(size, needed) for size in shape]


def _size_of(size: Any, needed: list[Node]) -> Any:
    """One size as a rewrite may express it."""
    if isinstance(size, int):
        return size
    for node in needed:
        value = example(node)
        for dim, other in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if statically_known_true(other == size):
                return Size(node, dim)
    raise NotAbsorbedError("the graph has no node for a size of its rows")


def _join_after(node: Node) -> Node | None:
    """The node that joins the results of the loop that a node is in; None without a loop."""
    for _ in range(_STEPS_TO_JOIN):
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if is_join(node):
            return node
    return None


def _run(op: Any, *arguments: Any) -> Any:
    return op(*arguments)
