"""Small sizes in the place of large ones."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.graph.small_sizes import NoSizeError, Sizes


def test_small_sizes():
    sizes = Sizes([torch.empty(4096, 513, device="meta")])
    assert sizes.smaller
    rows, columns = sizes.of(4096), sizes.of(513)
    assert rows != columns
    assert max(rows, columns) < 64
    assert sizes.of(4096 * 513) == rows * columns
    assert sizes.of(4096.0) == float(rows)
    assert (sizes.of(3), sizes.of(0.5), sizes.of(True)) == (3, 0.5, True)
    assert sizes.unchanged().of(4096) == 4096
    assert not Sizes([torch.empty(3, 4)]).smaller


def test_too_many_sizes():
    many = [torch.empty(n, 99, device="meta") for n in range(5000, 5060)]
    with pytest.raises(NoSizeError):
        Sizes(many)
