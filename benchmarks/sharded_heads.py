"""A head that FSDP2 shards by classes: its weight gathered, or hidden states gathered instead.

Measured on a few ranks of one machine by ``benchmarks.vocabulary_parallel --loss of_rows``, and for
more ranks on paper. What a rank computes does not depend on their number: R rows of all C classes,
or N * R rows, those of all N ranks, of C / N classes. What it sends and receives does: of weight
and gradient (N - 1) / N of 2 * C * H numbers, of hidden states and theirs N - 1 times 2 * R * H.
A time on paper is what was measured less its collectives, and those bytes over the
bandwidth of the collectives that were measured alone, or over a network's.

The weight's collectives may run beside what a rank computes before, as FSDP2 runs them; nothing is
subtracted for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.linear_steps import Shape

ITEM = 2  # bytes of a number in bfloat16
#: Bytes a second of a rank's share of a network, of 400 Gbit/s for each GPU.
NETWORK = 50e9
#: The contenders, and what each sends; by their names in a table.
WAYS = {
    "ours_gathered": ("weight gathered", "weight"),
    "ours_of_rows": ("hidden gathered", "hidden"),
    "ours_of_logits_of_rows": ("hidden gathered, logits held", "hidden"),
}


@dataclass(frozen=True)
class Head:
    """Sizes of a step, and its milliseconds by contender, on so many ranks.

    Attributes:
        rows: of one rank.
    """

    rows: int
    hidden: int
    classes: int
    ranks: int
    ms: Mapping[str, float]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]]) -> list[Head]:
        """Of the lines of a file, one for each shape and number of ranks."""
        found: dict[tuple[str, str], dict[str, float]] = {}
        for row in rows:
            if row["ms"]:
                own = found.setdefault((row["shape"], row["ranks"]), {})
                own[row["contender"]] = float(row["ms"])
        heads = []
        for (text, count), ms in found.items():
            shape, ranks = Shape.parse(text), int(count)
            heads.append(cls(shape.rows // ranks, shape.hidden, shape.classes, ranks, ms))
        return heads

    def exchanged(self, what: str, ranks: int) -> float:
        """Bytes that a rank sends in a step, and as many that it receives."""
        numbers = self.classes / ranks if what == "weight" else self.rows
        return 2.0 * (ranks - 1) * numbers * self.hidden * ITEM

    def bandwidth(self, what: str) -> float:
        """Bytes a second, measured with the collectives alone."""
        return self.exchanged(what, self.ranks) / (self.ms[f"exchange_{what}"] / 1e3)

    def estimate_ms(self, contender: str, ranks: int, bandwidth: float | None = None) -> float:
        """A step's time on so many ranks.

        Args:
            bandwidth: of the collectives in bytes a second; by default that measured.
        """
        what = WAYS[contender][1]
        computed = self.ms[contender] - self.ms[f"exchange_{what}"]
        return computed + 1e3 * self.exchanged(what, ranks) / (bandwidth or self.bandwidth(what))

    def gathered_mib(self, contender: str, ranks: int) -> float:
        """The memory of what a rank gathers and of its gradient."""
        numbers = self.classes if WAYS[contender][1] == "weight" else self.rows * ranks
        return 2.0 * numbers * self.hidden * ITEM / 2**20
