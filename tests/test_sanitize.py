"""What counts as clean under compute-sanitizer, and that the rest is run again."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.sanitize.__main__ import main, run_all, sanitize, sanitizer_version, visible_devices
from tests.sanitize.batches import Batch, GpuTest, Processes, judge, make_batches, run

CLEAN = "========= ERROR SUMMARY: 0 errors\n"
UNWATCHED = "========= Error: Target application terminated before first instrumented API call\n"
HAZARD = "========= Error: Race reported between Read access at fused::k and\n"
HAZARD += "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"


@pytest.mark.parametrize(
    ("output", "log", "status", "expected"),
    [
        ("4 passed, 1 skipped, 9 warnings in 3.1s", CLEAN, 0, (4, "")),
        ("4 passed in 83.1s (0:01:23)", CLEAN, 0, (4, "")),
        ("4 skipped in 3.1s", "", 255, (0, "")),
        ("4 skipped in 3.1s", CLEAN, 5, (0, "")),
        ("4 skipped in 3.1s", CLEAN.replace("0", "2"), 5, (0, "2 errors")),
        ("4 passed in 3.1s", UNWATCHED, 255, (0, "")),
        ("4 passed in 3.1s", "", 0, (4, "the tool gave no summary")),
        ("4 passed in 3.1s", CLEAN, 11, (4, "exit status 11")),
        ("1 failed, 3 passed in 3.1s", CLEAN, 1, (3, "1 failed, 3 passed")),
        ("3 passed, 1 error in 3.1s", CLEAN, 1, (3, "3 passed, 1 error")),
        ("1 failed, 3 passed in 3.1s", HAZARD, 1, (3, "1 hazard displ")),
        ("Fatal Python error", HAZARD, -11, (0, "1 hazard displayed")),
        ("Fatal Python error", CLEAN, -11, (0, "pytest gave no summary")),
        ("no tests ran in 0.1s", CLEAN, 4, (0, "pytest gave no summary")),
        ("4 passed in 3.1s", HAZARD, 0, (4, "1 hazard displayed (1 e")),
        ("4 passed in 3.1s", CLEAN.replace("0", "10"), 0, (4, "10 errors")),
    ],
)
def test_judge(output, log, status, expected):
    passed, trouble = judge(f"....\n{output}\n", log, status)
    assert passed == expected[0]
    assert trouble.startswith(expected[1])
    assert bool(trouble) == bool(expected[1])


def test_batches_are_whole_and_the_longest_cases_come_first():
    short, long, new = (GpuTest(name, tuple(f"{name}[{i}]" for i in range(9))) for name in "sln")
    made = make_batches(
        [(tool, test) for test in (short, long, new) for tool in ("memcheck", "racecheck")],
        {("memcheck", "s"): 2.0, ("racecheck", "s"): 2.0, ("memcheck", "l"): 1000.0},
    )
    assert made[0] == Batch("memcheck", long, ("l[0]",))
    for tool in ("memcheck", "racecheck"):
        for test in (short, long, new):
            parts = [b.cases for b in made if b.key == (tool, test.name)]
            assert sum(parts, ()) == test.cases
    assert [len(b.cases) for b in made if b.test is short] == [9, 9]
    assert {len(b.cases) for b in made if b.test is new} == {7, 2}


def test_batches_by_the_time_under_another_tool():
    test = GpuTest("t", tuple(f"t[{i}]" for i in range(4)))
    known = {("memcheck", "t"): 20.0, ("synccheck", "t"): 30.0}
    for tool, size in (("memcheck", 3), ("racecheck", 2), ("synccheck", 2)):
        assert len(make_batches([(tool, test)], known)[0].cases) == size


# A compute-sanitizer that finds what the test's folder says.
TOOL = """#!/bin/bash
while [ "$1" != {python} ]; do
    [ "$1" = --log-file ] && log=$2
    shift
done
echo call $CUDA_VISIBLE_DEVICES >> {folder}/calls
"$@"; status=$?
cat {folder}/finding > $log
exit $status
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "compute-sanitizer"
    path.write_text(TOOL.format(python=sys.executable, folder=tmp_path))
    path.chmod(0o755)
    (tmp_path / "calls").touch()


@pytest.mark.slow
def test_what_is_clean_is_kept(tmp_path, tool):
    finding, record = tmp_path / "finding", tmp_path / "clean.csv"
    path = tmp_path / "test_nothing.py"
    path.write_text("import pytest\n@pytest.mark.parametrize('i', [0, 1])\ndef test_a(i): pass\n")
    test = GpuTest(f"{path}::test_a", (f"{path}::test_a[0]", f"{path}::test_a[1]"), large=True)
    common = {"device": "d", "torch": "t", "sanitizer": "s", "commit": "c", "csrc": "one"}

    def run(csrc="one", **options):
        """Whether all was clean, how many processes ran, and the record."""
        before = (tmp_path / "calls").read_text().count("call")
        clean = sanitize(
            [test], ["memcheck"], record, {**common, "csrc": csrc}, processes=1, **options
        )
        ran = (tmp_path / "calls").read_text().count("call") - before
        rows = list(csv.DictReader(record.open())) if record.exists() else []
        return clean, ran, [(row["tool"], row["cases"], row["passed"], row["csrc"]) for row in rows]

    finding.write_text(CLEAN.replace("0", "2"))
    assert run() == (False, 1, [])
    finding.write_text(UNWATCHED)
    assert run() == (True, 1, [])
    finding.write_text(CLEAN)
    assert run(seconds=-1.0) == (True, 0, [])
    assert run() == (True, 1, [("memcheck", "2", "2", "one")])
    assert run() == (True, 0, [("memcheck", "2", "2", "one")])
    assert run("two") == (True, 1, [("memcheck", "2", "2", "two")])
    assert run("two", again=True, devices=["5", "7"]) == (True, 1, [("memcheck", "2", "2", "two")])
    finding.write_text(CLEAN.replace("0", "2"))
    assert run("two", again=True) == (False, 1, [])
    assert (tmp_path / "calls").read_text().split() == [
        *["call", "0"] * 4,
        *["call", "5,7", "call", "0"],
    ]


def test_batches_have_a_limit(tmp_path, tool):
    (tmp_path / "finding").write_text(CLEAN)
    path = tmp_path / "test_long.py"
    path.write_text("import time\ndef test_a(): time.sleep(600)\n")
    batch = Batch("memcheck", GpuTest(f"{path}::test_a", ()), (f"{path}::test_a",))
    outcome = run(batch, "0", tmp_path / "log", 2.0, Processes())
    assert outcome.trouble.startswith("killed after 2 s")
    assert outcome.seconds < 60


def test_batches_end_with_the_run(tmp_path, tool):
    (tmp_path / "finding").write_text(CLEAN)
    path = tmp_path / "test_long.py"
    path.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n")
    names = [f"{path}::test_{x}" for x in "abb"]
    todo = [Batch("memcheck", GpuTest(name, ()), (name,)) for name in names]
    start = time.monotonic()
    outcomes = run_all(todo, 2, ["0"], deadline=start + 600, limit=600.0)
    batch, outcome = next(outcomes)
    assert batch is todo[0]
    assert outcome is not None
    assert not outcome.trouble
    outcomes.close()
    assert time.monotonic() - start < 60


# A kernel whose name is one of this project's, and what makes each tool object to it.
KERNEL = """
namespace fused {
template <typename T>
__global__ void kernel(T* out) {
  __shared__ T shared[64];
  shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = shared[63 - threadIdx.x];
}
}
extern "C" void launch(float* out) { fused::kernel<<<1, 64>>>(out); }
"""
FAULTS = {
    "memcheck": ("out[threadIdx.x]", "out[threadIdx.x + 1]"),
    "racecheck": ("__syncthreads();", ""),
    "synccheck": ("__syncthreads();", "if (threadIdx.x < 16) __syncthreads();"),
}
LAUNCH = """
import ctypes, torch

def test_a():
    out = torch.zeros(64, device="cuda")
    ctypes.CDLL({library!r}).launch(ctypes.c_void_p(out.data_ptr()))
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("tool", FAULTS)
def test_faults_are_found(tool, fault, tmp_path):
    source, library, path = (tmp_path / name for name in ("k.cu", "k.so", "test_kernel.py"))
    source.write_text(KERNEL.replace(*FAULTS[tool]) if fault else KERNEL)
    command = ["nvcc", "-arch=native", "-shared", "-Xcompiler=-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    path.write_text(LAUNCH.format(library=str(library)))
    batch = Batch(tool, GpuTest(f"{path}::test_a", ()), (f"{path}::test_a",))
    outcome = run(batch, "0", tmp_path / "log", 120.0, Processes())
    if fault:
        assert re.match(r"\d+ (error|hazard)", outcome.trouble), outcome.trouble
    else:
        assert outcome.trouble == ""
        assert outcome.passed == 1


@pytest.mark.slow
def test_collect():
    script = "from tests.sanitize.batches import collect\n"
    script += "print(*((t.name, t.large) for t in collect(['tests/test_ops.py'])), sep='\\n')"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert "('tests/test_ops.py::test_more_than_2_to_the_31_elements', True)\n" in output
    assert "('tests/test_ops.py::test_with_grad', False)\n" in output


@pytest.mark.parametrize(("named", "expected"), [("", ["0", "1"]), ("3,GPU-a,1", ["3", "GPU-a"])])
def test_visible_devices(named, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert visible_devices() == expected


@pytest.mark.parametrize(
    ("version", "named"),
    [
        (None, "on the PATH"),
        ("2025.3.1.0", r"2025\.3\.1\.0, racecheck needs 2026\.4 or newer"),
        ("x", "names none"),
        ("2026.4.0.0", "no CUDA device"),
        ("2027.1", "no CUDA device"),
    ],
)
def test_what_is_missing_is_named(version, named, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if version:
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(f"#!/bin/sh\necho 'NVIDIA (R)'\necho 'Version {version} (build 1)'\n")
        tool.chmod(0o755)
    with pytest.raises(SystemExit, match=named):
        main(["memcheck", "racecheck"])
    if version == "2025.3.1.0":
        assert sanitizer_version(["memcheck", "synccheck"]) == version
