"""Other constants of devices than those that were measured, for the length of a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compile_losses import device_constants, inductor_passes


def set_constants(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Of all classes of devices; other constants stay. Both kinds of sums get ``logits_bytes``.

    AOTAutograd's cache then gives a test no graph that was planned with other constants: what
    identifies our passes in its keys gets the changes.
    """
    if "logits_bytes" in changes:
        changes = {"summed_bytes": changes["logits_bytes"], **changes}
    columns = device_constants.COLUMNS
    changed = {name: replace(column, **changes) for name, column in columns.items()}
    patch.setattr(device_constants, "COLUMNS", changed)
    before = inductor_passes.fingerprint
    patch.setattr(inductor_passes, "fingerprint", lambda: f"{before()} {changes}")


def move_gradients(patch: pytest.MonkeyPatch, longest_row: int) -> None:
    """Gradients of losses without an op go into the forward on every device, whether it pays there
    or not, for rows up to so many numbers."""
    set_constants(
        patch,
        moves_gradients=True,
        least_gradient_bytes=0,
        longest_row=longest_row,
        shortest_row=2,
        many_rows=2,
        merges_loops=False,
        writes_over=True,
    )


def plan_small_as_large(patch: pytest.MonkeyPatch) -> None:
    """A small loss on a CPU is not decomposed for its size."""
    small = {"small_bytes": 0, "small_simple_bytes": 0, "ahead_bytes": 0}
    set_constants(patch, **small, statistics_bytes=0, statistics_classes=0)
