"""Whether the CUDA library can be built is decided before anything is compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compile_losses
from build_tools import cuda
from build_tools.build_ext import BuildKernels
from build_tools.libraries import ROOT, Library, asked_for, cpu_libraries, elementwise_losses
from build_tools.ninja_file import BuildFile

KNOWN = "sm_75\nsm_80\nsm_86\nsm_89\nsm_90\nsm_100\nsm_120"


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nvcc(tmp_path, monkeypatch) -> Path:
    """An nvcc of CUDA 13.0 that compiles nothing, in a toolkit without a runtime of its own; a C++
    compiler that links what exists; and a torch of CUDA 13 that brings the runtime."""
    real = program(
        tmp_path / "toolkit" / "bin" / "nvcc",
        f"""for flag in "$@"; do case $flag in
        --dryrun) echo '#$ _HERE_={tmp_path}/toolkit/bin'; exit;;
        --version) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit;;
        --list-gpu-code) echo '{KNOWN}'; exit;;
        *.o) touch $flag;; esac; done""",
    )
    program(tmp_path / "bin" / "nvcc", f'exec {real} "$@"')
    program(
        tmp_path / "bin" / "c++",
        """for flag in "$@"; do case $flag in *.so.*|*.a)
        test -e $flag || { echo "ld: cannot find $flag"; exit 1; };; esac; done""",
    )
    site = tmp_path / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "nvidia/cu13/lib").mkdir(parents=True)
    (site / "nvidia/cu13/lib/libcudart.so.13").touch()
    monkeypatch.setattr(torch, "__file__", str(site / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "COMPILE_LOSSES_CUDA", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return real


def test_wrapped_nvcc_and_the_runtime_of_torch(nvcc, tmp_path):
    """A script on the PATH starts nvcc, and libcudart.so lies among torch's packages alone."""
    toolkit = cuda.find()
    assert toolkit.nvcc == nvcc
    assert toolkit.version == "13.0"
    assert toolkit.runtime == tmp_path / "site-packages/nvidia/cu13/lib/libcudart.so.13"
    assert toolkit.link_flags == [str(toolkit.runtime)]


def test_the_toolkits_runtime(nvcc, tmp_path):
    shutil.rmtree(tmp_path / "site-packages/nvidia")
    with pytest.raises(cuda.UnavailableError, match=r"there is no libcudart\.so\.13"):
        cuda.find()
    static = tmp_path / "toolkit/targets/x86_64-linux/lib/libcudart_static.a"
    static.parent.mkdir(parents=True)
    static.touch()
    assert cuda.find().link_flags == [str(static), "-ldl", "-lrt", "-lpthread"]
    shared = tmp_path / "toolkit/lib64/libcudart.so.13"
    shared.parent.mkdir()
    shared.touch()
    assert cuda.find().runtime == shared


def test_no_nvcc(nvcc, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(cuda, "SYSTEM_NVCC", Path("/nonexistent/nvcc"))
    with pytest.raises(cuda.UnavailableError, match="nvcc was not found"):
        cuda.find()
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    assert cuda.find().nvcc == nvcc
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    with pytest.raises(cuda.UnavailableError, match=r"CUDA_HOME is /nonexistent"):
        cuda.find()


def test_nvcc_of_a_python_package(nvcc, tmp_path, monkeypatch):
    package = tmp_path / "site-packages/nvidia/cu13/bin"
    package.mkdir()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    shutil.copy(nvcc, package / "nvcc")
    script = (package / "nvcc").read_text().replace(str(nvcc.parent), str(package))
    (package / "nvcc").write_text(script)
    assert cuda.find().nvcc == package / "nvcc"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("*) echo 'error: unsupported GNU version! gcc 99'; exit 1;;", "unsupported GNU version"),
        ("--version) echo 'nvcc 13'; exit;;", "does not tell its version"),
        ("--version) echo 'release 12.8, V12.8.1'; exit;;", "nvcc is of CUDA 12.8, torch of CUDA"),
        ("*.o) exit 1;;", "nvcc failed"),
    ],
)
def test_an_nvcc_that_does_not_serve(nvcc, line, reason):
    nvcc.write_text(nvcc.read_text().replace("case $flag in", f"case $flag in {line}", 1))
    with pytest.raises(cuda.UnavailableError, match=reason):
        cuda.find()


def test_a_link_that_fails(nvcc, tmp_path):
    program(tmp_path / "bin" / "c++", "echo 'ld: cannot find -lcudart'; exit 1")
    with pytest.raises(cuda.UnavailableError, match=r"c\+\+ failed: ld: cannot find -lcudart"):
        cuda.find()


def test_torch_without_cuda(nvcc, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(cuda.UnavailableError, match="has no CUDA"):
        cuda.find()
    monkeypatch.setenv("COMPILE_LOSSES_CUDA", "1")
    assert cuda.find().nvcc == nvcc
    monkeypatch.setenv("COMPILE_LOSSES_CUDA", "0")
    with pytest.raises(cuda.UnavailableError, match="COMPILE_LOSSES_CUDA=0"):
        cuda.find()


def test_architectures(nvcc, monkeypatch):
    assert cuda.find().architectures == ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX")
    assert "-gencode=arch=compute_120,code=compute_120" in cuda.find().compile_flags
    nvcc.write_text(nvcc.read_text().replace(KNOWN, "sm_80\nsm_90"))
    assert cuda.find().architectures == ("8.0", "9.0")

    gpus = [(9, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i])
    assert cuda.find().architectures == ("9.0",)
    gpus[:] = [(8, 0), (12, 0)]
    assert cuda.find().architectures == ("8.0", "9.0+PTX")
    gpus[:] = [(7, 5)]
    with pytest.raises(cuda.UnavailableError, match=r"no GPU of compute capability 7\.5"):
        cuda.find()

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a 10.0+PTX")
    assert cuda.find().architectures == ("9.0a", "10.0+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(cuda.UnavailableError, match="ARCH_LIST to hold numbers"):
        cuda.find()


def command(tmp_path: Path, sources: dict[str, str]) -> BuildKernels:
    """The build of a CPU library and an optional one, of a source each."""
    from setuptools import Distribution

    libraries = []
    for name, text in sources.items():
        source = tmp_path / f"{name}.cpp"
        source.write_text(text)
        made = Library(f"_{name}", [str(source)], {".cpp": ["c++", "-fPIC"]}, [], name == "cuda")
        made.link_flags = []
        libraries.append(made)
    build = BuildKernels(Distribution({"name": "x", "ext_modules": libraries}))
    build.build_lib, build.build_temp = str(tmp_path / "a b:$lib"), str(tmp_path / "temp dir")
    build.ensure_finalized()
    return build


def test_cpu_kernels_are_installed_where_the_cuda_kernels_fail(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(BuildKernels, "_cuda", lambda self: {"version": "13.0"})
    build = command(tmp_path, {"cpu": "int f() { return 1; }", "cuda": "not C++"})
    stale = Path(build.build_lib, "compile_losses", "_cuda.so")
    stale.parent.mkdir(parents=True)
    stale.touch()
    (stale.parent / "_cpu_avx2.so").touch()
    build.run()
    assert sorted(p.name for p in stale.parent.iterdir()) == ["_cpu.so", "kernels.json"]
    told = json.loads((stale.parent / "kernels.json").read_text())
    assert told == {"cuda": {"missing": "they failed to compile where this was installed"}}
    printed = capfd.readouterr().out
    assert "compile_losses: CPU kernels only, because" in printed
    assert "[1 of 2, " in printed

    build = command(tmp_path, {"cpu": "not C++"})
    with pytest.raises(subprocess.CalledProcessError):
        build.run()


def test_instruction_sets(monkeypatch):
    """All, as in a wheel, or that of this machine."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    names = ["_cpu_default", "_cpu_avx2", "_cpu_avx512"]
    for wanted in ("", "all"):
        monkeypatch.setenv("COMPILE_LOSSES_CPU", wanted)
        assert [each.name.split(".")[1] for each in asked_for(cpu_libraries())] == names
    monkeypatch.setenv("COMPILE_LOSSES_CPU", "native")
    for capability, name in (("AVX2", "_cpu_avx2"), ("ZVECTOR", "_cpu_default")):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda told=capability: told)
        (library,) = asked_for(cpu_libraries())
        assert library.name == f"compile_losses.{name}"
    monkeypatch.setenv("COMPILE_LOSSES_CPU", "avx9")
    with pytest.raises(SystemExit, match="COMPILE_LOSSES_CPU=all, native or none, got avx9"):
        asked_for(cpu_libraries())


def test_setup_asks_torch_only_where_it_builds():
    """Pip starts setup.py three times; an import of torch takes seconds."""
    code = (
        "import sys; sys.argv[1:] = ['--version']; import setup; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_packages_of_extras():
    from build_tools import extras

    assert extras.packages(["demo"]) == ["matplotlib", "numpy", "rich"]
    for line in (ROOT / "Makefile").read_text().splitlines():
        if ": EXTRAS := " in line:
            assert extras.packages(line.rpartition(" ")[2].split(","))


def test_kernels_keep_their_optimizations():
    for library in cpu_libraries():
        assert "-O3" in library.compilers[".cpp"]
        folders = {unit.source.parent.name: unit.flags[:1] == ["-O1"] for unit in library.units}
        assert folders == {"binding": True, "cpu": False}


def test_instruction_sets_share_the_bindings(tmp_path):
    libraries = cpu_libraries()
    file = BuildFile(tmp_path, {each.name: tmp_path / f"{each.name}.so" for each in libraries})
    for library in libraries:
        file.add(library)
        for unit in library.units:
            flags = file.flags_of(library, unit)
            assert ("-mavx2" in flags) == ("avx" in library.name and not unit.binds)
    sources = [line.split()[-1] for line in file.lines if ".cpp.o: " in line]
    assert sources.count("csrc/binding/nll_loss.cpp") == 1
    assert sources.count("csrc/cpu/nll_loss.cpp") == len(libraries)
    linked = [line for line in file.lines if ".so: " in line]
    assert all("/_cpu_bindings/csrc/binding/nll_loss.cpp.o" in line for line in linked)


def test_folders_of_torch():
    """As torch names them. They are told without its import."""
    from torch.utils import cpp_extension

    from build_tools import libraries

    assert cpp_extension.include_paths() == libraries.HEADERS
    assert [f"-L{folder}" for folder in cpp_extension.library_paths()] == libraries.LINK_FLAGS[:1]


def test_the_command_runs_twice(tmp_path, monkeypatch):
    """As that of bdist_wheel does, which gives it new options in between."""
    from build_tools import build_ext

    build = command(tmp_path, {"cpu": "int f() { return 1; }", "cuda": "int g() { return 2; }"})
    cpu, made = build.distribution.ext_modules
    build.distribution.ext_modules = build.extensions = [cpu]
    toolkit = cuda.Toolkit(Path("nvcc"), "13.0", ("9.0",), Path("libcudart.so.13"))
    monkeypatch.setattr(cuda, "find", lambda: toolkit)
    monkeypatch.setattr(build_ext, "cuda_library", lambda toolkit, optional: made)
    for _ in range(2):
        build.compiler = None
        build.extensions = build.distribution.ext_modules
        build.run()
    folder = Path(build.build_lib, "compile_losses")
    assert sorted(p.name for p in folder.iterdir()) == ["_cpu.so", "_cuda.so", "kernels.json"]
    told = json.loads((folder / "kernels.json").read_text())
    assert told == {"cuda": {"version": "13.0", "architectures": ["9.0"]}}


def test_a_build_in_place(tmp_path, monkeypatch):
    """Of a library that setuptools was not told of when the command was finalized."""
    from build_tools import build_ext

    build = command(tmp_path, {"cpu": "int f() { return 1; }"})
    package = tmp_path / "compile_losses"
    package.mkdir()
    build.distribution.package_dir = {"compile_losses": str(package)}
    build.inplace = True
    source = tmp_path / "cuda.cpp"
    source.write_text("int g() { return 2; }")
    made = Library("_cuda", [str(source)], {".cpp": ["c++", "-fPIC"]}, [])
    made.link_flags = []
    toolkit = cuda.Toolkit(Path("nvcc"), "13.0", ("9.0",), Path("libcudart.so.13"))
    monkeypatch.setattr(cuda, "find", lambda: toolkit)
    monkeypatch.setattr(build_ext, "cuda_library", lambda toolkit, optional: made)
    build.run()
    assert sorted(p.name for p in package.iterdir()) == ["_cpu.so", "_cuda.so", "kernels.json"]


def test_an_editable_build_keeps_its_objects(tmp_path, monkeypatch):
    """Where `make wheel` looks for them: setuptools deletes the folder that it names itself."""
    monkeypatch.setattr(BuildKernels, "_cuda", lambda self: {"missing": "no nvcc"})
    monkeypatch.chdir(tmp_path)
    build = command(tmp_path, {"cpu": "int f() { return 1; }"})
    build.editable_mode = True
    build.run()
    assert (tmp_path / "build" / "kernels" / "build.ninja").exists()


def test_the_libraries_link_beside_an_archive_of_libstdcpp(tmp_path):
    """As a compiler does that has no shared libstdc++."""
    source = ROOT / "csrc/binding/older_linux.cpp"
    user = tmp_path / "user.cpp"
    user.write_text("#include <stdexcept>\nvoid f() { std::__throw_length_error(0); }")
    flags = ["-std=c++20", "-shared", "-fPIC", "-static-libstdc++"]
    subprocess.run(["c++", *flags, user, source, "-o", tmp_path / "library.so"], check=True)


def test_a_changed_header_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(BuildKernels, "_cuda", lambda self: {"missing": "for a test"})
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1234567")
    sources = {"cpu": '#include "number.h"\nextern "C" const int number = NUMBER;'}
    build = command(tmp_path, sources)
    build.run()
    output = Path(build.build_lib, "compile_losses", "_cpu.so")
    first = output.read_bytes()
    header.write_text("#define NUMBER 7654321")
    command(tmp_path, sources).run()
    assert output.read_bytes() != first


def test_build_file_escapes_paths(tmp_path):
    made = Library("_x", ["a.cpp"], {".cpp": ["c++", "-DPRICE=$5"]}, [])
    file = BuildFile(tmp_path / "b c", {made.name: tmp_path / "x$.so"})
    file.add(made)
    file.write()
    text = file.path.read_text()
    assert "b$ c/_x/a.cpp.o: _x.cpp a.cpp" in text
    assert "x$$.so: _x.so" in text
    assert "'-DPRICE=$$5'" in text


def test_a_source_that_is_compiled_for_each_elementwise_loss(tmp_path):
    made = Library("_x", ["csrc/cpu/elementwise.cpp", "csrc/cpu/scale.cpp"], {".cpp": ["c++"]}, [])
    units = {unit.object.name: unit.flags for unit in made.units}
    assert units["elementwise.cpp.huber_loss.o"] == ["-DFUSED_LOSS=huber_loss"]
    assert units["scale.cpp.o"] == []
    assert len(units) == len(elementwise_losses()) + 1
    file = BuildFile(tmp_path, {made.name: tmp_path / "x.so"})
    file.add(made)
    compiled = "_x/csrc/cpu/elementwise.cpp.kl_div.o: _x.cpp csrc/cpu/elementwise.cpp"
    assert f"{compiled}\n  flags = -DFUSED_LOSS=kl_div\n" in "\n".join(file.lines)


def test_what_a_wheels_libraries_must_not_be(tmp_path):
    elffile = pytest.importorskip("elftools.elf.elffile", reason="the extra wheel")
    from build_tools import check_wheel

    source = tmp_path / "library.cpp"
    source.write_text(
        'extern "C" int somewhere(); extern "C" int aoti_torch_delete_tensor_object(void*);'
        'extern "C" int exported() { return somewhere() + aoti_torch_delete_tensor_object(0); }'
    )
    made, other = tmp_path / "library.so", tmp_path / "libother.so"
    subprocess.run(["c++", "-shared", "-Wl,-soname,libother.so", "-o", other], check=True)
    flags = ["-shared", "-fPIC", "-Wl,-rpath,/nowhere", "-Wl,--no-as-needed", other]
    subprocess.run(["c++", source, "-g", *flags, "-o", made], check=True)
    with made.open("rb") as file:
        told = set(check_wheel.problems_of(elffile.ELFFile(file)))
    assert "exports exported" in told
    assert "takes somewhere, which is not in libtorch's stable ABI" in told
    assert "needs libother.so" in told
    assert "has a section .debug_info" in told
    assert {"has a DT_RUNPATH", "has a DT_RPATH"} & told
    assert not any("aoti_torch_delete_tensor_object" in what for what in told)


def test_without_a_compiler_nothing_is_built(tmp_path, monkeypatch, capsys):
    """The package is installed, and says what is missing; who asks for kernels gets an error."""
    from build_tools import libraries

    monkeypatch.delenv("COMPILE_LOSSES_CPU", raising=False)
    monkeypatch.setattr(libraries, "COMPILER", ["no-such-compiler"])
    build = command(tmp_path, {"cpu": "int f() { return 1; }"})
    folder = Path(build.build_lib, "compile_losses")
    folder.mkdir(parents=True)
    build.run()
    told = "no C++ compiler was found (no-such-compiler; CXX names another)"
    assert [path.name for path in folder.iterdir()] == ["kernels.json"]
    found = json.loads((folder / "kernels.json").read_text())
    assert found == {"cpu": {"missing": told}, "cuda": {"missing": told}}
    assert f"no kernels, because {told}: torch's own ops compute" in capsys.readouterr().out
    for wanted, expected in (("all", build.extensions), ("none", [])):
        monkeypatch.setenv("COMPILE_LOSSES_CPU", wanted)
        assert libraries.asked_for(build.extensions) == expected
    monkeypatch.setenv("COMPILE_LOSSES_CPU", "some")
    with pytest.raises(SystemExit, match="expected COMPILE_LOSSES_CPU=all, native or none"):
        libraries.asked_for([])


def test_nvcc_from_pypi_is_asked_for(monkeypatch):
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml says
    monkeypatch.syspath_prepend(Path(cuda.__file__).parent / "backend")
    import with_nvcc

    assert not any("nvidia" in name for name in with_nvcc.get_requires_for_build_wheel())
    asked = with_nvcc.get_requires_for_build_wheel({"cuda": "pypi"})
    assert "nvidia-cuda-nvcc==13.0.*" in asked
    with pytest.raises(SystemExit, match="got 'yes'"):
        with_nvcc.get_requires_for_build_editable({"cuda": "yes"})


def test_runs_are_recorded(tmp_path, monkeypatch):
    from build_tools import test_wheel

    monkeypatch.setattr(test_wheel, "RECORD", tmp_path / "versions.csv")
    told = subprocess.CompletedProcess([], 0, stdout="abc1234\n")
    monkeypatch.setattr(test_wheel.subprocess, "run", lambda *_, **__: told)
    outcome = tmp_path / "outcome.xml"
    suite = '<testsuites><testsuite tests="{}" skipped="2" failures="1" errors="1"/></testsuites>'
    for torch_version, ran in (("2.14.1", 10), ("2.12.1", 20), ("2.14.1", 30)):
        outcome.write_text(suite.format(ran))
        info = {"torch": torch_version, "python": "3.11.7"}
        test_wheel.record(info, ["-m", "not slow"], outcome)
    assert (tmp_path / "versions.csv").read_text() == (
        "torch,python,tests,passed,skipped,failed,commit\n"
        "2.12.1,3.11.7,-m 'not slow',16,2,2,abc1234\n"
        "2.14.1,3.11.7,-m 'not slow',26,2,2,abc1234\n"
    )


def test_what_the_tests_of_a_wheel_see(tmp_path):
    """What a source distribution has, without the package: the pages' tests read all of it."""
    from build_tools import test_wheel

    copy = test_wheel.checkout(tmp_path / "copy")
    assert not (copy / "compile_losses").exists()
    assert not (copy / "benchmarks" / "results").exists()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    environment = {**os.environ, "PYTHONPATH": str(Path(compile_losses.__file__).parents[1])}
    done = subprocess.run(
        [*command, "tests/test_pages.py"], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
