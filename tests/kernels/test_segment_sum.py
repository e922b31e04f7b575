"""Rows added up by key on the GPU, in a fixed order."""

import pytest
import torch

import fused

pytestmark = pytest.mark.gpu


def add_by_key(*args):
    from csrc_tilelang import segment_sum

    segment_sum.add_by_key(*args)


def draw(N, S, D, outside=2):
    into, contributions = torch.randn(S, D, device="cuda"), torch.randn(N, D, device="cuda")
    ids = torch.randint(-outside, S + outside, (N,), dtype=torch.int32, device="cuda")
    contributions[(ids < 0) | (ids >= S)] = float("nan")
    return into, contributions, ids


def reference(into, contributions, ids):
    inside = (ids >= 0) & (ids < into.shape[0])
    return into.double().index_add_(0, ids[inside].long(), contributions[inside].double())


@pytest.mark.parametrize(
    "N, S, D",
    [
        (1, 1, 1),
        (1000, 1, 576),
        (1000, 3000, 128),
        (4096, 2, 512),
        (4097, 2, 160),
        (50_000, 40_000, 64),
        (300_000, 5000, 576),
    ],
)
def test_sums(N, S, D, poisoned):
    into, contributions, ids = draw(N, S, D)
    want = reference(into, contributions, ids)
    add_by_key(into, fused.guarded(contributions), fused.guarded(ids))
    fused.assert_close(into, want, "into", 2e-6)


@pytest.mark.parametrize("hot", [1024, 1025, 2048, 123_456])
def test_long_keys(hot, poisoned):
    """A few keys take nearly everything; their pieces begin anywhere."""
    into, contributions, ids = draw(200_000, 50, 96)
    where = torch.randperm(200_000, device="cuda")
    ids[where[:hot]] = 17
    ids[where[-5000:]] = 18
    ids[where[-70_000:-10_000]] = 49
    contributions.nan_to_num_(0.5)
    want = reference(into, contributions, ids)
    add_by_key(into, contributions, ids)
    fused.assert_close(into, want, "into", 2e-6)


def test_a_left_fold_in_order():
    """The bits are those of adding one contribution after the other, however the contributions are cut into calls."""
    into, contributions, ids = draw(40_000, 700, 132)
    want = into.cpu()
    for row, key in zip(contributions.cpu(), ids.tolist(), strict=True):
        if 0 <= key < 700:
            want[key] += row
    for pieces in (1, 3):
        got = into.clone()
        for some, keys in zip(contributions.chunk(pieces), ids.chunk(pieces), strict=True):
            add_by_key(got, some, keys)
        assert torch.equal(got.cpu(), want)


def test_equal_from_run_to_run():
    into, contributions, ids = draw(200_000, 300, 576)
    ids[::3] = 7
    contributions.nan_to_num_(0.5)
    results = [into.clone() for _ in range(4)]
    for result in results:
        add_by_key(result, contributions, ids)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_row_does_not_depend_on_other_keys():
    into, contributions, ids = draw(100_000, 20, 64, outside=0)
    alone, together = into.clone(), into.clone()
    add_by_key(together, contributions, ids)
    ids[ids != 11] = -1
    add_by_key(alone, contributions, ids)
    assert torch.equal(alone[11], together[11])


def test_graph():
    into, contributions, ids = draw(20_000, 300, 576)
    want = into.clone()
    add_by_key(want, contributions, ids)
    got = into.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_by_key(got, contributions, ids)
    graph.replay()
    assert torch.equal(got, want)


def test_nothing_to_add():
    into = torch.randn(5, 8, device="cuda")
    before = into.clone()
    add_by_key(into, into[:0], torch.zeros(0, dtype=torch.int32, device="cuda"))
    add_by_key(into, torch.full_like(into, float("nan")), torch.full((5,), -1, dtype=torch.int32, device="cuda"))
    assert torch.equal(into, before)


def test_more_than_2_31_elements(gpu_memory):
    gpu_memory(30)
    N, D = (1 << 31) // 576 + 1000, 576
    contributions = torch.empty(N, D, device="cuda")
    contributions[:] = (torch.arange(N, device="cuda") % 5)[:, None]
    ids = (torch.arange(N, device="cuda") % 4000).int()
    into = torch.zeros(4000, D, device="cuda")
    add_by_key(into, contributions, ids)
    want = torch.zeros(4000, dtype=torch.float64, device="cuda")
    want.index_add_(0, ids.long(), (torch.arange(N, device="cuda") % 5).double())
    assert torch.equal(into.double(), want[:, None].expand(-1, D))
