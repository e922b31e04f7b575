"""Unfused dsa::dense_indexer_kl and its backward: KL over every visible key, streamed in tiles; backward recomputes.

T query rows, S keys, H heads, D width, I indexer heads, E indexer width; R rows and N keys of a tile.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import bmm_wide, mm_wide, operand_dtype, pad_width, relu_gradient, workspace_bytes
from dsa_ops.unfused._tiles import Grid, GridTile, IndexRows, key_tile, row_tiles


class _AttentionRows:
    """The attention queries of one row tile, ready to give the target on key tiles."""

    def __init__(self, q: Tensor, lse: Tensor, tile: GridTile, softmax_scale: float, total_heads: int):
        self.operand = operand_dtype(q.dtype, q.device)
        self.q_RHD = pad_width(tile.rows_of(q)).to(self.operand)
        lse = tile.rows_of(lse)
        self.minus_lse_RH = lse.neg()  # infinite for rows without a key, which see nothing below
        self.softmax_scale = softmax_scale
        self.total_heads = total_heads

    def target(self, keys: Tensor, visible_RN: Tensor) -> Tensor:
        """[R, N]: attention weights summed over this rank's heads, divided by all heads, 0 where not visible."""
        rows, heads, width = self.q_RHD.shape
        keys = keys.to(self.operand)
        if keys.dim() == 2:  # one latent key for all heads
            logits = mm_wide(self.q_RHD.reshape(rows * heads, width), keys.t()).view(rows, heads, -1)
            minus_lse, head_dim = self.minus_lse_RH[..., None], 1
        else:
            logits = bmm_wide(self.q_RHD.transpose(0, 1), keys.permute(1, 2, 0))
            minus_lse, head_dim = self.minus_lse_RH.t()[..., None], 0
        torch.add(minus_lse, logits, alpha=self.softmax_scale, out=logits)
        return logits.exp_().sum(head_dim).div_(self.total_heads).masked_fill_(~visible_RN, 0)


class _IndexTile:
    """Normalised scores of one row tile against its key tiles: computed once if the budget keeps them, else twice."""

    def __init__(self, rows: IndexRows, k: Tensor, tile: GridTile, grid: Grid, keep_dots: bool, budget: int):
        self.rows, self.k, self.tile, self.grid, self.keep_dots = rows, k, tile, grid, keep_dots
        per_score = rows.weights_RI.element_size() * (1 + (rows.weights_RI.shape[1] if keep_dots else 0)) + 1
        keep = len(tile.key_tiles) * grid.rows * grid.keys * per_score <= budget // 2
        self.kept: list | None = [] if keep else None
        partial = rows.weights_RI.new_empty(grid.rows, len(tile.key_tiles))
        for i, first_key in enumerate(tile.key_tiles):
            found = self._score(first_key)
            partial[:, i] = torch.logsumexp(found[0], 1)
            if self.kept is not None:
                self.kept.append(found)
        lse = torch.logsumexp(partial, 1, keepdim=True)
        self.lse_R1 = lse.masked_fill_(lse == -torch.inf, 0)  # rows without a key

    def _score(self, first_key: int) -> tuple[Tensor, Tensor, Tensor | None]:
        dots_RIN = self.rows.dots(key_tile(self.k, first_key, self.grid))
        scores_RN = self.rows.scores(dots_RIN, inplace=not self.keep_dots)
        visible_RN = self.tile.visible(first_key, self.grid.keys)
        return scores_RN.masked_fill_(~visible_RN, -torch.inf), visible_RN, dots_RIN if self.keep_dots else None

    def key_tiles(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """First key, log softmax [R, N] (-inf where not visible), which are visible, and the products if kept."""
        for i, first_key in enumerate(self.tile.key_tiles):
            scores_RN, visible_RN, dots_RIN = self._score(first_key) if self.kept is None else self.kept[i]
            yield first_key, scores_RN.sub_(self.lse_R1), visible_RN, dots_RIN


def _row_tiles(
    index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, relu, total_heads, keep_dots
) -> Iterator[tuple[GridTile, Grid, _IndexTile, _AttentionRows]]:
    heads = q.shape[1]
    grid = Grid.for_heads(max(index_q.shape[1], heads), q.device)
    budget = workspace_bytes(q.device)
    for tile in row_tiles(starts, ends, index_k.shape[0], grid):
        if len(tile.key_tiles):
            rows = IndexRows(index_q, index_weights, tile, relu)
            index_tile = _IndexTile(rows, index_k, tile, grid, keep_dots, budget)
            yield tile, grid, index_tile, _AttentionRows(q, lse, tile, softmax_scale, total_heads or heads)


def dense_indexer_kl_unfused(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    starts: Tensor,
    ends: Tensor,
    softmax_scale: float,
    row_weight: Tensor,
    relu: bool,
    total_heads: int,
) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(index_q.dtype)
    entropy = total_heads in (0, q.shape[1])  # a rank with a share of the heads returns the cross entropy alone
    kl = index_q.new_zeros(index_q.shape[0], dtype=acc)
    for tile, grid, index_tile, attention_rows in _row_tiles(
        index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, relu, total_heads, keep_dots=False
    ):
        kl_R = kl.new_zeros(grid.rows)
        for first_key, log_p_RN, visible_RN, _ in index_tile.key_tiles():
            t_RN = attention_rows.target(key_tile(k, first_key, grid), visible_RN)
            log_ratio_RN = t_RN.log() - log_p_RN if entropy else -log_p_RN
            kl_R += (t_RN * log_ratio_RN).masked_fill_(t_RN == 0, 0).sum(1)  # 0 log 0 = 0
        tile.store(kl, kl_R)
    # not a product with zero: the kl of a row of weight 0, the weight of a row without keys may be anything
    counts = (row_weight != 0) & (ends.clamp(max=index_k.shape[0]) > starts.clamp(min=0))
    return torch.where(counts, row_weight.to(acc) * kl, 0).sum(), kl


def dense_indexer_kl_backward_unfused(
    grad_loss: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    starts: Tensor,
    ends: Tensor,
    softmax_scale: float,
    row_weight: Tensor,
    relu: bool,
    total_heads: int,
    need_q: bool,
    need_k: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation_dtype(index_q.dtype)
    num_keys, width = index_k.shape
    share = q.shape[1] / (total_heads or q.shape[1])
    grad_q = index_q.new_zeros(index_q.shape if need_q else 0)
    grad_k = index_q.new_zeros(index_k.shape if need_k else 0, dtype=acc)
    grad_weights = index_weights.new_zeros(index_weights.shape if need_weights else 0)
    coefficient = row_weight.to(acc) * grad_loss.to(acc)
    coefficient = coefficient.masked_fill(row_weight == 0, 0)
    for tile, grid, index_tile, attention_rows in _row_tiles(
        index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, relu, total_heads, keep_dots=True
    ):
        heads = index_q.shape[1]
        coefficient_R1 = tile.rows_of(coefficient)[:, None]
        q_RIE, weights_RI1 = index_tile.rows.q_RIE, index_tile.rows.weights_RI[..., None]
        # a NaN or an overflow in a product must reach only rows and keys that see it; their scores carry it there
        largest_q, largest_weight = _largest(q_RIE), _largest(weights_RI1)
        flat_q = (q_RIE if largest_q < math.inf else q_RIE.nan_to_num(0, 0, 0)).flatten(0, 1)
        grad_q_tile = flat_q.new_zeros(flat_q.shape, dtype=acc)
        grad_weights_tile = weights_RI1.new_zeros(grid.rows, heads, 1)
        for first_key, log_p_RN, visible_RN, dots_RIN in index_tile.key_tiles():
            assert dots_RIN is not None  # kept, or computed again
            t_RN = attention_rows.target(key_tile(k, first_key, grid), visible_RN)
            hidden_RN = ~visible_RN | (coefficient_R1 == 0)
            grad_scores_RN = log_p_RN.exp_().mul_(share).sub_(t_RN).mul_(coefficient_R1).masked_fill_(hidden_RN, 0)
            keys = key_tile(index_k, first_key, grid).to(index_tile.rows.operand)
            clean = largest_weight * (largest_q * width * _largest(keys) + 1) < torch.finfo(torch.float32).max
            if not clean:
                keys = keys.nan_to_num(0, 0, 0)
                dots_RIN = dots_RIN.masked_fill(hidden_RN[:, None], 0)
            if need_weights:
                act_RIN = dots_RIN.relu() if relu else dots_RIN
                grad_weights_tile += torch.bmm(act_RIN, grad_scores_RN[..., None])
            if need_q or need_k:
                grad_dots = weights_RI1 * grad_scores_RN[:, None]
                if relu:
                    grad_dots = relu_gradient(grad_dots, dots_RIN)
                if not clean:
                    grad_dots.masked_fill_(hidden_RN[:, None], 0)
                grad_dots = grad_dots.view(grid.rows * heads, grid.keys).to(flat_q.dtype)
                if need_q:
                    grad_q_tile += mm_wide(grad_dots, keys)
                if need_k:
                    last_key = min(num_keys, first_key + grid.keys)
                    grad_k[first_key:last_key] += mm_wide(grad_dots.t(), flat_q)[: last_key - first_key, :width]
        if need_q:
            tile.store(grad_q, grad_q_tile.view(grid.rows, heads, -1)[..., :width])
        if need_weights:
            tile.store(grad_weights, grad_weights_tile[..., 0])
    return grad_q, grad_k.to(index_k.dtype), grad_weights


def _largest(x: Tensor) -> float:
    """The largest magnitude, NaN if there is one. On CPU only, where it costs no sync; elsewhere NaN for unknown."""
    return float(x.abs().amax()) if x.device.type == "cpu" else math.nan
