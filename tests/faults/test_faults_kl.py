"""The indexer's loss: what other implementations got wrong. Values and masks: test_losses.py."""

import pytest
import torch

import calls
import dsa_ops
import inputs
import oracle
import steps
from steps import ids

SCALE = 0.3


class Layer:
    """An indexer and its teacher over lists with holes: leaves by name, and the loss of some of the rows."""

    def __init__(self, rows=8, keys=12, heads=3, slots=5, device="cpu", dtype=torch.float64):
        def leaf(*shape):
            return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

        self.q, self.kv = leaf(rows, heads, 6), leaf(keys, 6)
        self.index_q, self.index_k, self.weights = leaf(rows, 2, 4), leaf(keys, 4), leaf(rows, 2)
        self.indices = torch.randint(-1, keys, (rows, slots), dtype=torch.int32, device=device)

    def loss(self, rows=slice(None), indices=None, **options):
        indices = self.indices if indices is None else indices
        q, indices = self.q[rows], indices[rows]
        scores = dsa_ops.indexer_scores(self.index_q[rows], self.index_k, self.weights[rows], indices)
        lse = dsa_ops.sparse_mla(q, self.kv, indices, SCALE, 4).lse
        return dsa_ops.indexer_loss(q, self.kv, lse, indices, scores, SCALE, **options)

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.index_q, self.index_k, self.weights))


def assert_all_near(got, want):
    for a, b in zip(got, want, strict=True):
        calls.assert_near(a, b)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_of_padding_leave_numerator_and_divisor(reduction, device):
    """NVIDIA/Megatron-LM#4894, PaddlePaddle/PaddleFleet#1291, PaddlePaddle/PaddleFleet#1303: the mean over all rows
    changes with packing, and rows that the loss mask takes out train the indexer all the same."""
    layer = Layer(device=device)
    mask = torch.tensor([True, False, True, True, False, False, True, True], device=device)
    got = layer.loss(row_mask=mask, reduction=reduction)
    want = layer.loss(rows=mask, reduction=reduction)
    calls.assert_near(got, want)
    grads = layer.gradients(got)
    assert_all_near(grads, layer.gradients(want))
    assert not grads[0][~mask].any() and not grads[2][~mask].any() and grads[0][mask].any()


def test_the_warm_up_loss_has_the_same_rule_for_rows_that_do_not_count(device):
    """NVIDIA/Megatron-LM#4894, PaddlePaddle/PaddleFleet#1291: here the weights of the rows say what counts."""
    args = steps.arguments("dense_indexer_kl", device=device, dtype=torch.float64)
    kept = [0, 2, 5]
    weight = torch.zeros(7, dtype=torch.float64, device=device)
    weight[kept] = 1 / 3
    part = {n: x[kept] if n in calls.ROWS and isinstance(x, torch.Tensor) else x for n, x in args.items()}
    one = {"loss": torch.ones((), dtype=torch.float64, device=device)}
    got = steps.run("dense_indexer_kl", {**args, "row_weight": weight}, one)
    want = steps.run("dense_indexer_kl", {**part, "row_weight": weight[kept]}, one)
    calls.assert_near(got["loss"], want["loss"])
    assert not got["grad_index_q"][[1, 3, 4, 6]].any()
    calls.assert_near(got["grad_index_k"], want["grad_index_k"])


@pytest.mark.parametrize("case", ["coefficient 0", "no keys", "all masked", "no rows"])
def test_the_indexer_always_gets_a_gradient(case, device):
    """NVIDIA/Megatron-LM#5643: without one, the bookkeeping of a data-parallel wrapper fails in the next step."""
    layer = Layer(device=device)
    if case == "coefficient 0":
        loss = layer.loss(coeff=0.0)
    elif case == "no keys":
        loss = layer.loss(indices=torch.full_like(layer.indices, -1))
    elif case == "all masked":
        loss = layer.loss(row_mask=torch.zeros(8, dtype=torch.bool, device=device))
    else:
        loss = layer.loss(rows=slice(0, 0))
    assert loss.item() == 0
    for grad in layer.gradients(loss):
        assert grad is not None and not grad.any()


def test_the_teacher_gets_no_gradient_and_the_student_all_of_it(device):
    """ByteDance-Seed/VeOmni#1134: an op that returns ids alone froze the indexer, 226 million parameters, silently."""
    layer = Layer(device=device)
    layer.loss().backward()
    assert layer.q.grad is None and layer.kv.grad is None
    assert all(x.grad.any() for x in (layer.index_q, layer.index_k, layer.weights))


def test_nothing_is_kept_for_an_indexer_that_does_not_learn(device):
    """NVIDIA/Megatron-LM#4897, NVIDIA/Megatron-LM#5099: gigabytes of zero gradients were kept in evaluation."""
    layer = Layer(device=device)
    index = [x.detach() for x in (layer.index_q, layer.index_k, layer.weights)]
    lse = dsa_ops.sparse_mla(layer.q, layer.kv, layer.indices, SCALE, 4).lse
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        scores = dsa_ops.indexer_scores(*index, layer.indices)
        loss = dsa_ops.indexer_loss(layer.q, layer.kv, lse, layer.indices, scores, SCALE)
        limits = steps.bounds([0] * 8, [12] * 8, loss.device)
        dense = dsa_ops.dense_indexer_kl(*index, layer.q, layer.kv, lse.detach(), **limits, softmax_scale=SCALE)
        kl = dsa_ops.indexer_kl(torch.rand_like(scores, requires_grad=True), scores, layer.indices)
    assert not loss.requires_grad and not dense.loss.requires_grad and not kl.requires_grad and saved == []


def test_heads_are_summed_before_the_target_is_normalised(device):
    """ByteDance-Seed/VeOmni#1134, NVIDIA/Megatron-LM#5960: ranks with part of the heads normalised what they had.

    The share of a head whose probabilities lie outside the selection is small; normalised by itself it would weigh as
    much as every other.
    """
    layer = Layer(heads=4, device=device)
    layer.indices = layer.indices.clamp(min=0)
    q, kv = layer.q.detach(), layer.kv.detach()
    lse = torch.einsum("thd,sd->ths", q, kv).mul(SCALE).logsumexp(-1)  # over every key
    lse[:, 3] += 5
    target = dsa_ops.attention_target(q, kv, lse, layer.indices, SCALE)
    parts = [dsa_ops.attention_target(q[:, h], kv, lse[:, h], layer.indices, SCALE) for h in (slice(0, 1), slice(1, 4))]
    calls.assert_near(sum(parts), target)
    scores = torch.randn(8, 5, dtype=torch.float64, device=device)
    whole = dsa_ops.indexer_kl(target, scores, layer.indices)
    calls.assert_near(dsa_ops.indexer_kl(sum(parts), scores, layer.indices), whole)
    wrong = sum(p / p.sum(-1, keepdim=True) for p in parts)
    assert (dsa_ops.indexer_kl(wrong, scores, layer.indices) - whole).abs().max() > 1e-3


def test_the_teachers_denominator_is_the_one_that_it_is_given(device):
    """NVIDIA/Megatron-LM#6349, NVIDIA/Megatron-LM#5776: the target was normalised over the selected keys alone, though
    attention also saw a window and a sink. Heads that look elsewhere weigh less, so the normalised target differs."""
    lists = ids([[0, 1, 2, 3]], 5)
    args = steps.arguments("attention_target", lists, device=device, dtype=torch.float64, S=9)
    selected = calls.run("attention_target", args)["target"]
    sink = torch.tensor([0.0, 3.0, -5.0], dtype=torch.float64, device=device)
    everything = torch.einsum("thd,sd->ths", args["q"], args["kv"]).mul(args["softmax_scale"]).logsumexp(-1)
    full = {**args, "lse": torch.logaddexp(everything, sink)}
    target = calls.run("attention_target", full)["target"]
    calls.assert_near(target, calls.reference("attention_target", full)["target"])
    calls.assert_near(selected.sum(-1), torch.full((5,), 3.0, dtype=torch.float64))
    assert (target.sum(-1) < 2.9).all()

    def normalised(t):
        return t / t.sum(-1, keepdim=True)

    assert (normalised(target) - normalised(selected)).abs().max() > 0.01


@pytest.mark.parametrize("spread", [100.0, 1e4, 1e30])
@pytest.mark.parametrize("name", ["indexer_kl", "dense_indexer_kl"])
def test_a_probability_that_underflows_has_a_finite_logarithm(name, spread, device):
    """Open-Superintelligence-Lab/deepseek-sparse-attention-research#7: softmax().log() is -inf for a score 104 below
    the largest, the loss infinite and its gradient NaN."""
    if name == "indexer_kl":
        scores = torch.tensor([[0.0, -spread, spread, 3.0], [spread, spread, -spread, 0.0]])
        args = steps.arguments(name, ids([[0, 1, 2, -1], [4, 3, 2, 1]]), device=device, scores=scores)
        steps.check(name, args)
        return
    args = steps.arguments(name, device=device, relu=False)
    with torch.no_grad():
        args["index_q"] *= spread
    steps.check(name, args)


def test_targets_that_underflow_and_scores_without_a_finite_value(device):
    """Open-Superintelligence-Lab/deepseek-sparse-attention-research#7: and 0 * log 0 is 0, also where the indexer
    gives a key no probability at all."""
    target = torch.tensor([[1.0, 0.0, 1e-45], [0.5, 0.5, 0.0]])
    scores = torch.tensor([[0.0, -torch.inf, -200.0], [1.0, 2.0, -torch.inf]])
    args = steps.arguments("indexer_kl", ids([[0, 1, 2], [3, 4, 5]]), device=device, target=target, scores=scores)
    found = steps.run("indexer_kl", args, {"kl": torch.ones(2, device=device)})
    p = scores.detach().double().softmax(-1)
    want = torch.stack([-p[0, 0].log(), -0.5 * (p[1, 0] * p[1, 1] * 4).log()])
    calls.assert_near(found["kl"], want)
    calls.assert_near(found["grad_scores"], p - target.double() / target.double().sum(-1, keepdim=True))


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_the_number_of_micro_batches_does_not_change_the_gradient(batches, device):
    """NVIDIA/Megatron-LM#4070, NVIDIA/Megatron-LM#5244: the main loss was divided by their number, the indexer's loss,
    which is attached on the way, was not."""
    layer = Layer(device=device)
    mask = torch.ones(8, dtype=torch.bool, device=device)
    want = layer.gradients(layer.loss(row_mask=mask))
    scale = torch.tensor(1 / batches, dtype=torch.float64, device=device)
    for rows in torch.arange(8, device=device).chunk(batches):
        loss = layer.loss(rows=rows, row_mask=mask[rows])
        hidden = dsa_ops.attach_loss(layer.q[rows].flatten(1), loss, scale)
        (hidden.sum() / batches).backward()
    assert_all_near((layer.index_q.grad, layer.index_k.grad, layer.weights.grad), want)
    calls.assert_near(layer.q.grad, torch.full_like(layer.q, 1 / batches))


@pytest.mark.parametrize("coeff", [0.001, 7.0])
def test_the_coefficient_is_a_factor_and_not_a_switch(coeff, device):
    """NVIDIA-NeMo/Automodel#1408: the coefficient was tested for > 0 and never multiplied, and the loss was attached
    to a tensor that nobody used."""
    layer = Layer(device=device)
    want = [coeff * g for g in layer.gradients(layer.loss())]
    for factor in (coeff, torch.tensor(coeff, device=device)):
        hidden = layer.q.detach().clone().requires_grad_()
        dsa_ops.attach_loss(hidden, layer.loss(coeff=factor)).sum().backward()
        found = [x.grad for x in (layer.index_q, layer.index_k, layer.weights)]
        for got, expected in zip(found, want, strict=True):
            calls.assert_near(got, expected, 1e-7)
        layer.index_q.grad = layer.index_k.grad = layer.weights.grad = None


def test_a_recomputed_layer_counts_its_loss_once(device):
    """NVIDIA/Megatron-LM#1514, NVIDIA/Megatron-LM#1331: under recomputation the forward runs twice, and so did what
    added its loss to a list on the side."""
    from torch.utils.checkpoint import checkpoint

    layer = Layer(device=device)
    want = layer.gradients(layer.loss())

    def body(x):
        return dsa_ops.attach_loss(x * 2, layer.loss())

    checkpoint(
        body, torch.ones(3, device=device, requires_grad=True, dtype=torch.float64), use_reentrant=False
    ).sum().backward()
    assert_all_near((layer.index_q.grad, layer.index_k.grad, layer.weights.grad), want)


def test_the_oracle_knows_the_sum_over_heads():
    """The tests above lean on it: the target of two equal heads is twice that of one."""
    args = steps.arguments("attention_target", ids([[0, 1, -1]], 2), H=1, dtype=torch.float64)
    args = calls.on_cpu(args)
    twice = {**args, "q": args["q"].repeat(1, 2, 1), "lse": args["lse"].repeat(1, 2)}
    calls.assert_near(oracle.attention_target(**twice), 2 * oracle.attention_target(**args))
    assert args["softmax_scale"] == inputs.SCALE
