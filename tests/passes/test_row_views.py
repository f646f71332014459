"""How targets pick entries of rows."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.spellings.row_views import (
    RowIndexError,
    picks_of_gather,
    target_of_gather,
)
from tests.passes.graphs import dynamo, recognizer, returned, words


def test_targets_and_picks_of_a_gather():
    def step(x, t, p):
        return x.gather(1, t[:, None]), x.gather(1, p), x.gather(0, p), x.gather(1, p[:2])

    found = dynamo(step, torch.randn(4, 5), torch.zeros(4).long(), torch.zeros(4, 2).long())
    found_by, _ = recognizer(found.gm)
    single, several, rows, fewer = (found_by.replay.of(n) for n in returned(found.gm.graph))
    target, dim = target_of_gather(single, found_by.replay)
    assert (words(target), dim) == ("l_t_", 1)
    assert words(picks_of_gather(several, found_by.replay)) == "l_p_"
    for value, function in (
        (several, target_of_gather),
        (rows, picks_of_gather),
        (fewer, picks_of_gather),
    ):
        with pytest.raises(RowIndexError):
            function(value, found_by.replay)
