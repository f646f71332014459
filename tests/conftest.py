"""Devices, and a guard against suites that run nothing."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.guards
import torch._dynamo.utils
from torch._functorch._aot_autograd import graph_compile

from compile_losses import (
    functional,
    guard,
    implementations,
    inductor_passes,
    library,
)
from tests.conformance import ledger
from tests.constants import plan_small_as_large
from tests.graphs import interpreted, recorded
from tests.kernels import HAS_KERNELS, has_cuda_kernels, plan_bodies_as_kernels
from tests.linear_problems import blocks, chunks, either_way, exact_plan  # noqa: F401
from tests.opchecks import OpChecks

# The first exponentials of a process that two threads compute at once may have relative errors of
# 6e-11 in float64, with torch's own ops: MKL chooses its code meanwhile.
_threads = torch.get_num_threads()
torch.set_num_threads(1)
for _dtype in (torch.float32, torch.float64):
    torch.ones(64, dtype=_dtype).exp()
torch.set_num_threads(_threads)


#: Functions of torch that take time in each compilation or test, and results in their place.
UNREAD: list[tuple[Any, str, Any]] = [
    # Dynamo measures the guards of each graph after emptying the processor's caches: a fifth of the
    # time of a small graph without Inductor's code, for a number that no test reads.
    (torch._dynamo.guards, "profile_guard_manager", 0.0),
    # The graphs and the settings as text, for structured traces and records of each compilation.
    (graph_compile, "_log_joint_graph", None),
    (graph_compile, "_log_fw_bw_graphs", (None, None)),
    (torch._dynamo.utils, "_get_dynamo_config_for_logging", None),
    (torch._dynamo.utils, "_scrubbed_inductor_config_for_logging", None),
]
# A seed is kept for devices that may be found later, with the stack of the call as text.
UNREAD += [
    (module, "manual_seed_all", None)
    for module in (torch.cuda, torch.xpu, torch.mtia)
    if not module.is_available()
]


def pytest_configure(config: pytest.Config) -> None:
    """The workers of a run share the cores: two threads each, and as many for their children.
    Faults of the package end a compilation, and no process tells what it
    compiles first.
    """
    os.environ.setdefault("COMPILE_LOSSES_STRICT", "1")
    os.environ.setdefault("COMPILE_LOSSES_LOG", "0")
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "2")
        torch.set_num_threads(min(2, torch.get_num_threads()))
    for module, name, result in UNREAD:
        if hasattr(module, name):
            setattr(module, name, lambda *_, result=result, **__: result)
    # Compilations make many objects and little garbage: what is young is not collected after each.
    gc.set_threshold(50_000, 20, 100)
    torch._dynamo.config.run_gc_after_compile = False


#: Files whose tests share processes, and what these took long to compute.
OF_RANKS = tuple(
    f"tests/distributed/test_{name}.py"
    for name in ("processes", "benchmark", "contrastive", "trainers")
)
#: Its tests of a program share the graphs.
OF_PROGRAMS = "tests/passes/test_programs.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs the tests that share something. They come first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if file in OF_RANKS:
                return "ranks"
            program = test.partition("[")[2] if file == OF_PROGRAMS else ""
            return program or nodeid

        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            """Forgets what is through, which would be counted again after each of thousands."""
            for scope in [scope for scope, tests in workload.items() if all(tests.values())]:
                del workload[scope]
            return super()._pending_of(workload)

    return Scheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """-k finds a test by the op of the loss that its name has in other words."""
    words = re.sub(r"[^a-z0-9]+", "_", item.name.lower())
    for op in functional.__all__:
        module = op.replace("_", "")  # as in HuberLoss
        if f"_{op.removesuffix('_loss')}_" in f"_{words}_" or module in words:
            item.extra_keyword_matches.add(op)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is sampled all but one in so many are slow.

    After each case that is kept the next one is a place further on or back, so that all values of a
    parameter are in some of them, whatever their number.
    """
    counts: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("gpu") or item.get_closest_marker("slow"):
            continue
        (every,) = sampled.args
        name = item.nodeid.partition("[")[0]
        if (counts[name] + counts[name] // every) % every:
            item.add_marker(pytest.mark.slow)
        counts[name] += 1


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking through it for garbage took a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernels") and not HAS_KERNELS:
        pytest.skip(reason="about the kernels, which are not built or switched off")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(reason="needs a CUDA device")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Iterator[None]:
    """Pytest's handlers make torch write its structured traces, which no test reads: a tenth of the
    time of a compilation."""
    logger = logging.getLogger("torch.__trace")
    handlers, logger.handlers = logger.handlers, []
    try:
        return (yield)
    finally:
        logger.handlers = handlers


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not has_cuda_kernels():
        why = library.kernels["cuda"]
        assert why == implementations.OFF, f"a GPU without kernels: {why}"
    return request.param


@pytest.fixture(scope="module")
def opcheck() -> OpChecks:
    """torch.library.opcheck for the tests of a file, which share the traces of calls of a kind."""
    return OpChecks()


@pytest.fixture
def memory_given_back():
    """Tests that take gigabytes of a device leave them to those of other processes."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch):
    """The graphs of what a test compiles, see tests.graphs.recorded."""
    with recorded(monkeypatch) as found:
        yield found


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch):
    """For tests to which Inductor's code adds nothing, see tests.graphs.interpreted."""
    with interpreted(monkeypatch):
        yield


@pytest.fixture
def kernels_for_small_losses(monkeypatch: pytest.MonkeyPatch):
    """For tests of few numbers, whose losses are then planned as those of many numbers are.

    A package as shipped decomposes a small loss on a CPU into torch's own ops: its kernels do not
    run. A test asks for this fixture where it is about a plan, about a kernel in a compiled graph,
    or about the numbers that a compiled kernel returns. A test of the ops themselves or of what is
    recognised runs without it, and so does a test of what a user sees.
    """
    plan_small_as_large(monkeypatch)


@pytest.fixture(autouse=True)
def bodies_as_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Without built kernels, or with COMPILE_LOSSES_KERNELS=0, recognition and plans take the
    bodies of ops for kernels; and without a GPU those for a GPU are made as if its kernels were
    there.

    A test then runs the bodies where it is about ops, plans or programs, which know nothing of what
    computes an op. What is left to torch without kernels has tests of its own.
    """
    if request.node.get_closest_marker("bodies"):
        return
    plan_bodies_as_kernels(monkeypatch)


@pytest.fixture(params=["kernels", "as shipped"])
def small_losses(request: pytest.FixtureRequest) -> None:
    """For tests of what a user does with a model of few numbers: both ways of its loss.

    No loss is small on a GPU: a test that has a ``device`` takes the kernels alone.
    """
    if request.param == "kernels":
        request.getfixturevalue("kernels_for_small_losses")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Every test compiles anew, with the same random numbers and without passes of earlier tests,
    whose backwards may not have run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    inductor_passes.forget_backwards()


@pytest.fixture(autouse=True)
def no_faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """No program of a test may end in a fault of the package, also where the fault is only told:
    in a report, or as the plan that is not known. Tests that plant faults are marked so."""
    found = []

    def recorded(error: Exception) -> guard.Failure:
        failure = failure_of(error)
        found.append(failure.reason)
        return failure

    failure_of = guard.failure_of
    monkeypatch.setattr(guard, "failure_of", recorded)
    yield
    assert not found or request.node.get_closest_marker("planted"), found


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which nothing ran is a failure (pytest's own exit status 5 says so without -n)."""
    ledger.write()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    ran = sum(len(reporter.stats.get(kind, [])) for kind in ("passed", "failed", "error"))
    if exitstatus == 0 and ran == 0 and not session.config.option.collectonly:
        session.exitstatus = 5
