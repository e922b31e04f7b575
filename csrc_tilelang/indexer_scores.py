"""Index scores on given ids, dsa::indexer_scores, Hopper (sm_90a), bf16.

Computes   score[t, j] = sum_h weights[t, h] * act(q[t, h] . k[id]) for id = indices[t, j], act = relu or identity.
Tiling     one block = one query row with all its heads; slots in tiles of 64, whose keys are gathered by row with
           16-byte cp.async, two tiles ahead. Keys lie on M and heads on N (S^T = K Q^T, wgmma m64 n16 to n64), so few
           heads waste nothing but the padding of 4 or 8 to 16. 128 threads: they gather, multiply and sum, and the
           other blocks of the SM compute while one waits.
Memory     at Hi = 64, Di = 128: q 16 KiB + 3 tiles of keys of 16 KiB + 2 KiB shared, so three blocks an SM; 64
           registers a thread, half of them the products. No workspace.
Limits     q, k bfloat16; Hi in 4, 8, 16, 32, 64; Di in 64, 128. Any T, S, K; weights bfloat16 or float32.
Empty ids  (id < 0 or >= S) are not read: cp.async fills their rows with zeros, and the score is -inf whatever came out.
           Tiles past the last valid id of a row are not computed.
Order      products in float32 over the width; heads within a thread in ascending order, then over its 4 lanes. The
           same for every row and slot, so bits depend on nothing but the row.
Compiles   per (Hi, Di, relu); T, S, K are run-time arguments.
Bound      the gather of the keys (Di * 2 bytes a slot).
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from csrc_tilelang import _arguments
from csrc_tilelang._compile import HAND_MADE, kernel

HEADS = (4, 8, 16, 32, 64)
WIDTHS = (64, 128)
TILE = 64  # keys: the M of the products
STAGES = 3  # tiles of keys in shared memory
RING = 4  # tiles whose ids are in shared memory: they come a tile before their keys
THREADS = 128
LEAST_HEADS = 16  # heads are padded to this

# Barriers are placed by hand.
OPTIONS = {**HAND_MADE, "tl.disable_thread_storage_sync": True}

# What the backward shares with the forward.
COMMON_SOURCE = r"""
// The number of 64-slot tiles up to the last valid id of a row; the whole block takes part and meets at a barrier.
__device__ __forceinline__ int used_tiles(const int* ids, int slots, int keys, int* scratch) {
  int last = -1;
#pragma unroll 8  // so that this many loads are under way
  for (int j = threadIdx.x; j < slots; j += 128)
    if ((unsigned)ids[j] < (unsigned)keys) last = j;
  last = __reduce_max_sync(~0u, last);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = last;
  __syncthreads();
  return (max(max(scratch[0], scratch[1]), max(scratch[2], scratch[3])) + 64) / 64;
}
// The id of a slot, -1 if the slot is empty or past the last.
__device__ __forceinline__ int slot_id(const int* ids, int slot, int slots, int keys) {
  int id = slot < slots ? ids[slot] : -1;
  return (unsigned)id < (unsigned)keys ? id : -1;
}
__device__ __forceinline__ float relu_nan(float x) {  // NaN stays NaN
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}
"""

SOURCE = (
    COMMON_SOURCE
    + r"""
// Scores of one tile from its products, into a row of the output. A thread holds, of every chunk of 8 heads, the heads
// 2 * (lane % 4) and the next, for two keys 8 rows apart.
// Heads that fill up a product are left out: an infinite key would make them NaN.
template <int HEADS, bool RELU>
__device__ __forceinline__ void write_scores(const float* s, const float* weights, const int* ids, float* out,
                                             int first, int slots) {
  int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
  float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
  for (int c = 0; c < (HEADS + 7) / 8; ++c) {
    if (HEADS % 8 && 8 * c + 2 * (lane % 4) >= HEADS) continue;
    float2 w = *(const float2*)(weights + 8 * c + 2 * (lane % 4));
    const float* x = s + 4 * c;
    sum0 += w.x * (RELU ? relu_nan(x[0]) : x[0]);
    sum0 += w.y * (RELU ? relu_nan(x[1]) : x[1]);
    sum1 += w.x * (RELU ? relu_nan(x[2]) : x[2]);
    sum1 += w.y * (RELU ? relu_nan(x[3]) : x[3]);
  }
  sum0 += __shfl_xor_sync(~0u, sum0, 1);
  sum1 += __shfl_xor_sync(~0u, sum1, 1);
  sum0 += __shfl_xor_sync(~0u, sum0, 2);
  sum1 += __shfl_xor_sync(~0u, sum1, 2);
  if (lane % 4 == 0) {
    if (first + key < slots) out[first + key] = ids[key] < 0 ? -INFINITY : sum0;
    if (first + key + 8 < slots) out[first + key + 8] = ids[key + 8] < 0 ? -INFINITY : sum1;
  }
}
__device__ __forceinline__ void fill_empty(float* out, int first, int slots) {
  for (int j = first + threadIdx.x; j < slots; j += 128) out[j] = -INFINITY;
}
"""
)


@T.macro
def load_queries(q, qs, t, heads, wide, width, tx):
    """Row t of q into shared memory, filled up with zeros to `wide` heads; a part of the next group of copies."""
    lanes = width // 8
    for i in T.unroll(wide * lanes // THREADS):
        h = i * (THREADS // lanes) + tx // lanes
        c = tx % lanes * 8
        T.ptx_cp_async(T.access_ptr(qs[h, c], "w", 8), T.access_ptr(q[t, T.min(h, heads - 1), c], "r", 8), 8, h < heads)


@T.macro
def gather(k, ks, ring, j, width, tx):
    """The keys of tile j into its stage, 16 bytes a copy; empty slots are filled with zeros. One group of copies."""
    lanes = width // 8
    for i in T.unroll(TILE * lanes // THREADS):
        r = i * (THREADS // lanes) + tx // lanes
        row: T.int32 = ring[j % RING, r]
        T.ptx_cp_async(
            T.access_ptr(ks[j % STAGES, r, tx % lanes * 8], "w", 8),
            T.access_ptr(k[T.max(row, 0), tx % lanes * 8], "r", 8),
            8,
            row >= 0,
        )
    T.ptx_commit_group()


def slot_id(ids: Any, t: Any, slot: Any, K: Any, S: Any) -> Any:
    return T.call_extern("int32", "slot_id", T.access_ptr(ids[t, 0], "r", K), slot, K, S)


@kernel(pass_configs=OPTIONS)
def forward(heads: int, width: int, relu: bool) -> Any:
    wide = max(LEAST_HEADS, heads)
    T_, S, K = T.dynamic("T_"), T.dynamic("S"), T.dynamic("K")

    @T.prim_func
    def indexer_scores(
        q: T.Tensor((T_, heads, width), "bfloat16"),
        k: T.Tensor((S, width), "bfloat16"),
        weights: T.Tensor((T_, heads), "float32"),
        ids: T.Tensor((T_, K), "int32"),
        scores: T.Tensor((T_, K), "float32"),
    ):
        with T.Kernel(T_, threads=THREADS, prelude=SOURCE) as t:
            qs = T.alloc_shared((wide, width), "bfloat16")
            ks = T.alloc_shared((STAGES, TILE, width), "bfloat16")
            ring = T.alloc_shared((RING, TILE), "int32")
            ws = T.alloc_shared((wide,), "float32")
            scratch = T.alloc_shared((4,), "int32")
            s = T.alloc_fragment((TILE, wide), "float32")
            tx = T.get_thread_binding()
            next_id = T.alloc_var("int32", init=-1)

            # everything that the first tile waits for is asked for at once
            if tx < TILE:
                for i in T.unroll(STAGES):
                    ring[i, tx] = slot_id(ids, t, i * TILE + tx, K, S)
                next_id = slot_id(ids, t, STAGES * TILE + tx, K, S)
            if tx < wide:
                ws[tx] = T.if_then_else(tx < heads, weights[t, T.min(tx, heads - 1)], 0.0)
            load_queries(q, qs, t, heads, wide, width, tx)
            tiles: T.int32 = T.call_extern(  # and a barrier
                "int32", "used_tiles", T.access_ptr(ids[t, 0], "r", K), K, S, T.access_ptr(scratch[0], "rw", 4)
            )
            if tiles > 0:
                for i in T.unroll(STAGES - 1):
                    gather(k, ks, ring, i, width, tx)
                for j in T.serial(tiles):
                    T.ptx_wait_group(STAGES - 2)
                    T.fence_proxy_async()
                    T.sync_threads()  # tile j is here, and everyone has finished tile j - 1, whose places are free
                    T.wgmma_gemm(ks[j % STAGES, :, :], qs, s, transpose_B=True, clear_accum=True)
                    gather(k, ks, ring, j + STAGES - 1, width, tx)
                    if tx < TILE:
                        ring[(j + STAGES) % RING, tx] = next_id
                        next_id = slot_id(ids, t, (j + STAGES + 1) * TILE + tx, K, S)
                    T.wait_wgmma(0)
                    T.evaluate(
                        T.call_extern(
                            "handle",
                            f"write_scores<{heads}, {str(relu).lower()}>",
                            s.data,
                            T.access_ptr(ws[0], "r", wide),
                            T.access_ptr(ring[j % RING, 0], "r", TILE),
                            T.access_ptr(scores[t, 0], "w", K),
                            j * TILE,
                            K,
                        )
                    )
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.evaluate(T.call_extern("handle", "fill_empty", T.access_ptr(scores[t, 0], "w", K), tiles * TILE, K))

    return indexer_scores


# Each distinct path once: with and without padded heads, both widths, both activations.
VARIANTS = [(forward, (64, 128, True)), (forward, (32, 128, True)), (forward, (8, 64, False))]


def refuse(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, relu: bool) -> str | None:
    return (
        _arguments.not_bfloat16(q=q, k=k)
        or _arguments.not_among("Hi", q.shape[1], HEADS)
        or _arguments.not_among("Di", q.shape[2], WIDTHS)
    )


def launch(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, relu: bool) -> Tensor:
    scores = q.new_empty(indices.shape, dtype=torch.float32)
    if scores.numel() == 0:
        return scores
    if k.shape[0] == 0:
        return scores.fill_(-torch.inf)
    dense = _arguments.dense
    forward(q.shape[1], q.shape[2], relu)(dense(q), dense(k), dense(weights.float()), dense(indices), scores)
    return scores


def compile_for(
    *,
    heads: int,
    index_heads: int,
    head_dim: int,
    v_dim: int,
    index_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    reason = width_refusal(index_heads, index_dim, dtype)
    if reason is None:
        forward(index_heads, index_dim, True)
    return reason


def width_refusal(index_heads: int, index_dim: int, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, the kernel takes bfloat16"
    return _arguments.not_among("Hi", index_heads, HEADS) or _arguments.not_among("Di", index_dim, WIDTHS)
