"""``lazy_logits="auto"``: training does what it does without a compiler.

Nothing raises, and functions whose logits are computed in two calls running return plain ones.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses.lazy import LazyLogits, automatic
from compile_losses.lazy.automatic import Automatic
from compile_losses.report.explanation import explain_call
from tests.constants import set_constants
from tests.graphs import interpreted

CLASSES, HIDDEN, STEPS = 60, 16, 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    automatic.forget()
    set_constants(monkeypatch, least_rows=2, least_elements=1, logits_bytes=1, part_of_weight=0)
    with interpreted(monkeypatch):
        yield


@pytest.fixture(params=["backend", "enable"])
def compiled(request):
    """Compiles a model or function through one of both doors."""
    if request.param == "enable":
        with compile_losses.enable(lazy_logits="auto"):
            yield torch.compile
        return
    options = {"lazy_logits": "auto"}
    yield lambda model: torch.compile(model, backend="compile_losses", options=options)


class Outputs(dict):
    """What transformers' models return."""

    __getattr__ = dict.__getitem__


class Model(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=bias)

    def forward(self, ids, labels=None):
        logits = self.head(torch.tanh(self.body(self.embed(ids))))
        if labels is None:
            return Outputs(logits=logits)
        return Outputs(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CLASSES, (4, 24), generator=generator)
    return ids, ids.roll(1)


def model(bias=False):
    torch.manual_seed(0)
    return Model(bias).double()


def square(x):
    """A number that a step of the head changes: the gradients of all classes add up to 0."""
    return x.square().sum()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


# Programs of a model, the function to call in its place, and a list for what they see. Each says
# itself what it reads, and when.


def drops(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = call(*batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss)


def reading(when, read, optimizer=sgd):
    def program(model, call, seen):
        steps = optimizer(model)
        for step in range(STEPS):
            out = call(*batch(step))
            if when == "before":
                seen.append(read(out.logits))
            out.loss.backward()
            if when == "between":
                seen.append(read(out.logits))
            steps.step()
            steps.zero_grad()
            if when == "after":
                seen.append(read(out.logits))
            seen.append(out.loss)

    return program


def in_a_list(model, call, seen):
    optimizer, kept = sgd(model), []
    for step in range(STEPS):
        kept.append(call(*batch(step)))
        kept[-1].loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen += [square(out.logits) for out in kept]


def views_in_a_list(model, call, seen):
    optimizer, kept = sgd(model), []
    for step in range(STEPS):
        out = call(*batch(step))
        kept.append(out.logits[:, -1].float().detach())
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen += [view * 2 for view in kept]


def accumulates(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS * 2):
        out = call(*batch(step))
        (out.loss / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    seen.append(out.logits.argmax(-1))


def two_forwards_one_backward(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS):
        outs = [call(*batch(2 * step + i)) for i in range(2)]
        (outs[0].loss + outs[1].loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [out.logits.mean() for out in outs]


def by_hand(model, call, seen):
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
                p.grad = None
        seen.append(square(out.logits))


def by_hand_through_data(model, call, seen):
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        for p in model.parameters():
            p.data.sub_(p.grad)
            p.grad = None
        seen.append(square(out.logits))


def in_the_backward(model, call, seen):
    """An optimizer for each parameter, which steps when its gradient is there."""
    for p in model.parameters():
        own = torch.optim.SGD([p], lr=0.5)
        p.register_post_accumulate_grad_hook(lambda p, own=own: own.step() or own.zero_grad())
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        seen.append(square(out.logits))


def by_hand_in_the_backward(model, call, seen):
    def update(p):
        p.data.sub_(p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        seen.append(square(out.logits))


def a_step_of_other_gradients(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS):
        out = call(*batch(step))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen += [square(out.logits), out.loss]


def another_calls_backward(model, call, seen):
    early = call(*batch(9))
    drops(model, call, seen)
    seen.append(square(early.logits))


def frozen_head(model, call, seen):
    model.head.requires_grad_(False)
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.5)
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [square(out.logits), out.loss]


def tied_weights(model, call, seen):
    model.head.weight = model.embed.weight
    reading("after", square)(model, call, seen)


def closures(model, call, seen):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    last = []

    def closure():
        optimizer.zero_grad()
        last[:] = [call(*batch(0))]
        last[0].loss.backward()
        return last[0].loss

    for _ in range(STEPS):
        seen.append(optimizer.step(closure))
        seen.append(square(last[0].logits))


def sharpness(model, call, seen):
    """Two backwards a step, at weights that are changed by hand in between."""
    optimizer = sgd(model)
    for step in range(STEPS):
        first = call(*batch(step))
        first.loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p += 0.1 * grad
        model.zero_grad()
        second = call(*batch(step))
        second.loss.backward()
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * grad
        optimizer.step()
        optimizer.zero_grad()
        seen += [square(first.logits), square(second.logits)]


def evaluates_between(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        for grad in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with grad():
                evaluated = call(*batch(step + 50))
                seen += [evaluated.loss, evaluated.logits.argmax(-1)]
        model.train()
        seen.append(square(out.logits))


def other_lengths(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS * 2):
        ids, labels = batch(step)
        out = call(ids[:, : 10 + step], labels[:, : 10 + step])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(square(out.logits))


def raises(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS):
        try:
            out = call(*batch(step))
            out.loss.backward()
            raise KeyError(step)
        except KeyError:
            optimizer.step()
            seen.append(square(out.logits))
            optimizer.zero_grad()


def raises_in_a_hook(model, call, seen):
    def stop(grad):
        raise KeyError

    out = call(*batch(0))
    handle = model.body.weight.register_hook(stop)
    with pytest.raises(KeyError):
        out.loss.backward()
    handle.remove()
    model.zero_grad()
    drops(model, call, seen)
    seen.append(square(out.logits))


def threads(model, call, seen):
    found = [[] for _ in range(3)]
    call(*batch(0))

    def read(out, into):
        into.append(square(out.logits).item())

    optimizer = sgd(model)
    for step in range(STEPS):
        out = call(*batch(step))
        readers = [threading.Thread(target=read, args=(out, into)) for into in found]
        for each in readers:
            each.start()
        out.loss.backward()
        for each in readers:
            each.join()
        optimizer.step()
        optimizer.zero_grad()
    seen += [torch.tensor(each) for each in found]


def another_loss(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS):
        out = call(*batch(step))
        (out.loss + 0.1 * out.logits.logsumexp(-1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(out.loss)


def hooked(model, call, seen):
    for step in range(STEPS):
        out = call(*batch(step))
        out.logits.register_hook(lambda grad: 10 * grad)
        (out.loss + out.logits.square().mean()).backward()
        seen += [p.grad.clone() for p in model.parameters()]


def writes(model, call, seen):
    optimizer = sgd(model)
    for step in range(STEPS):
        out = call(*batch(step))
        with torch.no_grad():
            out.logits.mul_(2)
        seen.append(square(out.logits))
        out = call(*batch(step))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(model, call, seen):
    call(*batch(7))  # compiled here, where logits may be lazy
    optimizer = sgd(model)
    for step in range(STEPS):
        out = checkpoint(call, *batch(step), use_reentrant=False)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [out.loss, square(out.logits)]


def offloaded(model, call, seen):
    call(*batch(7))
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.autograd.graph.save_on_cpu():
            out = call(*batch(step))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [out.loss, square(out.logits)]


def gradients_by_function(model, call, seen):
    """No gradient arrives at a parameter, and no write is counted."""
    params = list(model.parameters())
    for step in range(STEPS):
        out = call(*batch(step))
        for p, grad in zip(params, torch.autograd.grad(out.loss, params), strict=True):
            p.data.sub_(grad)
        seen.append(square(out.logits))


def gradients_of_some(model, call, seen):
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward(inputs=[model.body.weight])
        model.head.weight.data.mul_(1.1)
        seen.append(square(out.logits))


def the_loss_is_dropped(model, call, seen):
    kept = call(*batch(9)).logits.detach()
    for step in range(STEPS):
        call(*batch(step)).loss.backward()
        for p in model.parameters():
            p.data.sub_(p.grad)
    seen.append(square(kept))


def changed_frozen_head(model, call, seen):
    model.head.requires_grad_(False)
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        model.head.weight.mul_(1.1)
        seen.append(square(out.logits))


def inference_mode(model, call, seen):
    for step in range(STEPS):
        out = call(*batch(step))
        with torch.inference_mode():
            seen += [out.logits.mean(), square(out.logits[:, :-1])]
        weight = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True)
        (out.loss + square(out.logits) + (out.logits.detach() * weight).sum()).backward()
        seen += [p.grad.clone() for p in model.parameters()]


def checkpoints_of_two_calls(model, call, seen):
    call(*batch(7))
    for step in range(STEPS):
        outs = [checkpoint(call, *batch(2 * step + i), use_reentrant=False) for i in range(2)]
        (outs[0].loss + outs[1].loss).backward()
        seen += [p.grad.clone() for p in model.parameters()]


def double_backward(model, call, seen):
    out = call(*batch(0))
    (grad,) = torch.autograd.grad(out.loss, model.body.weight, retain_graph=True)
    out.loss.backward()
    seen += [grad, square(out.logits)]


def loads_weights(model, call, seen):
    before = copy.deepcopy(model.state_dict())
    drops(model, call, seen)
    out = call(*batch(0))
    out.loss.backward()
    model.load_state_dict(before)
    seen.append(square(out.logits))


def averages_weights(model, call, seen):
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        out = call(*batch(step))
        out.loss.backward()
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
        seen.append(square(out.logits))
    seen += list(average.parameters())


def scaled(model, call, seen):
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), sgd(model)
    for step in range(STEPS):
        out = call(*batch(step))
        scaler.scale(out.loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(square(out.logits))


def through(function):
    """What libraries do with outputs, before the backward and after the step."""

    def program(model, call, seen):
        optimizer = sgd(model)
        for step in range(3):
            out = call(*batch(step))
            seen.append(function(out.logits))
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(function(out.logits))

    return program


def saved(x):
    file = io.BytesIO()
    torch.save({"logits": x.detach()}, file)
    file.seek(0)
    return torch.load(file)["logits"]


def queued(x):
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(x.detach())
    return queue.get().clone()


@torch.library.custom_op("compile_losses_test::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() / 2)


LIBRARIES = {
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "cpu, numpy": lambda x: torch.from_numpy(x.detach().cpu().float().numpy().copy()),
    "list": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: torch.tensor(x.flatten()[3].item()),
    "dlpack": lambda x: torch.from_dlpack(x.detach()).clone(),
    "save": saved,
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "queue": queued,
    "op of an extension": lambda x: halved(x.detach()),
    "storage": lambda x: torch.tensor(x.untyped_storage().nbytes()),
    "share_memory_": lambda x: x.detach().share_memory_() * 1,
    "numbers by row": lambda x: x.detach().argmax(-1),
    "cat": lambda x: torch.cat([x.detach(), x.detach()]),
    "stack": lambda x: torch.stack([x.detach()]),
    "pad": lambda x: F.pad(x.detach(), (0, 0, 0, 3)),
    "new": lambda x: x.new_zeros(x.shape) + x.detach(),
    "like": lambda x: torch.zeros_like(x),
    "to": lambda x: x.to("cpu", non_blocking=True).detach().to(torch.float64),
    "func": lambda x: torch.func.vmap(square)(x.detach()),
    "double backward": lambda x: torch.autograd.grad(x.square().sum(), x)[0],
    "topk": lambda x: x.detach().topk(3).values,
    "mask": lambda x: x.detach()[x.detach() > 0],
    "setitem": lambda x: x.detach().clone().index_fill_(1, torch.tensor([0]), 0.0),
    "einsum": lambda x: torch.einsum("btc,btc->bt", x.detach(), x.detach()),
    "stock's compiler": lambda x: torch.compile(torch.square, backend="aot_eager")(x.detach()),
    "stock's eager": lambda x: torch.compile(lambda y: y.sum(), backend="eager")(x),
}
OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
}
PROGRAMS = {
    **{f.__name__.replace("_", " "): f for f in (drops, in_a_list, views_in_a_list, accumulates)},
    **{f.__name__.replace("_", " "): f for f in (two_forwards_one_backward, by_hand, closures)},
    **{f.__name__.replace("_", " "): f for f in (by_hand_through_data, in_the_backward)},
    **{f.__name__.replace("_", " "): f for f in (by_hand_in_the_backward, frozen_head, threads)},
    **{f.__name__.replace("_", " "): f for f in (a_step_of_other_gradients, tied_weights, writes)},
    **{f.__name__.replace("_", " "): f for f in (another_calls_backward, sharpness, another_loss)},
    **{f.__name__.replace("_", " "): f for f in (evaluates_between, other_lengths, raises, hooked)},
    **{f.__name__.replace("_", " "): f for f in (raises_in_a_hook, checkpointed, offloaded)},
    **{f.__name__.replace("_", " "): f for f in (double_backward, loads_weights, scaled)},
    **{f.__name__.replace("_", " "): f for f in (gradients_by_function, gradients_of_some)},
    **{f.__name__.replace("_", " "): f for f in (the_loss_is_dropped, changed_frozen_head)},
    **{f.__name__.replace("_", " "): f for f in (inference_mode, checkpoints_of_two_calls)},
    "averages weights": averages_weights,
    **{f"reads {when}": reading(when, square) for when in ("before", "between", "after")},
    **{f"argmax {when}": reading(when, lambda x: x.argmax(-1)) for when in ("before", "after")},
    **{f"optimizer {name}": reading("after", square, of) for name, of in OPTIMIZERS.items()},
    **{f"library {name}": through(function) for name, function in LIBRARIES.items()},
}


def outcome(program, compile, bias):
    torch.manual_seed(0)
    made, seen = model(bias), []
    program(made, compile(made), seen)
    return [x.detach() + 0 for x in (*seen, *made.parameters())]


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:the logits that forward")
@pytest.mark.parametrize("name", PROGRAMS)
def test_training(name, compiled, monkeypatch):
    calls, call = [], Automatic.call
    monkeypatch.setattr(Automatic, "call", lambda self: calls.append(call(self)) or calls[-1])
    bias = len(name) % 2 == 0
    # Whoever compiles a loss with its logits, their hooks see what comes from outside alone.
    stock = torch.compile if name == "hooked" else lambda model, backend: model
    expected = outcome(PROGRAMS[name], lambda model: stock(model, backend="aot_eager"), bias)
    torch._dynamo.reset()
    found = outcome(PROGRAMS[name], compiled, bias)
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


# How long the logits stay lazy.


def kinds(program, compile):
    """Whether the logits of each call are lazy."""
    made = model()
    call, found = compile(made), []

    def noted(*given):
        out = call(*given)
        found.append(isinstance(out.logits, LazyLogits))
        return out

    program(made, noted, [])
    return found


def test_logits_that_are_let_go_stay_lazy(compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kinds(drops, compiled) == [True] * STEPS


def test_kept_logits(compiled):
    with pytest.warns(UserWarning, match="forward .*kept until the backward.*del outputs") as told:
        found = kinds(reading("after", square), compiled)
    assert found == [True, True, False, False]
    assert len([w for w in told if "kept until" in str(w.message)]) == 1


def test_kept_logits_where_warnings_are_errors(compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kinds(in_a_list, compiled) == [True, True, False, False]


def test_logits_that_are_read(compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kinds(reading("before", square), compiled) == [True, True, False, False]


def test_logits_that_are_read_now_and_then_stay_lazy(compiled):
    def program(model, call, seen):
        for step in range(6):
            out = call(*batch(step))
            if step % 2:
                square(out.logits)
            loss = out.loss
            del out
            loss.backward()

    assert kinds(program, compiled) == [True] * 6


def test_report_of_a_function_that_returns_plain_logits_again(compiled):
    kinds(reading("before", square), compiled)
    made = model()
    compiled(made)(*batch(0))
    (site,) = explain_call(made, batch(0), options={"lazy_logits": "auto"}).losses
    assert "they were read in two calls one after the other" in site.reason


def test_the_graph_without_a_loss_returns_plain_logits(compiled):
    """Nobody knows what reads them."""
    out = compiled(model())(batch(0)[0])
    assert type(out.logits) is torch.Tensor


@pytest.mark.parametrize("option", [True, False])
def test_options_win(option):
    compiled = torch.compile(model(), backend="compile_losses", options={"lazy_logits": option})
    out = compiled(*batch(0))
    assert isinstance(out.logits, LazyLogits) == option


@pytest.mark.parametrize(
    ("value", "is_lazy"), [("auto", True), ("1", True), ("0", False), ("", False)]
)
def test_variable(value, is_lazy, monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_LAZY_LOGITS", value)
    out = torch.compile(model(), backend="compile_losses")(*batch(0))
    assert isinstance(out.logits, LazyLogits) == is_lazy


def test_asked_for_lazy_logits_are_not_computed_early():
    made = model()
    call = torch.compile(made, backend="compile_losses", options={"lazy_logits": True})
    out = call(*batch(0))
    out.loss.backward()
    sgd(made).step()
    with pytest.raises(RuntimeError, match=r"weight was changed.*options=\{'lazy_logits': False\}"):
        square(out.logits)


def test_checkpoint_from_the_start(compiled):
    """A function that is compiled under a checkpoint returns plain logits."""
    out = checkpoint(compiled(model()), *batch(0), use_reentrant=False)
    assert type(out.logits) is torch.Tensor


def test_stance_that_forbids_to_compile(compiled):
    made = model()
    call = compiled(made)
    call(*batch(0)).loss.backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(STEPS):
            square(call(*batch(step)).logits)


def test_compiled_backward(compiled):
    """A backward that is compiled as a whole does not tell when a gradient arrives."""
    expected = outcome(reading("after", square), lambda model: model, False)
    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome(reading("after", square), compiled, False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
