"""The benchmark of contrastive losses: a contender without memory, and plots."""

from __future__ import annotations

import pytest
import torch

from benchmarks import contrastive, plots, report
from benchmarks.clock import make_clock

CPU = torch.device("cpu")


@pytest.mark.parametrize("most", [0, 64])
@pytest.mark.parametrize("short", [["stock"], ["stock", "ours"]])
def test_a_contender_that_has_too_little_memory(short, most, monkeypatch):
    """It has a row that says so, whether results are checked or not."""

    def compiled(problem, name):
        def step(*tensors):
            if name in short:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256 GiB")
            return problem.eager(*tensors)

        return step

    monkeypatch.setattr(contrastive, "_compiled", compiled)
    monkeypatch.setattr(contrastive, "_plan", lambda problem, options: "a plan")
    monkeypatch.setattr(contrastive, "MOST_CHECKED", {"cpu": most})
    problem = contrastive.Problem(("clip", contrastive.Shape(32, 4), "float32"), CPU)
    names = list(contrastive.CONTENDERS)
    found = contrastive.measure(problem, names, make_clock(CPU), 0.0)
    assert list(found) == names
    for name, figures in found.items():
        if name in short:
            assert contrastive.OUT_OF_MEMORY in figures["reason"]
            assert "ms" not in figures
        else:
            assert float(figures["ms"]) > 0
            assert ("ratio" in figures) == ("stock" not in short)


def row(pairs, contender, ms):
    figures = {"ms": ms, "peak_mib": ms, "ratio": "", "range": "", "plan": ""}
    where = {"shape": f"{pairs}x8", "dtype": "float32", "loss": "clip", "contender": contender}
    versions = {"device": "CPU", "torch": "2.13", "contender_version": "1", "commit": "c"}
    return report.row_of(
        contrastive.Row, {**figures, **where, **versions, "reason": "" if ms else "out of memory"}
    )


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = [row(2**n, name, str(4.0**n)) for n in range(5, 8) for name in ("stock", "ours")]
    file = tmp_path / "contrastive.csv"
    report.write(file, contrastive.Row, [*rows, row(2**8, "stock", ""), row(2**8, "ours", "9")])
    plots.draw(file)
    assert (tmp_path / "contrastive.png").stat().st_size > 0
    assert "contrastive.png" in capsys.readouterr().out
