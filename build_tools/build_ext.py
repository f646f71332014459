"""The setuptools command that builds the libraries.

It does not use torch's BuildExtension, which refuses CUDA sources beside a torch without CUDA,
links torch's CUDA libraries, and uses the compiler flags of the Python that runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from setuptools.command.build_ext import build_ext

from build_tools.libraries import MissingCompilerError, asked_for, cuda_library
from build_tools.ninja_file import BuildFile


def say(text: str) -> None:
    print(f"compile_losses: {text}", flush=True)


class BuildKernels(build_ext):
    """``build_ext``. It writes the outcome for the CUDA kernels, and why there are no
    others, to compile_losses/kernels.json."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def run(self) -> None:
        if self.editable_mode:  # setuptools would delete its folder; `make wheel` links the objects
            self.build_temp = "build/kernels"
        self.built: dict[str, dict[str, object]] = {}
        try:
            self.extensions = asked_for(self.extensions)
        except MissingCompilerError as reason:
            self.extensions = []
            self.built = {device: {"missing": str(reason)} for device in ("cpu", "cuda")}
            say(f"no kernels, because {reason}: torch's own ops compute in their place")
        super().run()
        folder = Path(self.build_lib, "compile_losses")
        if self.inplace:
            folder = Path(self.get_finalized_command("build_py").get_package_dir("compile_losses"))
        built = {Path(self.get_ext_filename(library.name)).name for library in self.extensions}
        for library in folder.glob("_c*.so"):
            if library.name not in built:  # of an earlier build, of older sources perhaps
                library.unlink()
        (folder / "kernels.json").write_text(json.dumps(self.built, indent=2) + "\n")

    def build_extensions(self) -> None:
        self.built = {"cuda": self._cuda()}
        outputs = {e.name: Path(self.get_ext_fullpath(e.name)).absolute() for e in self.extensions}
        file = BuildFile(Path(self.build_temp).absolute(), outputs)
        for library in self.extensions:
            file.add(library)
        file.write()
        required = [library for library in self.extensions if not library.optional]
        say(f"compiling {', '.join(outputs[library.name].name for library in required)}")
        file.run(required, bool(self.verbose))
        for library in [library for library in self.extensions if library.optional]:
            say(f"compiling {outputs[library.name].name}")
            try:
                file.run([library], bool(self.verbose))
            except subprocess.CalledProcessError:
                say(f"CPU kernels only, because {library.name} failed to build, see above")
                self.built["cuda"] = {"missing": "they failed to compile where this was installed"}
                self.extensions = [other for other in self.extensions if other is not library]

    def _cuda(self) -> dict[str, object]:
        """Adds the CUDA library if it can be built; returns the entry for kernels.json."""
        from build_tools import cuda  # it imports torch

        required = os.environ.get("COMPILE_LOSSES_CUDA") == "1"
        try:
            toolkit = cuda.find()
        except cuda.UnavailableError as reason:
            if required:
                raise SystemExit(f"compile_losses: no CUDA kernels: {reason}") from None
            say(f"CPU kernels only, because {reason}")
            return {"missing": str(reason)}
        say(
            f"CUDA kernels for {', '.join(toolkit.architectures)} by {toolkit.nvcc} "
            f"({toolkit.version}), with {toolkit.runtime}"
        )
        # A new list: the old one belongs to the distribution, and this command may run twice.
        self.extensions = [*self.extensions, cuda_library(toolkit, optional=not required)]
        return {"version": toolkit.version, "architectures": list(toolkit.architectures)}
