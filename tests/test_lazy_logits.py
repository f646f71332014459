"""Tensors that are computed when they are read do what plain ones do, and only then."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F

from compile_losses.lazy.head import Head
from compile_losses.lazy.node import lazy_logits
from compile_losses.lazy.tensor import LazyLogits
from tests.constants import set_constants
from tests.linear_problems import largest_allocation

ROWS, TOKENS, CLASSES, HIDDEN = 3, 6, 7, 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=2, least_elements=1, logits_bytes=1, part_of_weight=0)


def leaves(*, bias=True, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, TOKENS, HIDDEN), (CLASSES, HIDDEN), *([(CLASSES,)] if bias else [])]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for shape in shapes
    ]


def lazy(tensors):
    """Logits of a hidden state that something computed, and to which gradients go."""
    input, weight, *bias = tensors
    return lazy_logits(Head(input * 1, weight, bias[0] if bias else None, input.dtype))


def eager(tensors):
    input, *rest = tensors
    return F.linear(input * 1, *rest)


def is_unread(tensor):
    return isinstance(tensor, LazyLogits) and tensor._memory.is_unread()


TARGET = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % CLASSES

#: Functions of logits, each of which returns a tensor, several or numbers.
FUNCTIONS = {
    "add": lambda x: x + 1,
    "radd": lambda x: 2 - x,
    "itself": lambda x: x * x,
    "matmul": lambda x: x @ torch.ones(CLASSES, 2, dtype=x.dtype),
    "rmatmul": lambda x: torch.ones(2, TOKENS, dtype=x.dtype) @ x,
    "einsum": lambda x: torch.einsum("btc->bc", x),
    "less": lambda x: x < 0,
    "equal": lambda x: torch.equal(x, x.detach().clone()),
    "allclose": lambda x: torch.allclose(x, x + 1e-12),
    "isfinite": lambda x: x.isfinite(),
    "where": lambda x: torch.where(x > 0, x, x.new_zeros(())),
    "clamp": lambda x: x.clamp(-1, 1),
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp of tokens": lambda x: x.logsumexp(1),
    "sum": torch.sum,
    "sum of classes": lambda x: x.sum(-1),
    "sum of two": lambda x: x.sum((0, 2)),
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(-1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "max": torch.max,
    "max of classes": lambda x: x.max(-1),
    "max kept": lambda x: x.max(-1, keepdim=True).values,
    "min of classes": lambda x: x.min(2),
    "amax": lambda x: x.amax(-1),
    "amax of tokens": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(-1),
    "argmax of all": lambda x: x.argmax(),
    "argmax kept": lambda x: x.argmax(2, keepdim=True),
    "argmin": lambda x: x.argmin(-1),
    "topk": lambda x: x.topk(3),
    "topk of tokens": lambda x: x.topk(2, dim=1),
    "sort": lambda x: x.sort(-1),
    "argsort": lambda x: x.argsort(-1),
    "cumsum": lambda x: x.cumsum(1),
    "gather": lambda x: x.gather(-1, TARGET.unsqueeze(-1)),
    "take_along_dim": lambda x: torch.take_along_dim(x, TARGET.unsqueeze(-1), -1),
    "scatter": lambda x: x.scatter(-1, TARGET.unsqueeze(-1), 0.0),
    "index": lambda x: x[0],
    "slice": lambda x: x[:, 1:-1],
    "slice of classes": lambda x: x[..., 2:5],
    "one class": lambda x: x[..., 1],
    "one number": lambda x: x[1, 2, 3].item(),
    "step": lambda x: x[:, ::2],
    "mask": lambda x: x[TARGET > 2],
    "index tensor": lambda x: x[torch.tensor([2, 0])],
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 3])),
    "masked_fill": lambda x: x.masked_fill(x < 0, -1.0),
    "view": lambda x: x.view(-1, CLASSES),
    "view of classes": lambda x: x.view(ROWS, -1),
    "reshape of a slice": lambda x: x[:, :-1].reshape(-1, CLASSES),
    "contiguous slice": lambda x: x[..., :-1, :].contiguous(),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "rows permuted": lambda x: x.transpose(0, 1)[1:].argmax(-1),
    "movedim": lambda x: x.movedim(-1, 0),
    "flatten": lambda x: x.flatten(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1, -1),
    "split": lambda x: x.split(2, dim=1),
    "split in sizes": lambda x: x.flatten(0, 1).split([5, 13]),
    "chunk": lambda x: x.chunk(3),
    "unbind": lambda x: x.unbind(0),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, x], 1),
    "float": lambda x: x.float(),
    "to bfloat16": lambda x: x.to(torch.bfloat16),
    "to a device": lambda x: x.to("cpu", torch.float32),
    "type_as": lambda x: x.type_as(torch.ones((), dtype=torch.float32)),
    "clone": lambda x: x.clone(),
    "soft-cap": lambda x: 5 * torch.tanh(x / 5),
    "zeros_like": torch.zeros_like,
    "detach": lambda x: x.detach(),
    "numpy": lambda x: x.detach().numpy().sum(),
    "numpy by force": lambda x: x.numpy(force=True).sum(),
    "asarray": lambda x: __import__("numpy").asarray(x.detach()).sum(),
    "tolist": lambda x: x.tolist(),
    "len": len,
    "iterate": lambda x: [row.sum() for row in x],
    "bool": lambda x: bool((x[0, 0, 0] > 0).item()),
    "format": lambda x: f"{x[0, 0, 0].detach():.3f}",
    "copy": lambda x: copy.copy(x.detach()),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "save": lambda x: saved(x.detach()),
    "size": lambda x: (x.size(), x.stride(), x.dim(), x.numel(), x.is_contiguous()),
    "dtype": lambda x: (x.dtype, x.device, x.layout, x.requires_grad, x.is_leaf),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 0.1)),
    "entropy": lambda x: torch.distributions.Categorical(logits=x).entropy(),
    "op": lambda x: torch.ops.aten.add.Tensor(x, 1),
    "fused op": lambda x: torch.ops.fused.cross_entropy(x.flatten(0, 1), TARGET.flatten()),
    "vmap": lambda x: torch.func.vmap(lambda row: row.sum(-1))(x),
    "grad": lambda x: torch.func.grad(lambda y: y.square().sum())(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x.detach(),), (torch.ones_like(x),)),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    "interpolate": lambda x: F.interpolate(x, 4),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "one_hot": lambda x: F.one_hot(x.argmax(-1), CLASSES),
}


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def results(function, tensors, make):
    """What a function returns, and the gradients of all that it needs."""
    found = function(make(tensors))
    flat = [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    total = sum(t.double().square().sum() for t in flat if t.requires_grad)
    gradients = []
    if isinstance(total, torch.Tensor):
        gradients = torch.autograd.grad(total, tensors, allow_unused=True)
    return found, gradients


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    tensors = leaves()
    expected, gradients = results(FUNCTIONS[name], tensors, eager)
    actual, ours = results(FUNCTIONS[name], tensors, lazy)
    assert len(gradients) == len(ours)
    compare = torch.testing.assert_close if name not in ("size", "dtype", "format") else None
    if compare is None:
        assert actual == expected
        return

    def plain(tree):
        leaves, spec = torch.utils._pytree.tree_flatten(tree)
        leaves = [t.detach() + 0 if isinstance(t, torch.Tensor) else t for t in leaves]
        return torch.utils._pytree.tree_unflatten(leaves, spec)

    if expected is not None and not isinstance(expected, str):
        torch.testing.assert_close(
            torch.utils._pytree.tree_leaves(plain(actual)),
            torch.utils._pytree.tree_leaves(plain(expected)),
        )
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


#: What changes logits in place, on a copy that is not a leaf.
IN_PLACE = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(x.detach().clone()),
    "item": lambda x: x.__setitem__((0, 0), 3.0),
    "class": lambda x: x.__setitem__((..., 1), -1e9),
    "mask": lambda x: x.masked_fill_(x < 0, 0),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones_like(x)),
    "view": lambda x: x[:, 1:].mul_(2),
    "of flat": lambda x: x.view(-1)[:5].fill_(1),
    "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(2.0).double()),
    "scatter_": lambda x: x.scatter_(-1, TARGET.unsqueeze(-1), 0.0),
    "clamp_": lambda x: torch.clamp_(x, -1, 1),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "out": lambda x: torch.add(x.detach(), 1, out=x.detach()),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "t_": lambda x: x[0].t_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    """The tensor itself and all that shares its memory, and nothing that was copied before."""
    found = []
    for make in (eager, lazy):
        tensors = leaves()
        x = make(tensors)
        before, view = x.float(), x[1:]
        IN_PLACE[name](x)
        after = [x.detach() + 0, view.detach() + 0, before.detach() + 0]
        gradients = torch.autograd.grad(x.square().sum() + before.double().sum(), tensors)
        found.append((after, gradients))
    torch.testing.assert_close(found[1], found[0])


LATE = {
    "detach": lambda x: x.detach(),
    "float": lambda x: x.float(),
    "shift": lambda x: x[..., :-1, :].contiguous().view(-1, CLASSES),
    "soft-cap": lambda x: 5 * torch.tanh(x / 5),
    "rows": lambda x: x[1, 2:],
    "split": lambda x: x.split(2, 1)[1],
}


@pytest.mark.parametrize("name", LATE)
def test_waits(name):
    x = lazy(leaves())
    assert is_unread(x)
    assert is_unread(LATE[name](x))
    assert is_unread(x)
    assert "LazyLogits((3, 6, 7), dtype=torch.float64" in repr(x)
    assert is_unread(x)


def test_computes_once(monkeypatch):
    count = []
    output = Head.output
    monkeypatch.setattr(Head, "output", lambda head: count.append(1) or output(head))
    x = lazy(leaves())
    for late in LATE.values():
        late(x).exp()
    x.sum()
    assert len(count) <= 2  # the rows alone, and all


ROWWISE = {
    "argmax": lambda x: x.argmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "max": lambda x: x[:, :-1].max(-1).indices,
    "topk": lambda x: x.float().topk(2).indices,
    "entropy": lambda x: torch.cat(
        [-(c.softmax(-1) * c.log_softmax(-1)).sum(-1) for c in x.reshape(-1, 5000).split(8)]
    ),
    "soft-cap": lambda x: (5 * torch.tanh(x / 5)).argmax(-1),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_metrics_need_no_logits(name):
    """Numbers of each row are computed a chunk of rows at a time, and no logits are kept."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((4, 32, 8), (5000, 8))]
    expected = ROWWISE[name](F.linear(*tensors))
    x = lazy(tensors)
    torch.testing.assert_close(ROWWISE[name](x), expected)
    assert is_unread(x)
    x = lazy(tensors)
    assert largest_allocation(lambda: ROWWISE[name](x)) < 4 * 32 * 5000 * 4 / 3


def test_few_rows_read_often_are_kept():
    x = lazy(leaves()).detach()
    for _ in range(3 * ROWS * TOKENS):
        x[0, 0].sum()
    assert not is_unread(x)


def test_backward_through_loss_and_logits():
    for create_graph in (False, True):
        found = []
        for make in (eager, lazy):
            tensors = leaves()
            x = make(tensors)
            loss = F.cross_entropy(x.flatten(0, 1), TARGET.flatten()) + x.square().mean()
            gradients = torch.autograd.grad(loss, tensors, create_graph=create_graph)
            if create_graph:
                total = sum(g.square().sum() for g in gradients)
                gradients += torch.autograd.grad(total, tensors)
            found.append(gradients)
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_hooks():
    seen = []
    for make in (eager, lazy):
        x = make(leaves())
        x.register_hook(lambda grad: seen.append(grad.clone()))
        x.retain_grad()
        x.square().sum().backward()
        seen.append(x.grad)
    torch.testing.assert_close(seen[2:], seen[:2])


def test_frozen_parts():
    for frozen in range(3):
        found = []
        for make in (eager, lazy):
            tensors = leaves()
            tensors[frozen].requires_grad_(False)
            make(tensors).square().sum().backward()
            found.append([t.grad for t in tensors])
        torch.testing.assert_close(found[1], found[0])
        assert found[1][frozen] is None


@pytest.mark.parametrize("is_transposed", [False, True])
def test_casts_and_transposes(is_transposed):
    """A head in bfloat16 with parameters in float32, as under autocast."""
    found = []
    for late in (False, True):
        tensors = leaves(dtype=torch.float32)
        input, weight, bias = tensors
        given = weight.detach().t().contiguous().requires_grad_() if is_transposed else weight
        if late:
            x = lazy_logits(Head(input * 1, given, bias, torch.bfloat16, is_transposed))
        else:
            narrow = (given.t() if is_transposed else given).bfloat16()
            x = F.linear((input * 1).bfloat16(), narrow, bias.bfloat16())
        with torch.autocast("cpu", enabled=False):
            loss = x.float().square().sum()
        found.append((x.detach() + 0, torch.autograd.grad(loss, (input, given, bias))))
    torch.testing.assert_close(found[1], found[0])


def test_autocast_around_the_reading():
    expected = eager(leaves(dtype=torch.float32)).detach()
    x = lazy(leaves(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(x.detach() + 0, expected)


def test_no_gradients():
    x = lazy(leaves()).detach()
    assert not x.requires_grad
    assert is_unread(x)
    with torch.no_grad():
        y = lazy(leaves())
        assert not y.requires_grad
        assert torch.equal(x + 0, y + 0)


# Reading too late


def changes(tensors, x):
    _, weight, bias = tensors
    return {
        "SGD": (lambda: torch.optim.SGD([weight], 0.1, foreach=True).step(), "weight"),
        "SGD one by one": (lambda: torch.optim.SGD([weight], 0.1, foreach=False).step(), "weight"),
        "SGD fused": (lambda: torch.optim.SGD([weight], 0.1, fused=True).step(), "weight"),
        "AdamW": (lambda: torch.optim.AdamW([weight]).step(), "weight"),
        "AdamW fused": (lambda: torch.optim.AdamW([weight], fused=True).step(), "weight"),
        "bias": (lambda: torch.optim.SGD([bias], 0.1).step(), "bias"),
        "in place": (lambda: weight.detach().mul_(2), "weight"),
        "a slice": (lambda: weight.detach()[0].zero_(), "weight"),
        "copy": (lambda: weight.detach().copy_(weight.detach() + 1), "weight"),
        "foreach": (lambda: torch._foreach_add_([weight.detach()], 1.0), "weight"),
        "hidden state": (lambda: x._head.input.add_(1), "hidden state"),
        "freed": (lambda: weight.untyped_storage().resize_(0), "weight"),
    }


@pytest.mark.parametrize("name", changes(leaves(), None))
def test_stale(name, device):
    tensors = leaves(dtype=torch.float32, device=device)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    x = lazy(tensors)
    late = [f(x) for f in LATE.values()]
    read = lazy(tensors)
    expected = read + 0
    change, what = changes(tensors, x)[name]
    change()
    for each in (x, *late):
        for reading in (torch.sum, lambda t: t.argmax(-1), lambda t: t[0].exp(), repr):
            if reading is repr:
                repr(each)
                continue
            with pytest.raises(RuntimeError, match=f"the (memory of the )?(head's )?{what} was"):
                reading(each)
    assert torch.equal(read + 0, expected)  # what was read before stays


def test_step_of_another_optimizer():
    """Of other parameters, some without a storage: the logits stay readable."""
    x = lazy(leaves())
    sparse = torch.eye(3).to_sparse().requires_grad_()
    other = torch.ones(3, requires_grad=True)
    other.grad = torch.ones(3)
    torch.optim.SGD([sparse, other], 0.1).step()
    torch.testing.assert_close(x.detach() + 0, eager(leaves()).detach())


def test_stale_after_load_state_dict():
    layer = torch.nn.Linear(HIDDEN, CLASSES)
    x = lazy([torch.randn(ROWS, TOKENS, HIDDEN), layer.weight, layer.bias])
    layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()})
    with pytest.raises(RuntimeError, match="set lazy_logits=False"):
        x.sum()


def test_threads():
    for _ in range(20):
        x = lazy(leaves())
        expected = eager(leaves()).detach()
        sums, barrier = [], threading.Barrier(4)

        def read(x=x, barrier=barrier, sums=sums):
            barrier.wait()
            sums.append(x.float()[1:].sum().item())
            x[0].sum()

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sums) == 4
        assert sums == pytest.approx([expected.float()[1:].sum().item()] * 4)


def test_is_freed():
    """Neither lazy logits nor detached ones of them keep what they need no more."""
    tensors = leaves()
    x = lazy(tensors)
    hidden, kept = weakref.ref(x._origin.input), x.detach()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert hidden() is None  # with its part of the autograd graph
    kept.sum()
    head = weakref.ref(kept._head)
    del kept
    gc.collect()
    assert head() is None
