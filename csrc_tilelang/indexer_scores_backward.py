"""Gradients of index scores on given ids, dsa::indexer_scores_backward, Hopper (sm_90a), bf16.

Computes   s[j, h] = k[id_j] . q[t, h] again, as indexer_scores.py does, then with g the incoming gradient
           ds[j, h] = g[j] * weights[t, h] * act'(s[j, h]), rounded to bfloat16 for the products,
           grad_q[t, h] = sum_j ds[j, h] k[id_j],  grad_k[id_j] += sum_h ds[j, h] q[t, h],
           grad_weights[t, h] = sum_j g[j] * act(s[j, h]) in float32.
           relu passes a gradient where s > 0 and where s is NaN.
Tiling     one block = one query row with all its heads; slots in tiles of 64, keys on M: s and ds are [64, Hi], the
           rows for grad_k [64, Di] = ds q take ds from registers, grad_q is accumulated transposed, [Di, Hi] = k^T ds,
           so that every product has M = 64 or 128 however few heads there are. Keys are gathered as in the forward,
           three tiles in shared memory; s of the next tile is computed while the rows of this one are handed over.
           Two blocks an SM: one computes while the other waits.
grad_k     a tile's rows go through shared memory (padded by 8 floats, so that no two stores of a warp meet a bank) to
           row-wise bulk reductions into a float32 accumulator [S, Di], cast by torch at the end. Order of the sum: as
           it happens.
           Deterministic (torch.use_deterministic_algorithms): the rows are written instead, for as many query rows as
           fit 1 GiB, and added up key by key in the order of the slots (segment_sum.py).
Memory     at Hi = 64, Di = 128: q 16 KiB + keys 48 + ds 8 + rows 34 + 4 = 110 KiB shared; 250 registers a thread, of
           which grad_q 64, rows 64, s 32, grad_weights 16, ds 16.
Limits     those of the forward; incoming gradients of any floating dtype, used in float32.
Empty ids  are not read and nothing is added for them; their ds is 0 by selection, so the incoming gradient may be NaN.
           A row without a valid id gets zeros whatever its query and weights hold.
Order      of grad_q: tiles ascending, slots inside the product. Of grad_weights: slots ascending in a thread, then over
           the 8 lanes and 4 warps that share a head.
Compiles   per (Hi, Di, relu, which gradients, added or written); T, S, K are run-time arguments.
Bound      the reductions, Di * 4 bytes a slot: alone they take 9/10 of the kernel's time at Hi = 64, Di = 128.
"""

from typing import Any

import tilelang
import tilelang.language as T
import torch
from torch import Tensor

from csrc_tilelang import _arguments
from csrc_tilelang import indexer_scores as scores
from csrc_tilelang._compile import kernel
from csrc_tilelang.indexer_scores import (
    COMMON_SOURCE,
    LEAST_HEADS,
    OPTIONS,
    RING,
    STAGES,
    THREADS,
    TILE,
    gather,
    load_queries,
)

PAD = 8  # floats after a row of gradients in shared memory
WORKSPACE_BYTES = 1 << 30

# What becomes of the gradients of keys.
NOT_WANTED, ADDED, WRITTEN = range(3)

SOURCE = (
    COMMON_SOURCE
    + r"""
// A tile is described by 128 words, one a thread: the ids of its slots, then the bits of their incoming gradients.
__device__ __forceinline__ int slot_word(const int* ids, const float* grad, int first, int slots, int keys) {
  int slot = first + threadIdx.x % 64;
  if (threadIdx.x < 64) return slot_id(ids, slot, slots, keys);
  return slot < slots ? __float_as_int(grad[slot]) : 0;
}
// Turns the products s of a tile into grad * weight * act'(s), and adds grad * act(s) to dw. A thread holds, of every
// chunk of 8 heads, the heads 2 * (lane % 4) and the next, for two keys 8 rows apart; dw has two sums a chunk.
template <int CHUNKS, bool RELU>
__device__ __forceinline__ void differentiate(float* s, float* dw, const float* weights, const int* words) {
  int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
  bool valid[2] = {words[key] >= 0, words[key + 8] >= 0};
  float g[2] = {valid[0] ? __int_as_float(words[64 + key]) : 0.f, valid[1] ? __int_as_float(words[72 + key]) : 0.f};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    float2 w = *(const float2*)(weights + 8 * c + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = valid[i / 2] ? s[4 * c + i] : 0.f;
      dw[2 * c + i % 2] += g[i / 2] * (RELU ? relu_nan(x) : x);
      s[4 * c + i] = (RELU ? x <= 0.f : !valid[i / 2]) ? 0.f : g[i / 2] * (i % 2 ? w.y : w.x);
    }
  }
}
// The sum for head threadIdx.x (below 8 * CHUNKS) of what differentiate left in dw; the whole block takes part.
template <int CHUNKS>
__device__ __forceinline__ float head_sum(const float* dw, float* sums) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 2 * CHUNKS; ++i) {
    float x = dw[i];
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    x += __shfl_xor_sync(~0u, x, 16);
    if (lane < 4) sums[warp * 8 * CHUNKS + i / 2 * 8 + lane * 2 + i % 2] = x;
  }
  __syncthreads();
  const float* own = sums + threadIdx.x % (8 * CHUNKS);
  return (own[0] + own[8 * CHUNKS]) + (own[16 * CHUNKS] + own[24 * CHUNKS]);
}
// Until the rows that this thread sent have been read from shared memory.
__device__ __forceinline__ void rows_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// A warp sends the 16 rows of a tile that it holds: added to dk[id], or written to dk[slot].
template <int WIDTH, bool ADD>
__device__ __forceinline__ void send_rows(float* dk, const float* rows, const int* ids, int first) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32;
  if (threadIdx.x % 32 < 16) {
    if (ids[row] >= 0) {
      unsigned from = (unsigned)__cvta_generic_to_shared(rows + row * (WIDTH + 8));
      float* to = dk + (long long)(ADD ? ids[row] : first + row) * WIDTH;
      if (ADD)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     :: "l"(to), "r"(from), "n"(WIDTH * 4) : "memory");
      else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(to), "r"(from), "n"(WIDTH * 4) : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
"""
)


def slot_word(ids: Any, grad: Any, t: Any, first: Any, K: Any, S: Any) -> Any:
    row = T.access_ptr(ids[t, 0], "r", K), T.access_ptr(grad[t, 0], "r", K)
    return T.call_extern("int32", "slot_word", *row, first, K, S)


@kernel(pass_configs=OPTIONS)
def backward(heads: int, width: int, relu: bool, need_q: bool, keys: int) -> Any:
    """`keys` is NOT_WANTED (dk is not used), ADDED (to dk [S, Di]) or WRITTEN (to dk [T, K, Di], valid slots alone)."""
    wide = max(LEAST_HEADS, heads)
    chunks = wide // 8
    need_k, written = keys != NOT_WANTED, keys == WRITTEN
    T_, S, K = T.dynamic("T_"), T.dynamic("S"), T.dynamic("K")
    dk_shape = {NOT_WANTED: (T_, heads), ADDED: (S, width), WRITTEN: (T_, K, width)}[keys]

    @T.prim_func
    def indexer_scores_backward(
        grad: T.Tensor((T_, K), "float32"),
        q: T.Tensor((T_, heads, width), "bfloat16"),
        k: T.Tensor((S, width), "bfloat16"),
        weights: T.Tensor((T_, heads), "float32"),
        ids: T.Tensor((T_, K), "int32"),
        dq: T.Tensor((T_, heads, width), "bfloat16"),
        dk: T.Tensor(dk_shape, "float32"),
        dw: T.Tensor((T_, heads), "float32"),
    ):
        with T.Kernel(T_, threads=THREADS, prelude=SOURCE) as t:
            qs = T.alloc_shared((wide, width), "bfloat16")
            ks = T.alloc_shared((STAGES, TILE, width), "bfloat16")
            dss = T.alloc_shared((TILE, wide), "bfloat16")
            rows = T.alloc_shared((TILE, width + PAD), "float32")
            ring = T.alloc_shared((RING, 2 * TILE), "int32")
            ws = T.alloc_shared((wide,), "float32")
            sums = T.alloc_shared((4 * wide,), "float32")
            scratch = T.alloc_shared((4,), "int32")
            s = T.alloc_fragment((TILE, wide), "float32")
            ds = T.alloc_fragment((TILE, wide), "bfloat16")
            dk_rows = T.alloc_fragment((TILE, width), "float32")
            dq_transposed = T.alloc_fragment((width, wide), "float32")
            dw_part = T.alloc_local((2 * chunks,), "float32")
            word = T.alloc_var("int32", init=0)
            T.annotate_layout({rows: tilelang.layout.make_linear_layout(rows)})
            tx = T.get_thread_binding()

            for i in T.unroll(2 * chunks):
                dw_part[i] = 0.0
            if need_q:
                T.clear(dq_transposed)
            # everything that the first tile waits for is asked for at once
            for i in T.unroll(STAGES + 1):
                word = slot_word(ids, grad, t, i * TILE, K, S)
                if i < STAGES:
                    ring[i, tx] = word
            if tx < wide:
                ws[tx] = T.if_then_else(tx < heads, weights[t, T.min(tx, heads - 1)], 0.0)
            load_queries(q, qs, t, heads, wide, width, tx)
            tiles: T.int32 = T.call_extern(  # and a barrier
                "int32", "used_tiles", T.access_ptr(ids[t, 0], "r", K), K, S, T.access_ptr(scratch[0], "rw", 4)
            )
            if tiles > 0:
                for i in T.unroll(STAGES - 1):
                    gather(k, ks, ring, i, width, tx)
                T.ptx_wait_group(STAGES - 2)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(ks[0, :, :], qs, s, transpose_B=True, clear_accum=True)
                for j in T.serial(tiles):
                    T.wait_wgmma(0)
                    T.evaluate(
                        T.call_extern(
                            *("handle", f"differentiate<{chunks}, {str(relu).lower()}>", s.data, dw_part.data),
                            T.access_ptr(ws[0], "r", wide),
                            T.access_ptr(ring[j % RING, 0], "r", 2 * TILE),
                        )
                    )
                    T.copy(s, ds)
                    T.sync_threads()  # everyone is done with tile j - 1: its keys, its ds, its words
                    if need_q:
                        T.copy(ds, dss)
                    T.ptx_wait_group(STAGES - 3)
                    T.fence_proxy_async()
                    T.sync_threads()  # ds and tile j + 1 are in shared memory
                    if need_k:
                        T.wgmma_gemm(ds, qs, dk_rows, clear_accum=True)
                    if need_q:
                        T.wgmma_gemm(ks[j % STAGES, :, :], dss, dq_transposed, transpose_A=True)
                    # past the last tile it multiplies what lies there, and nobody looks at the result
                    T.wgmma_gemm(ks[(j + 1) % STAGES, :, :], qs, s, transpose_B=True, clear_accum=True)
                    gather(k, ks, ring, j + STAGES - 1, width, tx)
                    ring[(j + STAGES) % RING, tx] = word
                    word = slot_word(ids, grad, t, (j + STAGES + 1) * TILE, K, S)
                    if need_k:
                        T.wait_wgmma(2 if need_q else 1)
                        T.evaluate(T.call_extern("handle", "rows_read"))
                        T.sync_warp()
                        for r, c in T.Parallel(TILE, width):  # a warp has 16 rows, and sends them by itself
                            rows[r, c] = dk_rows[r, c]
                        T.fence_proxy_async()
                        T.sync_warp()
                        T.evaluate(
                            T.call_extern(
                                "handle",
                                f"send_rows<{width}, {str(not written).lower()}>",
                                T.access_ptr(dk[t, 0, 0] if written else dk[0, 0], "rw", width),
                                T.access_ptr(rows[0, 0], "r", TILE * (width + PAD)),
                                T.access_ptr(ring[j % RING, 0], "r", TILE),
                                j * TILE,
                            )
                        )
                    T.wait_wgmma(1)  # s alone may be under way from one round to the next: ptxas serialises otherwise
                T.wait_wgmma(0)
                if need_k:
                    T.evaluate(T.call_extern("handle", "rows_read"))
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            total: T.float32 = T.call_extern(
                "float32", f"head_sum<{chunks}>", dw_part.data, T.access_ptr(sums[0], "rw", 4 * wide)
            )
            if tx < heads:
                dw[t, tx] = total
            if need_q:
                for d, h in T.Parallel(width, wide):
                    rows[h, d] = dq_transposed[d, h]
                T.sync_threads()
                for h, d in T.Parallel(heads, width):
                    dq[t, h, d] = rows[h, d]

    return indexer_scores_backward


# Each distinct path once.
VARIANTS = [
    (backward, (64, 128, True, True, ADDED)),
    (backward, (64, 128, True, True, WRITTEN)),
    (backward, (32, 128, True, True, ADDED)),
    (backward, (8, 128, False, True, NOT_WANTED)),
    (backward, (16, 64, False, False, ADDED)),
]


def refuse(
    grad_scores: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    relu: bool,
    need_q: bool,
    need_k: bool,
    need_weights: bool,
) -> str | None:
    return scores.refuse(q, k, weights, indices, relu)


def launch(
    grad_scores: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    relu: bool,
    need_q: bool,
    need_k: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = indices.numel() == 0 or k.shape[0] == 0
    make_q = need_q or not need_k  # there is no kernel for grad_weights alone
    empty = torch.zeros if nothing else torch.empty
    grad_q = empty(q.shape if make_q else (0,), dtype=q.dtype, device=q.device)
    grad_k = torch.zeros(k.shape if need_k else (0,), dtype=torch.float32, device=q.device)
    grad_weights = empty(weights.shape, dtype=torch.float32, device=q.device)
    if not nothing:
        dense = _arguments.dense
        inputs = dense(grad_scores.float()), dense(q), dense(k), dense(weights.float()), dense(indices)
        into_q = grad_q if make_q else inputs[1]  # then it is not written
        variant = (q.shape[1], q.shape[2], relu, make_q)
        if not need_k:
            backward(*variant, NOT_WANTED)(*inputs, into_q, grad_weights, grad_weights)
        elif torch.are_deterministic_algorithms_enabled():
            _in_order(backward(*variant, WRITTEN), inputs, into_q, grad_k, grad_weights)
        else:
            backward(*variant, ADDED)(*inputs, into_q, grad_k, grad_weights)
    return (
        grad_q if need_q else q.new_empty(0),
        grad_k.to(k.dtype),
        grad_weights.to(weights.dtype) if need_weights else weights.new_empty(0),
    )


def _in_order(compiled: Any, inputs: tuple[Tensor, ...], grad_q: Tensor, grad_k: Tensor, grad_weights: Tensor) -> None:
    """The gradients with a fixed order of the sums over query rows, for some rows after the others."""
    from csrc_tilelang.segment_sum import add_by_key  # the only part that takes Triton

    grad, q, k, weights, ids = inputs
    (rows, slots), width = ids.shape, k.shape[1]
    at_once = min(rows, max(1, min(WORKSPACE_BYTES, _arguments.workspace_bytes()) // (slots * width * 4)))
    contributions = torch.empty(at_once, slots, width, dtype=torch.float32, device=q.device)
    for first in range(0, rows, at_once):
        part = slice(first, min(rows, first + at_once))
        of_part = contributions[: part.stop - first]
        compiled(grad[part], q[part], k, weights[part], ids[part], grad_q[part], of_part, grad_weights[part])
        add_by_key(grad_k, of_part.view(-1, width), ids[part].reshape(-1))


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
    reason = scores.width_refusal(index_heads, index_dim, dtype)
    if reason is None:
        keys = WRITTEN if torch.are_deterministic_algorithms_enabled() else ADDED
        backward(index_heads, index_dim, True, True, keys)
    return reason
