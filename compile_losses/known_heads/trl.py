"""TRL's head of SFT, DPO, GRPO, KTO and RLOO, which ``add_fused_lm_head`` gives a model.

What stays theirs is what is around the call: the choice of the rows whose labels count, the gather
of FSDP2's weights, the cast of the head to float32. So does all of a call under DeepSpeed's ZeRO-3,
whose weights their backward gathers a second time.

Their product has autocast's dtype or that of hidden, to which they cast weight and bias. A target
outside of the classes, which no trainer gives, has there the log-probability of a logit of 0. Here
it is an error as in torch, and one of -100 has 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses.known_heads.head import KnownHead, product_dtype, refuse_layer
from compile_losses.known_heads.rows import rows_of

#: Their defaults, and the rows of which they compute a block of logits at a time.
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_ROWS = 4096


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = _OUTPUTS,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None] | str:
    """Log-probabilities of the targets, and what else was asked for, [rows] in float32."""
    if not temperature > 0:
        return "its temperature is not positive"
    if final_logit_softcapping is not None and not final_logit_softcapping > 0:
        return "its soft-cap is not positive"
    reason = refuse_layer(hidden, weight, bias, targets, (_ROWS, chunk_size))
    if reason is not None:
        return reason
    rows = rows_of(
        hidden,
        weight,
        bias,
        targets,
        product_dtype(hidden),
        scale=logit_scale,
        softcap=final_logit_softcapping,
        temperature=temperature,
        squares="log_sum_sq_probs" in outputs,
    )
    return (
        rows.log_probs.to(torch.float32),
        rows.entropy.to(torch.float32) if "entropy" in outputs else None,
        None if rows.log_squares is None else rows.log_squares.to(torch.float32),
        rows.mean.to(torch.float32) if "mean_logits" in outputs else None,
        rows.is_first if "is_top1" in outputs else None,
    )


HEADS = (
    KnownHead(
        package="trl",
        versions=("1.15", "1.16"),
        module="trl.kernels.chunked_logprob",
        name="ChunkedLogProbFunction",
        loss="linear_cross_entropy",
        compute=log_probs,
    ),
)
