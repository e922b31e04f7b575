"""Context parallel against lists of rows that are cut up and put together one at a time."""

import io
import re
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import calls
from dsa_ops.layouts import CPLayout, PackedCPLayout, _checks, contiguous_cp, packed_bounds, zigzag_cp

few = settings(calls.few, max_examples=60)
ints = st.sampled_from([torch.int32, torch.int64])
build = PackedCPLayout.build


def running_total(lengths, dtype=torch.int32):
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=dtype)


class Pack:
    """Sequences of `rooms` rows in memory, `lengths` of them real, then `beyond` padding rows."""

    def __init__(self, cp_size, rooms, lengths, beyond, dtype=torch.int32):
        self.cp_size, self.rooms, self.lengths, self.beyond = cp_size, rooms, lengths, beyond
        self.total = sum(rooms) + beyond
        self.cu_seqlens = running_total(lengths, dtype)
        self.more = {}
        if rooms != lengths:
            self.more["cu_seqlens_padded"] = running_total(rooms, torch.int32)

    def __repr__(self):
        return f"Pack(cp_size={self.cp_size}, rooms={self.rooms}, lengths={self.lengths}, beyond={self.beyond})"

    def layout(self, function, rank, **more):
        return function(self.cu_seqlens, self.cp_size, rank, total=self.total, **self.more, **more)

    def sequences(self):
        """(sequence's rows in memory, how many are real), then None for what is behind them."""
        first = 0
        for room, length in zip(self.rooms, self.lengths, strict=True):
            yield list(range(first, first + room)), length
            first += room

    def chunks(self, rank):
        """(sequence's rows, the rows of one of this rank's chunks), front and back of every sequence."""
        for rows, _ in self.sequences():
            size = len(rows) // (2 * self.cp_size)
            cut = [rows[i * size : (i + 1) * size] for i in range(2 * self.cp_size)]
            yield rows, cut[rank]
            yield rows, cut[-1 - rank]

    def zigzag_rows(self, rank):
        rows = [row for _, chunk in self.chunks(rank) for row in chunk]
        share = self.beyond // self.cp_size
        first = sum(self.rooms) + rank * share
        return rows + list(range(first, first + share))

    def contiguous_rows(self, rank):
        share = self.total // self.cp_size
        return list(range(rank * share, (rank + 1) * share))

    def seen(self, causal=True):
        """Keys that each global row sees."""
        keys = [[] for _ in range(self.total)]
        for rows, length in self.sequences():
            for i in range(length):
                keys[rows[i]] = rows[: i + 1] if causal else rows[:length]
        return keys


@st.composite
def packs(draw, any_length=False):
    """With any_length the lengths divide by nothing, as the contiguous layout allows."""
    cp_size, number = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, 4))
    rooms = draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    beyond = draw(st.integers(0, 3)) * cp_size
    if any_length:
        rooms = [4 * room + draw(st.integers(0, 3)) for room in rooms]
        beyond += -sum(rooms) % cp_size
    else:
        rooms = [2 * cp_size * room for room in rooms]
    lengths = rooms
    if draw(st.booleans()):
        lengths = [draw(st.integers(0, room)) for room in rooms]
    return Pack(cp_size, rooms, lengths, beyond, draw(ints))


def lists(layout):
    return [x.tolist() for x in layout]


def check_layout(pack, function, rows_of, causal):
    layouts = [pack.layout(function, rank, causal=causal) for rank in range(pack.cp_size)]
    gathered = [row for rank in range(pack.cp_size) for row in rows_of(rank)]
    assert sorted(gathered) == list(range(pack.total)), "the test's own rows"
    keys = pack.seen(causal)
    starts, ends = packed_bounds(
        pack.cu_seqlens,
        num_rows=pack.total,
        causal=causal,
        cu_seqlens_q_padded=pack.more.get("cu_seqlens_padded"),
    )
    for rank, layout in enumerate(layouts):
        assert [x.dtype for x in layout] == [torch.int64, torch.int32, torch.int32, torch.int64, torch.int64]
        assert layout.rows.tolist() == rows_of(rank)
        seen = [list(range(a, b)) for a, b in zip(layout.starts.tolist(), layout.ends.tolist(), strict=True)]
        assert seen == [keys[row] for row in rows_of(rank)]
        assert torch.equal(layout.starts, starts[layout.rows]) and torch.equal(layout.ends, ends[layout.rows])
        assert layout.gather_inverse.tolist() == gathered
        assert [gathered[i] for i in layout.gather_order.tolist()] == list(range(pack.total))
        if causal:  # the position of a real row, which rotary tables take
            real = [(i, row) for i, row in enumerate(rows_of(rank)) if keys[row]]
            assert all(int(layout.rows[i] - layout.starts[i]) == len(keys[row]) - 1 for i, row in real)
        assert bool((layout.rows >= layout.starts).all())


@few
@given(packs(), st.booleans())
@example(Pack(2, [16], [16], 0), True)
@example(Pack(8, [0, 16, 0], [0, 16, 0], 8), True)
@example(Pack(4, [8, 16], [3, 0], 4), False)
@example(Pack(2, [], [], 6), True)
@example(Pack(1, [], [], 0), True)
def test_zigzag(pack, causal):
    check_layout(pack, zigzag_cp, pack.zigzag_rows, causal)


@few
@given(packs(any_length=True), st.booleans())
@example(Pack(2, [3, 5], [3, 5], 0), True)
@example(Pack(8, [1, 0, 5], [1, 0, 5], 2), True)
@example(Pack(4, [7, 6], [3, 6], 3), False)
def test_contiguous(pack, causal):
    check_layout(pack, contiguous_cp, pack.contiguous_rows, causal)


@few
@given(packs())
@example(Pack(2, [8, 16], [8, 16], 0))
@example(Pack(4, [8, 0, 16], [3, 0, 16], 4))
@example(Pack(2, [], [], 4))
@example(Pack(1, [0], [0], 0))
def test_segments(pack):
    for rank in range(pack.cp_size):
        q_lengths, prefixes, key_starts = [], [], []
        first = 0
        for rows, chunk in pack.chunks(rank):
            q_lengths.append(len(chunk))
            prefixes.append([row for row in rows if chunk and row <= chunk[-1]])
            key_starts.append(first)
            if len(key_starts) % 2 == 0:
                first += len(rows)
        source = [row for prefix in prefixes for row in prefix]
        got = pack.layout(build, rank)
        assert [x.dtype for x in got] == [torch.int32] * 5 + [torch.int64]
        want = (
            q_lengths,
            [len(prefix) for prefix in prefixes],
            list(accumulate(q_lengths, initial=0)),
            list(accumulate(map(len, prefixes), initial=0)),
            key_starts,
        )
        assert lists(got[:5]) == [list(x) for x in want]
        size = pack.total + pack.total // (2 * pack.cp_size)
        assert got.source_indices.tolist() == source + [pack.total - 1] * (size - len(source))
        assert pack.beyond or size == len(source)


@few
@given(packs(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_selecting_in_the_segments_is_selecting_globally(pack, topk, random):
    """With random scores of (row, key): the best keys of every row, found in either view."""
    score = {}
    keys = pack.seen()
    for rank in range(pack.cp_size):
        layout, segments = pack.layout(zigzag_cp, rank), pack.layout(build, rank)
        starts, ends = segments.segment_bounds(layout.starts, layout.ends)
        assert starts.dtype == ends.dtype == torch.int32
        source = segments.source_indices.tolist()
        want, picked = [], []
        for t, row in enumerate(layout.rows.tolist()):
            worth = {key: score.setdefault((row, key), random.random()) for key in keys[row]}
            best = sorted(sorted(keys[row], key=lambda key: -worth[key])[:topk])
            want.append(best + [-1] * (topk - len(best)))
            positions = range(int(starts[t]), int(ends[t]))
            best = sorted(sorted(positions, key=lambda p: -worth[source[p]])[:topk])
            picked.append(best + [-1] * (topk - len(best)))
        indices = torch.tensor(picked, dtype=torch.int32).reshape(-1, topk)
        got = segments.to_global(indices)
        assert got.dtype == torch.int32 and got.tolist() == want
        assert torch.equal(segments.to_global(indices.long()), got.long())


@few
@given(packs())
def test_segments_are_causal_by_aligning_the_last_query_with_the_last_key(pack):
    """What a backend without bounds makes of them, on the rows that are no padding."""
    keys = pack.seen()
    for rank in range(pack.cp_size):
        layout, segments = pack.layout(zigzag_cp, rank), pack.layout(build, rank)
        source = segments.source_indices.tolist()
        starts, ends = packed_bounds(segments.segment_cu_q, segments.segment_cu_k)
        for t, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            row = int(layout.rows[t])
            if keys[row]:
                assert [source[p] for p in range(first, last)] == keys[row]


# ---- by hand


def test_zigzag_of_one_sequence_by_hand():
    layouts = [zigzag_cp(torch.tensor([0, 16]), 2, rank) for rank in range(2)]
    assert layouts[0].rows.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert layouts[1].rows.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert layouts[0].gather_order.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 4, 5, 6, 7]
    assert torch.equal(layouts[0].gather_order, layouts[1].gather_order)


def test_zigzag_of_two_sequences_by_hand():
    first, second = (zigzag_cp(torch.tensor([0, 4, 16]), 2, rank) for rank in range(2))
    assert first.rows.tolist() == [0, 3, 4, 5, 6, 13, 14, 15]
    assert second.rows.tolist() == [1, 2, 7, 8, 9, 10, 11, 12]
    assert first.starts.tolist() == second.starts.tolist() == [0, 0, 4, 4, 4, 4, 4, 4]
    assert first.ends.tolist() == [1, 4, 5, 6, 7, 14, 15, 16]
    assert second.ends.tolist() == [2, 3, 8, 9, 10, 11, 12, 13]
    order = [0, 8, 9, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 5, 6, 7]
    assert first.gather_order.tolist() == second.gather_order.tolist() == order


def test_rows_behind_the_sequences_are_shared_out_and_empty():
    first, second = (zigzag_cp(torch.tensor([0, 8]), 2, rank, total=12) for rank in range(2))
    assert first.rows.tolist() == [0, 1, 6, 7, 8, 9] and second.rows.tolist() == [2, 3, 4, 5, 10, 11]
    assert first.starts.tolist()[4:] == first.ends.tolist()[4:] == [8, 8]
    assert second.starts.tolist()[4:] == second.ends.tolist()[4:] == [8, 8]


SEGMENTS = {  # q lengths, k lengths, cu_q, cu_k, key starts, sources
    "two sequences, rank 0": (
        ([0, 8, 24], 2, 0),
        ([2, 2, 4, 4], [2, 8, 4, 16], [0, 2, 4, 8, 12], [0, 2, 10, 14, 30], [0, 0, 8, 8]),
        [*range(2), *range(8), *range(8, 12), *range(8, 24)],
    ),
    "two sequences, rank 1": (
        ([0, 8, 24], 2, 1),
        ([2, 2, 4, 4], [4, 6, 8, 12], [0, 2, 4, 8, 12], [0, 4, 10, 18, 30], [0, 0, 8, 8]),
        [*range(4), *range(6), *range(8, 16), *range(8, 20)],
    ),
    "one sequence": (
        ([0, 16], 2, 1),
        ([4, 4], [8, 12], [0, 4, 8], [0, 8, 20], [0, 0]),
        [*range(8), *range(12)],
    ),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_by_hand(name):
    (cu_seqlens, cp_size, rank), vectors, source = SEGMENTS[name]
    got = build(torch.tensor(cu_seqlens), cp_size, rank)
    assert lists(got) == [*vectors, source]


def test_segment_bounds_by_hand():
    cu_seqlens = torch.tensor([0, 8, 24])
    want = [
        ([0, 0, 2, 2, 10, 10, 10, 10, 14, 14, 14, 14], [1, 2, 9, 10, 11, 12, 13, 14, 27, 28, 29, 30]),
        ([0, 0, 4, 4, 10, 10, 10, 10, 18, 18, 18, 18], [3, 4, 9, 10, 15, 16, 17, 18, 27, 28, 29, 30]),
    ]
    for rank in range(2):
        layout = zigzag_cp(cu_seqlens, 2, rank)
        got = build(cu_seqlens, 2, rank).segment_bounds(layout.starts, layout.ends)
        assert tuple(lists(got)) == want[rank]


def test_bounds_beyond_the_segment_end_with_it():
    segments = build(torch.tensor([0, 8, 24]), 2, 1, total=28)
    starts, ends = segments.segment_bounds(torch.zeros(14, dtype=torch.int64), torch.full((14,), 28))
    assert starts.tolist() == [0, 0, 4, 4, 10, 10, 10, 10, 18, 18, 18, 18, 30, 30]
    assert ends.tolist() == [4, 4, 10, 10, 18, 18, 18, 18, 30, 30, 30, 30, 30, 30]


def test_to_global_by_hand():
    segments = build(torch.tensor([0, 8, 24]), 2, 1)
    indices = torch.tensor([[[0, 4, 10, 29], [-1, 3, -7, 17]]])
    assert segments.to_global(indices).tolist() == [[[0, 0, 8, 19], [-1, 3, -1, 15]]]
    with pytest.raises(IndexError, match=r"to_global: indices must be below 30, the number of keys .* got 30"):
        segments.to_global(torch.tensor([0, 30]))
    # of 26 + 26 // 4 = 32 positions the last two are in no segment
    wider = build(torch.tensor([0, 8, 24]), 2, 1, total=26)
    assert wider.source_indices.shape == (32,) and wider.source_indices.tolist()[30:] == [25, 25]
    with pytest.raises(IndexError, match="got 31"):
        wider.to_global(torch.tensor([31]))
    nothing = build(torch.tensor([0]), 2, 1)
    assert nothing.to_global(torch.tensor([[-1, -3]])).tolist() == [[-1, -1]]


def test_to_global_of_ids_that_are_not_read(device):
    segments = build(torch.tensor([0, 8, 24], device=device), 2, 1, total=26)
    indices = torch.tensor([0, 29, 30, 31, 32, 2**31 - 1, -1, -(2**31)], dtype=torch.int32, device=device)
    compiled = torch.compile(lambda s, i: s.to_global(i), backend="aot_eager", fullgraph=True)
    assert compiled(segments, indices).tolist() == [0, 19, -1, -1, -1, -1, -1, -1]
    with pytest.raises(IndexError, match="got 30"):
        segments.to_global(indices, validate=True)
    if device == "cuda":
        assert segments.to_global(indices).tolist() == [0, 19, -1, -1, -1, -1, -1, -1]


def test_sizes_default_to_what_cu_seqlens_names():
    cu_seqlens, padded = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 16])
    for function in (zigzag_cp, contiguous_cp, build):
        for rank in range(2):
            with_size = function(cu_seqlens, 2, rank, total=16, cu_seqlens_padded=padded)
            assert lists(function(cu_seqlens, 2, rank, cu_seqlens_padded=padded)) == lists(with_size)
            assert lists(function(padded, 2, rank)) == lists(function(padded, 2, rank, total=16))


def test_gathering_rank_after_rank_and_back():
    cu_seqlens, x = torch.tensor([0, 8, 24]), torch.randn(28, 3)
    for function in (zigzag_cp, contiguous_cp):
        layouts = [function(cu_seqlens, 4, rank, total=28) for rank in range(4)]
        gathered = torch.cat([x[layout.rows] for layout in layouts])
        assert torch.equal(gathered[layouts[2].gather_order], x)
        assert torch.equal(x[layouts[1].gather_inverse], gathered)


def test_results_do_not_share_memory():
    for function in (zigzag_cp, contiguous_cp):
        layout = function(torch.tensor([0, 8]), 1, 0)
        assert len({x.untyped_storage().data_ptr() for x in layout}) == len(layout)


# ---- in graphs, on devices


def everything(cu_seqlens, padded, total, cp_size, cp_rank):
    layout = zigzag_cp(cu_seqlens, cp_size, cp_rank, total=total, cu_seqlens_padded=padded)
    whole = zigzag_cp(padded, cp_size, cp_rank, total=total, causal=False)
    contiguous = contiguous_cp(cu_seqlens, cp_size, cp_rank, total=total, cu_seqlens_padded=padded)
    segments = build(cu_seqlens, cp_size, cp_rank, total=total, cu_seqlens_padded=padded)
    starts, ends = segments.segment_bounds(layout.starts, layout.ends)
    ids = segments.to_global((ends - 1)[:, None])
    return (*layout, *whole, *contiguous, *segments, starts, ends, ids)


def test_compiles_whole_and_for_every_length():
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(everything, backend=backend, fullgraph=True, dynamic=True)
    for rooms, lengths, total in (([8, 16], [5, 16], 28), ([24, 0, 8], [20, 0, 1], 36), ([16, 16], [16, 3], 48)):
        arguments = running_total(lengths), running_total(rooms), total, 2, 1
        for got, want in zip(compiled(*arguments), everything(*arguments), strict=True):
            assert torch.equal(got, want)
    assert backend.frame_count == 1


@pytest.mark.gpu
def test_compiled_by_inductor_on_cuda():
    """With slices, of which a search under inductor forgets where they begin: pytorch/pytorch#182343."""
    torch._dynamo.reset()

    def function(cu_seqlens, padded):
        return (*packed_bounds(cu_seqlens[1:], num_rows=28), *everything(cu_seqlens[1:], padded[1:], 28, 2, 1))

    numbers = torch.tensor([-7, 0, 5, 21], device="cuda"), torch.tensor([3, 0, 8, 24], device="cuda")
    for dtype in (torch.int32, torch.int64):
        arguments = [x.to(dtype) for x in numbers]
        for got, want in zip(torch.compile(function, fullgraph=True)(*arguments), function(*arguments), strict=True):
            assert torch.equal(got, want)


class Shard(torch.nn.Module):
    def forward(self, cu_seqlens, x):
        total = 2 * x.shape[0]
        layout, segments = zigzag_cp(cu_seqlens, 2, 1, total=total), build(cu_seqlens, 2, 1, total=total)
        return layout, segments, segments.to_global(layout.ends[:, None])


def test_exports_for_every_length_and_comes_back_from_a_file():
    dims = {0: torch.export.Dim("sequences", min=3)}, {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(Shard(), (torch.tensor([0, 8, 24]), torch.zeros(12)), dynamic_shapes=dims)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    cu_seqlens = torch.tensor([0, 4, 4, 16])
    layout, segments, _ = module(cu_seqlens, torch.zeros(9))
    assert isinstance(layout, CPLayout) and isinstance(segments, PackedCPLayout)
    assert lists(layout) == lists(zigzag_cp(cu_seqlens, 2, 1, total=18))
    assert lists(segments) == lists(build(cu_seqlens, 2, 1, total=18))


@pytest.mark.parametrize("function", [zigzag_cp, contiguous_cp, build])
def test_layouts_are_saved_and_mapped_like_other_results(function):
    layout = function(torch.tensor([0, 8, 24]), 2, 1)
    file = io.BytesIO()
    torch.save(layout, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is type(layout) and lists(loaded) == lists(layout)
    moved = torch.utils._pytree.tree_map(lambda x: x + 1, layout)
    assert type(moved) is type(layout) and moved[0].tolist() == (layout[0] + 1).tolist()


def test_with_host_sizes_nothing_is_read_back():
    with FakeTensorMode():
        cu_seqlens = torch.empty(4, dtype=torch.int32)
        shapes = [x.shape for x in everything(cu_seqlens, cu_seqlens, 16, 2, 1)]
        assert shapes[:5] == [(8,), (8,), (8,), (16,), (16,)] and shapes[-1] == (8, 1)
    meta = torch.empty(4, dtype=torch.int32, device="meta")
    assert all(x.device.type == "meta" for x in everything(meta, meta, 16, 2, 1))


@pytest.mark.gpu
def test_no_sync_on_cuda():
    lengths, rooms = running_total([5, 16]).cuda(), running_total([8, 16]).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = everything(lengths, rooms, 28, 2, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, want in zip(got, everything(lengths.cpu(), rooms.cpu(), 28, 2, 1), strict=True):
        assert x.device.type == "cuda" and torch.equal(x.cpu(), want)
    for function in (zigzag_cp, contiguous_cp, build):
        function(lengths.neg(), 2, 1, total=28)
        with pytest.raises(ValueError, match="cu_seqlens must not decrease, got -5 after 0"):
            function(lengths.neg(), 2, 1, total=28, validate=True)


@pytest.mark.gpu
def test_in_a_cuda_graph_of_other_lengths():
    lengths, rooms = running_total([5, 16]).cuda(), running_total([8, 16]).cuda()
    everything(lengths, rooms, 28, 2, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = everything(lengths, rooms, 28, 2, 1)
    lengths.copy_(running_total([3, 9]))
    rooms.copy_(running_total([4, 12]))
    graph.replay()
    for x, want in zip(got, everything(lengths.cpu(), rooms.cpu(), 28, 2, 1), strict=True):
        assert torch.equal(x.cpu(), want)


# ---- refusals


def cu(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


ALL = (zigzag_cp, contiguous_cp, build)
REFUSALS = [
    (ALL, TypeError, "cu_seqlens must be an int32 or int64 tensor of shape [N+1], got list", ([0, 8], 2, 0), {}),
    (
        ALL,
        TypeError,
        "cu_seqlens must be an int32 or int64 tensor of shape [N+1], got torch.float32 [2]",
        (torch.zeros(2), 2, 0),
        {},
    ),
    (ALL, ValueError, "cu_seqlens must have at least one entry, got torch.int32 [0]", (cu(), 2, 0), {}),
    (
        ALL,
        ValueError,
        "cu_seqlens_padded must be an int32 or int64 tensor of shape [N+1] with N+1 = 2, got torch.int32 [3]",
        (cu(0, 8), 2, 0),
        {"cu_seqlens_padded": cu(0, 8, 16)},
    ),
    (
        ALL,
        ValueError,
        "cu_seqlens_padded must be on cpu, got meta",
        (cu(0, 8), 2, 0),
        {"cu_seqlens_padded": cu(0, 8, device="meta")},
    ),
    (ALL, TypeError, "cp_size must be a host integer, got float", (cu(0, 8), 2.0, 0), {}),
    (ALL, ValueError, "cp_size must be at least 1, got 0", (cu(0, 8), 0, 0), {}),
    (ALL, TypeError, "cp_rank must be a host integer, got torch.int64 []", (cu(0, 8), 2, torch.tensor(0)), {}),
    (ALL, ValueError, "cp_rank must be at least 0, got -1", (cu(0, 8), 2, -1), {}),
    (ALL, ValueError, "cp_rank must be below cp_size = 2, got 2", (cu(0, 8), 2, 2), {}),
    (ALL, TypeError, "total must be a host integer, got torch.int64 []", (cu(0, 8), 2, 0), {"total": torch.tensor(8)}),
    (ALL, ValueError, "total must be at least 0, got -8", (cu(0, 8), 2, 0), {"total": -8}),
    (
        ALL,
        ValueError,
        "total must be below 2**31 (bounds are int32), got 2147483648",
        (cu(0, 8), 2, 0),
        {"total": 2**31},
    ),
    (ALL, ValueError, "total must divide by cp_size = 4, got 18", (cu(0, 16), 4, 0), {"total": 18}),
    (
        ALL,
        ValueError,
        "total must be at least the 16 rows that cu_seqlens names, got 12",
        (cu(0, 16), 4, 0),
        {"total": 12},
    ),
    (
        ALL,
        ValueError,
        "total must be at least the 16 rows that cu_seqlens_padded names, got 12",
        (cu(0, 9), 4, 0),
        {"total": 12, "cu_seqlens_padded": cu(0, 16)},
    ),
    (ALL, ValueError, "cu_seqlens must start at 0, got 8", (cu(8, 16), 2, 0), {}),
    (ALL, ValueError, "cu_seqlens must not decrease, got 8 after 16 at entry 2", (cu(0, 16, 8), 2, 0), {"total": 16}),
    (
        ALL,
        ValueError,
        "cu_seqlens_padded must leave room for each sequence of cu_seqlens, got 8 rows for the 9 of sequence 1",
        (cu(0, 4, 13), 2, 0),
        {"cu_seqlens_padded": cu(0, 8, 16)},
    ),
    (
        ALL,
        ValueError,
        "the last entry of cu_seqlens must be below 2**31 (bounds are int32), got 2147483648",
        (cu(0, 2**31, dtype=torch.int64), 2, 0),
        {},
    ),
    (
        (zigzag_cp, build),
        ValueError,
        "the lengths in cu_seqlens must divide by 2 * cp_size = 8, got 12 for sequence 1",
        (cu(0, 8, 20), 4, 0),
        {},
    ),
    (
        (zigzag_cp, build),
        ValueError,
        "the lengths in cu_seqlens_padded must divide by 2 * cp_size = 4, got 6 for sequence 0",
        (cu(0, 4, 8), 2, 0),
        {"cu_seqlens_padded": cu(0, 6, 10)},
    ),
    (
        (contiguous_cp,),
        ValueError,
        "the rows that cu_seqlens names must divide by cp_size = 4 where total is not given, got 21",
        (cu(0, 8, 21), 4, 0),
        {},
    ),
    (
        (build,),
        ValueError,
        "total + total // (2 * cp_size) must be below 2**31 (bounds are int32), got 2500000000",
        (cu(0), 2, 0),
        {"total": 2 * 10**9},
    ),
]


@pytest.mark.parametrize(
    ("function", "error", "message", "arguments", "more"),
    [(function, *rest) for functions, *rest in REFUSALS for function in functions],
)
def test_refusals(function, error, message, arguments, more):
    name = "PackedCPLayout.build" if function == build else function.__name__
    with pytest.raises(error, match="^" + re.escape(f"{name}: {message}") + "$"):
        function(*arguments, **more)


SMALL = build(cu(0, 8), 2, 0)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            TypeError,
            "to_global: indices must be an int32 or int64 tensor of shape [..., K], got torch.float32 [2]",
            lambda: SMALL.to_global(torch.zeros(2)),
        ),
        (
            ValueError,
            "to_global: indices must be an int32 or int64 tensor of shape [..., K], got torch.int32 []",
            lambda: SMALL.to_global(cu(0)[0]),
        ),
        (
            ValueError,
            "to_global: indices must be on cpu, got meta",
            lambda: SMALL.to_global(cu(0, device="meta")),
        ),
        (
            TypeError,
            "segment_bounds: starts must be an int32 or int64 tensor of shape [T], got NoneType",
            lambda: SMALL.segment_bounds(None, cu(0)),
        ),
        (
            ValueError,
            "segment_bounds: ends must be an int32 or int64 tensor of shape [T] with T = 2, got torch.int32 [1]",
            lambda: SMALL.segment_bounds(cu(0, 0), cu(0)),
        ),
    ],
)
def test_refusals_of_methods(error, message, call):
    with pytest.raises(error, match="^PackedCPLayout." + re.escape(message)):
        call()


@pytest.mark.parametrize("cu_seqlens", [[0, 7], [0, 5, 3, 30], [4, 9, 1], [0, -9, 2], [0, 2**30]], ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_lengths_that_nobody_could_check_name_no_row_outside_the_pack(cp_size, cu_seqlens, monkeypatch):
    """On CUDA and while tracing values are not read: wrong ones give wrong layouts, never an access out of bounds."""
    monkeypatch.setattr(_checks, "readable", lambda x, validate: False)
    zigzag = zigzag_cp(torch.tensor(cu_seqlens), cp_size, cp_size - 1, total=8)
    source = build(torch.tensor(cu_seqlens), cp_size, cp_size - 1, total=8).source_indices
    for rows in (zigzag.rows, zigzag.gather_order, zigzag.gather_inverse, source):
        assert ((rows >= 0) & (rows < 8)).all()


def test_sizes_are_refused_under_compile_too():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: zigzag_cp(x, 4, 1, total=18), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"total must divide by cp_size = 4, got 18"):
        compiled(cu(0, 16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_segment_bounds_of_rows_that_see_everything(dtype):
    """Bounds as far out as their dtype reaches mean the whole segment."""
    layout = PackedCPLayout.build(torch.tensor([0, 8, 16]), 2, 1)
    starts, ends = torch.full((8,), torch.iinfo(dtype).min, dtype=dtype), torch.full((8,), torch.iinfo(dtype).max)
    starts, ends = layout.segment_bounds(starts, ends.to(dtype))
    segment = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert torch.equal(starts, layout.segment_cu_k[segment])
    assert torch.equal(ends, layout.segment_cu_k[segment + 1])


@pytest.mark.parametrize(
    "build", [zigzag_cp, contiguous_cp, PackedCPLayout.build], ids=["zigzag", "contiguous", "build"]
)
def test_sizes_that_are_no_sizes_are_named(build):
    for cp_size in (None, "2", 2.0):
        with pytest.raises(TypeError, match="cp_size must be a host integer, got"):
            build(torch.tensor([0, 8]), cp_size, 0)
    with pytest.raises(ValueError, match="total must be given where cu_seqlens is on meta, got None"):
        build(torch.tensor([0, 8], device="meta"), 2, 0)
    with pytest.raises(TypeError, match=r"cu_seqlens must be .* got torch.int64 that is torch.sparse_coo"):
        build(torch.tensor([0, 8]).to_sparse(), 2, 0)
