"""The topk highest of a row of scores, exactly, in ascending order of their keys. Hopper (sm_90a), CUDA C++ body.

Computes   one block serves one row t: its visible keys are starts[t] <= s < ends[t], clamped to [0, S]. Of these it
           selects the min(topk, visible) highest scores: ties to the lower key, -0.0 equal to +0.0, NaN highest, -inf
           lowest but selected. Writes keys and scores in ascending order of the keys, then -1 and -inf.
How        a radix selection. A score becomes an unsigned number whose order is the order of selection. Its upper 11,
           the next 11 and the last 10 bits are counted in turn, each among the scores that agree in the bits before,
           and give the bin in which the topk-th score lies: in the end that score exactly, and how many scores equal to
           it are selected. It ends early where a bin is selected whole. A last pass over the row writes what is higher
           and the first of the equal ones. Rows that select all they see are copied.
           After the first count the scores of its bin, if at most 4096, are gathered in shared memory and counted
           there; else the row is read again for each count. So any distribution is selected exactly, some in less time.
Tiling     512 threads, 8 scores each at a time. The first pass brings the row from memory, the others find it in L1 or
           L2. The last rows begin first: under a causal mask they are the longest.
Memory     24 KiB of shared memory, 8 for counts and 16 for the gathered scores; 39 registers. No workspace.
Limits     S < 2**31; any topk, any number of rows.
Bounds     scores outside a row's bounds have no effect, whatever they hold; a load may touch the 7 on either side.
Order      which scores are selected does not depend on the order in which threads count; positions are prefix sums.
Compiles   once.
"""

import tilelang.language as T

from csrc_tilelang._compile import HAND_MADE, kernel

THREADS = 512

SOURCE = (
    f"constexpr int THREADS = {THREADS};\n"
    r"""
constexpr int WARPS = THREADS / 32, BINS = 2048, CANDIDATES = 4096;

// The order of these numbers is the order of selection; that of -inf, the lowest, is above 0.
__device__ __forceinline__ unsigned rank_of(float score) {
  const int bits = __float_as_int(__fadd_rn(score, 0.f));  // -0.0 becomes 0.0, every NaN the positive one
  return bits ^ (bits >> 31 | 0x80000000);
}

__device__ __forceinline__ unsigned sum_to_lane(unsigned x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned lower = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += lower;
  }
  return x;
}

// Sum of x over the threads before this one, and over all. `warp_sums` is free again after the caller's next barrier.
__device__ __forceinline__ unsigned sum_before(unsigned x, unsigned* warp_sums, unsigned& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned to_lane = sum_to_lane(x);
  if (lane == 31) warp_sums[warp] = to_lane;
  __syncthreads();
  const unsigned to_warp = sum_to_lane(lane < WARPS ? warp_sums[lane] : 0);
  total = __shfl_sync(~0u, to_warp, 31);
  const unsigned warps_before = __shfl_sync(~0u, to_warp, max(warp - 1, 0));
  return to_lane - x + (warp == 0 ? 0 : warps_before);
}

__device__ __forceinline__ bool rank_matches(unsigned rank, int shift, unsigned prefix) {
  return (rank ^ prefix << shift) >> shift == 0;
}

// Ranks of 8 scores; 0 for those that are not in [skip, stop), where `at` is the place of the first.
__device__ __forceinline__ void load_ranks(unsigned* ranks, const float* logits, int at, int skip, int stop) {
  float x[8];
  *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(logits + at);
  *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(logits + at + 4);
#pragma unroll
  for (int j = 0; j < 8; j++) ranks[j] = rank_of(x[j]);
  if (at < skip || at + 8 > stop) {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (at + j < skip || at + j >= stop) ranks[j] = 0;
  }
}

// Row `row` of all T; `logits` are its scores, aligned to 32 bytes and to be read up to a multiple of 8.
__device__ __forceinline__ void select_row(
    int* __restrict__ indices, float* __restrict__ scores, const float* __restrict__ logits,
    const int* starts, const int* ends, int num_keys, int topk, int row) {
  __shared__ unsigned counts[BINS], candidates[CANDIDATES], warp_sums[2][WARPS], found[3], num_candidates;
  const int thread = threadIdx.x;
  const int start = max(starts[row], 0), end = min(ends[row], num_keys), visible = max(end - start, 0);
  indices += (long long)row * topk, scores += (long long)row * topk;
  if (visible <= topk) {
    for (int i = thread; i < topk; i += THREADS) {
      indices[i] = i < visible ? start + i : -1;
      scores[i] = i < visible ? logits[start + i] : -INFINITY;
    }
    return;
  }
  const int first = start & ~7, skip = start - first, stop = end - first;
  logits += first;

  // The topk-th score has rank >> shift == prefix; `need` of the scores with that prefix are selected.
  unsigned prefix = 0, need = topk;
  int shift = 32, gathered = -1;
  if (thread == 0) num_candidates = 0;
#pragma unroll 1
  for (int level = 0; level < 3; level++) {
    const int known = shift, bits = level == 2 ? 10 : 11;
    const unsigned mask = (1u << bits) - 1;
    shift -= bits;
    for (int i = thread; i < BINS; i += THREADS) counts[i] = 0;
    __syncthreads();
    if (level == 0) {
      for (int at = 8 * thread; at < stop; at += 8 * THREADS) {
        unsigned ranks[8];
        load_ranks(ranks, logits, at, skip, stop);
#pragma unroll
        for (int j = 0; j < 8; j++) atomicAdd(&counts[ranks[j] >> 21], 1u);  // bin 0 holds no score
      }
    } else if (gathered >= 0) {
      for (int i = thread; i < gathered; i += THREADS) {
        const unsigned rank = candidates[i];
        if (level == 1 || rank >> known == prefix) atomicAdd(&counts[rank >> shift & mask], 1u);
      }
    } else {
      for (int at = 8 * thread; at < stop; at += 8 * THREADS) {
        unsigned ranks[8];
        load_ranks(ranks, logits, at, skip, stop);
#pragma unroll
        for (int j = 0; j < 8; j++)
          if (rank_matches(ranks[j], known, prefix)) atomicAdd(&counts[ranks[j] >> shift & mask], 1u);
      }
    }
    __syncthreads();
    constexpr int EACH = BINS / THREADS;  // bins of one thread, from the highest down
    const int high = BINS - 1 - EACH * thread;
    unsigned mine = 0, total;
#pragma unroll
    for (int j = 0; j < EACH; j++) mine += counts[high - j];
    unsigned above = sum_before(mine, warp_sums[0], total);
    if (above < need && need <= above + mine) {
      for (int j = 0; j < EACH; j++) {
        const unsigned here = counts[high - j];
        if (above < need && need <= above + here) found[0] = high - j, found[1] = need - above, found[2] = here;
        above += here;
      }
    }
    __syncthreads();
    prefix = prefix << bits | found[0];
    need = found[1];
    if (need == found[2]) break;  // the whole bin: its other bits do not matter
    if (level == 0 && found[2] <= CANDIDATES) {
      gathered = found[2];
      for (int at = 8 * thread; at < stop; at += 8 * THREADS) {
        unsigned ranks[8];
        load_ranks(ranks, logits, at, skip, stop);
#pragma unroll
        for (int j = 0; j < 8; j++)
          if (rank_matches(ranks[j], shift, prefix)) candidates[atomicAdd(&num_candidates, 1u)] = ranks[j];
      }
    }
  }
  unsigned threshold = prefix << shift;
  if (shift > 0) threshold -= 1, need = 0;

  unsigned higher = 0, equal = 0;  // scores passed so far
  int turn = 0;
  for (int base = 0; base < stop; base += 8 * THREADS, turn ^= 1) {
    const int at = base + 8 * thread;
    unsigned chosen = 0, ties = 0, total;
    if (at < stop) {
      unsigned ranks[8];
      load_ranks(ranks, logits, at, skip, stop);
#pragma unroll
      for (int j = 0; j < 8; j++) chosen |= (ranks[j] > threshold) << j, ties |= (ranks[j] == threshold) << j;
    }
    const unsigned counted = __popc(chosen) | __popc(ties) << 16;  // at most 8 * THREADS of each
    const unsigned before = sum_before(counted, warp_sums[turn], total);
    const unsigned equals = equal + (before >> 16);
    int slot = higher + (before & 0xffff) + min(equals, need);
    for (int spare = (int)equals + __popc(ties) - (int)max(equals, need); spare > 0 && ties != 0; spare--)
      ties &= ~(0x80000000u >> __clz(ties));  // the highest key
    for (chosen |= ties; chosen != 0; chosen &= chosen - 1, slot++) {
      const int key = at + __ffs(chosen) - 1;
      indices[slot] = first + key;
      scores[slot] = logits[key];
    }
    higher += total & 0xffff, equal += total >> 16;
    if (higher + min(equal, need) == topk) break;
  }
}
"""
)


@kernel(pass_configs=HAND_MADE, tensor_core=None)
def select_topk():
    """logits [R, P] hold the scores of rows first_row, ..., first_row + rows - 1; P >= S is a multiple of 4."""
    all_rows, logit_rows, pitch, topk = T.dynamic("T"), T.dynamic("R"), T.dynamic("P"), T.dynamic("K")

    @T.prim_func
    def select_topk(
        logits: T.Tensor((logit_rows, pitch), "float32"),
        starts: T.Tensor((all_rows,), "int32"),
        ends: T.Tensor((all_rows,), "int32"),
        indices: T.Tensor((all_rows, topk), "int32"),
        scores: T.Tensor((all_rows, topk), "float32"),
        first_row: T.int32,
        rows: T.int32,
        num_keys: T.int32,
    ):
        with T.Kernel(rows, threads=THREADS, prelude=SOURCE) as block:
            T.evaluate(
                T.call_extern(
                    "handle",
                    "select_row",
                    T.access_ptr(indices[0, 0], "w", all_rows * topk),
                    T.access_ptr(scores[0, 0], "w", all_rows * topk),
                    T.access_ptr(logits[rows - 1 - block, 0], "r", pitch),
                    T.access_ptr(starts[0], "r", all_rows),
                    T.access_ptr(ends[0], "r", all_rows),
                    num_keys,
                    topk,
                    first_row + rows - 1 - block,
                )
            )

    return select_topk


VARIANTS = [(select_topk, ())]
