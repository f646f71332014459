"""Heads without their logits, whatever reads these row by row: the option ``prefer_memory``."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import mark_dynamic
from torch.utils.checkpoint import checkpoint

from compile_losses import device_constants
from compile_losses.lower.decision import REGION
from compile_losses.lower.regions import BY_CHUNKS
from compile_losses.ops import linear_region
from compile_losses.ops.linear import region_program
from compile_losses.report.explanation import explain_call
from tests import region_programs as programs
from tests import test_drawn_heads
from tests.accuracy import assert_accurate
from tests.graphs import Compiled, recorded
from tests.heads import errors_on_similar, small_chunks  # noqa: F401

fused = torch.ops.fused

FORWARD = f"{BY_CHUNKS}, gradient in forward"
#: What libraries write: LoRA, bounds and margins, soft labels, R-Drop, PolyLoss.
OF_LIBRARIES = [
    programs.clamped,
    programs.penalised,
    programs.adapted,
    programs.with_margin,
    programs.of_soft_labels,
    programs.both_ways,
    programs.poly,
    programs.of_shifted_rows,
]


def outcome(function, inputs):
    """What a program returns, and its gradients; a second returned number counts threefold."""
    leaves = [t for t in inputs if t.requires_grad]
    found = function(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    total = found[0]
    if len(found) == 2 and found[1].requires_grad and found[1].dim() == 0:
        total = total + 3 * found[1]
    gradients = torch.autograd.grad(total * 0.5, leaves, allow_unused=True)
    return [*(each.detach() for each in found), *gradients]


def assert_same(found, expected, tolerance=1e-11):
    for ours, torchs in zip(found, expected, strict=True):
        assert (ours is None) == (torchs is None)
        if ours is not None:
            torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance)


def assert_as_accurate(compiled, function, inputs, truth):
    """By the one accuracy rule, against float64."""
    for each in zip(outcome(compiled, inputs), outcome(function, inputs), truth, strict=True):
        if each[0] is not None:
            assert_accurate(*each)


@pytest.mark.usefixtures("no_code")
class TestPrograms:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("function", programs.IN_THE_FORWARD)
    def test_gradients_in_the_forward(self, function):
        inputs = programs.problem()
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))
        assert any(choice.endswith(FORWARD) for choice in compiled.choices)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("function", programs.AGAIN)
    def test_gradients_of_logits_computed_again(self, function):
        inputs = programs.problem()
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))
        assert any("computed again" in choice for choice in compiled.choices)

    def test_logits_that_do_not_fit(self, monkeypatch):
        """With their gradient. Of them none are held, though memory is not preferred."""
        inputs, both = programs.problem(), 2 * 8 * programs.ROWS * programs.CLASSES
        for memory, is_taken in ((both, False), (both - 1, True), (None, False)):
            monkeypatch.setattr(device_constants, "memory_of", lambda device, m=memory: m)
            compiled = Compiled(programs.clamped)
            assert_same(outcome(compiled, inputs), outcome(programs.clamped, inputs))
            assert any(BY_CHUNKS in choice for choice in compiled.choices) == is_taken

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(("function", "reason"), programs.LEFT.items())
    def test_left(self, function, reason):
        inputs = programs.problem()
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))
        assert not any(BY_CHUNKS in choice for choice in compiled.choices)
        if reason is not None:
            assert any(reason in detail for site in compiled.sites for detail in site.details)

    @pytest.mark.parametrize(
        "function",
        [
            *(programs.of_learned_weights, programs.of_a_part_that_is_unused),
            *(programs.spread, programs.centred),
        ],
    )
    def test_no_product_is_left(self, function, monkeypatch):
        with recorded(monkeypatch) as graphs:
            outcome(Compiled(function, prefer_memory=True), programs.problem())
        (graph,) = graphs["joint"]
        assert "linear_region" in graph
        assert "mm.default" not in graph

    def test_weights_of_rows_whose_gradients_are_returned(self, monkeypatch):
        """The gradient of a row's weight is a column, and nothing but the output reads it."""

        def function(h, w, weights):
            return (F.linear(h, w).clamp(-3, 3).logsumexp(-1) * weights).mean()

        h, w = programs.problem()[:2]
        inputs = h, w, torch.rand(h.shape[:2], dtype=h.dtype).requires_grad_()
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))
        assert any(BY_CHUNKS in choice for choice in compiled.choices)

    @pytest.mark.parametrize("is_teacher", [False, True])
    def test_inputs_that_change_are_not_read_by_the_backward(self, is_teacher):
        def function(h, w, changed):
            if is_teacher:
                logits = F.linear(h, w) - F.linear(h.detach(), changed)
            else:
                logits = F.linear(h, w) + changed
            changed.add_(1)
            return logits.clamp(-3, 3).logsumexp(-1).std()

        h, w = programs.problem()[:2]
        found, expected = (
            outcome(f, (h, w, w.detach() / 2 if is_teacher else torch.ones_like(w[:, 0]).detach()))
            for f in (Compiled(function, prefer_memory=True), function)
        )
        assert_same(found, expected)

    def test_one_product_is_made_of_another_without_gradients(self):
        inputs = programs.problem()
        compiled = Compiled(programs.stacked, prefer_memory=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), programs.stacked(*inputs))
        assert not any(BY_CHUNKS in choice for choice in compiled.choices)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_numbers_of_rows_that_are_larger_than_their_sum(self, dtype):
        """In float16 those of a row would be infinite."""
        signs = torch.tensor([1.0, -1.0]).repeat(10).to(dtype)[:, None]

        def function(h, w):
            return (F.linear(h, w).clamp(max=2e4) * signs).sum()

        inputs = (
            torch.full((20, 3), 30.0, dtype=dtype).requires_grad_(),
            torch.full((8, 3), 100.0, dtype=dtype).requires_grad_(),
        )
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs), 1e-2)
        assert any(BY_CHUNKS in choice for choice in compiled.choices)

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("function", programs.IN_THE_FORWARD)
    def test_without_the_option_nothing_changes(self, function):
        compiled = Compiled(function)
        outcome(compiled, programs.problem())
        assert not any(BY_CHUNKS in choice for choice in compiled.choices)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("function", [*OF_LIBRARIES, programs.of_all_rows])
    def test_sizes_that_change(self, function):
        compiled = Compiled(function, prefer_memory=True)
        for batch, tokens in ((3, 24), (2, 31), (5, 24)):
            inputs = programs.problem(batch=batch, tokens=tokens)
            for tensor in inputs:
                if tensor.dim() > 1 and tensor.shape[:2] == (batch, tokens):
                    mark_dynamic(tensor, (0, 1))
            assert_same(outcome(compiled, inputs), outcome(function, inputs))
        assert any(BY_CHUNKS in choice for choice in compiled.choices)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("function", programs.IN_THE_FORWARD)
    def test_without_gradients(self, function):
        inputs = programs.problem()
        compiled = Compiled(function, prefer_memory=True)
        with torch.no_grad():
            found, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("function", OF_LIBRARIES)
    def test_bfloat16(self, function):
        wide = programs.problem()
        inputs = programs.problem(torch.bfloat16)
        compiled = Compiled(function, prefer_memory=True)
        exact = [
            w.detach().copy_(i).requires_grad_(w.requires_grad)
            for w, i in zip(wide, inputs, strict=True)
        ]
        assert_as_accurate(compiled, function, inputs, outcome(function, exact))
        assert any(BY_CHUNKS in choice for choice in compiled.choices)

    def test_autocast(self):
        def function(*inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return programs.clamped(*inputs)

        inputs = programs.problem(torch.float32)
        compiled = Compiled(function, prefer_memory=True)
        truth = outcome(programs.clamped, programs.problem())
        assert_as_accurate(compiled, function, inputs, truth)
        assert any(BY_CHUNKS in choice for choice in compiled.choices)

    def test_float16_computes_again(self):
        inputs = programs.problem(torch.float16)
        compiled = Compiled(programs.clamped, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(programs.clamped, inputs), 2e-2)
        (choice,) = (c for c in compiled.choices if BY_CHUNKS in c)
        assert "underflow" in choice

    def test_frozen_weights_and_inputs(self):
        for frozen in (0, 1):
            inputs = list(programs.problem())
            inputs[frozen] = inputs[frozen].detach()
            compiled = Compiled(programs.clamped, prefer_memory=True)
            assert_same(outcome(compiled, inputs), outcome(programs.clamped, inputs))
            assert any(BY_CHUNKS in choice for choice in compiled.choices)

    def test_checkpointed(self):
        def function(*inputs):
            return checkpoint(programs.clamped, *inputs, use_reentrant=False)

        inputs = programs.problem()
        compiled = Compiled(function, prefer_memory=True)
        assert_same(outcome(compiled, inputs), outcome(function, inputs))

    def test_backward_runs_twice(self):
        inputs = programs.problem()
        leaves = list(inputs[:3])
        loss = Compiled(programs.clamped, prefer_memory=True)(*inputs)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss * 2, leaves)
        assert_same(second, [2 * each for each in first])

    @pytest.mark.sampled(8)
    @pytest.mark.parametrize(
        "passes", ["", "rewrite.known_heads,plan.regions,plan.kernels,in_place"]
    )
    @pytest.mark.parametrize("first", range(0, 60, 10))
    @pytest.mark.usefixtures("chunks", "kernels_for_small_losses")
    def test_drawn_programs(self, first, passes, monkeypatch):
        """With recognition and without it, where all readers of logits are torch's ops."""
        monkeypatch.setenv("COMPILE_LOSSES_PREFER_MEMORY", "1")
        if passes:
            monkeypatch.setenv("COMPILE_LOSSES_PASSES", passes)
        for seed in range(first, first + 10):
            torch._dynamo.reset()
            test_drawn_heads.check(seed)


class TestCompiled:
    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("function", [*programs.IN_THE_FORWARD, *programs.AGAIN])
    def test_on_a_gpu(self, function, dtype):
        inputs = programs.problem(dtype, device="cuda")
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        exact = [e if i.is_floating_point() else i for e, i in zip(exact, inputs, strict=True)]
        compiled = Compiled(function, prefer_memory=True)

        def numbers(function, inputs):
            return [each for each in outcome(function, inputs) if each is not None]

        found = numbers(compiled, inputs), numbers(function, inputs), numbers(function, exact)
        likes = errors_on_similar(function, inputs, numbers)
        for *results, like in zip(*found, likes, strict=True):
            assert_accurate(*results, like=like)
        assert any(BY_CHUNKS in choice for choice in compiled.choices)

    @pytest.mark.parametrize("function", [programs.adapted, programs.both_ways, programs.hinge])
    def test_steps_are_compiled(self, function):
        inputs = programs.problem()
        torch._dynamo.reset()
        compiled = torch.compile(
            function, backend="compile_losses", options={"prefer_memory": True}
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=linear_region._NOT_COMPILED)
            found = outcome(compiled, inputs)
        assert_same(found, outcome(function, inputs))

    def test_steps_that_do_not_compile_run_one_by_one(self, monkeypatch):
        def refuses(graph, **_):
            def function(*values):
                raise RuntimeError("no compiler")

            return function

        linear_region._function.cache_clear()
        _, inputs = example()
        expected = fused.linear_region(*inputs)
        linear_region._function.cache_clear()
        monkeypatch.setattr(linear_region.torch, "compile", refuses)
        with pytest.warns(UserWarning, match=r"could not be compiled.*no compiler"):
            found = fused.linear_region(*inputs)
        torch.testing.assert_close(found, expected)
        linear_region._function.cache_clear()


def example():
    """A program of one product, with a number, products and sums of each kind; and its tensors."""
    generator = torch.Generator().manual_seed(0)
    x, known = (torch.randn(20, n, generator=generator, dtype=torch.float64) for n in (6, 1))
    w = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    written = {
        "products": [{"input": 0, "columns": 0, "bias": None}],
        "known": [{"is_of_rows": True, "index": 1}],
        "steps": [
            ["aten.mul.Tensor", [{"value": 0}, {"value": 1}], {}],
            ["aten.sum.dim_IntList", [{"value": 2}, [1]], {"keepdim": True}],
        ],
        "columns": [3],
        "row_products": [{"value": 2, "other": 1}],
        "sums": [
            {"value": 2, "other": 0, "is_turned": False, "classes": 9},
            {"value": 2, "other": 0, "is_turned": True, "classes": 9},
        ],
        "totals": [{"value": 2, "classes": 9}],
        "dtypes": ["float64"] * 5,
    }
    z = (x @ w) * known
    expected = [z.sum(1), z @ w.t(), z.t() @ x, x.t() @ z, z.sum(0)]
    return expected, ([x, known.squeeze(1)], [w, w.t()], json.dumps(written))


@pytest.mark.usefixtures("no_code")
class TestOp:
    def test_values(self):
        expected, inputs = example()
        torch.testing.assert_close(fused.linear_region(*inputs), expected)

    def test_no_rows(self):
        _, (rows, shared, text) = example()
        found = fused.linear_region([r[:0] for r in rows], shared, text)
        assert [list(f.shape) for f in found[:2]] == [[0], [0, 6]]
        for each in found[2:]:
            assert not each.any()

    def test_opcheck(self):
        _, inputs = example()
        torch.library.opcheck(fused.linear_region.default, inputs)

    def test_text_is_read_back(self):
        _, (_, _, text) = example()
        program = region_program.parsed(text)
        assert region_program.parsed(program.text()) == program

    def test_steps_that_mix_rows_are_refused(self):
        _, (rows, shared, text) = example()
        for step in (
            ["aten.sum.dim_IntList", [{"value": 2}, [0]], {"keepdim": True}],
            ["aten.sum.dim_IntList", [{"value": 2}, [1]], {}],
            ["aten.roll.default", [{"value": 2}, [1]], {}],
            ["aten.rand_like.default", [{"value": 2}], {}],
            ["aten.gather.default", [{"value": 2}, 0, {"value": 1}], {}],
        ):
            written = json.loads(text)
            written["steps"][1] = step
            with pytest.raises(ValueError, match="no step"):
                fused.linear_region(rows, shared, json.dumps(written))


@pytest.mark.usefixtures("no_code")
class TestReport:
    def test_a_loss_with_an_op(self):
        inputs = programs.problem()
        report = explain_call(programs.clamped, inputs, options={"prefer_memory": True})
        (site,) = report.losses
        assert site.plan == (FORWARD,)
        assert site.details == (f"{FORWARD}: 8 rows of logits at a time",)
        assert site.gain == "gained"
        assert site.reason == ""

    def test_a_loss_without_an_op(self):
        inputs = programs.problem()
        report = explain_call(programs.hinge, inputs, options={"prefer_memory": True})
        (site,) = report.losses
        assert (site.op, site.status) == (REGION, "rewritten")
        assert site.plan == (f"{REGION}, {FORWARD}",)
        assert "return" in programs_line(site)

    def test_why_not(self):
        inputs = programs.problem()
        report = explain_call(programs.returned, inputs, options={"prefer_memory": True})
        (site,) = report.losses
        assert any("they are returned" in detail for detail in site.details)


def programs_line(site):
    """The line of the program that a site names."""
    with open(programs.__file__) as file:
        return " ".join(file.readlines()[site.line - 1 : site.line + 1]) + " return"


@pytest.mark.planted
@pytest.mark.usefixtures("no_code")
def test_a_failure_leaves_the_graph(monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")
    inputs = programs.problem()

    def fails(*_):
        raise ValueError("planted in a region")

    monkeypatch.setattr("compile_losses.lower.regions.save", fails)
    compiled = Compiled(programs.clamped, prefer_memory=True)
    with pytest.warns(RuntimeWarning, match="planted in a region"):
        found = outcome(compiled, inputs)
    assert_same(found, outcome(programs.clamped, inputs))


def test_the_loss_stays_a_function_of_labels_that_change():
    """A program is compiled once, and its text holds no number of a tensor."""
    inputs = list(programs.problem())
    compiled = torch.compile(
        programs.clamped, backend="compile_losses", options={"prefer_memory": True}
    )
    outcome(compiled, inputs)
    inputs[5] = inputs[5].flip(0)
    assert_same(outcome(compiled, inputs), outcome(programs.clamped, inputs))
