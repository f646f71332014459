"""The benchmark of trainers: what is kept of ranks that fail, end or never end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import report, trainers
from tests import ROOT


def benchmark(path, *options):
    """The rows that a run of the benchmark writes, by their contenders, and what it prints."""
    command = [sys.executable, "-m", "tests.distributed.trainer_runs", "trainers"]
    command += ["--device=cpu", "--ranks=2", "--budget=0.01", "--commit=abc", f"--output={path}"]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        timeout=400,
        capture_output=True,
        text=True,
        check=False,
    )
    assert path.exists(), done.stderr[-3000:]
    return {row.contender: row for row in report.read(path, trainers.Row)}, done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainers") / "trainers.csv"
    ways = ["broken-whole", "broken-alone", "broken-ended"]
    return benchmark(path, "--way", *ways, "--curve=4", f"--log={path.parent / 'log'}")


@pytest.mark.parametrize("name", ["stock", "ours"])
def test_figures(name, whole):
    row = whole[0][name]
    assert row.reason == ""
    assert float(row.ms) > 0
    assert float(row.tokens_per_s) > 0
    assert (row.way, row.size, row.ranks, row.commit) == ("whole", "12x5", "2", "abc")
    assert row.curve_steps == "4"
    assert float(row.last_loss) < float(row.first_loss)


def test_losses_are_compared_with_stock(whole):
    row = whole[0]["ours"]
    assert float(row.curve_difference) < 1e-5
    assert float(row.ratio) > 0
    assert row.ops == "cross_entropy x1"


def test_who_fails_has_a_reason(whole):
    """Also if it fails or ends on one rank alone, for which the other one waits."""
    rows, said = whole
    assert rows["raises"].reason == "failed: ValueError: it fails here"
    assert rows["raises"].ms == ""
    assert rows["raises_on_one"].reason == "rank 1: failed: ValueError: it fails here"
    assert rows["ends"].reason.startswith("failed: rank 1 ended with 3: ")
    assert "absent" not in rows
    assert "not run: it is not installed" in said


#: What ranks do, and why there is no result.
ENDS = {
    "print(1)": "",
    "import sys; print('SomeError: no'); sys.exit(int(sys.argv[1][-1]) * 3)": (
        "rank 1 ended with 3: SomeError: no"
    ),
    "import time; time.sleep(99)": "stopped after 1 s",
    "import subprocess; subprocess.run(['sleep', '99'])": "stopped after 1 s",
}


def members(group):
    """The processes of a group that have not ended, whether or not anybody waits for them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, own = path.read_text().rpartition(")")[2].split()[:3]
            found += [path] if int(own) == group and state != "Z" else []
    return found


@pytest.mark.parametrize("script", ENDS)
def test_no_rank_is_left(script, tmp_path):
    processes = trainers.Processes.start([sys.executable, "-c", script], 2, tmp_path)
    assert processes.wait(1.0 if "99" in script else 60.0, []) == ENDS[script]
    until = time.monotonic() + 20
    while any(members(rank.pid) for rank in processes.ranks):  # nor what it started
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_rank_that_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, "PATIENCE_S", 0.1)
    objection = tmp_path / "figures.1"
    objection.write_text("")
    command = [sys.executable, "-c", "import time; time.sleep(99)"]
    processes = trainers.Processes.start(command, 2, tmp_path)
    assert processes.wait(60.0, [tmp_path / "figures.0", objection]) == "a rank failed alone"


SIZE = '--size={"layers":2,"width":64,"heads":4,"groups":2,"classes":512,"length":64}'


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="pip install torchtitan==0.2.2")
@pytest.mark.parametrize("way", ["fsdp2", "pipeline_1f1b"])
def test_torchtitan(way, tmp_path):
    rows, _ = benchmark(tmp_path / "trainers.csv", "--way", f"torchtitan-{way}", "--curve=4", SIZE)
    assert rows["ours"].ops == "cross_entropy x1"
    assert rows["ours_head"].ops == "linear_cross_entropy x1"
    for name, row in rows.items():
        assert row.reason == ""
        assert name == "stock" or float(row.curve_difference) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="pip install .[models]")
def test_ddp(tmp_path):
    way = "transformers-ddp_no_sync"
    rows, _ = benchmark(tmp_path / "trainers.csv", "--way", way, "--curve=4", SIZE)
    assert rows["ours"].ops == "linear_cross_entropy x1"
    assert rows["ours"].reason == ""
    assert float(rows["ours"].curve_difference) < 1e-4
