"""Dense indexer KL, Hopper (sm_90a), bfloat16: the tiles of index scores and target that forward and backward share.

Computes   one block: the index scores I and the target p of 128 query rows against 128 keys, both in registers,
               I[t, s] = sum_h weights[t, h] act(index_q[t, h] . index_k[s]),
               p[t, s] = sum_h exp(scale q[t, h] . k[s] - lse[t, h]) / total_heads,
           and of them either what a row's KL needs of these 128 keys (`partials`) or the gradient dI (`gradients`).
           `combine` makes rows of the partials, one thread a row.
Tiling     Two consumer warpgroups of 64 rows, one warp that loads. Heads come one after another: a product of 128 x 128
           takes the panels of 64 columns of its operands from a ring that TMA fills. A latent key tile stays in shared
           memory for all heads, so only queries stream, and blocks that run together share their rows in L2; keys
           that are expanded per head stream beside the queries.
Memory     Latent, D = 576: keys 144 KiB + 5 stages of 16 KiB; expanded: 6 stages of 32 KiB. Three 128 x 128 float32
           tiles are 192 of a consumer's 240 registers. Workspace: 16 bytes per row and key tile, or the dI of a chunk.
Limits     index_q, index_k, q, k bfloat16; Hi, Di and D as in `refuse`; any H, T and S.
Bounds     A tile is computed if it overlaps the span of its 128 rows' bounds, [least start, greatest end). Inside it
           keys that a row may not see are replaced after the products, so what they hold has no effect.
Order      Heads ascending; in a row each thread's columns ascending, then its four threads, then key tiles ascending:
           the bits of a row depend neither on other rows nor on chunks.
Compiles   per (D, Di, latent or expanded keys). Numbers of heads, T, S, scale, relu and total_heads are run-time.
"""

import math

import tilelang.language as T
import torch
from torch import Tensor

from csrc_tilelang._arguments import dense, not_among, not_bfloat16, workspace_bytes
from csrc_tilelang._compile import HAND_MADE, kernel

BLOCK = 128  # rows and keys of a tile
PANEL = 64  # bfloat16 columns: 128 bytes, the widest swizzle
CONSUMERS = 256
THREADS = CONSUMERS + 128
INDEX_HEADS = (4, 8, 16, 32, 64)
INDEX_WIDTHS = (64, 128)
WIDTHS = (576, 512, 192, 160, 128)
MOST_ROWS = 32767 * BLOCK  # of a chunk: a grid is at most 65535 high
MOST_BYTES = 4 << 30  # of a workspace: sizes are int32 in a kernel
PASSES = {**HAND_MADE, "tl.disable_thread_storage_sync": True}  # every hand-over has its barrier

# A consumer thread holds 64 values of a 128 x 128 product: number 4 n + 2 b + c is row 16 warp + lane / 4 + 8 b, column
# 8 n + lane % 4 * 2 + c.
SOURCE = r"""
struct Bounds { int first, last; };

__device__ __forceinline__ Bounds bounds(const int* starts, const int* ends, int row, int rows, int keys) {
  if (row >= rows) return {0, 0};
  return {max(starts[row], 0), min(ends[row], keys)};
}

// Whether the span of the block's visible keys overlaps [key, key + 128). All threads call it.
__device__ __forceinline__ int tile_seen(const int* starts, const int* ends, int row, int rows, int keys, int key) {
  Bounds b = bounds(starts, ends, row, rows, keys);
  bool any = b.first < b.last;
  return __syncthreads_or(any && b.first < key + 128) && __syncthreads_or(any && b.last > key);
}

__device__ __forceinline__ void add_scores(float* score, const float* product, float floor, float low, float high) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    float x = product[i] < floor ? floor : product[i];  // not fmaxf, which would hide a NaN
    score[i] = fmaf(i & 2 ? high : low, x, score[i]);
  }
}

// The difference is rounded once, so that large logits cost no accuracy.
__device__ __forceinline__ void add_target(float* target, const float* product, float scale, float low, float high) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    float share;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(fmaf(product[i], scale, i & 2 ? -high : -low) * 1.44269504f));
    target[i] += share;
  }
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Of one row and 128 keys: the largest score m; sum exp(I - m); sum p; sum p (log p - (I - m)).
__device__ __forceinline__ void store_partials(const float* score, const float* target, const int* starts,
                                               const int* ends, int rows, int keys, int row, int key, float inverse,
                                               int entropy, float* out, long long stride, int room) {
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    Bounds seen = bounds(starts, ends, row + 8 * b, rows, keys);
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      int s = key + i / 2 * 8 + i % 2;
      if (s >= seen.first && s < seen.last) largest = fmaxf(largest, score[i / 2 * 4 + b * 2 + i % 2]);
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    float base = largest == -INFINITY ? 0.f : largest, exps = 0, shares = 0, divergence = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      int s = key + i / 2 * 8 + i % 2;
      if (s >= seen.first && s < seen.last) {
        float above = score[i / 2 * 4 + b * 2 + i % 2] - base, p = target[i / 2 * 4 + b * 2 + i % 2] * inverse;
        exps += expf(above);
        shares += p;
        if (p != 0) divergence += p * ((entropy ? logf(p) : 0.f) - above);
      }
    }
    exps = quad_sum(exps), shares = quad_sum(shares), divergence = quad_sum(divergence);
    if (threadIdx.x % 4 == 0 && 8 * b < room) {
      out[8 * b] = largest;
      out[8 * b + stride] = exps;
      out[8 * b + 2 * stride] = shares;
      out[8 * b + 3 * stride] = divergence;
    }
  }
}

// dI = coefficient (share softmax(I) - p), 0 where not visible, as this thread's 16 vectors of four in a tile.
__device__ __forceinline__ void store_gradients(const float* score, const float* target, const int* starts,
                                                const int* ends, const float* lse, const float* coefficient, int rows,
                                                int keys, int row, int key, float inverse, float share, float* out) {
  Bounds seen[2];
  float normaliser[2], factor[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    seen[b] = bounds(starts, ends, row + 8 * b, rows, keys);
    bool real = row + 8 * b < rows;
    normaliser[b] = real ? lse[row + 8 * b] : 0.f;
    factor[b] = real ? coefficient[row + 8 * b] : 0.f;
    if (factor[b] == 0) seen[b].last = 0;
  }
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    float d[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int s = key + 8 * n + j % 2, b = j / 2;
      float x = factor[b] * (expf(score[4 * n + j] - normaliser[b]) * share - target[4 * n + j] * inverse);
      d[j] = s >= seen[b].first && s < seen[b].last ? x : 0.f;
    }
    reinterpret_cast<float4*>(out)[n * 256 + threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
  }
}

// One row of the partials [4, tiles, stride]. kl and part may be null, where the normaliser alone is wanted.
__device__ __forceinline__ void combine_row(const float* partials, const int* starts, const int* ends,
                                            const float* row_weight, float* kl, float* part, float* lse, int rows,
                                            int keys, int row, long long stride) {
  Bounds seen = bounds(starts, ends, row, rows, keys);
  int first = seen.first / 128, last = seen.first < seen.last ? (seen.last + 127) / 128 : first;
  long long tiles = (keys + 127) / 128;
  float largest = -INFINITY, exps = 0, result = 0;
#pragma unroll 4
  for (int j = first; j < last; ++j) largest = fmaxf(largest, partials[j * stride]);
  float base = largest == -INFINITY ? 0.f : largest;
#pragma unroll 4
  for (int j = first; j < last; ++j) {
    float m = partials[j * stride];
    exps += m == -INFINITY ? partials[(tiles + j) * stride] : partials[(tiles + j) * stride] * expf(m - base);
  }
  float normaliser = exps == 0 ? 0.f : base + logf(exps);
#pragma unroll 4
  for (int j = first; j < last; ++j) {
    float m = partials[j * stride];
    float above = normaliser - (m == -INFINITY ? 0.f : m), shares = partials[(2 * tiles + j) * stride];
    result += partials[(3 * tiles + j) * stride] + (shares == 0 ? 0.f : shares * above);
  }
  lse[row] = normaliser;
  kl[row] = result;
  // not a product with zero: the kl of a row of weight 0, the weight of a row without keys may be anything
  part[row] = first < last && row_weight[row] != 0 ? row_weight[row] * result : 0.f;
}
"""


def panels(width: int) -> int:
    return -(-width // PANEL)


@T.macro
def load(source, target, barriers, at):
    """A TMA copy by one warp, which is one arrival at its barrier."""
    T.tma_copy(source, target, barrier=barriers[at], leader_scope_threads=32, annotations={"emit_arrive": 1})


@T.macro
def advance(slot: T.Ref, phase: T.Ref, ring):
    slot = slot + 1
    if slot == ring:
        slot = 0
        phase = phase ^ 1


def tile(width: int, index_width: int, latent: bool, gradient: bool):
    rows, keys, heads, index_heads, size = (T.dynamic(name) for name in ("T_", "S", "H", "Hi", "L"))
    depth, index_depth = panels(width), panels(index_width)
    ring = 5 if latent and depth > 8 else 6
    key_buffers = max(depth, index_depth) if latent else ring

    @T.macro
    def multiply(query, key, product, full, empty, slot: T.Ref, phase: T.Ref, last_slot: T.Ref, depth):
        """product = one head's queries times keys; a slot is given back once the next product is under way."""
        for c in T.unroll(depth):
            T.barrier_wait(full[slot], phase)
            T.wgmma_gemm(
                query[slot, :, :],
                key[c if latent else slot, :, :],
                product,
                transpose_B=True,
                policy=T.GemmWarpPolicy.FullRow,
                clear_accum=(c == 0),
            )
            if c > 0:
                T.wait_wgmma(1)
                T.barrier_arrive(empty[last_slot])
            last_slot = slot
            advance(slot, phase, ring)
        T.wait_wgmma(0)
        T.barrier_arrive(empty[last_slot])

    @T.prim_func
    def dense_tile(
        index_q: T.Tensor((rows, index_heads, index_width), "bfloat16"),
        index_k: T.Tensor((keys, index_width), "bfloat16"),
        weights: T.Tensor((rows, index_heads), "float32"),
        q: T.Tensor((rows, heads, width), "bfloat16"),
        k: T.Tensor((keys, width) if latent else (keys, heads, width), "bfloat16"),
        lse: T.Tensor((rows, heads), "float32"),
        starts: T.Tensor((rows,), "int32"),
        ends: T.Tensor((rows,), "int32"),
        normaliser: T.Tensor((rows,), "float32"),
        coefficient: T.Tensor((rows,), "float32"),
        out: T.Tensor((size,), "float32"),
        scale: T.float32,
        inverse: T.float32,  # 1 / total_heads
        share: T.float32,  # heads / total_heads
        floor: T.float32,  # of a product: 0 for relu, else -inf
        entropy: T.int32,
        used_heads: T.int32,  # all, or 0 where the indexer alone is wanted
        chunk_start: T.int32,
        chunk_rows: T.int32,
    ):
        grid = (T.ceildiv(keys, BLOCK), T.ceildiv(chunk_rows, BLOCK))
        with T.Kernel(*grid, threads=THREADS, prelude=SOURCE) as (key_tile, row_tile):
            query = T.alloc_shared((ring, BLOCK, PANEL), "bfloat16")
            key = T.alloc_shared((key_buffers, BLOCK, PANEL), "bfloat16")
            product = T.alloc_fragment((BLOCK, BLOCK), "float32")
            score = T.alloc_local((64,), "float32")
            target = T.alloc_local((64,), "float32")
            full = T.alloc_barrier([1 if latent else 2] * ring)
            empty = T.alloc_barrier([CONSUMERS] * ring)
            loaded = T.alloc_barrier([index_depth, depth])  # the latent key tile's two contents
            released = T.alloc_barrier([CONSUMERS])
            tx = T.get_thread_binding()
            row0: T.int32 = chunk_start + row_tile * BLOCK
            key0: T.int32 = key_tile * BLOCK
            bounds_of = [T.access_ptr(starts[0], "r", rows), T.access_ptr(ends[0], "r", rows)]
            seen = T.alloc_var("int32")
            seen = T.call_extern("int32", "tile_seen", *bounds_of, row0 + tx % BLOCK, rows, keys, key0)
            slot = T.alloc_var("int32")
            phase = T.alloc_var("int32")
            slot = 0
            phase = 0

            if tx >= CONSUMERS:
                T.dec_max_nreg(24)
                if (tx < CONSUMERS + 32) & (seen != 0):
                    if latent:
                        for c in T.unroll(index_depth):
                            load(index_k[key0 : key0 + BLOCK, c * PANEL : (c + 1) * PANEL], key[c, :, :], loaded, 0)
                    for h in T.serial(index_heads):
                        for c in T.unroll(index_depth):
                            T.barrier_wait(empty[slot], phase ^ 1)
                            load(
                                index_q[row0 : row0 + BLOCK, h, c * PANEL : (c + 1) * PANEL],
                                query[slot, :, :],
                                full,
                                slot,
                            )
                            if not latent:
                                load(
                                    index_k[key0 : key0 + BLOCK, c * PANEL : (c + 1) * PANEL],
                                    key[slot, :, :],
                                    full,
                                    slot,
                                )
                            advance(slot, phase, ring)
                    if latent:
                        T.barrier_wait(released[0], 0)
                        for c in T.unroll(depth):
                            load(k[key0 : key0 + BLOCK, c * PANEL : (c + 1) * PANEL], key[c, :, :], loaded, 1)
                    for h in T.serial(used_heads):
                        for c in T.unroll(depth):
                            T.barrier_wait(empty[slot], phase ^ 1)
                            load(q[row0 : row0 + BLOCK, h, c * PANEL : (c + 1) * PANEL], query[slot, :, :], full, slot)
                            if not latent:
                                load(
                                    k[key0 : key0 + BLOCK, h, c * PANEL : (c + 1) * PANEL],
                                    key[slot, :, :],
                                    full,
                                    slot,
                                )
                            advance(slot, phase, ring)
            else:
                T.inc_max_nreg(240)
                row = T.alloc_var("int32")
                row = row0 + tx // 32 * 16 + tx % 32 // 4
                low = T.alloc_var("int32")
                low = T.min(row, rows - 1)
                high = T.alloc_var("int32")
                high = T.min(row + 8, rows - 1)
                last_slot = T.alloc_var("int32")
                last_slot = 0
                of_low = T.alloc_var("float32")  # what a head has for the thread's two rows, read before its products
                of_high = T.alloc_var("float32")
                for i in T.unroll(64):
                    score[i] = 0.0
                    target[i] = 0.0
                if seen != 0:
                    if latent:
                        T.barrier_wait(loaded[0], 0)
                    for h in T.serial(index_heads):
                        of_low = weights[low, h]
                        of_high = weights[high, h]
                        multiply(query, key, product, full, empty, slot, phase, last_slot, index_depth)
                        T.evaluate(
                            T.call_extern("handle", "add_scores", score.data, product.data, floor, of_low, of_high)
                        )
                    if latent:
                        T.barrier_arrive(released[0])
                        T.barrier_wait(loaded[1], 0)
                    for h in T.serial(used_heads):
                        of_low = lse[low, h]
                        of_high = lse[high, h]
                        multiply(query, key, product, full, empty, slot, phase, last_slot, depth)
                        T.evaluate(
                            T.call_extern("handle", "add_target", target.data, product.data, scale, of_low, of_high)
                        )
                    column: T.int32 = key0 + tx % 4 * 2
                    key_tiles: T.int64 = T.cast(T.ceildiv(keys, BLOCK), "int64")
                    if gradient:
                        place: T.int64 = (row_tile * key_tiles + key_tile) * (BLOCK * BLOCK)
                        T.evaluate(
                            T.call_extern(
                                "handle",
                                "store_gradients",
                                score.data,
                                target.data,
                                *bounds_of,
                                T.access_ptr(normaliser[0], "r", rows),
                                T.access_ptr(coefficient[0], "r", rows),
                                rows,
                                keys,
                                row,
                                column,
                                inverse,
                                share,
                                T.access_ptr(out[place], "w", BLOCK * BLOCK),
                            )
                        )
                    else:
                        place: T.int64 = T.cast(key_tile, "int64") * chunk_rows + (row - chunk_start)
                        T.evaluate(
                            T.call_extern(
                                "handle",
                                "store_partials",
                                score.data,
                                target.data,
                                *bounds_of,
                                rows,
                                keys,
                                row,
                                column,
                                inverse,
                                entropy,
                                T.access_ptr(out[place], "w", 1),
                                key_tiles * chunk_rows,
                                chunk_start + chunk_rows - row,
                            )
                        )

    return dense_tile


@kernel(pass_configs=PASSES)
def partials(width, index_width, latent):
    """out [4, key tiles, chunk rows]: see store_partials."""
    return tile(width, index_width, latent, gradient=False)


@kernel(pass_configs=PASSES)
def gradients(width, index_width, latent):
    """out [row tiles, key tiles, 128 * 128]: dI of the chunk's tiles that are seen, in the order of store_gradients."""
    return tile(width, index_width, latent, gradient=True)


@kernel(pass_configs=PASSES, tensor_core=None)
def combine():
    """kl [T], its weighted part of the loss [T] and the indexer's normaliser [T] of the chunk's rows."""
    rows, size = T.dynamic("T_"), T.dynamic("L")
    threads = 64

    @T.prim_func
    def dense_combine(
        values: T.Tensor((size,), "float32"),
        starts: T.Tensor((rows,), "int32"),
        ends: T.Tensor((rows,), "int32"),
        row_weight: T.Tensor((rows,), "float32"),
        kl: T.Tensor((rows,), "float32"),
        part: T.Tensor((rows,), "float32"),
        lse: T.Tensor((rows,), "float32"),
        keys: T.int32,
        chunk_start: T.int32,
        chunk_rows: T.int32,
    ):
        with T.Kernel(T.ceildiv(chunk_rows, threads), threads=threads, prelude=SOURCE) as b:
            i: T.int32 = b * threads + T.get_thread_binding()
            if i < chunk_rows:
                T.evaluate(
                    T.call_extern(
                        "handle",
                        "combine_row",
                        T.access_ptr(values[i], "r", 1),
                        T.access_ptr(starts[0], "r", rows),
                        T.access_ptr(ends[0], "r", rows),
                        T.access_ptr(row_weight[0], "r", rows),
                        T.access_ptr(kl[0], "w", rows),
                        T.access_ptr(part[0], "w", rows),
                        T.access_ptr(lse[0], "w", rows),
                        rows,
                        keys,
                        chunk_start + i,
                        T.cast(chunk_rows, "int64"),
                    )
                )

    return dense_combine


def refuse(index_q, index_k, index_weights, q, k) -> str | None:
    """Of either op."""
    return (
        not_bfloat16(index_q=index_q, index_k=index_k, q=q, k=k)
        or not_among("the dtype of index_weights", index_weights.dtype, (torch.float32, torch.bfloat16))
        or refuse_widths(index_q.shape[1], index_q.shape[2], q.shape[2])
    )


def refuse_widths(index_heads: int, index_dim: int, head_dim: int) -> str | None:
    return (
        not_among("Hi", index_heads, INDEX_HEADS)
        or not_among("Di", index_dim, INDEX_WIDTHS)
        or not_among("D", head_dim, WIDTHS)
    )


def chunks(rows: int, bytes_per_row: int) -> list[tuple[int, int]]:
    """First row and number of rows of the chunks, whole row tiles, that keep a workspace within the budget."""
    step = min(max(BLOCK, min(workspace_bytes(), MOST_BYTES) // bytes_per_row // BLOCK * BLOCK), MOST_ROWS)
    return [(start, min(step, rows - start)) for start in range(0, rows, step)]


class Inputs:
    """The arguments of a call as the kernels take them."""

    def __init__(
        self,
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
    ):
        self.tensors = [dense(x) for x in (index_q, index_k, index_weights.float(), q, k, lse, starts, ends)]
        self.index_q, self.index_k, self.weights, *_, self.starts, self.ends = self.tensors
        self.row_weight = dense(row_weight.float())
        self.rows, self.keys, self.heads = q.shape[0], k.shape[0], q.shape[1]
        self.key_tiles = -(-self.keys // BLOCK)
        self.constants = (q.shape[2], index_q.shape[2], k.dim() == 2)
        self.floor = 0.0 if relu else -math.inf
        total = total_heads or self.heads
        self._scalars = (softmax_scale, 1 / total, self.heads / total, self.floor, int(total == self.heads))

    def run(self, tile, normaliser: Tensor, coefficient: Tensor, out: Tensor, heads: int, start: int, rows: int):
        tile(*self.constants)(*self.tensors, normaliser, coefficient, out, *self._scalars, heads, start, rows)

    def reduced(self, attention: bool) -> tuple[Tensor, Tensor, Tensor]:
        """kl, its weighted part of the loss and the indexer's normaliser, all [T]; the last alone without attention."""
        kl, part, normaliser = (self.row_weight.new_empty(self.rows) for _ in range(3))
        for start, rows in chunks(self.rows, 16 * self.key_tiles):
            values = kl.new_empty(4 * self.key_tiles * rows)
            self.run(partials, kl, kl, values, self.heads if attention else 0, start, rows)
            combine()(values, self.starts, self.ends, self.row_weight, kl, part, normaliser, self.keys, start, rows)
            del values  # before the next chunk makes its own
        return kl, part, normaliser
