"""The libraries of kernels: their sources and compiler commands."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from setuptools import Extension

if TYPE_CHECKING:
    from build_tools.cuda import Toolkit


def folder_of_torch() -> Path:
    """Of the package, without its import, which takes seconds. Pip starts setup.py three times."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("compile_losses is built beside torch: pip install torch")
    return Path(found.origin).parent


ROOT = Path(__file__).parent.parent
COMPILER = (os.environ.get("CXX") or "c++").split()
TORCH = folder_of_torch()
HEADERS = [str(TORCH / "include"), str(TORCH / "include/torch/csrc/api/include")]
INCLUDES = [flag for folder in HEADERS for flag in ("-isystem", folder)]
# torch's headers put their paths into messages; no binary may hold a path of this machine.
INCLUDES += [f"-ffile-prefix-map={folder}=torch" for folder in HEADERS]
CXX_FLAGS = [
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",  # libtorch's stable ABI as of torch 2.11
    *["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-g0", "-Wall", "-DNDEBUG"],
]
LINK_FLAGS = [f"-L{TORCH / 'lib'}"]
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
#: Sources in this folder hold no loops over elements. With few optimizations they compile in three
#: quarters of the time, and calls take as long.
BINDING = ROOT / "csrc" / "binding"


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
    def binds(self) -> bool:
        return (ROOT / self.source).parent == BINDING

    @property
    def flags(self) -> list[str]:
        flags = ["-O1"] if self.binds else []
        return [*flags, f"-DFUSED_LOSS={self.loss}"] if self.loss else flags


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
        instructions: Sequence[str] = (),  # flags for kernels
        bindings: str = "",  # the folder of objects that several libraries share
    ) -> None:
        super().__init__(f"compile_losses.{name}", sources, optional=optional, py_limited_api=True)
        self.compilers = compilers
        self.linker = [*COMPILER, "-shared"]
        self.link_flags = [*LINK_FLAGS, *link_flags]
        self._instructions = list(instructions)
        self._bindings = bindings

    def flags_of(self, unit: Unit) -> list[str]:
        return [*([] if unit.binds else self._instructions), *unit.flags]

    def object_of(self, unit: Unit) -> Path:
        """Relative to the folder of all objects."""
        own = self.name.rpartition(".")[2]
        return Path(self._bindings if unit.binds and self._bindings else own) / unit.object

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
    """Those that torch distinguishes, with their flags."""
    found: dict[str, list[str]] = {"default": []}
    if platform.machine().lower() in ("x86_64", "amd64"):
        found |= {"avx2": AVX2, "avx512": AVX2 + AVX512}
    return found


def cpu_libraries() -> list[Library]:
    """One library for each instruction set, from the same sources and the same bindings."""
    return [
        Library(
            f"_cpu_{name}",
            sources("csrc/binding/*.cpp", "csrc/cpu/*.cpp"),
            {".cpp": [*COMPILER, *CXX_FLAGS, *VECTOR_FLAGS, *INCLUDES]},
            ["-ltorch_cpu"],
            instructions=flags,
            bindings="_cpu_bindings",
        )
        for name, flags in instruction_sets().items()
    ]


class MissingCompilerError(Exception):
    """Why no library can be built."""


def asked_for(libraries: list[Library]) -> list[Library]:
    """Those of all instruction sets; of COMPILE_LOSSES_CPU=native, only of this machine's.

    COMPILE_LOSSES_CPU=none builds nothing. If it is not set, nothing is built without a compiler.

    Raises:
        MissingCompilerError: there is no compiler, and nobody asked for libraries.
    """
    wanted = os.environ.get("COMPILE_LOSSES_CPU") or ""
    if wanted not in ("", "all", "native", "none"):
        raise SystemExit(
            f"compile_losses: expected COMPILE_LOSSES_CPU=all, native or none, got {wanted}"
        )
    if wanted == "none":
        return []
    if not wanted and sys.platform == "win32":
        raise MissingCompilerError("they are not built on Windows")
    if not wanted and shutil.which(COMPILER[0]) is None:
        raise MissingCompilerError(f"no C++ compiler was found ({COMPILER[0]}; CXX names another)")
    if wanted != "native":
        return libraries
    import torch

    native = torch.backends.cpu.get_cpu_capability().lower()
    name = f"_cpu_{native if native in instruction_sets() else 'default'}"
    others = {f"compile_losses._cpu_{each}" for each in instruction_sets()}
    others.discard(f"compile_losses.{name}")
    return [library for library in libraries if library.name not in others]


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
