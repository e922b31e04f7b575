"""A block of indexer, attention and attached loss under activation checkpointing: whole, selective, compiled."""

import collections
import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dsa_ops
from dsa_ops import dispatch

ROWS, WIDTH, HEADS, LATENT, INDEX_HEADS, TOPK, SCALE = 13, 12, 3, 8, 2, 4, 0.5


class Block(torch.nn.Module):
    """The indexer reads detached activations and learns from its own loss alone, as in DSAttention."""

    def __init__(self):
        super().__init__()
        index = INDEX_HEADS * 4 + 4 + INDEX_HEADS
        self.attention = torch.nn.Linear(WIDTH, HEADS * LATENT + LATENT, dtype=torch.float64)
        self.indexer = torch.nn.Linear(WIDTH, index, dtype=torch.float64)
        self.out = torch.nn.Linear(HEADS * LATENT, WIDTH, dtype=torch.float64)

    def forward(self, x):
        q, kv = self.attention(x).split((HEADS * LATENT, LATENT), -1)
        index_q, index_k, weights = self.indexer(x.detach()).split((INDEX_HEADS * 4, 4, INDEX_HEADS), -1)
        indices, scores = dsa_ops.indexer_topk(index_q.unflatten(-1, (INDEX_HEADS, 4)), index_k, weights, topk=TOPK)
        q = q.unflatten(-1, (HEADS, LATENT))
        out, lse = dsa_ops.sparse_mla(q, kv, indices, SCALE)
        loss = dsa_ops.indexer_loss(q, kv, lse, indices, scores, SCALE)
        return dsa_ops.attach_loss(x + self.out(out.flatten(-2)), loss)


def inputs_of(*seeds):
    return [
        torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(s)).requires_grad_()
        for s in seeds
    ]


def gradients(block, xs):
    found = {name: p.grad for name, p in block.named_parameters()} | {f"x{i}": x.grad for i, x in enumerate(xs)}
    block.zero_grad()
    for x in xs:
        x.grad = None
    return found


def assert_same(found, want):
    assert found.keys() == want.keys()
    for name, grad in want.items():
        assert grad is not None and torch.equal(found[name], grad), name
    assert want["indexer.weight"].abs().sum() > 0, "the attached loss is at work"


@pytest.fixture
def ran(monkeypatch):
    """Every op that runs: its name and its result, in order. Ops inside a compiled graph too."""
    calls, run = [], dispatch.run

    def recorded(name, *args):
        result = run(name, *args)
        calls.append((name, result))
        return result

    monkeypatch.setattr(dispatch, "run", recorded)
    return calls


def count(ran):
    return collections.Counter(name for name, _ in ran)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_recomputed_selection_is_the_first_one(ran, reentrant):
    block, (x,) = Block(), inputs_of(0)
    block(x).square().sum().backward()
    want = gradients(block, [x])
    ran.clear()
    checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
    assert_same(gradients(block, [x]), want)
    first, again = (result for name, result in ran if name == "indexer_topk")
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_outstanding_forwards(reentrant, order):
    """As in a pipeline: forward, forward, backward, backward."""
    block, xs = Block(), inputs_of(1, 2)
    for x in xs:
        block(x).square().sum().backward()
    want = gradients(block, xs)
    outs = [checkpoint(block, x, use_reentrant=reentrant) for x in xs]
    for i in order:
        outs[i].square().sum().backward()
    found = gradients(block, xs)
    for name, grad in want.items():
        torch.testing.assert_close(found[name], grad, msg=name)  # the order of two backwards is that of a sum


def test_a_checkpoint_inside_a_checkpoint():
    block, (x,) = Block(), inputs_of(3)
    block(block(x)).square().sum().backward()
    want = gradients(block, [x])

    def two(x):
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    checkpoint(two, x, use_reentrant=False).square().sum().backward()
    assert_same(gradients(block, [x]), want)


def policy_of(*saved):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


OPS = ("indexer_topk", "sparse_mla", "attention_target", "indexer_kl")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kept", [OPS[:1], OPS[:2], OPS[:3]], ids=len)
def test_what_a_policy_keeps_runs_once(ran, kept, compiled):
    """torch.ops.dsa.* in a selective policy, which torch.compile's partitioner honours too."""
    torch._dynamo.reset()
    block, (x,) = Block(), inputs_of(4)
    block(x).square().sum().backward()
    want = gradients(block, [x])
    contexts = policy_of(*(getattr(torch.ops.dsa, name).default for name in kept))

    def run(x):
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    ran.clear()
    (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x).square().sum().backward()
    assert_same(gradients(block, [x]), want)
    found = count(ran)
    assert {name: found[name] for name in kept} == dict.fromkeys(kept, 1)
    if not compiled:  # a partitioner recomputes only what the backward reads
        others = [name for name in OPS if name not in kept]
        assert {name: found[name] for name in others} == dict.fromkeys(others, 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_without_a_policy_the_selection_runs_twice(ran, compiled):
    """The count of the test above can fail."""
    torch._dynamo.reset()
    block, (x,) = Block(), inputs_of(5)

    def run(x):
        return checkpoint(block, x, use_reentrant=False)

    (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x).square().sum().backward()
    assert count(ran)["indexer_topk"] == 2


@pytest.mark.parametrize("pin_memory", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_save_on_cpu(pin_memory):
    device = "cuda" if pin_memory else "cpu"
    block, (x,) = Block().to(device), inputs_of(6)
    x = x.detach().to(device).requires_grad_()
    block(x).square().sum().backward()
    want = gradients(block, [x])
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        out = block(x)
    out.square().sum().backward()
    found = gradients(block, [x])
    for name, grad in want.items():
        torch.testing.assert_close(found[name], grad, msg=name)
