"""Sparse MLA backward, Hopper (sm_90a), bfloat16: gradients of queries, key rows and sinks from saved out and lse.

Block      one query row x 64 heads (the rows of a wgmma; heads past H are zero rows), keys in tiles of 64, gathered by
           row with cp.async. Three warpgroups: the first forms logits, weights and their gradients and sums the first
           columns of grad_q, the second sums the others and forms the keys' gradient chunk by chunk, the third gathers.
           A tile's keys' gradient is formed while the next tile is gathered and its weights are formed.
Maths      p = exp(q.k - lse), weights of out w p with w = sigmoid(lse - sink), delta = sum(grad_out * out),
           dS = scale * p * (w (grad_out.v - delta) + grad_lse), rounded to bfloat16 as the weights are;
           grad_q = dS K, keys' gradient = dS^T Q + (w p)^T grad_out, grad_sink = -sum over rows (1 - w) delta.
Memory     shared, at D = 576: q 72 KiB, grad_out 64, keys 72, weights and dS 8 each, of 227. grad_q stays in registers
           over the whole row (128 and 160 a thread of 232; 40 for a thread that gathers). Workspace: the keys' gradient
           in float32, [S, D].
Limits     (D, Dv) among WIDTHS, bfloat16. Any H, any K.
Empty      slots (id outside [0, S), or at or past topk_length) are zero-filled without being read, have weight 0, and
           nothing is added for them; tiles behind a row's last key are not visited, so nothing of an empty row counts.
Order      grad_q: tiles in the order of slots. The keys' gradient is added with float32 reductions in any order; under
           deterministic algorithms the same kernel writes the contribution of every (row, 64 heads, slot) of a chunk of
           rows, within DSA_OPS_WORKSPACE_MB and 1 GiB, and `segment_sum.add_by_key` adds them in that order. grad_sink:
           one term a row and head, summed by torch.
Compiles   per (D, Dv), per gradient needed, and for deterministic algorithms. H, T, S, K, scale are run-time.
Bound      the reductions: 4 D bytes per pair and 64 heads.
"""

import tilelang.language as T
import torch
from torch import Tensor

from csrc_tilelang._arguments import dense, not_among, not_bfloat16, workspace_bytes
from csrc_tilelang._compile import HAND_MADE, kernel
from csrc_tilelang.segment_sum import add_by_key

WIDTHS = (576, 512), (512, 512), (160, 128)
HEADS = 64  # of one block: the rows of a wgmma
KEYS = 64  # of one tile: the rows of a wgmma, when the gradient of the keys is formed
THREADS = 384  # two warpgroups that compute, one that gathers
LOG2E = 1.4426950408889634
WORKSPACE = 1 << 30  # bytes of contributions in flight under deterministic algorithms

# Of a 16-column group of an accumulator a thread holds columns 2l, 2l+1, 8+2l, 9+2l (l = lane % 4): of row lane / 4 in
# elements 0, 1, 4, 5, of the row 8 further down in 2, 3, 6, 7.
SOURCE = r"""
#include <cuda_bf16.h>
__device__ __forceinline__ int quotient(int a, int b) { return a / b; }
__device__ __forceinline__ int remainder_of(int a, int b) { return a % b; }
__device__ __forceinline__ int key_of(const int* ids, int slot, int last, int keys) {
  // -1 for an empty slot
  const int id = slot < last ? ids[slot] : -1;
  return (unsigned)id < (unsigned)keys ? id : -1;
}
__device__ __forceinline__ int last_slot(const int* ids, int slots, int keys, int* scratch) {
  // one past the last slot that holds a key; all threads of the block
  int last = 0;
  for (int j = threadIdx.x; j < slots; j += blockDim.x) if ((unsigned)ids[j] < (unsigned)keys) last = j + 1;
  last = __reduce_max_sync(~0u, last);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = last;
  __syncthreads();
  for (int w = 0; w < blockDim.x / 32; ++w) last = max(last, scratch[w]);
  return last;
}
__device__ __forceinline__ float dot_8(const void* x, const void* y) {
  const uint4 a = *reinterpret_cast<const uint4*>(x), b = *reinterpret_cast<const uint4*>(y);
  const __nv_bfloat162* u = reinterpret_cast<const __nv_bfloat162*>(&a);
  const __nv_bfloat162* v = reinterpret_cast<const __nv_bfloat162*>(&b);
  float sum = 0.f;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = __bfloat1622float2(u[i]), q = __bfloat1622float2(v[i]);
    sum = fmaf(p.x, q.x, sum); sum = fmaf(p.y, q.y, sum);
  }
  return sum;
}
__device__ __forceinline__ float sum_8_lanes(float x) {
  x += __shfl_xor_sync(~0u, x, 1); x += __shfl_xor_sync(~0u, x, 2); return x + __shfl_xor_sync(~0u, x, 4);
}
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ unsigned keys_of_32(const int* ids, int slot, int last, int keys) {
  slot += threadIdx.x & 31;
  return __ballot_sync(~0u, slot < last && (unsigned)ids[slot < last ? slot : 0] < (unsigned)keys);
}
__device__ __forceinline__ void weights_of_tile(float* s, unsigned low, unsigned high, float scale,
                                                float lse_0, float lse_1) {
  // logits to exp(logit - lse), 0 in empty slots
  const unsigned shift = (threadIdx.x & 3) * 2;
  low >>= shift; high >>= shift;
  #pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(s[i]) :: "memory");
  #pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = (i / 8) * 16 + ((i >> 2) & 1) * 8 + (i & 1);
    const unsigned bit = ((column < 32 ? low : high) >> (column % 32)) & 1;
    float p;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(fmaf(s[i], scale, (i & 2) ? -lse_1 : -lse_0)));
    s[i] = bit ? p : 0.f;
  }
}
__device__ __forceinline__ void gradients_of_tile(float* s, float* dp, const float* share, const float* scaled,
                                                  const float* offset) {
  // dp: to the gradient of q . k; s: to the weights that out was formed with
  #pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(dp[i]) :: "memory");
  #pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int h = (i >> 1) & 1;
    dp[i] = s[i] * fmaf(scaled[h], dp[i], -offset[h]);
    s[i] = s[i] * share[h];
  }
}
__device__ __forceinline__ void four_in_order(const float* from, void* to) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  reinterpret_cast<__nv_bfloat162*>(to)[0] = __floats2bfloat162_rn(x.x, x.y);
  reinterpret_cast<__nv_bfloat162*>(to)[4] = __floats2bfloat162_rn(x.z, x.w);
}
template <int GROUPS, bool ADD>
__device__ __forceinline__ void to_rows(float* a, float* row_0, float* row_1, bool ok_0, bool ok_1) {
  #pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(a[i]) :: "memory");
  #pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* row = (h ? row_1 : row_0) + (threadIdx.x & 3) * 4;
    if (h ? ok_1 : ok_0) {
      #pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const float *x = a + g * 8 + h * 2;
        if (ADD) asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                              :: "l"(row + g * 16), "f"(x[0]), "f"(x[1]), "f"(x[4]), "f"(x[5]) : "memory");
        else asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                          :: "l"(row + g * 16), "f"(x[0]), "f"(x[1]), "f"(x[4]), "f"(x[5]) : "memory");
      }
    }
  }
}
"""


@kernel(pass_configs={**HAND_MADE, "tl.disable_thread_storage_sync": True})
def backward(D, Dv, need_q, need_kv, per_pair):
    """grad_q, and grad_kv in float32: reduced into row id of `key_grads`, or per pair into row block * K + slot."""
    panels, value_panels = -(-D // 64), -(-Dv // 64)
    width, value_width = panels * 64, value_panels * 64
    left = 4 if panels > 4 else 1  # panels of grad_q that the first warpgroup sums up
    split = left * 64
    middle = min(256, width - split)  # of the second
    rest = width - split - middle
    T_, H, S, K, L_, M_, N_, R_ = (T.dynamic(name) for name in ("T_", "H", "S", "K", "L_", "M_", "N_", "R_"))
    bf16, f32, i32 = "bfloat16", "float32", "int32"

    @T.prim_func
    def sparse_mla_backward(
        q: T.Tensor((T_, H, D), bf16),
        kv: T.Tensor((S, D), bf16),
        indices: T.Tensor((T_, K), i32),
        topk_length: T.Tensor((L_, M_), i32),
        out: T.Tensor((T_, H, Dv), bf16),
        grad_out: T.Tensor((T_, H, Dv), bf16),
        lse: T.Tensor((T_, H), f32),
        grad_lse: T.Tensor((T_, H), f32),
        sink: T.Tensor((N_, H), f32),
        grad_q: T.Tensor((T_, H, D), bf16),
        key_grads: T.Tensor((R_, D), f32),
        sink_grads: T.Tensor((T_, H), f32),
        scale: T.float32,
        has_length: T.int32,
        has_grad_out: T.int32,
        has_grad_lse: T.int32,
        has_sink: T.int32,
    ):
        with T.Kernel(T_ * T.ceildiv(H, HEADS), threads=THREADS, prelude=SOURCE) as b:
            qs = T.alloc_shared((HEADS, width), bf16)
            dos = T.alloc_shared((HEADS, value_width), bf16)
            ks = T.alloc_shared((KEYS, width), bf16)
            ps = T.alloc_shared((HEADS, KEYS), bf16)
            dss = T.alloc_shared((HEADS, KEYS), bf16)
            delta = T.alloc_shared((HEADS,), f32)
            scratch = T.alloc_shared((THREADS // 32,), i32)
            full_left, full_right = T.alloc_barrier(128), T.alloc_barrier(128)
            free_left, free_right = T.alloc_barrier(128), T.alloc_barrier(128)
            weights_full, weights_free = T.alloc_barrier(128), T.alloc_barrier(128)
            s_acc = T.alloc_fragment((HEADS, KEYS), f32)
            dp_acc = T.alloc_fragment((HEADS, KEYS), f32)
            dq_left = T.alloc_fragment((HEADS, split), f32)
            dq_middle = T.alloc_fragment((HEADS, middle), f32)
            dq_rest = T.alloc_fragment((HEADS, 64), f32)
            dkv_acc = T.alloc_fragment((KEYS, 64), f32)

            tx = T.get_thread_binding()
            # by a function: TileLang's simplifier takes minutes over a division by a run-time number
            # T.max(..., 0), here and below, for the same simplifier: what it cannot prove it tries for long
            t: T.int32 = T.max(T.call_extern(i32, "quotient", b, T.ceildiv(H, HEADS)), 0)
            h0: T.int32 = T.max(T.call_extern(i32, "remainder_of", b, T.ceildiv(H, HEADS)), 0) * HEADS
            length: T.int32 = T.if_then_else(
                has_length > 0, T.min(K, topk_length[T.max(T.if_then_else(has_length > 0, t, 0), 0), 0]), K
            )
            last: T.int32 = T.call_extern(
                i32,
                "last_slot",
                T.access_ptr(indices[t, 0], "r", K),
                length,
                S,
                T.access_ptr(scratch[0], "rw", THREADS // 32),
            )
            n: T.int32 = T.ceildiv(last, KEYS)

            if tx >= 256:
                T.dec_max_nreg(40)
                p = tx % 128
                for j in T.serial(n):
                    ids = T.alloc_local((4,), i32)
                    for r in T.unroll(4):
                        ids[r] = T.call_extern(
                            i32, "key_of", T.access_ptr(indices[t, 0], "r", K), j * KEYS + r * 16 + p // 8, last, S
                        )
                    T.barrier_wait(free_left, (j & 1) ^ 1)
                    for r in T.unroll(4):
                        ok = ids[r] >= 0
                        row: T.int32 = T.max(ids[r], 0)
                        for c in T.unroll(left):
                            T.ptx_cp_async(
                                T.access_ptr(ks[r * 16 + p // 8, c * 64 + (p % 8) * 8], "w", 8),
                                T.access_ptr(kv[row, c * 64 + (p % 8) * 8], "r", 8),
                                8,
                                ok,
                            )
                    T.cp_async_barrier_noinc(full_left)
                    T.barrier_wait(free_right, (j & 1) ^ 1)
                    for r in T.unroll(4):
                        ok = ids[r] >= 0
                        row: T.int32 = T.max(ids[r], 0)
                        for c in T.unroll(panels - left):
                            col = (left + c) * 64 + (p % 8) * 8
                            inside = ok & (col < D)
                            T.ptx_cp_async(
                                T.access_ptr(ks[r * 16 + p // 8, col], "w", 8),
                                T.access_ptr(kv[row, T.if_then_else(col < D, col, 0)], "r", 8),
                                8,
                                inside,
                            )
                    T.cp_async_barrier_noinc(full_right)
            else:
                if need_kv:
                    T.inc_max_nreg(232)
                dot = T.alloc_local((1,), f32)
                for r in T.unroll(2):
                    h = h0 + r * 32 + tx // 8
                    head: T.int32 = T.max(T.min(h, H - 1), 0)
                    for c in T.unroll(panels):
                        col = c * 64 + (tx % 8) * 8
                        T.ptx_cp_async(
                            T.access_ptr(qs[r * 32 + tx // 8, col], "w", 8),
                            T.access_ptr(q[t, head, T.if_then_else(col < D, col, 0)], "r", 8),
                            8,
                            (h < H) & (col < D),
                        )
                    given = (h < H) & (has_grad_out > 0)
                    dot[0] = 0.0
                    for c in T.unroll(value_panels):
                        col = c * 64 + (tx % 8) * 8
                        T.ptx_cp_async(
                            T.access_ptr(dos[r * 32 + tx // 8, col], "w", 8),
                            T.access_ptr(grad_out[t, head, col], "r", 8),
                            8,
                            given,
                        )
                        dot[0] = dot[0] + T.call_extern(
                            f32,
                            "dot_8",
                            T.access_ptr(grad_out[t, head, col], "r", 8),
                            T.access_ptr(out[t, head, col], "r", 8),
                        )
                    dot[0] = T.call_extern(f32, "sum_8_lanes", dot[0])
                    if tx % 8 == 0:
                        delta[r * 32 + tx // 8] = T.if_then_else(given, dot[0], 0.0)
                        if (h < H) & (has_sink > 1):
                            sink_grads[t, head] = T.if_then_else(
                                given & (last > 0),
                                -dot[0] * T.call_extern(f32, "sigmoid", sink[0, head] - lse[t, head]),
                                0.0,
                            )
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads(8, 256)

                if tx < 128:
                    if not need_kv:  # here, where ptxas then spills nothing
                        T.inc_max_nreg(232)
                    # logits, weights and their gradients; grad_q's first columns
                    lse2 = T.alloc_local((2,), f32)
                    share = T.alloc_local((2,), f32)
                    scaled = T.alloc_local((2,), f32)
                    offset = T.alloc_local((2,), f32)
                    for r in T.unroll(2):
                        row_of_thread = tx // 32 * 16 + r * 8 + tx % 32 // 4
                        h = h0 + row_of_thread
                        lse2[r] = 0.0
                        share[r] = 0.0
                        offset[r] = 0.0
                        if h < H:
                            lse2[r] = lse[t, h] * LOG2E
                            share[r] = 1.0
                            if has_sink > 0:
                                share[r] = T.call_extern(f32, "sigmoid", lse[t, h] - sink[0, h])
                            offset[r] = share[r] * delta[row_of_thread]
                            if has_grad_lse > 0:
                                offset[r] = offset[r] - grad_lse[t, h]
                        scaled[r] = share[r] * scale
                        offset[r] = offset[r] * scale
                    if need_q:
                        T.clear(dq_left)
                    for j in T.serial(n):
                        low: T.uint32 = T.call_extern(
                            "uint32", "keys_of_32", T.access_ptr(indices[t, 0], "r", K), j * KEYS, last, S
                        )
                        high: T.uint32 = T.call_extern(
                            "uint32", "keys_of_32", T.access_ptr(indices[t, 0], "r", K), j * KEYS + 32, last, S
                        )
                        T.barrier_wait(full_left, j & 1)
                        T.fence_proxy_async()
                        T.wgmma_gemm(qs[:, 0:split], ks[:, 0:split], s_acc, transpose_B=True, clear_accum=True)
                        T.barrier_wait(full_right, j & 1)
                        T.fence_proxy_async()
                        T.wgmma_gemm(qs[:, split:width], ks[:, split:width], s_acc, transpose_B=True)
                        T.wgmma_gemm(dos, ks[:, 0:value_width], dp_acc, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(1)
                        T.evaluate(
                            T.call_extern(
                                "handle", "weights_of_tile", s_acc.data, low, high, scale * LOG2E, lse2[0], lse2[1]
                            )
                        )
                        T.wait_wgmma(0)
                        T.evaluate(
                            T.call_extern(
                                "handle",
                                "gradients_of_tile",
                                s_acc.data,
                                dp_acc.data,
                                share.data,
                                scaled.data,
                                offset.data,
                            )
                        )
                        T.barrier_wait(weights_free, (j & 1) ^ 1)
                        T.copy(dp_acc, dss)
                        T.copy(s_acc, ps)
                        T.fence_proxy_async()
                        T.barrier_arrive(weights_full)
                        if need_q:
                            T.sync_threads(9, 128)
                            T.wgmma_gemm(dss, ks[:, 0:split], dq_left)
                            T.wait_wgmma(0)
                        T.barrier_arrive(free_left)
                    if need_q:
                        for i, d in T.Parallel(HEADS, split):
                            if h0 + i < H:
                                grad_q[t, h0 + i, d] = dq_left[i, d]
                else:
                    # the rest of grad_q; the keys' gradient in chunks of 64 columns
                    if not need_kv:
                        T.inc_max_nreg(232)
                    key = tx % 128 // 32 * 16 + tx % 32 // 4
                    if need_q:
                        T.clear(dq_middle)
                        if rest > 0:
                            T.clear(dq_rest)
                    for j in T.serial(n):
                        slot = j * KEYS + key
                        id_0: T.int32 = T.call_extern(i32, "key_of", T.access_ptr(indices[t, 0], "r", K), slot, last, S)
                        id_1: T.int32 = T.call_extern(
                            i32, "key_of", T.access_ptr(indices[t, 0], "r", K), slot + 8, last, S
                        )
                        ok_0 = id_0 >= 0
                        ok_1 = id_1 >= 0
                        row_0: T.int32 = b * K + slot if per_pair else T.max(id_0, 0)
                        row_1: T.int32 = row_0 + 8 if per_pair else T.max(id_1, 0)
                        T.barrier_wait(weights_full, j & 1)
                        T.fence_proxy_async()
                        if need_q:
                            T.wgmma_gemm(dss, ks[:, split : split + middle], dq_middle)
                            if rest > 0:
                                T.wgmma_gemm(dss, ks[:, split + middle : width], dq_rest)
                            T.wait_wgmma(0)
                        T.barrier_arrive(free_right)
                        if need_kv:
                            for c in T.unroll(panels):
                                T.wgmma_gemm(
                                    dss, qs[:, c * 64 : c * 64 + 64], dkv_acc, transpose_A=True, clear_accum=True
                                )
                                if c < value_panels:
                                    T.wgmma_gemm(ps, dos[:, c * 64 : c * 64 + 64], dkv_acc, transpose_A=True)
                                T.wait_wgmma(0)
                                if c == panels - 1:
                                    T.barrier_arrive(weights_free)
                                    T.evaluate(
                                        T.call_extern(
                                            "handle",
                                            f"to_rows<{(D - 64 * (panels - 1)) // 16}, {str(not per_pair).lower()}>",
                                            dkv_acc.data,
                                            T.access_ptr(key_grads[row_0, c * 64], "rw", 64),
                                            T.access_ptr(key_grads[row_1, c * 64], "rw", 64),
                                            ok_0,
                                            ok_1,
                                        )
                                    )
                                else:
                                    T.evaluate(
                                        T.call_extern(
                                            "handle",
                                            f"to_rows<4, {str(not per_pair).lower()}>",
                                            dkv_acc.data,
                                            T.access_ptr(key_grads[row_0, c * 64], "rw", 64),
                                            T.access_ptr(key_grads[row_1, c * 64], "rw", 64),
                                            ok_0,
                                            ok_1,
                                        )
                                    )
                        else:
                            T.barrier_arrive(weights_free)
                    if need_q:
                        for i, d in T.Parallel(HEADS, middle):
                            if (h0 + i < H) & (split + d < D):
                                grad_q[t, h0 + i, split + d] = dq_middle[i, d]
                        if rest > 0:
                            for i, d in T.Parallel(HEADS, 64):
                                if h0 + i < H:
                                    grad_q[t, h0 + i, split + middle + d] = dq_rest[i, d]

    return sparse_mla_backward


@kernel(pass_configs=HAND_MADE, tensor_core=None)
def in_order(D):
    """The keys' gradient in bfloat16, columns back in order: `backward` keeps a thread's four of 16 side by side."""
    S = T.dynamic("S")

    @T.prim_func
    def columns_in_order(key_grads: T.Tensor((S, D), "float32"), grad_kv: T.Tensor((S, D), "bfloat16")):
        with T.Kernel(T.ceildiv(S * (D // 4), 256), threads=256, prelude=SOURCE) as b:
            four = b * 256 + T.get_thread_binding()
            row = four // (D // 4)
            column = four % (D // 4) * 4
            if row < S:
                to = column // 16 * 16 + column % 16 // 2
                T.evaluate(
                    T.call_extern(
                        "handle",
                        "four_in_order",
                        T.access_ptr(key_grads[row, column], "r", 4),
                        T.access_ptr(grad_kv[row, to], "w", 10),
                    )
                )

    return columns_in_order


VARIANTS = [
    (backward, (576, 512, True, True, False)),
    (backward, (160, 128, True, True, False)),
    (backward, (576, 512, True, True, True)),
    (backward, (576, 512, True, False, False)),
    (backward, (576, 512, False, True, False)),
    (in_order, (576,)),
]


def refuse(
    grad_out,
    grad_lse,
    q,
    kv,
    indices,
    out,
    lse,
    softmax_scale,
    d_v,
    sink=None,
    topk_length=None,
    need_q=True,
    need_kv=True,
    need_sink=True,
) -> str | None:
    return not_bfloat16(q=q) or not_among("(D, Dv)", (q.shape[2], d_v), WIDTHS)


def compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None:
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, the kernel takes bfloat16"
    if reason := not_among("(D, Dv)", (head_dim, v_dim), WIDTHS):
        return reason
    backward(head_dim, v_dim, True, True, torch.are_deterministic_algorithms_enabled())
    in_order(head_dim)
    return None


def launch(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    d_v: int,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    need_q: bool = True,
    need_kv: bool = True,
    need_sink: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, width = q.shape
    need_sink = need_sink and sink is not None
    # a sink alone takes the variant for queries, whose result is dropped
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format) if need_q or not need_kv else q.new_empty(0)
    grad_kv = torch.empty_like(kv, memory_format=torch.contiguous_format) if need_kv else kv.new_empty(0)
    grad_sink = None
    if rows > 0 and kv.shape[0] > 0:
        key_grads = torch.zeros(kv.shape if need_kv else (1, width), dtype=torch.float32, device=q.device)
        sink_terms = torch.empty_like(lse, memory_format=torch.contiguous_format) if need_sink else None
        q, indices, out, lse = dense(q), dense(indices), dense(out), dense(lse)
        # what is absent has a stand-in of the same dtype and as many dimensions, which the kernel does not read
        args = (
            q,
            dense(kv),
            indices,
            indices if topk_length is None else dense(topk_length)[:, None],
            out,
            out if grad_out is None else dense(grad_out.to(torch.bfloat16)),
            lse,
            lse if grad_lse is None else dense(grad_lse.to(torch.float32)),
            lse if sink is None else dense(sink.to(torch.float32))[None],
            grad_q if need_q or not need_kv else q,
            key_grads,
            lse if sink_terms is None else sink_terms,
            softmax_scale,
            int(topk_length is not None),
            int(grad_out is not None),
            int(grad_lse is not None),
            int(sink is not None) + int(need_sink),
        )
        if need_kv and torch.are_deterministic_algorithms_enabled():
            _in_chunks(args, need_q)
        else:
            backward(width, d_v, need_q or not need_kv, need_kv, False)(*args)
        if need_kv:
            in_order(width)(key_grads, grad_kv)
        if sink_terms is not None:
            grad_sink = sink_terms.sum(0).to(sink.dtype)
    else:
        grad_q, grad_kv = grad_q.zero_(), grad_kv.zero_()
    if grad_sink is None:
        grad_sink = sink.new_zeros(sink.shape) if need_sink else q.new_empty(0)
    return grad_q if need_q else q.new_empty(0), grad_kv, grad_sink


def _in_chunks(args: tuple, need_q: bool) -> None:
    """Contributions of chunks of rows, written pair by pair, then added by key in the order of rows, heads, slots."""
    q, kv, indices, length, out, grad_out, lse, grad_lse, sink, grad_q, key_grads, sink_terms, *scalars = args
    rows, heads, width = q.shape
    slots, tiles = indices.shape[1], -(-heads // HEADS)
    step = max(1, min(WORKSPACE, workspace_bytes()) // (tiles * slots * width * 4))
    pairs = key_grads.new_empty(min(step, rows) * tiles * slots, width)
    has_length = scalars[1]
    run = backward(width, out.shape[2], need_q, True, True)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        ids = indices[part]
        if has_length:
            positions = torch.arange(slots, device=ids.device)
            ids = torch.where(positions < length[part], ids, -1)
        ids = ids[:, None].expand(-1, tiles, -1).reshape(-1)
        run(
            q[part],
            kv,
            indices[part],
            length[part] if has_length else length,
            out[part],
            grad_out[part],
            lse[part],
            grad_lse[part],
            sink,
            grad_q[part],
            pairs[: ids.shape[0]],
            sink_terms[part],
            *scalars,
        )
        add_by_key(key_grads, pairs[: ids.shape[0]], ids)
