"""Cross entropy of a linear layer's output: both in one op, which never holds the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses.distributed import are_dtensors
from compile_losses.lazy import LazyOutput
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.chunk_size import chunk_rows
from compile_losses.recognize.guards import refusal
from compile_losses.recognize.head import NotAbsorbedError, computed
from compile_losses.recognize.logits import Logits, find_logits
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.returned_logits import Lazily, lazy_outputs
from compile_losses.recognize.shadow import Shadow, aten
from compile_losses.switches import is_set
from compile_losses.torch_internals.tensors import shard_of

#: Chunks of more than this part of the logits save too little for their launches, unless memory
#: is preferred. A label shifted away leaves one row less than twice a chunk.
LARGEST_CHUNK = 0.51
#: A copy of the layer's weight, and of its gradient, pay from so many rows of logits for each
#: feature: twice what both take.
COPIED_WEIGHTS = 4


def prefer_memory_by_default() -> bool:
    """Whether the environment asks for it: COMPILE_LOSSES_PREFER_MEMORY=1."""
    return is_set("COMPILE_LOSSES_PREFER_MEMORY")


def through_linear(
    match: Match,
    shadow: Shadow,
    *,
    prefer_memory: bool = False,
    lowers: bool = False,
    lazily: Lazily | None = None,
) -> Match:
    """A match of cross entropy, taken back through the linear layer that makes its logits.

    Args:
        prefer_memory: whether to take it where the op saves memory and may be the slower one.
        lowers: whether ``lower.plan`` will see the op: it finds gradients by row that the forward
            can compute, and else has the logits computed as torch does.
        lazily: whether the graph may return what its logits are computed of; None if nobody asked.

    Returns:
        A match of linear_cross_entropy, or the given one, with the reason noted where there is a
        linear layer that can't be taken along.
    """
    if match.op != "cross_entropy" or refusal(match) is not None:
        return match
    try:
        logits = find_logits(match, shadow)
        if logits is None:
            return match
        _check_gain(match, logits, prefer_memory)
        _check_rows(match, logits, prefer_memory, lowers)
        returned = lazy_outputs(logits.head, logits.outputs, shadow, lazily)
        found = _match(match, logits, returned)
        reason = refusal(found)
        if reason is None:
            return found
    except NotAbsorbedError as error:
        reason = str(error)
    match.notes.append(f"without its linear layer: {reason}")
    return match


def _check_gain(match: Match, logits: Logits, prefer_memory: bool) -> None:
    """Linear layer and loss together pay where a chunk is about half of the logits, or less.

    They take more launches than a kernel over the logits of one large product.
    """
    target, output = example(match.args[1]), example(logits.head.node)
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise NotAbsorbedError("the target is not class indices")
    needs_grad = example(match.root).requires_grad
    output = shard_of(output)  # of a DTensor the shard is what is held
    if needs_grad and output.dtype == torch.float16:
        raise NotAbsorbedError("gradients in float16 would need the logits twice")
    hidden, classes = logits.input.fake.shape[logits.class_dim], output.shape[-1]
    if not isinstance(hidden, int) or not isinstance(classes, int):
        raise NotAbsorbedError("its sizes are not known")
    taken = shard_of(logits.input.fake)
    made, picked = _rows(output, classes), _rows(taken, hidden)
    if made is None or picked is None:
        raise NotAbsorbedError("its sizes are not known")
    chunk = chunk_rows(picked, hidden, classes, output.dtype)
    if chunk > (1 if prefer_memory else LARGEST_CHUNK) * made or chunk == made:
        row = classes * output.dtype.itemsize / 2**20
        told = f"its {made * row:.1f} MiB of logits are one chunk: nothing is saved"
        if chunk < made:
            told = (
                f"chunks would save {(made - chunk) * row:.1f} of its {made * row:.1f} MiB of "
                "logits, and take more launches: options={'prefer_memory': True} takes them"
            )
        raise NotAbsorbedError(told)
    if logits.copies_weight and picked < COPIED_WEIGHTS * hidden:
        raise NotAbsorbedError(
            f"copies of its weight and of the gradient would take as much as {picked} rows of it"
        )


def _check_rows(match: Match, logits: Logits, prefer_memory: bool, lowers: bool) -> None:
    """The gradients of a loss that is not reduced need the logits twice, or lowering."""
    if not example(match.root).requires_grad or match.args[3] != REDUCTIONS["none"]:
        return
    if prefer_memory:
        return
    if not lowers or are_dtensors(logits.input.fake) or are_dtensors(logits.weight.fake):
        raise NotAbsorbedError("the gradients of an unreduced loss would need the logits twice")
    if logits.copies_weight:
        raise NotAbsorbedError(
            "an unreduced loss may need its logits, which no copied weight makes"
        )


def _rows(tensor: Tensor, columns: int) -> int | None:
    """How many rows of so many columns a tensor has, or had when it was traced."""
    rows = tensor.numel() // columns if columns else 0
    hint: int | None = rows if isinstance(rows, int) else rows.node.hint
    return hint


def _match(match: Match, logits: Logits, returned: list[LazyOutput]) -> Match:
    """The match of both."""
    input = logits.input
    rank = input.fake.dim()
    if logits.class_dim != (0 if rank == 1 else 1):
        raise NotAbsorbedError("its classes are not those of the loss")
    if rank > 2:
        input = computed(aten.permute.default, input, [0, *range(2, rank), 1])
    _, target, weight, reduction, ignore_index, label_smoothing = match.args
    kwargs = {
        "linear_bias": logits.bias and logits.bias.argument,
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": logits.softcap,
        "dtype": _loss_dtype(match),
    }
    absorbed = ["a linear layer", *match.absorbed, *logits.absorbed]
    late = ["the logits are returned lazily"] if returned else []
    return Match(
        match.root,
        "linear_cross_entropy",
        (input.argument, logits.weight.argument, target),
        {name: value for name, value in kwargs.items() if value is not None},
        list(dict.fromkeys([*match.interior, *reversed(logits.nodes), logits.head.node])),
        absorbed,
        match.steps,
        [*match.notes, *late],
        returned,
    )


def _loss_dtype(match: Match) -> torch.dtype:
    """The dtype of the cross entropy itself; the root's may come from the steps after it."""
    if not match.steps:
        return example(match.root).dtype  # float32 under autocast
    return match.kwargs.get("dtype", example(match.args[0]).dtype)
