"""Writes ninja's build file and runs ninja."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from build_tools.libraries import ROOT, Library, Unit


class BuildFile:
    """The rules of some libraries. Paths of sources, also in messages, are relative to ROOT."""

    def __init__(self, folder: Path, outputs: dict[str, Path]) -> None:
        self.path = folder / "build.ninja"
        self.outputs = outputs  # by the library's name
        self._objects: set[Path] = set()
        self.lines = [f"builddir = {_path(folder)}"]

    def add(self, library: Library) -> None:
        stem = library.name.rpartition(".")[2]
        for suffix, command in library.compilers.items():
            self.lines += [
                f"rule {stem}{suffix}",
                f"  command = {_shell(command)} $flags -MD -MF $out.d -c $in -o $out",
                f"  description = compile_losses: {stem}: $in $flags",
                "  depfile = $out.d",
                "  deps = gcc",
            ]
        objects = []
        for unit in library.units:
            objects.append(self.object_of(library, unit))
            if objects[-1] in self._objects:
                continue  # of another library, too
            self._objects.add(objects[-1])
            self._build(objects[-1], f"{stem}{unit.source.suffix}", [unit.source])
            if flags := self.flags_of(library, unit):
                self.lines.append(f"  flags = {_shell(flags)}")
        self.lines += [
            f"rule {stem}.so",
            f"  command = {_shell(library.linker)} $in -o $out {_shell(library.link_flags)}",
            f"  description = compile_losses: {stem}.so",
        ]
        self._build(self.outputs[library.name], f"{stem}.so", objects)

    def object_of(self, library: Library, unit: Unit) -> Path:
        return self.path.parent / library.object_of(unit)

    def flags_of(self, library: Library, unit: Unit) -> list[str]:
        return library.flags_of(unit)

    def _build(self, output: Path, rule: str, inputs: list[Path]) -> None:
        self.lines.append(f"build {_path(output)}: {rule} {' '.join(map(_path, inputs))}")

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join(self.lines) + "\n")

    def run(self, libraries: list[Library], verbose: bool) -> None:
        """Builds the libraries. If one fails, raises CalledProcessError."""
        command = [program(), "-C", str(ROOT), "-f", str(self.path)]
        if jobs := os.environ.get("MAX_JOBS"):
            command += ["-j", jobs]
        if not verbose:
            command.append("--quiet")
        command += [str(self.outputs[library.name]) for library in libraries]
        environment = {**os.environ, "NINJA_STATUS": "[%f of %t, %e s] "}
        subprocess.run(command, env=environment, check=True)


def _shell(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def program() -> str:
    """The Python package's ninja, which need not be on the PATH; otherwise the one on the PATH."""
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise SystemExit("compile_losses needs ninja to build: pip install ninja") from None
        return found
    return str(Path(ninja.BIN_DIR) / "ninja")
