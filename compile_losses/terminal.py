"""Output of the command line: in colours if rich is installed and it goes to a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Regular expressions and rich's styles; if they overlap, the later one counts.
_STYLES = (
    (r"(?m)^-[- ]*-$", "dim"),  # below the heads of tables
    (r"(?m)^\d+ graphs?, \d+ loss.*$", "bold"),
    (r"(?m)^\d\. .*$", "bold"),
    (r"\brewritten\b|\bloaded\b", "green"),
    (r"\bgained\b", "green"),
    (r"\bdeclined\b|\bas stock\b", "yellow"),
    (r"\bunrecognised\b|\bnone:", "red"),
    (r"(?m)^FAILED: .*$", "bold red"),
    (r"(?m)^Gained in this run: (?!nothing).*$", "bold green"),
)


def rich_console() -> Console | None:
    """Rich's console, if rich is installed and standard output is a terminal."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def say(text: object = "") -> None:
    """Prints the text; its layout is the same with and without colours."""
    console = rich_console()
    if console is None:
        print(text)
        return
    from rich.text import Text

    coloured = Text(str(text))
    for pattern, style in _STYLES:
        coloured.highlight_regex(pattern, style)
    console.print(coloured, soft_wrap=True)
