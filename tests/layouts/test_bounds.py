"""Bounds against sets of visible keys, built one row at a time from the definition."""

import re
import warnings
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from dsa_ops.layouts import batched_bounds, packed_bounds, position_bounds

few = settings(derandomize=True, deadline=None, max_examples=60)
ints = st.sampled_from([torch.int32, torch.int64])


def running_total(lengths, dtype=torch.int32):
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=dtype)


def keys_of_sequence(q_len, k_len, causal):
    """Local keys that each query sees: distances are counted from the last query and the last key."""
    return [[j for j in range(k_len) if not causal or (k_len - 1 - j) >= (q_len - 1 - i)] for i in range(q_len)]


def seen(bounds):
    """The rows' visible keys, after a look at what every pair of bounds must be."""
    starts, ends = bounds
    assert starts.dtype == ends.dtype == torch.int32
    assert starts.shape == ends.shape and starts.dim() == 1
    assert bool((starts <= ends).all()) and bool((starts >= 0).all())
    return [list(range(first, past)) for first, past in zip(starts.tolist(), ends.tolist(), strict=True)]


@st.composite
def packs(draw):
    number = draw(st.integers(0, 5))
    vector = st.lists(st.integers(0, 5), min_size=number, max_size=number)
    return draw(vector), draw(vector), draw(vector), draw(vector), draw(st.integers(0, 3))


@few
@given(packs(), st.booleans(), ints, ints)
@example(([0, 3, 0, 0, 4], [0, 3, 0, 0, 4], [0] * 5, [0] * 5, 2), True, torch.int32, torch.int32)
@example(([5], [2], [0], [0], 0), True, torch.int32, torch.int64)
@example(([1], [1], [0], [0], 0), False, torch.int64, torch.int32)
def test_packed(pack, causal, q_dtype, k_dtype):
    q_lengths, k_lengths, q_padding, k_padding, beyond = pack
    want, first_key = [], 0
    for q_len, k_len, q_pad, k_pad in zip(q_lengths, k_lengths, q_padding, k_padding, strict=True):
        want += [[first_key + j for j in row] for row in keys_of_sequence(q_len, k_len, causal)]
        want += [[]] * q_pad
        first_key += k_len + k_pad
    want += [[]] * beyond
    bounds = packed_bounds(
        running_total(q_lengths, q_dtype),
        running_total(k_lengths, k_dtype),
        num_rows=len(want),
        causal=causal,
        cu_seqlens_q_padded=running_total([a + b for a, b in zip(q_lengths, q_padding, strict=True)], k_dtype),
        cu_seqlens_k_padded=running_total([a + b for a, b in zip(k_lengths, k_padding, strict=True)], q_dtype),
    )
    assert seen(bounds) == want
    for bound in bounds:
        assert bool((bound.diff() >= 0).all())


@few
@given(st.lists(st.integers(0, 6), max_size=6), st.booleans(), ints)
def test_packed_with_queries_alone(lengths, causal, dtype):
    want, first = [], 0
    for length in lengths:
        want += [[first + j for j in row] for row in keys_of_sequence(length, length, causal)]
        first += length
    cu_seqlens = running_total(lengths, dtype)
    assert seen(packed_bounds(cu_seqlens, causal=causal)) == want
    assert seen(packed_bounds(cu_seqlens, cu_seqlens, causal=causal)) == want


def test_packed_by_hand():
    cu_seqlens = torch.tensor([0, 3, 3, 5])
    starts, ends = packed_bounds(cu_seqlens, num_rows=7)
    assert starts.tolist() == [0, 0, 0, 3, 3, 5, 5]
    assert ends.tolist() == [1, 2, 3, 4, 5, 5, 5]
    starts, ends = packed_bounds(torch.tensor([0, 2]), torch.tensor([0, 5]))
    assert (starts.tolist(), ends.tolist()) == ([0, 0], [4, 5])


def test_keys_default_to_the_layout_of_the_queries():
    real, padded = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 8])
    starts, ends = packed_bounds(real, cu_seqlens_q_padded=padded)
    assert starts.tolist() == [0, 0, 2, 2, 4, 4, 4, 7]
    assert ends.tolist() == [1, 2, 2, 2, 5, 6, 7, 7]
    # keys named, without padding of their own: they lie close together
    starts, ends = packed_bounds(real, real, cu_seqlens_q_padded=padded)
    assert starts.tolist() == [0, 0, 2, 2, 2, 2, 2, 5]
    # only the keys are padded
    starts, ends = packed_bounds(real, cu_seqlens_k_padded=padded)
    assert starts.tolist() == [0, 0, 4, 4, 4] and ends.tolist() == [1, 2, 5, 6, 7]


def test_packed_of_a_strided_vector():
    wide = torch.tensor([0, 9, 3, 9, 5, 9])[::2]
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch.searchsorted has one for strided boundaries
            bounds = packed_bounds(wide)
    finally:
        torch.set_warn_always(False)
    for bound, want in zip(bounds, packed_bounds(wide.contiguous()), strict=True):
        assert torch.equal(bound, want)


@few
@given(st.integers(0, 4), st.integers(0, 6), st.integers(0, 6), st.booleans())
def test_batched(batch, q_len, k_len, causal):
    want = [[b * k_len + j for j in row] for b in range(batch) for row in keys_of_sequence(q_len, k_len, causal)]
    assert seen(batched_bounds(batch, q_len, k_len, causal=causal)) == want


@few
@given(st.data(), st.integers(0, 4), st.integers(0, 6), st.booleans(), ints)
def test_batched_with_lengths(data, batch, rows, causal, dtype):
    lengths = data.draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
    want = []
    for b, length in enumerate(lengths):
        want += [[b * rows + j for j in row] for row in keys_of_sequence(length, length, causal)]
        want += [[]] * (rows - length)
    got = seen(batched_bounds(batch, rows, rows, causal=causal, lengths=torch.tensor(lengths, dtype=dtype)))
    assert got == want


@few
@given(st.data(), st.integers(0, 8), st.booleans(), ints)
def test_positions(data, rows, causal, dtype):
    want, positions, starts, ends = [], [], [], []
    for _ in range(rows):
        start, length, position = (data.draw(st.integers(0, 9)) for _ in range(3))
        want.append([key for key in range(start, start + length) if not causal or key - start <= position])
        positions.append(position)
        starts.append(start)
        ends.append(start + length)
    vectors = [torch.tensor(x, dtype=dtype) for x in (positions, starts, ends)]
    assert seen(position_bounds(*vectors, causal=causal)) == want


def test_positions_do_not_overflow():
    last = 2**31 - 1
    vectors = [torch.tensor([x], dtype=torch.int32) for x in (last, last - 3, last)]
    assert [bound.tolist() for bound in position_bounds(*vectors)] == [[last - 3], [last]]


@few
@given(st.permutations(range(9)), st.booleans())
def test_positions_say_what_packed_says_in_any_order(order, causal):
    lengths = [4, 0, 3, 2]
    packed = packed_bounds(running_total(lengths), causal=causal)
    positions = torch.tensor([i for length in lengths for i in range(length)])
    starts = torch.tensor([0] * 4 + [4] * 3 + [7] * 2)
    ends = torch.tensor([4] * 4 + [7] * 3 + [9] * 2)
    got = position_bounds(positions[list(order)], starts[list(order)], ends[list(order)], causal=causal)
    for bound, want in zip(got, packed, strict=True):
        assert torch.equal(bound, want[list(order)])


def test_compiles_whole_and_for_every_size():
    def bounds(q, k, q_padded, k_padded, rows, batch, length, positions, starts, ends):
        packed = packed_bounds(q, k, num_rows=rows, cu_seqlens_q_padded=q_padded, cu_seqlens_k_padded=k_padded)
        whole = packed_bounds(q, num_rows=rows, causal=False)
        rectangle = batched_bounds(batch, length, 2 * length)
        ragged = batched_bounds(batch, length, length, lengths=q.diff().clamp(max=length))
        return (*packed, *whole, *rectangle, *ragged, *position_bounds(positions, starts, ends))

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bounds, backend=backend, fullgraph=True, dynamic=True)
    for lengths, rows in (([2, 3, 4], 40), ([3, 0, 7, 5], 51), ([9, 2, 2], 33)):
        q = running_total(lengths)
        k = running_total([2 * length for length in lengths])
        q_padded = running_total([length + 3 for length in lengths])
        k_padded = running_total([2 * length + 1 for length in lengths])
        positions = torch.arange(rows)
        arguments = (
            q,
            k,
            q_padded,
            k_padded,
            rows,
            len(lengths),
            max(lengths),
            positions,
            positions * 2,
            positions * 3,
        )
        for got, want in zip(compiled(*arguments), bounds(*arguments), strict=True):
            assert torch.equal(got, want)
    assert backend.frame_count == 1


def test_with_host_sizes_nothing_is_read_back():
    with FakeTensorMode():
        cu_seqlens = torch.empty(4, dtype=torch.int32)
        assert packed_bounds(cu_seqlens, num_rows=11)[0].shape == (11,)
        assert batched_bounds(3, 5, 5, lengths=cu_seqlens[:3])[1].shape == (15,)
        assert position_bounds(cu_seqlens, cu_seqlens, cu_seqlens)[1].shape == (4,)
    assert packed_bounds(torch.empty(4, dtype=torch.int32, device="meta"), num_rows=11)[0].device.type == "meta"


@pytest.mark.gpu
def test_no_sync_on_cuda():
    cu_seqlens = torch.tensor([0, 3, 5, 9], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = packed_bounds(cu_seqlens, num_rows=11)
        batched = batched_bounds(3, 5, 5, lengths=cu_seqlens.diff())
        positions = position_bounds(cu_seqlens, cu_seqlens, cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen(packed) == seen(packed_bounds(cu_seqlens.cpu(), num_rows=11))
    assert seen(batched) == seen(batched_bounds(3, 5, 5, lengths=cu_seqlens.cpu().diff()))
    assert seen(positions) == seen(position_bounds(*[cu_seqlens.cpu()] * 3))
    with pytest.raises(ValueError, match="must not decrease"):
        packed_bounds(cu_seqlens.neg(), num_rows=11, validate=True)


def cu(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            TypeError,
            "cu_seqlens_q must be an int32 or int64 tensor of shape [N+1], got list",
            lambda: packed_bounds([0]),
        ),
        (
            TypeError,
            "cu_seqlens_q must be an int32 or int64 tensor of shape [N+1], got torch.float32 [2]",
            lambda: packed_bounds(torch.zeros(2)),
        ),
        (
            ValueError,
            "cu_seqlens_q must be an int32 or int64 tensor of shape [N+1], got torch.int32 [1, 2]",
            lambda: packed_bounds(cu(0, 3)[None]),
        ),
        (ValueError, "cu_seqlens_q must have at least one entry, got torch.int32 [0]", lambda: packed_bounds(cu())),
        (
            ValueError,
            "cu_seqlens_k must be an int32 or int64 tensor of shape [N+1] with N+1 = 2, got torch.int32 [3]",
            lambda: packed_bounds(cu(0, 3), cu(0, 3, 4)),
        ),
        (
            ValueError,
            "cu_seqlens_q_padded must be on cpu, got meta",
            lambda: packed_bounds(cu(0, 3), cu_seqlens_q_padded=cu(0, 3, device="meta")),
        ),
        (
            TypeError,
            "num_rows must be a host integer, got torch.int64 []",
            lambda: packed_bounds(cu(0), num_rows=cu(0).sum()),
        ),
        (TypeError, "num_rows must be a host integer, got bool", lambda: packed_bounds(cu(0), num_rows=True)),
        (ValueError, "num_rows must be at least 0, got -1", lambda: packed_bounds(cu(0), num_rows=-1)),
        (
            ValueError,
            "num_rows must be below 2**31 (bounds are int32), got 2147483648",
            lambda: packed_bounds(cu(0), num_rows=2**31),
        ),
        (ValueError, "cu_seqlens_q must start at 0, got 1", lambda: packed_bounds(cu(1, 3))),
        (
            ValueError,
            "cu_seqlens_q must not decrease, got 4 after 6 at entry 2",
            lambda: packed_bounds(cu(0, 6, 4, 9), num_rows=9),
        ),
        (
            ValueError,
            "cu_seqlens_k must not decrease, got -1 after 0 at entry 1",
            lambda: packed_bounds(cu(0, 1), cu(0, -1)),
        ),
        (
            ValueError,
            "the last entry of cu_seqlens_k must be below 2**31 (bounds are int32), got 2147483648",
            lambda: packed_bounds(cu(0, 1), cu(0, 2**31, dtype=torch.int64)),
        ),
        (
            ValueError,
            "num_rows must be at least the 9 rows that cu_seqlens_q names, got 8",
            lambda: packed_bounds(cu(0, 9), num_rows=8),
        ),
        (
            ValueError,
            "num_rows must be at least the 12 rows that cu_seqlens_q_padded names, got 10",
            lambda: packed_bounds(cu(0, 9), num_rows=10, cu_seqlens_q_padded=cu(0, 12)),
        ),
        (
            ValueError,
            "cu_seqlens_q_padded must leave room for each sequence of cu_seqlens_q, got 4 rows for the 5 of sequence 1",
            lambda: packed_bounds(cu(0, 4, 9), cu_seqlens_q_padded=cu(0, 8, 12)),
        ),
        (
            ValueError,
            "cu_seqlens_k_padded must leave room for each sequence of cu_seqlens_q, got 3 rows for the 4 of sequence 0",
            lambda: packed_bounds(cu(0, 4, 9), cu_seqlens_k_padded=cu(0, 3, 12)),
        ),
        (
            ValueError,
            "cu_seqlens_k_padded must start at 0, got 2",
            lambda: packed_bounds(cu(0, 4), cu(0, 4), cu_seqlens_k_padded=cu(2, 8)),
        ),
        (TypeError, "q_len must be a host integer, got float", lambda: batched_bounds(2, 3.0, 3)),
        (ValueError, "batch must be at least 0, got -2", lambda: batched_bounds(-2, 3, 3)),
        (
            ValueError,
            "batch * k_len must be below 2**31 (bounds are int32), got 2147483648",
            lambda: batched_bounds(2**16, 1, 2**15),
        ),
        (
            ValueError,
            "lengths needs q_len == k_len, got q_len = 3, k_len = 4",
            lambda: batched_bounds(1, 3, 4, lengths=cu(1)),
        ),
        (
            ValueError,
            "lengths must be an int32 or int64 tensor of shape [batch] with batch = 2, got torch.int32 [1]",
            lambda: batched_bounds(2, 3, 3, lengths=cu(1)),
        ),
        (
            ValueError,
            "lengths must be in [0, 3], got 4 for sequence 1",
            lambda: batched_bounds(2, 3, 3, lengths=cu(1, 4)),
        ),
        (
            ValueError,
            "lengths must be in [0, 3], got -1 for sequence 0",
            lambda: batched_bounds(2, 3, 3, lengths=cu(-1, 4)),
        ),
        (
            ValueError,
            "lengths must be on meta, got cpu",
            lambda: batched_bounds(1, 3, 3, lengths=cu(1), device="meta"),
        ),
        (
            TypeError,
            "positions must be an int32 or int64 tensor of shape [T], got torch.float32 [2]",
            lambda: position_bounds(torch.zeros(2), cu(0, 0), cu(1, 1)),
        ),
        (
            ValueError,
            "segment_ends must be an int32 or int64 tensor of shape [T] with T = 2, got torch.int32 [1]",
            lambda: position_bounds(cu(0, 1), cu(0, 0), cu(1)),
        ),
        (
            ValueError,
            "positions must not be negative, got -3 at row 1",
            lambda: position_bounds(cu(0, -3), cu(0, 0), cu(1, 1)),
        ),
        (
            ValueError,
            "segment_starts must not be negative, got -1 at row 0",
            lambda: position_bounds(cu(0, 3), cu(-1, 0), cu(1, 1)),
        ),
        (
            ValueError,
            "segment_ends must not precede segment_starts, got 1 with start 2 at row 1",
            lambda: position_bounds(cu(0, 3), cu(0, 2), cu(1, 1)),
        ),
        (
            ValueError,
            "segment_ends must be below 2**31 (bounds are int32), got 2147483648 with start 0 at row 0",
            lambda: position_bounds(cu(0), cu(0), cu(2**31, dtype=torch.int64)),
        ),
    ],
)
def test_refusals(error, message, call):
    with pytest.raises(error, match=r"^(packed|batched|position)_bounds: " + re.escape(message)):
        call()


def test_shapes_are_refused_under_compile_too():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: packed_bounds(x, num_rows=8), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"cu_seqlens_q must be an int32 or int64 tensor"):
        compiled(torch.zeros(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "odd",
    [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor([x])],
    ids=["torch.sparse_coo", "nested"],
)
def test_vectors_that_are_not_strided_are_named(odd, request):
    got = f"got torch.int64 that is {request.node.callspec.id}"
    vector = torch.tensor([0, 4])
    with pytest.raises(TypeError, match=rf"^packed_bounds: cu_seqlens_k must be .*, {got}"):
        packed_bounds(vector, odd(vector))
    with pytest.raises(TypeError, match=rf"^batched_bounds: lengths must be .*, {got}"):
        batched_bounds(2, 4, 4, lengths=odd(vector))
    with pytest.raises(TypeError, match=rf"^position_bounds: segment_ends must be .*, {got}"):
        position_bounds(vector, vector, odd(vector))


def test_a_length_that_has_to_be_read_from_meta_is_named():
    with pytest.raises(
        ValueError, match=r"^packed_bounds: num_rows must be given where cu_seqlens is on meta, got None"
    ):
        packed_bounds(torch.tensor([0, 4], device="meta"))


def test_a_size_of_an_empty_batch_is_checked():
    with pytest.raises(ValueError, match=r"^batched_bounds: k_len must be below 2\*\*31 .*, got 2147483648"):
        batched_bounds(0, 1, 2**31)
