"""Which column of the table of constants a device has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from compile_losses import device_constants
from compile_losses.device_constants import COLUMNS, constants_of


@pytest.mark.parametrize(
    ("device", "capability", "gib", "hip", "column"),
    [
        ("cpu", None, 0, None, "cpu"),
        ("meta", None, 0, None, "cpu"),
        ("cuda", (9, 0), 80, None, "h100"),
        ("cuda:1", (9, 0), 80, None, "h100"),
        ("cuda", (9, 0), 140, None, "gpu"),  # an H200
        ("cuda", (8, 9), 48, None, "gpu"),
        ("cuda", (10, 0), 180, None, "gpu"),
        ("cuda", (9, 0), 64, "7.0", "gpu"),  # gfx90a says 9.0 as well
        ("cuda", None, 0, None, "gpu"),  # a fake tensor of a device that is not there
        ("xpu", None, 0, None, "gpu"),
    ],
)
def test_columns(device, capability, gib, hip, column, monkeypatch):
    monkeypatch.setattr(device_constants, "COLUMNS", COLUMNS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    major, minor = capability or (0, 0)
    properties = SimpleNamespace(major=major, minor=minor, total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
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
