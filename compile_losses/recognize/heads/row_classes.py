"""Sets of classes that readers of one head's logits pick of its rows.

Two losses may pick different classes of the same rows, or of some of them. One set of one class of
each row is the target of the op, and the others are its picks, side by side. An ignored class has
class 0 in its place there, and the reader masks what it reads of it. So have rows that a set has no
class of, which its readers do not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from compile_losses.ops.checks import NOTHING_IGNORED
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.symbolic_tensors import Value, computed_alike
from compile_losses.recognize.heads.head import NotAbsorbedError, computed
from compile_losses.recognize.heads.readings import Move, Reading
from compile_losses.recognize.spellings.row_views import unshaped


@dataclass
class Classes:
    """Classes that some readers pick: one of each of their rows, or several.

    Attributes:
        classes: [rows], or [rows, K].
        moves: the ops that make these rows of the op's rows.
        ignore_index: the class index whose rows have a loss of 0, or NOTHING_IGNORED.
        readers: the nodes that pick these classes.
        several: whether there are K of each row.
    """

    classes: Value
    moves: list[Move]
    ignore_index: int
    readers: list[Node]
    several: bool

    @property
    def count(self) -> int:
        """How many of each row."""
        return int(self.classes.fake.shape[-1]) if self.several else 1

    @property
    def flat(self) -> Value:
        """One class of each row, [rows]."""
        return _flat(self.classes)

    def is_like(self, other: Classes, replay: AtenReplay) -> bool:
        """Whether the readers of both pick the same classes of the same rows.

        A reader that ignores none may go with one that ignores a negative index: it has no rows of
        such a class.
        """
        alike = (
            self.several == other.several
            and replay.same(self.classes, other.classes)
            and computed_alike(self.moves, other.moves)
        )
        ignored = {self.ignore_index, other.ignore_index}
        if len(ignored) > 1:
            alike = alike and NOTHING_IGNORED in ignored and max(ignored) < 0
        return alike

    def of_all(self, input: Value, shape: list[Any]) -> Value:
        """The classes of all rows of the op, [rows] or [rows, K].

        Args:
            input: the op's, [rows, hidden].
            shape: of its rows before they were flattened.
        """
        classes = as_rows(self.classes) if self.several else self.flat
        if not self.moves:
            return classes
        nothing = computed(aten.zeros_like.default, computed(aten.select.int, input, 1, 0))
        nothing = computed(aten.to.dtype, nothing, torch.int64)
        ones = computed(aten.add.Tensor, nothing, 1)
        numbers = computed(aten.sub.Tensor, computed(aten.cumsum.default, ones, 0), 1)
        places = computed(aten.reshape.default, numbers, [*shape, 1])
        for op, arguments in self.moves:
            places = computed(op, places, *arguments)
        places = _flat(places)
        if self.several:
            columns = (computed(aten.unsqueeze.default, each, 1) for each in (nothing, places))
            nothing, places = columns
            nothing = computed(aten.repeat.default, nothing, [1, self.count])
            places = computed(aten.expand.default, places, [-1, self.count])
        return computed(aten.scatter.src, nothing, 0, places, classes)


def sets_of_classes(
    readings: Mapping[Node, Reading], moves: Mapping[Node, list[Move]], replay: AtenReplay
) -> list[Classes]:
    """The sets that readers pick, each with its readers.

    Args:
        moves: for each reader the ops that make its rows of the op's.
    """
    found: list[Classes] = []
    for node, reading in readings.items():
        target, picks, ignored = reading.target, reading.picks, reading.ignore_index
        if target is not None:
            if target.fake.dtype != torch.int64:
                raise NotAbsorbedError(f"{node.name} has class indices that are not int64")
            classes = unshaped(target, replay)
        elif picks is not None:
            if not isinstance(picks.fake.shape[-1], int):
                raise NotAbsorbedError(f"{node.name} picks as many classes as a symbol says")
            classes = picks
        else:
            continue
        ignore_index = NOTHING_IGNORED if ignored is None else ignored
        new = Classes(classes, moves[node], ignore_index, [node], target is None)
        same = next((one for one in found if one.is_like(new, replay)), None)
        if same is None:
            found.append(new)
        else:
            same.readers.append(node)
            same.ignore_index = max(same.ignore_index, ignore_index)
    return found


def side_by_side(sets: list[Classes], input: Value, shape: list[Any]) -> Value | None:
    """Sets of classes as picks, [rows, K]; None without any. Arguments as of ``of_all``."""
    parts = []
    for one in sets:
        classes = one.of_all(input, shape)
        if one.ignore_index != NOTHING_IGNORED:
            ignored = computed(aten.eq.Scalar, classes, one.ignore_index)
            classes = computed(aten.masked_fill.Scalar, classes, ignored, 0)
        parts.append(classes if one.several else computed(aten.unsqueeze.default, classes, 1))
    if len(parts) > 1:
        return computed(aten.cat.default, parts, 1)
    return parts[0] if parts else None


def _flat(value: Value) -> Value:
    return computed(aten.reshape.default, value, [-1])


def as_rows(value: Value) -> Value:
    """A tensor as [rows, last dimension]."""
    return computed(aten.reshape.default, value, [-1, value.fake.shape[-1]])
