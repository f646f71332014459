"""Other constants of devices than those that were measured, for the length of a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compile_losses import device_constants


def set_constants(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Of all classes of devices; other constants stay. Both kinds of sums get ``logits_bytes``."""
    if "logits_bytes" in changes:
        changes = {"summed_bytes": changes["logits_bytes"], **changes}
    columns = device_constants.COLUMNS
    changed = {name: replace(column, **changes) for name, column in columns.items()}
    patch.setattr(device_constants, "COLUMNS", changed)
