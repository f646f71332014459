"""Tables of trainers and of sharded heads, from lines that a run on GPUs would write."""

from __future__ import annotations

import pytest

from benchmarks import pages, plots, report, trainers
from benchmarks.linear_steps import Row
from benchmarks.sharded_heads import Head

COMMON = {"device": "A GPU", "torch": "2.11.0", "commit": "0123456789"}
#: Milliseconds of a step of 2 * 1000 rows, of which the weight's collectives take 4.
MS = {
    "ours_gathered": 10.0,
    "ours_of_rows": 9.0,
    "ours_of_logits_of_rows": 7.0,
    "exchange_weight": 4.0,
    "exchange_hidden": 1.0,
}


def lines():
    for contender, ms in MS.items():
        yield Row(
            shape="2000x64x8000", dtype="bfloat16", ranks="2", contender=contender, ms=f"{ms}",
            contender_version="0.1.0", **COMMON,
        )  # fmt: skip


@pytest.fixture
def head(tmp_path):
    report.write(tmp_path / "heads.csv", Row, lines())
    (found,) = Head.of(pages.csv.DictReader((tmp_path / "heads.csv").open()))
    return found


def test_what_was_measured_is_its_own_estimate(head):
    assert (head.rows, head.ranks) == (1000, 2)
    for contender in ("ours_gathered", "ours_of_rows", "ours_of_logits_of_rows"):
        assert head.estimate_ms(contender, 2) == pytest.approx(MS[contender])


def test_bytes(head):
    """Of the weight at most all of it, twice; of hidden states those of all other ranks, twice."""
    assert head.exchanged("weight", 2) == 8000 * 64 * 2
    assert head.exchanged("weight", 1024) == pytest.approx(2 * 8000 * 64 * 2, rel=1e-2)
    assert head.exchanged("hidden", 2) == 2 * 1000 * 64 * 2
    assert head.exchanged("hidden", 9) == 8 * head.exchanged("hidden", 2)
    # As much of either, where all ranks have as many tokens as there are classes.
    assert head.exchanged("hidden", 8) == head.exchanged("weight", 8)


def test_estimates(head):
    """6 ms are computed; twice the bytes over a bandwidth take twice as long."""
    slow = head.exchanged("weight", 64) / 0.05
    assert head.estimate_ms("ours_gathered", 64, slow) == pytest.approx(56)
    assert head.estimate_ms("ours_of_rows", 9) == pytest.approx(8 + 8)


def test_table_of_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    report.write(tmp_path / "heads.csv", Row, lines())
    table = pages.sharded_heads("heads.csv")
    assert "| 1000 | 2, measured | 10 | 9 | 7 | 2, 0 |" in table
    assert "| 1000 | 1024, on paper, network |" in table


@pytest.fixture
def results(tmp_path):
    """The file of three contenders, of which one failed."""
    same = {"trainer": "torchtitan", "way": "fsdp2", "ranks": "2", "state_mib": "100", **COMMON}
    rows = [
        trainers.Row(contender="stock", ms="9", tokens_per_s="5", peak_mib="50", **same),
        trainers.Row(
            contender="ours", ms="8", ratio="0.89", tokens_per_s="6", peak_mib="40",
            curve_difference="1e-4", **same,
        ),
        trainers.Row(contender="chunked", reason="failed", **same),
    ]  # fmt: skip
    report.write(tmp_path / "trainers.csv", trainers.Row, rows)
    return tmp_path / "trainers.csv"


def test_table_of_trainers(results, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", results.parent)
    table = pages.trainers("trainers.csv")
    whole = "140, 40 above weights and optimizer"
    assert f"| fsdp2 | `ours` | 0.89 | 6 | {whole} | 1e-4 |" in table
    assert "chunked" not in table


def test_plot_of_trainers(results, capsys):
    pytest.importorskip("matplotlib", reason="pip install .[demo]")
    plots.draw(results)
    assert capsys.readouterr().out == f"wrote {results.with_suffix('.png')}\n"
    assert results.with_suffix(".png").stat().st_size > 0
