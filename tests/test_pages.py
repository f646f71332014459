"""README.md and docs/: their tables are those of the results, their links lead somewhere, their
Python runs, and the site has all of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
import torch

from benchmarks import pages
from tests import ROOT, modules, reasons

pytestmark = pytest.mark.skipif(
    not pages.RESULTS.exists(), reason="benchmarks/results is in a checkout alone"
)

DOCS = sorted((ROOT / "docs").glob("*.md"))
ROOTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in ROOTS), *DOCS]
#: Those that only bring a page from elsewhere into the site.
INCLUDES = [page for page in DOCS if page.read_text().startswith("```{include} ")]
_CODE = re.compile(r"```.*?```", re.DOTALL)
_SHELL = re.compile(r"^```(?:\w*sh)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda path: path.name)
def test_tables_are_current(page):
    """They are generated: make readme."""
    text = page.read_text()
    assert pages.filled(text) == text
    assert "<!-- table: " in text


def test_modules_page_is_current():
    """It is generated: python -m tests.modules."""
    assert modules.PATH.read_text() == modules.page()


def test_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def anchors(path):
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _CODE.sub("", path.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links(page):
    text = _CODE.sub("", page.read_text())
    for target in _LINK.findall(text):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} links to {target}"


def test_page_of_an_index():
    """Its links and images are addresses, of files that are there."""
    from build_tools import index_page

    page = index_page.with_addresses((ROOT / "README.md").read_text(), "https://host/us/it", "v1")
    targets = _LINK.findall(_CODE.sub("", page))
    assert any(target.startswith("https://host/us/it/raw/v1/") for target in targets)
    for target in targets:
        kind, tag, name = target.removeprefix("https://host/us/it/").split("/", 2)
        assert (kind, tag) in (("raw", "v1"), ("blob", "v1")), target
        assert (ROOT / name.partition("#")[0]).exists(), target
    assert index_page.with_addresses(page, "https://host/us/it", "v2") == page
    within = "[up](#use), [torch](https://pytorch.org)"
    assert index_page.with_addresses(within, "https://host/us/it", "v1") == within
    assert 'Source = "https://host/us/it"\n' in index_page.urls("https://host/us/it", "v1")


def test_gallery_has_every_plot():
    text = (ROOT / "docs" / "gallery.md").read_text()
    shown = re.findall(r"\.\./benchmarks/results/([\w-]+\.png)\)", text)
    assert sorted(shown) == sorted(path.name for path in pages.RESULTS.glob("*.png"))


def test_every_page_is_linked():
    text = "".join(page.read_text() for page in PAGES)
    for page in set(DOCS) - set(INCLUDES):
        assert f"{page.name})" in text or f"{page.name}#" in text, page.name


@pytest.mark.parametrize(
    "name", ["README.md", "docs/getting-started.md", "docs/heads.md", "docs/losses.md"]
)
def test_python_runs(name):
    """One block after the other, for a model that is there."""
    import compile_losses

    names = {"torch": torch, "model": torch.nn.Linear(4, 4)}
    blocks = _PYTHON.findall((ROOT / name).read_text())
    assert blocks
    compile_losses.counters().clear()
    try:
        for block in blocks:
            exec(compile(block, name, "exec"), names)
    finally:
        compile_losses.disable()


def test_reasons_are_current():
    """They are generated: python -m tests.reasons."""
    text = reasons.PAGE.read_text()
    assert reasons.filled(text) == text


def test_reasons_are_read_off_the_source():
    """Raised, returned, and of a table; what is put in is left out, and constants are not."""
    source = """
_STAY = {one: "rounds them", **dict.fromkeys((two, three), "bounds them too")}
_ALSO = "and no more"

def refusal(part) -> str | None:
    return f"{part} is read, {_ALSO}" if part else "a part is missing"

def other(part) -> int:
    raise NotAbsorbedError(part.name or "it has no name")
"""
    assert [*reasons.sentences(ast.parse(source))] == [
        "rounds them",
        "bounds them too",
        "... is read, and no more",
        "a part is missing",
        "it has no name",
    ]


def test_explained_example(tmp_path, monkeypatch, capsys):
    """The model of docs/explain.md, and what is said there of it."""
    from compile_losses.__main__ import main

    text = (ROOT / "docs" / "explain.md").read_text()
    (model,) = _PYTHON.findall(text)
    (tmp_path / "model.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["compile_losses", "explain", "model.py:step"])
    main()
    told = capsys.readouterr().out
    for line in ("1 graph, 3 losses, 2 rewritten", "model.py:16", "model.py:17", "model.py:18"):
        assert line in told
        assert line in text


def commands():
    """The commands of all pages, in blocks and in lines of text."""
    pages = [*PAGES, ROOT / "examples" / "README.md"]
    found = {}
    for path in pages:
        text = path.read_text()
        lines = [line for block in _SHELL.findall(text) for line in block.splitlines()]
        lines += _SPAN.findall(_CODE.sub("", text))
        for line in lines:
            line = re.sub(r"\s+#.*", "", line).removeprefix("$ ").strip()
            if re.match(r"(make|pip|python|torchrun) ", line):
                found[line] = None
    return list(found)


@pytest.mark.parametrize("command", commands())
def test_commands(command, monkeypatch, capsys):
    """What they name is there: targets and variables of make, modules, scripts, options, extras."""
    program, *words = shlex.split(command.replace("[--", "--").replace("\\|", "|"))
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in words:
            name = word.split("=")[0]
            there = (
                rf"^{name} \?=|\$\({name}\)" if "=" in word else rf"^([\w -]* )?{name}( [\w -]*)?:"
            )
            assert re.search(there, makefile, re.M), word
        return
    options = [word.rstrip("]") for word in words if word.startswith("--")]
    scripts = [word for word in words if word.endswith(".py")]
    if program == "pip":
        extras = re.findall(r"compile_losses\[(\w+)\]", command)
        project = (ROOT / "pyproject.toml").read_text()
        _, _, declared = project.partition("[project.optional-dependencies]")
        assert set(extras) <= set(re.findall(r"^(\w+) = \[", declared, re.M))
    elif scripts and "compile_losses" not in words:
        source = "".join((ROOT / script).read_text() for script in scripts)
        own = [option for option in options if option != "--nproc-per-node"]
        assert all(f'"{option}"' in source for option in own)
    else:
        _, module, *rest = words[words.index("-m") :]
        assert importlib.util.find_spec(module), module
        if module in ("benchmarks", "compile_losses"):
            subcommand = [word for word in rest[:1] if not word.startswith("-")]
            monkeypatch.setattr(sys, "argv", [module, *subcommand, "--help"])
            with pytest.raises(SystemExit) as ended:
                importlib.import_module(f"{module}.__main__").main()
            assert ended.value.code == 0
            told = capsys.readouterr().out
            assert all(option in told for option in set(options) - {"--nproc-per-node"})


def test_navigation_of_the_site():
    """It has each page once. Sphinx says so too, in `make docs`."""
    docs = ROOT / "docs"
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", (docs / "index.md").read_text(), re.M | re.S)
    lines = "".join(trees).splitlines()
    entries = [line for line in lines if line and not line.startswith(":")]
    pages = [page for kind in ("md", "rst", "ipynb") for page in docs.rglob(f"*.{kind}")]
    names = [page.relative_to(docs).with_suffix("").as_posix() for page in pages]
    assert sorted(["index", *entries]) == sorted(names)


def test_reference_of_the_site():
    """Each public name stands in docs/api; docs/conf.py lists the ops."""
    import compile_losses
    from compile_losses import linear

    api = ROOT / "docs" / "api"
    text = (api / "package.rst").read_text()
    for name in set(compile_losses.__all__) - {"functional", *linear.__all__}:
        assert re.search(rf"^\.\. auto(function|class):: {name}$", text, re.M), name
    for name in ("functional", "linear"):
        text = (api / f"{name}.rst").read_text()
        assert f".. automodule:: compile_losses.{name}\n   :members:\n" in text


@pytest.mark.slow
def test_site_is_built(tmp_path):
    pytest.importorskip("sphinx", reason="pip install .[docs]")
    from compile_losses import library

    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning"]
    folders = ["--doctree-dir", tmp_path / "doctrees", ROOT / "docs", tmp_path / "site"]
    subprocess.run([*command, *folders], check=True)
    reference = tmp_path / "site" / "api"
    assert "compile_losses.functional.huber_loss" in (reference / "functional.html").read_text()
    ops = (reference / "ops.html").read_text()
    assert all(f"torch.ops.fused.{name}(" in ops for name in library.public_ops())
