"""``python -m compile_losses run``, and COMPILE_LOSSES_ENABLE=1: no change of a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_losses.__main__ import main
from compile_losses.options import InvalidOptionError, Settings
from tests.kernels import HAS_KERNELS

ROOT = Path(__file__).parents[1]

#: What a program prints: its arguments, and what it compiled in two threads.
PROGRAM = """
import json, os, sys, threading, warnings
warnings.simplefilter("ignore")
early = sorted({"compile_losses", "torch._dynamo"} & set(sys.modules))
import torch
import torch.nn.functional as F
late = "torch._dynamo" in sys.modules
import helper

def compiled(size):
    kept = []
    def work():
        x = torch.ones(size, 4, requires_grad=True)
        torch.compile(lambda x: F.mse_loss(x, x.detach()))(x)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

compiled(2)
compiled(3)
from compile_losses import counters, switches
from compile_losses.default_backend import disable
first = dict(counters()["rewritten"])
if "stop" in sys.argv:
    disable()
    compiled(5)
print(json.dumps({
    "argv": sys.argv, "early": early, "name": __name__, "file": os.path.basename(__file__),
    "rewritten": first, "again": dict(counters()["rewritten"]),
    "only": os.environ.get("COMPILE_LOSSES_ONLY"),
    "lazy": switches.lazy_logits(), "main": sys.modules["__main__"].__name__,
}))
"""


#: What is rewritten of it. Where there are no kernels, a loss of few numbers is left to torch.
REWRITTEN = {"mse_loss": 2} if HAS_KERNELS else {}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("")
    return tmp_path


@pytest.fixture
def installed(tmp_path):
    """The entry points of an installed package, for a process that has this folder in its path."""
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (points,) = project["project"]["entry-points"]["torch.backends"].items()
    folder = tmp_path / "packages" / "of_a_test-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: of_a_test\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\n{points[0]} = {points[1]}\n")
    assert project["tool"]["setuptools"]["py-modules"] == [points[1].split(":")[0]]
    return folder.parent


def python(*arguments, cwd, path=(), **environment):
    paths = os.pathsep.join(map(str, [*path, ROOT]))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "COMPILE_LOSSES_LOG": "0", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["script", "module"])
def test_run(way, folder):
    """The program sees its own arguments; each of its threads compiles with the passes."""
    program = ["train.py"] if way == "script" else ["-m", "train"]
    options = ["--options", '{"losses": ["mse_loss"], "lazy_logits": true}']
    command = ["-m", "compile_losses", "run", *options, *program, "--json", "stop"]
    told = python(*command, cwd=folder)
    assert told["argv"][1:] == ["--json", "stop"]
    assert (told["name"], told["main"], told["file"]) == ("__main__", "__main__", "train.py")
    assert told["rewritten"] == told["again"] == REWRITTEN
    assert (told["only"], told["lazy"]) == ("mse_loss", True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("on", ["1", "0"])
def test_in_the_environment(on, folder, installed):
    """`import torch` alone switches it on, and loads nothing for it."""
    variables = {"COMPILE_LOSSES_ENABLE": on}
    told = python("train.py", cwd=folder, path=[installed], **variables)
    assert told["early"] == []
    assert told["rewritten"] == (REWRITTEN if on == "1" else {})


@pytest.mark.slow
def test_without_autoload(folder, installed):
    """Where torch loads no entry points, the import of the package does it."""
    (folder / "train.py").write_text("import compile_losses\n" + PROGRAM)
    variables = {"COMPILE_LOSSES_ENABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    told = python("train.py", cwd=folder, path=[installed], **variables)
    assert told["rewritten"] == REWRITTEN


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("on", ["1", "0"])
def test_a_program_that_enables_by_itself(on, folder):
    """In one thread of it, which is not the one that compiles."""
    (folder / "train.py").write_text(
        PROGRAM.replace("import helper", "import helper, compile_losses; compile_losses.enable()")
        .replace("thread.start()", "thread.start() if size == 2 else work()")
        .replace("thread.join()", "thread.join() if size == 2 else None")
    )
    told = python("-m", "compile_losses", "run", "train.py", cwd=folder, COMPILE_LOSSES=on)
    assert told["rewritten"] == (REWRITTEN if on == "1" else {})


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("end", "tells"), [("sys.exit()", True), ("sys.exit(3)", False)])
def test_a_program_that_compiles_nothing(end, tells, tmp_path):
    """It is told at its end, unless it ended by an error."""
    (tmp_path / "train.py").write_text(f"import sys\n{end}\n")
    done = subprocess.run(
        [sys.executable, "-m", "compile_losses", "run", "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COMPILE_LOSSES_LOG": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if tells else 3)
    assert ("nothing was compiled" in done.stderr) == tells


IMPORT = """
import json, sys
import torch
before = set(sys.modules)
import _compile_losses_autoload
_compile_losses_autoload.autoload()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.parametrize("on", ["1", "0"])
def test_the_entry_point_imports_nothing(on, tmp_path):
    found = python("-c", IMPORT, cwd=tmp_path, COMPILE_LOSSES_ENABLE=on)
    assert found in ([], ["_compile_losses_autoload"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script"),
        (["nothing.py"], "there is no file nothing.py"),
        (["-m"], "expected a module"),
        (["--options", '{"verify": "yes"}', "x.py"], "verify: expected True or False"),
        (["--options", '{"inner_backend": "eager"}', "x.py"], "has no variable"),
    ],
    ids=str,
)
def test_what_can_not_be_run(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main(["run", *arguments])


def test_options_as_variables():
    given = {
        "losses": ["mse_loss", "kl_div"],
        "except": ["kl_div"],
        "verify": False,
        "strict": True,
    }
    assert Settings.variables(given) == {
        "COMPILE_LOSSES_ONLY": "mse_loss,kl_div",
        "COMPILE_LOSSES_EXCEPT": "kl_div",
        "COMPILE_LOSSES_VERIFY": "0",
        "COMPILE_LOSSES_STRICT": "1",
    }
    with pytest.raises(InvalidOptionError, match="expected at least one"):
        Settings.variables({"losses": []})
