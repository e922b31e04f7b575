"""dsa::indexer_topk: index scores of a chunk of rows, then an exact selection among them.

`indexer_logits` writes the scores of a chunk of query rows and of the keys they see, `select_topk` reads them and
writes the results; both files say how. The scores stand in a workspace [chunk, S], S rounded up to 256, of at most
DSA_OPS_WORKSPACE_MB (1 GiB), at least those of one block of rows: 256 / Hi. Results have the same bits whatever the
chunk, since neither kernel mixes rows.

Limits     q and k bfloat16, weights bfloat16 or float32; Hi in {4, 8, 16, 32, 64}, Di in {64, 128}; any T, S, topk.
Compiles   the scores per (Hi, Di), the selection once.
"""

import math

import torch
from torch import Tensor

from csrc_tilelang._arguments import dense, not_among, not_bfloat16, workspace_bytes
from csrc_tilelang.indexer_logits import COLUMNS, KEYS, indexer_logits
from csrc_tilelang.select_topk import select_topk

HEADS, WIDTHS = (4, 8, 16, 32, 64), (64, 128)
BUSY = 264  # blocks, two for each multiprocessor: with fewer, several share the keys of a block of rows
LEAST_KEYS = 1024  # of one of these

VARIANTS: list = []  # those of the two kernels stand in their own files


def refuse(q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, relu: bool) -> str | None:
    return (
        not_bfloat16(q=q, k=k)
        or not_among("Hi, the number of indexer heads,", q.shape[1], HEADS)
        or not_among("Di, the width of an indexer head,", q.shape[2], WIDTHS)
    )


def launch(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, relu: bool
) -> tuple[Tensor, Tensor]:
    rows, heads, width = q.shape
    keys = k.shape[0]
    workspace = workspace_bytes()
    indices = starts.new_empty(rows, topk)
    scores = q.new_empty(rows, topk, dtype=torch.float32)
    if rows == 0 or keys == 0:
        return indices.fill_(-1), scores.fill_(-torch.inf)
    q, k, starts, ends = dense(q).view(rows * heads, width), dense(k), dense(starts), dense(ends)
    if weights.dtype != torch.float32:
        weights = weights.float()
        workspace -= 4 * weights.numel()
    weights = dense(weights).view(-1)
    block_rows = COLUMNS // heads
    pitch = -(-keys // KEYS) * KEYS
    chunk = max(1, min(workspace // (4 * pitch * block_rows), -(-rows // block_rows))) * block_rows
    logits = q.new_empty(chunk, pitch, dtype=torch.float32)
    compute, select = indexer_logits(heads, width), select_topk()
    floor = 0.0 if relu else -math.inf
    for first in range(0, rows, chunk):
        some = min(chunk, rows - first)
        blocks = -(-some // block_rows)
        parts = max(1, min(-(-BUSY // blocks), keys // LEAST_KEYS))
        compute(q, k, weights, starts, ends, logits, first, blocks, parts, floor)
        select(logits, starts, ends, indices, scores, first, some, keys)
    return indices, scores


def compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None:
    if dtype != torch.bfloat16:
        return f"dtype is {str(dtype).removeprefix('torch.')}, the kernel takes bfloat16"
    if reason := not_among("index_heads", index_heads, HEADS) or not_among("index_dim", index_dim, WIDTHS):
        return reason
    indexer_logits(index_heads, index_dim), select_topk()
    return None
