"""Which column of the table of constants a device has."""

from __future__ import annotations

import pytest
import torch

from compile_losses import device_constants
from compile_losses.device_constants import COLUMNS, constants_of


@pytest.mark.parametrize(
    ("device", "capability", "hip", "column"),
    [
        ("cpu", None, None, "cpu"),
        ("meta", None, None, "cpu"),
        ("cuda", (9, 0), None, "hopper"),
        ("cuda:1", (9, 0), None, "hopper"),
        ("cuda", (8, 9), None, "gpu"),
        ("cuda", (10, 0), None, "gpu"),
        ("cuda", (9, 0), "7.0", "gpu"),  # gfx90a says 9.0 as well
        ("cuda", None, None, "gpu"),  # a fake tensor of a device that is not there
        ("xpu", None, None, "gpu"),
    ],
)
def test_columns(device, capability, hip, column, monkeypatch):
    monkeypatch.setattr(device_constants, "COLUMNS", COLUMNS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    device_constants._class_of.cache_clear()
    try:
        assert constants_of(torch.device(device)) is COLUMNS[column]
    finally:
        device_constants._class_of.cache_clear()


def test_memory_for_time():
    """A larger budget for logits is never below the usual one, and never all of many logits."""
    for column in COLUMNS.values():
        assert column.logits_bytes <= column.summed_bytes <= column.most_bytes
        assert 0 < column.part_of_logits <= 1
        assert column.shortest_row <= column.longest_row
