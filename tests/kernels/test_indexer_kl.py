"""dsa::indexer_kl and its backward on the GPU, fused."""

import threading

import pytest
import torch

import dsa_ops
import fused

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")
ops = torch.ops.dsa


def reference(target, scores, indices):
    """kl and the gradient of its sum, in float64."""
    valid = indices >= 0
    target = target.double().where(valid, 0)
    total = target.sum(-1, keepdim=True)
    empty = total < 1e-10
    share = target / total
    log_p = scores.double().where(valid, -INF).where(~empty, 0).log_softmax(-1)
    kl = (share * (share.log() - log_p)).where(share != 0, 0).sum(-1).where(~empty[:, 0], 0)
    return kl, (log_p.exp() - share).where(valid & ~empty, 0)


def draw(T, K, holes=0.1, spread=2.0):
    """Random rows with empty slots anywhere; NaN in them; a few rows without a valid slot, a few with a zero target."""
    indices = torch.randint(0, 1 << 20, (T, K), dtype=torch.int32, device="cuda")
    indices[torch.rand(T, K, device="cuda") < holes] = -1
    indices[torch.rand(T, device="cuda") < holes] = -1
    target, scores = torch.rand(T, K, device="cuda") ** 4, spread * torch.randn(T, K, device="cuda")
    target[torch.rand(T, device="cuda") < holes] = 0
    target[torch.rand(T, K, device="cuda") < holes] = 0
    return target.where(indices >= 0, NAN), scores.where(indices >= 0, NAN), indices


def check(target, scores, indices, kl_tolerance=1e-6, grad_tolerance=1e-6):
    grad_kl = torch.randn(target.shape[0], device="cuda")
    kl, grad = reference(target, scores, indices)
    with fused.fused():
        got_kl = ops.indexer_kl(target, scores, indices)
        got_grad = ops.indexer_kl_backward(grad_kl, target, scores, indices)
    assert got_kl.dtype == got_grad.dtype == torch.float32 and got_kl.is_contiguous() and got_grad.is_contiguous()
    fused.assert_close(got_kl, kl, "kl", kl_tolerance)
    fused.assert_close(got_grad, grad * grad_kl[:, None].double(), "grad_scores", grad_tolerance)
    assert not got_grad[indices < 0].any()
    with fused.unfused():
        fused.assert_close(got_kl, ops.indexer_kl(target, scores, indices), "kl against unfused", 1e-5)
        unfused = ops.indexer_kl_backward(grad_kl, target, scores, indices)
        fused.assert_close(got_grad, unfused, "grad_scores against unfused", 1e-5)


@pytest.mark.parametrize("seed", range(30))
def test_random_sizes(seed, poisoned):
    torch.manual_seed(seed)
    K = int(2 ** (torch.rand(()) * 13.5))
    T = int(torch.randint(1, max(2, 2_000_000 // K), ()))
    K = max(4, K // 4 * 4) if seed % 2 else K
    check(*draw(T, K, holes=[0.0, 0.1, 0.6][seed % 3], spread=[0.3, 2.0, 15.0][seed // 3 % 3]))


@pytest.mark.parametrize("K", [1, 2, 3, 4, 508, 512, 516, 1000, 2044, 2047, 2048, 2052, 8188, 8192, 8196, 20001])
def test_edges_of_the_blocks(K, poisoned):
    check(*draw(33, K))


def test_one_valid_slot_has_nothing_to_learn():
    target, scores, indices = draw(100, 64, holes=0.0)
    indices[:, :] = -1
    indices[torch.arange(100), torch.randint(64, (100,))] = 5
    target.fill_(NAN)[indices >= 0] = torch.rand(100, device="cuda") + 0.1
    with fused.fused():
        assert ops.indexer_kl(target, scores, indices).tolist() == [0] * 100
        assert not ops.indexer_kl_backward(torch.ones(100, device="cuda"), target, scores, indices).any()


@pytest.mark.parametrize("K", [64, 1500, 5000, 61, 9000])
def test_corners_equal_unfused(K):
    T = 16
    target, scores = torch.rand(T, K, device="cuda"), torch.randn(T, K, device="cuda")
    indices = torch.zeros(T, K, dtype=torch.int32, device="cuda")
    scores[0, 2] = -INF
    scores[1] = -INF
    scores[2, 2] = INF
    scores[3, 2] = NAN
    scores[4, 2], target[4, 2] = -INF, 0
    target[5, 2] = NAN
    target[6, 2] = INF
    target[7] = 3e38
    target[8] = 1e-11 / K
    target[9], target[9, 0] = 0, 1.5e-10
    target[10], target[10, 0] = 0, 1
    scores[11] *= 1e30
    scores[12], scores[12, 3] = -200, 0
    target[13] *= 1e38 / K
    target[14], target[14, 1] = 1e-38, 1
    target[15], scores[15] = 1, 2
    indices[:, 5], target[:, 5], scores[:, 5] = -1, NAN, INF
    grad_kl = torch.randn(T, device="cuda")
    grad_kl[8] = NAN
    calls = [lambda: ops.indexer_kl(target, scores, indices)]
    calls.append(lambda: ops.indexer_kl_backward(grad_kl, target, scores, indices))
    for call in calls:
        with fused.fused():
            got = call()
        with fused.unfused():
            want = call()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not got[8].any()


def test_a_small_kl_keeps_its_digits():
    """Where the indexer has nearly learned the target, the unfused sum loses the digits of kl and this one does not."""
    scores = torch.randn(2000, 2048, device="cuda")
    target = (scores.double() + 1e-2 * torch.randn(2000, 2048, device="cuda")).softmax(-1).float()
    indices = torch.zeros(2000, 2048, dtype=torch.int32, device="cuda")
    kl, grad = reference(target, scores, indices)
    with fused.fused():
        fused.assert_close(ops.indexer_kl(target, scores, indices), kl, "kl", 3e-5)
        got = ops.indexer_kl_backward(torch.ones(2000, device="cuda"), target, scores, indices)
    with fused.unfused():
        baseline = ops.indexer_kl_backward(torch.ones(2000, device="cuda"), target, scores, indices)
    fused.assert_as_good(got, baseline, grad, "grad_scores")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("expanded", [False, True])
def test_incoming_gradients_of_any_kind(dtype, expanded):
    target, scores, indices = draw(50, 256)
    grad_kl = (
        torch.randn(1, device="cuda", dtype=dtype).expand(50) if expanded else torch.randn(100, device="cuda")[1::2]
    )
    grad_kl = grad_kl.to(dtype)
    with fused.fused():
        got = ops.indexer_kl_backward(grad_kl, target, scores, indices)
    want = reference(target, scores, indices)[1] * grad_kl.double()[:, None]
    fused.assert_close(got, want, "grad_scores", 1e-6)


def test_nothing_outside_the_tensors_is_read():
    for K in (1, 61, 600, 9001):
        check(*(fused.guarded(x) for x in draw(19, K)))


def test_strides():
    target, scores, indices = draw(40, 300)
    wide = [torch.cat([x, x], 1)[:, 300:] for x in (target, scores, indices)]
    turned = [x.t().contiguous().t() for x in (target, scores, indices)]
    shifted = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in (target, scores, indices)]
    with fused.fused():
        want = ops.indexer_kl(target, scores, indices)
        for inputs in (wide, turned, shifted):
            assert torch.equal(ops.indexer_kl(*inputs), want)
            grad = ops.indexer_kl_backward(want, *inputs)
            assert torch.equal(grad, ops.indexer_kl_backward(want, target, scores, indices))


def test_no_rows():
    nothing = torch.zeros(0, 8, device="cuda")
    with fused.fused():
        assert ops.indexer_kl(nothing, nothing, nothing.int()).shape == (0,)
        assert ops.indexer_kl_backward(nothing[:, 0], nothing, nothing, nothing.int()).shape == (0, 8)


@pytest.mark.parametrize("K", [500, 2048, 2049])
def test_bits_of_a_row_depend_on_it_alone(K):
    target, scores, indices = draw(3000, K)
    with fused.fused():
        kl = ops.indexer_kl(target, scores, indices)
        for _ in range(3):
            assert torch.equal(kl, ops.indexer_kl(target, scores, indices))
        some = slice(1234, 1300)
        assert torch.equal(kl[some], ops.indexer_kl(target[some], scores[some], indices[some]))


def test_more_than_2_31_elements(gpu_memory):
    gpu_memory(60)
    T, K = (1 << 31) // 2048 + 100, 2048
    target, scores = torch.rand(T, K, device="cuda"), torch.zeros(T, K, device="cuda")
    indices = torch.zeros(1, K, dtype=torch.int32, device="cuda").expand(T, K).contiguous()
    scores[:, 0] = torch.arange(T, device="cuda") % 7
    with fused.fused():
        kl = ops.indexer_kl(target, scores, indices)
        grad = ops.indexer_kl_backward(kl, target, scores, indices)
    for rows in (slice(0, 50), slice(T - 150, T)):
        want = reference(target[rows], scores[rows], indices[rows])
        fused.assert_close(kl[rows], want[0], "kl", 1e-6)
        fused.assert_close(grad[rows], want[1] * kl[rows].double()[:, None], "grad_scores", 1e-6)


def test_autograd_and_a_backward_of_the_other_kind():
    target, scores, indices = draw(64, 512)
    grads = []
    for forward, backward in ((fused.fused, fused.unfused), (fused.unfused, fused.fused), (fused.fused, fused.fused)):
        leaf = scores.clone().requires_grad_()
        with forward():
            kl = dsa_ops.indexer_kl(target, leaf, indices)
        with backward():
            kl.sum().backward()
        grads.append(leaf.grad)
    want = reference(target, scores, indices)[1]
    for grad in grads:
        fused.assert_close(grad, want, "grad_scores", 1e-6)


def test_graph_and_side_stream():
    target, scores, indices = draw(500, 1024)
    with fused.fused():
        want = ops.indexer_kl(target, scores, indices)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(ops.indexer_kl(target, scores, indices), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kl = ops.indexer_kl(target, scores, indices)
            grad = ops.indexer_kl_backward(kl, target, scores, indices)
        scores.mul_(0.5)
        graph.replay()
        assert torch.equal(kl, ops.indexer_kl(target, scores, indices))
        assert torch.equal(grad, ops.indexer_kl_backward(kl, target, scores, indices))


def test_compiled_once():
    from csrc_tilelang import indexer_kl, indexer_kl_backward

    widths = dict(heads=8, index_heads=8, head_dim=576, v_dim=512, index_dim=128)
    for module, kernel in ((indexer_kl, indexer_kl.forward), (indexer_kl_backward, indexer_kl_backward.backward)):
        assert module.compile_for(**widths, dtype=torch.bfloat16, device=torch.device("cuda")) is None
        kernels = kernel.function.device_caches[torch.cuda.current_device()][0]
        before = len(kernels)
        for T, K in ((1, 1), (1, 16), (16, 2048), (3, 2044), (5, 36), (7, 4096), (1, 9000), (2, 8193), (32, 1024)):
            inputs = draw(T, K)
            with fused.fused():
                kl = ops.indexer_kl(*inputs)
                ops.indexer_kl_backward(torch.cat([kl, kl])[T:], *inputs)
        assert len(kernels) == before


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    import triton

    from csrc_tilelang import _triton, indexer_kl

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(_triton, "_warned", threading.Event())
    monkeypatch.setattr(indexer_kl, "WHOLE_ROWS", ((256, 4, True, 2),))  # a variant that nothing else compiles
    inputs = draw(9, 200)
    with fused.fused(), pytest.warns(UserWarning, match="TRITON_CACHE_DIR"):
        kl = ops.indexer_kl(*inputs)
    fused.assert_close(kl, reference(*inputs)[0], "kl", 1e-6)


def test_what_triton_cannot_compile(monkeypatch):
    from csrc_tilelang import CompileError, indexer_kl

    monkeypatch.setattr(indexer_kl, "WHOLE_ROWS", ((1000, 4, True, 2),))  # no power of two
    inputs = draw(9, 1000)
    with pytest.raises(CompileError, match="_forward"):
        indexer_kl.launch(*inputs)
