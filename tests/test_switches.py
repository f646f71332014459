"""What users switch on and off, and what is counted."""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses import __main__ as command_line
from compile_losses import switches
from compile_losses.inductor_passes import SLOTS, installed_rewrite
from compile_losses.library import public_ops
from compile_losses.options import OPTIONS, InvalidOptionError, Settings
from compile_losses.report.explanation import explain_call
from tests.graphs import recorded
from tests.specs import SPECS

pytestmark = pytest.mark.usefixtures("no_code")


def two_losses(x, t, labels):
    return F.mse_loss(x, t) + F.cross_entropy(x, labels)


def inputs():
    return torch.randn(64, 8, requires_grad=True), torch.randn(64, 8), torch.randint(8, (64,))


def ops_of(report):
    return {site.op for site in report.losses if site.status == "rewritten"}


@pytest.fixture
def counted():
    compile_losses.counters().clear()
    yield compile_losses.counters()
    compile_losses.counters().clear()


def compiled(way, **options):
    """Compiles two losses; their results are torch's whatever is switched."""
    torch._dynamo.reset()
    arguments = inputs()
    if way == "backend":
        function = torch.compile(two_losses, backend="compile_losses", options=options)
        loss = function(*arguments)
    else:
        with compile_losses.enable(**options):
            loss = torch.compile(two_losses)(*arguments)
    gradient = torch.autograd.grad(loss, arguments[0])
    expected = two_losses(*arguments)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, arguments[0]))


def test_names():
    assert {spec.public or spec.name for spec in SPECS.values()} <= set(public_ops())
    assert switches.losses() == sorted([*public_ops(), "elementwise"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["backend", "enable"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"mse_loss": 1, "cross_entropy": 1}),
        ({"losses": ["mse_loss"]}, {"mse_loss": 1}),
        ({"losses": []}, {}),
        ({"except": ["mse_loss", "elementwise"]}, {"cross_entropy": 1}),
        ({"losses": ["mse_loss"], "except": ["mse_loss"]}, {}),
    ],
    ids=str,
)
def test_chosen_losses(options, expected, way, counted):
    compiled(way, **options)
    assert counted["rewritten"] == expected
    assert sum(counted["declined"].values()) == 2 - len(expected)
    report = explain_call(two_losses, inputs(), options=options)
    assert ops_of(report) == set(expected)
    reasons = {site.reason for site in report.losses if site.status == "declined"}
    assert reasons <= {"it is not among the losses that options name"}


@pytest.mark.parametrize("way", ["backend", "enable"])
def test_chosen_in_the_environment(way, counted, monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_ONLY", "mse_loss, cross_entropy")
    monkeypatch.setenv("COMPILE_LOSSES_EXCEPT", "mse_loss")
    compiled(way)
    assert counted["rewritten"] == {"cross_entropy": 1}


def lines(x, t, labels):
    first = F.mse_loss(x, t)
    return first + F.cross_entropy(x, labels)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("folder", ["", "tests/", "./tests/", "../tests/", "whole"])
@pytest.mark.parametrize("way", ["option", "environment"])
def test_places(folder, way, monkeypatch):
    """A line that is left out, as a report writes it, and no other one."""
    file = __file__ if folder == "whole" else f"{folder}test_switches.py"
    if folder == "../tests/":
        file = "other/../tests/test_switches.py"
    line = lines.__code__.co_firstlineno
    options = None
    if way == "option":
        options = {"except": [f"{file}:{line + 1}"]}
    else:
        monkeypatch.setenv("COMPILE_LOSSES_EXCEPT", f"{file}:{line + 1}")
    report = explain_call(lines, inputs(), options=options)
    sites = {site.op: site for site in report.losses}
    assert sites["cross_entropy"].status == "rewritten"
    assert sites["mse_loss"].status == "declined"
    assert sites["mse_loss"].reason.startswith("options leave out ")


def entropies(h, w):
    logits = F.linear(h, w)
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def of_logits(x, labels):
    loss = F.cross_entropy(x, labels)
    return loss - (x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean()


@pytest.mark.parametrize(("function", "left"), [(entropies, set()), (of_logits, {"cross_entropy"})])
def test_places_of_what_several_losses_share(function, left, chunks):
    """An entropy has no op of its own, but a line."""
    given = {
        entropies: (torch.randn(64, 8, requires_grad=True), torch.randn(50, 8)),
        of_logits: (torch.randn(64, 5000, requires_grad=True), torch.randint(5000, (64,))),
    }[function]
    assert len(ops_of(explain_call(function, given)) - {"cross_entropy"}) == 1
    name = f"test_switches.py:{function.__code__.co_firstlineno + 2}"
    report = explain_call(function, given, options={"except": [name, "elementwise"]})
    assert ops_of(report) == left


@pytest.mark.parametrize("file", ["switches.py", "other/test_switches.py"])
def test_other_places(file):
    name = f"{file}:{lines.__code__.co_firstlineno + 1}"
    assert len(ops_of(explain_call(lines, inputs(), options={"except": [name]}))) == 2


def test_places_and_strictness_enter_the_keys_of_caches():
    """What a fault was left out of is not found by a user who wants to see the fault."""
    keys = {Settings.of(None, {"except": names}).key for names in (["a.py:1"], ["a.py:2"], [])}
    assert len(keys) == 3
    assert len({Settings.of(None, {"strict": strict}).key for strict in (True, False)}) == 2


def test_a_head_without_its_op(chunks, counted):
    """Where linear cross entropy is not wanted the cross entropy still is."""

    def step(h, w, t):
        return F.cross_entropy(F.linear(h, w), t)

    h, w, t = torch.randn(64, 8, requires_grad=True), torch.randn(50, 8), torch.randint(50, (64,))
    report = explain_call(step, (h, w, t), options={"except": ["linear_cross_entropy"]})
    assert ops_of(report) == {"cross_entropy"}
    assert ops_of(compile_losses.explain(step, h, w, t)) == {"linear_cross_entropy"}


@pytest.mark.parametrize("way", ["backend", "enable"])
def test_off(way, counted, monkeypatch):
    """The graphs are then torch's own."""
    monkeypatch.setenv("COMPILE_LOSSES", "0")
    with recorded(monkeypatch) as graphs:
        compiled(way)
    assert counted == {}
    assert "fused" not in "".join(graphs["post"])
    report = compile_losses.explain(two_losses, *inputs())
    assert any("COMPILE_LOSSES=0" in error for error in report.errors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["backend", "enable"])
@pytest.mark.parametrize("passes", ["rewrite", "rewrite,plan", "rewrite,in_place", "plan"])
def test_passes(passes, way, counted, monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", passes)
    compiled(way)
    assert bool(counted["rewritten"]) == ("rewrite" in passes)
    planned = [choice for choice in counted["plan"] if not choice.startswith("gradient in")]
    assert bool(planned) == (passes == "rewrite,plan")


def test_keys_of_caches(monkeypatch):
    """A graph that was compiled with other switches is another one."""
    from compile_losses.inductor_passes import InPlacePass, PlanPass, RewritePass

    passes = [kind(None) for kind in (RewritePass, PlanPass, InPlacePass)]
    seen = {each.uuid() for each in passes}
    for variable in switches.VARIABLES:
        with monkeypatch.context() as patch:
            names = {"COMPILE_LOSSES_PASSES": "plan", "COMPILE_LOSSES_ONLY": "mse_loss"}
            names["COMPILE_LOSSES_EXCEPT"] = "mse_loss"
            patch.setenv(variable, names.get(variable, "1"))
            assert not seen & {each.uuid() for each in passes}, variable


def test_both_doors_have_the_same_options():
    """And the same defaults, in the record that the passes read."""
    keywords = inspect.signature(compile_losses.enable).parameters
    named = {name.removesuffix("_") for name in keywords if name != "others"}
    assert named == set(OPTIONS)
    assert all(p.default is None for p in keywords.values() if p.name != "others")
    given = {
        "losses": ["mse_loss"],
        "except": ["kl_div"],
        "known_heads": False,
        "lazy_logits": False,
        "prefer_memory": True,
        "batch_invariant": False,
        "kernels": switches.uses_kernels(),  # of the process: as they are
        "verify": True,
        "strict": False,
        "inner_backend": "eager",
    }
    assert set(given) == set(OPTIONS)
    for options in ({}, given):
        backend = Settings.of(None, options)
        with compile_losses.enable(**options):
            enabled = installed_rewrite().settings
            assert enabled.door == "enable"
            assert replace(enabled, door="backend") == replace(backend, inductor=None)
            for slot in SLOTS:
                assert getattr(torch._inductor.config, slot).settings is enabled


def test_options_of_nested_blocks():
    def options():
        settings = installed_rewrite().settings
        return settings.verify, settings.prefer_memory, settings.only

    with compile_losses.enable(verify=True, losses=["mse_loss"]):
        with compile_losses.enable(prefer_memory=True, losses=[]):
            assert options() == (True, True, ())
        assert options() == (True, None, ("mse_loss",))


def test_prefers_memory(graphs):
    """An option of enable() that the plan reads as well as recognition."""

    def step(h, w, t):
        return F.cross_entropy(F.linear(h, w), t, reduction="none").square().square().sum()

    h, w, t = torch.randn(64, 8, requires_grad=True), torch.randn(50, 8), torch.randint(50, (64,))
    for prefer_memory in (False, True):
        with compile_losses.enable(prefer_memory=prefer_memory):
            first = installed_rewrite()
            assert first.settings.request.prefer_memory == prefer_memory
            assert prefer_memory in first.uuid()
            torch.compile(step)(h, w, t)


def test_another_backend_behind_enable():
    graphs = []

    def keep(gm, _):
        graphs.append(gm.code)
        return gm.forward

    with compile_losses.enable(inner_backend=keep):
        torch.compile(F.mse_loss)(*inputs()[:2])
    assert "fused" in graphs[0]


WRONG = [
    ({"losses": ["mse"]}, r"losses: expected some of .*mse_loss.*, got 'mse'\. Did .*'mse_loss'"),
    ({"except": ["ce"]}, r"except: .*got 'ce'\. Did you mean 'cross_entropy'\?"),
    ({"losses": "mse_loss"}, "losses: expected a list of names, got 'mse_loss'"),
    ({"losses": [3]}, r"losses: expected a list of names, got \[3\]"),
    ({"verify": "yes"}, "verify: expected True or False, got 'yes'"),
    ({"strict": 1}, "strict: expected True or False, got 1"),
    ({"prefer_memory": "1"}, "prefer_memory: expected True or False, got '1'"),
    ({"lazy_logits": []}, r"lazy_logits: expected True, False or 'auto', got \[\]"),
    ({"lazy_logits": "always"}, "lazy_logits: expected True, False or 'auto', got 'always'"),
    ({"lazy_logits": 1}, "lazy_logits: expected True, False or 'auto', got 1"),
    ({"inner_backend": "aot_eagr"}, r"inner_backend: .*got 'aot_eagr'\. Did you mean 'aot_eager'"),
    ({"inner_backend": 3}, "inner_backend: expected the name of a backend, got 3"),
    ({"verfy": True}, r"unknown option 'verfy'\. Did you mean 'verify'\? compile_losses has"),
    ({"quite": True}, r"unknown option 'quite'\."),
    ({"lazy-logits": True}, r"unknown option 'lazy-logits'\. Did you mean 'lazy_logits'\?"),
    ({"quite_another": True}, "unknown option 'quite_another'\\. compile_losses has losses"),
]


@pytest.mark.parametrize("way", ["backend", "enable"])
@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_wrong_options(options, message, way):
    with pytest.raises(RuntimeError, match=message) as raised:
        compiled(way, **options)
    assert isinstance(raised.value, InvalidOptionError)
    assert len(str(raised.value)) < 1500
    assert installed_rewrite() is None


def test_options_of_inductor(monkeypatch):
    """The backend takes them, enable() says where they go, and a wrong one is told from ours."""
    assert Settings.of(None, {"max-autotune": True}).inductor.config == {"max_autotune": True}
    with pytest.raises(InvalidOptionError, match=r"'max_autotune' is an option of Inductor: torch"):
        compile_losses.enable(max_autotune=True)
    with pytest.raises(InvalidOptionError, match=r"Did you mean 'max_autotune'\? compile_losses"):
        Settings.of(None, {"max_autotun": True})
    with pytest.raises(InvalidOptionError, match=r"options: expected a dictionary, got \[1\]"):
        Settings.of(None, [1])


def test_hints_have_the_form_of_the_door(chunks, monkeypatch):
    def step(h, w, t):
        logits = F.linear(h, w)
        return F.cross_entropy(logits, t), logits

    def hints(options=None):
        h, w = torch.randn(64, 8, requires_grad=True), torch.randn(50, 8)
        inputs = h, w, torch.randint(50, (64,))
        report = explain_call(step, inputs, options=options)
        return " ".join(site.reason for site in report.sites)

    assert ": options={'lazy_logits': True} would save" in hints({"lazy_logits": False})
    with compile_losses.enable(lazy_logits=False):
        assert ": enable(lazy_logits=True) would save" in hints()


def test_wrong_names_in_the_environment(monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", "move")
    with pytest.raises(RuntimeError, match="COMPILE_LOSSES_PASSES: expected some of rewrite"):
        compile_losses.enable()


def test_one_line_a_graph(caplog):
    with caplog.at_level(logging.INFO, logger="compile_losses"):
        compiled("backend")
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert [line for line in lines if "rewritten" in line] == ["1 graph, 2 losses, 2 rewritten"]


SCRIPT = """
import torch
import torch.nn.functional as F

x, t = torch.randn(64, 8, requires_grad=True), torch.rand(64, 8)

def step():
    return F.mse_loss(x, t) + F.binary_cross_entropy(x.sigmoid(), t)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "script.py:step"


def test_explain_as_json_and_page(script, tmp_path, capsys):
    assert command_line.main(["explain", script, "--json", "--html", "report.html"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {site["op"] for site in told["sites"]} >= {"mse_loss"}
    assert "mse_loss" in (tmp_path / "report.html").read_text()


def test_explain_fails_on_what_is_declined(script, capsys):
    options = ["--options", '{"except": ["mse_loss"]}']
    assert command_line.main(["explain", script, *options]) == 0
    assert command_line.main(["explain", script, *options, "--fail-on", "declined"]) == 1
    assert "not among the losses that options name" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("arguments", [["--mode", "faster"], ["--options", '{"losses": ["mse"]}']])
def test_explain_with_what_there_is_not(script, arguments):
    with pytest.raises(SystemExit, match=r"Unrecognized mode|expected some of"):
        command_line.main(["explain", script, *arguments])


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_options_are_json(script, text, capsys):
    with pytest.raises(SystemExit):
        command_line.main(["explain", script, "--options", text])
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("door", "on", "off"),
    [
        ("backend", "options={'verify': True}", "options={'verify': False}"),
        ("enable", "enable(verify=True)", "enable(verify=False)"),
        ("environment", "COMPILE_LOSSES_VERIFY=1", "COMPILE_LOSSES_VERIFY=0"),
    ],
)
def test_hints_in_the_form_of_the_door(door, on, off):
    with switches.through(door):
        assert (switches.how_to_set("verify"), switches.how_to_set("verify", False)) == (on, off)
