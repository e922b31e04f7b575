"""Sparse MLA forward on Hopper (sm_90a), bfloat16: out and lse of dsa::sparse_mla.

Computes   one item is a query row with up to 64 heads: logits of 64 keys at a time, an online softmax, and the
           product of its weights with the first Dv columns of the same keys. The latent row is key and value at once,
           so a key comes on chip once. Blocks are persistent, one a multiprocessor; block b does items b, b + blocks,
           ... in order, so the head tiles of a row run side by side and share its keys through L2.
Threads    four warpgroups. `softmax` holds the queries, forms logits and weights. Two output groups add weights times
           values, each for half of the columns. The last one gathers keys by 16-byte cp.async, 8 threads a row. The
           gathering group runs ahead into the next item, whose queries it brings first, as if they were a tile of
           keys. An output group holds back its last panel until the logits of the next tile are done, so that the
           tensor cores have work during that tile's softmax.
Tiles      64 heads x 64 keys: the least that a warpgroup's wgmma takes, and the most for which everything fits. Keys
           lie in a ring of panels of 64 keys x 128 columns (64 for Dv = 128); a panel is free again once the output
           group that owns its columns is done with it, 2.75 tiles in flight. For D = 576 the weights take the place
           of the tile's last 64 columns, which only logits need.
Shared     D = 576: ring 11 x 16 KiB, tails 3 x 8 KiB, queries 16 + 8 KiB, factors 1.5 KiB: 230,944 of 232,448 bytes.
Registers  512 threads: softmax 160 (384 columns of queries 96, logits 32), outputs 160 each (accumulators 128),
           gather 32. wgmma wants 26 beside its operands, which makes 160 the least for each and leaves the rest of
           the queries in shared memory.
Limits     (D, Dv) among (576, 512), (512, 512), (160, 128); any number of heads (missing ones are zeros on chip and
           are not stored), any K, S and T.
Empty ids  ids outside [0, S) and slots at or past the length are not read: zeros on chip, logits -inf. A tile without
           a key is skipped. A row without a key gives out 0 and lse -inf. NaN of a key in use reaches the row's sum.
Order      keys in the order of their slots, so bits depend on the row alone. Weights are relative to a running
           maximum that moves only when it grows by more than 2^8, which spares most rescaling; weights and sums are
           float32, rounded to bfloat16 for the product with values.
Compiles   per (D, Dv). Lengths, heads, K, scale, and whether there is a sink or a length are run-time arguments.
"""

import functools
import math

import tilelang.language as T
import torch
from torch import Tensor

from csrc_tilelang._arguments import dense, not_bfloat16
from csrc_tilelang._compile import HAND_MADE, kernel

HEADS = 64  # heads of one tile: the rows of a warpgroup's product
KEYS = 64  # keys of one tile
TILES = 3  # tiles in flight
GROUP, WARPS = 128, 4  # threads and warps of a warpgroup
WIDTHS = ((576, 512), (512, 512), (160, 128))

CUDA = r"""
namespace forward {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Brings COLUMNS columns of 64 rows into panels of 64 columns as wgmma reads them (swizzled over 128 bytes, the 32
// columns of a narrow panel over 64). Eight threads share a row; thread t copies rows t % 128 / 8 + 16 i, which are
// rows ids[i] of `from`, or zeros where that is negative.
template <int COLUMNS, int ROW>
__device__ __forceinline__ void gather(void* panel, const void* from, const int* ids) {
  constexpr int BYTES = COLUMNS < 64 ? COLUMNS * 2 : 128;
  const int row = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
  if (chunk >= BYTES / 16) return;
  const int place = chunk ^ (BYTES == 128 ? row % 8 : row / 2 % 4);
  const unsigned to = (unsigned)__cvta_generic_to_shared(panel) + row * BYTES + place * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const char* source = (const char*)from + (long long)max(ids[i], 0) * ROW + chunk * 16;
#pragma unroll
    for (int d = 0; d < (COLUMNS + 63) / 64; ++d)
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                   ::"r"(to + (i * 16 + d * 64) * BYTES), "l"(source + d * 128), "r"(ids[i] < 0 ? 0 : 16) : "memory");
  }
}

// Accumulators of 64 rows: thread t holds, of rows r = 16 (t / 32) + t % 32 / 4 and r + 8, columns
// 8 g + 2 (t % 4) + {0, 1}, as x[4 g + {0, 1}] and x[4 g + {2, 3}].

// One tile of logits becomes weights 2^(s * scale - m), written to p in bfloat16 and added to the thread's share of l.
// m is the largest logit so far, or one at most 2^8 times smaller: moving it costs a pass over the outputs.
__device__ __forceinline__ void weigh(float* s, float* m, float* l, unsigned low, unsigned high, float scale,
                                      float* alpha, void* p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  if ((low & high) != 0xffffffffu) {
    low >>= column, high >>= column;
#pragma unroll
    for (int g = 0; g < 8; ++g)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!((g < 4 ? low : high) >> (g % 4 * 8 + e) & 1)) s[4 * g + e] = s[4 * g + 2 + e] = -INFINITY;
  }
  float base[2];
  unsigned packed[16];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int g = 1; g < 8; ++g) largest = fmaxf(largest, fmaxf(s[4 * g + 2 * i], s[4 * g + 2 * i + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2)) * scale;
    float factor = 1.f;
    if (largest - m[i] > 8.f) {
      if (m[i] != -INFINITY) factor = exp2_approx(m[i] - largest);  // else nothing has been added yet
      m[i] = largest;
    }
    if (lane % 4 == 0) alpha[warp * 16 + i * 8 + lane / 4] = factor;
    l[i] *= factor;
    base[i] = m[i] == -INFINITY ? 0.f : m[i];
  }
#pragma unroll
  for (int g = 0; g < 8; ++g)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float a = exp2_approx(fmaf(s[4 * g + 2 * i], scale, -base[i]));
      float b = exp2_approx(fmaf(s[4 * g + 2 * i + 1], scale, -base[i]));
      l[i] += a + b;
      packed[2 * g + i] = pack(a, b);
    }
  asm volatile("bar.sync 8, 128;" ::: "memory");  // all four warps are done with the keys that lay where p goes
  const int row = warp * 16 + lane % 16;
  const unsigned to = (unsigned)__cvta_generic_to_shared(p) + row * 128;
#pragma unroll
  for (int g = 0; g < 8; g += 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to + (((g + lane / 16) ^ (row % 8)) * 16)),
                 "r"(packed[2 * g]), "r"(packed[2 * g + 1]), "r"(packed[2 * g + 2]), "r"(packed[2 * g + 3])
                 : "memory");
}

// After a row's last tile: the factors of its outputs, and lse.
__device__ __forceinline__ void finish(const float* m, const float* l, const float* sink, int has_sink, int heads,
                                       float* factor, float* lse) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int h = warp * 16 + i * 8 + lane / 4;
    float sum = l[i] + __shfl_xor_sync(0xffffffffu, l[i], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) {
      float all = sum;
      if (has_sink && h < heads) all += exp2f(sink[h] * 1.4426950408889634f - m[i]);
      factor[h] = sum == 0.f ? 0.f : 1.f / all;
      if (h < heads) lse[h] = sum == 0.f ? -INFINITY : m[i] * 0.6931471805599453f + logf(sum);
    }
  }
}

// Multiplies rows by factor[row], unless those of the warp are all 1.
template <int N>
__device__ __forceinline__ void rescale(float* x, const float* factor) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const float a = factor[row], b = factor[row + 8];
  if (__any_sync(0xffffffffu, a != 1.f || b != 1.f)) {
#pragma unroll
    for (int g = 0; g < N; g += 4) x[g] *= a, x[g + 1] *= a, x[g + 2] *= b, x[g + 3] *= b;
  }
}

// Writes N / 2 columns of 16 rows times a (rows r) and b (rows r + 8), in bfloat16: 16 bytes a thread, 64 of a row at
// a time, after a transposition among the four threads that share a row.
template <int N>
__device__ __forceinline__ void store(const float* x, float a, float b, int heads, int stride, void* out) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const bool odd = lane & 1, high = lane & 2;
  unsigned packed[N / 2];
#pragma unroll
  for (int g = 0; g < N; g += 4) {
    packed[g / 2] = pack(x[g] * a, x[g + 1] * a);
    packed[g / 2 + 1] = pack(x[g + 2] * b, x[g + 3] * b);
  }
  char* to = (char*)out + (row * stride + lane % 4 * 8) * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int g = 0; g < N / 4; g += 4) {
      unsigned w[4];  // w[k] of thread j becomes w[j] of thread k
#pragma unroll
      for (int k = 0; k < 4; ++k) w[k] = packed[2 * (g + k) + i];
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? w[k] : w[k + 1], 1);
        w[k] = odd ? other : w[k], w[k + 1] = odd ? w[k + 1] : other;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, high ? w[k] : w[k + 2], 2);
        w[k] = high ? other : w[k], w[k + 2] = high ? w[k + 2] : other;
      }
      if (row + 8 * i < heads) *(uint4*)(to + 8 * i * stride * 2 + g * 16) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// One arrival for a warp: of all its threads' work so far.
__device__ __forceinline__ void arrive(void* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 ::"r"((unsigned)__cvta_generic_to_shared(barrier)) : "memory");
}

}  // namespace forward
"""


def _call(function: str, *args: object) -> None:
    T.evaluate(T.call_extern("handle", f"forward::{function}", *args))


def _arrive(barrier: object) -> None:
    _call("arrive", T.access_ptr(barrier, "rw"))


@kernel(pass_configs=HAND_MADE | {"tl.disable_thread_storage_sync": True})
def sparse_mla_forward(width, v_width):
    """One compilation for all numbers of heads, lengths and scales."""
    R, S, H, K, L, B = (T.dynamic(name) for name in ("R", "S", "H", "K", "L", "B"))
    bf16 = "bfloat16"
    tail = width - v_width  # columns that are key but not value
    tail_width = tail or KEYS
    panel, ring, held = (128, 11, 3) if v_width == 512 else (64, 8, 2)
    panels = tuple(range(v_width // panel))
    own = panels[: len(panels) // 2]  # panels of one output group

    @T.macro
    def advance(index: T.Ref, parity: T.Ref, size):
        index += 1
        if index == size:
            index = 0
            parity ^= 1

    @T.macro
    def begin(
        item,
        block,
        blocks,
        has_length,
        length,
        row: T.Ref,
        first: T.Ref,
        used: T.Ref,
        tiles: T.Ref,
    ):
        """The row, first head, number of slots in use and number of tiles of a block's item."""
        row = T.truncdiv(block + item * blocks, T.truncdiv(H + HEADS - 1, HEADS))
        first = (block + item * blocks - row * T.truncdiv(H + HEADS - 1, HEADS)) * HEADS  # noqa: F841
        used = K
        if has_length != 0:
            used = T.min(length[row, 0], K)
        tiles = T.max(T.truncdiv(used + KEYS - 1, KEYS), 1)  # noqa: F841

    @T.macro
    def outputs(
        group,
        items,
        block,
        blocks,
        has_length,
        length,
        keys,
        weights,
        valid,
        alpha,
        factor,
        weighed,
        scored,
        free,
        done,
        out,
        thread,
        row: T.Ref,
        first: T.Ref,
        used: T.Ref,
        tiles: T.Ref,
        tile: T.Ref,
        turn: T.Ref,
    ):
        T.inc_max_nreg(160)
        acc = [T.alloc_fragment((HEADS, panel), "float32") for _ in own]
        slots = T.alloc_local((len(own),), "int32")
        for c in own:
            slots[c] = group * len(own) + c
        upper, lower = T.alloc_var("float32"), T.alloc_var("float32")
        for item in T.serial(items):
            begin(item, block, blocks, has_length, length, row, first, used, tiles)
            for c in own:
                T.clear(acc[c])
            for j in T.serial(tiles + 1):
                T.barrier_wait(weighed[tile], turn)
                low: T.uint32 = valid[tile, 0]
                high: T.uint32 = valid[tile, 1]
                if (j > 0) & ((low | high) != 0):
                    for c in own:
                        _call(
                            f"rescale<{panel // 2}>",
                            acc[c].data,
                            T.access_ptr(alpha[tile, 0], "r", HEADS),
                        )
                    T.fence_proxy_async()
                    for c in own:
                        if c == own[-1]:
                            if j < tiles:  # leaves the tensor cores something to do during the next tile's softmax
                                T.barrier_wait(
                                    scored[T.if_then_else(tile == TILES - 1, 0, tile + 1)],
                                    T.if_then_else(tile == TILES - 1, turn ^ 1, turn),
                                )
                        T.wgmma_gemm(
                            weights[tile, :, :],
                            keys[slots[c], :, :],
                            acc[c],
                            policy=T.GemmWarpPolicy.FullRow,
                        )
                    for c in own[:-1]:
                        T.wait_wgmma(len(own) - 1 - c)
                        _arrive(free[slots[c]])
                    T.wait_wgmma(0)
                else:
                    for c in own[:-1]:
                        _arrive(free[slots[c]])
                _arrive(free[slots[own[-1]]])
                if j == tiles:
                    upper = factor[tile, thread // 32 % 4 * 16 + thread % 32 // 4]
                    lower = factor[tile, thread // 32 % 4 * 16 + thread % 32 // 4 + 8]
                _arrive(done[tile])
                advance(tile, turn, TILES)
                for c in own:
                    slots[c] += len(panels)
                    if slots[c] >= ring:
                        slots[c] -= ring
            for c in own:
                to = T.access_ptr(
                    out[row, first, (group * len(own) + c) * panel],
                    "w",
                    HEADS * v_width,
                )
                _call(
                    f"store<{panel // 2}>",
                    acc[c].data,
                    upper,
                    lower,
                    H - first,
                    v_width,
                    to,
                )

    @T.prim_func
    def sparse_mla_forward(
        q: T.Tensor((R, H, width), bf16),
        kv: T.Tensor((S, width), bf16),
        indices: T.Tensor((R, K), "int32"),
        length: T.Tensor((R, L), "int32"),  # its first column
        sink: T.Tensor((B, H), "float32"),  # its first row
        out: T.Tensor((R, H, v_width), bf16),
        lse: T.Tensor((R, H), "float32"),
        scale: T.float32,  # with log2(e)
        has_length: T.int32,
        has_sink: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512, prelude=CUDA) as block:
            keys = T.alloc_shared((ring, KEYS, panel), bf16)
            tails = T.alloc_shared((TILES, KEYS, tail_width), bf16)
            weights = tails if tail == KEYS else T.alloc_shared((TILES, HEADS, KEYS), bf16)
            q_rest = T.alloc_shared((HEADS, panel), bf16)
            q_tail = T.alloc_shared((HEADS, tail_width), bf16)
            valid = T.alloc_shared((TILES, 2), "uint32")  # a bit for each key of a tile
            alpha = T.alloc_shared((TILES, HEADS), "float32")
            factor = T.alloc_shared((TILES, HEADS), "float32")
            filled = T.alloc_barrier([GROUP + 1] * ring)
            free = T.alloc_barrier([WARPS] * ring)
            weighed = T.alloc_barrier([WARPS] * TILES)
            scored = T.alloc_barrier([WARPS] * TILES)
            done = T.alloc_barrier([2 * WARPS] * TILES)
            thread = T.get_thread_binding()
            row, first = T.alloc_var("int32"), T.alloc_var("int32")
            used, tiles = T.alloc_var("int32"), T.alloc_var("int32")
            tile, turn = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            slot, lap = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            items = T.alloc_var("int32")
            items = T.truncdiv(R * T.truncdiv(H + HEADS - 1, HEADS) - block + blocks - 1, blocks)

            given = [items, block, blocks, has_length, length, keys, weights, valid, alpha, factor]
            given += [weighed, scored, free, done, out, thread, row, first, used, tiles, tile, turn]

            if thread < GROUP:
                T.inc_max_nreg(160)
                q_held = [T.alloc_fragment((HEADS, panel), bf16) for _ in range(held)]
                logits = T.alloc_fragment((HEADS, KEYS), "float32")
                m = T.alloc_local((2,), "float32")
                total = T.alloc_local((2,), "float32")
                for item in T.serial(items):
                    begin(item, block, blocks, has_length, length, row, first, used, tiles)
                    m[0] = -T.infinity("float32")
                    m[1] = -T.infinity("float32")
                    total[0] = 0.0
                    total[1] = 0.0
                    for c in panels:
                        T.barrier_wait(filled[slot], lap)
                        if c < held:
                            T.copy(keys[slot, :, :], q_held[c])
                        else:
                            for h, d in T.Parallel(HEADS, panel):
                                q_rest[h, d] = keys[slot, h, d]
                        advance(slot, lap, ring)
                    if tail:
                        for h, d in T.Parallel(HEADS, tail):
                            q_tail[h, d] = tails[tile, h, d]
                    T.fence_proxy_async()
                    T.sync_threads(8, GROUP)
                    _arrive(scored[tile])
                    _arrive(weighed[tile])
                    advance(tile, turn, TILES)
                    for j in T.serial(tiles):
                        T.barrier_wait(filled[slot], lap)
                        low: T.uint32 = valid[tile, 0]
                        high: T.uint32 = valid[tile, 1]
                        if (low | high) != 0:
                            for c in panels:
                                if c > 0:
                                    T.barrier_wait(filled[slot], lap)
                                T.fence_proxy_async()
                                T.wgmma_gemm(
                                    q_held[c] if c < held else q_rest,
                                    keys[slot, :, :],
                                    logits,
                                    transpose_B=True,
                                    policy=T.GemmWarpPolicy.FullRow,
                                    clear_accum=c == 0,
                                )
                                advance(slot, lap, ring)
                            if tail:
                                T.wgmma_gemm(
                                    q_tail,
                                    tails[tile, :, :],
                                    logits,
                                    transpose_B=True,
                                    policy=T.GemmWarpPolicy.FullRow,
                                )
                            T.wait_wgmma(0)
                            _arrive(scored[tile])
                            _call(
                                "weigh",
                                logits.data,
                                m.data,
                                total.data,
                                low,
                                high,
                                scale,
                                T.access_ptr(alpha[tile, 0], "w", HEADS),
                                T.access_ptr(weights[tile, 0, 0], "w", HEADS * KEYS),
                            )
                            T.fence_proxy_async()
                        else:
                            for _ in panels:
                                T.barrier_wait(filled[slot], lap)
                                advance(slot, lap, ring)
                            _arrive(scored[tile])
                        if j == tiles - 1:
                            _call(
                                "finish",
                                m.data,
                                total.data,
                                T.access_ptr(sink[0, first], "r", HEADS),
                                has_sink,
                                H - first,
                                T.access_ptr(factor[tile, 0], "w", HEADS),
                                T.access_ptr(lse[row, first], "w", HEADS),
                            )
                        _arrive(weighed[tile])
                        advance(tile, turn, TILES)
            elif thread < 2 * GROUP:
                outputs(0, *given)
            elif thread < 3 * GROUP:
                outputs(1, *given)
            else:
                T.dec_max_nreg(32)
                p: T.int32 = thread - 384
                lane: T.int32 = thread % 32
                low_id = T.alloc_var("int32")
                high_id = T.alloc_var("int32")
                ids = T.alloc_local((4,), "int32")
                for item in T.serial(items):
                    begin(item, block, blocks, has_length, length, row, first, used, tiles)
                    low_id = -1
                    high_id = -1
                    if lane < used:
                        low_id = indices[row, lane]
                    if lane + 32 < used:
                        high_id = indices[row, lane + 32]
                    # the queries come as a tile of their own
                    for i in T.unroll(4):
                        ids[i] = T.if_then_else(first + i * 16 + p // 8 < H, i * 16 + p // 8, -1)
                    T.barrier_wait(done[tile], turn ^ 1)
                    for c in panels:
                        T.barrier_wait(free[slot], lap ^ 1)
                        _call(
                            f"gather<{panel}, {width * 2}>",
                            T.access_ptr(keys[slot, 0, 0], "w", KEYS * panel),
                            T.access_ptr(q[row, first, c * panel], "r", width),
                            ids.data,
                        )
                        if tail:
                            if c == panels[-1]:
                                _call(
                                    f"gather<{tail}, {width * 2}>",
                                    T.access_ptr(tails[tile, 0, 0], "w", KEYS * tail),
                                    T.access_ptr(q[row, first, v_width], "r", width),
                                    ids.data,
                                )
                        T.cp_async_barrier_noinc(filled[slot])
                        if p == 0:
                            T.barrier_arrive(filled[slot])
                        advance(slot, lap, ring)
                    advance(tile, turn, TILES)
                    for j in T.serial(tiles):
                        low: T.uint32 = T.Cast("uint32", T.ballot((low_id >= 0) & (low_id < S)))
                        high: T.uint32 = T.Cast("uint32", T.ballot((high_id >= 0) & (high_id < S)))
                        low_id = T.if_then_else(low_id < S, low_id, -1)
                        high_id = T.if_then_else(high_id < S, high_id, -1)
                        for i in T.unroll(4):
                            ids[i] = T.shfl_sync(
                                T.if_then_else(i < 2, low_id, high_id),
                                i % 2 * 16 + p // 8,
                            )
                        low_id = -1
                        high_id = -1
                        if (j + 1) * KEYS + lane < used:
                            low_id = indices[row, (j + 1) * KEYS + lane]
                        if (j + 1) * KEYS + 32 + lane < used:
                            high_id = indices[row, (j + 1) * KEYS + 32 + lane]
                        T.barrier_wait(done[tile], turn ^ 1)
                        if p == 0:
                            valid[tile, 0] = low
                            valid[tile, 1] = high
                        for c in panels:
                            T.barrier_wait(free[slot], lap ^ 1)
                            if (low | high) != 0:
                                _call(
                                    f"gather<{panel}, {width * 2}>",
                                    T.access_ptr(keys[slot, 0, 0], "w", KEYS * panel),
                                    T.access_ptr(kv[0, c * panel], "r", width),
                                    ids.data,
                                )
                                if tail:
                                    if c == panels[-1]:
                                        _call(
                                            f"gather<{tail}, {width * 2}>",
                                            T.access_ptr(tails[tile, 0, 0], "w", KEYS * tail),
                                            T.access_ptr(kv[0, v_width], "r", width),
                                            ids.data,
                                        )
                            T.cp_async_barrier_noinc(filled[slot])
                            if p == 0:
                                T.barrier_arrive(filled[slot])
                            advance(slot, lap, ring)
                        advance(tile, turn, TILES)

    return sparse_mla_forward


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def refuse(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float,
    d_v: int,
    sink: Tensor | None,
    topk_length: Tensor | None,
) -> str | None:
    if reason := not_bfloat16(q=q, kv=kv):
        return reason
    if (q.shape[2], d_v) not in WIDTHS:
        return f"D, d_v are {q.shape[2]}, {d_v}, the kernel takes {' or '.join(f'{w}, {v}' for w, v in WIDTHS)}"
    return None


def launch(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float,
    d_v: int,
    sink: Tensor | None,
    topk_length: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, heads, width = q.shape
    out = q.new_empty(rows, heads, d_v)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if rows == 0 or kv.shape[0] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    if softmax_scale <= 0:  # the kernel takes the largest product for the largest logit
        q, softmax_scale = (
            q * (0.0 if softmax_scale == 0 else -1.0),
            -softmax_scale or 1.0,
        )
    indices = dense(indices)
    # for an argument that is not given stands a tensor that the kernel does not read
    has_length, has_sink = topk_length is not None, sink is not None
    sparse_mla_forward(width, d_v)(
        dense(q),
        dense(kv),
        indices,
        dense(topk_length)[:, None] if has_length else indices,
        dense(sink.float())[None] if has_sink else lse,
        out,
        lse,
        softmax_scale * math.log2(math.e),
        int(has_length),
        int(has_sink),
        min(rows * -(-heads // HEADS), _processors(q.device)),
    )
    return out, lse


def compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None:
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, the kernel takes bfloat16"
    if (head_dim, v_dim) not in WIDTHS:
        return f"D, d_v are {head_dim}, {v_dim}, the kernel takes {' or '.join(f'{w}, {v}' for w, v in WIDTHS)}"
    sparse_mla_forward(head_dim, v_dim)
    return None


VARIANTS = [(sparse_mla_forward, widths) for widths in WIDTHS]
