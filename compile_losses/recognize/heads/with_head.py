"""A loss of a linear layer's output: both in one op, which never holds the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from compile_losses import implementations
from compile_losses.device_constants import constants_of
from compile_losses.distributed import are_dtensors
from compile_losses.lazy import LazyOutput
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.chunk_size import chunk_rows, held_rows
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.guards import refusal
from compile_losses.recognize.heads.head import NotAbsorbedError, computed
from compile_losses.recognize.heads.logits import MASKED, Logits, OutsideError, find_logits
from compile_losses.recognize.match import Match, example
from compile_losses.recognize.returned_logits import lazy_outputs
from compile_losses.request import Request
from compile_losses.switches import LAZY_LOGITS, PREFER_MEMORY, how_to_set
from compile_losses.torch_internals.tensors import shard_of, size_hint

#: What a reason begins with if a loss could not be taken along with its layer.
HELD = "without its linear layer"
#: Chunks of more than this part of the logits save too little for their launches, unless memory is
#: preferred. It is more than half: of two chunks of rows a label shifted away leaves one row less.
LARGEST_CHUNK = 0.51
#: From so many rows of logits for each feature on, copies of the layer's weight and of its gradient
#: pay: the logits take twice as much as both.
COPIED_WEIGHTS = 4


#: From the match of a loss to the match of the loss and its layer; None if there is no layer.
Take: TypeAlias = Callable[[Match, AtenReplay, Request], Match | None]


def through_linear(match: Match, replay: AtenReplay, take: Take, request: Request) -> Match:
    """A match of a loss, taken back through the linear layer that makes its logits.

    Args:
        take: the function for this loss.

    Returns:
        A match of the loss with its layer, or the given one. If there is a linear layer that can't
        be taken along, the reason is among the match's notes.
    """
    if refusal(match) is not None:
        return match
    try:
        found = take(match, replay, request)
        if found is None:
            return match
        reason = refusal(found)
        if reason is None:
            return found
    except OutsideError as error:
        reason = str(error)
        if request.lazily is None or not request.lazily.crosses:
            reason += f": {how_to_set(LAZY_LOGITS)} takes them along, if a compiled layer made them"
    except NotAbsorbedError as error:
        reason = str(error)
    match.notes.append(f"{HELD}: {reason}")
    return match


def take_cross_entropy(match: Match, replay: AtenReplay, request: Request) -> Match | None:
    """The match of cross entropy and its layer; None if there is no layer."""
    logits = find_logits(match, replay)
    if logits is None:
        return None
    target = example(match.args[1])
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise NotAbsorbedError("the target is not class indices")
    check_gain(match, logits, request)
    check_rows(match, match.args[3], logits, request)
    returned = lazy_outputs(logits.head, logits.outputs, replay, request.lazily)
    return _match(match, logits, returned)


def check_gain(match: Match, logits: Logits, request: Request, beside: float = 0) -> None:
    """Checks that a chunk holds about half of what all logits would take, or less.

    Linear layer and loss together take more launches than a kernel over the logits of one product.

    Args:
        beside: tensors of the logits' size that the op holds besides them.
    """
    whole = example(logits.head.node)
    needs_grad = example(match.root).requires_grad
    output = shard_of(whole)  # a rank holds the shard of a DTensor
    if needs_grad and output.dtype == torch.float16:
        raise NotAbsorbedError(
            "gradients in float16 would need the logits twice, which those in bfloat16 do not"
        )
    hidden, classes = logits.input.fake.shape[logits.class_dim], output.shape[-1]
    if not isinstance(hidden, int) or not isinstance(classes, int):
        raise NotAbsorbedError(
            "the number of its features, or of its classes, is a symbol: torch._dynamo.mark_static "
            "of the weight makes them known"
        )
    taken = shard_of(logits.input.fake)
    if not implementations.has_kernels(output.device):
        least = constants_of(output.device).hidden_without_kernels
        if request.prefer_memory and request.lowers and least is None and output is whole:
            raise NotAbsorbedError("there are no kernels: Inductor computes chunks of its rows")
        if not request.prefer_memory and (least is None or hidden < least):
            raise NotAbsorbedError(
                "there are no kernels: chunks would save memory, and in torch's ops may take "
                f"longer: {how_to_set(PREFER_MEMORY)} takes them"
            )
    made, picked = rows_of(output, classes), rows_of(taken, hidden)
    if made is None or picked is None:
        raise NotAbsorbedError(f"its rows are taken by a mask, {MASKED}")
    chunk = chunk_rows(picked, hidden, classes, output.dtype, output.device, beside=beside)
    held = held_rows(chunk, output.device, beside) / (1 + beside)  # of each tensor
    if held > (1 if request.prefer_memory else LARGEST_CHUNK) * made or chunk == made:
        row = classes * output.dtype.itemsize / 2**20
        told = f"its {made * row:.1f} MiB of logits are one chunk: nothing is saved"
        if chunk < made:
            told = (
                f"chunks would save {(made - held) * row:.1f} of its {made * row:.1f} MiB of "
                f"logits, and take more launches: {how_to_set(PREFER_MEMORY)} takes them"
            )
        raise NotAbsorbedError(told)
    if logits.copies_weight and picked < COPIED_WEIGHTS * hidden:
        raise NotAbsorbedError(
            f"copies of its weight and of the gradient would take as much as {picked} rows of it"
        )


def check_copy(of_teacher: Logits) -> None:
    """Checks that a teacher's weight is not copied, unless it is a part of it that takes at most
    half as much as the logits that are not held."""
    if not of_teacher.copies_weight:
        return
    logits, layer = example(of_teacher.head.node), of_teacher.head.weight.fake
    made, copied = (size_hint(each.numel()) for each in (logits, of_teacher.weight.fake))
    is_part = of_teacher.weight.fake.numel() < layer.numel()
    if not is_part or made is None or copied is None or 2 * copied > made:
        raise NotAbsorbedError(
            "its layer's weight would be copied, with what scales or picks its classes"
        )


def check_rows(match: Match, reduction: int, logits: Logits, request: Request) -> None:
    """Checks that an unreduced loss with a gradient is lowered, or may compute its logits twice."""
    if not example(match.root).requires_grad or reduction != REDUCTIONS["none"]:
        return
    if request.prefer_memory:
        return
    if not request.lowers or are_dtensors(logits.input.fake) or are_dtensors(logits.weight.fake):
        raise NotAbsorbedError(
            "the gradients of an unreduced loss would need the logits twice, as prefer_memory does"
        )
    if logits.copies_weight:
        raise NotAbsorbedError(
            "an unreduced loss may need its logits, which no copied weight makes"
        )


def rows_of(tensor: Tensor, columns: int) -> int | None:
    """How many rows of so many columns a tensor has, or had when it was traced."""
    return size_hint(tensor.numel() // columns if columns else 0)


def _match(match: Match, logits: Logits, returned: list[LazyOutput]) -> Match:
    """The match of cross entropy and its layer."""
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
        "dtype": loss_dtype(match),
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


def loss_dtype(match: Match) -> torch.dtype:
    """The dtype of the loss itself; the root's may come from the steps after it."""
    if not match.steps:
        return example(match.root).dtype  # float32 under autocast
    return match.kwargs.get("dtype", example(match.args[0]).dtype)
