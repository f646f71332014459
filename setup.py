"""Builds the kernels in csrc/ into shared libraries beside the package's Python files.

The CPU kernels are built once for every instruction set that torch itself tells apart, from the
same sources; compile_losses.library loads the one that fits the processor. The CUDA library is
built when the installed torch has CUDA and nvcc is found. All of them use libtorch's stable ABI
only.
"""

import os
import platform
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
# libtorch's stable ABI as of torch 2.11.
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
CXX_FLAGS = [*DEFINES, "-std=c++20", "-O3", "-fvisibility=hidden", "-g0", "-Wall"]
LINK_FLAGS = []
# SANITIZE=address: for `make asan`.
if sanitizer := os.environ.get("SANITIZE"):
    CXX_FLAGS += ["-O2", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}"]
    LINK_FLAGS += [f"-fsanitize={sanitizer}"]
# Arithmetic may be reordered only where a loop says so; nan and infinities keep their meaning.
VECTOR_FLAGS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {"default": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {"avx2": AVX2, "avx512": AVX2 + AVX512}
# Built for when no GPU is there to ask, unless TORCH_CUDA_ARCH_LIST says otherwise.
DEFAULT_CUDA_ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"


def sources(*patterns: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)
    )


def extension(kind, name: str, files: list[str], compile_args):
    return kind(
        name=f"compile_losses.{name}",
        sources=files,
        depends=sources("csrc/*.h", "csrc/*/*.h", "csrc/*/*.cuh"),
        extra_compile_args=compile_args,
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
    )


extensions = [
    extension(
        cpp_extension.CppExtension,
        f"_cpu_{name}",
        sources("csrc/binding/*.cpp", "csrc/cpu/*.cpp"),
        {"cxx": CXX_FLAGS + VECTOR_FLAGS + flags},
    )
    for name, flags in INSTRUCTION_SETS.items()
]

if torch.version.cuda is None:
    print("compile_losses: CPU kernels only, because the installed torch has no CUDA")
elif cpp_extension.CUDA_HOME is None:
    print("compile_losses: CPU kernels only, because nvcc was not found (set CUDA_HOME)")
else:
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
    extensions.append(
        extension(
            cpp_extension.CUDAExtension,
            "_cuda",
            sources("csrc/binding/*.cpp", "csrc/cuda/*.cu"),
            {
                "cxx": [*CXX_FLAGS, "-DFUSED_CUDA", "-DUSE_CUDA"],
                "nvcc": ["-std=c++20", "-O3", "--threads=2", "-Xcompiler=-fvisibility=hidden"],
            },
        )
    )

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
