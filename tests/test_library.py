"""Which kernels are loaded, and what is said where there are none."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses import library
from compile_losses.__main__ import main

pytestmark = pytest.mark.bodies


@pytest.fixture(autouse=True)
def no_memory():
    """Of what was asked and warned of in other tests."""
    caches = library.runs_on, library.cuda_build, library.warn_of_no_kernels
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in which there is a CUDA library, to be loaded by a torch of CUDA 13."""
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(library, "_capabilities", lambda: [])
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    (tmp_path / "_cuda.so").touch()
    return tmp_path


def write(package, **built):
    (package / "kernels.json").write_text(json.dumps({"cuda": built}))
    library.cuda_build.cache_clear()
    library.runs_on.cache_clear()


def test_cuda_kernels_that_were_not_built(package):
    (package / "_cuda.so").unlink()
    assert library._load_cuda() == f"not built: _cuda.so is not in {package}"
    write(package, missing="nvcc was not found (set CUDA_HOME)")
    assert library._load_cuda() == "not built: nvcc was not found (set CUDA_HOME)"


def test_cpu_kernels_of_another_instruction_set(package, monkeypatch):
    """As in an environment of the demo, which has those of one."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert library._load_cpu() == f"not built: there are none in {package}"
    (package / "_cpu_avx512.so").touch()
    expected = "not built for this processor or ATEN_CPU_CAPABILITY, only _cpu_avx512.so"
    assert library._load_cpu() == expected


def test_cuda_kernels_of_another_cuda(package, monkeypatch):
    write(package, version="13.0", architectures=["9.0"])
    assert library._load_cuda() == package / "_cuda.so"
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert library._load_cuda() == package / "_cuda.so"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert library._load_cuda() == "built for CUDA 13.0, this torch is of CUDA 12.8"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert library._load_cuda() == "this torch is built without CUDA"


def test_cuda_kernels_of_other_gpus(package, monkeypatch):
    write(package, version="13.0", architectures=["8.0", "9.0"])
    monkeypatch.setattr(library, "_capabilities", lambda: [(7, 5)])
    expected = "built for GPUs of compute capability 8.0, 9.0, not 7.5"
    assert library._load_cuda() == expected
    monkeypatch.setattr(library, "_capabilities", lambda: [(7, 5), (8, 6)])
    assert library._load_cuda() == package / "_cuda.so"

    # Of these two, tensors tell which one they are on.
    monkeypatch.setitem(library.kernels, "cuda", package / "_cuda.so")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: [(7, 5), (8, 6)][d.index])
    assert library.no_kernels(torch.device("cuda:0")) == expected
    assert library.no_kernels(torch.device("cuda:1")) is None


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.9", (7, 5), False),
        ("9.0", (10, 0), False),
        ("9.0+PTX", (12, 0), True),
        ("9.0+PTX", (8, 9), False),
        ("9.0a", (9, 0), True),
        ("10.0a", (10, 3), False),
    ],
)
def test_which_gpus_run_what(package, architecture, capability, runs):
    write(package, architectures=[architecture])
    assert library.runs_on(capability) == runs


def test_a_library_that_does_not_load(package, monkeypatch):
    def fail(path):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(torch.ops, "load_library", fail)
    with pytest.warns(UserWarning, match="failed to load _cuda.so: libcudart.*Build it anew"):
        told = library._load_cuda()
    assert told == "failed to load _cuda.so: libcudart.so.13: cannot open shared object file"


def test_losses_on_a_device_for_which_kernels_were_not_built(monkeypatch):
    """One warning, that says what to install; the report has the reason."""
    reason = "not built: nvcc was not found"
    monkeypatch.setitem(library.kernels, "cpu", reason)

    def two_losses(a, b, c):
        return F.mse_loss(a, b) + F.l1_loss(c, b)

    inputs = tuple(torch.rand(4) for _ in range(3))
    with pytest.warns(UserWarning, match="no kernels for cpu.*nvcc was not found.*pip install"):
        report = compile_losses.explain(two_losses, *inputs)
    assert [site.plan for site in report.sites] == [("decomposed",), ("decomposed",)]
    assert report.without_kernels == [f"cpu: torch's ops: {reason}"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile_losses")
        options = {"inner_backend": "aot_eager"}  # which needs no compiler
        actual = torch.compile(two_losses, backend="compile_losses", options=options)(*inputs)
    torch.testing.assert_close(actual, two_losses(*inputs))


@pytest.mark.kernels
def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["torch"] == torch.__version__
    assert told["kernels"]["cpu"]["loaded"] in ("_cpu_default.so", "_cpu_avx2.so", "_cpu_avx512.so")
    assert "mse_loss" in told["ops"]
    assert main(["info"]) == 0
    plain = capsys.readouterr().out
    assert f"cpu kernels    loaded from {told['kernels']['cpu']['loaded']}" in plain
