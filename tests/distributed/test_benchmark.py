"""The benchmark of a vocabulary-parallel step: its file and plot, and contenders that break."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from benchmarks import linear_steps, plots, report
from tests.distributed.chosen import chosen
from tests.distributed.contenders import BROKEN, measure
from tests.distributed.processes import start, wait

OURS = ("ours", "ours_linear", "ours_compiled")
LOG_PROBS = (
    *("ours_log_probs", "ours_log_probs_compiled", "ours_log_probs_of_logits"),
    *("dtensor_log_probs", "megatron_log_probs"),
)
DIVERGENCES = (
    *("ours_divergence", "ours_divergence_compiled", "ours_divergence_of_logits"),
    *("dtensor_divergence", "megatron_divergence"),
)
OF_ROWS = ("stock_gathered", "ours_gathered", "ours_of_rows", "ours_of_logits_of_rows")
EXCHANGES = ("exchange_weight", "exchange_hidden")
RANKS = 2
SHAPE = "96x16x1001"


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    """What two ranks write, all contenders that are asked for in one run."""
    path = tmp_path_factory.mktemp("benchmark") / "steps.csv"
    options = ["--device=cpu", "--dtype=float32", f"--shape={SHAPE}", "--budget=0.01"]
    more = ["--timeout=25", "--commit=abc", "--no-plots", f"--output={path}"]
    if names := [*chosen(test_who_breaks_has_a_reason, request), *chosen(test_figures, request)]:
        more += ["--contender", *names]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = start(measure, "cpu", RANKS, RANKS, store.port, [*options, *more])
    wait(ranks, path.parent)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    return {row.contender: row for row in report.read(path, linear_steps.Row)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name",
    [*OURS, "loss_parallel", "megatron", *LOG_PROBS, *DIVERGENCES, *OF_ROWS, *EXCHANGES],
)
def test_figures(name, rows):
    row = rows[name]
    assert row.reason == ""
    assert float(row.ms) > 0
    assert float(row.peak_mib) > 0 or name in EXCHANGES
    assert (row.shape, row.dtype, row.ranks, row.commit) == (SHAPE, "float32", "2", "abc")


REASONS = {
    "wrong_on_one": "rank 1: wrong: errors 1.0e+00, ",
    "nan": "wrong: errors nan, nan, nan",
    "raises": "failed: ValueError: it never works",
    "raises_on_one": "rank 1: failed: ValueError: it fails here",
    "raises_with_many_rows": "failed: ValueError: it never works",
}


@pytest.mark.parametrize("name", [function.__name__ for function in BROKEN])
def test_who_breaks_has_a_reason(name, rows):
    row = rows[name]
    assert (row.ms, row.peak_mib) == ("", "")
    assert REASONS[name] in row.reason


def test_plot(rows, tmp_path, capsys):
    """Drawn of the file alone."""
    pytest.importorskip("matplotlib", reason="pip install .[demo]")
    results = linear_steps.Results(tmp_path / "steps.csv", append=True)
    results.add(rows.values())
    plots.draw(results.path)
    assert capsys.readouterr().out == f"wrote {tmp_path / 'steps.png'}\n"
    assert (tmp_path / "steps.png").stat().st_size > 0


def test_a_file_of_something_else(tmp_path):
    (tmp_path / "other.csv").write_text("loss,head\nmse,linear\n")
    with pytest.raises(ValueError, match="columns loss, head"):
        plots.draw(tmp_path / "other.csv")
