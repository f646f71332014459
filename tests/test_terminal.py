"""What the command line writes, with rich and without."""

from __future__ import annotations

import io
import re
import sys

import pytest

from compile_losses import terminal
from compile_losses.demo import console

TABLE = """\
1 graph, 2 losses, 1 rewritten
status     op
---------  --------------------
rewritten  mse_loss [of rows]
declined   binary_cross_entropy"""


class Screen(io.StringIO):
    """A terminal, or what only looks like one."""

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self.watched = watched

    def isatty(self) -> bool:
        return self.watched


@pytest.fixture
def screen(monkeypatch):
    """What replaces standard output by a screen."""

    def replace(watched, *, rich):
        if rich:
            pytest.importorskip("rich", reason="pip install .[demo]")
        else:
            for name in ("rich", "rich.console", "rich.progress"):
                monkeypatch.setitem(sys.modules, name, None)
        for name, value in (("TERM", "xterm"), ("COLUMNS", "40"), ("LINES", "24")):
            monkeypatch.setenv(name, value)
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "stdout", Screen(watched))
        return sys.stdout

    return replace


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_colours(screen):
    """The same text, brackets and lines wider than the screen among it."""
    stdout = screen(True, rich=True)
    terminal.say(TABLE)
    terminal.say("Gained in this run: GPT: peak memory 1/3.")
    told = stdout.getvalue()
    assert plain(told) == f"{TABLE}\nGained in this run: GPT: peak memory 1/3.\n"
    for word, code in (("rewritten", 32), ("declined", 33), ("Gained in this run", "1;32")):
        assert f"\x1b[{code}m{word}" in told


@pytest.mark.parametrize(("watched", "rich"), [(True, False), (False, True), (False, False)])
def test_plain(screen, watched, rich):
    stdout = screen(watched, rich=rich)
    terminal.say(TABLE)
    assert stdout.getvalue() == f"{TABLE}\n"


@pytest.mark.parametrize(
    ("watched", "rich"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_progress(screen, watched, rich):
    stdout = screen(watched, rich=rich)
    with console.progress("GPT", 2) as tick:
        tick("3.0 | 3.0")
        tick("2.0 | 2.0")
    told = stdout.getvalue()
    assert "GPT" in told
    assert "2/2" in told
    assert "loss 2.0 | 2.0" in plain(told)
    assert ("#" in told) == (not (watched and rich))
    assert ("\x1b[" in told) == watched
