"""Losses by rows and by columns of one matrix, which one call reads."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.two_softmaxes import ONE_READ, TWO_READS
from compile_losses.report.explanation import explain_call
from tests import contrastive_programs as programs
from tests.accuracy import assert_accurate
from tests.constants import set_constants
from tests.graphs import Compiled, recorded
from tests.heads import errors_on_similar

CALL = "fused.softmax_sums"
STATISTICS = "linear_row_statistics"
#: Soft labels, and a metric in a loss, are no readers of a head.
HELD = [programs.weighted, programs.with_accuracy]


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    set_constants(monkeypatch, two_softmaxes_bytes=0)


def outcome(function, inputs):
    """What a program returns, and the gradients that there are."""
    leaves = [t for t in inputs if t.requires_grad]
    loss = function(*inputs)
    gradients = torch.autograd.grad(0.5 * loss, leaves, allow_unused=True)
    return [loss.detach(), *(each for each in gradients if each is not None)]


def check(function, inputs, monkeypatch, around=lambda f: f, **options):
    """Compares a program with float64, compiled with options; returns the joint graph."""
    eager = around(function)
    likes = errors_on_similar(eager, inputs, outcome)
    wide = [t.detach().double() if t.is_floating_point() else t for t in inputs]
    wide = [w.requires_grad_(t.requires_grad) for w, t in zip(wide, inputs, strict=True)]
    with recorded(monkeypatch) as graphs:
        ours = outcome(Compiled(eager, **options), inputs)
    right = outcome(function, wide)
    for *each, like in zip(ours, outcome(eager, inputs), right, likes, strict=True):
        assert_accurate(*each, like=like)
    (graph,) = graphs["joint"]
    return graph


@pytest.mark.usefixtures("no_code")
class TestPrograms:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("function", programs.TAKEN)
    def test_taken(self, function, dtype, monkeypatch):
        graph = check(function, programs.problem(dtype), monkeypatch)
        assert graph.count(CALL) == programs.TAKEN[function]
        assert "aten.amax" not in graph

    @pytest.mark.parametrize("function", programs.UNEQUAL)
    def test_other_numbers_of_columns(self, function, monkeypatch):
        inputs = programs.problem(torch.float32, texts=programs.MORE)
        assert check(function, inputs, monkeypatch).count(CALL) == 1

    @pytest.mark.parametrize("function", programs.LEFT)
    def test_left(self, function, monkeypatch):
        assert CALL not in check(function, programs.problem(), monkeypatch)

    def test_no_gradient(self, monkeypatch):
        inputs = [t.detach() for t in programs.problem()]
        with recorded(monkeypatch) as graphs:
            found = Compiled(programs.open_clip)(*inputs)
        torch.testing.assert_close(found, programs.open_clip(*inputs))
        assert graphs["joint"][0].count(CALL) == 1

    def test_sizes_that_are_not_known(self, monkeypatch):
        for texts in (programs.PAIRS, programs.MORE):
            inputs = programs.problem(texts=texts)
            with recorded(monkeypatch) as graphs:
                found = outcome(Compiled(programs.labelled, dynamic=True), inputs)
            torch.testing.assert_close(found, outcome(programs.labelled, inputs))
            assert graphs["joint"][0].count(CALL) == 1

    def test_logits_as_input(self, monkeypatch):
        """Of no product; the gradient is returned."""

        def function(logits):
            return programs.both(logits)

        inputs = (torch.randn(30, 30, dtype=torch.float64).requires_grad_(),)
        assert check(function, inputs, monkeypatch).count(CALL) == 1

    def test_returned_logits(self, monkeypatch):
        def function(a, b, scale, *_):
            logits = b @ a.T * scale.exp()
            return programs.both(logits), logits, logits.T

        inputs = programs.problem()
        results = []
        for each in (Compiled(function), function):
            loss, *logits = each(*inputs)
            loss = loss + logits[0].square().mean() + logits[1].sin().mean()
            gradients = torch.autograd.grad(loss, inputs[:3], allow_unused=True)
            results.append([loss, *logits, *gradients])
        torch.testing.assert_close(*results)

    def test_masked_rows(self, monkeypatch):
        """Infinite logits, and rows and columns of nothing else: what torch makes of them."""

        def function(logits):
            return programs.both(logits, reduction="sum")

        x = torch.randn(12, 12, dtype=torch.float64)
        for change in ((3, slice(None)), (slice(None), 4), (5, 6)):
            for value in (-torch.inf, torch.inf, torch.nan):
                logits = x.clone()
                logits[change] = value
                logits.requires_grad_()
                found = outcome(Compiled(function), (logits,))
                expected = outcome(function, (logits,))
                torch.testing.assert_close(found, expected, equal_nan=True)

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (programs.open_clip, ""),
            (programs.masked, "where"),
            (programs.scaled_by_rows, "mul"),
        ],
    )
    def test_reasons(self, function, reason):
        compiled = Compiled(function)
        compiled(*programs.problem())
        choice = TWO_READS if reason else ONE_READ
        assert sum(choice in found for found in compiled.choices) == 2
        if reason:
            details = [detail for site in compiled.sites for detail in site.details]
            assert any(reason in detail and "in the same loops" in detail for detail in details)

    def test_small(self, monkeypatch):
        set_constants(monkeypatch, two_softmaxes_bytes=1 << 20)
        compiled = Compiled(programs.open_clip)
        compiled(*programs.problem())
        assert any(TWO_READS in choice for choice in compiled.choices)


@pytest.mark.usefixtures("no_code")
class TestPreferMemory:
    """A product for the rows and one for the columns, and no matrix is held."""

    @pytest.fixture(autouse=True)
    def small_chunks(self, chunks):
        chunks(8)

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("function", [f for f in programs.APART if f not in HELD])
    def test_no_matrix_is_held(self, function, dtype, monkeypatch):
        inputs = programs.problem(dtype)
        graph = check(function, inputs, monkeypatch, prefer_memory=True)
        assert CALL not in graph
        assert "aten.mm" not in graph
        report = explain_call(function, inputs, options={"prefer_memory": True})
        ops = {site.op for site in report.losses}
        assert ops <= {"two_way_cross_entropy", "linear_cross_entropy", STATISTICS}
        plans = {site.op: site.plan for site in report.losses}
        assert plans.get("two_way_cross_entropy") in (None, ("logits computed again",))

    def test_columns_of_a_part(self, monkeypatch):
        inputs = programs.problem(texts=programs.MORE)
        graph = check(programs.hard_negatives, inputs, monkeypatch, prefer_memory=True)
        assert CALL not in graph
        assert "aten.mm" not in graph

    @pytest.mark.parametrize("function", [programs.labelled, programs.hard_negatives])
    def test_sizes_that_change(self, function):
        compiled = Compiled(function, prefer_memory=True, dynamic=True)
        for texts in (programs.PAIRS, programs.MORE):
            inputs = programs.problem(texts=texts)
            torch.testing.assert_close(outcome(compiled, inputs), outcome(function, inputs))

    @pytest.mark.parametrize("function", [*HELD, programs.several, programs.scaled_by_rows])
    def test_matrices_that_are_held_all_the_same(self, function, monkeypatch):
        """They are read as without the option."""
        inputs = programs.problem()
        graphs = [
            check(function, inputs, monkeypatch, prefer_memory=wanted) for wanted in (False, True)
        ]
        assert graphs[0].count("aten.mm") == graphs[1].count("aten.mm")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [programs.open_clip, programs.transformers_clip])
def test_autocast(function, device, monkeypatch):
    """In Inductor's code. The gradient is written over the matrix, and only the products are
    scaled."""
    inputs = programs.problem(torch.float32, device=device)
    graph = check(function, inputs, monkeypatch, programs.autocast)
    assert graph.count(CALL) == 1
    squares = f"[{programs.PAIRS}, {programs.PAIRS}]"
    assert f"aten.sum.default({squares}" not in graph


@pytest.mark.parametrize("function", [programs.open_clip, programs.transformers_clip])
def test_equal_bits(function, device):
    inputs = programs.problem(torch.float32, device=device)
    compiled = torch.compile(function, backend="compile_losses")
    for one, other in zip(*(outcome(compiled, inputs) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


SCALED_AFTER = [
    programs.transformers_clip,
    programs.scaled_after,
    programs.symmetric_ranking,
    programs.divided,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("around", [lambda f: f, programs.autocast])
@pytest.mark.parametrize("function", [programs.open_clip, *SCALED_AFTER])
def test_gradient_over_the_matrix(function, around):
    """Inductor holds one matrix, and no other as large, where it cuts the loop, too."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    inputs = programs.problem(torch.float32)
    compiled = torch.compile(around(function), backend="compile_losses")
    with config.patch(realize_opcount_threshold=30, force_disable_caches=True):
        _, (forward, backward) = run_and_get_code(lambda: outcome(compiled, inputs))
    matrix = f"empty_strided_cpu(({programs.PAIRS}, {programs.PAIRS})"
    assert forward.count(matrix) == 1
    assert matrix not in backward
