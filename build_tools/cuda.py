"""Decides, before anything is compiled, whether and how the CUDA library can be built here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# The architectures if there is no GPU here and TORCH_CUDA_ARCH_LIST is not set.
DEFAULT_ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")

PROBE = """
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <algorithm>
__global__ void probe(__nv_bfloat16* x) { *x = __float2bfloat16(1.0f); }
extern "C" int run(__nv_bfloat16* x) {
  probe<<<1, 1>>>(x);
  return cudaGetLastError();
}
"""


class UnavailableError(Exception):
    """The CUDA library cannot be built. The message is the reason."""


@dataclass(frozen=True)
class Toolkit:
    """An nvcc, the architectures to compile for, and the CUDA runtime to link with."""

    nvcc: Path
    version: str  # "13.0"
    architectures: tuple[str, ...]  # "9.0", "12.0+PTX"
    runtime: Path

    @property
    def home(self) -> Path:
        return self.nvcc.parent.parent

    @property
    def include(self) -> list[str]:
        """CUDA's include folders, for the host compiler; nvcc knows them."""
        folders = [self.home / "include", *self.home.glob("targets/*/include")]
        return [str(folder) for folder in folders if (folder / "cuda_runtime.h").exists()]

    @property
    def compile_flags(self) -> list[str]:
        flags = []
        for architecture in self.architectures:
            number = architecture.removesuffix("+PTX").replace(".", "")
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if architecture.endswith("+PTX"):
                flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        if compiler := os.environ.get("CXX"):
            flags.append(f"-ccbin={compiler}")
        return flags

    @property
    def link_flags(self) -> list[str]:
        if self.runtime.suffix == ".a":
            return [str(self.runtime), "-ldl", "-lrt", "-lpthread"]
        return [str(self.runtime)]


def find() -> Toolkit:
    """The toolkit to build with. A small program has been compiled and linked with it.

    With COMPILE_LOSSES_CUDA=0 there is none. With COMPILE_LOSSES_CUDA=1 there may be one even
    beside a torch without CUDA, because the libraries need none of torch's CUDA headers.

    Raises:
        UnavailableError: if the CUDA library cannot or must not be built.
    """
    wanted = os.environ.get("COMPILE_LOSSES_CUDA", "")
    if wanted == "0":
        raise UnavailableError("COMPILE_LOSSES_CUDA=0")
    if torch.version.cuda is None and wanted != "1":
        raise UnavailableError("the torch that they were built beside has no CUDA")
    nvcc = _nvcc()
    version = _version(nvcc)
    if torch.version.cuda and _major(torch.version.cuda) != _major(version):
        raise UnavailableError(f"nvcc is of CUDA {version}, torch of CUDA {torch.version.cuda}")
    toolkit = Toolkit(nvcc, version, _architectures(nvcc), _runtime(nvcc, version))
    _try(toolkit)
    return toolkit


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _nvidia_packages() -> Iterator[Path]:
    """The folders of NVIDIA's Python packages, first the folder beside torch."""
    beside = Path(torch.__file__).parent.parent / "nvidia"
    try:
        import nvidia
    except ImportError:
        folders = [beside]
    else:
        folders = [beside, *map(Path, nvidia.__path__)]
    for folder in dict.fromkeys(folders):
        if folder.is_dir():
            yield from sorted(folder.iterdir())


def _nvcc() -> Path:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if not nvcc.is_file():
            raise UnavailableError(f"CUDA_HOME is {home}, where there is no bin/nvcc")
        return nvcc
    candidates = [Path(found)] if (found := shutil.which("nvcc")) else []
    candidates += [package / "bin" / "nvcc" for package in _nvidia_packages()]
    candidates.append(SYSTEM_NVCC)
    for candidate in candidates:
        if candidate.is_file():
            return _behind_wrapper(candidate)
    raise UnavailableError("nvcc was not found (set CUDA_HOME)")


def _run(*command: str | Path) -> str:
    """Runs a command and returns its output on both streams."""
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{command[0]} failed: {error}") from None
    if result.returncode != 0:
        lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
        told = [line for line in lines if "error" in line or "cannot find" in line] or lines[-1:]
        raise UnavailableError(f"{Path(command[0]).name} failed: {'; '.join(told[:2])}")
    return result.stdout


def _behind_wrapper(nvcc: Path) -> Path:
    """The real nvcc, from the folder that a dry run names; the one on the PATH may be a script."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as source:
        told = re.search(r"^#\$ _HERE_=(.+)$", _run(nvcc, "--dryrun", "-c", source.name), re.M)
    real = Path(told[1].strip()) / "nvcc" if told else nvcc
    return real if real.is_file() else nvcc


def _version(nvcc: Path) -> str:
    told = re.search(r"release (\d+\.\d+)", _run(nvcc, "--version"))
    if told is None:
        raise UnavailableError(f"{nvcc} does not tell its version")
    return told[1]


def _architectures(nvcc: Path) -> tuple[str, ...]:
    """TORCH_CUDA_ARCH_LIST, or those of the GPUs here, or the default ones that nvcc knows."""
    if named := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        architectures = tuple(named.replace(" ", ";").split(";"))
        for architecture in architectures:
            if not re.fullmatch(r"\d+\.\d[a-z]?(\+PTX)?", architecture):
                raise UnavailableError(
                    f"expected TORCH_CUDA_ARCH_LIST to hold numbers such as 9.0 or 12.0+PTX, "
                    f"got {architecture!r}"
                )
        return architectures
    known = {
        (int(a), int(b)) for a, b in re.findall(r"sm_(\d+)(\d)", _run(nvcc, "--list-gpu-code"))
    }
    if torch.cuda.is_available():
        present = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return tuple(dict.fromkeys(_nearest(capability, known) for capability in sorted(present)))
    default = DEFAULT_ARCHITECTURES.split(";")
    numbers = {name: tuple(map(int, name.removesuffix("+PTX").split("."))) for name in default}
    return tuple(name for name in default if numbers[name] in known)


def _nearest(capability: tuple[int, int], known: set[tuple[int, int]]) -> str:
    """The GPU's architecture or, if nvcc does not know it, the newest older one, with PTX."""
    older = [architecture for architecture in known if architecture <= capability]
    if not older:
        raise UnavailableError(
            "nvcc compiles for no GPU of compute capability {}.{}".format(*capability)
        )
    return "{}.{}".format(*max(older)) + ("" if capability in known else "+PTX")


def _runtime(nvcc: Path, version: str) -> Path:
    """The CUDA runtime of nvcc's major version: torch's, otherwise the toolkit's."""
    home = nvcc.parent.parent
    folders = [package / "lib" for package in _nvidia_packages()]
    folders += [Path(torch.__file__).parent / "lib"]
    folders += [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
    for name in (f"libcudart.so.{_major(version)}", "libcudart_static.a"):
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
    raise UnavailableError(
        f"there is no libcudart.so.{_major(version)}, neither among torch's packages nor in {home}"
    )


def _try(toolkit: Toolkit) -> None:
    """Compiles and links a few lines, to find in seconds if nvcc refuses the host compiler."""
    compiler = os.environ.get("CXX") or "c++"
    with tempfile.TemporaryDirectory() as folder:
        source, made, linked = (Path(folder) / name for name in ("probe.cu", "probe.o", "probe.so"))
        source.write_text(PROBE)
        flags = ["-std=c++20", "-Xcompiler=-fPIC", *toolkit.compile_flags]
        _run(toolkit.nvcc, *flags, "-c", source, "-o", made)
        _run(*compiler.split(), "-shared", made, "-o", linked, *toolkit.link_flags)
