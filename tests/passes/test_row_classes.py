"""Sets of classes that readers pick of the rows of one head's logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_losses.ops.checks import NOTHING_IGNORED
from compile_losses.recognize.heads.readings import Reading
from compile_losses.recognize.heads.row_classes import (
    Classes,
    as_rows,
    sets_of_classes,
    side_by_side,
    unshaped,
)
from tests.passes.graphs import aten, dynamo, evaluate, numbers, recognizer, returned


def given():
    labels = torch.arange(6).view(2, 3)
    return torch.randn(2, 3, 4), labels, torch.arange(12).view(2, 3, 2)


def made(function):
    found = dynamo(function, *given())
    found_by, _ = recognizer(found.gm)
    nodes = list(returned(found.gm.graph))
    return found, found_by.replay, nodes


def reading(replay, node, **options):
    return Reading(replay.of(node), 2, **options)


def test_equal_classes_are_one_set():
    _, replay, (x, one, same, other) = made(
        lambda x, t, p: (x + 1, t.flatten() + 1, t.flatten() + 1, t.flatten() + 2)
    )
    readers = {node: reading(replay, x, target=replay.of(node)) for node in (one, same, other)}
    sets = sets_of_classes(readers, {node: [] for node in readers}, replay)
    assert [each.readers for each in sets] == [[one, same], [other]]
    assert not any(each.several for each in sets)


def test_several_classes_and_rows_of_their_own():
    _, replay, (x, labels, picks) = made(lambda x, t, p: (x + 1, t.flatten() * 1, p * 1))
    readers = {
        labels: reading(replay, x, target=replay.of(labels)),
        picks: reading(replay, x, picks=replay.of(picks)),
    }
    one, several = sets_of_classes(readers, {node: [] for node in readers}, replay)
    assert (one.several, one.count, several.several, several.count) == (False, 1, True, 2)
    moves = {labels: [], picks: [(aten.slice.Tensor, (1, 1, 3))]}
    again = {labels: readers[labels], picks: reading(replay, x, target=replay.of(labels))}
    assert len(sets_of_classes(again, moves, replay)) == 2


def ignoring(value, index, moves=()):
    return Classes(value, list(moves), index, [], False)


def test_ignored_classes():
    _, replay, (labels,) = made(lambda x, t, p: t.flatten() * 1)
    value = replay.of(labels)
    none, negative, other, positive = (ignoring(value, i) for i in (NOTHING_IGNORED, -100, -1, 3))
    assert none.is_like(negative, replay)
    assert negative.is_like(none, replay)
    assert not none.is_like(positive, replay)
    assert not negative.is_like(other, replay)


def test_classes_of_all_rows():
    """A set of some rows has class 0 where its readers do not read."""
    found, replay, (rows, some, several) = made(
        lambda x, t, p: (x.flatten(0, 1) * 1, t[:, 1:].flatten() * 1, p[:, 1:] * 1)
    )
    known = numbers(found)
    _, labels, picks = given()
    moves = [(aten.slice.Tensor, (1, 1, 3))]
    one = Classes(replay.of(some), moves, -100, [], False)
    all_rows = evaluate(one.of_all(replay.of(rows), [2, 3]), known)
    expected = torch.cat([torch.zeros(2, 1).long(), labels[:, 1:]], 1).flatten()
    assert all_rows.tolist() == expected.tolist()
    more = Classes(replay.of(several), moves, -100, [], True)
    all_rows = evaluate(more.of_all(replay.of(rows), [2, 3]), known)
    expected = torch.cat([torch.zeros(2, 1, 2).long(), picks[:, 1:]], 1).flatten(0, 1)
    assert all_rows.tolist() == expected.tolist()


def test_side_by_side():
    """Ignored classes have class 0 in their place."""
    found, replay, (rows, labels, picks) = made(
        lambda x, t, p: (x.flatten(0, 1) * 1, t.flatten() * 1, p * 1)
    )
    sets = [
        Classes(replay.of(labels), [], 4, [], False),
        Classes(replay.of(picks), [], -(2**40), [], True),
    ]
    result = evaluate(side_by_side(sets, replay.of(rows), [2, 3]), numbers(found))
    _, labels, picks = given()
    first = labels.flatten().where(labels.flatten() != 4, 0)
    assert result.tolist() == torch.cat([first[:, None], picks.flatten(0, 1)], 1).tolist()
    assert side_by_side([], replay.of(rows), [2, 3]) is None


def test_unshaped():
    _, replay, (flat, viewed) = made(lambda x, t, p: (t.flatten(), (t.view(-1) + 0).view(3, 2)))
    (labels,) = [n for n in flat.graph.nodes if n.name.startswith("l_t")]
    assert unshaped(replay.of(flat), replay).node is labels
    assert unshaped(replay.of(viewed), replay).fake.shape == (6,)


def test_as_rows():
    _, replay, (three,) = made(lambda x, t, p: F.relu(x))
    rows = as_rows(replay.of(three))
    assert rows.fake.shape == (6, 4)
    assert evaluate(rows, {three: torch.ones(2, 3, 4)}).shape == (6, 4)
