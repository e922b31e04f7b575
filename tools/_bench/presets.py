"""Sizes that are measured, and which keys the rows select."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Sizes:
    """Heads on one rank and widths. `expanded`: query/key and value width of a head before absorption."""

    heads: int
    head_dim: int = 576
    v_dim: int = 512
    index_heads: int = 64
    index_dim: int = 128
    topk: int = 2048
    expanded: tuple[int, int] = (192, 128)


PRESETS = {
    "deepseek_v32": Sizes(heads=128),
    "glm5": Sizes(heads=64, index_heads=32, expanded=(256, 256)),
    # deepseek_v32 over 4, 8 and 16 tensor-parallel ranks: heads are sharded, the indexer is not
    "shard32": Sizes(heads=32),
    "shard16": Sizes(heads=16),
    "shard8": Sizes(heads=8),
    # the model of tools/demo, for a CPU
    "demo": Sizes(heads=4, head_dim=80, v_dim=64, index_heads=4, index_dim=32, topk=64, expanded=(32, 16)),
}

PATTERNS = {
    "random": "one causal sequence, every row draws its keys anew",
    "overlapping": "one causal sequence, the selection drifts slowly from row to row",
    "packed": "four causal sequences of different length, every row draws its keys anew",
}
# Lengths of the sequences of "packed", in sixteenths.
PACK = (5, 1, 8, 2)
# Of "overlapping": rows in which one random selection turns into the next.
DRIFT = 128


@dataclass(frozen=True)
class Case:
    """What is measured: S keys, of which the last T rows are queries."""

    preset: str
    length: int
    pattern: str = "random"
    max_rows: int | None = None

    @property
    def sizes(self) -> Sizes:
        return PRESETS[self.preset]

    @property
    def rows(self) -> int:
        return min(self.length, self.max_rows or self.length)

    def sequences(self) -> list[tuple[int, int]]:
        """First and one past the last row of each sequence, empty ones left out."""
        if self.pattern != "packed":
            return [(0, self.length)]
        borders = [self.length * sum(PACK[:i]) // sum(PACK) for i in range(len(PACK) + 1)]
        return [(a, b) for a, b in pairwise(borders) if a < b]

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"{self.preset}, S = {self.length}, T = {self.rows}, {self.pattern}: H = {s.heads}, "
            f"D/Dv = {s.head_dim}/{s.v_dim}, indexer {s.index_heads} x {s.index_dim}, topk {s.topk}"
        )
