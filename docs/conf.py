"""The site that `make docs` builds of these pages, of some outside this folder, and of docstrings.

All pages are written for a reader of the checkout, so their links are those of its files. On the
site a link leads to the page of that file, or to a copy of it; the name of a folder is no link.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from compile_losses import library

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
#: Files that a page here includes, and that page.
INCLUDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")

project = "compile_losses"
release = version = importlib.metadata.version("compile_losses")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpicky = True
# No inventory of torch's documentation is fetched: the build needs no network.
_ELSEWHERE = (
    r"(torch|collections|typing)\..*|Any|Callable|DeviceMesh|GraphModule|ProcessGroup|Tensor"
)
_INSIDE = r"compile_losses\.((lower|ops\.linear|lazy\.automatic)\..*|\w+\._\w+)"
nitpick_ignore_regex = [("py:.*", _ELSEWHERE), ("py:.*", _INSIDE)]

myst_heading_anchors = 4
# Notebooks are shown with the outputs that they are committed with.
nb_execution_mode = "off"
nb_merge_streams = True
# A cell that writes a file of C++ is no Python.
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "text"

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_rtype = False
# Of several names in one line, as in "input, target: logits", these make one entry.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = f"compile_losses {release}"
html_static_path = ["theme"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def of_site(text: str, folder: Path, site: Path = DOCS) -> str:
    """The text of a page in a folder of the checkout, its links as from a folder of the site."""

    def link(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        if ":" in target or not path.exists():  # the latter Sphinx warns of
            return found[0]
        if path.is_dir():
            return label
        included = INCLUDED.get(os.path.relpath(path, ROOT))
        name = os.path.relpath(DOCS / included if included else path, site)
        return f"[{label}]({name}{anchor})"

    return _LINK.sub(link, text)


def sections_of_ops() -> str:
    """A section for each op, of its module's docstring."""
    return "\n".join(
        f"{name}\n{'-' * len(name)}\n\n.. automodule:: compile_losses.ops.{name}\n"
        for name in library.public_ops()
    )


def read_page(app: Sphinx, name: str, content: list[str]) -> None:
    path = app.env.doc2path(name)
    if path.suffix in (".md", ".ipynb"):
        content[0] = of_site(content[0], path.parent, path.parent)
    elif name == "api/ops":
        content[0] = content[0].replace(".. the ops\n", sections_of_ops())


def read_included(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    content[0] = of_site(content[0], (DOCS / path).parent)


def read_docstring(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Absolute values, as |d|, would be substitutions."""
    lines[:] = [re.sub(r"\|(?=\S)([^|`]*\S)\|", r"\\|\1\\|", line) for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
