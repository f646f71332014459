"""The libraries of kernels: their sources and compiler commands."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from setuptools import Extension
from torch.utils import cpp_extension

from build_tools.cuda import Toolkit

ROOT = Path(__file__).parent.parent
COMPILER = (os.environ.get("CXX") or "c++").split()
INCLUDES = [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
# torch's headers put their paths into messages; no binary may hold a path of this machine.
INCLUDES += [f"-ffile-prefix-map={folder}=torch" for folder in cpp_extension.include_paths()]
CXX_FLAGS = [
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",  # libtorch's stable ABI as of torch 2.11
    *["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-g0", "-Wall", "-DNDEBUG"],
]
LINK_FLAGS = [f"-L{folder}" for folder in cpp_extension.library_paths()]
if sys.platform == "linux":
    LINK_FLAGS += ["-Wl,--version-script=csrc/binding/exports.map"]
elif sys.platform == "darwin":
    LINK_FLAGS += ["-undefined", "dynamic_lookup"]
# `make asan` sets SANITIZE=address.
if sanitizer := os.environ.get("SANITIZE"):
    CXX_FLAGS += ["-O2", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}"]
    LINK_FLAGS += [f"-fsanitize={sanitizer}"]
elif sys.platform == "linux":
    LINK_FLAGS += ["-Wl,--strip-all"]
# Arithmetic is reordered only in loops that allow it. Nans and infinities keep their meaning.
VECTOR_FLAGS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC,-fvisibility=hidden"]


#: Each header in this folder is an elementwise loss and has its name.
ELEMENTWISE = ROOT / "csrc" / "losses" / "elementwise"
#: Sources of this name are compiled once for each elementwise loss, see csrc/this_loss.h.
PER_LOSS = "elementwise"


@dataclass(frozen=True)
class Unit:
    """One compilation: a source and, if it is compiled for one, an elementwise loss."""

    source: Path  # relative to ROOT
    loss: str = ""

    @property
    def object(self) -> Path:
        """Relative to the folder of a library's objects."""
        return Path(f"{self.source}.{self.loss}.o" if self.loss else f"{self.source}.o")

    @property
    def flags(self) -> list[str]:
        return [f"-DFUSED_LOSS={self.loss}"] if self.loss else []


class Library(Extension):
    """A shared library of kernels. If an optional one fails to build, the package lacks it."""

    # setuptools' build_ext reads this in a build in place. It sets it only for the extensions that
    # it is given, and the CUDA library is not one of them.
    _needs_stub = False

    def __init__(
        self,
        name: str,
        sources: list[str],
        compilers: dict[str, list[str]],  # suffix of a source -> the command without its files
        link_flags: list[str],
        optional: bool = False,
    ) -> None:
        super().__init__(f"compile_losses.{name}", sources, optional=optional, py_limited_api=True)
        self.compilers = compilers
        self.linker = [*COMPILER, "-shared"]
        self.link_flags = [*LINK_FLAGS, *link_flags]

    @property
    def units(self) -> list[Unit]:
        found = []
        for source in map(Path, self.sources):
            losses = elementwise_losses() if source.stem == PER_LOSS else [""]
            found += [Unit(source, loss) for loss in losses]
        return found


def elementwise_losses() -> list[str]:
    return sorted(header.stem for header in ELEMENTWISE.glob("*.h"))


def sources(*patterns: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)
    )


def instruction_sets() -> dict[str, list[str]]:
    """Those that torch distinguishes, with their flags; of COMPILE_LOSSES_CPU=native, only this
    machine's."""
    found: dict[str, list[str]] = {"default": []}
    if platform.machine().lower() in ("x86_64", "amd64"):
        found |= {"avx2": AVX2, "avx512": AVX2 + AVX512}
    wanted = os.environ.get("COMPILE_LOSSES_CPU") or "all"
    if wanted not in ("all", "native"):
        raise SystemExit(f"compile_losses: expected COMPILE_LOSSES_CPU=all or native, got {wanted}")
    if wanted == "native":
        native = torch.backends.cpu.get_cpu_capability().lower()
        found = {name: found[name] for name in [native if native in found else "default"]}
    return found


def cpu_libraries() -> list[Library]:
    """One library for each instruction set, from the same sources."""
    return [
        Library(
            f"_cpu_{name}",
            sources("csrc/binding/*.cpp", "csrc/cpu/*.cpp"),
            {".cpp": [*COMPILER, *CXX_FLAGS, *VECTOR_FLAGS, *flags, *INCLUDES]},
            ["-ltorch_cpu"],
        )
        for name, flags in instruction_sets().items()
    ]


def cuda_library(toolkit: Toolkit, optional: bool) -> Library:
    host = [*CXX_FLAGS, "-DFUSED_CUDA", "-DUSE_CUDA", *INCLUDES]
    for folder in toolkit.include:
        host += ["-isystem", folder]
    return Library(
        "_cuda",
        sources("csrc/binding/*.cpp", "csrc/cuda/*.cu"),
        {
            ".cpp": [*COMPILER, *host],
            ".cu": [str(toolkit.nvcc), *NVCC_FLAGS, *toolkit.compile_flags],
        },
        # libtorch.so loads torch's CUDA library if there is one. Beside a torch without CUDA, no
        # other library could be named.
        ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", *toolkit.link_flags],
        optional,
    )
