"""Draft models and their divergences from a teacher's rows, which regions read by chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.lower.regions import BY_CHUNKS
from tests import draft_programs as programs
from tests.accuracy import assert_accurate
from tests.graphs import Compiled, recorded
from tests.heads import small_chunks  # noqa: F401


def outcome(function, inputs):
    leaves = [t for t in inputs if t.requires_grad]
    loss = function(*inputs)
    return [loss, *torch.autograd.grad(loss * 0.5, leaves, allow_unused=True)]


def assert_same(found, expected, tolerance=1e-11):
    for ours, torchs in zip(found, expected, strict=True):
        assert (ours is None) == (torchs is None)
        if ours is not None:
            torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.usefixtures("no_code")
class TestPrograms:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("function", programs.TAKEN)
    def test_no_logits_are_held(self, function, monkeypatch):
        inputs = programs.problem()
        with recorded(monkeypatch) as graphs:
            compiled = Compiled(function, prefer_memory=True)
            found = outcome(compiled, inputs)
        assert_same(found, outcome(function, inputs))
        (graph,) = graphs["joint"]
        assert "mm.default" not in graph, [s.details for s in compiled.sites]
        assert "fused.linear_" in graph, [s.details for s in compiled.sites]

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "function", [programs.total_variation, programs.log_overlap, programs.eagle]
    )
    def test_accuracy(self, function, dtype):
        inputs = programs.problem(dtype)
        exact = [
            t.double() if t.is_floating_point() else t for t in map(torch.Tensor.detach, inputs)
        ]
        exact = [e.requires_grad_(i.requires_grad) for e, i in zip(exact, inputs, strict=True)]
        compiled = Compiled(function, prefer_memory=True)
        results = zip(
            *(
                outcome(f, i)
                for f, i in ((compiled, inputs), (function, inputs), (function, exact))
            ),
            strict=True,
        )
        for each in results:
            if each[0] is not None:
                assert_accurate(*each)
        is_by_chunks = any(BY_CHUNKS in choice for choice in compiled.choices)
        assert is_by_chunks != (function in programs.BY_DEFAULT)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("function", programs.TAKEN)
    def test_gradients_are_made_in_the_forward(self, function):
        compiled = Compiled(function, prefer_memory=True)
        outcome(compiled, programs.problem())
        assert not [c for site in compiled.sites for c in site.plan if "again" in c]

    @pytest.mark.parametrize("function", programs.TEACHER_HELD)
    def test_a_teacher_that_is_held(self, function):
        inputs = programs.problem()
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))
        assert any("labels are numbers of its rows" in site.reason for site in compiled.sites)

    @pytest.mark.parametrize("function", programs.BY_DEFAULT)
    def test_no_logits_are_held_without_an_option(self, function, monkeypatch):
        inputs = programs.problem()
        with recorded(monkeypatch) as graphs:
            compiled = Compiled(function)
            found = outcome(compiled, inputs)
        assert_same(found, outcome(function, inputs))
        assert "mm.default" not in graphs["joint"][0], [s.details for s in compiled.sites]
        assert any("of the teacher's rows apart" in site.reason for site in compiled.sites)

    def test_all_classes_twice_take_the_option(self):
        """Their product would take longer than what is saved is worth."""
        inputs = programs.problem()
        compiled = Compiled(programs.eagle_of_all_classes)
        assert_same(outcome(compiled, inputs), outcome(programs.eagle_of_all_classes, inputs))
        reason = "prefer_memory': True} computes them twice"
        assert any(reason in site.reason for site in compiled.sites)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("options", [{}, {"prefer_memory": True}, {"lazy_logits": True}])
    @pytest.mark.parametrize("function", programs.OF_PICKS)
    def test_readers_of_some_classes(self, function, options):
        inputs = programs.problem()
        compiled = Compiled(function, **options)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))

    def test_kinks(self):
        """Where both sides are equal, the gradient of the smaller is shared, and of |0| is 0."""

        def function(h, own, w, *others):
            p = F.linear(h, w).softmax(-1)
            q = F.linear(h.detach(), w.detach()).softmax(-1)
            return torch.minimum(p, q).square().sum() + (p - q).abs().sum() * 3

        inputs = programs.problem()
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))
        assert any(BY_CHUNKS in choice for choice in compiled.choices)
