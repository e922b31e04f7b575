"""Dense indexer KL forward, Hopper (sm_90a), bfloat16.

Computes   loss, kl of dsa::dense_indexer_kl in one pass over the visible keys: a block of `_dense_tiles.partials` holds
           the scores and the target of 128 rows x 128 keys and leaves four numbers per row; `combine` makes rows of
           them. With shares of the heads (total_heads > H) the entropy term is left out.
           Tiles, memory, registers and order: see _dense_tiles.py.
Workspace  16 bytes per row and 128 keys; rows are taken in chunks that stay within DSA_OPS_WORKSPACE_MB (1 GiB).
Empty      rows without a key: kl 0. Rows of weight 0 add nothing to the loss whatever their kl.
Order      A row's bits depend on that row alone; loss is torch's sum over rows.
"""

import torch
from torch import Tensor

from csrc_tilelang import _dense_tiles as tiles

VARIANTS = [
    (tiles.partials, (576, 128, True)),
    (tiles.partials, (192, 64, False)),
    (tiles.combine, ()),
]


def refuse(
    index_q,
    index_k,
    index_weights,
    q,
    k,
    lse,
    starts,
    ends,
    softmax_scale,
    row_weight,
    relu,
    total_heads,
) -> str | None:
    return tiles.refuse(index_q, index_k, index_weights, q, k)


def launch(
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
    """(loss [], kl [T]), float32."""
    if 0 in (q.shape[0], k.shape[0]):
        return lse.new_zeros(()), lse.new_zeros(q.shape[0])
    inputs = tiles.Inputs(
        index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, row_weight, relu, total_heads
    )
    kl, part, _ = inputs.reduced(attention=True)
    return part.sum(), kl


def compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None:
    if dtype != torch.bfloat16:
        return f"{dtype} runs unfused"
    if reason := tiles.refuse_widths(index_heads, index_dim, head_dim):
        return reason
    tiles.partials(head_dim, index_dim, True)
    tiles.combine()
    return None
