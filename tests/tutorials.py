"""The notebooks in docs/tutorials: ``python -m tests.tutorials [NAME ...]`` writes the outputs."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from tests import ROOT

FOLDER = ROOT / "docs" / "tutorials"
#: A path of this machine in an output, up to what is the same on others.
_MACHINE = re.compile(r"\S*/(site-packages/\S+)|\S*/ipykernel_\d+/\d+(\.py:\d+)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def tutorials() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path):
    """The notebook as nbformat has it, of its fourth format."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def executed(path: Path):
    """The notebook with the outputs of this machine, run in its own folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    with tempfile.TemporaryDirectory() as folder:
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"IPYTHONDIR": folder, "KINETO_LOG_LEVEL": "99", "COLUMNS": "100", "PATH": programs}
        client.execute(env={**os.environ, **own})
    return notebook


def cleaned(text: str) -> str:
    """An output without colours and without the paths of this machine."""

    def of_any_machine(found: re.Match[str]) -> str:
        same = found[1] or f"cell{found[2]}"
        return same.ljust(len(found[0]))  # columns stay

    return _MACHINE.sub(of_any_machine, _COLORS.sub("", text))


def main(names: list[str]) -> None:
    import nbformat

    for path in tutorials():
        if names and path.stem not in names:
            continue
        notebook = executed(path)
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if "text" in output:
                    output["text"] = cleaned(output["text"])
                elif "data" in output:
                    output["data"] = {"text/plain": cleaned(output["data"]["text/plain"])}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
