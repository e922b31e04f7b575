"""More than 2**31 elements, and memory: what other implementations got wrong. Sizes for one GPU of 139 GiB."""

import pytest
import torch

import calls
import steps

pytestmark = pytest.mark.gpu
GIB = 1 << 30


def need(gib):
    """Skip where this much device memory is not free."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free device memory, found {free / GIB:.0f}")


def half(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def everything(rows, keys):
    return steps.bounds([0] * rows, [keys] * rows, "cuda").values()


def test_more_scores_than_2_to_the_31_over_heads_rows_and_keys():
    """ml-explore/mlx-lm#1454, jundot/omlx#2502: the tail of the score tensor read as zero, and top-k became "the last
    2048 keys"."""
    need(8)
    T, S, Hi = 2048, 32768 + 64, 32
    q, k = torch.randn(T, Hi, 32, device="cuda"), torch.randn(S, 32, device="cuda") * 0.01
    weights = torch.rand(T, Hi, device="cuda")
    assert T * S * Hi > 2**31
    winners = [3, S - 2]
    k[winners] = q[-1].mul(weights[-1][:, None]).sum(0) * 50
    indices, scores = calls.op("indexer_topk")(q, k, weights, *everything(T, S), 4)
    assert set(winners) <= set(indices[-1].tolist())
    want = torch.einsum("h,hs->s", weights[-1], (q[-1] @ k.t()).relu()).topk(4).values
    calls.assert_near(scores[-1].sort(descending=True).values, want, 1e-4)


def test_more_pairs_of_row_and_key_than_2_to_the_31():
    """fla-org/flash-linear-attention#965, state-spaces/mamba#1015, ROCm/aiter#4028, meta-pytorch/MSLK#257: row * stride
    wrapped before it was widened; rows past the limit were dropped or plausible nonsense."""
    need(8)
    T, S = 16384 + 16, 131072
    assert T * S > 2**31
    q, k, weights = half(T, 1, 32), half(S, 32), torch.ones(T, 1, device="cuda")
    starts, ends = everything(T, S)
    starts[-8:] = S - 8  # the last sequence begins past the limit
    indices, scores = calls.op("indexer_topk")(q, k, weights, starts, ends, 16)
    rows = slice(T - 16, T)
    want = calls.op("indexer_topk")(q[rows].clone(), k, weights[rows].clone(), starts[rows], ends[rows], 16)
    assert torch.equal(indices[rows], want[0]) and torch.equal(scores[rows], want[1])
    assert (indices[-8:, :8] >= S - 8).all() and (indices[-8:, 8:] == -1).all()


def test_queries_of_more_than_2_to_the_31_elements():
    """fla-org/flash-linear-attention#1216, ROCm/aiter#4028: the offset of a row, heads * width * row, is past 32 bits;
    forward and backward, in q, out and their gradients."""
    need(64)
    T, H, D, Dv, K = 29200, 128, 576, 512, 16
    assert T * H * D > 2**31
    kv = half(256, D)
    q = half(16, H, D).repeat(T // 16, 1, 1)
    indices = torch.randint(0, 256, (16, K), device="cuda", dtype=torch.int32).repeat(T // 16, 1)
    rows = slice(T - 16, T)

    def run(q, indices):
        leaf = q.requires_grad_()
        out, lse = calls.op("sparse_mla")(leaf, kv, indices, D**-0.5, Dv)
        out.backward(torch.ones((), device="cuda", dtype=out.dtype).expand(out.shape))
        return out.detach()[-16:].clone(), lse.detach()[-16:].clone(), leaf.grad[-16:].clone()

    large = run(q, indices)
    small = run(q.detach()[rows].clone(), indices[rows].clone())
    for a, b in zip(large, small, strict=True):
        assert torch.equal(a, b) and a.any()


@pytest.mark.parametrize("name", ["sparse_mla", "indexer_scores"])
def test_keys_of_more_than_2_to_the_31_elements(name):
    """deepseek-ai/FlashMLA#109, NVIDIA/cudnn-frontend#676: id * stride in 32 bits; and the gradient that is added up
    behind it."""
    need(64)
    S, D = (1 << 22) + 64, 576
    assert S * D > 2**31
    keys = torch.empty(S, D, device="cuda", dtype=torch.bfloat16).normal_()
    ids = torch.tensor([[0, 1, S - 1], [S - 2, 5, S - 3], [S // 2, -1, S - 1]], device="cuda", dtype=torch.int32)
    used, local = ids.unique(return_inverse=True)
    used = used[1:].long()
    local = (local - 1).int()  # -1 stays -1

    def run(keys, ids):
        keys = keys.requires_grad_()
        torch.manual_seed(0)
        if name == "sparse_mla":
            output = calls.op(name)(half(3, 4, D), keys, ids, D**-0.5, 512)[0]
        else:
            output = calls.op(name)(half(3, 4, D), keys, torch.ones(3, 4, device="cuda"), ids)
        output.backward(torch.ones_like(output))
        return output.detach(), keys.grad

    output, grad = run(keys, ids)
    want, want_grad = run(keys.detach()[used].clone(), local)
    assert torch.equal(output, want)
    calls.assert_near(grad[used], want_grad, 1e-2)
    grad[used] = 0
    assert not any(part.any() for part in grad.split(1 << 20))


def test_lists_of_more_than_2_to_the_31_slots():
    """ROCm/aiter#4028, state-spaces/mamba#1015: rows * slots past 32 bits, in the KL and in its gradient."""
    need(64)
    T, K = (1 << 20) + 8, 2048
    assert T * K > 2**31
    scores = torch.empty(T, K, device="cuda").normal_().requires_grad_()
    target = torch.rand(1, K, device="cuda").expand(T, K)
    ids = torch.arange(K, device="cuda", dtype=torch.int32).expand(T, K)
    kl = calls.op("indexer_kl")(target, scores, ids)
    kl.backward(torch.ones((), device="cuda").expand(T))
    few = scores.detach()[-8:].clone().requires_grad_()
    want = calls.op("indexer_kl")(target[-8:], few, ids[-8:])
    want.backward(torch.ones_like(want))
    assert torch.equal(kl[-8:], want) and torch.equal(scores.grad[-8:], few.grad)
    del scores, kl


DENSE = {  # bytes of the form that holds everything at once: products [T, Hi, S], or gathered keys [T, K, D]
    "indexer_topk": (dict(T=2048, S=16384, Hi=64, Di=32, K=64), 2048 * 16384 * 64 * 4),
    "indexer_scores": (dict(T=4096, S=4096, Hi=8, Di=128, K=4096), 4096 * 4096 * 128 * 4),
    "sparse_mla": (dict(T=4096, S=4096, H=8, D=576, Dv=512, K=1024), 4096 * 1024 * 576 * 4),
    "attention_target": (dict(T=4096, S=4096, H=8, D=576, K=1024), 4096 * 1024 * 576 * 4),
    "dense_indexer_kl": (dict(T=2048, S=16384, H=8, D=64, Hi=64, Di=32), 2048 * 16384 * 64 * 4),
}


@pytest.mark.parametrize("name", DENSE)
def test_memory_is_far_below_the_dense_form(name):
    """huggingface/transformers#48788, meta-pytorch/attention-gym#449: [rows, heads, keys] in float32 is 64 GiB at 4096
    rows and 128k keys; forward and backward."""
    sizes, dense = DENSE[name]
    need(24)
    T, S, H, D = (sizes.get(n, 1) for n in ("T", "S", "H", "D"))
    K, Hi, Di = (sizes.get(n, 1) for n in ("K", "Hi", "Di"))
    index = [
        torch.randn(T, Hi, Di, device="cuda"),
        torch.randn(S, Di, device="cuda"),
        torch.randn(T, Hi, device="cuda"),
    ]
    q, kv, lse = torch.randn(T, H, D, device="cuda"), torch.randn(S, D, device="cuda"), torch.zeros(T, H, device="cuda")
    ids = torch.randint(0, S, (T, K), device="cuda", dtype=torch.int32)
    leaves, args = {
        "indexer_topk": (index, (*index, *everything(T, S), K)),
        "indexer_scores": (index, (*index, ids)),
        "sparse_mla": ([q, kv], (q, kv, ids, 0.04, 512)),
        "attention_target": ([], (q, kv, lse, ids, 0.04)),
        "dense_indexer_kl": (index, (*index, q, kv, lse + 99, *everything(T, S), 0.04, torch.ones(T, device="cuda"))),
    }[name]
    for x in leaves:
        x.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = calls.as_tuple(calls.op(name)(*args))
    through = [x for x in outputs if x.requires_grad]
    if through:
        torch.autograd.grad(through, leaves, [torch.ones_like(x) for x in through])
    assert torch.cuda.max_memory_allocated() - before < dense / 2
