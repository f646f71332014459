"""Random programs of compiled graphs that hand logits on, with eager code between them.

A program is a list of steps on a growing list of tensors: the graphs that are compiled, what eager
code does to their results, and a backward at the end. ``drawn`` draws one, ``run`` runs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

CLASSES, HIDDEN = 11, 4


class Reversed(torch.autograd.Function):
    """Changes the gradient of a view, as for adversarial training."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -2 * grad


class Passed(torch.autograd.Function):
    """Returns what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def labels(x):
    return (torch.arange(x.numel() // CLASSES) * 7 % CLASSES).view(x.shape[:-1])


def ce(x, y):
    return F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1))


def write(x, y):
    x.mul_(0.5)
    return ce(x, y)


def write_part(x, y):
    x[0].zero_()
    return ce(x, y), x[-1:]


def write_first(a, b):
    a.mul_(2)
    return a.square().mean() + b.exp().mean(), b[-1:]


def unsqueezed(x, y):
    x.unsqueeze_(0)
    return x.square().mean()


def entropy(x):
    log_probs = F.log_softmax(x, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def rows(h, w, b):
    return F.linear(h.flatten(0, 1), w, b)


def with_loss(x):
    return ce(x, labels(x)), x


def in_no_grad_of(function):
    def run(*given):
        with torch.no_grad():
            return function(*given)

    return run


#: The first graph: what it makes of hidden state, weight and bias. Without a compiler none of them
#: returns the view of a product, as a layer with a bias would make of three dimensions: what is
#: written to a view changes the way of its gradient past hooks.
FIRST: dict[str, Callable[..., Any]] = {
    "linear": lambda h, w, b: F.linear(h, w),
    "bias": rows,
    "product": lambda h, w, b: h.flatten(0, 1) @ w.t(),
    "cast": lambda h, w, b: F.linear(h, w).float(),
    "soft-cap": lambda h, w, b: 3 * torch.tanh(F.linear(h, w, b) / 3),
    "slice": lambda h, w, b: F.linear(h, w)[1:, :-1],
    "with its loss": lambda h, w, b: with_loss(rows(h, w, b)),
    "cast, with its loss": lambda h, w, b: with_loss(F.linear(h, w).float()),
    "soft-cap, with its loss": lambda h, w, b: with_loss(3 * torch.tanh(F.linear(h, w, b) / 3)),
    "with the loss of rows": lambda h, w, b: (
        lambda x: (ce(x[:, 1:], labels(x)[:, :-1]), x, x.detach())
    )(F.linear(h, w)),
    "twice": lambda h, w, b: (lambda x: (x, x.view(4, 6, CLASSES)))(rows(h, w, b)),
    "detached": lambda h, w, b: (lambda x: (x, x.detach()))(F.linear(h, w)),
    "evaluated": in_no_grad_of(lambda h, w, b: F.linear(h, w)),
    "student and teacher": lambda h, w, b: (
        F.linear(h, w),
        in_no_grad_of(lambda h, w, b: F.linear(h.tanh(), 2 * w))(h, w, b),
    ),
    "two heads": lambda h, w, b: (F.linear(h, w), F.linear(h.tanh(), w * 2)),
}

#: Later graphs of one tensor and its labels.
LATER: dict[str, Callable[..., Any]] = {
    "ce": ce,
    "ce of rows": lambda x, y: ce(x[1:], y[:-1]),
    "ce, accuracy": lambda x, y: (ce(x, y), (x.argmax(-1) == y).double()),
    "ce, entropy": lambda x, y: (ce(x, y), entropy(x.detach())),
    "ce of detached": lambda x, y: ce(x.detach(), y) + x.square().mean(),
    "ce unreduced": lambda x, y: F.cross_entropy(
        x.reshape(-1, x.shape[-1]), y.reshape(-1), reduction="none"
    ),
    "squares": lambda x, y: x.square().mean(),
    "two results": lambda x, y: (lambda z: (z.sum(), z))(x.exp()),
    "noise": lambda x, y: ce(x + 0 * torch.rand_like(x), y),
    "returns it": lambda x, y: (ce(x, y), x),
    "returns rows": lambda x, y: (ce(x, y), x[1:]),
    "returns a transpose": lambda x, y: (ce(x, y), x.transpose(0, -1)),
    "returns a diagonal": lambda x, y: (ce(x, y), x.diagonal()),
    "returns a cast": lambda x, y: (ce(x, y), x.double()),
    "returns a copy": lambda x, y: (ce(x, y), x.clone()),
    "returns a detached": lambda x, y: (ce(x, y), x.detach()[:1]),
    "writes": write,
    "writes a part": write_part,
    "unsqueezes": unsqueezed,
}
#: Later graphs of two tensors.
OF_TWO: dict[str, Callable[..., Any]] = {
    "sum": lambda a, b: a.square().mean() + b.exp().mean(),
    "losses": lambda a, b: ce(a, labels(a)) + ce(b, labels(b)),
    "writes the first": write_first,
    "writes both": lambda a, b: a.mul_(2).mean() + b.add_(1).square().mean(),
    "returns both": lambda a, b: (a.square().mean(), b[1:], a[:1]),
}


#: Later graphs of one tensor that have the leaves as well.
WITH_HEAD: dict[str, Callable[..., Any]] = {
    "another head": lambda x, h, w, b: (lambda z: (ce(x, labels(x)) + ce(z, labels(z)), z))(
        F.linear(h.tanh(), w)
    ),
    # No two of its classes are the same, of which rounding would decide the likeliest.
    "a head of it": lambda x, h, w, b: F.linear(
        x, torch.linspace(-1, 1, 3 * CLASSES**2, dtype=w.dtype).view(-1, CLASSES)
    ),
    "the same head": lambda x, h, w, b: ce(x, labels(x)) + F.linear(h, w, b).logsumexp(-1).mean(),
}


def in_no_grad(function):
    def run(x):
        with torch.no_grad():
            function(x)

    return run


def set_data(x):
    x.data = torch.full_like(x, 0.25)


#: What eager code makes of a tensor.
MAKES: dict[str, Callable[..., Any]] = {
    "rows": lambda x: x[1:],
    "every second": lambda x: x[::2],
    "inner rows": lambda x: x[:, 1:],
    "flat": lambda x: x.reshape(-1, CLASSES),
    "transpose": lambda x: x.transpose(0, 1),
    "view": lambda x: x.view(-1, x.shape[-1]),
    "select": lambda x: x[0],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "masked": lambda x: x[torch.arange(x.shape[0]) % 2 == 0],
    "picked": lambda x: x[torch.tensor([0, -1, 0])],
    "picked inside": lambda x: x[:, torch.tensor([0, -1])],
    "split": lambda x: x.split(2)[0],
    "unbind": lambda x: x.unbind(0)[-1],
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.view(-1).as_strided((2, CLASSES), (CLASSES, 1)),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "halved": lambda x: x / 2,
    "tanh": torch.tanh,
    "negative": lambda x: -x,
    "plus": lambda x: x + 1,
    "detach": lambda x: x.detach(),
    "leaf": lambda x: x.detach().requires_grad_(),
    "reversed": Reversed.apply,
    "passed": Passed.apply,
}
#: Reads of a tensor, which return numbers.
READS: dict[str, Callable[..., Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "sum": lambda x: x.sum(),
    "one": lambda x: x.flatten()[0].item(),
    "numpy": lambda x: x.detach().numpy().sum(),
    "storage": lambda x: x.untyped_storage().nbytes() > 0,
    "shared": lambda x: torch.empty(0, dtype=x.dtype).set_(x.detach()) + 0,
    "version": lambda x: (x.is_leaf, x.dim(), x.is_contiguous()),
}
#: What eager code does to a tensor in place.
CHANGES: dict[str, Callable[..., Any]] = {
    "zeros a row": in_no_grad(lambda x: x[0].zero_()),
    "doubles": in_no_grad(lambda x: x.mul_(2)),
    "doubles, recorded": lambda x: x.mul_(2),
    "writes detached": lambda x: x.detach()[-1].fill_(0.5),
    "sets data": set_data,
    "detaches": lambda x: x.detach_(),
    "swaps dimensions": in_no_grad(lambda x: x.detach().transpose_(0, 1)),
}
BACKWARDS = (
    *("backward", "backward", "backward twice", "inputs", "inputs and a tensor"),
    *("grad", "grad and a tensor", "grad of a tensor"),
)


@dataclass
class State:
    """What a program has made so far."""

    leaves: list[torch.Tensor]
    pool: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    hooked: dict[str, list[torch.Tensor]] = field(default_factory=dict)


def hook(state: State, kind: str, at: int, number: int) -> None:
    """Registers something that sees or changes a tensor's gradient."""
    x, seen = state.pool[at], state.hooked.setdefault(f"{kind} {number}", [])

    def note(grad):
        if grad is not None:
            seen.append(grad.detach().clone())

    def change(grad):
        note(grad)
        return None if grad is None else 10 * grad

    if kind == "watches":
        x.register_hook(note)
    elif kind == "changes":
        x.register_hook(change)
    elif kind == "retains":
        x.retain_grad()
    elif kind == "of the node":
        x.grad_fn.register_prehook(lambda grads: tuple(map(change, grads)))
    else:
        torch.autograd.graph.register_multi_grad_hook([x], lambda grads: note(grads[0]))


HOOKS = ("watches", "changes", "retains", "of the node", "of several")


LEAVES = ("hidden", "weight", "bias")


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 6, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.requires_grad_() for tensor in drawn]


def take(state: State, made: Any) -> None:
    """Puts the results of a graph where they belong."""
    for each in made if isinstance(made, tuple) else (made,):
        is_loss = each.dim() == 0 and each.requires_grad
        (state.losses if is_loss else state.pool).append(each)


def do(state: State, step: tuple[Any, ...], compile: Callable[..., Any]) -> None:
    kind, name, *places = step
    tensors = [state.pool[at] for at in places]
    if kind == "first":
        hidden, weight, bias = state.leaves
        take(state, compile(FIRST[name])(hidden * 1, weight, bias))
    elif kind == "later":
        take(state, compile(LATER[name])(tensors[0], labels(tensors[0])))
    elif kind == "later in no_grad":
        with torch.no_grad():
            take(state, compile(LATER[name])(tensors[0], labels(tensors[0])))
    elif kind == "of two":
        take(state, compile(OF_TWO[name])(*tensors))
    elif kind == "with head":
        take(state, compile(WITH_HEAD[name])(tensors[0], *state.leaves))
    elif kind == "freezes":
        state.leaves[LEAVES.index(name)].requires_grad_(False)
    elif kind == "makes":
        state.pool.append(MAKES[name](tensors[0]))
    elif kind == "reads":
        state.numbers.append(READS[name](tensors[0]))
    elif kind == "changes":
        CHANGES[name](tensors[0])
    elif kind == "hooks":
        hook(state, name, places[0], len(state.hooked))
    elif kind == "adds":
        state.losses.append(tensors[0].square().mean())
    else:
        finish(state, name, places)


def finish(state: State, kind: str, places: list[int]) -> None:
    if not state.losses:
        raise RuntimeError("a program without a loss")
    total = sum(loss * (i + 1) for i, loss in enumerate(state.losses))
    wanted = [leaf for leaf in state.leaves if leaf.requires_grad and kind != "grad of a tensor"]
    wanted += [state.pool[at] for at in places]
    if kind.startswith("grad"):
        state.numbers += torch.autograd.grad(total, wanted, allow_unused=True)
    elif kind.startswith("inputs"):
        total.backward(inputs=wanted)
    else:
        total.backward(retain_graph=kind == "backward twice")
        if kind == "backward twice":
            total.backward()


def run(program: list[tuple[Any, ...]], compile: Callable[..., Any]) -> dict[str, Any]:
    """All that can be seen of a program: tensors, gradients, what hooks saw."""
    state = State(leaves())
    for step in program:
        do(state, step, compile)
    tensors = [*state.leaves, *state.pool, *state.losses]
    return {
        "values": [x.detach() + 0 for x in tensors],
        "layouts": [(x.dtype, x.shape, x.stride(), x.requires_grad) for x in tensors],
        "grads": [x.grad for x in tensors if x.is_leaf or x.retains_grad],
        "hooked": state.hooked,
        "numbers": state.numbers,
    }


def drawn(seed: int, firsts: Iterable[str] = FIRST) -> list[tuple[Any, ...]]:
    """A program that works without a compiler.

    Args:
        firsts: the names of the graphs that it may begin with.
    """
    rng = random.Random(seed)
    while True:
        program = _drawn(rng, sorted(firsts))
        try:
            run(program, lambda function: function)
        except RuntimeError:  # what its backward needs was changed in place
            continue
        return program


#: The graphs that return logits beside a loss of them.
WITH_LOSS = (*(name for name in FIRST if "loss" in name), "another head")


def _is_comparable(name: str, x: torch.Tensor, program: list[tuple[Any, ...]]) -> bool:
    """Whether torch says what is right when a tensor is hooked or changed in this way."""
    if name == "sets data":  # autograd does not notice that what it saved was given other memory
        return not x._is_view() and all(
            kind in ("freezes", "first", "makes") for kind, *_ in program
        )
    if name == "of the node" and any(step[1] in WITH_LOSS for step in program):
        return False  # stock's node of the logits is that of the loss as well
    # Torch 2.13 crashes where a write to a view of a hooked result of a graph is recorded.
    if name == "doubles, recorded" and x._is_view() and any(step[0] == "hooks" for step in program):
        return False
    if name == "detaches" and x.dim() == 0:
        return False  # a loss that an op returns may be a view
    # A view that was changed in no_grad crashes torch 2.13 when it is hooked.
    return x._version == 0 or name not in HOOKS


def _drawn(rng: random.Random, firsts: list[str]) -> list[tuple[Any, ...]]:
    state, program = State(leaves()), []

    def attempt(step: tuple[Any, ...]) -> None:
        before = len(state.pool)
        try:
            do(state, step, lambda function: function)
        except Exception:
            del state.pool[before:]
        else:
            program.append(step)

    def has_views(x: torch.Tensor) -> bool:
        """Torch raises an internal error if a view of what changed so is of a subclass."""
        return any(view._base is x for view in state.pool)

    def between(most: int) -> None:
        for _ in range(rng.randint(0, most)):
            at = rng.randrange(max(0, len(state.pool) - 4), len(state.pool))
            kind = rng.choice(("makes",) * 4 + ("hooks",) * 2 + ("reads", "changes"))
            table = {"makes": MAKES, "reads": READS, "changes": CHANGES, "hooks": HOOKS}[kind]
            name, x = rng.choice(list(table)), state.pool[at]
            # A view of what was given other data is its view to autograd alone.
            is_tangled = name in ("detaches", "sets data") and has_views(x)
            if _is_comparable(name, x, program) and not is_tangled:
                attempt((kind, name, at))

    if rng.random() < 0.2:
        attempt(("freezes", rng.choice(LEAVES)))
    attempt(("first", rng.choice(firsts)))
    for _ in range(rng.randint(1, 3)):
        between(5)
        at = rng.randrange(len(state.pool))
        kind = rng.choice(("later",) * 6 + ("of two",) * 3 + ("with head", "later in no_grad"))
        table = {"of two": OF_TWO, "with head": WITH_HEAD}.get(kind, LATER)
        other = [rng.randrange(len(state.pool))] if kind == "of two" else []
        name = rng.choice(list(table))
        # Stock torch 2.13 crashes where a graph writes to a tensor of which a view is hooked.
        is_hooked = name.startswith("writes") and bool(state.hooked)
        # The next hook of a node would be of one that stock shares with a loss; see above.
        is_hooked |= name == "another head" and any("of the node" in kind for kind in state.hooked)
        if not is_hooked and not (name == "unsqueezes" and has_views(state.pool[at])):
            attempt((kind, name, at, *other))
    between(3)
    if rng.random() < 0.3 or not state.losses:
        attempt(("adds", "a loss", rng.randrange(len(state.pool))))
    kind = rng.choice(BACKWARDS)
    places = [at for at, x in enumerate(state.pool) if x.requires_grad]
    is_of_tensor = kind.endswith("tensor")
    if is_of_tensor and not places:
        kind, is_of_tensor = "backward", False
    program.append(("ends", kind, *([rng.choice(places)] if is_of_tensor else [])))
    return program
