"""Index scores of a block of query rows with every key tile that one of them sees. Hopper (sm_90a), bf16.

Computes   logits[r, s] = sum_h weights[t, h] * act(q[t, h] . k[s]) in fp32, for rows t = first_row + r and all keys s
           of the tiles of 256 that hold a key visible to a row of the block. Other cells are not written.
Tiling     keys are the rows of a product and (query row, head) its columns, so that the sum over heads stays inside a
           thread and its three neighbours. One block has 256 columns: 256 / Hi query rows (4 at 64 heads), which keeps
           the traffic of keys, read again by every block, below the speed of L2. It walks over key tiles, of which four
           warpgroups take 64 keys each; for these a warpgroup forms two products of 64 x 128, one after the other. So
           while one sums over heads the others multiply. One warp fetches key tiles by TMA, 2 in flight.
           The last rows begin first: under a causal mask they are the longest. Where there are few rows, `parts`
           blocks share the tiles of one.
Memory     q 64 KiB + 2 x 64 KiB of keys at Di = 128, and 1 KiB of weights, read anew for every product so that the 64
           products of a thread leave room in its 112 registers. A block starts with 96 a thread; the fetching
           warpgroup falls to 32, which is just what the other four need: 5 x 96 = 32 + 4 x 112.
Limits     Hi in {4, 8, 16, 32, 64}, Di in {64, 128}.
Bounds     starts and ends are read on the device and clamped to [0, S]. Rows and keys past the last are zeros.
Order      a thread adds its heads in ascending order; four neighbours are added in pairs. It depends on nothing but Hi.
NaN        passes through relu.
Compiles   per (Hi, Di). relu is a run-time argument: act(x) = max(x, floor) with floor 0 or -inf.
"""

import tilelang.language as T

from csrc_tilelang._compile import HAND_MADE, kernel

PRODUCTS = 512  # threads that multiply
KEYS = PRODUCTS // 2  # of one tile
COLUMNS = 256  # of one block: query rows x heads
STAGES = 2

SOURCE = r"""
// The block's weights, in the order in which threads read them: four at a time, those of columns
// 16 i + 2 l + {0, 1, 8, 9} for a thread with l = lane % 4.
__device__ __forceinline__ void load_weights(float* shared, const float* weights, long long first, long long end) {
  const int n = threadIdx.x;
  if (n < 256) shared[(n & ~15) + (n & 6) * 2 + (n >> 2 & 2) + (n & 1)] = first + n < end ? weights[first + n] : 0.f;
}

// The tiles that the block works on, its `part` of those that hold a visible key: first and number.
template <int ROWS, int KEYS>
__device__ __forceinline__ void tiles_of(
    int* tiles, const int* starts, const int* ends, int first_row, int rows, int num_keys, int part, int parts) {
  int low = num_keys, high = 0;
  for (int r = first_row + (threadIdx.x & 31); r < min(first_row + ROWS, rows); r += 32) {
    const int start = max(starts[r], 0), end = min(ends[r], num_keys);
    if (start < end) low = min(low, start), high = max(high, end);
  }
  low = __reduce_min_sync(~0u, low) / KEYS;
  high = (__reduce_max_sync(~0u, high) + KEYS - 1) / KEYS;
  const int share = (max(high - low, 0) + parts - 1) / parts;
  tiles[0] = low + part * share;
  tiles[1] = max(min(share, high - tiles[0]), 0);
}

// max that keeps NaN
__device__ __forceinline__ float activation(float x, float floor) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(floor));
  return x;
}

// Scores of 128 / HEADS rows with 16 keys of this warp, from its products of 128 columns. A thread has the products of
// keys lane / 4 and lane / 4 + 8 with columns 8 c + 2 (lane % 4) + {0, 1}, c < 16; of the four threads that share these
// keys, each ends up with one of the two and with every second row. `out` is the first row, `tile` its first key.
template <int HEADS>
__device__ __forceinline__ void store_scores(
    const float* products, const float* weights, float floor, float* out, int tile, int pitch) {
  constexpr int ROWS = 128 / HEADS, EACH = HEADS == 4 ? 2 : HEADS / 4;  // columns of a thread that one row has
  const int lane = threadIdx.x & 31;
  const bool second_key = lane & 1, second_row = lane & 2;
  const unsigned at = __cvta_generic_to_shared(weights) + (lane & 3) * 16;
  float of_key[2], sum[ROWS];  // at 4 heads a thread has the columns of every second row
#pragma unroll
  for (int c = 0; c < 16; c += 2) {
    float w[4];  // volatile: kept in registers over the tiles they would leave too few for products
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(w[0]), "=f"(w[1]), "=f"(w[2]), "=f"(w[3]) : "r"(at + c * 32));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = 2 * c + i;  // among the thread's own
#pragma unroll
      for (int key = 0; key < 2; key++) {
        const float x = activation(products[4 * (c + i / 2) + 2 * key + i % 2], floor);
        of_key[key] = column % EACH == 0 ? x * w[i] : fmaf(x, w[i], of_key[key]);
      }
      if (column % EACH == EACH - 1) {
        const float got = __shfl_xor_sync(~0u, second_key ? of_key[0] : of_key[1], 1);
        sum[column / EACH * (HEADS == 4 ? 2 : 1)] = (second_key ? of_key[1] : of_key[0]) + got;
      }
    }
  }
  out += tile + (int)(threadIdx.x / 32) * 16 + lane / 4 + (second_key ? 8 : 0) + (second_row ? pitch : 0);
#pragma unroll
  for (int r = 0; r < ROWS; r += 2) {
    float total = sum[r];
    if (HEADS > 4) {
      total = second_row ? sum[r + 1] : sum[r];
      total += __shfl_xor_sync(~0u, second_row ? sum[r] : sum[r + 1], 2);
    }
    out[(long long)r * pitch] = total;
  }
}
"""


@kernel(pass_configs=HAND_MADE)
def indexer_logits(heads, width):
    """q [T * Hi, Di], weights [T * Hi]; logits [R, P] has room for the rows of all blocks and the keys of all tiles."""
    rows, columns, keys = T.dynamic("T"), T.dynamic("TH"), T.dynamic("S")
    logit_rows, pitch = T.dynamic("R"), T.dynamic("P")
    half = COLUMNS // 2
    block_rows = COLUMNS // heads
    gemm = dict(transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)

    @T.prim_func
    def indexer_logits(
        q: T.Tensor((columns, width), "bfloat16"),
        k: T.Tensor((keys, width), "bfloat16"),
        weights: T.Tensor((columns,), "float32"),
        starts: T.Tensor((rows,), "int32"),
        ends: T.Tensor((rows,), "int32"),
        logits: T.Tensor((logit_rows, pitch), "float32"),
        first_row: T.int32,
        blocks: T.int32,
        parts: T.int32,
        floor: T.float32,
    ):
        with T.Kernel(blocks, parts, threads=PRODUCTS + 128, prelude=SOURCE) as (block, part):
            q_shared = T.alloc_shared((2, half, width), "bfloat16")
            k_shared = T.alloc_shared((STAGES, KEYS, width), "bfloat16")
            w_shared = T.alloc_shared((COLUMNS,), "float32")
            products = T.alloc_fragment((KEYS, half), "float32")
            tiles = T.alloc_local((2,), "int32")
            q_full = T.alloc_barrier([32])
            full = T.alloc_barrier([32] * STAGES)
            empty = T.alloc_barrier([PRODUCTS // 32] * STAGES)  # one arrival of each warp that multiplies
            thread = T.get_thread_binding()
            local: T.int32 = (blocks - 1 - block) * block_rows
            row: T.int32 = first_row + local
            T.evaluate(
                T.call_extern(
                    "handle",
                    "load_weights",
                    T.access_ptr(w_shared[0], "w", COLUMNS),
                    T.access_ptr(weights[0], "r", columns),
                    T.cast(row, "int64") * heads,
                    T.cast(columns, "int64"),
                )
            )
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tiles_of<{block_rows}, {KEYS}>",
                    tiles.data,
                    T.access_ptr(starts[0], "r", rows),
                    T.access_ptr(ends[0], "r", rows),
                    row,
                    rows,
                    keys,
                    part,
                    parts,
                )
            )
            T.sync_threads()
            if thread >= PRODUCTS:
                T.dec_max_nreg(32)
                if thread < PRODUCTS + 32:
                    for i in T.unroll(2):
                        T.tma_copy(
                            q[row * heads + i * half : row * heads + i * half + half, 0:width],
                            q_shared[i, :, :],
                            barrier=q_full[0],
                            leader_scope_threads=32,
                        )
                    T.barrier_arrive(q_full[0])
                    for j in T.serial(tiles[1]):
                        T.barrier_wait(empty[j % STAGES], ((j // STAGES) & 1) ^ 1)
                        T.tma_copy(
                            k[(tiles[0] + j) * KEYS : (tiles[0] + j) * KEYS + KEYS, 0:width],
                            k_shared[j % STAGES, :, :],
                            barrier=full[j % STAGES],
                            leader_scope_threads=32,
                        )
                        T.barrier_arrive(full[j % STAGES])
            else:
                T.inc_max_nreg(112)
                T.barrier_wait(q_full[0], 0)
                for j in T.serial(tiles[1]):
                    T.barrier_wait(full[j % STAGES], (j // STAGES) & 1)
                    for i in T.unroll(2):
                        T.wgmma_gemm(k_shared[j % STAGES, :, :], q_shared[i, :, :], products, **gemm)
                        T.wait_wgmma(0)
                        if i == 1:
                            if thread % 32 == 0:
                                T.barrier_arrive(empty[j % STAGES])
                        T.evaluate(
                            T.call_extern(
                                "handle",
                                f"store_scores<{heads}>",
                                products.data,
                                T.access_ptr(w_shared[i * half], "r", half),
                                floor,
                                T.access_ptr(logits[local + i * (block_rows // 2), 0], "w", pitch),
                                (tiles[0] + j) * KEYS,
                                pitch,
                            )
                        )

    return indexer_logits


VARIANTS = [(indexer_logits, (64, 128)), (indexer_logits, (8, 64)), (indexer_logits, (4, 64))]
