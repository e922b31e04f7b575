"""Attention target, Hopper (sm_90a), bfloat16.

Computes   target[t, j] = sum_h exp(softmax_scale * q[t, h] . kv[id_j] - lse[t, h]); one block, one query row t.
Roles      One warpgroup gathers, one (up to 64 heads) or two (more) multiply, 64 heads each. The gatherer looks for the
           row's last key, so that tiles past it cost nothing, brings keys in tiles of 64 by cp.async (8 lanes cover 128
           bytes of a row, two tiles in flight), and later writes the results. A multiplier keeps its 64 queries in
           registers, where wgmma takes its first operand from: with both operands in shared memory the reads would
           bound it. It multiplies a tile, gives it back, takes the exponentials and sums its heads. Two multipliers
           take turns, so that one's exponentials run beside the other's product.
Heads      More than 128 go in groups of 128, one after another, each of which gathers the keys again. Heads that fill
           up the last 64 repeat the last head with an lse so large that they add 0; nothing is padded in memory.
Memory     Shared: 2 x 64 keys (147456 bytes at D = 576) and 4 tiles of sums by warp (8192); no workspace.
Registers  232 a multiplier's thread (144 queries at D = 576, 32 products), 40 a gatherer's: 64512 of the block's 65536.
Limits     bfloat16, D of 576, 512 or 160; any H, K, T, S.
Empty      slots are copied as zeros without an address being read; what comes of them is replaced by 0.
Order      A key's heads are summed inside a thread, then across lanes, warps and groups, in an order that depends on H
           alone: bits are the same from run to run, for any other rows, and wherever in the row a key stands.
Compiles   per (one or two multipliers, D). T, S, H, K and softmax_scale are run-time arguments.

The sums of a tile reach the gatherer without a barrier of their own. When it has waited for the stage of tile i,
multipliers are done with the product of tile i - 2, hence with the sums of tile i - 3. They write the sums of
tile i + 1 only when the gatherer has brought that tile, hence read those of tile i - 3: four places are enough.
"""

import tilelang.language as T
import torch
from torch import Tensor

from csrc_tilelang._arguments import dense, not_among, not_bfloat16
from csrc_tilelang._compile import HAND_MADE, kernel

WIDTHS = (576, 512, 160)
KEYS = 64  # of one tile
STAGES = 2  # tiles in flight; a third gains nothing
PLACES = STAGES + 2  # tiles of sums
HEADS = 64  # of one multiplying warpgroup
GATHERERS = 128  # threads
FIRST_TURN = 8  # named barriers 8 and 9: the compiler gives itself lower numbers
NEVER = 3.0e38  # lse of a head that only fills up; not infinite, since a logit may be

SOURCE = r"""
namespace target {

// One past the last slot that holds a key, among those that this warp looks at (32 of every 128); 0 if none does.
__device__ __forceinline__ int last_key(const int* ids, int slots, int keys, int thread) {
  for (int base = (slots - 1) / 128 * 128; base >= 0 && slots > 0; base -= 128) {
    int slot = base + thread;
    int id = slot < slots ? ids[slot] : -1;
    unsigned found = __ballot_sync(0xffffffffu, static_cast<unsigned>(id) < static_cast<unsigned>(keys));
    if (found) return base + (thread & ~31) + 32 - __clz(found);
  }
  return 0;
}

// exp(scale * product - lse). The difference is rounded once, so that large logits cost no accuracy here.
__device__ __forceinline__ float probability(float product, float scale, float lse) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(product, scale, -lse) * 1.4426950408889634f));
  return result;
}

// Halves the columns of a lane: it keeps HALF of them and adds what the partner lane has of these.
template <int HALF, int BIT>
__device__ __forceinline__ void fold(float* sum, int lane) {
  bool upper = lane & BIT;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    float kept = upper ? sum[i + HALF] : sum[i];
    float sent = upper ? sum[i] : sum[i + HALF];
    sum[i] = kept + __shfl_xor_sync(0xffffffffu, sent, BIT);
  }
}

// Sums the probabilities of a warp's 16 heads for each of 64 keys. In the accumulator of wgmma a lane holds, of rows
// r = lane / 4 and r + 8, columns 8 g + 2 (lane % 4) + {0, 1} as products[4 g + {0, 1}] and products[4 g + {2, 3}].
__device__ __forceinline__ void sum_heads(const float* products, float scale, float lse, float lse_8, float* sums,
                                          int lane) {
  float sum[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int at = (i / 2) * 4 + i % 2;
    sum[i] = probability(products[at], scale, lse) + probability(products[at + 2], scale, lse_8);
  }
  fold<8, 16>(sum, lane);
  fold<4, 8>(sum, lane);
  fold<2, 4>(sum, lane);
  int column = (lane >> 4) * 32 + (lane >> 3 & 1) * 16 + (lane >> 2 & 1) * 8 + lane % 4 * 2;
  *reinterpret_cast<float2*>(sums + column) = make_float2(sum[0], sum[1]);
}

}  // namespace target
"""


# Barriers hand over all that is shared; TileLang would add barriers that make multipliers wait for each other.
@kernel(pass_configs={**HAND_MADE, "tl.disable_thread_storage_sync": True})
def target(multipliers: int, width: int):
    rows, keys, heads, slots, num_lengths = (T.dynamic(name) for name in ("T_", "S", "H", "K", "L"))
    threads = 128 * multipliers
    warps = 4 * multipliers
    group_heads = HEADS * multipliers
    lanes = 8 if width % 64 == 0 else 4  # that copy one key together, 16 bytes each
    steps = KEYS * lanes // GATHERERS  # to cover the keys of a tile

    @T.prim_func
    def target(
        q: T.Tensor((rows, heads, width), "bfloat16"),
        kv: T.Tensor((keys, width), "bfloat16"),
        lse: T.Tensor((rows, heads), "float32"),
        indices: T.Tensor((rows, slots), "int32"),
        lengths: T.Tensor((num_lengths,), "int32"),
        out: T.Tensor((rows, slots), "float32"),
        scale: T.float32,
        has_lengths: T.int32,
    ):
        with T.Kernel(rows, threads=threads + GATHERERS, prelude=SOURCE) as t:
            key = T.alloc_shared((STAGES, KEYS, width), "bfloat16")
            sums = T.alloc_shared((PLACES, warps, KEYS), "float32")
            last = T.alloc_shared((4,), "int32")
            query = T.alloc_fragment((group_heads, width), "bfloat16")
            product = T.alloc_fragment((group_heads, KEYS), "float32")
            scanned = T.alloc_barrier([GATHERERS])
            full = T.alloc_barrier([GATHERERS] * STAGES)
            empty = T.alloc_barrier([threads] * STAGES)
            finished = T.alloc_barrier([threads])
            tx = T.get_thread_binding()
            groups = T.ceildiv(heads, group_heads)

            if tx >= threads:
                T.dec_max_nreg(40)
                p = tx - threads
                length: T.int32 = T.if_then_else(has_lengths != 0, lengths[t], slots)
                used: T.int32 = T.max(T.min(length, slots), 0)
                found = T.call_extern(
                    "int32", "target::last_key", T.access_ptr(indices[t, 0], "r", slots), used, keys, p
                )
                if p % 32 == 0:
                    last[p // 32] = found
                T.barrier_arrive(scanned[0])
                T.barrier_wait(scanned[0], 0)
                end: T.int32 = T.max(T.max(last[0], last[1]), T.max(last[2], last[3]))
                tiles: T.int32 = T.ceildiv(end, KEYS)
                ids = T.alloc_local((steps,), "int32")
                total = T.alloc_var("float32")
                for g in T.serial(groups):
                    for i in T.unroll(steps):
                        slot: T.int32 = i * (GATHERERS // lanes) + p // lanes
                        ids[i] = T.if_then_else(slot < used, indices[t, slot], -1)
                    for j in T.serial(tiles + STAGES + 1):
                        if j < tiles:
                            count: T.int32 = g * tiles + j
                            T.barrier_wait(empty[count % STAGES], ((count // STAGES) & 1) ^ 1)
                            for i in T.unroll(steps):
                                valid = (ids[i] >= 0) & (ids[i] < keys)
                                row: T.int32 = T.if_then_else(valid, ids[i], 0)
                                for c in T.unroll(width // (lanes * 8)):
                                    at = i * (GATHERERS // lanes) + p // lanes
                                    column = c * lanes * 8 + p % lanes * 8
                                    T.ptx_cp_async(
                                        T.access_ptr(key[count % STAGES, at, column], "w", 8),
                                        T.access_ptr(kv[row, column], "r", 8),
                                        8,
                                        valid,
                                    )
                            T.cp_async_barrier_noinc(full[count % STAGES])
                            for i in T.unroll(steps):  # ahead of the wait for the next stage
                                next_slot: T.int32 = (j + 1) * KEYS + i * (GATHERERS // lanes) + p // lanes
                                ids[i] = T.if_then_else(next_slot < used, indices[t, next_slot], -1)
                        if j == tiles:
                            T.barrier_wait(finished[0], g & 1)
                        done: T.int32 = j - STAGES - 1
                        slot: T.int32 = done * KEYS + p
                        if (done >= 0) & (p < KEYS) & (slot < slots):
                            id: T.int32 = T.if_then_else(slot < used, indices[t, slot], -1)
                            total = 0.0
                            for w in T.unroll(warps):
                                total += sums[(g * tiles + done) % PLACES, w, p]
                            if (id < 0) | (id >= keys):
                                total = 0.0
                            if g == 0:
                                out[t, slot] = total
                            else:
                                out[t, slot] += total
                for j in T.serial(T.ceildiv(slots - tiles * KEYS, GATHERERS)):
                    slot: T.int32 = tiles * KEYS + j * GATHERERS + p
                    if slot < slots:
                        out[t, slot] = 0.0
            else:
                T.inc_max_nreg(232)
                if multipliers == 2:
                    if tx >= 128:
                        T.named_barrier_arrive(FIRST_TURN, threads)
                for g in T.serial(groups):
                    for h, d in T.Parallel(group_heads, width):
                        query[h, d] = q[t, T.min(g * group_heads + h, heads - 1), d]
                    head: T.int32 = g * group_heads + tx // 32 * 16 + tx % 32 // 4
                    norm: T.float32 = T.if_then_else(head < heads, lse[t, head], NEVER)
                    norm_8: T.float32 = T.if_then_else(head + 8 < heads, lse[t, head + 8], NEVER)
                    T.barrier_wait(scanned[0], 0)
                    end: T.int32 = T.max(T.max(last[0], last[1]), T.max(last[2], last[3]))
                    tiles: T.int32 = T.ceildiv(end, KEYS)
                    for j in T.serial(tiles):
                        count: T.int32 = g * tiles + j
                        T.barrier_wait(full[count % STAGES], (count // STAGES) & 1)
                        T.fence_proxy_async()
                        if multipliers == 2:
                            T.sync_threads(FIRST_TURN + tx // 128, threads)
                        T.wgmma_gemm(
                            query,
                            key[count % STAGES, :, :],
                            product,
                            transpose_B=True,
                            policy=T.GemmWarpPolicy.FullRow,
                            clear_accum=True,
                        )
                        T.wait_wgmma(0)
                        if multipliers == 2:
                            if (tx < 128) | (count + 1 < groups * tiles):  # nobody waits for the very last turn
                                T.named_barrier_arrive(FIRST_TURN + 1 - tx // 128, threads)
                        T.barrier_arrive(empty[count % STAGES])
                        T.evaluate(
                            T.call_extern(
                                "handle",
                                "target::sum_heads",
                                product.data,
                                scale,
                                norm,
                                norm_8,
                                T.access_ptr(sums[count % PLACES, tx // 32, 0], "w", KEYS),
                                tx % 32,
                            )
                        )
                    T.barrier_arrive(finished[0])

    return target


VARIANTS = [(target, (1, 576)), (target, (2, 576)), (target, (2, 160))]


def refuse(
    q: Tensor, kv: Tensor, lse: Tensor, indices: Tensor, softmax_scale: float, topk_length: Tensor | None
) -> str | None:
    return not_bfloat16(q=q, kv=kv) or not_among("D", q.shape[2], WIDTHS)


def launch(
    q: Tensor, kv: Tensor, lse: Tensor, indices: Tensor, softmax_scale: float, topk_length: Tensor | None
) -> Tensor:
    out = q.new_empty(indices.shape, dtype=torch.float32)
    if kv.shape[0] == 0:
        return out.zero_()
    if out.numel() == 0:
        return out
    indices = dense(indices)
    lengths = indices.view(-1) if topk_length is None else dense(topk_length)  # any int32 memory where there is none
    run = target(_multipliers(q.shape[1]), q.shape[2])
    run(dense(q), dense(kv), dense(lse), indices, lengths, out, softmax_scale, int(topk_length is not None))
    return out


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
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, the kernel takes bfloat16"
    reason = not_among("D", head_dim, WIDTHS)
    if reason is None:
        target(_multipliers(heads), head_dim)
    return reason


def _multipliers(heads: int) -> int:
    return 1 if heads <= HEADS else 2
