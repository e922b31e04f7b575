"""Unfused dsa::dense_indexer_kl and its backward: KL over every visible key, streamed in tiles; backward recomputes.

T query rows, S keys, H heads, D width, I indexer heads, E indexer width; R rows and N keys of a tile.
"""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import bmm_wide, mm_wide, operand_dtype, pad_width, relu_gradient, workspace_bytes
from dsa_ops.unfused._tiles import Grid, IndexRows, RowTile, key_tile, row_tiles


class _AttentionRows:
    """The attention queries of one row tile, ready to give the target on key tiles."""

    def __init__(self, q: Tensor, lse: Tensor, tile: RowTile, softmax_scale: float, total_heads: int):
        self.operand = operand_dtype(q.dtype, q.device)
        self.q_RHD = pad_width(tile.rows_of(q)).to(self.operand)
        lse = tile.rows_of(lse)
        self.minus_lse_RH = lse.neg().masked_fill_(lse == -torch.inf, 0)  # rows without a key are masked below
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


def _row_tiles(index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, relu, total_heads):
    heads = q.shape[1]
    grid = Grid.for_heads(max(index_q.shape[1], heads), q.device)
    for tile in row_tiles(starts, ends, index_k.shape[0], grid):
        if len(tile.key_tiles):
            index_rows = IndexRows(index_q, index_weights, tile, relu)
            yield tile, grid, index_rows, _AttentionRows(q, lse, tile, softmax_scale, total_heads or heads)


def _log_p(index_rows: IndexRows, index_k: Tensor, tile: RowTile, grid: Grid, keep: list | None):
    """Log softmax of the scores over the row tile's keys [R, N * key tiles], -inf where not visible; which are visible.

    `keep` collects the products of every key tile.
    """
    columns = len(tile.key_tiles) * grid.keys
    visible = tile.visible(tile.key_tiles[0], columns)
    scores = index_rows.weights_RI.new_empty(grid.rows, columns)
    for i, first_key in enumerate(tile.key_tiles):
        dots = index_rows.dots(key_tile(index_k, first_key, grid))
        if keep is not None:
            keep.append(dots)
        scores[:, i * grid.keys : (i + 1) * grid.keys] = index_rows.scores(dots, inplace=keep is None)
    scores.masked_fill_(~visible, -torch.inf)
    lse = torch.logsumexp(scores, 1, keepdim=True)
    return scores.sub_(lse.masked_fill(lse == -torch.inf, 0)), visible


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
    for tile, grid, index_rows, attention_rows in _row_tiles(
        index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, relu, total_heads
    ):
        log_p, visible = _log_p(index_rows, index_k, tile, grid, keep=None)
        kl_R = log_p.new_zeros(grid.rows)
        for i, first_key in enumerate(tile.key_tiles):
            at = slice(i * grid.keys, (i + 1) * grid.keys)
            t = attention_rows.target(key_tile(k, first_key, grid), visible[:, at])
            log_ratio = t.log() - log_p[:, at] if entropy else -log_p[:, at]
            kl_R += (t * log_ratio).masked_fill_(t == 0, 0).sum(1)  # 0 log 0 = 0
        kl[tile.start : tile.stop] = kl_R[: tile.stop - tile.start]
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
    for tile, grid, index_rows, attention_rows in _row_tiles(
        index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, relu, total_heads
    ):
        heads = index_q.shape[1]
        rows = slice(tile.start, tile.stop)
        dots_bytes = grid.rows * heads * grid.keys * len(tile.key_tiles) * index_rows.weights_RI.element_size()
        kept = [] if dots_bytes <= workspace_bytes(q.device) // 2 else None
        log_p, visible = _log_p(index_rows, index_k, tile, grid, kept)
        coefficient_R = tile.rows_of(coefficient)[:, None]
        no_weight_R = coefficient_R == 0
        q_RIE, weights_RI1 = index_rows.q_RIE, index_rows.weights_RI[..., None]
        # a NaN or infinity in a key or query must reach only rows and keys that see it; their logits carry it there
        clean_rows = _finite(q_RIE, weights_RI1)
        flat_q = (q_RIE if clean_rows else q_RIE.nan_to_num(0, 0, 0)).flatten(0, 1)
        grad_q_tile = flat_q.new_zeros(flat_q.shape, dtype=acc)
        grad_weights_tile = index_rows.weights_RI.new_zeros(grid.rows, heads, 1)
        for i, first_key in enumerate(tile.key_tiles):
            at = slice(i * grid.keys, (i + 1) * grid.keys)
            keys = key_tile(index_k, first_key, grid).to(index_rows.operand)
            dots_RIN = kept[i] if kept is not None else index_rows.dots(keys)
            t = attention_rows.target(key_tile(k, first_key, grid), visible[:, at])
            hidden = ~visible[:, at] | no_weight_R
            grad_scores = log_p[:, at].exp().mul_(share).sub_(t).mul_(coefficient_R).masked_fill_(hidden, 0)
            clean = clean_rows and _finite(keys)
            if not clean:
                keys = keys.nan_to_num(0, 0, 0)
                dots_RIN = dots_RIN.masked_fill(hidden[:, None], 0)
            if need_weights:
                act = dots_RIN.relu() if relu else dots_RIN
                grad_weights_tile += torch.bmm(act, grad_scores[..., None])
            if need_q or need_k:
                grad_dots = weights_RI1 * grad_scores[:, None]
                if relu:
                    grad_dots = relu_gradient(grad_dots, dots_RIN)
                if not clean:
                    grad_dots.masked_fill_(hidden[:, None], 0)
                grad_dots = grad_dots.view(grid.rows * heads, grid.keys).to(index_rows.operand)
                if need_q:
                    grad_q_tile += mm_wide(grad_dots, keys)
                if need_k:
                    last_key = min(num_keys, first_key + grid.keys)
                    grad_k[first_key:last_key] += mm_wide(grad_dots.t(), flat_q)[: last_key - first_key, :width]
        if need_q:
            grad_q[rows] = grad_q_tile.view(grid.rows, heads, -1)[: tile.stop - tile.start, :, :width]
        if need_weights:
            grad_weights[rows] = grad_weights_tile[: tile.stop - tile.start, :, 0]
    return grad_q, grad_k.to(index_k.dtype), grad_weights


def _finite(*tensors: Tensor) -> bool:
    """Whether all values are known to be finite: looked at on CPU only, where it costs no sync."""
    return all(x.device.type == "cpu" and bool(x.isfinite().all()) for x in tensors)
