"""The notebooks in docs/tutorials run, and their pages have outputs of a run from top to bottom."""

from __future__ import annotations

import json

import pytest

from tests.tutorials import executed, tutorials

LIBRARIES = {"language_model": ["transformers"], "reinforcement_learning": ["trl", "datasets"]}
NAMES = [path.stem for path in tutorials()]
#: These take minutes.
LONG = "language_model", "reinforcement_learning"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
        for path in tutorials()
    ],
)
def test_runs(path):
    for library in ["nbclient", "ipykernel", "ninja", *LIBRARIES.get(path.stem, [])]:
        pytest.importorskip(library, reason="pip install .[test,models]")
    executed(path)  # an error of a cell or of a program raises


@pytest.mark.parametrize("path", tutorials(), ids=NAMES)
def test_outputs(path):
    """They are committed, all of one run, and name no machine. A program that fails ends its cell
    only if bash runs it."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert not [cell for cell in cells if cell["source"][0].startswith("!")]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    for folder in ("/tmp", "/home", "/root", "/usr", ".venv"):
        assert folder not in json.dumps(outputs)


def test_there_are_three():
    assert NAMES == ["language_model", "own_op", "reinforcement_learning"]
