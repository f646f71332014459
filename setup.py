"""Builds the kernels in csrc/ into shared libraries beside the package's Python files.

compile_losses.library loads the CPU library that fits the processor. The CUDA library is built
where build_tools.cuda finds what that takes. All use libtorch's stable ABI only. Without a compiler
no library is built, and torch's own ops compute. COMPILE_LOSSES_CPU=none builds none anywhere.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))

from build_tools.build_ext import BuildKernels
from build_tools.libraries import cpu_libraries

#: For any platform and any Python from 3.10 on.
has_none = os.environ.get("COMPILE_LOSSES_CPU") == "none"
setup(
    ext_modules=[] if has_none else cpu_libraries(),
    cmdclass={"build_ext": BuildKernels},
    options={
        "bdist_wheel": {} if has_none else {"py_limited_api": "cp310"},
        "build": {"build_temp": "build/kernels"},  # objects of no version of Python
    },
)
