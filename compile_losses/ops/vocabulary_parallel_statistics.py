"""Statistics of rows of logits whose classes are sharded: what each shard computes on its own.

Log-probabilities and entropies are made of them. A shard holds the classes [first_class,
first_class + its own number) of ``classes``, and reads its logits [rows, its own classes] once with
:mod:`compile_losses.ops.row_statistics`:

- ``fused::vocabulary_parallel_statistics``: what a shard knows of each row, [5, rows]: its largest
  logit, the logarithm of the sum of exponentials relative to it, the entropy of the shard's own
  softmax, the negative log-likelihood in that softmax (0 if another shard holds the target), and
  the bits of the class of the largest logit. With an index [rows, K] the logits of K classes a row
  follow, 0 in shards that do not hold them.
- ``Merged``: the statistics of the whole rows, from these numbers of all shards. Between the two
  the numbers are gathered: the only communication.
- ``fused::vocabulary_parallel_statistics_gradient``: the gradient of a shard's logits, from the
  merged statistics, in one more read. grad_picked [rows, K] is of the logits of an index.

For shard r let m_r be its largest logit, s_r the sum of exp(z - m_r), and H_r the entropy of its
own softmax. With M the largest m_r and S = sum exp(m_r - M) s_r, shard r has the probability
``q_r = exp(m_r - M) s_r / S``. Then

    entropy = sum q_r (H_r - log(q_r))
    nll = nll_r - log(q_r)      of the shard r that holds the target

No term is negative, so that none cancels. The shards send m_r and log(s_r), not their sum: with
logits near 700 in float32 the sum would give gradients errors of 5e-5.

A target that is ignore_index picks no class. The other gradients are [rows], or None. Numbers are
float32, and float64 for float64; target and index are int64.

Raises:
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index. On CUDA the
        kernel stops with a device-side assertion.
    RuntimeError: on the CPU, an index outside [0, classes). On CUDA as above.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops import row_statistics
from compile_losses.ops.checks import accumulation_type
from compile_losses.ops.row_picks import sums_of_equal
from compile_losses.ops.vocabulary_parallel import SHARD

NAME = "vocabulary_parallel_statistics"
PICKED = "Tensor? target, Tensor? index"
OPTIONS = f"{SHARD}, SymInt ignore_index"

statistics = library.define(f"{NAME}(Tensor logits, {PICKED}, {OPTIONS}) -> Tensor")
gradient = library.define(
    f"{NAME}_gradient(Tensor? grad_nll, Tensor? grad_entropy, Tensor? grad_picked, Tensor logits, "
    f"{PICKED}, Tensor stats, {OPTIONS}) -> Tensor"
)

#: How many numbers a shard sends of each row, without the logits of several classes.
NUMBERS = 5
#: The target of a row whose class another shard holds, or that has none.
ELSEWHERE = -(2**63)
#: Integers as wide as the numbers.
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class OwnClasses:
    """The classes that a shard holds: the first, how many, and how many there are in all."""

    first: int
    count: int
    classes: int

    def holds(self, index: Tensor) -> Tensor:
        return (index >= self.first) & (index < self.first + self.count)

    def targets(self, target: Tensor, ignore_index: int) -> Tensor:
        """[rows]: the place among the shard's classes, or ELSEWHERE. What no shard holds remains as
        it is: out of bounds, which the kernel refuses."""
        valid = (target >= 0) & (target < self.classes)
        other = torch.where(valid | (target == ignore_index), ELSEWHERE, target)
        return torch.where(self.holds(target), target - self.first, other)

    def places(self, index: Tensor) -> Tensor:
        """The same of several classes a row: 0 where another shard holds the class."""
        valid = (index >= 0) & (index < self.classes)
        return torch.where(self.holds(index), index - self.first, torch.where(valid, 0, index))


def numbers_of(
    logits: Tensor, target: Tensor | None, own: OwnClasses, ignore_index: int, softcap: float | None
) -> Tensor:
    """[NUMBERS, rows]: what a shard knows of each row of its logits."""
    if logits.shape[1] == 0:  # as one class that is impossible
        logits, softcap = logits.new_full((logits.shape[0], 1), -torch.inf), None
    targets = None if target is None else own.targets(target, ignore_index)
    nll, _, entropy, _, largest, argmax, stats, _ = row_statistics.forward(
        logits, targets, ELSEWHERE, softcap
    )
    # The sums of no exponential: a nan there would hide what the other shards know.
    possible = largest != -torch.inf
    entropy = torch.where(possible, entropy, 0)
    nll = torch.zeros_like(entropy) if target is None else torch.where(possible, nll, 0)
    bits = (argmax + own.first).to(_BITS[entropy.dtype]).view(entropy.dtype)
    return torch.stack([largest, stats[:, 1], entropy, nll, bits])


def gradient_of(
    grad_nll: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor | None,
    stats: Tensor,
    own: OwnClasses,
    ignore_index: int,
    softcap: float | None,
    *,
    overwrites: bool,
) -> Tensor:
    """The gradient of a shard's logits before the soft-cap.

    Args:
        grad_nll, grad_logsumexp, grad_entropy: [rows], or None.
        stats: of the whole rows.
        overwrites: whether it is written over the logits.
    """
    if logits.shape[1] == 0:
        return logits if overwrites else torch.empty_like(logits)
    targets = None
    if grad_nll is not None and target is not None:
        targets = own.targets(target, ignore_index)
        # If another shard holds the target, the logsumexp remains.
        elsewhere = (targets == ELSEWHERE) & (target != ignore_index)
        rest = torch.where(elsewhere, grad_nll, 0)
        grad_logsumexp = rest if grad_logsumexp is None else grad_logsumexp + rest
    given = (grad_nll, grad_logsumexp, grad_entropy, None)
    if not overwrites:
        return row_statistics.backward(*given, logits, targets, stats, ELSEWHERE, softcap)
    row_statistics.backward_(*given, logits, targets, stats, ELSEWHERE, softcap)
    return logits


def statistics_kernel(
    logits: Tensor,
    target: Tensor | None,
    index: Tensor | None,
    first_class: int,
    classes: int,
    ignore_index: int,
) -> Tensor:
    own = OwnClasses(first_class, logits.shape[1], classes)
    numbers = numbers_of(logits, target, own, ignore_index, None)
    if index is None:
        return numbers
    picked = numbers.new_zeros(index.shape)
    if own.count > 0:
        found = logits.gather(1, own.places(index)).to(picked.dtype)
        picked = torch.where(own.holds(index), found, 0)
    return torch.cat([numbers, picked.t()])


def gradient_kernel(
    grad_nll: Tensor | None,
    grad_entropy: Tensor | None,
    grad_picked: Tensor | None,
    logits: Tensor,
    target: Tensor | None,
    index: Tensor | None,
    stats: Tensor,
    first_class: int,
    classes: int,
    ignore_index: int,
) -> Tensor:
    own = OwnClasses(first_class, logits.shape[1], classes)
    of_logsumexp = None if grad_picked is None else -grad_picked.sum(1)
    result = gradient_of(
        grad_nll, of_logsumexp, grad_entropy, logits, target, stats, own, ignore_index, None,
        overwrites=False,
    )  # fmt: skip
    if grad_picked is not None and index is not None and own.count > 0:
        picked = torch.where(own.holds(index), grad_picked, 0)
        # Without atomics: equal classes of a row write equal numbers.
        places, sums = sums_of_equal(own.places(index), picked)
        result.scatter_(1, places, (result.gather(1, places) + sums).to(result.dtype))
    return result


def statistics_fake(logits: Tensor, target: Tensor | None, index: Tensor | None, *_: int) -> Tensor:
    picked = 0 if index is None else index.shape[1]
    dtype = accumulation_type(logits.dtype)
    return logits.new_empty((NUMBERS + picked, logits.shape[0]), dtype=dtype)


def gradient_fake(*arguments: Tensor) -> Tensor:
    logits = arguments[3]
    return logits.new_empty(logits.shape)


library.compose(statistics, statistics_kernel, statistics_fake)
library.compose(gradient, gradient_kernel, gradient_fake)


class Merged:
    """The statistics of whole rows.

    Attributes:
        entropy, argmax: [rows].
        stats: [rows, 3], as those of ``row_statistics``.
    """

    def __init__(self, numbers: Tensor, classes: int) -> None:  # [shards, NUMBERS + K, rows]
        largest, log_sums, entropies, self._nlls, bits = numbers[:, :NUMBERS].unbind(1)
        self._picked, self._classes = numbers[:, NUMBERS:], classes
        likeliest = largest.argmax(0, keepdim=True)
        self._largest = largest.gather(0, likeliest).squeeze(0)
        relative = (largest - self._largest) + log_sums
        self._log_sum = relative.exp().sum(0).log()
        self._logarithms = relative - self._log_sum
        shares = self._logarithms.exp()
        terms = shares * (entropies - self._logarithms)
        self.entropy = torch.where(shares == 0, 0, terms).sum(0)
        argmax = bits.gather(0, likeliest).squeeze(0)
        self.argmax = argmax.view(_BITS[bits.dtype]).to(torch.int64)
        self.stats = torch.stack([self._largest, self._log_sum, self.entropy], 1)

    def nll(self, target: Tensor, ignore_index: int) -> Tensor:
        """[rows]: the negative log-likelihood of each target, 0 of those that are ignored."""
        of_holder = (self._nlls - self._logarithms).gather(0, self._holder(target).unsqueeze(0))
        return torch.where(target == ignore_index, 0, of_holder.squeeze(0))

    def log_probs(self, index: Tensor) -> Tensor:
        """[rows, K]: the log-probabilities of the classes whose logits were sent."""
        holder = self._holder(index).t().unsqueeze(0)
        picked = self._picked.gather(0, holder).squeeze(0)
        return ((picked - self._largest) - self._log_sum).t().contiguous()

    def _holder(self, index: Tensor) -> Tensor:
        """Which shard holds a class, as torch.chunk deals them out."""
        shards = self._picked.shape[0]
        return (index // -(-self._classes // shards)).clamp(0, shards - 1)
