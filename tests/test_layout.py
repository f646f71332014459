"""The checklist of CONTRIBUTING.md: what a loss must have, walked from the schemas."""

from __future__ import annotations

import ast
import pydoc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from compile_losses.library import DECLARED, PACKAGE, documented_ops, public_ops
from compile_losses.lower.fused_calls import is_elementwise
from compile_losses.recognize.spellings.table import TABLE
from tests import ROOT
from tests.calls import COMPOSED
from tests.specs import SPECS

LOSSES = public_ops()
#: The suites of those.
SUITES = sorted((ROOT / "tests").glob("test_linear_*.py"))
OPS = sorted(f"fused::{name}" for name in DECLARED)


def kernel_sources(loss):
    """The files of a loss of its own. Those of an elementwise loss are compiled from one header."""
    if is_elementwise(loss):
        return [ROOT / f"csrc/losses/elementwise/{loss}.h"]
    folders = (("losses", "h"), ("cpu", "cpp"), ("cuda", "cu"))
    return [ROOT / f"csrc/{folder}/{loss}.{suffix}" for folder, suffix in folders]


def has(op, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def test_there_are_losses():
    specified = {spec.public or spec.name for spec in SPECS.values()}
    assert specified - COMPOSED == set(LOSSES) - COMPOSED
    headers = {path.stem for path in (ROOT / "csrc/losses/elementwise").iterdir()}
    assert headers == {name for name in SPECS if is_elementwise(name)}


@pytest.mark.parametrize("op", OPS)
def test_op(op):
    """A kernel, a fake, and an autograd formula or an explicit refusal."""
    assert (
        has(op, "CompositeImplicitAutograd")
        or has(op, "CompositeExplicitAutograd")
        or (has(op, "CPU") and has(op, "Meta"))
    ), "no CPU kernel or no fake"
    assert has(op, "CompositeImplicitAutograd") or has(op, "Autograd"), "no autograd formula"
    overload = torch._C._jit_get_schemas_for_operator(op)
    assert len(overload) == 1
    packet = getattr(torch.ops.fused, op.removeprefix("fused::"))
    assert torch.Tag.pt2_compliant_tag in packet.default.tags


@pytest.mark.parametrize("loss", sorted(COMPOSED))
def test_composed_loss(loss):
    for suffix in ("forward", "backward", "with_grad", "rows_with_grad"):
        assert f"fused::{loss}_{suffix}" in OPS
    assert (PACKAGE / f"ops/{loss}.py").is_file()
    assert any(f'"{loss}"' in p.read_text() or p.stem == f"test_{loss}" for p in SUITES)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in COMPOSED])
def test_loss(loss):
    spec = SPECS[loss]
    assert set(spec.parts) >= {"forward", "backward"}
    made_of = {op.removeprefix(f"fused::{loss}_") for op in OPS if op.startswith(f"fused::{loss}_")}
    others = {s.name.removeprefix(f"{loss}_") for s in SPECS.values() if s.public == loss}
    own = {part for part in made_of if not any(part.startswith(other) for other in others)}
    # Tested where other statistics of the same rows are; and with the loss and its gradient.
    assert own - {"row_statistics_backward_", "ahead", "ahead_gradient"} == set(spec.parts)
    assert ("ahead" in own) == ("ahead_gradient" in own) == ("with_grad" in own)
    specified = (PACKAGE / f"ops/{loss}.py", ROOT / f"tests/specs/{loss}.py")
    for path in (*kernel_sources(loss), *specified):
        assert path.is_file(), f"{path} is missing"
    assert spec.near_misses, "no spelling that must not match"
    if hasattr(F, loss):
        assert any(row.name == loss and row.convert for row in TABLE), "no row in the table"
        assert spec.matches, "no spelling that must match"
    else:  # what no function of torch's is alone can't be a row
        assert not any(row.name == loss for row in TABLE)


def test_specs():
    """What a spec says that its op is made of, and all of the ops behind a public one."""
    for spec in SPECS.values():
        for part in spec.parts:
            assert f"fused::{spec.name}_{part}" in OPS
        if spec.public:
            assert all(path.is_file() for path in kernel_sources(spec.name))
            assert spec.matches
            assert spec.near_misses


@pytest.mark.parametrize(
    "loss", [loss for loss in LOSSES if hasattr(F, loss) and loss not in COMPOSED]
)
def test_public_schema_follows_torch(loss):
    """Names, order and defaults are those of ATen's op; ours are keyword-only additions."""
    aten = next(row.aten for row in TABLE if row.name == loss)
    theirs = getattr(torch.ops.aten, aten).default._schema.arguments
    ours = getattr(torch.ops.fused, loss).default._schema.arguments
    expected = [("input" if a.name == "self" else a.name, a.default_value) for a in theirs]
    assert [(a.name, a.default_value) for a in ours[: len(theirs)]] == expected
    assert all(a.kwarg_only for a in ours[len(theirs) :])


def test_kernel_sources_have_no_torch_headers():
    for path in [
        *(ROOT / "csrc").glob("*.h"),
        *(ROOT / "csrc").glob("c*/*"),
        *(ROOT / "csrc/losses").rglob("*.h"),
    ]:
        assert "torch/" not in path.read_text(), f"{path} includes torch"


#: Modules that are about which device there is.
_OF_DEVICES = ("library.py", "facts.py", "device_constants.py", "implementations.py")


def test_binding_does_no_arithmetic_per_device():
    """The device is chosen by the build; only csrc/cuda knows CUDA's launch syntax."""
    for path in PACKAGE.rglob("*.py"):
        if path.parts[-2] == "demo" or path.name in _OF_DEVICES:
            continue
        assert '"cuda' not in path.read_text(), f"{path} hard-codes a device"


#: The package's modules by their names, and what each of them is made of.
MODULES = {
    ".".join(("compile_losses", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): ast.parse(path.read_text())
    for path in PACKAGE.rglob("*.py")
}


def run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but what only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from run(child)


def imported(module: str) -> set[str]:
    """The package's modules that a module imports, at its top or in a function.

    Not those around it, which Python imports before; nor what the package's ``__getattr__`` imports
    by name, when a user asks for it.
    """
    found = set()
    for node in run(MODULES[module]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return {name for name in found & MODULES.keys() if not module.startswith(f"{name}.")}


def test_no_import_cycle():
    graph = {module: imported(module) for module in MODULES}
    assert "compile_losses.sites" in graph["compile_losses.recognize"]
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the modules


#: So many lines that are no comments, one after another, may not stand in two places.
MOST_LINES_ALIKE = 14


def code_lines(path: Path) -> list[str]:
    lines = (" ".join(line.split()) for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith(("//", "#"))]


def places_alike(files: Iterable[Path]) -> list[set[tuple[str, int]]]:
    """The places, by file and number of the line of code, of lines that stand more than once."""
    places: defaultdict[tuple[str, ...], set[tuple[str, int]]] = defaultdict(set)
    for path in files:
        lines = code_lines(path)
        for first in range(len(lines) - MOST_LINES_ALIKE):
            places[tuple(lines[first : first + MOST_LINES_ALIKE + 1])].add((str(path), first))
    return [found for found in places.values() if len(found) > 1]


def test_no_lines_stand_twice():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    assert len(sources) > 50
    assert not places_alike([*sources, *PACKAGE.rglob("*.py")])


def test_lines_that_stand_twice_are_found(tmp_path):
    lines = [f"line {number};" for number in range(MOST_LINES_ALIKE + 1)]
    left, right = tmp_path / "left.h", tmp_path / "right.cuh"
    left.write_text("\n".join(["only here;", *lines]))
    right.write_text("\n  // a comment\n".join(lines))
    assert places_alike([left, right]) == [{(str(left), 1), (str(right), 0)}]
    right.write_text("\n".join(lines[1:]))
    assert not places_alike([left, right])


INTERNALS = "compile_losses.torch_internals"
#: What torch writes into its graphs by names of its own. ``val`` and ``stack_trace`` are not among
#: them: the documentation of torch.export has them.
KEYS = {
    "bw_donated_idxs",
    "custom",
    "dislike_padding",
    "eager_input_vals",
    "example_value",
    "fw_metadata",
    "grapharg",
    "recompute",
    "tangents",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names of torch, and the keys, that a module of the package uses.

    Any attribute with a private name counts, but for what a class of the package names so.
    ``aten._softmax`` is the name of an op, which graphs that
    are saved hold, and no private API.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            if node.attr not in OWN and base not in ("sys", "aten", "torch.ops.aten"):
                yield ast.unparse(node)
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in KEYS or node.value in PRIVATE_STRINGS:
                yield repr(node.value)
            continue
        else:
            continue
        for name in names:
            first, *others = name.split(".")
            if first in ("torch", "functorch") and any(map(is_private, others)):
                yield name


def own_names(tree: ast.Module) -> Iterator[str]:
    """The private names that a module's classes define: methods, and what they give ``self``."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


OWN = {n for m, tree in MODULES.items() if not m.startswith(INTERNALS) for n in own_names(tree)}
#: What the internals name; elsewhere ``getattr`` could ask for it.
PRIVATE_STRINGS = {
    node.attr
    for module, tree in MODULES.items()
    if module.startswith(INTERNALS)
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and is_private(node.attr)
} | {"_local_tensor", "_recursive_pre_grad_passes", "_recursive_post_grad_passes"}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith(INTERNALS)])
def test_no_private_name_of_torch(module):
    assert not list(private_names(MODULES[module]))


@pytest.mark.parametrize(
    "code",
    [
        "import torch._inductor",
        "from torch._ops import OpOverload",
        "from torch.nn import _reduction",
        "def f(t):\n    return t._version",
        "def f(op):\n    return torch.ops.fused.scale.default._schema",
        "getattr(op, '_overloadpacket')",
        "node.meta['eager_input_vals']",
        "torch._C._nn.linear",
    ],
)
def test_private_names_are_found(code):
    assert list(private_names(ast.parse(code)))


#: What changes a graph of torch.fx, and may be called by the tools for graphs alone.
CHANGES = {
    *("call_function", "call_method", "create_node", "erase_node", "node_copy", "placeholder"),
    *("prepend", "replace_all_uses_with", "replace_input_with"),
}
#: Modules that change graphs without the tools, and why.
OWN_CHANGES = {
    "compile_losses.guard": "puts back a graph as it was, by whatever it was changed",
    "compile_losses.lazy.inputs": "copies inputs as they are into a graph that it builds",
}


def changes(tree: ast.AST) -> Iterator[str]:
    """The expressions of a module that change a graph, or what is recorded of a node.

    A report in the meta of a whole module is no record of a node.
    """
    for node in run(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_of_meta = ast.unparse(node.func.value).endswith(".meta")
            if node.func.attr in CHANGES or (is_of_meta and node.func.attr in ("pop", "update")):
                yield ast.unparse(node.func)
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            text = ast.unparse(target)
            is_report = text.endswith(".meta['compile_losses']")
            is_module = isinstance(node, ast.Assign) and ast.unparse(node.value) == "dict(gm.meta)"
            if re.search(r"\.meta(\[.*\])?$", text) and not is_report and not is_module:
                yield text


@pytest.mark.parametrize("module", MODULES)
def test_graphs_are_changed_by_the_tools(module):
    """So each change counts as one, and each new node has a value and a place in the program."""
    if module.startswith("compile_losses.graphs"):
        return
    found = list(changes(MODULES[module]))
    assert bool(found) == (module in OWN_CHANGES), found


@pytest.mark.parametrize(
    "code",
    [
        "node.meta['val'] = value",
        "node.meta = {**like.meta}",
        "node.meta |= {'val': None}",
        "del node.meta[KEY]",
        "node.meta.pop(KEY, None)",
        "graph.call_function(op, args)",
        "node.graph.erase_node(node)",
        "node.replace_all_uses_with(other)",
    ],
)
def test_changes_of_graphs_are_found(code):
    assert list(changes(ast.parse(code)))


def test_public_ops_are_told_from_internal_ones():
    """By their names, by what ``help`` says, and by the reference, which has the public ones."""
    others = {"contrastive_loss", "linear_log_probs", "selective_log_softmax", "softmax_entropy"}
    public = {*LOSSES, *others, "two_way_cross_entropy"}
    assert set(documented_ops()) == public
    reference = (ROOT / "docs/api/ops.rst").read_text()
    for name in DECLARED:
        packet = getattr(torch.ops.fused, name)
        text = pydoc.plain(pydoc.render_doc(packet))
        assert packet.default.__doc__ == packet.__doc__
        if name in public:
            assert f"torch.ops.fused.{name}(" in text, name
        else:
            assert "Internal to compile_losses" in text
            assert f"compile_losses.ops.{name}\n" not in reference


def optional_packages():
    """The names, for imports, of what only some environments of the tests have."""
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    named = {
        extra: set(re.findall(r'"([\w-]+)', packages))
        for extra, packages in re.findall(r"^(\w+) = \[(.*)\]$", extras.partition("\n\n")[0], re.M)
    }
    names = {name.replace("-", "_") for name in set().union(*named.values()) - named["test"]}
    return names - {"pyelftools"} | {"elftools"}


def test_optional_packages_are_not_needed():
    """A test that needs one skips without it: an import of a module would end the whole run."""
    optional = optional_packages()
    assert "transformers" in optional
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            needed = {name.partition(".")[0] for name in names} & optional
            assert not needed, f"{path.relative_to(ROOT)} imports {needed}: pytest.importorskip"
