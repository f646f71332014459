"""The list of passes, their switches, counts and dumps; what a graph may contain between two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

from compile_losses import passes, pipeline, switches
from compile_losses.graphs import Indexed, emit, value_of, version_of
from compile_losses.lower import aten_graph
from compile_losses.lower.fused_calls import find_losses
from compile_losses.recognize import guards
from tests import ROOT, WITHOUT_VECTORS, pass_list
from tests.graphs import Head, classes, real, writes

fused = torch.ops.fused
PAGE = ROOT / "docs" / "passes.md"
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LISTING = re.compile(r"^   ```\n(.*?)^   ```", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def own_records():
    pipeline.records().clear()
    yield
    pipeline.records().clear()


@pytest.mark.parametrize("page", pass_list.PAGES, ids=lambda path: path.name)
def test_pages_have_the_list(page):
    """It is generated: python -m tests.pass_list."""
    text = page.read_text()
    assert pass_list.filled(text) == text
    assert all(f"| `{each.name}`" in text for each in passes.PASSES)


def test_names():
    names = [each.name for each in passes.PASSES]
    assert len(set(names)) == len(names)
    stages = dict.fromkeys(each.stage for each in passes.PASSES)
    assert tuple(stages) == passes.STAGES


def test_a_pass_without_a_function():
    with pytest.raises(AssertionError, match="markers"):
        pipeline.Pipeline(passes.IN_PLACE, buffers=lambda graph: None)


def test_switches(monkeypatch):
    def running():
        return {each.name for each in passes.PASSES if switches.runs(each.name)}

    assert running() == {each.name for each in passes.PASSES}
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", "rewrite,plan.kernels")
    of_rewrite = {each.name for each in passes.passes_of(passes.REWRITE)}
    assert running() == {*of_rewrite, "plan.kernels"}
    assert [switches.runs(stage) for stage in passes.STAGES] == [True, True, False]
    switches.check_environment()
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", "plan.kernel")
    with pytest.raises(RuntimeError, match=r"got 'plan.kernel'. Did you mean 'plan.kernels'\?"):
        switches.check_environment()


def compiled(function, *inputs):
    torch._dynamo.reset()
    return torch.compile(function, backend="compile_losses")(*inputs)


def test_one_pass_is_left_out(monkeypatch, no_code, kernels_for_small_losses):
    listed = [each.name for each in passes.PASSES if each.name != "plan.kernels"]
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", ",".join(listed))
    model, inputs = Head(F.mse_loss), real()
    torch.testing.assert_close(compiled(model, *inputs), model(*inputs))
    assert "plan.kernels" not in pipeline.records()
    assert "plan.elementwise" in pipeline.records()


def test_needed_passes_run_with_any_other(monkeypatch, no_code):
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", "rewrite,plan.kernels")
    compiled(Head(F.mse_loss), *real())
    assert set(pipeline.records()) - {p.name for p in passes.passes_of(passes.REWRITE)} == {
        "plan.kernels",
        "plan.mutated_inputs",
    }


def test_records(no_code, kernels_for_small_losses):
    with fresh_cache():  # passes do not run for a graph that a cache has
        compiled(Head(F.mse_loss), *real()).backward()
    records = pipeline.records()
    assert set(records) == {each.name for each in passes.PASSES}
    one, kernels = records["rewrite.losses"], records["plan.kernels"]
    assert (one.runs, one.changes, kernels.runs, kernels.changes) == (1, 1, 1, 1)
    assert (records["in_place.buffers"].runs, records["plan.row_gradients"].changes) == (2, 0)
    assert 0 < one.seconds < 60


@pytest.mark.parametrize("question", ["depends_on_tangents", "find_calls", "find_losses"])
def test_no_question_is_asked_twice_of_one_version(
    question, monkeypatch, no_code, kernels_for_small_losses
):
    asked = []
    answer = getattr(aten_graph, question)

    def counted(graph):
        asked.append((graph, version_of(graph)))
        return answer(graph)

    monkeypatch.setattr(aten_graph, question, counted)
    compiled(Head(F.cross_entropy), *classes()).backward()
    assert asked
    assert len(set(asked)) == len(asked)


def test_dump(tmp_path, monkeypatch, no_code, kernels_for_small_losses):
    monkeypatch.setenv("COMPILE_LOSSES_DUMP", str(tmp_path / "graphs"))
    compiled(Head(F.mse_loss), *real()).backward()
    files = sorted((tmp_path / "graphs").iterdir())
    names = [file.name.split("-", 3) for file in files]
    assert [name[3] for name in names] == [
        "rewrite.losses.txt",
        "plan.kernels.txt",
        "in_place.buffers.txt",
        "in_place.buffers.txt",
    ]
    assert {name[0] for name in names} == {f"pid{os.getpid()}"}
    assert len({name[2] for name in names}) == 4
    head, about, *lines = files[0].read_text().splitlines()
    assert head.startswith("# rewrite.losses: ")
    assert about.startswith("# graph ")
    assert {line[0] for line in lines} == {" ", "+", "-"}
    (new,) = (line for line in lines if line.startswith("+mse"))
    assert "fused.mse_loss.default(" in new
    assert "graphs.py:" in new
    assert ", loss " in new


def test_files_of_others_stay(tmp_path, monkeypatch):
    """Another process may have had the same number."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = 3
    graph.output(x)
    monkeypatch.setenv("COMPILE_LOSSES_DUMP", str(tmp_path))
    monkeypatch.setattr(pipeline, "_files", iter(range(7, 9)))
    (output,) = graph.find_nodes(op="output")
    this = passes.PASSES[0]
    taken = [tmp_path / f"pid{os.getpid()}-0007-graph{n}-{this.name}.txt" for n in range(100)]
    for path in taken:
        path.touch()
    with pipeline.observed(this, Indexed(graph)):
        emit(output, "neg", (x,), like=x, value=-3)
    (new,) = set(tmp_path.iterdir()) - set(taken)
    assert "-0008-" in new.name
    assert "+neg: int = method neg(x)" in new.read_text()


def test_a_folder_that_is_none(tmp_path, monkeypatch, no_code, kernels_for_small_losses):
    """It costs the dump, and no loss."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPILE_LOSSES_DUMP", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="COMPILE_LOSSES_DUMP: .*file"):
        compiled(Head(F.mse_loss), *real())
    assert pipeline.records()["plan.kernels"].changes == 1


def test_guards_are_asked_once(monkeypatch, no_code):
    """Of a loss of a head there are two matches, with the head and without it."""
    asked = Counter()

    def counted(match):
        asked[id(match), match.op] += 1
        kept.append(match)

    kept = []  # so that no other match gets an identity
    monkeypatch.setattr(guards, "GUARDS", [counted, *guards.GUARDS])
    compiled(Head(F.cross_entropy), *classes(128))
    assert {op for _, op in asked} >= {"cross_entropy"}
    assert set(asked.values()) == {1}


def test_a_pass_that_changes_nothing_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_DUMP", str(tmp_path))
    with pipeline.observed(passes.PASSES[0], Indexed(torch.fx.Graph())):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_dumps_switch_caches_off(tmp_path):
    """What comes from a cache would go through no pass: a second process dumps the same."""
    program = """
import torch, torch.nn.functional as F
x = torch.randn(64, 512, requires_grad=True)
torch.compile(lambda x: F.mse_loss(x, x.detach() + 1), backend="compile_losses")(x)
"""
    environment = {
        **os.environ,
        **WITHOUT_VECTORS,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    counts = []
    for turn in ("first", "second"):
        environment["COMPILE_LOSSES_DUMP"] = str(tmp_path / turn)
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        counts.append([path.name.split("-", 2)[2] for path in sorted((tmp_path / turn).iterdir())])
    assert counts[0] == counts[1]
    assert any("plan." in name for name in counts[0])


@pytest.fixture
def dumped(tmp_path, monkeypatch, no_code):
    """The files of the three losses of docs/passes.md."""
    monkeypatch.setenv("COMPILE_LOSSES_DUMP", str(tmp_path / "dump"))
    program = tmp_path / "losses.py"
    (code,) = _PYTHON.findall(PAGE.read_text())
    program.write_text(code)
    torch._dynamo.reset()
    exec(compile(code, str(program), "exec"), {})
    return [file.read_text().splitlines() for file in sorted((tmp_path / "dump").iterdir())]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="names of torch 2.13")
def test_the_page_shows_what_a_dump_has(dumped):
    """Each listing is of one file, in their order; a line may be cut off."""
    text = PAGE.read_text()
    files = [[re.sub(r"  # .*", "", line) for line in file[2:]] for file in dumped]
    for listing in _LISTING.findall(text):
        lines = [line.removeprefix("   ") for line in listing.splitlines()]
        assert lines

        def has(file, line):
            cut = line.removesuffix(" ...")
            return any(each.startswith(cut) if cut != line else each == line for each in file)

        missing = [line for line in lines if not any(has(file, line) for file in files[:3])]
        while files and not all(has(files[0], line) for line in lines):
            files.pop(0)
        assert files, missing or lines
    stages = [file[0].partition(":")[0].removeprefix("# ") for file in dumped]
    assert all(f"`{stage}`" in text for stage in stages)


def with_dropout(x, target):
    return F.cross_entropy(F.dropout(x, 0.5), target)


def in_a_region(x, target):
    return checkpoint(lambda y: F.cross_entropy(y.float(), target), x, use_reentrant=False)


def charbonnier(x, target):
    return ((x - target) ** 2 + 1e-6).sqrt().mean()


def two(x, target):
    x.add_(1)
    return F.mse_loss(x, target) + F.mse_loss(x, target) + F.l1_loss(x, target, reduction="none")[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        (F.cross_entropy, classes),
        (with_dropout, classes),
        (in_a_region, classes),
        (charbonnier, real),
        (lambda x, target: two(x, target).sum(), real),
        (F.cross_entropy, lambda: classes(128)),
    ],
)
def test_what_a_graph_may_contain(loss, inputs, monkeypatch, no_code, chunks, small_losses):
    """See docs/passes.md."""
    seen = Counter()

    @contextmanager
    def observed(this, indexed):
        with original(this, indexed):
            yield
        check(this, indexed.graph)

    def check(this, graph):
        seen[this.stage] += 1
        graph.lint()
        calls = [node for node in graph.nodes if node.op not in ("output", "get_attr")]
        record = "example_value" if this.stage == passes.REWRITE else "val"
        assert all(record in node.meta for node in calls)
        assert all(source < node for node in calls for source in node.all_input_nodes)
        if this.stage == passes.PLAN:
            assert not writes(graph)
            scales = graph.find_nodes(op="call_function", target=fused.scale.default)
            assert all(len(scale.args[0].users) == 1 for scale in scales)
            if this.short == "merge_equal":
                forwards = [str((n.forward.target, n.forward.args)) for n in find_losses(graph)]
                assert len(set(forwards)) == len(forwards)
        if this.name == "in_place.markers":
            for target in (fused.scale.default, fused.keep_gradient.default):
                assert not graph.find_nodes(op="call_function", target=target)
        assert all(value_of(node) is not None or this.stage != passes.PLAN for node in calls)

    original = pipeline.observed
    monkeypatch.setattr(pipeline, "observed", observed)
    model, given = Head(loss), inputs()
    compiled(model, *given).backward()
    assert all(seen[stage] for stage in passes.STAGES)
