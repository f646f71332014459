"""Builds the kernels in csrc/ into shared libraries beside the package's Python files.

compile_losses.library loads the CPU library that fits the processor. The CUDA library is built
where build_tools.cuda finds what that takes. All use libtorch's stable ABI only.
"""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))

from build_tools.build_ext import BuildKernels
from build_tools.libraries import cpu_libraries

setup(
    ext_modules=cpu_libraries(),
    cmdclass={"build_ext": BuildKernels},
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},
        "build": {"build_temp": "build/kernels"},  # objects of no version of Python
    },
)
