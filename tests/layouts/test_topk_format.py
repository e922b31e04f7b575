"""Forms of a selection against lists, one row at a time."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_ops.layouts import compact_topk, expand_topk, sort_topk_by_index

few = settings(derandomize=True, deadline=None, max_examples=60)
ints = st.sampled_from([torch.int32, torch.int64])
inf = float("inf")


@st.composite
def selections(draw):
    """Rows of ids, the negative ones of several kinds, now and then one id twice."""
    rows, slots = draw(st.integers(0, 4)), draw(st.integers(0, 7))
    row = st.lists(st.integers(-3, 9), min_size=slots, max_size=slots)
    return draw(st.lists(row, min_size=rows, max_size=rows)), slots


def tensor_of(rows, slots, dtype):
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), slots)


@few
@given(st.data(), selections(), ints, st.booleans())
def test_sort(data, selection, dtype, with_mask):
    rows, slots = selection
    indices = tensor_of(rows, slots, dtype)
    scores = torch.randn(indices.shape, dtype=torch.float64)
    scores[torch.rand(indices.shape) < 0.2] = -inf
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows) * slots, max_size=len(rows) * slots)))
    mask = mask.bool().reshape(indices.shape) if with_mask else None
    ids, values, valid = sort_topk_by_index(indices, scores, mask)
    assert ids.dtype == dtype and values.dtype == torch.float64 and valid.dtype == torch.bool
    for t, row in enumerate(rows):
        kept = [j for j in range(slots) if row[j] >= 0 and (mask is None or mask[t, j])]
        kept.sort(key=lambda j: row[j])  # stable, as the function
        empty = slots - len(kept)
        assert ids[t].tolist() == [row[j] for j in kept] + [-1] * empty
        assert values[t].tolist() == [float(scores[t, j]) for j in kept] + [-inf] * empty
        assert valid[t].tolist() == [True] * len(kept) + [False] * empty


def test_a_valid_key_may_score_minus_infinity():
    ids, scores, valid = sort_topk_by_index(torch.tensor([[4, -1, 2]]), torch.tensor([[-inf, 5.0, 1.0]]))
    assert ids.tolist() == [[2, 4, -1]] and valid.tolist() == [[True, True, False]]
    assert scores.tolist() == [[1.0, -inf, -inf]]


def test_sort_does_not_write_to_its_inputs_and_takes_any_rank():
    indices, scores = torch.tensor([[[3, 1], [0, 2]]], dtype=torch.int32), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    before = indices.clone(), scores.clone()
    ids, values, _ = sort_topk_by_index(indices, scores)
    assert torch.equal(indices, before[0]) and torch.equal(scores, before[1])
    assert ids.tolist() == [[[1, 3], [0, 2]]] and values.tolist() == [[[2.0, 1.0], [3.0, 4.0]]]
    ids, values, _ = sort_topk_by_index(indices[0, 0], scores[0, 0])
    assert ids.tolist() == [1, 3]


def test_sort_carries_gradients_of_valid_slots_alone():
    indices = torch.tensor([[5, -1, 3], [-1, -1, -1]])
    scores = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    _, values, valid = sort_topk_by_index(indices, scores)
    grad = torch.tensor([[1.0, 2.0, float("nan")], [float("nan")] * 3], dtype=torch.float64)
    values.backward(grad)
    assert scores.grad.tolist() == [[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert torch.autograd.gradcheck(lambda s: sort_topk_by_index(indices, s)[1].masked_fill(~valid, 0), (scores,))


@few
@given(selections(), ints)
def test_compact(selection, dtype):
    rows, slots = selection
    ids, length = compact_topk(tensor_of(rows, slots, dtype))
    assert ids.dtype == dtype and length.dtype == torch.int32 and length.shape == (len(rows),)
    for t, row in enumerate(rows):
        kept = [i for i in row if i >= 0]
        assert ids[t].tolist() == kept + [-1] * (slots - len(kept))
        assert int(length[t]) == len(kept)


@few
@given(st.data(), selections(), ints, ints)
def test_expand(data, selection, dtype, length_dtype):
    rows, slots = selection
    lengths = data.draw(st.lists(st.integers(-2, slots + 2), min_size=len(rows), max_size=len(rows)))
    got = expand_topk(tensor_of(rows, slots, dtype), torch.tensor(lengths, dtype=length_dtype))
    assert got.dtype == dtype
    for t, row in enumerate(rows):
        assert got[t].tolist() == [i if j < lengths[t] and i >= 0 else -1 for j, i in enumerate(row)]


@few
@given(selections())
def test_expand_reverses_compact(selection):
    rows, slots = selection
    ids, length = compact_topk(tensor_of(rows, slots, torch.int32))
    rubbish = torch.where(ids < 0, 7, ids)
    assert torch.equal(expand_topk(rubbish, length), ids)


def test_batched_forms():
    indices = torch.tensor([[[-1, 4], [2, 3]], [[-1, -1], [5, -1]]], dtype=torch.int32)
    ids, length = compact_topk(indices)
    assert ids.tolist() == [[[4, -1], [2, 3]], [[-1, -1], [5, -1]]] and length.tolist() == [[1, 2], [0, 1]]
    assert torch.equal(expand_topk(ids, length), ids)


def test_compiles_whole():
    def forms(indices, scores, length):
        return (*sort_topk_by_index(indices, scores), *compact_topk(indices), expand_topk(indices, length))

    torch._dynamo.reset()
    compiled = torch.compile(forms, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, slots in ((3, 5), (4, 9)):
        indices = torch.randint(-2, 20, (rows, slots), dtype=torch.int32)
        arguments = indices, torch.randn(rows, slots), torch.randint(0, slots, (rows,), dtype=torch.int32)
        for got, want in zip(compiled(*arguments), forms(*arguments), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_no_sync_on_cuda():
    indices = torch.randint(-2, 20, (50, 9), dtype=torch.int32)
    scores, length = torch.randn(50, 9), torch.randint(-1, 11, (50,))
    arguments = [x.cuda() for x in (indices, scores, length)]

    def forms(indices, scores, length):
        mask = scores > 0
        sort = sort_topk_by_index(indices, scores) + sort_topk_by_index(indices, scores, mask)
        return (*sort, *compact_topk(indices), expand_topk(indices, length))

    torch.cuda.set_sync_debug_mode("error")
    try:
        got = forms(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, want in zip(got, forms(indices, scores, length), strict=True):
        assert x.device.type == "cuda" and torch.equal(x.cpu(), want)


ids = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            TypeError,
            "sort_topk_by_index: indices must be an int32 or int64 tensor of shape [..., K], got torch.float32 [2, 3]",
            lambda: sort_topk_by_index(ids.float(), ids.float()),
        ),
        (TypeError, "sort_topk_by_index: scores must be a tensor, got NoneType", lambda: sort_topk_by_index(ids, None)),
        (
            TypeError,
            "sort_topk_by_index: scores must be floating point, got torch.int32 [2, 3]",
            lambda: sort_topk_by_index(ids, ids),
        ),
        (
            ValueError,
            "sort_topk_by_index: scores must have shape [2, 3] like indices, got torch.float32 [2]",
            lambda: sort_topk_by_index(ids, torch.zeros(2)),
        ),
        (
            ValueError,
            "sort_topk_by_index: scores must be on cpu like indices, got meta",
            lambda: sort_topk_by_index(ids, torch.zeros(2, 3, device="meta")),
        ),
        (
            TypeError,
            "sort_topk_by_index: valid must be torch.bool, got torch.int32 [2, 3]",
            lambda: sort_topk_by_index(ids, ids.float(), ids),
        ),
        (
            ValueError,
            "sort_topk_by_index: valid must have shape [2, 3] like indices, got torch.bool [2, 1]",
            lambda: sort_topk_by_index(ids, ids.float(), ids.bool()[:, :1]),
        ),
        (
            TypeError,
            "compact_topk: indices must be an int32 or int64 tensor of shape [..., K], got tuple",
            lambda: compact_topk((1, 2)),
        ),
        (
            ValueError,
            "compact_topk: indices must be an int32 or int64 tensor of shape [..., K], got torch.int32 []",
            lambda: compact_topk(ids.sum(dtype=torch.int32)),
        ),
        (TypeError, "expand_topk: topk_length must be a tensor, got int", lambda: expand_topk(ids, 3)),
        (
            TypeError,
            "expand_topk: topk_length must be int32 or int64, got torch.float32 [2]",
            lambda: expand_topk(ids, torch.ones(2)),
        ),
        (
            ValueError,
            "expand_topk: topk_length must have shape [2] like indices, got torch.int32 [3]",
            lambda: expand_topk(ids, ids[0]),
        ),
        (
            ValueError,
            "expand_topk: topk_length must be on cpu like indices, got meta",
            lambda: expand_topk(ids, torch.zeros(2, dtype=torch.int32, device="meta")),
        ),
    ],
)
def test_refusals(error, message, call):
    with pytest.raises(error, match="^" + re.escape(message)):
        call()
