"""Each private name of torch that the package uses, on the torch that is installed."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from compile_losses import backend, torch_internals
from compile_losses.graphs import emit
from compile_losses.library import PACKAGE
from compile_losses.torch_internals import (
    dtensors,
    dynamo,
    eager,
    graphs,
    inductor,
    ops,
    symbols,
    tensors,
)

aten = torch.ops.aten

#: The check of each public name: ``module.name``.
CHECKS: dict[str, Callable[[], Any]] = {}


def checks(*names: str):
    """Registers a check for names of one module."""

    def register(function):
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def public_names() -> list[str]:
    """What the modules define for the rest of the package."""
    found = []
    for path in sorted((PACKAGE / "torch_internals").glob("*.py")):
        module = "" if path.stem == "__init__" else f"{path.stem}."
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.FunctionDef):
                names = [node.name]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.asname for alias in node.names if alias.asname]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            found += [f"{module}{name}" for name in names if not name.startswith("_")]
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", public_names())
def test_name(name):
    CHECKS[name]()


def test_no_check_is_left_over():
    assert CHECKS.keys() == set(public_names())


def captured(function, *inputs) -> torch.fx.Graph:
    """The graph that Dynamo makes of a function."""
    found = []

    def keep(gm, _):
        found.append(gm.graph)
        return gm.forward

    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    (graph,) = found
    return graph


# The package itself


@checks("NEWEST_TESTED", "warn_if_untested")
def newest_tested():
    def warned(version: str) -> list[str]:
        torch_internals.warn_if_untested.cache_clear()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(torch, "__version__", version)
            for _ in range(2):
                torch_internals.warn_if_untested()
        return [str(w.message) for w in caught]

    major, minor = torch_internals.NEWEST_TESTED
    try:
        assert not warned(torch.__version__)
        assert not warned(f"{major}.{minor}.7+cu130")
        for newer in (f"{major}.{minor + 1}.0.dev20300101+cpu", f"{major + 1}.0.0"):
            (message,) = warned(newer)
            assert newer in message
    finally:
        torch_internals.warn_if_untested.cache_clear()


def test_newer_torch_warns_once_and_works(monkeypatch):
    monkeypatch.setattr(torch_internals, "NEWEST_TESTED", (2, 0))
    torch_internals.warn_if_untested.cache_clear()
    a, b = torch.rand(4), torch.rand(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in (1, 2):
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda a, b, f=factor: f * F.mse_loss(a, b),
                backend="compile_losses",
                options={"inner_backend": "aot_eager"},
            )
            torch.testing.assert_close(compiled(a, b), factor * F.mse_loss(a, b))
    assert sum("compile_losses was tested with" in str(w.message) for w in caught) == 1
    torch_internals.warn_if_untested.cache_clear()


# ops


@checks("ops.HigherOrderOperator", "ops.OpOverload", "ops.OpOverloadPacket")
def classes_of_ops():
    assert type(aten.add.Tensor) is ops.OpOverload
    assert type(aten.add) is ops.OpOverloadPacket
    assert isinstance(torch.ops.higher_order.cond, ops.HigherOrderOperator)


@checks("ops.compute_elementwise_output_strides")
def strides():
    a, b = torch.empty(3, 4).t(), torch.empty(4, 3)
    assert ops.compute_elementwise_output_strides(a, b) == (a + b).stride()


@checks("ops.take_back")
def replaced_kernels():
    library = torch.library.Library("fused", "IMPL")
    try:
        library.impl("scale", lambda grad, factor: grad + 1, "CPU", allow_override=True)
        assert torch.ops.fused.scale(torch.ones(2), torch.tensor(3.0)).tolist() == [2, 2]
    finally:
        ops.take_back(library)
    assert torch.ops.fused.scale(torch.ones(2), torch.tensor(3.0)).tolist() == [3, 3]


@checks("ops.legacy_get_string")
def legacy_reduction():
    assert ops.legacy_get_string(False, None, emit_warning=False) == "sum"
    assert ops.legacy_get_string(None, False, emit_warning=False) == "none"


@checks("ops.tree_leaves", "ops.tree_map", "ops.tree_map_only")
def trees():
    tree = {"a": [1, 2.0], "b": (3,)}
    assert ops.tree_leaves(tree) == [1, 2.0, 3]
    assert ops.tree_map(lambda x: x + 1, tree) == {"a": [2, 3.0], "b": (4,)}
    assert ops.tree_map_only(int, lambda x: 0, tree) == {"a": [0, 2.0], "b": (0,)}


@checks("ops.enter_autocast", "ops.exit_autocast")
def autocast_in_a_graph():
    graphs = []

    def keep(gm, _):
        graphs.append(gm.graph)
        return gm.forward

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    torch.compile(function, backend=keep)(torch.ones(2, 2))
    (enter,) = graphs[0].find_nodes(op="call_function", target=ops.enter_autocast)
    assert enter.args[:3] == ("cpu", torch.bfloat16, True)
    (leave,) = graphs[0].find_nodes(op="call_function", target=ops.exit_autocast)
    assert leave.args == (enter,)


@checks("ops.nn_functions")
def nn_functions():
    assert ops.nn_functions.linear is F.linear
    a = torch.rand(3)
    torch.testing.assert_close(ops.nn_functions.mse_loss(a, a + 1, 1), torch.tensor(1.0))


@checks("ops.SIZE_ASSERTIONS")
def size_assertions():
    def function(x):
        size = x.max().item()
        torch._check(size >= 2)
        return torch.zeros(size)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = captured(function, torch.tensor([2, 3]))
    assert any(node.target in ops.SIZE_ASSERTIONS for node in graph.nodes)


@checks(
    "ops.AUTOGRAD_KEY", "ops.call_boxed", "ops.exclude", "ops.is_excluded", "ops.BelowAutograd",
    "ops.handle_of",
)  # fmt: skip
def below_autograd():
    x = torch.rand(3, requires_grad=True)
    handle = ops.handle_of(aten.exp.default)
    assert ops.call_boxed(handle, x).requires_grad
    before = ops.is_excluded(ops.AUTOGRAD_KEY)
    assert not before
    ops.exclude(ops.AUTOGRAD_KEY, True)
    try:
        assert ops.is_excluded(ops.AUTOGRAD_KEY)
        assert not ops.call_boxed(handle, x).requires_grad
    finally:
        ops.exclude(ops.AUTOGRAD_KEY, before)
    with ops.BelowAutograd():
        assert not aten.exp.default(x).requires_grad
    assert aten.exp.default(x).requires_grad


@checks("ops.call_of", "ops.replace_call")
def calls():
    op, seen = aten.exp.default, []
    original = ops.call_of(op)

    class Call:
        """Its hash is the overload's, which others have looked up before."""

        def __hash__(self):
            return hash(original)

        def __call__(self, *args):
            seen.append(args)
            return original(*args)

    x = torch.rand(3)
    ops.replace_call(op, Call())
    try:
        assert op(x).equal(x.exp())
    finally:
        ops.replace_call(op, original)
    assert seen == [(x,)]


@checks("ops.BelowViews")
def below_views():
    key = torch._C.DispatchKey.ADInplaceOrView
    assert not ops.is_excluded(key)
    with ops.BelowViews():
        assert ops.is_excluded(key)
    assert not ops.is_excluded(key)


@checks("ops.has_kernel", "ops.key_of_device")
def kernels():
    assert ops.has_kernel("aten::addmm", ops.key_of_device("cpu"))
    assert not ops.has_kernel("fused::scale_", ops.key_of_device("mps"))


@checks("ops.schema_of", "ops.packet_of")
def schemas():
    assert [a.name for a in ops.schema_of(aten.mm.default).arguments] == ["self", "mat2"]
    assert ops.schema_of(aten.add_.Tensor).is_mutable
    assert ops.packet_of(aten.add.Tensor) is aten.add


@checks("ops.given_arguments", "ops.named_arguments")
def arguments_by_name():
    given = ops.given_arguments(aten.sum.dim_IntList, (1, [0]), {"keepdim": True})
    assert given == {"self": 1, "dim": [0], "keepdim": True}
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.sum.dim_IntList, (x, [0]), {"keepdim": True})
    assert ops.named_arguments(node) == {"self": x, "dim": [0], "keepdim": True, "dtype": None}


@checks("ops.with_defaults")
def arguments_left_out():
    for op, given, whole in [
        (aten.sum.dim_IntList, ("a", [0]), ("a", [0], False)),
        (aten.slice.Tensor, ("a",), ("a", 0, None, None, 1)),
        (aten.clamp.default, ("a", 0), ("a", 0, None)),
        (aten.add.Scalar, ("a", 1), ("a", 1)),  # and no multiple
        (aten.rsub.Scalar, ("a", 1, 3), ("a", 1, 3)),
        (aten.mse_loss.default, ("a", "b"), ("a", "b", 1)),
        (aten.zeros_like.default, ("a",), ("a",)),  # only keywords follow
    ]:
        assert ops.with_defaults(op, given) == whole


@checks("ops.is_pure", "ops.draws_random_numbers")
def pure_ops():
    assert ops.is_pure(aten.add.Tensor)
    assert not any(map(ops.is_pure, (aten.add_.Tensor, aten.rand_like.default, torch.add)))
    assert ops.draws_random_numbers(aten.rand_like.default)
    assert not any(map(ops.draws_random_numbers, (aten.add.Tensor, torch.rand_like)))


@checks("ops.communicates")
def ops_of_process_groups():
    if not torch.distributed.is_available():
        return
    importlib.import_module("torch.distributed._functional_collectives")  # which loads them
    found = torch.ops._c10d_functional
    sends = (found.all_reduce.default, found.all_gather_into_tensor.default)
    assert all(map(ops.communicates, (*sends, torch.ops.c10d.allreduce_.default)))
    assert not any(map(ops.is_pure, sends))
    assert not any(map(ops.communicates, (found.wait_tensor.default, aten.add.Tensor, torch.add)))


# eager


@checks("eager.not_compiled")
def dynamo_stays_out():
    def inside(x):
        return x.sin(), torch.compiler.is_compiling()

    graphs = []
    backend = lambda gm, _: graphs.append(gm) or gm.forward  # noqa: E731
    result, compiling = torch.compile(eager.not_compiled(inside), backend=backend)(torch.zeros(2))
    assert not graphs
    assert not compiling
    assert not result.any()


@checks("eager.is_functorch_wrapped_tensor", "eager.get_unwrapped", "eager.is_legacy_batchedtensor")
def functorch():
    x = torch.rand(2, 3)

    def inside(row):
        assert eager.is_functorch_wrapped_tensor(row)
        assert eager.in_a_mode()
        assert eager.get_unwrapped(row).shape == x.shape
        return row

    torch.func.vmap(inside)(x)
    assert not eager.is_functorch_wrapped_tensor(x)
    assert not eager.is_legacy_batchedtensor(x)

    seen = []
    y = x.requires_grad_().square().sum(0)
    y.register_hook(lambda grad: seen.append(eager.is_legacy_batchedtensor(grad)))
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert seen == [True]


@checks("eager.DeviceContext", "eager.count_function_modes", "eager.function_modes")
def function_modes():
    assert eager.function_modes() == []
    assert eager.count_function_modes() == 0
    with torch.device("cpu"):
        assert eager.count_function_modes() == 1
        (mode,) = eager.function_modes()
        assert isinstance(mode, eager.DeviceContext)


@checks("eager.TorchDispatchMode", "eager.no_modes", "eager.in_a_mode")
def dispatch_modes():
    seen = []

    class Recorder(eager.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.rand(3)
    assert not eager.in_a_mode()
    with Recorder():
        assert eager.in_a_mode()
        _ = x + 1
        with eager.no_modes():
            assert not eager.in_a_mode()
            _ = x * 2
    assert seen == [aten.add.Tensor]


@checks("eager.is_any_autocast_enabled")
def autocast():
    assert not eager.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert eager.is_any_autocast_enabled()


@checks("eager.retains_graph")
def retains_graph():
    seen = []
    x = torch.rand(3, requires_grad=True)
    loss = x.square().sum()
    x.register_hook(lambda _: seen.append(bool(eager.retains_graph())))
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


@checks("eager.NO_TORCH_FUNCTION")
def no_torch_function():
    override = torch.nn.Parameter.__torch_function__
    assert getattr(override, "__func__", override) is eager.NO_TORCH_FUNCTION


@checks("eager.backward_number", "eager.is_on_the_way")
def backwards():
    x = torch.ones(2, requires_grad=True)
    side, way = x.detach().requires_grad_() * 1, x * 1
    seen = []

    def note(grad):
        nodes = side.grad_fn, way.grad_fn
        seen.append((eager.backward_number(), *map(eager.is_on_the_way, nodes)))

    total = (side + way).sum()
    total.register_hook(note)
    assert eager.backward_number() == -1
    total.backward(retain_graph=True)
    torch.autograd.grad(total, x)
    (first, *everything), (second, *of_input) = seen
    assert -1 != first != second
    assert everything == [True, True]
    assert of_input == [False, True]


@checks("dynamo.code_that_is_compiled", "dynamo.forget_compiled")
def compiled_code():
    seen = []

    def keep(gm, _):
        seen.append(dynamo.code_that_is_compiled())
        return gm.forward

    def function(x):
        return x * 2

    compiled, x = torch.compile(function, backend=keep), torch.ones(1)
    for _ in range(2):
        compiled(x)
    assert seen == [function.__code__]
    dynamo.forget_compiled(function.__code__)
    assert compiled(x) == 2
    assert seen == [function.__code__] * 2
    assert dynamo.code_that_is_compiled() is None


@checks("dynamo.leave_to_eager")
def left_to_eager():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an op of a test has to run as it is"):
        dynamo.leave_to_eager("an op of a test")


@checks("dynamo.compiles_backwards")
def compiled_backwards():
    assert not dynamo.compiles_backwards()
    with torch._dynamo.compiled_autograd._enable(lambda gm: gm):
        assert dynamo.compiles_backwards()


@checks("eager.keeps_saved_tensors_elsewhere")
def saved_tensors():
    assert not eager.keeps_saved_tensors_elsewhere()
    with torch.autograd.graph.save_on_cpu():
        assert eager.keeps_saved_tensors_elsewhere()


@checks("dynamo.may_compile")
def stances():
    assert dynamo.may_compile()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert not dynamo.may_compile()


@checks("tensors.taking_symbols")
def ops_of_symbols():
    graph = make_fx(torch.sin, tracing_mode="symbolic")(torch.ones(4, 6, 3))
    x = next(iter(graph.graph.nodes)).meta["val"]
    assert isinstance(x.shape[0], torch.SymInt)
    with x.fake_mode, tensors.taking_symbols():
        weight = x.fake_mode.from_tensor(torch.ones(5, 3), static_shapes=True)
        assert torch.ops.aten.linear.default(x, weight).dim() == 3


@checks("tensors.is_gathered_for_one_use")
def gathered_weights():
    weight = torch.nn.Parameter(torch.ones(4, 2))
    assert not tensors.is_gathered_for_one_use(weight)
    assert tensors.is_gathered_for_one_use(weight[:2])
    weight.ds_id = 3
    assert tensors.is_gathered_for_one_use(weight)


@checks("tensors.FunctionalTensor", "tensors.with_memory_of")
def functional_tensors():
    class Viewed(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            like = torch.empty(2, 5, device="meta")[0]
            view = tensors.make_wrapper(Viewed, like, torch.device("cpu"))
            return tensors.with_memory_of(args, view, func, kwargs)

    whole = tensors.make_wrapper(Viewed, torch.empty(2, 5, device="meta"), torch.device("cpu"))
    view = torch.ops.aten.select.int(whole, 0, 0)
    assert tensors.storage_id(view) == tensors.storage_id(whole)

    mode = torch._subclasses.functional_tensor.FunctionalTensorMode()
    with mode:
        assert isinstance(tensors.FunctionalTensor.to_functional(torch.ones(2)), torch.Tensor)


@checks("dynamo.in_compiled_backward")
def compiled_backward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    total = (x * 2).sum()

    def keep(gm):
        seen.append(dynamo.in_compiled_backward())
        return gm

    total.register_hook(lambda grad: seen.append(dynamo.in_compiled_backward()))
    with torch._dynamo.compiled_autograd._enable(keep):
        total.backward()
    assert True in seen
    assert not dynamo.in_compiled_backward()


@checks("eager.at_end_of_backward")
def end_of_backward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    total = (x * 2).sum()
    total.register_hook(lambda _: eager.at_end_of_backward(lambda: seen.append(x.grad is not None)))
    total.backward()
    assert seen == [True]


@checks("eager.is_tracing")
def tracing():
    seen = []

    def keep(gm, inputs):
        seen.append(eager.is_tracing())
        return gm.forward

    torch.compile(torch.sin, backend=keep)(torch.rand(2))
    assert seen == [True]
    assert not eager.is_tracing()


@checks("eager.recording")
def recording():
    class Inside(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            x = torch.ones(2, requires_grad=True)
            with eager.recording():
                return torch.tensor([(x * 2).requires_grad, True])

    wrapper = tensors.make_wrapper(Inside, torch.empty(2, device="meta"), torch.device("cpu"))
    assert torch.sin(wrapper).all()
    with eager.recording():
        assert (torch.ones(2, requires_grad=True) * 2).requires_grad


@checks("eager.in_forward_mode")
def forward_mode():
    assert not eager.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert eager.in_forward_mode()
        assert eager.in_a_mode()


# tensors


@checks("tensors.FakeTensor", "tensors.FakeTensorMode")
def fakes():
    with tensors.FakeTensorMode() as mode:
        fake = torch.empty(3)
    assert type(fake) is tensors.FakeTensor
    assert fake.fake_mode is mode


@checks("tensors.storage_id")
def storages():
    with tensors.FakeTensorMode():
        a, b = torch.empty(4), torch.empty(4)
        assert tensors.storage_id(a) == tensors.storage_id(a[2:]) != tensors.storage_id(b)


@checks("tensors.StorageWeakRef", "tensors.storage_behind")
def weak_storages():
    whole = torch.empty(4)
    part, weak = whole[:1], tensors.StorageWeakRef(whole.untyped_storage())
    del whole
    assert weak.cdata == tensors.storage_id(part)
    storage = tensors.storage_behind(weak)
    storage.resize_(0)
    storage.resize_(8)
    assert part.untyped_storage().nbytes() == 8
    del part, storage
    assert weak.expired()
    assert tensors.storage_behind(weak) is None
    others = [torch.empty(4) for _ in range(100)]
    assert weak.cdata not in map(tensors.storage_id, others)


@checks("tensors.size_hint")
def hints():
    found = []

    def keep(gm, inputs):
        found.extend(tensors.size_hint(i) for i in inputs if isinstance(i, torch.SymInt))
        return gm.forward

    torch.compile(torch.sin, backend=keep, dynamic=True)(torch.rand(7))
    assert found == [7]
    assert tensors.size_hint(ShapeEnv().create_unbacked_symint()) is None
    assert tensors.size_hint(3) == 3


@checks("tensors.version_of")
def versions():
    x = torch.rand(3)
    before = tensors.version_of(x)
    x[0] = 1
    assert tensors.version_of(x) > before


@checks("tensors.base_of", "tensors.counter_of", "tensors.writes_of_making")
def counters_of_writes():
    """Of views, and of tensors that tracing makes of such as share memory."""
    whole = torch.rand(4)
    assert tensors.base_of(whole) is tensors.base_of(whole[1:][1:]) is whole
    assert tensors.counter_of(whole) == tensors.counter_of(whole[1:][1:])
    assert tensors.counter_of(whole) != tensors.counter_of(whole.data)
    first, second = (torch.empty(0).set_(whole.untyped_storage(), start, (2,)) for start in (0, 2))
    for order in ((first, second), (second, first)):
        mode = tensors.FakeTensorMode()
        fakes = [mode.from_tensor(tensor) for tensor in order]
        assert tensors.version_of(fakes[1]) == tensors.writes_of_making()
        for fake, tensor in zip(fakes, order, strict=True):
            starts_within = tensor.storage_offset() > 0
            assert starts_within <= (tensors.version_of(fake) == tensors.writes_of_making())
    assert tensors.version_of(tensors.FakeTensorMode().from_tensor(first)) == 0


@checks("symbols.Expression", "symbols.expression_of", "symbols.symbols_of", "symbols.computed")
def symbolic_sizes():
    """A size that is read from a product, as a node of the inputs' symbols."""

    def function(x):
        y = torch.cat([x, x]) @ x.t()
        return x.new_ones(y.shape[0] + 3)

    graph = make_fx(function, tracing_mode="symbolic")(torch.ones(4, 5)).graph
    (input,) = graph.find_nodes(op="placeholder")
    size = max(n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt))
    value = size.meta["val"]
    (symbol,) = symbols.symbols_of(value)
    assert symbol == symbols.expression_of(input.meta["val"].shape[0])
    with graph.inserting_after(input):
        read = graph.call_function(aten.sym_size.int, (input, 0))
        read.meta["val"] = input.meta["val"].shape[0]
    put = partial(emit, read.next, like=read)
    node = symbols.computed(symbols.expression_of(value), {symbol: read}, put)
    assert symbols.expression_of(node.meta["val"]) == symbols.expression_of(value)
    assert node < size


@checks("symbols.specialise")
def specialised_sizes():
    """One of two sizes that are multiplied is made a number; the others stay symbols."""

    def function(x, y):
        symbols.specialise(x.shape, x.view(-1))
        symbols.specialise(y.shape, y[:-1])
        return x, y

    graph = make_fx(function, tracing_mode="symbolic")(torch.ones(4, 5), torch.ones(6, 7)).graph
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    is_number = [not symbols.symbols_of(size) for shape in shapes for size in shape]
    assert is_number == [True, False, False, False]


@checks("eager.without_saved_tensors_hooks")
def saved_tensors_without_hooks():
    saved = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each):
        with eager.without_saved_tensors_hooks():
            x.exp().sum().backward()
        assert not saved
        x.exp()
    assert saved


class Wrapper(torch.Tensor):
    """Has no memory; every op returns 7."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.tensor(7)


@checks("tensors.make_wrapper")
def wrappers():
    like = torch.empty(5, 3, dtype=torch.bfloat16, device="meta").t()[1:]
    wrapper = tensors.make_wrapper(Wrapper, like, torch.device("cpu"))
    assert type(wrapper) is Wrapper
    assert (wrapper.shape, wrapper.stride(), wrapper.storage_offset()) == ((2, 5), (1, 3), 1)
    assert (wrapper.dtype, wrapper.device) == (torch.bfloat16, torch.device("cpu"))
    assert torch.sin(wrapper).item() == 7


@checks("tensors.without_dispatch")
def without_dispatch():
    wrapper = tensors.make_wrapper(Wrapper, torch.empty(2, 5, device="meta"), torch.device("cpu"))
    with tensors.without_dispatch():
        wrapper.t_()
    assert wrapper.shape == (5, 2)


@checks("tensors.refuse_pointer")
def pointers():
    wrapper = tensors.make_wrapper(Wrapper, torch.empty(2, 5, device="meta"), torch.device("cpu"))
    tensors.refuse_pointer(wrapper)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(wrapper)


@checks("tensors.set_data", "tensors.data_of")
def data():
    class Hidden(Wrapper):
        data = None

    wrapper = tensors.make_wrapper(Hidden, torch.empty(2, 5, device="meta"), torch.device("cpu"))
    like = torch.arange(12.0).view(3, 4).t()
    tensors.set_data(wrapper, like)
    assert (wrapper.shape, wrapper.stride()) == (like.shape, like.stride())
    assert wrapper.data_ptr() == like.data_ptr()
    assert tensors.data_of(like).data_ptr() == like.data_ptr()
    assert type(wrapper) is Hidden
    assert torch.sin(wrapper).item() == 7


@checks("tensors.autograd_node", "tensors.function_of_node")
def autograd_nodes():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    assert tensors.autograd_node(x) is None
    node = tensors.autograd_node(Twice.apply(x))
    assert tensors.function_of_node(node) is Twice
    assert tensors.function_of_node(tensors.autograd_node(x * 2)) is None


@checks("tensors.has_hooks")
def hooks():
    leaf = torch.ones(2, requires_grad=True)
    a, b, c = leaf * 1, leaf * 1, leaf * 1
    a.register_hook(lambda grad: grad)
    b.retain_grad()
    assert [tensors.has_hooks(x) for x in (a, b, c)] == [True, True, False]


def on_one_rank(script: str) -> None:
    """Runs a script in a process group of one process, in a process of its own.

    It ends without the process group's own end, in which gloo's threads abort now and then.
    """
    script = f"""
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from compile_losses.torch_internals import dtensors, tensors
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = torch.rand(4, 3)
{script}
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@checks("tensors.shard_of")
def shards():
    x = torch.rand(3)
    assert tensors.shard_of(x) is x
    on_one_rank("""
shard = tensors.shard_of(distribute_tensor(x, mesh, [Shard(0)]))
assert type(shard) is torch.Tensor
torch.testing.assert_close(shard, x)
""")


@checks("dtensors.all_gather", "dtensors.all_reduce", "dtensors.waited")
def collectives():
    assert dtensors.waited(x := torch.rand(2)) is x
    on_one_rank("""
whole = dtensors.waited(dtensors.all_gather(x, 0, (mesh, 0)))
torch.testing.assert_close(whole, x)
torch.testing.assert_close(dtensors.waited(dtensors.all_reduce(x, "sum", (mesh, 0))), x)
""")


@checks("dtensors.in_loss_parallel")
def loss_parallel_is_seen():
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor.parallel import loss_parallel

    assert not dtensors.in_loss_parallel()
    with loss_parallel():
        assert dtensors.in_loss_parallel()
    assert not dtensors.in_loss_parallel()


@checks("dtensors.default_store")
def ranks_have_a_store():
    on_one_rank("""
store = dtensors.default_store()
store.set("key", "text")
assert store.get("key") == b"text"
assert store.delete_key("key")
""")


@checks("dtensors.StridedShard")
def strided_shards():
    placement = dtensors.StridedShard(1, split_factor=2)
    assert (placement.dim, placement.split_factor) == (1, 2)


# graphs


@checks("graphs.EXAMPLE", "graphs.GRAPH_ARGUMENT")
def examples():
    x, seen = torch.rand(3), []

    def look(gm, _):
        placeholder, call, _ = gm.graph.nodes
        seen.append(call.meta[graphs.EXAMPLE].shape)
        assert placeholder.meta[graphs.GRAPH_ARGUMENT].example is x
        return gm.forward

    torch.compile(lambda x: x.exp(), backend=look)(x)
    assert seen == [(3,)]


@checks("graphs.is_erased")
def erased():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    assert not graphs.is_erased(node)
    graph.erase_node(node)
    assert graphs.is_erased(node)


@checks("graphs.DISLIKES_PADDING")
def padding():
    from torch._inductor import graph

    assert f'"{graphs.DISLIKES_PADDING}"' in inspect.getsource(graph)


# AOTAutograd and Inductor


class Look(inductor.CustomGraphPass):
    """A pass that only calls a function with each graph."""

    def __init__(self, function: Callable[[torch.fx.Graph], Any]) -> None:
        self.function = function

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.function(graph)

    def uuid(self) -> None:
        return None


def step_in_inductor(function, *inputs, **looks: Callable[[torch.fx.Graph], Any]) -> None:
    """A forward and a backward, by Inductor with a function in each slot that is named. Dynamo's
    nodes are marked."""

    def compiler(gm, example_inputs):
        for node in gm.graph.nodes:
            node.meta[graphs.CUSTOM] = {"a test": 1}
        default = inductor.InductorBackend(None, {}, dynamic=None)
        for slot, look in looks.items():
            default.config[slot] = Look(look)
        return default(gm, example_inputs)

    with inductor.config.patch(force_disable_caches=True):
        torch.compile(function, backend=compiler, fullgraph=True)(*inputs).backward()


def fused_loss(x, y):
    return torch.ops.fused.mse_loss(x.exp(), y)


@checks(
    "graphs.CUSTOM", "graphs.EAGER_VALUES", "graphs.is_tangent", "inductor.CustomGraphPass",
    "inductor.InductorBackend", "inductor.PRE_GRAD", "inductor.JOINT", "inductor.POST_GRAD",
)  # fmt: skip
def slots():
    found: dict[str, list[torch.fx.Graph]] = {}
    slots = (inductor.PRE_GRAD, inductor.JOINT, inductor.POST_GRAD)
    looks = {slot: (lambda graph, s=slot: found.setdefault(s, []).append(graph)) for slot in slots}
    step_in_inductor(fused_loss, torch.rand(4, 3, requires_grad=True), torch.rand(4, 3), **looks)
    assert [len(found[slot]) for slot in slots] == [1, 1, 2]
    (joint,) = found[inductor.JOINT]
    placeholders = joint.find_nodes(op="placeholder")
    assert [graphs.is_tangent(node) for node in placeholders] == [False, False, True]
    calls = {node.target: node for node in joint.nodes}
    for part in ("forward", "backward"):
        call = calls[getattr(torch.ops.fused, f"mse_loss_{part}").default]
        assert call.meta[graphs.CUSTOM] == {"a test": 1}
        assert graphs.EAGER_VALUES in call.meta


@checks("graphs.RECOMPUTE")
def recompute():
    def function(x):
        return checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False).sum()

    found = []

    def look(graph):
        found.extend(node.meta.get(graphs.RECOMPUTE) for node in graph.nodes)

    step_in_inductor(function, torch.rand(3, requires_grad=True), **{inductor.JOINT: look})
    assert any(found)


@checks(
    "inductor.donated_inputs", "inductor.inside_pre_grad_passes", "inductor.inside_post_grad_passes"
)
def post_grad_passes():
    donated, inside = [], []

    def look(_):
        donated.append(inductor.donated_inputs())
        inside.append((inductor.inside_pre_grad_passes(), inductor.inside_post_grad_passes()))

    def function(x):
        return x.exp().sin().sum() + torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum()

    assert inductor.donated_inputs() == ()
    slots = (inductor.PRE_GRAD, inductor.POST_GRAD)
    step_in_inductor(function, torch.rand(3, requires_grad=True), **dict.fromkeys(slots, look))
    assert any(donated)
    assert {(False, False), (True, False), (False, True)} == set(inside)


@checks("inductor.OpTypes", "inductor.get_default_op_list")
def op_types():
    gm = make_fx(lambda x: torch.rand_like(x.exp()) @ x)(torch.rand(3, 3))
    nodes = {node.target: node for node in gm.graph.nodes}
    types = inductor.get_default_op_list()
    assert isinstance(types, inductor.OpTypes)
    exp, product = nodes[aten.exp.default], nodes[aten.mm.default]
    assert types.is_fusible(exp)
    assert types.is_recomputable(exp)
    assert not types.is_fusible(product)
    assert not types.is_recomputable(product)


@checks("inductor.compile_fx")
def compile_fx():
    x = torch.rand(3)
    gm = make_fx(lambda x: (x.exp(),))(x)
    parameters = inspect.signature(inductor.compile_fx.compile_fx).parameters
    assert {"inner_compile", "config_patches"} <= parameters.keys()
    assert callable(inductor.compile_fx.compile_fx_inner)
    (actual,) = inductor.compile_fx.compile_fx_inner(gm, [x])([x])
    torch.testing.assert_close(actual, x.exp())


@checks("inductor.config")
def config():
    assert isinstance(inductor.config.triton.cudagraphs, bool)
    for slot in (inductor.PRE_GRAD, inductor.JOINT, inductor.POST_GRAD):
        assert getattr(inductor.config, slot) is None


@checks("inductor.InductorError")
def inductor_error():
    """What Inductor raises where it can't compile a graph."""
    from torch._inductor.graph import GraphLowering

    def refused(*args, **kwargs):
        raise ValueError("refused")

    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        patch.setattr(GraphLowering, "call_function", refused)
        with pytest.raises(inductor.InductorError, match="refused"):
            torch.compile(lambda x: x.sin() + 0.125)(torch.randn(3))


@checks("inductor.store_in_place")
def a_store_in_place():
    """The values are in the buffer, and not in memory of their own."""
    from torch._inductor.utils import run_and_get_code

    inductor.store_in_place(torch.ops.fused.write_over.default)

    def written(x, w):
        made = x @ w
        torch.ops.fused.write_over(made, made * 2)
        return made

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    with fresh_cache(), torch.no_grad():
        found, (code, *_) = run_and_get_code(torch.compile(written), x, w)
    torch.testing.assert_close(found, x @ w * 2)
    assert "fused.write_over" not in code


@checks("inductor.list_options")
def list_options():
    assert {"max_autotune", inductor.JOINT} <= set(inductor.list_options())


@checks("inductor.select_decomp_table")
def decompositions():
    assert aten.huber_loss.default in inductor.select_decomp_table()


@checks("inductor.activation_memory_budget")
def activation_memory_budget():
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert inductor.activation_memory_budget() == 0.5
    assert inductor.activation_memory_budget() == 1


@checks("inductor.without_autograd_cache")
def without_autograd_cache():
    config = torch._functorch.config
    with inductor.without_autograd_cache():
        assert not config.enable_autograd_cache
        assert config.force_non_lazy_backward_lowering


@checks("inductor.compile_with_inductor", "inductor.go_around_inductor")
def around_inductor():
    given = []

    def around(following, inductor_backend, gm, example_inputs, **options):
        given.append(gm)
        assert following is before
        return inductor.compile_with_inductor(inductor_backend, gm, example_inputs, **options)

    before = inductor.InductorBackend.__call__
    with patch.object(inductor.InductorBackend, "__call__", before):
        inductor.go_around_inductor(around)
        inductor.go_around_inductor(around)  # twice is once
        assert torch.compile(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert inductor.InductorBackend.__call__ is before
    assert len(given) == 1
    assert isinstance(given[0], torch.fx.GraphModule)


@checks("inductor.uses_cuda_graphs")
def uses_cuda_graphs():
    assert not inductor.uses_cuda_graphs({})
    for mode, uses in (("reduce-overhead", True), ("default", False)):
        options = inductor.InductorBackend(mode, None, dynamic=None).config
        assert inductor.uses_cuda_graphs(options) == uses


@checks("inductor.is_to_be_saved")
def is_to_be_saved():
    assert not inductor.is_to_be_saved()
    if hasattr(torch._functorch.config, "bundled_autograd_cache"):
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            assert inductor.is_to_be_saved()


# Dynamo


#: What comptime saw: a function that it is given may have no free variables.
SEEN: list[torch.Size] = []


@checks("dynamo.maybe_mark_dynamic")
def sizes_that_may_change():
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(lambda x: x.sum(1), backend=keep)
    for rows in (4, 6, 9):
        x = torch.rand(rows, 3)
        dynamo.maybe_mark_dynamic(x, 0)
        compiled(x)
    assert len(graphs) == 1


@checks("dynamo.comptime")
def comptime():
    def function(x):
        dynamo.comptime(lambda frame: SEEN.append(frame.get_local("x").as_fake().shape))
        return x + 1

    SEEN.clear()
    function(torch.rand(3))
    assert not SEEN
    torch.compile(function, backend="eager", fullgraph=True)(torch.rand(3))
    assert SEEN == [(3,)]


@checks("dynamo.RestartAnalysis", "dynamo.ShortenTraceback")
def errors():
    """Dynamo traces anew what asks for it, and shows users the errors of a backend that shorten."""
    assert issubclass(dynamo.RestartAnalysis, Exception)
    with pytest.raises(RuntimeError, match="no_such_option") as raised:
        torch.compile(lambda x: x + 1, backend="compile_losses", options={"no_such_option": 1})(
            torch.rand(3)
        )
    assert isinstance(raised.value, dynamo.ShortenTraceback)


@checks("dynamo.counters")
def counters():
    def function(x):
        torch._dynamo.graph_break()
        return x + 1

    before = sum(dynamo.counters["graph_break"].values())
    torch.compile(function, backend="eager")(torch.rand(3))
    assert sum(dynamo.counters["graph_break"].values()) > before


@checks("dynamo.source_of_input", "dynamo.name_input", "dynamo.is_captured")
def sources_of_inputs():
    graphs_seen = []

    def keep(gm, _):
        graphs_seen.append(gm)
        return gm.forward

    torch.compile(lambda x: x + 1, backend=keep)(torch.ones(2))
    (gm,) = graphs_seen
    assert dynamo.is_captured(gm)
    assert not dynamo.is_captured(torch.fx.GraphModule(gm, gm.graph))
    (node,) = gm.graph.find_nodes(op="placeholder")
    source = dynamo.source_of_input(node)
    other = torch.fx.Graph().placeholder("x")
    dynamo.name_input(other, source)
    assert dynamo.source_of_input(other) == source
    dynamo.name_input(other, source, "weight")
    named = dynamo.source_of_input(other)
    assert named != source
    assert (named.name() if callable(named.name) else named.name).endswith(".weight")


@checks("dynamo.break_after")
def breaks():
    found = []

    def keep(gm, _):
        found.append(dynamo.break_after(gm))
        return gm.forward

    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(broken, backend=keep)(torch.ones(2))
    assert found == [(__file__, broken.__code__.co_firstlineno + 2), None]


@checks("dynamo.FunctionMeta")
def class_of_functions():
    """Dynamo traces the apply of a class with another metaclass as a function."""

    class Meta(dynamo.FunctionMeta):
        pass

    class Doubled(torch.autograd.Function, metaclass=Meta):
        @staticmethod
        def apply(x):
            return x * 2

    graphs = []

    def keep(gm, _):
        graphs.append(gm.graph)
        return gm.forward

    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: Doubled.apply(x), backend=keep, fullgraph=True)(x)
    assert [node.target for node in graphs[0].nodes if node.op == "call_function"] == [operator.mul]


@checks("dynamo.constant_in_graphs", "dynamo.traced_for", "dynamo.traced_lines")
def asked_while_tracing():
    found = []

    @dynamo.constant_in_graphs
    def ask():
        found.append((dynamo.traced_for(), dynamo.traced_lines()))
        return len(found)

    def keep(gm, _):
        return gm.forward

    def function(x):
        return x * ask()

    assert torch.compile(function, backend=keep, fullgraph=True)(torch.ones(1)) == 1
    ((compiler, lines),) = found
    assert compiler.compiler_fn is keep
    assert f'"{__file__}", line {function.__code__.co_firstlineno + 1}' in lines
    assert dynamo.traced_for() is None
    if torch.distributed.is_available():
        on_one_rank("""
from compile_losses.torch_internals import dynamo

found = []

@dynamo.constant_in_graphs
def ask():
    found.append(dynamo.traced_for())
    return 1

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * ask()

def keep(gm, _):
    return gm.forward

wrapped = torch.nn.parallel.DistributedDataParallel(Model(3, 3))
torch.compile(wrapped, backend=keep)(x)
assert [compiler.compiler_fn for compiler in found] == [keep], found
""")


@checks("dynamo.lookup_backend", "dynamo.list_backends")
def lookup_backend():
    assert dynamo.lookup_backend("compile_losses") is backend.compile_losses
    assert {"aot_eager", "compile_losses", "inductor"} <= set(dynamo.list_backends(None))


@checks("dynamo.without_recompile_limits")
def recompile_limits():
    count = []

    def keep(gm, _):
        count.append(1)
        return gm.forward

    compiled = torch.compile(lambda x, n: x + n, backend=keep, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1), dynamo.without_recompile_limits():
        for n in range(3):
            compiled(torch.rand(3), n)
    assert len(count) == 3


@checks("dynamo.without_earlier_sizes")
def earlier_sizes():
    shapes = []

    def keep(gm, inputs):
        shapes.append([*inputs])
        return gm.forward

    compiled = torch.compile(lambda x: x + 1, backend=keep)
    with dynamo.without_earlier_sizes():
        for size in (4, 5, 6):
            compiled(torch.rand(size))
    assert [len(inputs) for inputs in shapes] == [1, 1, 1]  # a symbol would be an input, too


@checks("dynamo.uncompiled")
def uncompiled():
    def function(x):
        return x

    module = torch.nn.Linear(2, 2)
    assert dynamo.uncompiled(function) is function
    assert dynamo.uncompiled(torch.compile(function)) is function
    assert dynamo.uncompiled(torch.compile(module)) is module
    module.compile()
    assert dynamo.uncompiled(module) == module._call_impl


@checks("dynamo.backend_of")
def backend_of():
    def function(x):
        return x

    class Step(torch.nn.Module):
        def forward(self, x):
            return x

    assert dynamo.backend_of(function) is dynamo.backend_of(Step()) is None
    in_place = Step()
    in_place.compile(backend="compile_losses", options={"verify": True})
    compiled = partial(torch.compile, backend="compile_losses", options={"verify": True})
    for found in (compiled(function), compiled(Step()), compiled(compiled(function)), in_place):
        assert dynamo.backend_of(found).kwargs == {"options": {"verify": True}}
        assert dynamo.backend_of(found).compiler_fn.__name__ == "compile_losses"


@checks("artifacts.SavedCallable")
def saved_callable():
    if not hasattr(torch.compiler, "load_compiled_function"):
        return  # this torch has no aot_compile
    from compile_losses.torch_internals import artifacts

    assert hasattr(artifacts.SavedCallable, "serialize_compile_artifacts")
    assert hasattr(artifacts.SavedCallable, "deserialize_compile_artifacts")
