"""Dense indexer KL backward, Hopper (sm_90a), bfloat16.

Computes   grad_index_q, grad_index_k, grad_index_weights of dsa::dense_indexer_kl in three steps that recompute:
           1. the indexer's normaliser of every row (`_dense_tiles.partials` without attention heads, `combine`);
           2. for a chunk of rows dI = coefficient (share softmax(I) - p), float32, into the workspace
              (`_dense_tiles.gradients`), coefficient = row_weight grad_loss;
           3. with S = index_q[t, h] . index_k[s] and dS = dI weights[t, h] act'(S), rounded to bfloat16,
              `grad_rows`: grad_q[t, h] = sum_s dS index_k[s] and grad_weights[t, h] = sum_s dI act(S),
              `grad_keys`: grad_k[s] += sum_t,h dS index_q[t, h].
Tiling     grad_rows: one block = 128 rows x 2 heads (64 rows of both for each of two warpgroups), keys and their dI in
           tiles of 64 through a ring that TMA fills. grad_keys: one block = 128 keys x 16 heads, transposed products
           with 64 rows, queries through the ring, the sum in registers from a chunk's first row to its last; a head's
           part of the sum is under way while the next one's dS is made. In both dS goes from the accumulators of the
           first product straight into the second as its operand.
Memory     grad_rows, Di = 128: queries 64 KiB + 3 stages of 48 KiB; two sums of 128 x 128 are 128 registers a thread.
           grad_keys: keys 32 KiB + 6 stages of 16 KiB; the sum 64, S and dI 32 registers each.
Workspace  per row of a chunk 512 bytes per 128 keys, a copy of its index_q and its weights; within DSA_OPS_WORKSPACE_MB
           (1 GiB). Beside it copies of index_k and of the weights, and float32 sums of grad_k, one per 16 heads.
NaN        A NaN or an infinity of index_q, index_k or weights reaches through the scores every dI of the rows that see
           it. In step 3 it is 0 itself, or 0 x NaN would reach rows and keys that do not see it.
Empty      dI is exactly 0 where a row sees nothing or has weight 0; such pairs add 0 whatever their operands.
Order      Fixed, rows and heads ascending: all three gradients are reproducible, and no bit depends on chunks.
Compiles   per Di.
"""

import tilelang.language as T
import torch
from tilelang.layout import make_linear_layout
from torch import Tensor

from csrc_tilelang import _dense_tiles as tiles
from csrc_tilelang._compile import kernel

BLOCK = tiles.BLOCK
HALF = 64  # keys of a step of grad_rows, rows of a step of grad_keys
PAIR = 2  # heads of a block of grad_rows
GROUP = 16  # heads of a block of grad_keys
ROW_RING = 3
RING = 6
CONSUMERS = 256
LARGEST = 3.4028234e38

# dI of a 128 x 128 tile as `_dense_tiles.store_gradients` leaves it: vector n of thread x, at n * 256 + x, holds rows
# 64 (x / 128) + 16 (x / 32 % 4) + x % 32 / 4 and 8 below, columns 8 n + x % 4 * 2 and the next.
SOURCE = r"""
// Operands are finite here, so a dI of exactly 0 adds 0; products that overflow are held below infinity.
__device__ constexpr float LARGEST = 3.4028234e38f;

// First and one past the last tile of keys in the span of 128 rows; one warp.
__device__ __forceinline__ void tile_span(const int* starts, const int* ends, int row, int rows, int keys, int* span) {
  int first = keys, last = 0;
  for (int i = threadIdx.x; i < 128 && row + i < rows; i += 32) {
    int a = max(starts[row + i], 0), b = min(ends[row + i], keys);
    if (a < b) first = min(first, a), last = max(last, b);
  }
  first = __reduce_min_sync(0xffffffffu, first), last = __reduce_max_sync(0xffffffffu, last);
  if (threadIdx.x == 0) span[0] = first / 128, span[1] = (last + 127) / 128;
}

// product [128 rows, 64 keys] of one head of the pair from S to dS; sums dI act(S) of the thread's two rows.
__device__ __forceinline__ void row_gradients(float* product, const float* half_tile, float floor, float low,
                                              float high, float* sums, int head) {
  const float4* vectors = reinterpret_cast<const float4*>(half_tile) + threadIdx.x;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n % 2 == 0) asm volatile("" ::: "memory");  // or all eight are read at once, and registers spill
    float4 vector = vectors[n * 256];
    float d[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float s = product[4 * n + j];
      sums[head * 2 + j / 2] += d[j] * fminf(fmaxf(s, floor), LARGEST);
      product[4 * n + j] = d[j] * (s > floor ? j & 2 ? high : low : 0.f);
    }
  }
}

// out points at the thread's first row and the pair's first head, room is the number of rows from there on.
__device__ __forceinline__ void store_sums(const float* sums, float* out, int room, long long heads) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = sums[i] + __shfl_xor_sync(0xffffffffu, sums[i], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (threadIdx.x % 4 == 0 && i % 2 * 8 < room) out[i % 2 * 8 * heads + i / 2] = sum;
  }
}

// The same of keys x rows: key 64 (x / 128) + 16 (x / 32 % 4) + x % 32 / 4 + 8 b, row 64 half + 8 n + x % 4 * 2 + c.
__device__ __forceinline__ void load_keys(float* d, const float* tile, int half) {
  int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    int k = key + i / 2 % 2 * 8, row = half * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    int thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
    d[i] = tile[(k / 8 * 256 + thread) * 4 + row / 8 % 2 * 2 + k % 2];
  }
}

__device__ __forceinline__ void load_weights(float* w, const float* weights) {
#pragma unroll
  for (int n = 0; n < 8; ++n) reinterpret_cast<float2*>(w)[n] = *reinterpret_cast<const float2*>(weights + 8 * n);
}

__device__ __forceinline__ void key_gradients(float* product, const float* d, float floor, const float* w) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    product[i] = d[i] * (product[i] > floor ? w[i / 4 * 2 + i % 2] : 0.f);
  }
}
"""


@kernel(tensor_core=None)
def spans():
    """span [row tiles, 2]: the key tiles of a chunk's row tiles."""
    rows, row_tiles = T.dynamic("T_"), T.dynamic("N")

    @T.prim_func
    def dense_spans(
        starts: T.Tensor((rows,), "int32"),
        ends: T.Tensor((rows,), "int32"),
        span: T.Tensor((row_tiles, 2), "int32"),
        keys: T.int32,
        chunk_start: T.int32,
    ):
        with T.Kernel(row_tiles, threads=32, prelude=SOURCE) as b:
            T.evaluate(
                T.call_extern(
                    "handle",
                    "tile_span",
                    T.access_ptr(starts[0], "r", rows),
                    T.access_ptr(ends[0], "r", rows),
                    chunk_start + b * BLOCK,
                    rows,
                    keys,
                    T.access_ptr(span[b, 0], "w", 2),
                )
            )

    return dense_spans


@T.macro
def multiply(query, head, key, slot: T.Ref, product, operand, grad, grad_scores, floor, low, high, sums):
    """One head and 64 keys; its last product is still under way."""
    T.wgmma_gemm(
        query[head, :, :],
        key[slot, :, :],
        product,
        transpose_B=True,
        policy=T.GemmWarpPolicy.FullRow,
        clear_accum=True,
    )
    T.wait_wgmma(0)
    half_tile = [T.access_ptr(grad_scores[slot, 0, 0], "r", BLOCK * HALF)]
    T.evaluate(T.call_extern("handle", "row_gradients", product.data, *half_tile, floor, low, high, sums.data, head))
    T.copy(product, operand)
    T.wgmma_gemm(operand, key[slot, :, :], grad, policy=T.GemmWarpPolicy.FullRow)


@kernel(pass_configs=tiles.PASSES)
def grad_rows(index_width):
    rows, keys, heads, row_tiles, key_tiles = (T.dynamic(name) for name in ("R", "S", "Hi", "N", "M"))

    @T.prim_func
    def dense_grad_rows(
        index_q: T.Tensor((rows, heads, index_width), "bfloat16"),
        index_k: T.Tensor((keys, index_width), "bfloat16"),
        weights: T.Tensor((rows, heads), "float32"),
        span: T.Tensor((row_tiles, 2), "int32"),
        grad_scores: T.Tensor((row_tiles, key_tiles, HALF, 256), "float32"),
        grad_q: T.Tensor((rows, heads, index_width), "bfloat16"),
        grad_weights: T.Tensor((rows, heads), "float32"),
        floor: T.float32,
    ):
        with T.Kernel(heads // PAIR, row_tiles, threads=tiles.THREADS, prelude=SOURCE) as (pair, row_tile):
            query = T.alloc_shared((PAIR, BLOCK, index_width), "bfloat16")
            key = T.alloc_shared((ROW_RING, HALF, index_width), "bfloat16")
            d = T.alloc_shared((ROW_RING, HALF // 2, 256), "float32")
            T.annotate_layout({d: make_linear_layout(d)})
            product = T.alloc_fragment((BLOCK, HALF), "float32")
            operand = T.alloc_fragment((BLOCK, HALF), "bfloat16")
            grad_a = T.alloc_fragment((BLOCK, index_width), "float32")
            grad_b = T.alloc_fragment((BLOCK, index_width), "float32")
            sums = T.alloc_local((4,), "float32")
            loaded = T.alloc_barrier([PAIR])
            full = T.alloc_barrier([2] * ROW_RING)
            empty = T.alloc_barrier([CONSUMERS] * ROW_RING)
            tx = T.get_thread_binding()
            row0: T.int32 = row_tile * BLOCK
            head: T.int32 = pair * PAIR
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            first = span[row_tile, 0]
            last = span[row_tile, 1]
            slot = T.alloc_var("int32")
            phase = T.alloc_var("int32")
            slot = 0
            phase = 0

            if tx >= CONSUMERS:
                T.dec_max_nreg(24)
                if tx < CONSUMERS + 32:
                    for p in T.unroll(PAIR):
                        tiles.load(index_q[row0 : row0 + BLOCK, head + p, 0:index_width], query[p, :, :], loaded, 0)
                    for j in T.serial((last - first) * 2):
                        T.barrier_wait(empty[slot], phase ^ 1)
                        key0: T.int32 = first * BLOCK + j * HALF
                        tiles.load(index_k[key0 : key0 + HALF, 0:index_width], key[slot, :, :], full, slot)
                        part: T.int32 = j % 2 * (HALF // 2)
                        tiles.load(
                            grad_scores[row_tile, first + j // 2, part : part + HALF // 2, 0:256],
                            d[slot, :, :],
                            full,
                            slot,
                        )
                        tiles.advance(slot, phase, ROW_RING)
            else:
                T.inc_max_nreg(240)
                row = row0 + tx // 32 * 16 + tx % 32 // 4
                low = T.min(row, rows - 1)
                high = T.min(row + 8, rows - 1)
                a_low = T.alloc_var("float32")
                a_high = T.alloc_var("float32")
                b_low = T.alloc_var("float32")
                b_high = T.alloc_var("float32")
                a_low = weights[low, head]
                a_high = weights[high, head]
                b_low = weights[low, head + 1]
                b_high = weights[high, head + 1]
                T.clear(grad_a)
                T.clear(grad_b)
                for i in T.unroll(4):
                    sums[i] = 0.0
                T.barrier_wait(loaded[0], 0)
                for _ in T.serial((last - first) * 2):
                    T.barrier_wait(full[slot], phase)
                    multiply(query, 0, key, slot, product, operand, grad_a, d, floor, a_low, a_high, sums)
                    multiply(query, 1, key, slot, product, operand, grad_b, d, floor, b_low, b_high, sums)
                    T.wait_wgmma(0)
                    T.barrier_arrive(empty[slot])
                    tiles.advance(slot, phase, ROW_RING)
                for i, c in T.Parallel(BLOCK, index_width):
                    if row0 + i < rows:
                        grad_q[row0 + i, head, c] = grad_a[i, c]
                for i, c in T.Parallel(BLOCK, index_width):
                    if row0 + i < rows:
                        grad_q[row0 + i, head + 1, c] = grad_b[i, c]
                T.evaluate(
                    T.call_extern(
                        "handle",
                        "store_sums",
                        sums.data,
                        T.access_ptr(grad_weights[row, head], "w", 1),
                        rows - row,
                        T.cast(heads, "int64"),
                    )
                )

    return dense_grad_rows


@T.macro
def key_step(key, query, next_slot: T.Ref, slot: T.Ref, product, operand, grad, d, w, floor):
    """S of the next head; under way meanwhile: the last dS, in `operand`, added to the gradient."""
    T.wgmma_gemm(
        key, query[next_slot, :, :], product, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
    )
    T.wgmma_gemm(operand, query[slot, :, :], grad, policy=T.GemmWarpPolicy.FullRow)
    T.wait_wgmma(1)
    T.evaluate(T.call_extern("handle", "key_gradients", product.data, d.data, floor, w.data))
    T.wait_wgmma(0)


@kernel(pass_configs=tiles.PASSES)
def grad_keys(index_width):
    """Adds a chunk's part to sums [groups, key tiles * 128, Di]."""
    rows, keys, heads, padded = (T.dynamic(name) for name in ("R", "S", "Hi", "P"))
    row_tiles, key_tiles, groups = (T.dynamic(name) for name in ("N", "M", "G"))

    @T.prim_func
    def dense_grad_keys(
        index_q: T.Tensor((rows, heads, index_width), "bfloat16"),
        index_k: T.Tensor((keys, index_width), "bfloat16"),
        weights: T.Tensor((heads, padded), "float32"),  # padded to whole row tiles
        span: T.Tensor((row_tiles, 2), "int32"),
        grad_scores: T.Tensor((row_tiles, key_tiles, HALF, 256), "float32"),
        sums: T.Tensor((groups, key_tiles, BLOCK, index_width), "float32"),
        floor: T.float32,
    ):
        with T.Kernel(groups, key_tiles, threads=tiles.THREADS, prelude=SOURCE) as (group, key_tile):
            key = T.alloc_shared((BLOCK, index_width), "bfloat16")
            query = T.alloc_shared((RING, HALF, index_width), "bfloat16")
            product = T.alloc_fragment((BLOCK, HALF), "float32")
            operand = T.alloc_fragment((BLOCK, HALF), "bfloat16")
            grad = T.alloc_fragment((BLOCK, index_width), "float32")
            d = T.alloc_local((32,), "float32")
            w = T.alloc_local((16,), "float32")
            loaded = T.alloc_barrier([1])
            full = T.alloc_barrier([1] * RING)
            empty = T.alloc_barrier([CONSUMERS] * RING)
            tx = T.get_thread_binding()
            head0: T.int32 = group * GROUP
            head1: T.int32 = T.min(head0 + GROUP, heads)
            slot = T.alloc_var("int32")
            phase = T.alloc_var("int32")
            slot = 0
            phase = 0

            if tx >= CONSUMERS:
                T.dec_max_nreg(24)
                if tx < CONSUMERS + 32:
                    tiles.load(
                        index_k[key_tile * BLOCK : key_tile * BLOCK + BLOCK, 0:index_width], key[:, :], loaded, 0
                    )
                    for i in T.serial(row_tiles):
                        if (span[i, 0] <= key_tile) & (key_tile < span[i, 1]):
                            for half in T.serial(2):
                                for h in T.serial(head0, head1):
                                    T.barrier_wait(empty[slot], phase ^ 1)
                                    row0: T.int32 = i * BLOCK + half * HALF
                                    tiles.load(
                                        index_q[row0 : row0 + HALF, h, 0:index_width], query[slot, :, :], full, slot
                                    )
                                    tiles.advance(slot, phase, RING)
            else:
                T.inc_max_nreg(240)
                old = T.alloc_var("int32")
                old = 0
                for r, c in T.Parallel(BLOCK, index_width):
                    grad[r, c] = sums[group, key_tile, r, c]
                T.barrier_wait(loaded[0], 0)
                for i in T.serial(row_tiles):
                    if (span[i, 0] <= key_tile) & (key_tile < span[i, 1]):
                        for half in T.serial(2):
                            tile = [T.access_ptr(grad_scores[i, key_tile, 0, 0], "r", BLOCK * BLOCK)]
                            T.evaluate(T.call_extern("handle", "load_keys", d.data, *tile, half))
                            column = i * BLOCK + half * HALF + tx % 4 * 2
                            weights_of = [T.access_ptr(weights[head0, column], "r", HALF)]
                            T.evaluate(T.call_extern("handle", "load_weights", w.data, *weights_of))
                            T.barrier_wait(full[slot], phase)
                            T.wgmma_gemm(
                                key,
                                query[slot, :, :],
                                product,
                                transpose_B=True,
                                policy=T.GemmWarpPolicy.FullRow,
                                clear_accum=True,
                            )
                            T.wait_wgmma(0)
                            T.evaluate(T.call_extern("handle", "key_gradients", product.data, d.data, floor, w.data))
                            T.copy(product, operand)
                            for h in T.serial(head0 + 1, head1):
                                old = slot
                                tiles.advance(slot, phase, RING)
                                weights_of_next = [T.access_ptr(weights[h, column], "r", HALF)]
                                T.evaluate(T.call_extern("handle", "load_weights", w.data, *weights_of_next))
                                T.barrier_wait(full[slot], phase)
                                key_step(key, query, slot, old, product, operand, grad, d, w, floor)
                                T.barrier_arrive(empty[old])
                                T.copy(product, operand)
                            T.wgmma_gemm(operand, query[slot, :, :], grad, policy=T.GemmWarpPolicy.FullRow)
                            T.wait_wgmma(0)
                            T.barrier_arrive(empty[slot])
                            tiles.advance(slot, phase, RING)
                for r, c in T.Parallel(BLOCK, index_width):
                    sums[group, key_tile, r, c] = grad[r, c]

    return dense_grad_keys


VARIANTS = [
    (tiles.gradients, (576, 128, True)),
    (tiles.gradients, (192, 64, False)),
    (spans, ()),
    (grad_rows, (64,)),
    (grad_rows, (128,)),
    (grad_keys, (64,)),
    (grad_keys, (128,)),
]


def refuse(
    grad_loss,
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
    need_q,
    need_k,
    need_weights,
) -> str | None:
    return tiles.refuse(index_q, index_k, index_weights, q, k)


def launch(
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
    """Gradients of index_q, index_k, index_weights; empty where not needed."""
    if 0 in (q.shape[0], k.shape[0]) or not (need_q or need_k or need_weights):
        wanted = zip((index_q, index_k, index_weights), (need_q, need_k, need_weights), strict=True)
        return tuple(x.new_zeros(x.shape if need else 0) for x, need in wanted)
    inputs = tiles.Inputs(
        index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, row_weight, relu, total_heads
    )
    rows, index_heads, index_width = index_q.shape
    key_tiles = inputs.key_tiles
    _, _, normaliser = inputs.reduced(attention=False)
    coefficient = (inputs.row_weight * grad_loss.float()).masked_fill_(inputs.row_weight == 0, 0)
    floor = max(inputs.floor, -LARGEST)
    clean_k, clean_weights = inputs.index_k.nan_to_num(0, 0, 0), inputs.weights.nan_to_num(0, 0, 0)
    grad_q = torch.empty_like(inputs.index_q) if need_q or need_weights else None
    grad_weights = torch.empty_like(inputs.weights) if need_q or need_weights else None
    sums = lse.new_zeros(-(-index_heads // GROUP), key_tiles, BLOCK, index_width) if need_k else None
    chunks = tiles.chunks(rows, 4 * BLOCK * key_tiles + index_heads * (2 * index_width + 4))
    tile_rows = -(-chunks[0][1] // BLOCK)
    grad_scores = lse.new_empty(tile_rows, key_tiles, HALF, 256)
    for start, size in chunks:
        part = slice(start, start + size)
        tiles_of_chunk = -(-size // BLOCK)
        span = inputs.starts.new_empty(tiles_of_chunk, 2)
        spans()(inputs.starts, inputs.ends, span, inputs.keys, start)
        scores = grad_scores[:tiles_of_chunk]
        inputs.run(tiles.gradients, normaliser, coefficient, scores.view(-1), inputs.heads, start, size)
        clean_q = inputs.index_q[part].nan_to_num(0, 0, 0)
        if grad_q is not None:
            grads = grad_q[part], grad_weights[part]
            grad_rows(index_width)(clean_q, clean_k, clean_weights[part], span, scores, *grads, floor)
        if sums is not None:
            weights = lse.new_zeros(index_heads, tiles_of_chunk * BLOCK)
            weights[:, :size] = clean_weights[part].t()
            grad_keys(index_width)(clean_q, clean_k, weights, span, scores, sums, floor)
        del clean_q  # before the next chunk makes its own
    if sums is not None:
        sums = sums[0] if len(sums) == 1 else sums.sum(0)
    return (
        grad_q if need_q else index_q.new_empty(0),
        sums.view(-1, index_width)[: inputs.keys].to(index_k.dtype) if need_k else index_k.new_empty(0),
        grad_weights.to(index_weights.dtype) if need_weights else index_weights.new_empty(0),
    )


def compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None:
    if dtype != torch.bfloat16:
        return f"{dtype} runs unfused"
    if reason := tiles.refuse_widths(index_heads, index_dim, head_dim):
        return reason
    tiles.partials(head_dim, index_dim, True)
    tiles.combine()
    tiles.gradients(head_dim, index_dim, True)
    spans()
    grad_rows(index_dim)
    grad_keys(index_dim)
    return None
