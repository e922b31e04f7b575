"""Values and gradients of every op against the float64 oracle."""

import pytest
import torch
from hypothesis import given

import calls
import inputs
from calls import few
from inputs import BACKWARDS, CASES, DIFFERENTIABLE, OPS

# In the backward, `out` comes back rounded to its dtype, and so do the gradients.
GRADIENT = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def acts_in(case):
    """Tolerance of gradients: exact dtypes keep their own, rounded inputs cost more."""
    return GRADIENT.get(case.dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPS)
def test_forward(name, case, device):
    args = inputs.arguments(name, CASES[case], device=device)
    got = calls.run(name, args)
    calls.assert_all_near(got, calls.reference(name, args))
    for n, x in got.items():
        wanted = {"indices": torch.int32, "out": CASES[case].dtype}.get(n, CASES[case].accumulator)
        assert x.dtype == wanted and x.is_contiguous() and not x._is_view() and x.device.type == device, n


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name, case, device):
    args = inputs.arguments(name, CASES[case], device=device, grad=True)
    outputs = calls.run(name, args)
    grads = calls.incoming(name, outputs)
    got = calls.gradients(name, args, grads, outputs)
    calls.assert_all_near(got, calls.reference_gradients(name, args, grads), acts_in(CASES[case]))
    for n, g in got.items():
        assert g.dtype == args[n].dtype, n


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BACKWARDS)
def test_backward_op(name, case, device):
    args = inputs.arguments(name, CASES[case], device=device)
    got = calls.run(name, args)
    calls.assert_all_near(got, calls.reference(name, args), acts_in(CASES[case]))
    for n, x in got.items():
        assert x.is_contiguous() and not x._is_view() and (args[n] is None or x.dtype == args[n].dtype), n


@pytest.mark.parametrize("name", OPS)
@few
@given(case=inputs.cases(dtype=torch.float64))
def test_any_shape(name, case):
    args = inputs.arguments(name, case, grad=True)
    outputs = calls.run(name, args)
    calls.assert_all_near(outputs, calls.reference(name, args))
    if name in DIFFERENTIABLE:
        grads = calls.incoming(name, outputs)
        got = calls.gradients(name, args, grads, outputs)
        calls.assert_all_near(got, calls.reference_gradients(name, args, grads))


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name, optional, device):
    case = inputs.Case(T=4, S=6, H=2, D=4, Dv=3, Di=3, K=3, dtype=torch.float64)
    args = inputs.arguments(name, case, device=device, grad=True, optional=optional, expanded_keys=optional)
    wanted = [n for n in OPS[name].differentiable if args[n] is not None]

    def outputs(*leaves):
        found = calls.run(name, {**args, **dict(zip(wanted, leaves, strict=True))})
        return tuple(
            torch.where(found[n].isfinite(), found[n], 0.0) for n in OPS[name].through
        )  # -inf has no difference

    torch.autograd.gradcheck(outputs, [args[n] for n in wanted])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_each_output_alone_carries_its_gradient(name, device):
    args = inputs.arguments(name, device=device, grad=True, dtype=torch.float64)
    for n, grad in calls.incoming(name, calls.run(name, args)).items():
        got = calls.gradients(name, args, {n: grad})
        calls.assert_all_near(got, calls.reference_gradients(name, args, {n: grad}))


def test_no_gradient_and_a_gradient_of_zeros_agree(device):
    args = inputs.arguments("sparse_mla_backward", device=device, dtype=torch.float64)
    for n in ("grad_out", "grad_lse"):
        none = calls.run("sparse_mla_backward", {**args, n: None})
        zeros = calls.run("sparse_mla_backward", {**args, n: torch.zeros_like(args[n])})
        calls.assert_all_near(none, zeros)
    nothing = calls.run("sparse_mla_backward", {**args, "grad_out": None, "grad_lse": None})
    assert all(not g.any() for g in nothing.values())


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_incoming_gradients_of_any_strides(name, layout, device):
    args = inputs.arguments(name, device=device, grad=True)
    outputs = calls.run(name, args)
    grads = {n: inputs.relayout(g, layout) if g.dim() else g for n, g in calls.incoming(name, outputs).items()}
    strided = calls.gradients(name, args, grads)
    packed = calls.gradients(name, args, {n: g.contiguous() for n, g in grads.items()})
    calls.assert_all_near(strided, packed, 1e-6)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_sum_backward(name, device):
    """`.sum()` hands the backward op a gradient with strides 0."""
    args = inputs.arguments(name, device=device, grad=True)
    output = calls.run(name, args)[OPS[name].through[0]]
    output.sum().backward()
    want = calls.reference_gradients(name, args, {OPS[name].through[0]: torch.ones_like(output)})
    calls.assert_all_near({n: args[n].grad for n in want}, want)


def test_float32_results_of_bfloat16_inputs_are_accurate_to_float32(device):
    """Products are accumulated in float32, and weights are not rounded on the way."""
    args = inputs.arguments("indexer_scores", device=device, dtype=torch.bfloat16, Di=64, Hi=8)
    calls.assert_near(
        calls.run("indexer_scores", args)["scores"], calls.reference("indexer_scores", args)["scores"], 1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_tf32_does_not_reach_the_results_of_bfloat16_inputs(name):
    """The setting is for the caller's float32 products; head weights and sums stay float32."""
    case = inputs.Case(T=65, S=300, H=4, D=64, Dv=48, Hi=16, Di=32, K=64, dtype=torch.bfloat16, optional=False)
    args = inputs.arguments(name, case, device="cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        got = calls.run(name, args)
    finally:
        torch.set_float32_matmul_precision(before)
    calls.assert_all_near(got, calls.reference(name, args))


def test_relu_has_gradient_zero_at_zero(device):
    q, k = torch.zeros(1, 1, 2, device=device), torch.ones(1, 2, device=device)
    weights, ids = torch.ones(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    grad_q, grad_k, grad_weights = calls.op("indexer_scores_backward")(
        torch.ones(1, 1, device=device), q, k, weights, ids
    )
    assert not grad_q.any() and not grad_k.any() and not grad_weights.any()


def test_kl_gradient_is_p_minus_t_where_t_is_tiny(device):
    target = torch.tensor([[1.0, 1e-30, 0.0]], device=device)
    scores, ids = torch.zeros(1, 3, device=device), torch.arange(3, dtype=torch.int32, device=device)[None]
    grad = calls.op("indexer_kl_backward")(torch.ones(1, device=device), target, scores, ids)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[1 / 3 - 1, 1 / 3, 1 / 3]]))


@pytest.mark.parametrize("total", [9.9e-11, 1.1e-10])
def test_kl_row_with_hardly_any_target_counts_as_empty(total, device):
    target = torch.tensor([[total, 0.0]], device=device)
    scores, ids = torch.tensor([[0.0, 1.0]], device=device), torch.tensor([[3, 0]], dtype=torch.int32, device=device)
    kl = calls.op("indexer_kl")(target, scores, ids)
    grad = calls.op("indexer_kl_backward")(torch.ones(1, device=device), target, scores, ids)
    assert bool(kl.any()) == bool(grad.any()) == (total > 1e-10)


def test_dense_kl_shares_of_head_shards_add_up(device):
    """Cross entropies of the shards minus the entropy of the whole target are the KL; gradients just add."""
    args = inputs.arguments("dense_indexer_kl", device=device, grad=True, dtype=torch.float64, H=4)
    loss = {"loss": torch.ones((), dtype=torch.float64, device=device)}
    whole = calls.gradients("dense_indexer_kl", args, loss)
    shards = [
        calls.gradients(
            "dense_indexer_kl", {**args, "q": args["q"][:, h], "lse": args["lse"][:, h], "total_heads": 4}, loss
        )
        for h in (slice(0, 1), slice(1, 4))
    ]
    calls.assert_all_near({n: shards[0][n] + shards[1][n] for n in whole}, whole)


def test_total_heads_equal_to_the_heads_is_the_default(device):
    args = inputs.arguments("dense_indexer_kl", device=device)
    same = calls.run("dense_indexer_kl", {**args, "total_heads": 3})
    calls.assert_all_equal(calls.run("dense_indexer_kl", args), same)
