"""Backward passes: what other implementations got wrong. Values against the oracle: ops/test_values.py."""

import itertools
import math

import pytest
import torch

import calls
import inputs
import steps
from inputs import DIFFERENTIABLE, OPS
from steps import ids


@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla"])
def test_every_one_of_many_additions_to_a_key_arrives(name, device):
    """tile-ai/tilelang#1588, tile-ai/tilelang#3159: dKV was wrong where many rows add to one key at once."""
    steps.check(name, steps.arguments(name, ids([[0, 3, 5, 8]], 64), device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla"])
def test_many_additions_to_a_key_are_not_rounded_one_by_one(name, dtype, device):
    """facebookresearch/xformers#467, NVIDIA/TransformerEngine#821: a gradient added up in half precision stands still
    once it is 256 times the next addend. 2048 equal rows; one rounding at the end is allowed."""
    rows = 2048
    args = steps.arguments(name, ids([[2]], 1), device=device, dtype=dtype, S=3, sink=None, D=16, Dv=16)
    key = steps.KEYS[name]

    def gradient(times):
        many = {
            n: x.detach().repeat(times, *[1] * (x.dim() - 1))
            if n in calls.ROWS and n != "k" and isinstance(x, torch.Tensor)
            else x
            for n, x in args.items()
        }
        outputs = calls.run(name, many)
        incoming = {n: torch.full_like(x, 0.37) for n, x in outputs.items()}
        return calls.gradients(name, many, incoming, outputs)[key][2].double()

    calls.assert_near(gradient(rows) / rows, gradient(1), calls.TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [16, 32, 33])
@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla"])
def test_neighbouring_rows_keep_their_own_lists(name, heads, device):
    """NVIDIA/cudnn-frontend#384, NVIDIA/cudnn-frontend#385: with 32 heads two rows shared a tile and its list."""
    lists = torch.stack([(torch.arange(8) * 2 + row) % 20 for row in range(6)]).int()
    steps.check(name, steps.arguments(name, lists, device=device, S=20, H=heads, Hi=heads))


def test_a_head_does_not_depend_on_how_many_there_are(device):
    """kvcache-ai/sglang#70, sgl-project/sglang#38370: the head offset was the width of another tile."""
    indices = ids([[0, 4, 9], [1, 2, 5]])
    args = steps.arguments("sparse_mla", indices, device=device, S=10, H=48)
    incoming = calls.incoming("sparse_mla", calls.run("sparse_mla", args))
    whole = steps.run("sparse_mla", args, incoming)
    for h in (0, 15, 16, 31, 32, 47):
        one = {**args, "q": args["q"][:, h : h + 1], "sink": args["sink"][h : h + 1]}
        found = steps.run("sparse_mla", one, {n: g[:, h : h + 1] for n, g in incoming.items()})
        for n in ("out", "lse", "grad_q"):
            calls.assert_near(found[n], whole[n][:, h : h + 1], 1e-5, n)
        calls.assert_near(found["grad_sink"], whole["grad_sink"][h : h + 1], 1e-5)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_subset_of_inputs_may_want_gradients(name, device):
    """areal-project/AReaL#1373, pytorch/pytorch#137219, PaddlePaddle/PaddleFleet#1261, Dao-AILab/flash-attention#2816:
    a backward that returns another number of gradients than there are inputs fails in the case that nobody ran."""
    args = steps.arguments(name, device=device, dtype=torch.float64)
    outputs = calls.run(name, args)
    incoming = calls.incoming(name, outputs)
    want = calls.gradients(name, args, incoming, outputs)
    for wanted in itertools.product([True, False], repeat=len(want)):
        leaves = {n: args[n].detach().clone().requires_grad_(w) for n, w in zip(want, wanted, strict=True)}
        found = calls.run(name, {**args, **leaves})
        through = [n for n in incoming if found[n].requires_grad]
        assert bool(through) == any(wanted)
        if through:
            torch.autograd.backward([found[n] for n in through], [incoming[n] for n in through])
        for (n, leaf), w in zip(leaves.items(), wanted, strict=True):
            assert (leaf.grad is not None) == w, n
            if w:
                calls.assert_near(leaf.grad, want[n], what=n)


@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla"])
def test_deterministic_mode_holds_where_all_rows_meet_on_a_few_keys(name, device):
    """PaddlePaddle/PaddleFleet#1776, radixark/miles#3155, NVIDIA/cudnn-frontend#684: the switch governs PyTorch's own
    ops; kernels with atomics go on differing from run to run."""
    lists = torch.randint(-1, 8, (256, 64), dtype=torch.int32)
    args = steps.arguments(name, lists, device=device, S=64, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        incoming = calls.incoming(name, calls.run(name, args))
        first, second = (steps.run(name, args, incoming) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    calls.assert_all_equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256, 384, 512, 1024])
def test_dq_has_the_same_bits_at_every_width(width):
    """AMD-AGI/Primus-Turbo#417: a race in the kernel for one width of the list (384)."""
    lists = torch.randint(0, 2048, (64, width), dtype=torch.int32)
    args = {
        "q": torch.randn(64, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True),
        "kv": torch.randn(2048, 64, device="cuda", dtype=torch.bfloat16),
    }
    args |= {"indices": lists.cuda(), "softmax_scale": 0.125, "d_v": 48, "sink": None, "topk_length": None}
    incoming = calls.incoming("sparse_mla", calls.run("sparse_mla", args))
    first = steps.run("sparse_mla", args, incoming)
    for _ in range(19):
        calls.assert_all_equal(steps.run("sparse_mla", args, incoming), first)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla"])
def test_lists_filled_to_any_point(name, count, device):
    """hao-ai-lab/FastVideo#925: the backward masked with another tile size than the forward; padding counted."""
    lists = torch.full((2, 128), -1, dtype=torch.int32)
    lists[:, :count] = torch.stack([torch.randperm(140)[:count] for _ in range(2)]).int()
    steps.check(name, steps.arguments(name, lists, device=device, S=140))


@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla", "attention_target"])
def test_an_id_listed_twice_counts_twice_in_both_directions(name, device):
    """skylight-org/skylight-research#86: a scatter into a mask counts it once, a gather twice; forward and backward
    came from one of each."""
    args = steps.arguments(name, ids([[2, 2, 5], [1, 1, 1]]), device=device, S=6, dtype=torch.float64)
    steps.check(name, args)
    if name != "sparse_mla":
        return
    slots = args["kv"].detach()[[2, 2, 5]]
    logits = 0.4 * args["q"].detach()[0] @ slots.T
    p = torch.cat([logits, args["sink"].detach()[:, None]], 1).softmax(-1)[:, :3]
    calls.assert_near(calls.run(name, args)["out"][0], p @ slots[:, :5])


def test_with_every_visible_key_selected_it_is_causal_attention(device):
    """Dao-AILab/flash-attention#2623: forward exact, backward wrong for one head width, unseen by forward tests."""
    T, H, D, Dv = 40, 4, 64, 48
    lists = torch.where(torch.arange(T) <= torch.arange(T)[:, None], torch.arange(T), -1).int()
    args = steps.arguments("sparse_mla", lists, device=device, S=T, H=H, D=D, Dv=Dv, sink=None, dtype=torch.float64)
    args["softmax_scale"] = 0.1
    found = steps.run(
        "sparse_mla", args, {"out": (incoming := torch.randn(T, H, Dv, dtype=torch.float64, device=device))}
    )
    q, kv = (args[n].detach().clone().requires_grad_() for n in ("q", "kv"))
    k = kv[None].expand(H, T, D)
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, k[..., :Dv], is_causal=True, scale=0.1)
    out = out.transpose(0, 1)
    out.backward(incoming)
    for n, want in (("out", out), ("grad_q", q.grad), ("grad_kv", kv.grad)):
        calls.assert_near(found[n], want, what=n)


# ---- log-sum-exp and sinks


@pytest.mark.parametrize("sink", [True, False])
def test_a_loss_on_the_lse_reaches_its_inputs(sink, device):
    """Dao-AILab/flash-attention#1817, ByteDance-Seed/VeOmni#1021: lse came back as differentiable, and its gradient
    was dropped. pytorch/pytorch#136232: NaN where a loss holds out * exp(lse), all of attention unnormalised."""
    lists = ids([[0, 1, 2], [3, 4, -1], [5, -1, -1]], 2)
    changes = {} if sink else {"sink": None}
    args = steps.arguments("sparse_mla", lists, device=device, dtype=torch.float64, **changes)
    outputs = calls.run("sparse_mla", args)
    only = {"lse": torch.randn_like(outputs["lse"])}
    got = calls.gradients("sparse_mla", args, only, outputs)
    calls.assert_all_near(got, calls.reference_gradients("sparse_mla", args, only))
    assert got["q"].any() and got["kv"].any() and (not sink or not got["sink"].any())

    if sink:
        return
    outputs = calls.run("sparse_mla", args)
    both = outputs["out"] * outputs["lse"].exp()[..., None]
    found = torch.autograd.grad(both.sum(), (args["q"], args["kv"]))
    q, kv = (args[n].detach().clone().requires_grad_() for n in ("q", "kv"))
    rows = [
        (0.4 * q[t] @ kv[s].T).exp() @ kv[s, :5]
        for t, row in enumerate(lists)
        for s in [row[row >= 0].long().to(device)]
    ]
    want = torch.autograd.grad(torch.stack(rows).sum(), (q, kv))
    for a, b in zip(found, want, strict=True):
        calls.assert_near(a, b)


def test_the_lse_joins_two_halves_of_the_keys(device):
    """zhuzilin/ring-flash-attention#30, vllm-project/vllm#46076, flashinfer-ai/flashinfer#5203: parts of attention
    are joined by their lse, so it must be a natural logarithm, -inf (and not NaN or +inf) without keys, and differ by
    any amount without overflow."""
    T, S = 6, 20
    args = steps.arguments("sparse_mla", ids([list(range(S))], T), device=device, S=S, dtype=torch.float64, sink=None)
    with torch.no_grad():
        args["kv"][: S // 2] *= 200  # exp of the difference overflows even float64
    first, second = torch.arange(S // 2).int().repeat(T, 1), torch.arange(S // 2, S).int().repeat(T, 1)
    first[1], second[2] = -1, -1  # a half without keys
    first[3], second[3] = -1, -1  # and a row without any
    whole = {**args, "indices": torch.cat([first, second], 1).to(device)}
    incoming = calls.incoming("sparse_mla", calls.run("sparse_mla", whole))
    want = steps.run("sparse_mla", whole, incoming)
    parts = [calls.run("sparse_mla", {**args, "indices": half.to(device)}) for half in (first, second)]
    lse = torch.stack([p["lse"] for p in parts])
    assert (lse[0, 1] == -torch.inf).all() and (lse[1, 2] == -torch.inf).all() and (lse[:, 3] == -torch.inf).all()
    some = torch.ones(T, dtype=torch.bool, device=device)
    some[3] = False
    share = lse[:, some].softmax(0)
    out = (torch.stack([p["out"] for p in parts])[:, some] * share[..., None]).sum(0)
    calls.assert_near(out, want["out"][some], 1e-9)
    calls.assert_near(lse[:, some].logsumexp(0), want["lse"][some], 1e-9)
    joined = [out, lse[:, some].logsumexp(0)]
    grads = torch.autograd.grad(joined, (args["q"], args["kv"]), [incoming[n][some] for n in ("out", "lse")])
    calls.assert_near(grads[0][some], want["grad_q"][some], 1e-9)
    calls.assert_near(grads[1], want["grad_kv"], 1e-9)


@pytest.mark.parametrize("widths", [(576, 512), (512, 512), (192, 128)])
def test_the_sink_is_in_the_denominator_for_every_width_and_length(widths, device):
    """NVIDIA/cudnn-frontend#421: for D 576 and Dv 512 the backward left the sink out of the denominator and d_sink at
    0; wrong most where topk_length is short."""
    D, Dv = widths
    lists = torch.randint(0, 90, (7, 80), dtype=torch.int32)
    length = torch.tensor([0, 1, 2, 63, 64, 65, 80], dtype=torch.int32)
    args = steps.arguments("sparse_mla", lists, device=device, S=90, D=D, Dv=Dv, H=2, topk_length=length)
    args["softmax_scale"] = D**-0.5
    with torch.no_grad():
        args["sink"] += 3
    found = steps.check("sparse_mla", args)
    assert found["grad_sink"].abs().min() > 1e-3


@pytest.mark.parametrize("scale", [0.001, 5.0, -0.4])
def test_the_scale_multiplies_products_and_not_the_sink(scale, device):
    """tenstorrent/tt-metal#55337: the scale was folded into the exponent and shrank mask and sink with it."""
    args = steps.arguments("sparse_mla", ids([[0, 1, 2, -1]], 5), device=device, dtype=torch.float64)
    steps.check("sparse_mla", {**args, "softmax_scale": scale})


@pytest.mark.parametrize("sink", [3e38, 1e30, 300.0, -300.0, -3e38, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_finite_sinks(sink, dtype, device):
    """flashinfer-ai/flashinfer#5119: sink * log2(e) overflowed, and inf - inf is NaN."""
    lists = ids([[0, 1, 2, -1], [-1, -1, -1, -1], [4, 4, 1, 0]])
    args = steps.arguments("sparse_mla", lists, device=device, dtype=dtype, sink=torch.full((3,), sink))
    steps.check("sparse_mla", args, gradient_tolerance=None if dtype == torch.float32 else 3e-2)


# ---- scale and size of the logits


@pytest.mark.parametrize("scale", [-0.4, 0.0, -30.0])
@pytest.mark.parametrize("name", ["sparse_mla", "attention_target", "dense_indexer_kl"])
def test_a_scale_that_is_not_positive(name, scale, device):
    """pytorch/pytorch#105202: the root of a negative scale is NaN; a maximum taken before scaling is the minimum."""
    if name == "dense_indexer_kl":
        args = steps.arguments(name, device=device, dtype=torch.float64)
        q, k, starts, ends = (args[n].cpu() for n in ("q", "k", "starts", "ends"))
        args |= {"softmax_scale": scale, "lse": inputs.dense_lse(q, k, starts, ends, scale).to(device)}
    else:
        lists = ids([[0, 1, 2, -1], [-1, -1, -1, -1], [4, 4, 1, 0]])
        args = steps.arguments(name, lists, device=device, dtype=torch.float64, softmax_scale=scale)
    steps.check(name, args, 1e-9, 1e-9)


@pytest.mark.parametrize("size", [8, 30, 100])
def test_gradients_in_bfloat16_at_large_logits(size, device):
    """hao-ai-lab/FastVideo#1730: the backward rounded scale * k to bfloat16 before it recomputed exp(logit - lse). The
    error grows with the logit: invisible at size 1, gradients a million times too large at real activations."""
    lists = torch.randint(0, 50, (12, 32), dtype=torch.int32)
    args = steps.arguments("sparse_mla", lists, device=device, S=50, D=64, Dv=64, dtype=torch.bfloat16, sink=None)
    args["softmax_scale"] = 64**-0.5
    with torch.no_grad():
        args["q"] *= size
    logits = args["softmax_scale"] * args["q"].detach().float() @ args["kv"].detach().float().T
    assert logits.abs().max() > 3 * size
    steps.check("sparse_mla", args, gradient_tolerance=3e-2)
    args["lse"] = calls.run("sparse_mla", args)["lse"].detach()
    target = steps.arguments(
        "attention_target",
        lists,
        device=device,
        S=50,
        **{n: args[n] for n in ("q", "kv", "softmax_scale")},
        D=64,
        dtype=torch.bfloat16,
    )
    steps.check("attention_target", target, 2e-3)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_logits_far_beyond_exp_stay_finite(size, device):
    """pytorch/pytorch#125674, NVIDIA/cudnn-frontend#676: exp(logit - lse) above 1, then inf, where rounding makes a
    logit larger than the lse that it is part of."""
    args = steps.arguments(
        "sparse_mla", torch.randint(0, 50, (12, 32), dtype=torch.int32), device=device, S=50, D=64, Dv=64
    )
    with torch.no_grad():
        args["q"] *= size
    found = steps.run("sparse_mla", args, {"out": torch.ones(12, 3, 64, device=device)})
    for n, x in found.items():
        assert x.isfinite().all(), n
    largest = args["kv"].detach()[..., :64].abs().max()
    assert found["out"].abs().max() <= largest * 1.001
    # each row's weights sum to at most 1, and dS at most doubles |dO . v|
    assert found["grad_q"].abs().max() <= 2 * 0.4 * 64 * largest**2 * 1.01


def test_delta_is_formed_from_unrounded_products(device):
    """NVIDIA/cudnn-frontend#1134, Dao-AILab/flash-attention#2893: out * dO was rounded to bfloat16 before the sum, P
    and dP - delta before their product. A large part that all values share cancels in dP - delta only if neither is
    rounded: with one value for all keys the gradient is zero."""
    args = steps.arguments(
        "sparse_mla",
        torch.randint(0, 50, (16, 32), dtype=torch.int32),
        device=device,
        S=50,
        D=64,
        Dv=48,
        dtype=torch.bfloat16,
        sink=None,
    )
    with torch.no_grad():
        args["kv"][:, :48] = torch.tensor([8.0, -8.0], device=device).repeat(24)  # what exact weights would leave of it
    incoming = {"out": torch.randn(16, 3, 48, device=device).bfloat16()}
    found = steps.run("sparse_mla", args, incoming)
    assert torch.equal(found["out"], args["kv"].detach()[0, :48].expand(16, 3, 48))
    # |dO . v| is about 8 * sqrt(48) = 55; one product rounded to bfloat16 is off by up to 0.1
    assert found["grad_q"].abs().max() < 1e-3


# ---- what belongs to the caller


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_incoming_gradients_are_not_written_to(name, device):
    """NVIDIA/apex#1430, linkedin/Liger-Kernel#254: the backward used the incoming gradient as its scratch memory. So a
    second backward, and every other user of that tensor, saw garbage."""
    args = steps.arguments(name, device=device)
    outputs = calls.run(name, args)
    incoming = calls.incoming(name, outputs)
    kept = {n: g.clone() for n, g in incoming.items()}
    saved = {n: x.detach().clone() for n, x in outputs.items()}
    leaves = [args[n] for n in OPS[name].differentiable]
    first, second = (
        torch.autograd.grad([outputs[n] for n in incoming], leaves, list(incoming.values()), retain_graph=True)
        for _ in range(2)
    )
    calls.assert_all_equal(incoming, kept)
    calls.assert_all_equal(outputs, saved)
    for a, b in zip(first, second, strict=True):
        calls.assert_near(a, b, 1e-6)
        assert a.data_ptr() != b.data_ptr() or a.numel() == 0


SAVED = [(name, n) for name in DIFFERENTIABLE for n, x in inputs.arguments(name).items() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("name", "argument"), SAVED, ids=[f"{name}-{n}" for name, n in SAVED])
def test_a_buffer_that_is_written_between_forward_and_backward(name, argument, view):
    """pytorch/pytorch#24413, NVIDIA/Megatron-LM#6793: ids of the next micro-batch in the same buffer, and the backward
    of the first used them. What the backward needs is watched, also as part of a larger buffer; what it does not need
    may change."""
    args = steps.arguments(name)
    want = steps.run(
        name, args, {n: torch.ones_like(x) for n, x in calls.run(name, args).items() if n in OPS[name].through}
    )
    leaf = args[argument].detach().clone().requires_grad_(args[argument].requires_grad)
    buffer = torch.stack([leaf, leaf])
    args[argument] = buffer[0] if view else buffer[0].clone()
    outputs = calls.run(name, args)
    args[argument].detach().zero_()
    leaves = {n: leaf if n == argument else args[n] for n in OPS[name].differentiable}
    through = [outputs[n] for n in OPS[name].through]
    try:
        got = torch.autograd.grad(through, tuple(leaves.values()), [torch.ones_like(x) for x in through])
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert argument != "indices"
    for n, g in zip(leaves, got, strict=True):
        calls.assert_near(g, want[f"grad_{n}"], 1e-6, n)
