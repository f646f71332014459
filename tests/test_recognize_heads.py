"""Heads as models spell them, and what they have between a head and its loss."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.heads import with_head
from tests.corpus.between import (
    MATCHES,
    NARROW_MISSES,
    NEAR_MISSES,
    padded_vocabulary,
    rows_with_labels,
)
from tests.corpus.heads import head
from tests.heads import check_alone, compare, only_site
from tests.heads import small_chunks as small_chunks  # a fixture of this file, too

ROWS = 12  # of labels, with the leading dimensions merged


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    """Few rows of logits, so that small weights may be copied for them."""
    monkeypatch.setattr(with_head, "COPIED_WEIGHTS", 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATCHES)
def test_matches(name, dtype):
    if dtype == torch.bfloat16 and name == "modded-nanogpt":
        pytest.skip(reason="its factor is in NEAR_MISSES, where the product is narrower")
    inputs = head(dtype)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    (site,) = compare(MATCHES[name], inputs, **tolerance)
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten"), site


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    function, reason = NEAR_MISSES[name]
    check_alone(function, reason, head())


@pytest.mark.parametrize("captured", [False, True])
def test_rows_taken_by_a_mask(captured):
    inputs = head()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=captured):
        site = only_site(rows_with_labels, inputs)
        assert ("takes rows by a mask" if captured else "after the graph break in") in site.reason
        compare(rows_with_labels, inputs)


@pytest.mark.parametrize("name", NARROW_MISSES)
def test_near_misses_of_16_bits(name):
    function, reason = NARROW_MISSES[name]
    check_alone(function, reason, head(torch.bfloat16), rtol=5e-2, atol=5e-2)


@pytest.mark.kernels
def test_copies_of_the_weight_pay_for_many_rows(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(with_head, "chunk_rows", lambda *_, **__: 4)
    site = only_site(padded_vocabulary, head())
    assert "copies of its weight" in site.reason


def test_masked_classes_hide_what_is_not_finite():
    """The rows of padding may hold anything, as with torch.empty: the loss is that of the others.

    Torch's gradient of the hidden states is nan there.
    """
    h, w, b, t = head()
    expected = padded_vocabulary(h, w, b, t)
    w = w.detach().clone()
    w[-6:] = torch.nan
    compiled = torch.compile(padded_vocabulary, backend="compile_losses")
    torch.testing.assert_close(compiled(h, w.requires_grad_(), b, t), expected)


def test_only_the_addend_is_trained():
    h, w, b, t = head()
    inputs = h.detach(), w.detach(), b, t
    (site,) = compare(MATCHES["bias written out"], inputs)
    assert site.op == "linear_cross_entropy"
