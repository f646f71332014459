"""Cross entropies of chunks of rows, put together again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.spellings.joined_calls import joined_calls
from tests.passes.graphs import dynamo, evaluate, numbers, recognizer

LOSS = {"reduction": "none"}


def of_chunks(x, t, **options):
    options = {**LOSS, **options}
    pairs = zip(x.chunk(2), t.chunk(2), strict=True)
    return torch.cat([F.cross_entropy(a, b, **options) for a, b in pairs])


def joined(function, *inputs):
    found = dynamo(function, *inputs)
    found_by, root = recognizer(found.gm)
    return found, root, joined_calls(root, found_by.replay)


CHUNKS = {
    "chunks": of_chunks,
    "ignored": lambda x, t: of_chunks(x, t, ignore_index=3),
    "rows": lambda x, t: torch.stack([F.cross_entropy(x[i], t[i], **LOSS) for i in range(4)]),
    "cast": lambda x, t: torch.cat([
        F.cross_entropy(a.float(), b, **LOSS) for a, b in zip(x.split(3), t.split(3), strict=True)
    ]),
}  # fmt: skip
OTHERS = {
    "in another order": lambda x, t: torch.cat([
        F.cross_entropy(a, b, **LOSS) for a, b in zip(x.chunk(2)[::-1], t.chunk(2), strict=True)
    ]),
    "not all": lambda x, t: torch.cat([
        F.cross_entropy(x[i : i + 1], t[i : i + 1], **LOSS) for i in range(3)
    ]),
    "different options": lambda x, t: torch.cat([
        F.cross_entropy(a, b, ignore_index=i, **LOSS)
        for i, (a, b) in enumerate(zip(x.chunk(2), t.chunk(2), strict=True))
    ]),
    "reduced": lambda x, t: torch.stack([
        F.cross_entropy(a, b) for a, b in zip(x.chunk(2), t.chunk(2), strict=True)
    ]),
    "another loss": lambda x, t: torch.cat([
        F.nll_loss(a, b, **LOSS) for a, b in zip(x.chunk(2), t.chunk(2), strict=True)
    ]),
    "joined with others": lambda x, t: torch.cat([of_chunks(x, t), x[:, 0]]),
}  # fmt: skip


def given():
    return torch.randn(4, 6, requires_grad=True), torch.randint(6, (4,))


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name):
    found, root, match = joined(CHUNKS[name], *given())
    assert match.op == "cross_entropy"
    assert all(node < root for node in match.interior)
    known = numbers(found)
    args = [evaluate(argument, known) for argument in match.args]
    torch.testing.assert_close(match.overload(*args), known[root])


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    assert joined(OTHERS[name], *given())[2] is None
