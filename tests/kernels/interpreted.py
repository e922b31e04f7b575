"""The Triton kernels on CPU tensors, in Triton's interpreter, against the oracle and the unfused ops.

Run by test_triton_interpreter.py in a process of its own: TRITON_INTERPRET=1 must be set before Triton is imported, and
changes every kernel of the process.
"""

import os

import pytest
import torch

import fused
import oracle
from dsa_ops.unfused.indexer_kl import indexer_kl_backward_unfused, indexer_kl_unfused

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

from csrc_tilelang import indexer_kl, indexer_kl_backward, segment_sum  # noqa: E402

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """The interpreter takes its time for every block: rows of a few slots have all of them."""
    monkeypatch.setattr(indexer_kl, "WHOLE_ROWS", ((16, 4, True, 1), (64, 4, True, 4)))
    monkeypatch.setattr(indexer_kl, "LOOP", (16, 1, False, 4))


def draw(T, K):
    """Rows with empty slots anywhere, two of them with nothing else, and NaN in the empty slots."""
    indices = torch.randint(-3, 50, (T, K), dtype=torch.int32)
    indices[1 % T] = -1
    target, scores = torch.rand(T, K) ** 4, 3 * torch.randn(T, K)
    target[2 % T] = 0
    target[:, 0] = 0  # a slot whose share is exactly 0
    target[indices < 0], scores[indices < 0] = NAN, NAN
    return target, scores, indices


@pytest.mark.parametrize("K", [1, 12, 17, 40, 67])
def test_kl_and_gradient(K):
    target, scores, indices = draw(4, K)
    grad_kl = torch.randn(4)
    grad_kl[1] = NAN  # of a row without a valid slot
    want = oracle.indexer_kl(target, scores, indices)
    fused.assert_close(indexer_kl.launch(target, scores, indices), want, "kl", 1e-6)
    grads = oracle.backward(
        oracle.indexer_kl, dict(target=target, scores=scores, indices=indices), (grad_kl.nan_to_num(0),), ["scores"]
    )
    got = indexer_kl_backward.launch(grad_kl, target, scores, indices)
    assert not got[indices < 0].any()
    fused.assert_close(got, grads["scores"].masked_fill(indices < 0, 0), "grad_scores", 1e-6)


@pytest.mark.parametrize("K", [8, 21])
def test_corners_equal_unfused(K):
    """Infinities and NaN surface where the unfused op has them; sums at the edge of an empty row."""
    target, scores, indices = torch.rand(16, K), torch.randn(16, K), torch.zeros(16, K, dtype=torch.int32)
    indices[:, 5] = -1
    scores[0, 2] = -INF
    scores[1] = -INF
    scores[2, 2] = INF
    scores[3, 2] = NAN
    scores[4, 2], target[4, 2] = -INF, 0
    target[5, 2] = NAN
    target[6, 2] = INF
    target[7] = 3e38  # the sum overflows
    target[8] = 1e-12  # below the limit
    target[9], target[9, 0] = 0, 1.5e-10
    target[10], target[10, 0] = 0, 1
    scores[11] *= 1e30
    scores[12], scores[12, 3] = -200, 0  # probabilities that underflow
    target[13] *= 1e37 / K
    target[14], target[14, 1] = 1e-38, 1  # subnormal shares
    target[15], scores[15] = 1, 2  # equal distributions
    target[:, 5], scores[:, 5] = NAN, INF  # an empty slot
    kl, want = indexer_kl.launch(target, scores, indices), indexer_kl_unfused(target, scores, indices)
    torch.testing.assert_close(kl, want, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert kl[[8, 15]].tolist() == [0, pytest.approx(0, abs=1e-12)]
    for grad_kl in (torch.randn(16), torch.randn(1).expand(3), torch.randn(3, dtype=torch.float64)):
        rows = slice(grad_kl.shape[0])
        got = indexer_kl_backward.launch(grad_kl, target[rows], scores[rows], indices[rows])
        want = indexer_kl_backward_unfused(grad_kl, target[rows], scores[rows], indices[rows])
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_a_small_kl_keeps_its_digits():
    """Where the indexer has nearly learned the target; the sum as it is written loses all but two."""
    T, K = 5, 60
    scores = torch.randn(T, K)
    target = (scores.double() + 1e-3 * torch.randn(T, K)).softmax(-1).float()
    indices = torch.zeros(T, K, dtype=torch.int32)
    want = oracle.indexer_kl(target, scores, indices)
    assert want.max() < 2e-6
    fused.assert_close(indexer_kl.launch(target, scores, indices), want, "kl", 1e-3)


def test_what_indexer_kl_declines():
    double = torch.rand(2, 4, dtype=torch.float64)
    assert indexer_kl.refuse(double, double, double) == "target is float64, the kernel takes float32"
    assert indexer_kl.refuse(double.float(), double.float(), double) is None
    assert indexer_kl_backward.refuse(double[:, 0], double.float(), double.float(), double) is None
    nothing = torch.zeros(0, 4)
    assert indexer_kl.launch(nothing, nothing, nothing.int()).shape == (0,)
    assert indexer_kl_backward.launch(nothing[:, 0], nothing, nothing, nothing.int()).shape == (0, 4)


def added_in_order(into, contributions, ids):
    into = into.clone()
    for row, key in zip(contributions, ids.tolist(), strict=True):
        if 0 <= key < into.shape[0]:
            into[key] += row
    return into


@pytest.mark.parametrize("N, S, D", [(1, 1, 1), (40, 6, 3), (30, 50, 130)])
def test_rows_are_added_in_their_order(N, S, D):
    into, contributions, ids = torch.randn(S, D), torch.randn(N, D), torch.randint(-2, S + 2, (N,), dtype=torch.int32)
    ids[: N // 2].clamp_(max=0)
    contributions[(ids < 0) | (ids >= S)] = NAN
    got = into.clone()
    segment_sum.add_by_key(got, contributions, ids)
    assert torch.equal(got, added_in_order(into, contributions, ids))


@pytest.mark.parametrize("seed", range(4))
def test_long_keys_are_added_piece_by_piece(seed, monkeypatch):
    """Keys of every length beside pieces of four, wherever in sorted order they begin."""
    monkeypatch.setattr(segment_sum, "PIECE", 4)
    torch.manual_seed(seed)
    lengths = torch.randint(0, 14, (7,))
    ids = torch.repeat_interleave(torch.arange(-1, 6), lengths)[torch.randperm(int(lengths.sum()))].int()
    into, contributions = torch.randn(5, 2), torch.randn(ids.shape[0], 2)
    contributions[(ids < 0) | (ids >= 5)] = NAN
    want = into.clone()
    for key in range(5):
        rows = contributions[ids == key]
        pieces = rows.split(4) if rows.shape[0] > 4 else rows.split(1)
        for piece in pieces:
            total = torch.zeros(2)
            for row in piece:
                total = total + row
            want[key] += total
    got = into.clone()
    segment_sum.add_by_key(got, contributions, ids)
    assert torch.equal(got, want)


def test_what_add_by_key_refuses():
    x, ids = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"by int32 ids, got torch\.float64, torch\.float32, torch\.int32"):
        segment_sum.add_by_key(x, x.double(), ids)
    with pytest.raises(ValueError, match=r"got \(3, 4\), \(2, 4\) and \(3,\)"):
        segment_sum.add_by_key(x, x[:2], ids)
    segment_sum.add_by_key(x, x[:0], ids[:0])
