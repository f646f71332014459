"""Writes the reasons of reports into docs/explain.md: ``python -m tests.reasons``.

They are read off the package's source: what is raised as a reason, what functions return that tell
one, and what tables hold.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests import ROOT

PAGE = ROOT / "docs" / "explain.md"
PACKAGE = ROOT / "compile_losses"
_PLACE = re.compile(r"(<!-- list of reasons -->\n).*?(<!-- end of list -->\n)", re.DOTALL)
#: Calls with a reason, and its place among the arguments.
_CALLS = {
    **dict.fromkeys(("NotAbsorbedError", "NotOfRowsError", "OutsideError", "UnsupportedError"), 0),
    **{"Decline": 2, "Kept": 1, "_kept": 1, "Loss": 3},
}
#: Constants that hold reasons.
_TABLES = ("_STAY", "_INSIDE", "_NOT_CHOSEN")
#: How the annotation of a function ends that returns a reason.
_TELLS = re.compile(r"\bstr( \| None)?$")
#: How a reason begins whose subject is put before it.
_VERBS = ("is ", "bounds ", "replaces ", "rounds ", "puts ", "picks ")
_WIDTH = 118


@dataclass(frozen=True)
class Section:
    """Reasons of one kind.

    Attributes:
        about: where they stand, and what can be done.
        files: where they are.
        but: functions there that return another text.
    """

    about: str
    files: tuple[str, ...]
    but: tuple[str, ...] = ()


_KNOWN = ("doors", "head", "liger", "trl", "verl")
SECTIONS = {
    "A loss stays torch's": Section(
        """Its status is `declined`, and it costs what it costs in stock. If the reason names what
        is in the way, another of the [spellings](patterns.md) is rewritten.""",
        (
            *("recognize/spellings/table.py", "recognize/rewriting.py", "recognize/guards.py"),
            *("recognize/graph/memory.py", "recognize/spellings/written_out.py"),
            *("recognize/verify.py", "sites.py"),
        ),
    ),
    "A head is not computed with its loss": Section(
        """The notes have `without its linear layer`, and the logits are held as in stock.
        [Heads](heads.md) lists what may stand between a head and its loss. If `prefer_memory` holds
        none of the logits all the same, `explain` has tried it and says so.""",
        (
            *("recognize/heads/head.py", "recognize/heads/logits.py"),
            *("recognize/heads/with_head.py", "recognize/heads/linear_divergence.py"),
            "recognize/returned_logits.py",
        ),
        ("_name",),
    ),
    "Readers of a head's logits don't share a call": Section(
        """The notes have `the readers of its logits can't share one call`. The reason names the
        line of the reader that is in the way: without it the others [share
        one](heads.md#several-losses-and-metrics-of-one-head). Of a teacher the notes have `the
        teacher's logits are held`; the student's are not.""",
        (
            *("recognize/heads/shared_logits.py", "recognize/heads/readings.py"),
            *("recognize/heads/computed_reading.py", "recognize/heads/row_classes.py"),
        ),
    ),
    "An entropy of held logits is read apart": Section(
        """The notes have `the entropy of its logits is read apart`. It costs what it costs in
        stock.""",
        ("recognize/heads/plain_logits.py",),
    ),
    "A matrix is read by rows and by columns apart": Section(
        """The plan has `read by rows and by columns apart`, where [one
        read](heads.md#losses-of-all-pairs) would do. It costs what it costs in stock.""",
        ("lower/two_softmaxes.py",),
    ),
    "A head of another library stays its own": Section(
        "[These](heads.md#heads-of-other-libraries) are taken, with these arguments.",
        tuple(f"known_heads/{name}.py" for name in _KNOWN),
    ),
    "A gradient stays in the backward": Section(
        "The plan has `gradient in backward`. The input is read twice, as in stock.",
        (
            *("lower/gradient_in_forward.py", "lower/elementwise/refuse.py"),
            "lower/elementwise/rows.py",
        ),
    ),
    "A head's logits are held after autograd": Section(
        """The plan has `with its logits`, or `computed again in the backward`. With `prefer_memory`
        losses of each token are computed from logits that are computed twice.""",
        ("lower/row_gradients.py", "lower/regions/__init__.py", "lower/regions/rows.py"),
        ("_replaced",),
    ),
    "A gradient has memory of its own": Section(
        "The plan has `not in place`, and holds what stock holds.", ("lower/dead_buffers.py",)
    ),
}


def filled(text: str) -> str:
    """A page with the list as it is."""
    parts: list[str] = []
    for title, section in SECTIONS.items():
        lines: dict[str, None] = {}
        for name in section.files:
            tree = ast.parse((PACKAGE / name).read_text())
            lines |= dict.fromkeys(sentences(tree, section.but))
        items = [f"- {'... ' * line.startswith(_VERBS)}{line}" for line in lines]
        parts += [
            f"### {title}\n",
            textwrap.fill(" ".join(section.about.split()), _WIDTH),
            "",
        ]
        parts += [*(textwrap.fill(i, _WIDTH, subsequent_indent="  ") for i in items), ""]
    return _PLACE.sub(lambda found: found[1] + "\n".join(parts) + found[2], text)


def sentences(tree: ast.Module, but: tuple[str, ...] = ()) -> Iterator[str]:
    """The reasons of a module, in the order of its lines.

    Args:
        but: functions that return another text.
    """
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[tuple[int, int], str] = {}

    def text(node: ast.AST | None) -> str | None:
        """A text, with ``...`` for what is put in."""
        if isinstance(node, ast.Name) and node.id in constants:
            return text(constants[node.id])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.FormattedValue):
            return text(node.value) or "..."
        if isinstance(node, ast.JoinedStr):
            return "".join(text(value) or "..." for value in node.values)
        return None

    def add(node: ast.AST | None) -> None:
        for part in _choices(node):
            add(part)
        told = text(node)
        if node is not None and told is not None and " " in told.strip(". "):
            found[node.lineno, node.col_offset] = told  # type: ignore[attr-defined]

    for name in _TABLES:
        add(constants.get(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = _CALLS.get(node.func.id)
            if place is not None and len(node.args) > place:
                add(node.args[place])
        if isinstance(node, ast.FunctionDef) and node.name not in but and node.returns is not None:
            tells = _TELLS.search(ast.unparse(node.returns))
            for one in ast.walk(node) if tells else ():
                add(one.value if isinstance(one, ast.Return) else None)
    yield from (found[place] for place in sorted(found))


def _choices(node: ast.AST | None) -> list[ast.expr]:
    """What a text is chosen of."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.Dict):
        return node.values
    is_table = isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.fromkeys"
    return node.args[1:] if is_table else []  # type: ignore[union-attr]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
