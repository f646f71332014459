"""``python -m build_tools.rebuild LOSS OBJECTS``: a library of a copied checkout, with a new loss.

Of the instruction sets that the checkout was compiled for, the plainest is built, for a try of the
new loss. Objects of the checkout (its ``build/kernels``) are linked if all of them are as they
would be compiled here. ninja knows that by its logs, which name them by their paths, and by the
times of what they were made of. Otherwise all are compiled, without optimizations, which takes a
third of the time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from build_tools.libraries import ROOT, Library, Unit, cpu_libraries
from build_tools.ninja_file import BuildFile, program


class Linking(BuildFile):
    """Objects of a checkout, except for one loss."""

    loss, built = "", Path()

    def object_of(self, library: Library, unit: Unit) -> Path:
        own = super().object_of(library, unit)
        return own if unit.loss == self.loss else self.built / own.relative_to(self.path.parent)


class Quickly(BuildFile):
    """Without optimizations."""

    def flags_of(self, library: Library, unit: Unit) -> list[str]:
        return [*super().flags_of(library, unit), "-O0"]


def rebuild(loss: str, built: Path) -> None:
    """Builds the library in the package of this copy."""
    libraries = {each.name.rpartition(".")[2]: each for each in cpu_libraries()}
    name = next((name for name in libraries if (built / name).exists()), "_cpu_default")
    library = libraries[name]
    folder = ROOT / "build" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    for log in built.glob(".ninja_[dl]*"):
        shutil.copy2(log, folder)
    Linking.loss, Linking.built = loss, built

    def written(kind: type[BuildFile]) -> tuple[BuildFile, int]:
        file = kind(folder, {library.name: ROOT / "compile_losses" / f"{name}.so"})
        file.add(library)
        file.write()
        dry = [program(), "-C", str(ROOT), "-f", str(file.path), "-n"]
        done = subprocess.run(dry, stdout=subprocess.PIPE, text=True, check=True)
        return file, done.stdout.count("compile_losses: ")

    commands = 0
    if (built / name).exists():
        file, commands = written(Linking)
    if commands != 3:  # two sources, and the linker
        file, _ = written(Quickly)
    file.run([library], verbose=False)
    print(f"{loss} is in {name}.so")


if __name__ == "__main__":
    rebuild(sys.argv[1], Path(sys.argv[2]))
