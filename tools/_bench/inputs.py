"""The tensors of one case, drawn when first asked for. The same case always has the same values."""

import zlib
from functools import cached_property

import torch
from torch import Tensor

import dsa_ops

from .presets import DRIFT, Case

CHUNK = 1 << 27  # elements of [rows, keys] that are drawn at a time


def bounds(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """starts and ends of the last T rows, int32."""
    rows = torch.arange(case.length, dtype=torch.int32, device=device)
    starts = torch.zeros_like(rows)
    for first, last in case.sequences():
        starts[first:last] = first
    return starts[-case.rows :].clone(), rows[-case.rows :] + 1


def some_rows(count: int, wanted: int, device: torch.device) -> Tensor:
    """Row numbers, evenly spread, the first and the last among them."""
    return torch.linspace(0, count - 1, min(wanted, count)).round().long().unique().to(device)


def drift(rows: int, generator: torch.Generator, *shape: int) -> Tensor:
    """[rows, *shape] normal numbers that turn into others within DRIFT rows."""
    device = generator.device
    anchors = torch.randn(rows // DRIFT + 2, *shape, generator=generator, device=device)
    row = torch.arange(rows, device=device)
    part = ((row % DRIFT) / DRIFT).view(-1, *(1 for _ in shape))
    mixed = torch.lerp(anchors[row // DRIFT], anchors[row // DRIFT + 1], part)
    return mixed.div_((part.square() + (1 - part).square()).sqrt())


def draw_ids(
    starts: Tensor, ends: Tensor, keys: int, topk: int, overlapping: bool, generator: torch.Generator
) -> Tensor:
    """[T, topk] int32: distinct visible ids, ascending, then -1. All of them where a row sees no more than topk."""
    device, rows, kept = starts.device, starts.numel(), min(topk, keys)
    indices = torch.full((rows, topk), -1, dtype=torch.int32, device=device)
    chunk = max(CHUNK // keys // DRIFT, 1) * DRIFT
    everything = torch.arange(keys, device=device)
    following = torch.rand(keys, generator=generator, device=device)
    for first in range(0, rows, chunk):
        last = min(first + chunk, rows)
        if overlapping:
            anchors = torch.rand((last - first - 1) // DRIFT + 2, keys, generator=generator, device=device)
            anchors[0], following = following, anchors[-1]
            row = torch.arange(last - first, device=device)
            part = ((row % DRIFT) / DRIFT).unsqueeze(1)
            priority = torch.lerp(anchors[row // DRIFT], anchors[row // DRIFT + 1], part)
        else:
            priority = torch.rand(last - first, keys, generator=generator, device=device)
        unseen = (everything < starts[first:last, None]) | (everything >= ends[first:last, None])
        best = priority.masked_fill_(unseen, -1).topk(kept)
        ids = best.indices.masked_fill_(best.values < 0, keys).sort().values
        indices[first:last, :kept] = ids.masked_fill_(ids == keys, -1)
    return indices


def overlap(indices: Tensor) -> float:
    """Share of a row's keys that the row before it has selected too, mean over 32 rows."""
    rows = torch.linspace(1, indices.shape[0] - 1, 32).long().unique().tolist() if indices.shape[0] > 1 else []
    shares = [torch.isin(indices[t][indices[t] >= 0], indices[t - 1]).double().mean().item() for t in rows]
    return sum(shares) / max(len(shares), 1)


class Inputs:
    """`case` on `device` in `dtype`; weights and what the ops return in float32 are float32."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0):
        self.case, self.sizes, self.device, self.dtype, self.seed = case, case.sizes, device, dtype, seed
        self.scale = self.sizes.head_dim**-0.5
        self.starts, self.ends = bounds(case, device)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(name.encode()))

    def _normal(self, name: str, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator(name), device=self.device, dtype=self.dtype)

    def _per_row(self, name: str, *shape: int) -> Tensor:
        """Of the indexer: in the overlapping pattern it changes slowly, and so does what the indexer selects."""
        if self.case.pattern == "overlapping":
            return drift(self.case.rows, self._generator(name), *shape)
        return torch.randn(self.case.rows, *shape, generator=self._generator(name), device=self.device)

    @cached_property
    def q(self) -> Tensor:
        return self._normal("q", self.case.rows, self.sizes.heads, self.sizes.head_dim)

    @cached_property
    def kv(self) -> Tensor:
        return self._normal("kv", self.case.length, self.sizes.head_dim)

    @cached_property
    def grad_out(self) -> Tensor:
        return self._normal("grad_out", self.case.rows, self.sizes.heads, self.sizes.v_dim)

    @cached_property
    def index_q(self) -> Tensor:
        return self._per_row("index_q", self.sizes.index_heads, self.sizes.index_dim).to(self.dtype)

    @cached_property
    def index_k(self) -> Tensor:
        return self._normal("index_k", self.case.length, self.sizes.index_dim)

    @cached_property
    def index_weights(self) -> Tensor:
        scale = (self.sizes.index_heads * self.sizes.index_dim) ** -0.5
        return self._per_row("index_weights", self.sizes.index_heads) * scale

    @cached_property
    def indices(self) -> Tensor:
        overlapping = self.case.pattern == "overlapping"
        generator = self._generator("indices")
        return draw_ids(self.starts, self.ends, self.case.length, self.sizes.topk, overlapping, generator)

    @cached_property
    def topk_length(self) -> Tensor:
        return (self.indices >= 0).sum(-1, dtype=torch.int32)

    @cached_property
    def pairs(self) -> int:
        """Valid slots of all rows."""
        return (self.ends - self.starts).clamp(max=self.sizes.topk).sum().item()

    @cached_property
    def visible(self) -> int:
        """Keys that are in sight, of all rows."""
        return (self.ends.long() - self.starts).sum().item()

    # What comes out of a forward, for backwards and losses to start from. Unfused: no kernel is measured on the results
    # of another.

    @cached_property
    @dsa_ops.backend("unfused")
    def forward(self) -> tuple[Tensor, Tensor]:
        return tuple(dsa_ops.sparse_mla(self.q, self.kv, self.indices, self.scale, self.sizes.v_dim))

    @property
    def out(self) -> Tensor:
        return self.forward[0]

    @property
    def lse(self) -> Tensor:
        return self.forward[1]

    @cached_property
    @dsa_ops.backend("unfused")
    def scores(self) -> Tensor:
        return dsa_ops.indexer_scores(self.index_q, self.index_k, self.index_weights, self.indices)

    @cached_property
    @dsa_ops.backend("unfused")
    def target(self) -> Tensor:
        return dsa_ops.attention_target(self.q, self.kv, self.lse, self.indices, self.scale)

    @cached_property
    def grad_kl(self) -> Tensor:
        """Of the mean over rows."""
        return torch.full((self.case.rows,), 1 / self.case.rows, device=self.device)

    @cached_property
    @dsa_ops.backend("unfused")
    def grad_scores(self) -> Tensor:
        return torch.ops.dsa.indexer_kl_backward(self.grad_kl, self.target, self.scores, self.indices)

    @cached_property
    def dense_lse(self) -> Tensor:
        """About what attention over all visible keys has; exact in the rows of `dense_rows`."""
        lse = ((self.ends - self.starts).float().log() + 0.5).unsqueeze(1).repeat(1, self.sizes.heads)
        for row in self.dense_rows.tolist():
            keys = self.kv[int(self.starts[row]) : int(self.ends[row])].double()
            lse[row] = (self.scale * (self.q[row].double() @ keys.T)).logsumexp(-1)
        return lse

    @property
    def dense_rows(self) -> Tensor:
        """Where the dense loss is compared: the op promises nothing for an lse that is not attention's own."""
        return some_rows(self.case.rows, 4, self.device)

    def only(self, rows: Tensor) -> "Inputs":
        """The same keys with some of the rows, for a smaller call."""
        small = Inputs.__new__(Inputs)
        small.__dict__.update(self.__dict__)
        for name in ("starts", "ends", "q", "index_q", "index_weights", "grad_kl", "dense_lse"):
            small.__dict__[name] = getattr(self, name)[rows]
        return small
