import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_ops.layouts import batched_bounds, pack_batch, unpack_batch

few = settings(derandomize=True, deadline=None, max_examples=40)


@few
@given(st.integers(1, 4), st.integers(0, 5), st.lists(st.integers(0, 3), max_size=2), st.booleans())
def test_rows_of_one_sequence_stay_together(batch, length, rest, batch_first):
    shape = (batch, length, *rest) if batch_first else (length, batch, *rest)
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    packed = pack_batch(x, batch_first)
    assert packed.shape == (batch * length, *rest)
    for b in range(batch):
        for s in range(length):
            assert torch.equal(packed[b * length + s], x[b, s] if batch_first else x[s, b])
    back = unpack_batch(packed, batch, batch_first)
    assert back.shape == x.shape and torch.equal(back, x)


def test_what_is_a_view():
    x = torch.randn(3, 4, 5)
    assert pack_batch(x).data_ptr() == x.data_ptr()
    packed = torch.randn(12, 5)
    assert (
        unpack_batch(packed, 3).data_ptr() == unpack_batch(packed, 3, batch_first=False).data_ptr() == packed.data_ptr()
    )
    assert pack_batch(torch.randn(4, 1, 5), batch_first=False).shape == (4, 5)


def test_rows_and_bounds_agree():
    """Every key that a row sees in the pack comes from the row's own sequence, and from nothing behind the row."""
    sequence = pack_batch(torch.arange(3)[None].expand(4, 3), batch_first=False)
    place = pack_batch(torch.arange(4)[:, None].expand(4, 3), batch_first=False)
    starts, ends = batched_bounds(3, 4, 4)
    for row in range(12):
        keys = range(int(starts[row]), int(ends[row]))
        assert [int(sequence[key]) for key in keys] == [int(sequence[row])] * len(keys)
        assert [int(place[key]) for key in keys] == list(range(int(place[row]) + 1))


def test_gradients_pass():
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack_batch(pack_batch(x, False) * 2, 3, False), (x,))


def test_compiles_whole():
    torch._dynamo.reset()
    both = torch.compile(
        lambda x, batch: unpack_batch(pack_batch(x, False), batch), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for batch, length in ((2, 5), (3, 7), (4, 2)):
        x = torch.randn(length, batch, 3)
        assert torch.equal(both(x, batch), x.transpose(0, 1))


@pytest.mark.gpu
def test_no_sync_on_cuda():
    x = torch.randn(4, 3, 2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        both = [unpack_batch(pack_batch(x, first) * 2, x.shape[0 if first else 1], first) for first in (True, False)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(y, x * 2) for y in both)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "pack_batch: x must be a tensor of shape [B, S, ...], got list", lambda: pack_batch([[1]])),
        (
            ValueError,
            "pack_batch: x must have shape [B, S, ...], got torch.float32 [3]",
            lambda: pack_batch(torch.ones(3)),
        ),
        (
            ValueError,
            "pack_batch: x must have shape [S, B, ...], got torch.float32 [3]",
            lambda: pack_batch(torch.ones(3), batch_first=False),
        ),
        (
            TypeError,
            "unpack_batch: x must be a tensor of shape [B*S, ...], got NoneType",
            lambda: unpack_batch(None, 1),
        ),
        (
            ValueError,
            "unpack_batch: x must have shape [B*S, ...], got torch.float32 []",
            lambda: unpack_batch(torch.ones(()), 1),
        ),
        (TypeError, "unpack_batch: batch must be a host integer, got float", lambda: unpack_batch(torch.ones(4), 2.0)),
        (ValueError, "unpack_batch: batch must be at least 1, got 0", lambda: unpack_batch(torch.ones(4), 0)),
        (
            ValueError,
            "unpack_batch: the rows of x must divide by batch = 3, got torch.float32 [4, 2]",
            lambda: unpack_batch(torch.ones(4, 2), 3),
        ),
    ],
)
def test_refusals(error, message, call):
    with pytest.raises(error, match="^" + re.escape(message)):
        call()
